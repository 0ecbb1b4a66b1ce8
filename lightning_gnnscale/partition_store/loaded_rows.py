"""Rows read into memory ahead of their use: ids in order, neighbours in one read, many reads under way at once."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from ..errors import PartitionStoreError
from ..jit import kernel
from ..triton_kernels.intrinsics import popcount, pread
from .array_file import file_place

# Measured on a virtual disk of 1.1 GB/s in sequence and 45,000 reads a second at this depth.
READS_UNDER_WAY = 16
GAP_BYTES = 16 << 10  # of rows that nobody asked for: reading them takes less time than a read of its own
RUN_BYTES = 1 << 20
_TASK_ROWS = 16 << 10


def read_rows(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Read rows of an array into memory; of a mapped one by planned reads of its file, past the map.

    Args:
        array: (num_rows, ...) C-contiguous, mapped or not.
        rows: (num,) int64 in [0, num_rows), ascending.

    Returns:
        (num, ...) of the array's dtype.

    Raises:
        PartitionStoreError: the file ends early, or cannot be read.

    Cost: each row once, beside gaps of up to 16 KiB between rows that are read with them; a read buffer of 1 MiB for
        each of the reads under way.
    """
    row_bytes = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    begin = np.asarray(rows, np.int64) * row_bytes
    return read_ranges(array, begin, begin + row_bytes).view(array.dtype).reshape(len(rows), *array.shape[1:])


def read_ranges(array: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Read ranges of an array's bytes, one behind the other; see `read_rows`.

    Args:
        array: C-contiguous, mapped or not.
        begin, end: (num,) int64 bytes from the array's first; both ascend.

    Returns:
        (sum of the lengths,) uint8.
    """
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(end - begin)])
    out = np.empty(int(starts[-1]), np.uint8)
    place = file_place(array) if len(out) else None
    if place is None:
        if len(out):
            _copy_ranges(np.ascontiguousarray(array).reshape(-1).view(np.uint8), begin, end, out)
        return out
    path, offset = place
    longest = max(RUN_BYTES, int((end - begin).max()))
    step = min(max(-(-len(begin) // (4 * READS_UNDER_WAY)), 256), _TASK_ROWS)
    tasks = [slice(first, min(first + step, len(begin))) for first in range(0, len(begin), step)]
    buffers: SimpleQueue[np.ndarray] = SimpleQueue()
    for _ in range(min(READS_UNDER_WAY, len(tasks))):
        buffers.put(np.empty(longest, np.uint8))

    def read(task: slice) -> int:
        buffer = buffers.get()
        try:
            target = out[starts[task.start] : starts[task.stop]]
            return _read_runs(descriptor, offset, begin[task], end[task], GAP_BYTES, buffer, target)
        finally:
            buffers.put(buffer)

    with _opened(path) as descriptor, ThreadPoolExecutor(READS_UNDER_WAY, "gnnscale-read") as pool:
        failed = [byte for byte in pool.map(read, tasks) if byte >= 0]
    if failed:
        raise PartitionStoreError(
            f"{path}: cannot be read at byte {min(failed)}: the file was shortened, or its disk failed; restore it, or"
            " write the store again"
        )
    return out


@contextmanager
def _opened(path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):  # what is to be read with a row is decided here
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        yield descriptor
    finally:
        os.close(descriptor)


@kernel
def _read_runs(descriptor, offset, begin, end, gap_bytes, buffer, out):
    """Read ranges run by run; return the byte of the file at which a read failed, or -1."""
    first, at = 0, 0
    while first < len(begin):
        last = first
        while (
            last + 1 < len(begin)
            and begin[last + 1] - end[last] <= gap_bytes
            and end[last + 1] - begin[first] <= len(buffer)
        ):
            last += 1
        start, length = offset + begin[first], end[last] - begin[first]
        done = 0
        while done < length:
            count = pread(
                np.int32(descriptor),
                buffer.ctypes.data + np.uint64(done),
                np.uint64(length - done),
                np.int64(start + done),
            )
            if count <= 0:
                return np.int64(start + done)
            done += count
        for i in range(first, last + 1):
            size, source = end[i] - begin[i], begin[i] - begin[first]
            out[at : at + size] = buffer[source : source + size]
            at += size
        first = last + 1
    return np.int64(-1)


@kernel
def _copy_ranges(source, begin, end, out):
    at = 0
    for i in range(len(begin)):
        size = end[i] - begin[i]
        out[at : at + size] = source[begin[i] : end[i]]
        at += size


@dataclass
class RankedNodes:
    """A set of nodes that tells the rank of each; two bits a node.

    Attributes:
        words: (ceil(num_nodes / 64),) uint64, a bit a node.
        before: (ceil(num_nodes / 64),) int64, the nodes below each word; set by `count`.
        size: nodes of the set.
    """

    words: np.ndarray
    before: np.ndarray
    size: int = 0

    @classmethod
    def empty(cls, num_nodes: int) -> "RankedNodes":
        """Return the empty set of nodes in [0, num_nodes)."""
        num_words = -(-num_nodes // 64)
        return cls(np.zeros(num_words, np.uint64), np.zeros(num_words, np.int64))

    def add(self, nodes: np.ndarray) -> int:
        """Add (num,) node ids, in any order, repeated or not; return how many were new."""
        new = _mark(nodes, self.words)
        self.size += new
        return new

    def count(self) -> "RankedNodes":
        """Make `ranks` know all nodes that were added, and return the set."""
        _count(self.words, self.before)
        return self

    def __len__(self) -> int:
        return self.size

    @property
    def nodes(self) -> np.ndarray:
        """(num,) int64, ascending."""
        out = np.empty(len(self), np.int64)
        _list(self.words, out)
        return out

    def ranks(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (num,) int64 positions of nodes among all of the set, ascending.

        Raises:
            ValueError: a node is not in the set.
        """
        out = np.empty(len(nodes), np.int64)
        missing = _ranks(self.words, self.before, nodes, out)
        if missing >= 0:
            raise ValueError(f"node {nodes[missing]} is not among the {len(self)} whose rows were read")
        return out


@dataclass(frozen=True)
class LoadedRows:
    """A `FeatureTable` of some nodes' rows, in memory.

    Attributes:
        held: the nodes.
        table: their rows in ascending order of ids, as a table of the source's kind.
        num_rows: of the source.
    """

    held: RankedNodes
    table: Any
    num_rows: int

    @classmethod
    def of(cls, features, held: RankedNodes) -> "LoadedRows":
        """Read the rows of a set of nodes of a `FeatureTable`."""
        return cls(held.count(), features.load(held.nodes), features.num_rows)

    @property
    def dim(self) -> int:
        return self.table.dim

    @property
    def dtype(self) -> np.dtype:
        return self.table.dtype

    @property
    def is_sparse(self) -> bool:
        return self.table.is_sparse

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.table.nbytes + self.held.words.nbytes + self.held.before.nbytes

    def gather(self, nodes: np.ndarray, out: np.ndarray | None = None):
        """Copy rows of nodes that are held; arguments as of the table."""
        ranks = self.held.ranks(nodes)
        return self.table.gather(ranks) if self.is_sparse else self.table.gather(ranks, out)


@kernel
def _mark(nodes, words):
    new = 0
    for i in range(len(nodes)):
        word, bit = words[nodes[i] >> 6], np.uint64(1) << np.uint64(nodes[i] & 63)
        new += (word & bit) == np.uint64(0)
        words[nodes[i] >> 6] = word | bit
    return new


@kernel
def _count(words, before):
    total = 0
    for i in range(len(words)):
        before[i] = total
        total += np.int64(popcount(words[i]))


@kernel
def _list(words, out):
    at = 0
    for i in range(len(words)):
        word = words[i]
        bit = 0
        while word != np.uint64(0):
            if word & np.uint64(1):
                out[at] = i * 64 + bit
                at += 1
            word >>= np.uint64(1)
            bit += 1


@kernel
def _ranks(words, before, nodes, out):
    """Return the position of the first node that is not in the set, or -1."""
    for i in range(len(nodes)):
        place, bit = nodes[i] >> 6, np.uint64(nodes[i] & 63)
        if place < 0 or place >= len(words) or (words[place] >> bit) & np.uint64(1) == np.uint64(0):
            return i
        below = words[place] & ((np.uint64(1) << bit) - np.uint64(1))
        out[i] = before[place] + np.int64(popcount(below))
    return -1
