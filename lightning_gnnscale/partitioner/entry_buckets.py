"""(row, neighbour) entries spread over buckets of one scratch file, and each bucket sorted to rows in place.

A bucket is a range of rows. Its entries come as chunks of CHUNK neighbours followed by CHUNK row numbers of two bytes,
relative to the bucket's first row: 6 bytes an entry (10 with int64 ids). Sorted, the neighbours alone remain, packed
from the front of the file, which never reach a bucket that has not been read yet.
"""

import os

import numpy as np

from ..errors import EdgeStreamError
from ..jit import kernel

MAX_ROWS = 1 << 16  # rows of a bucket: their numbers fit two bytes
MIN_ENTRIES, MAX_ENTRIES = 1 << 19, 1 << 21  # of a bucket, unless it is one row: what is sorted in memory at a time
MIN_CHUNK, MAX_CHUNK = 1 << 11, 1 << 13  # entries
CHUNK_BYTES = 1 << 23  # open chunks of all buckets together, where MIN_CHUNK allows it
READ_BYTES = 1 << 20

_SPARE_CHUNKS = 32
_COARSE_CELLS = 1 << 13
_FREE, _FULL = range(2)  # positions in EntryBuckets.counts


class EntryBuckets:
    """Takes the entries of a symmetric adjacency in any order, and puts the rows one after the other into a file.

    Args:
        degree: (num_nodes,) int32 or int64, entries that each row will get at most; not copied.
        name: of the source, for messages.

    Attributes:
        file_bytes: size of the file when all entries have come: the peak.
    """

    def __init__(self, degree: np.ndarray, name: str):
        self.degree, self.name = degree, name
        num_entries = int(degree.sum(dtype=np.int64))
        max_entries = int(np.clip(num_entries >> 8, MIN_ENTRIES, MAX_ENTRIES))
        self.first_row = cut_ranges(degree, max_entries, MAX_ROWS)
        self.num_buckets = len(self.first_row) - 1
        self._entries = np.zeros(self.num_buckets, np.int64)
        _sum_ranges(degree, self.first_row, self._entries)
        self.chunk = MAX_CHUNK
        while self.chunk > MIN_CHUNK and self.num_buckets * self._chunk_bytes() > CHUNK_BYTES:
            self.chunk //= 2
        if num_entries < self.chunk:
            self.chunk = max(64, 1 << num_entries.bit_length())
        self._first_chunk = np.zeros(self.num_buckets + 1, np.int64)
        np.cumsum(-(-self._entries // self.chunk), out=self._first_chunk[1:])
        self.file_bytes = int(self._first_chunk[-1]) * self._chunk_bytes()

    def spread(self, file, blocks) -> None:
        """Write both entries of every edge to the buckets.

        Args:
            file: an empty unbuffered file.
            blocks: (src, dst) pairs of arrays, ids in [0, num_nodes).

        Cost: O(edges) time; CHUNK_BYTES of memory, more from 700 buckets on.
        """
        num_chunks = self.num_buckets + _SPARE_CHUNKS
        chunks = np.empty((num_chunks, self._chunk_bytes()), np.uint8)
        neighbors, rows = chunks.reshape(-1).view(self.degree.dtype), chunks.reshape(-1).view(np.uint16)
        cursor = np.arange(self.num_buckets, dtype=np.int64) * self.chunk
        free = np.arange(num_chunks - 1, self.num_buckets - 1, -1)
        full = np.empty((_SPARE_CHUNKS, 2), np.int64)
        counts = np.array([_SPARE_CHUNKS, 0])
        written = np.zeros(self.num_buckets, np.int64)
        coarse, shift = self._coarse_table()
        log_chunk = self.chunk.bit_length() - 1
        for src, dst in blocks:
            done = 0
            while done < len(src):
                done = _spread_edges(
                    src,
                    dst,
                    done,
                    coarse,
                    shift,
                    self.first_row,
                    neighbors,
                    rows,
                    log_chunk,
                    cursor,
                    free,
                    full,
                    counts,
                )
                for bucket, chunk in full[: counts[_FULL]].tolist():
                    self._write(file, bucket, chunks[chunk], written)
                free[counts[_FREE] : counts[_FREE] + counts[_FULL]] = full[: counts[_FULL], 1]
                counts[_FREE] += counts[_FULL]
                counts[_FULL] = 0
        for bucket, position in enumerate(cursor.tolist()):
            if position & (self.chunk - 1):
                self._write(file, bucket, chunks[position >> log_chunk], written)

    def sort(self, file, drop_repeats: bool, progress=None) -> None:
        """Put the rows one after the other to the front of the file, and cut off the rest.

        Args:
            file: what `spread` has filled.
            drop_repeats: keep the first of several equal neighbours of a row; `degree` is corrected.
            progress: called as progress("adjacency sort", entries done, entries in all) once a bucket.

        Raises:
            EdgeStreamError: a row has got another number of entries than its degree.

        Cost: O(entries) time; the largest bucket's neighbours and READ_BYTES of memory.
        """
        dtype, num_entries = self.degree.dtype, int(self._entries.sum())
        sorted_neighbors = np.empty(int(self._entries.max(initial=0)), dtype)
        cursor = np.empty(int(np.diff(self.first_row).max(initial=0)) + 1, dtype)
        chunks = np.empty((max(1, READ_BYTES // self._chunk_bytes()), self._chunk_bytes()), np.uint8)
        position = done = 0
        for bucket in range(self.num_buckets):
            rows = slice(self.first_row[bucket], self.first_row[bucket + 1])
            count = int(self._entries[bucket])
            out, degree = sorted_neighbors[:count], self.degree[rows]
            _start_rows(degree, cursor)
            self._place_bucket(file, bucket, chunks, cursor, out)
            if not _rows_are_full(degree, cursor):
                raise EdgeStreamError(f"{self.name}: the edges changed while they were partitioned")
            if drop_repeats:
                count = _drop_repeats(out, degree, np.empty(_table_size(int(degree.max(initial=0))), dtype))
            write_at(file, out[:count], position)
            position += count * dtype.itemsize
            done += len(out)
            if progress is not None:
                progress("adjacency sort", done, num_entries)
        file.truncate(position)

    def _place_bucket(self, file, bucket: int, chunks: np.ndarray, cursor: np.ndarray, out: np.ndarray) -> None:
        left, chunk_id, last = len(out), int(self._first_chunk[bucket]), int(self._first_chunk[bucket + 1])
        while chunk_id < last:
            piece = chunks[: min(len(chunks), last - chunk_id)]
            read_at(file, piece, chunk_id * self._chunk_bytes())
            take = min(left, len(piece) * self.chunk)
            _place(piece.view(self.degree.dtype), piece.view(np.uint16), self.chunk, take, cursor, out)
            left, chunk_id = left - take, chunk_id + len(piece)

    def _chunk_bytes(self) -> int:
        return self.chunk * (self.degree.itemsize + 2)

    def _coarse_table(self) -> tuple[np.ndarray, int]:
        """Return the bucket of every 2**shift-th row, and shift: from there the right bucket is a few steps ahead."""
        shift = max(0, (max(1, len(self.degree)) - 1).bit_length() - _COARSE_CELLS.bit_length() + 1)
        rows = np.arange(0, max(1, len(self.degree)), 1 << shift)
        return (np.searchsorted(self.first_row, rows, "right") - 1).astype(np.int32), shift

    def _write(self, file, bucket: int, chunk: np.ndarray, written: np.ndarray) -> None:
        chunk_id = int(self._first_chunk[bucket] + written[bucket])
        # More than the degrees foretell: another graph than the first pass saw, which the checksum will tell.
        if chunk_id < self._first_chunk[bucket + 1]:
            write_at(file, chunk, chunk_id * self._chunk_bytes())
            written[bucket] += 1


def cut_ranges(degree: np.ndarray, max_entries: int, max_rows: int) -> np.ndarray:
    """Cut the rows into ranges, each as long as the bounds allow, and at least one row.

    Args:
        degree: (num_nodes,) integers, entries a row.
        max_entries, max_rows: of a range, >= 1.

    Returns:
        (num_ranges + 1,) int64 first rows, then num_nodes; [0] without rows.
    """
    starts = np.empty(_cut(degree, max_entries, max_rows, np.empty(0, np.int64)) + 1, np.int64)
    _cut(degree, max_entries, max_rows, starts)
    return starts


def read_at(file, array: np.ndarray, offset: int) -> None:
    """Fill a contiguous array from a file's bytes at an offset; needs no seek, so threads may share the file."""
    view, filled = memoryview(array).cast("B") if array.size else b"", 0
    while filled < len(view):
        got = os.preadv(file.fileno(), [view[filled:]], offset + filled)
        if not got:
            raise OSError(f"scratch file ends at {offset + filled}, expected {len(view) - filled} bytes more")
        filled += got


def write_at(file, array: np.ndarray, offset: int) -> None:
    """Write a contiguous array's bytes to a file at an offset."""
    view, done = memoryview(array).cast("B") if array.size else b"", 0
    while done < len(view):
        done += os.pwrite(file.fileno(), view[done:], offset + done)


def _table_size(most: int) -> int:
    return 1 << max(4, (2 * most).bit_length())


@kernel
def _cut(degree, max_entries, max_rows, starts):
    """Write the starts of the ranges and their end where there is room; return the number of ranges."""
    count, entries, first = 0, np.int64(0), 0
    for v in range(len(degree)):
        if v > first and (entries + degree[v] > max_entries or v - first >= max_rows):
            first, entries = v, np.int64(0)
        if v == first:
            if count < len(starts):
                starts[count] = v
            count += 1
        entries += degree[v]
    if len(starts):
        starts[count] = len(degree)
    return count


@kernel
def _sum_ranges(degree, starts, out):
    for b in range(len(out)):
        for v in range(starts[b], starts[b + 1]):
            out[b] += degree[v]


@kernel(inline="always")
def _bucket_of(row, coarse, shift, first_row):
    bucket = np.int64(coarse[row >> shift])
    while row >= first_row[bucket + 1]:
        bucket += 1
    return bucket


@kernel
def _spread_edges(src, dst, start, coarse, shift, first_row, neighbors, rows, log_chunk, cursor, free, full, counts):
    """Append both entries of the edges from `start` on; stop where fewer than two chunks are free, and say where."""
    last = (np.int64(1) << log_chunk) - 1
    # One chunk after the other in flat arrays, its row numbers behind its neighbours.
    neighbor_gap = 2 * (last + 1) // neighbors.itemsize
    row_gap = neighbors.itemsize * (last + 1) // 2
    num_free, num_full = counts[_FREE], counts[_FULL]
    for i in range(start, len(src)):
        for end in range(2):
            row, neighbor = (src[i], dst[i]) if end == 0 else (dst[i], src[i])
            bucket = _bucket_of(row, coarse, shift, first_row)
            position = cursor[bucket]
            chunk = position >> log_chunk
            neighbors[position + chunk * neighbor_gap] = neighbor
            rows[position + (chunk + 1) * row_gap] = row - first_row[bucket]
            position += 1
            if position & last == 0:
                full[num_full, 0], full[num_full, 1] = bucket, chunk
                num_full += 1
                num_free -= 1
                position = free[num_free] << log_chunk
            cursor[bucket] = position
        if num_free < 2:
            counts[_FREE], counts[_FULL] = num_free, num_full
            return i + 1
    counts[_FREE], counts[_FULL] = num_free, num_full
    return len(src)


@kernel
def _start_rows(degree, cursor):
    position = cursor[0] * 0
    for row in range(len(degree)):
        cursor[row] = position
        position += degree[row]


@kernel
def _place(neighbors, rows, chunk, count, cursor, out):
    """Put the next `count` entries behind those that their rows have already."""
    rows_at = (neighbors.itemsize >> 1) * chunk
    for c in range((count + chunk - 1) // chunk):
        of_neighbors = neighbors[c, :chunk]
        of_rows = rows[c, rows_at : rows_at + chunk]
        for i in range(min(chunk, count - c * chunk)):
            row = of_rows[i]
            position = cursor[row]
            if position < len(out):
                out[position] = of_neighbors[i]
            cursor[row] = position + 1


@kernel
def _rows_are_full(degree, cursor):
    end = np.int64(0)
    for row in range(len(degree)):
        end += degree[row]
        if cursor[row] != end:
            return False
    return True


@kernel
def _drop_repeats(neighbors, degree, table):
    """Keep the first of equal neighbours of a row, close the gaps, correct the degrees; return what is left."""
    read = kept = np.int64(0)
    for row in range(len(degree)):
        slots = 16
        while slots < 2 * degree[row]:
            slots *= 2
        table[:slots] = -1
        first = kept
        for i in range(read, read + degree[row]):
            neighbor = neighbors[i]
            slot = (np.uint64(neighbor) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)) & np.uint64(slots - 1)
            while table[slot] != -1 and table[slot] != neighbor:
                slot = (slot + np.uint64(1)) & np.uint64(slots - 1)
            if table[slot] == -1:
                table[slot] = neighbor
                neighbors[kept] = neighbor
                kept += 1
        read += degree[row]
        degree[row] = kept - first
    return kept
