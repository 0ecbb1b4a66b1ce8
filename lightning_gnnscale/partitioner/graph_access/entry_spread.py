"""Entries spread over the buckets of their rows through one open chunk a bucket, written when it is full."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...jit import kernel

_SPARE_CHUNKS = 32
_COARSE_CELLS = 1 << 13
_FREE, _FULL = range(2)  # positions in OpenChunks.counts


class OpenChunks(NamedTuple):
    """One chunk that is being filled for each bucket of a round, and spare ones; all in flat arrays, chunk after chunk.

    Attributes:
        coarse, shift: Bucket of every (2**shift)-th row; the bucket of any row is a few steps further on.
        first_row: (num_buckets + 1,) int64.
        first_bucket, last_bucket: First bucket of the round, and the end of its buckets (exclusive).
        chunks: (num_chunks, chunk_bytes) uint8.
        neighbors, rows: The memory of `chunks` as flat arrays of ids and of uint16.
        log_chunk: Base-2 logarithm of the number of entries in a chunk.
        cursor: (num_buckets,) int64 chunk * 2**log_chunk + entries in it; -1 for buckets of other rounds.
        free, full: (_SPARE_CHUNKS,) int64 free chunks, and (_SPARE_CHUNKS, 2) int64 (bucket, chunk) of full ones.
        counts: (2,) int64 number of free chunks, and of full ones.
    """

    coarse: np.ndarray
    shift: int
    first_row: np.ndarray
    first_bucket: int
    last_bucket: int
    chunks: np.ndarray
    neighbors: np.ndarray
    rows: np.ndarray
    log_chunk: int
    cursor: np.ndarray
    free: np.ndarray
    full: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, first_row: np.ndarray, buckets: range, chunk: int, dtype: np.dtype) -> "OpenChunks":
        """Open a chunk for each of a round's buckets.

        Args:
            first_row: (num_buckets + 1,) int64 first rows of all buckets, then the number of rows.
            buckets: Range of the round's buckets.
            chunk: Number of entries in a chunk, a power of two.
            dtype: Dtype of the neighbours.
        """
        num_rows = max(1, int(first_row[-1]))
        shift = max(0, (num_rows - 1).bit_length() - _COARSE_CELLS.bit_length() + 1)
        cursor = np.full(len(first_row) - 1, -1, np.int64)
        cursor[buckets.start : buckets.stop] = np.arange(len(buckets)) * chunk
        chunks = np.empty((len(buckets) + _SPARE_CHUNKS, chunk * (dtype.itemsize + 2)), np.uint8)
        return cls(
            coarse=(np.searchsorted(first_row, np.arange(0, num_rows, 1 << shift), "right") - 1).astype(np.int32),
            shift=shift,
            first_row=first_row,
            first_bucket=buckets.start,
            last_bucket=buckets.stop,
            chunks=chunks,
            neighbors=chunks.reshape(-1).view(dtype),
            rows=chunks.reshape(-1).view(np.uint16),
            log_chunk=chunk.bit_length() - 1,
            cursor=cursor,
            free=np.arange(len(chunks) - 1, len(buckets) - 1, -1),
            full=np.empty((_SPARE_CHUNKS, 2), np.int64),
            counts=np.array([_SPARE_CHUNKS, 0]),
        )

    def take_full(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the bucket and the bytes of every full chunk, then free them all."""
        num_free, num_full = self.counts.tolist()
        for bucket, chunk in self.full[:num_full].tolist():
            yield bucket, self.chunks[chunk]
        self.free[num_free : num_free + num_full] = self.full[:num_full, 1]
        self.counts[_FREE] += num_full
        self.counts[_FULL] = 0

    def take_begun(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the bucket and the bytes of every chunk that is partly full; behind its entries they are arbitrary."""
        for bucket in range(self.first_bucket, self.last_bucket):
            position = int(self.cursor[bucket])
            if position & ((1 << self.log_chunk) - 1):
                yield bucket, self.chunks[position >> self.log_chunk]


@kernel
def spread_edges(src, dst, start, opened):
    """Append both entries of the edges from `start` on, as far as their rows belong to the round.

    Returns:
        How many edges are done: where fewer than two chunks are free, `take_full` has to come before the next ones.
    """
    coarse, shift, first_row, cursor = opened.coarse, opened.shift, opened.first_row, opened.cursor
    neighbors, rows, log_chunk = opened.neighbors, opened.rows, opened.log_chunk
    first_of_round, end_of_round = first_row[opened.first_bucket], first_row[opened.last_bucket]
    last = (np.int64(1) << log_chunk) - 1
    neighbor_gap = 2 * (last + 1) // neighbors.itemsize
    row_gap = neighbors.itemsize * (last + 1) // 2
    num_free, num_full = opened.counts[_FREE], opened.counts[_FULL]
    done = len(src)
    for i in range(start, len(src)):
        for end in range(2):
            row, neighbor = (src[i], dst[i]) if end == 0 else (dst[i], src[i])
            if row < first_of_round or row >= end_of_round:
                continue
            bucket = np.int64(coarse[row >> shift])
            while row >= first_row[bucket + 1]:
                bucket += 1
            position = cursor[bucket]
            chunk = position >> log_chunk
            neighbors[position + chunk * neighbor_gap] = neighbor
            rows[position + (chunk + 1) * row_gap] = row - first_row[bucket]
            position += 1
            if position & last == 0:
                opened.full[num_full, 0], opened.full[num_full, 1] = bucket, chunk
                num_full += 1
                num_free -= 1
                position = opened.free[num_free] << log_chunk
            cursor[bucket] = position
        if num_free < 2:
            done = i + 1
            break
    opened.counts[_FREE], opened.counts[_FULL] = num_free, num_full
    return done
