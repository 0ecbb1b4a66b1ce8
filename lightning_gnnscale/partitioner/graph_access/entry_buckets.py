"""(row, neighbour) entries spread over buckets of one scratch file, and each bucket sorted to rows in place.

A bucket is a range of rows. Its entries come as chunks: neighbours, then as many row numbers of two bytes, relative to
the bucket's first row: 6 bytes an entry (10 with int64 ids). Sorted, the neighbours alone remain (4 bytes, or 8),
packed from the front of the file: they never reach a bucket that has not been read yet.

The rows may also be taken in rounds. A round needs the space of its entries and of all neighbours sorted before, so the
largest of two rounds, three quarters of the entries, sets the peak: 4.5 bytes an entry instead of 6; of three: 4.2.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...edge_stream.read_ahead import read_ahead
from ...errors import EdgeStreamError
from ...graph import CSC
from ...jit import kernel
from ...scratch import read_at, write_at
from .simple_graph import SHARE_EDGES

MAX_ROWS = 1 << 16  # rows of a bucket: their numbers fit two bytes
MIN_ENTRIES, MAX_ENTRIES = 1 << 19, 1 << 21  # of a bucket, unless it is one row: what is sorted in memory at a time
MIN_CHUNK, MAX_CHUNK = 1 << 11, 1 << 13  # entries
CHUNK_BYTES = 1 << 25  # open chunks of all buckets together, where MIN_CHUNK allows it
READ_BYTES = 1 << 20
PAGE_BYTES = 1 << 12
MAX_ROUNDS = 3
MAX_SORTERS = 2  # threads that sort buckets, each with buffers of its own
MAX_SPREADERS = 8  # threads that spread edges
STAGED_CHUNK = 1 << 8  # entries

_SPARE_CHUNKS = 32
_COARSE_CELLS = 1 << 13
_FREE, _FULL = range(2)  # positions in OpenChunks.counts


class EntryBuckets:
    """Take the entries of a symmetric adjacency in any order, and write its rows one after another into a file.

    Args:
        degree: (num_nodes,) int32 or int64 number of entries that each row will get; not copied.
        name: Name of the source, for messages.
        num_rounds: Number of rounds that the rows are split into, >= 1. Every round must be given all edges once.
    """

    def __init__(self, degree: np.ndarray, name: str, num_rounds: int = 1):
        self.degree, self.name, self.num_rounds = degree, name, num_rounds
        num_entries = int(degree.sum(dtype=np.int64))
        max_entries = int(np.clip(num_entries >> 8, MIN_ENTRIES, MAX_ENTRIES))
        self.first_row = cut_ranges(degree, max_entries, MAX_ROWS)
        self.num_buckets = len(self.first_row) - 1
        self._entries = np.zeros(self.num_buckets, np.int64)
        sum_ranges(degree, self.first_row, self._entries)
        self.chunk = MAX_CHUNK
        while self.chunk > MIN_CHUNK and self.num_buckets * self._chunk_bytes() > CHUNK_BYTES:
            self.chunk //= 2
        if num_entries < self.chunk:
            self.chunk = max(64, 1 << num_entries.bit_length())
        self._num_chunks = -(-self._entries // self.chunk)
        self._offset = np.zeros(self.num_buckets, np.int64)
        self._first_bucket = self._cut_rounds()
        self.file_bytes = max(self._lay_out(number) for number in range(num_rounds))
        self._position = 0

    def spread(self, file, pieces, number: int = 0, threads=None) -> None:
        """Write both entries of every edge to the buckets, leaving out entries whose row is not in the round.

        Threads each stage the entries of a stretch of edges, in chunks that the processor's cache holds; then each
        appends all that was staged, stretch after stretch, to the buckets that are its own. The file is the same for
        any number of threads.

        Args:
            file: unbuffered, and empty in round 0.
            pieces: lists of iterators over pairs (src, dst) of ids, one for each of `num_spreaders` at most, with at
                most SHARE_EDGES edges each; see `SimpleGraph.shared_pass`.
            threads: `RowThreads`; None: one.

        Cost: O(edges) time; at most CHUNK_BYTES of memory, more from 2,700 buckets on; for each thread 2 MB, and 1.5 KB
            a bucket.
        """
        written, dtype = np.zeros(self.num_buckets, np.int64), self.degree.dtype
        first, last = self._first_bucket[number : number + 2].tolist()
        shares = num_spreaders(threads)
        before = np.concatenate([[0], np.cumsum(self._entries[first:last])])
        bounds = first + np.searchsorted(before[:-1], before[-1] * np.arange(shares) / shares)
        opened = [OpenChunks.of(self.first_row, range(*ends), self.chunk, dtype) for ends in pairwise([*bounds, last])]
        chunk = min(STAGED_CHUNK, self.chunk)
        spare = 2 * SHARE_EDGES // chunk + 2
        staged = [OpenChunks.of(self.first_row, range(first, last), chunk, dtype, spare) for _ in opened]
        share = _one_by_one if threads is None else threads.map

        def stage(taken) -> None:
            into, blocks = taken
            into.empty()
            for src, dst in blocks:
                spread_edges(src, dst, into)

        def append(own) -> None:
            for one in staged:
                for full in own.filled_by(one):
                    self._write(file, *full, written)

        for piece in pieces:
            share(stage, zip(staged, [*piece, *[()] * (shares - len(piece))], strict=True))
            share(append, opened)
        for own in opened:
            for bucket, chunk in own.take_begun():
                self._write(file, bucket, chunk, written)

    def sort(self, file, drop_repeats: bool, progress=None, number: int = 0, threads=None) -> None:
        """Write a round's rows behind those of the rounds before, and cut off the rest of the file.

        With `drop_repeats` the first of several equal neighbours in a row is kept, and `degree` corrected in place.

        Args:
            threads: `RowThreads`, of which up to MAX_SORTERS sort; None: one. They do not change the result.

        Raises:
            EdgeStreamError: the number of entries of a row differs from its degree.

        Cost: O(entries) time; for each thread that sorts, twice the largest bucket's neighbours and READ_BYTES of
            memory, and for repeats a table of four neighbours for each of the longest row's. Buckets are sorted while
            those before are written.
        """
        dtype, num_entries = self.degree.dtype, int(self._entries.sum())
        done, share = (
            int(self._entries[: self._first_bucket[number]].sum()),
            _one_by_one if threads is None else threads.map,
        )
        sorters = 1 if threads is None else min(MAX_SORTERS, threads.num_threads)

        def keep_first(placed: tuple[int, np.ndarray]) -> int:
            bucket, out = placed
            degree = self._degrees(bucket)
            return _drop_repeats(out, degree, np.empty(_table_size(int(degree.max(initial=0))), dtype))

        for placed in read_ahead(lambda stop: self._placed(file, number, stop, sorters, share)):
            counts = share(keep_first, placed) if drop_repeats else [len(out) for _, out in placed]
            for (_, out), count in zip(placed, counts, strict=True):
                write_at(file, out[:count], self._position)
                self._position += count * dtype.itemsize
                done += len(out)
            if progress is not None:
                progress("adjacency sort", done, num_entries)
        file.truncate(self._position)

    def _placed(self, file, number: int, stop, sorters: int, share) -> Iterator[list[tuple[int, np.ndarray]]]:
        """Yield a round's buckets, as many at a time as are sorted, with their neighbours in rows.

        There are two buffers a sorter, which take turns.
        """
        buffers = np.empty((2, sorters, int(self._entries.max(initial=0))), self.degree.dtype)
        cursors = np.empty((sorters, int(np.diff(self.first_row).max(initial=0)) + 1), self.degree.dtype)
        chunks = np.empty((sorters, max(1, READ_BYTES // self._chunk_bytes()), self._chunk_bytes()), np.uint8)
        first, last = self._first_bucket[number : number + 2].tolist()

        def place(bucket: int) -> tuple[int, np.ndarray]:
            turn, sorter = divmod(bucket - first, sorters)
            out, cursor = buffers[turn & 1, sorter, : self._entries[bucket]], cursors[sorter]
            degree = self._degrees(bucket)
            ends = np.cumsum(degree, dtype=degree.dtype)
            np.subtract(ends, degree, out=cursor[: len(ends)])
            self._place_bucket(file, bucket, chunks[sorter], cursor, out)
            if not np.array_equal(cursor[: len(ends)], ends):
                raise EdgeStreamError(f"{self.name}: the edges changed while they were partitioned")
            return bucket, out

        for begin in range(first, last, sorters):
            if stop.is_set():
                return
            yield share(place, range(begin, min(begin + sorters, last)))

    def _degrees(self, bucket: int) -> np.ndarray:
        """Return the degrees of a bucket's rows."""
        return self.degree[self.first_row[bucket] : self.first_row[bucket + 1]]

    def _cut_rounds(self) -> np.ndarray:
        """Return (num_rounds + 1,) first buckets, such that every round needs about the same space."""
        entry_bytes = self.degree.itemsize + 2
        share = (2 / entry_bytes) ** np.arange(self.num_rounds)
        before = np.concatenate([[0], np.cumsum(self._entries)])
        first_bucket = np.searchsorted(before, np.cumsum(share)[:-1] / share.sum() * before[-1])
        return np.concatenate([[0], first_bucket, [self.num_buckets]]).astype(np.int64)

    def _lay_out(self, number: int) -> int:
        """Give a round's buckets their places behind all neighbours before; return where they end."""
        first, last = self._first_bucket[number : number + 2]
        sorted_bytes = int(self._entries[:first].sum()) * self.degree.itemsize
        start = -(-sorted_bytes // PAGE_BYTES) * PAGE_BYTES
        ends = start + np.cumsum(self._num_chunks[first:last]) * self._chunk_bytes()
        self._offset[first:last] = ends - self._num_chunks[first:last] * self._chunk_bytes()
        return int(ends[-1]) if len(ends) else 0

    def _place_bucket(self, file, bucket: int, chunks: np.ndarray, cursor: np.ndarray, out: np.ndarray) -> None:
        left, offset = len(out), int(self._offset[bucket])
        while left:
            piece = chunks[: min(len(chunks), -(-left // self.chunk))]
            read_at(file, piece, offset)
            take = min(left, len(piece) * self.chunk)
            _place(piece.view(self.degree.dtype), piece.view(np.uint16), self.chunk, take, cursor, out)
            left, offset = left - take, offset + piece.nbytes

    def _chunk_bytes(self) -> int:
        return self.chunk * (self.degree.itemsize + 2)

    def _write(self, file, bucket: int, chunk: np.ndarray, written: np.ndarray) -> None:
        # More than the degrees predict: the graph has changed since the first pass, as the checksum will show.
        if written[bucket] < self._num_chunks[bucket]:
            write_at(file, chunk, int(self._offset[bucket] + written[bucket] * len(chunk)))
            written[bucket] += 1


def num_spreaders(threads) -> int:
    """Return how many of the `RowThreads` spread edges, each with memory of its own; None: one."""
    return 1 if threads is None else min(MAX_SPREADERS, threads.num_threads)


def without_repeats(rows: CSC, degree: np.ndarray) -> CSC:
    """Return rows with the first of several equal neighbours alone, in place, and correct `degree` in place."""
    table = np.empty(_table_size(int(degree.max(initial=0))), degree.dtype)
    kept = _drop_repeats(rows.indices, degree, table)
    return CSC(np.concatenate([[0], np.cumsum(degree, dtype=np.int64)]), rows.indices[:kept])


def _one_by_one(function, items) -> list:
    return [function(item) for item in items]


def cut_ranges(degree: np.ndarray, max_entries: int, max_rows: int) -> np.ndarray:
    """Cut the rows into ranges as long as the bounds on entries and rows allow, each of at least one row.

    Returns:
        (num_ranges + 1,) int64 first rows, then num_nodes; [0] without rows.
    """
    starts = np.empty(_cut(degree, max_entries, max_rows, np.empty(0, np.int64)) + 1, np.int64)
    _cut(degree, max_entries, max_rows, starts)
    return starts


def _table_size(most: int) -> int:
    return 1 << max(4, (2 * most).bit_length())


@kernel
def _cut(degree, max_entries, max_rows, starts):
    """Write the starts of the ranges and their end where there is space; return the number of ranges."""
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
def sum_ranges(degree, starts, out):
    """Add the degrees of the rows of every range to `out`."""
    for b in range(len(out)):
        for v in range(starts[b], starts[b + 1]):
            out[b] += degree[v]


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
        free, full: (spare,) int64 free chunks, and (spare, 2) int64 (bucket, chunk) of full ones.
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
    def of(
        cls, first_row: np.ndarray, buckets: range, chunk: int, dtype: np.dtype, spare: int = _SPARE_CHUNKS
    ) -> "OpenChunks":
        """Open a chunk of `chunk` entries, a power of two, for each bucket, and have so many spare ones."""
        num_rows = max(1, int(first_row[-1]))
        shift = max(0, (num_rows - 1).bit_length() - _COARSE_CELLS.bit_length() + 1)
        cursor = np.full(len(first_row) - 1, -1, np.int64)
        cursor[buckets.start : buckets.stop] = np.arange(len(buckets)) * chunk
        chunks = np.empty((len(buckets) + spare, chunk * (dtype.itemsize + 2)), np.uint8)
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
            full=np.empty((spare, 2), np.int64),
            counts=np.array([spare, 0]),
        )

    def filled_by(self, staged: "OpenChunks") -> Iterator[tuple[int, np.ndarray]]:
        """Append the entries of other, smaller chunks; yield the bucket and the bytes of every full chunk."""
        done = 0
        while done >= 0:
            done = append_staged(staged, done, self)
            for bucket, chunk in self.full[: self.counts[_FULL]].tolist():
                yield bucket, self.chunks[chunk]
            self._free_full()

    def empty(self) -> None:
        """Forget all entries."""
        self._free_full()
        self.cursor[self.first_bucket : self.last_bucket] &= -1 << self.log_chunk

    def _free_full(self) -> None:
        num_free, num_full = self.counts.tolist()
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
def spread_edges(src, dst, opened):
    """Append both entries of edges, of rows of the round; there are chunks enough."""
    coarse, shift, first_row, cursor = opened.coarse, opened.shift, opened.first_row, opened.cursor
    neighbors, rows, log_chunk = opened.neighbors, opened.rows, opened.log_chunk
    first_of_round, end_of_round = first_row[opened.first_bucket], first_row[opened.last_bucket]
    last = (np.int64(1) << log_chunk) - 1
    neighbor_gap = 2 * (last + 1) // neighbors.itemsize
    row_gap = neighbors.itemsize * (last + 1) // 2
    num_free, num_full = opened.counts[_FREE], opened.counts[_FULL]
    for i in range(len(src)):
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
    opened.counts[_FREE], opened.counts[_FULL] = num_free, num_full


@kernel
def append_staged(staged, start, opened):
    """Append the entries of other, smaller chunks, from the start-th on, of the buckets that are opened.

    Full chunks come first, then those begun; so that a bucket's entries keep their order.

    Returns:
        -1; or the next chunk, where none is free.
    """
    first, last = opened.first_bucket, opened.last_bucket
    capacity, small = np.int64(1) << opened.log_chunk, np.int64(1) << staged.log_chunk
    item = staged.neighbors.itemsize
    num_full, num_begun = staged.counts[_FULL], last - first
    for i in range(start, num_full + num_begun):
        if i < num_full:
            bucket, chunk, count = staged.full[i, 0], staged.full[i, 1], small
            if bucket < first or bucket >= last:
                continue
        else:
            bucket = first + i - num_full
            chunk, count = staged.cursor[bucket] >> staged.log_chunk, staged.cursor[bucket] & (small - 1)
        if opened.counts[_FREE] < 1:
            return i
        neighbor_at = chunk * (small + 2 * small // item)
        row_at = chunk * (small + item * small // 2) + item * small // 2
        done = np.int64(0)
        while done < count:
            position = opened.cursor[bucket]
            into, filled = position >> opened.log_chunk, position & (capacity - 1)
            take = min(count - done, capacity - filled)
            to_neighbor = into * (capacity + 2 * capacity // item) + filled
            to_row = into * (capacity + item * capacity // 2) + item * capacity // 2 + filled
            # Loops over slices from zero make vector code; to assign a slice takes seconds to compile.
            neighbors, from_neighbors = opened.neighbors[to_neighbor:], staged.neighbors[neighbor_at:]
            rows, from_rows = opened.rows[to_row:], staged.rows[row_at:]
            for k in range(take):
                neighbors[k] = from_neighbors[k]
            for k in range(take):
                rows[k] = from_rows[k]
            done, neighbor_at, row_at, position = done + take, neighbor_at + take, row_at + take, position + take
            if position & (capacity - 1) == 0:
                full = opened.counts[_FULL]
                opened.full[full, 0], opened.full[full, 1] = bucket, into
                opened.counts[_FULL] += 1
                opened.counts[_FREE] -= 1
                position = opened.free[opened.counts[_FREE]] << opened.log_chunk
            opened.cursor[bucket] = position
    return np.int64(-1)
