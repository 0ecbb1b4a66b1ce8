"""Rows read into memory ahead of their use: ids in order, neighbours in one read, many reads under way at once."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from mmap import mmap
from queue import Empty, SimpleQueue
from threading import Lock

import numpy as np

from ..errors import PartitionStoreError
from ..jit import kernel
from ..planner.sweep_plan import GAP_BYTES
from ..system import CAN_ADVISE, O_DIRECT, PAGE_BYTES, advise
from ..triton_kernels.gather_rows import pack_places
from ..triton_kernels.intrinsics import copy_bytes, popcount, pread, trailing_zeros
from .array_file import file_place, fits_twice

# Measured on a virtual disk of 1.1 GB/s in sequence and 45,000 reads a second at this depth.
READS_UNDER_WAY = 16
RUN_BYTES = 256 << 10
_TASK_ROWS = 16 << 10
_TASK_READS = 8
_BUFFERS: SimpleQueue[np.ndarray] = SimpleQueue()  # to be used again: new memory is zeroed first
_READ_DIRECTLY: set[tuple[int, int]] = set()  # devices and inodes of files that were read past the page cache
_MOST_FILES = 1 << 10
_OTHER = int(pack_places(np.int64(1), np.int64(0)))  # the place of the first row of the rows beside


class BytesRead:
    """Bytes that planned reads of this process took from files so far; threads may add."""

    def __init__(self):
        self.total, self._lock = 0, Lock()

    def add(self, num_bytes: int) -> None:
        """Add some."""
        with self._lock:
            self.total += num_bytes


bytes_read = BytesRead()


def reading_threads() -> ThreadPoolExecutor:
    """Return threads for the reads that are under way at once, of who reads block after block."""
    return ThreadPoolExecutor(READS_UNDER_WAY, "gnnscale-read")


def read_rows(
    array: np.ndarray, rows: np.ndarray, out: np.ndarray | None = None, threads: Executor | None = None
) -> np.ndarray:
    """Read rows of an array into memory; of a mapped one by planned reads of its file, past the map.

    Args:
        array: (num_rows, ...) C-contiguous, mapped or not.
        rows: (num,) int64 in [0, num_rows), ascending.
        out: (num, ...) of the array's dtype, C-contiguous, filled where given.
        threads: `reading_threads` that are used again; None: new ones, for this call.

    Returns:
        (num, ...) of the array's dtype.

    Raises:
        PartitionStoreError: the file ends early, or cannot be read.

    Cost: each row once, and gaps of up to 16 KiB between rows that are read with them; a read buffer of 256 KiB for
        each of the reads under way. The page cache is passed by where the file's disk can.
    """
    row_bytes = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    begin = np.asarray(rows, np.int64) * row_bytes
    out = np.empty((len(rows), *array.shape[1:]), array.dtype) if out is None else out
    read_ranges(array, begin, begin + row_bytes, out.reshape(-1).view(np.uint8), threads)
    return out


def read_ranges(
    array: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    out: np.ndarray | None = None,
    threads: Executor | None = None,
) -> np.ndarray:
    """Read ranges of an array's bytes, one after the other; see `read_rows`.

    Args:
        array: C-contiguous, mapped or not.
        begin, end: (num,) int64 bytes from the array's first; both ascend.
        out: (sum of the lengths,) uint8, filled where given.
        threads: See `read_rows`.

    Returns:
        (sum of the lengths,) uint8.
    """
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(end - begin)])
    out = np.empty(int(starts[-1]), np.uint8) if out is None else out
    place = file_place(array) if len(out) else None
    if place is None:
        if len(out):
            _copy_ranges(np.ascontiguousarray(array).reshape(-1).view(np.uint8), begin, end, out)
        return out
    path, offset = place
    bytes_read.add(planned_bytes(begin, end))
    longest = max(RUN_BYTES, int((end - begin).max()))
    # A thread of its own pays for several reads, for few separate ones as for many in a row.
    num_reads = 1 + int(np.count_nonzero(begin[1:] - end[:-1] > GAP_BYTES)) + int(end[-1] - begin[0]) // RUN_BYTES
    step = max(-(-len(begin) // (4 * READS_UNDER_WAY)), len(begin) * _TASK_READS // num_reads, 1)
    step = min(step, _TASK_ROWS)
    tasks = [slice(first, min(first + step, len(begin))) for first in range(0, len(begin), step)]

    def read(task: slice) -> int:
        with _buffer(longest) as buffer:
            target = out[starts[task.start] : starts[task.stop]]
            return _read_runs(descriptor, offset, begin[task], end[task], GAP_BYTES, longest, buffer, target)

    reading = reading_threads() if threads is None else nullcontext(threads)
    with _opened(path) as descriptor, reading as pool:
        under_way = [pool.submit(read, task) for task in tasks]
        wait(under_way)  # all of them, whatever one raises: the file is closed then
    failed = [byte for one in under_way if (byte := one.result()) >= 0]
    if failed:
        raise PartitionStoreError(
            f"{path}: cannot be read at byte {min(failed)}: the file was shortened, or its disk failed; restore it, or"
            " write the store again"
        )
    return out


def planned_bytes(begin: np.ndarray, end: np.ndarray) -> int:
    """Return the bytes that `read_ranges` has the disk read for ranges of a file: gaps and whole pages too."""
    if not len(begin):
        return 0
    gaps = np.flatnonzero(begin[1:] - end[:-1] > GAP_BYTES)
    first, last = begin[np.concatenate([[0], gaps + 1])], end[np.concatenate([gaps, [len(end) - 1]])]
    return int((-(-last // PAGE_BYTES) - first // PAGE_BYTES).sum()) * PAGE_BYTES


def read_slice(array: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return a copy of a contiguous array; of a mapped one exactly its bytes are read, through the page cache.

    A fault of the map would read ahead by what the disk is set to, which may be many times the slice.

    Args:
        out: Of the array's shape and dtype, filled and returned where given.

    Raises:
        PartitionStoreError: the file ends early.
    """
    place, out = file_place(array), np.empty(array.shape, array.dtype) if out is None else out
    if place is None or not CAN_ADVISE:
        out[...] = array
        return out
    (path, begin), done = place, 0
    target = out.reshape(-1).view(np.uint8)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        advise(descriptor, 0, 0, "random")
        while done < len(target):
            count = os.preadv(descriptor, [target[done:]], begin + done)
            if count == 0:
                raise _shortened(path, begin + done)
            done += count
    finally:
        os.close(descriptor)
    return out


def _shortened(path, byte: int) -> PartitionStoreError:
    what = f"{path}: cannot be read at byte {byte}: the file was shortened"
    return PartitionStoreError(f"{what}; restore it, or write the store again")


def read_once(array: np.ndarray, spare: int = 0, allocate: Callable[..., np.ndarray] = np.empty) -> np.ndarray:
    """Return a copy of a contiguous array, with memory behind it, as `read_slice` reads it.

    A mapped array is read past the page cache where free memory does not hold its file: that saves a copy, and the
    pages that others need.

    Args:
        array: (num,) mapped or not.
        spare: Items behind; pages of theirs that are not written take no memory.
        allocate: Returns memory of a shape and dtype.

    Returns:
        (num + spare,) of the array's dtype.
    """
    place, size = file_place(array), array.dtype.itemsize * spare
    descriptor = None
    if place is not None and not fits_twice(os.path.getsize(place[0])):
        descriptor = open_direct(place[0])
    if descriptor is None:
        out = allocate(len(array) + spare, array.dtype)
        read_slice(array, out[: len(array)])
        return out
    path, begin = place
    before, done = begin % PAGE_BYTES, 0
    needed = before + array.nbytes
    length = -(-needed // PAGE_BYTES) * PAGE_BYTES
    memory = allocate(length + size + PAGE_BYTES, np.uint8)
    memory = memory[-memory.ctypes.data % PAGE_BYTES :]
    try:
        while done < needed:
            count = os.preadv(descriptor, [memory[done:length]], begin - before + done)
            if count == 0:
                raise _shortened(path, begin - before + done)
            done += count
    finally:
        os.close(descriptor)
    return memory[before : needed + size].view(array.dtype)


@contextmanager
def _buffer(num_bytes: int) -> Iterator[np.ndarray]:
    """Lend memory for a run that begins anywhere in a page: whole pages, as reads past the page cache must have."""
    try:
        buffer = _BUFFERS.get_nowait() if num_bytes <= RUN_BYTES else None
    except Empty:
        buffer = None
    if buffer is None or len(buffer) < num_bytes + 2 * PAGE_BYTES:
        # Memory of this process alone: a fork that shared it would write into the reads of the other.
        memory = np.empty((-(-num_bytes // PAGE_BYTES) + 3) * PAGE_BYTES, np.uint8)
        buffer = memory[-memory.ctypes.data % PAGE_BYTES :][: len(memory) - PAGE_BYTES]
    try:
        yield buffer
    finally:
        if num_bytes <= RUN_BYTES:
            _BUFFERS.put(buffer)


@contextmanager
def _opened(path) -> Iterator[int]:
    """Open a file whose reads begin and end at pages, past the page cache where its disk can."""
    descriptor = open_direct(path)
    if descriptor is None:
        descriptor = os.open(path, os.O_RDONLY)
        advise(descriptor, 0, 0, "random")  # what is to be read with a row is decided here
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_direct(path) -> int | None:
    """Open a file past the page cache: pages that a cap of memory must drop again cost more than their reads."""
    if not O_DIRECT:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | O_DIRECT)
    except OSError:
        return None
    facts = os.fstat(descriptor)
    file = facts.st_dev, facts.st_ino
    if file in _READ_DIRECTLY:
        return descriptor
    try:
        os.preadv(descriptor, [mmap(-1, PAGE_BYTES)], 0)  # some file systems refuse only here
    except OSError:
        os.close(descriptor)
        return None
    if len(_READ_DIRECTLY) < _MOST_FILES:
        _READ_DIRECTLY.add(file)
    return descriptor


@kernel
def _read_runs(descriptor, offset, begin, end, gap_bytes, run_bytes, buffer, out):
    """Read ranges run by run, each by whole pages; return the byte of the file at which a read failed, or -1."""
    first, at = 0, 0
    while first < len(begin):
        last = first
        while (
            last + 1 < len(begin)
            and begin[last + 1] - end[last] <= gap_bytes
            and end[last + 1] - begin[first] <= run_bytes
        ):
            last += 1
        start = offset + begin[first]
        before = start % PAGE_BYTES
        needed = before + end[last] - begin[first]
        length = -(-needed // PAGE_BYTES) * PAGE_BYTES
        done = 0
        while done < needed:
            count = pread(
                np.int32(descriptor),
                buffer.ctypes.data + np.uint64(done),
                np.uint64(length - done),
                np.int64(start - before + done),
            )
            if count <= 0:
                return np.int64(start - before + done)
            done += count
        i = first
        while i <= last:
            source = before + begin[i] - begin[first]
            size = end[i] - begin[i]
            while i < last and begin[i + 1] == end[i]:  # neighbours are copied together
                i += 1
                size += end[i] - begin[i]
            copy_bytes(out, at, buffer, source, size)  # a slice put into a slice takes two seconds more to compile
            at += size
            i += 1
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
    """A set of nodes that knows the rank of each; two bits a node.

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

    def add(self, nodes: np.ndarray, beside: "RankedNodes | None" = None) -> int:
        """Add (num,) node ids, in any order, repeated or not, but those of another set; return how many were new."""
        new = _mark(nodes, _NONE.words if beside is None else beside.words, self.words)
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

    def ranks(
        self, nodes: np.ndarray, order: np.ndarray | None = None, beside: "RankedNodes | None" = None
    ) -> np.ndarray:
        """Return the (num,) int64 positions of nodes among all of the set, ascending.

        Args:
            nodes: ids.
            order: (size,) int32, what is returned instead of each position; None: the position.
            beside: another set, whose nodes are returned as rows of table 1, see `pack_places`.

        Raises:
            ValueError: a node is in no set.
        """
        out, beside = np.empty(len(nodes), np.int64), beside or _NONE
        order = np.empty(0, np.int32) if order is None else order
        missing = _ranks(self.words, self.before, order, beside.words, beside.before, nodes, out)
        if missing >= 0:
            known = len(self) + len(beside)
            raise ValueError(f"node {nodes[missing]} is not among the {known} whose rows were read")
        return out


_NONE = RankedNodes.empty(0)


@kernel
def _mark(nodes, other, words):
    new = 0
    for i in range(len(nodes)):
        at, bit = nodes[i] >> 6, np.uint64(1) << np.uint64(nodes[i] & 63)
        if len(other) and other[at] & bit:
            continue
        new += (words[at] & bit) == np.uint64(0)
        words[at] |= bit
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
        while word != np.uint64(0):
            out[at] = i * 64 + np.int64(trailing_zeros(word))
            at += 1
            word &= word - np.uint64(1)


@kernel
def _ranks(words, before, order, other, other_before, nodes, out):
    """Return the position of the first node that is in no set, or -1."""
    for i in range(len(nodes)):
        place, bit = nodes[i] >> 6, np.uint64(1) << np.uint64(nodes[i] & 63)
        if place < 0 or place >= len(words):
            return i
        if words[place] & bit:
            rank = before[place] + np.int64(popcount(words[place] & (bit - np.uint64(1))))
            out[i] = order[rank] if len(order) else rank
        elif place < len(other) and other[place] & bit:
            out[i] = _OTHER + other_before[place] + np.int64(popcount(other[place] & (bit - np.uint64(1))))
        else:
            return i
    return -1
