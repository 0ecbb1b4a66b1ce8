"""Rows read range after range of their table, over and over, for all batches that wait: each pass serves many batches.

A batch's rows lie all over the table. Batches that are sampled ahead wait in groups. The table is read in ranges, in
the order of the file, and from the last one on with the first one again, as a lift goes. A range is read for all groups
that wait and lack it; a group whose last range is there is handed over, one batch after the other. A row is held from
the step that reads it to the last group in waiting that needs it, about half of a pass. So batches wait whose rows
take together nearly twice the memory that there is.
"""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from ..events import clock
from ..jit import kernel
from ..partition_store.features import Column, DenseFeatures, memory_of
from ..partition_store.planned_reads import read_rows, reading_threads
from ..planner.sweep_plan import RANGES, STEPS_AHEAD
from ..sampler.minibatch import MiniBatch
from ..system import yield_cores
from ..triton_kernels.gather_rows import gather_rows
from ..triton_kernels.intrinsics import LINE_BYTES, popcount, prefetch, prefetch_line
from .batch_maker import BatchMaker
from .local_source import THREAD_NAME, stop
from .waiting_batch import WaitingBatch

_AHEAD = 16  # places in tables larger than the cache that are prefetched: 2 to 4 times faster
_READ_BYTES = 16 << 20  # of rows that are read before they are put into their slots
_MARKS = 256  # the newest group of each node takes a byte; 0: none
_LEAST_POWER = 0.3  # of the growth of distinct rows


@dataclass(eq=False)
class RangeRead:
    """The rows of one range of nodes that some groups need.

    Attributes:
        words: (ceil(nodes of the range / 64),) uint64, a bit a node.
        before: (ceil(nodes of the range / 64),) int32, the nodes below each word.
        slots: (num,) int32, where the row of each lies.
        done: The read.
    """

    words: np.ndarray
    before: np.ndarray
    slots: np.ndarray
    done: Future = field(default_factory=Future)


@dataclass(eq=False)
class _Group:
    """Batches that wait for the same reads.

    Attributes:
        mark: Its number in `RowSweep.newest`.
        batches: Those that were not handed over.
        ranges: By range, the read of it; None: not yet.
        entry: The first step that reads for it.
        frees: Slots that are free once its batches are handed over.
        num_batches: Batches that it had at first.
    """

    mark: int
    batches: deque = field(default_factory=deque)
    ranges: list = field(default_factory=list)
    entry: int = 0
    frees: list = field(default_factory=list)
    num_batches: int = 0

    @property
    def is_read(self) -> bool:
        return all(read is not None and read.done.done() for read in self.ranges)


@dataclass(frozen=True)
class SweptRows(Column):
    """The rows of a group, as a `Column`.

    Attributes:
        table: All slots, as rows.
        ranges, shift: Of the group and its sweep.
        num_rows: Number of rows of the source.
    """

    table: DenseFeatures
    ranges: list[RangeRead]
    shift: int
    num_rows: int
    is_sparse = False

    @property
    def dim(self) -> int:
        """Features of a row, as of the table."""
        return self.table.dim

    @property
    def dtype(self) -> np.dtype:
        """What `read` gives, as of the table."""
        return self.table.dtype

    def read(self, ids: np.ndarray, out=None) -> np.ndarray:
        """Return rows of ids, each of a batch of the group; see `Column.read`."""
        slots, order = np.full(len(ids), -1, np.int64), np.empty(len(ids), np.int64)
        ends = np.zeros(len(self.ranges) + 1, np.int64)
        _by_range(ids, self.shift, order, ends)
        for number in np.flatnonzero(np.diff(ends)):
            read, chosen = self.ranges[number], order[ends[number] : ends[number + 1]]
            _find_slots(ids, chosen, number << self.shift, read.words, read.before, read.slots, slots)
        if len(slots) and slots.min() < 0:
            raise ValueError(f"node {ids[slots.argmin()]} is not among those whose rows were read")
        out = memory_of(out, (len(ids), self.dim), self.dtype)
        return gather_rows(self.table.array, slots, out, self.table.storage)


class Sweep(Protocol):
    """What `fill_swept` asks of a sweep; `RowSweep` says what each member is."""

    takes_more: bool
    is_ready: bool
    is_empty: bool

    def add(self, batch: WaitingBatch) -> None: ...
    def end(self) -> None: ...
    def advance(self) -> None: ...
    def wait(self) -> None: ...
    def take(self) -> tuple[WaitingBatch, SweptRows]: ...
    def free(self) -> None: ...
    def close(self) -> None: ...


class RowSweep:
    """The groups that wait, the slots of their rows, and the reads; used by one thread.

    Args:
        features: The rows, in one table.
        held_bytes: Memory of the slots, bytes; more are taken where one batch needs more.
        waiting_bytes: Most memory of batches that wait, bytes; None: no limit.

    Attributes:
        steps: Ranges that were read.
    """

    def __init__(self, features: DenseFeatures, held_bytes: int, waiting_bytes: int | None = None):
        self.features, self.waiting_bytes = features, waiting_bytes
        num_nodes, raw = features.num_rows, features.raw.array
        self.shift, self.num_ranges = ranges_of(num_nodes)
        row_bytes = raw.dtype.itemsize * math.prod(raw.shape[1:])
        num_slots = min(max(1, held_bytes // max(1, row_bytes)), num_nodes)
        self._slots = None
        self._slots = self._memory(num_slots)
        self._free, self._num_free = np.arange(num_slots, dtype=np.int32), num_slots
        self._newest = np.zeros(num_nodes, np.uint8)  # the mark of the last group that needs each node
        self._marks = deque((mark, 0) for mark in range(1, _MARKS))  # those that are free, and from which step on
        self._newest_rows = np.zeros(_MARKS, np.int64)  # nodes by that mark
        self._lacking = np.zeros((self.num_ranges, _MARKS), np.int64)  # of them those to be read, by range
        self._lacks = np.zeros((self.num_ranges, _MARKS), np.bool_)  # which groups a range is to be read for
        self._holds = np.zeros(_MARKS, np.int64)  # slots that each group frees
        self._flight: deque[_Group] = deque()
        self._forming: _Group | None = None
        self._is_closed = self._is_ended = False
        self._under_way: deque[Future] = deque()
        self._waiting = self._largest = 0
        self._frees: list[np.ndarray] = []
        self._reader = ThreadPoolExecutor(1, f"{THREAD_NAME}-rows", yield_cores)
        self._threads = reading_threads()
        self._block: np.ndarray | None = None  # of rows that were read, until they are in their slots
        self.steps = 0

    @property
    def passes(self) -> float:
        """How often the table was gone through."""
        return self.steps / self.num_ranges

    @property
    def takes_more(self) -> bool:
        """Whether another batch can be added now."""
        if self._is_closed or self._is_ended:
            return False
        if self._forming is not None or not self._flight:
            return True
        return self._has_mark and self._has_memory and self._fits()

    def add(self, batch: WaitingBatch) -> None:
        """Append a batch to the group that forms."""
        if self._forming is None:
            self._forming = _Group(self._marks.popleft()[0], ranges=[None] * self.num_ranges)
            self._lacks[:, self._forming.mark], self._newest_rows[self._forming.mark] = True, 0
        group = self._forming
        counts = self._lacks, self._lacking, self._newest_rows
        new = _mark(batch.nodes, group.mark, self.shift, self._newest, *counts)
        group.batches.append(batch)
        group.num_batches += 1
        self._largest = max(self._largest, new)
        self._waiting += batch.nbytes
        self._is_closed = not self._has_memory or group.num_batches >= self._batches_a_step() or not self._fits()

    def end(self) -> None:
        """Be told that no batch follows."""
        self._is_ended = True

    @property
    def _has_mark(self) -> bool:
        """Whether there is a mark that no node has any more."""
        return bool(self._marks) and self.steps >= self._marks[0][1]

    @property
    def _has_memory(self) -> bool:
        """Whether another batch may wait."""
        return self.waiting_bytes is None or self._waiting < self.waiting_bytes

    def _batches_a_step(self) -> float:
        """Return how many batches may enter with each step, so that a pass over the table fits the slots.

        The distinct rows of x batches in a row are taken to be a * x ** p, as of the groups that are known. In a pass
        of K steps rows that the j newest groups alone need are held for K - j + 1 steps.
        """
        groups, marks = self._lately
        batches = sum(group.num_batches for group in groups)
        first, rows = max(1, int(self._newest_rows[self._forming.mark])), int(self._newest_rows[marks].sum())
        power = 1.0
        if batches > self._forming.num_batches:
            power = math.log(rows / first) / math.log(batches / self._forming.num_batches)
        power, steps = min(max(power, _LEAST_POWER), 1.0), self.num_ranges
        share = (
            float(np.diff((np.arange(steps + 1) / steps) ** power) @ (steps - np.arange(steps) + STEPS_AHEAD)) / steps
        )
        one = first / self._forming.num_batches**power
        return (len(self._slots) / (one * share)) ** (1 / power) / steps

    @property
    def _lately(self) -> tuple[list[_Group], np.ndarray]:
        """The groups of the last pass, with the one that forms, and their marks."""
        groups = [*self._flight, *([] if self._forming is None else [self._forming])][-self.num_ranges :]
        return groups, np.array([group.mark for group in groups])

    def _fits(self) -> bool:
        """Whether one more batch would leave each coming step the slots that it needs."""
        forming = [] if self._forming is None else [self._forming]
        marks = np.array([group.mark for group in (*self._flight, *forming)], np.int64)
        leaves = np.array([*(group.entry for group in self._flight), *[self.steps] * len(forming)])
        leaves += self.num_ranges + STEPS_AHEAD - 1
        steps = np.arange(self.steps, self.steps + self.num_ranges)
        held = self._holds[marks] + np.cumsum(self._lacking[steps % self.num_ranges][:, marks], axis=0)
        most = np.where(leaves > steps[:, None], held, 0).sum(axis=1).max()
        return int(most) + self._largest <= len(self._slots)

    def advance(self) -> None:
        """Begin the steps that can be begun."""
        self._settle()
        while len(self._under_way) < STEPS_AHEAD and not self.takes_more:
            forming = [] if self._forming is None else [self._forming]
            if not self._lacks[:, [group.mark for group in (*self._flight, *forming)]].any():
                return
            number = self.steps % self.num_ranges
            needed = int(self._lacking[number, self._lacks[number]].sum())
            if needed > self._num_free:
                if self._under_way or self.is_ready:
                    return
                self._grow(needed - self._num_free)
            for group in forming:
                group.entry = self.steps
                self._flight.append(group)
            self._forming, self._is_closed = None, False
            self._begin(number, needed)

    def _begin(self, number: int, num_rows: int) -> RangeRead:
        """Read a range for all groups that lack it."""
        first = number << self.shift
        newest = self._newest[first : first + (1 << self.shift)]
        words, before = np.zeros(-(-len(newest) // 64), np.uint64), np.zeros(-(-len(newest) // 64), np.int32)
        nodes, marks = np.empty(num_rows, np.int64), np.empty(num_rows, np.uint8)
        lives = np.zeros(_MARKS, np.bool_)
        lives[[group.mark for group in self._flight]] = True
        _list_needed(newest, first, self._lacks[number], lives, words, before, nodes, marks)
        self._num_free -= num_rows
        read = RangeRead(words, before, self._free[self._num_free : self._num_free + num_rows].copy())
        order, ends = np.argsort(marks, kind="stable"), np.cumsum(np.bincount(marks, minlength=_MARKS))
        for group in self._flight:
            if self._lacks[number, group.mark]:
                group.ranges[number] = read
                group.frees.append(read.slots[order[ends[group.mark - 1] : ends[group.mark]]])
                self._holds[group.mark] += len(group.frees[-1])
        self._lacks[number], self._lacking[number] = False, 0
        self.steps += 1
        read.done = self._reader.submit(self._read, nodes, read.slots)
        self._under_way.append(read.done)
        return read

    def _read(self, nodes: np.ndarray, slots: np.ndarray) -> None:
        array = self.features.raw.array
        step = max(1, _READ_BYTES // max(1, self._slots[:1].nbytes))
        if self._block is None:
            self._block = np.empty((step, *array.shape[1:]), array.dtype)
        for first in range(0, len(nodes), step):
            block = nodes[first : first + step]
            with clock.doing("read"):
                rows = read_rows(array, block, self._block[: len(block)], self._threads)
                _put_rows(_as_items(rows), slots[first : first + step], _as_items(self._slots))

    def _grow(self, num_slots: int) -> None:
        """Take more slots: a batch needs more than there are. No read is under way."""
        more = self._memory(len(self._slots) + num_slots)
        free = np.empty(len(more), np.int32)
        free[: self._num_free] = self._free[: self._num_free]
        free[self._num_free : self._num_free + num_slots] = np.arange(len(self._slots), len(more))
        self._slots, self._free, self._num_free = more, free, self._num_free + num_slots

    def _memory(self, num_slots: int) -> np.ndarray:
        """Return memory of so many slots, the first of which hold what they did."""
        raw = self.features.raw.array
        more = np.empty((num_slots, *raw.shape[1:]), raw.dtype)
        if self._slots is not None:
            more[: len(self._slots)] = self._slots
        return more

    @property
    def is_ready(self) -> bool:
        """Whether the next batch can be handed over."""
        return bool(self._flight) and self._flight[0].is_read

    @property
    def is_empty(self) -> bool:
        """Whether no batch waits."""
        return not self._flight and self._forming is None

    def wait(self) -> None:
        """Wait for the first read that is under way; raise what it raised."""
        self._under_way.popleft().result()

    def _settle(self) -> None:
        """Raise what reads that are done have raised."""
        while self._under_way and self._under_way[0].done():
            self.wait()

    def take(self) -> tuple[WaitingBatch, SweptRows]:
        """Return the next batch and a column with its rows, which serves until the next call."""
        self._settle()
        group = self._flight[0]
        batch = group.batches.popleft()
        self._waiting -= batch.nbytes
        rows = SweptRows(replace(self.features, array=self._slots), group.ranges, self.shift, self.features.num_rows)
        if not group.batches:
            self._flight.popleft()
            self._holds[group.mark] = 0
            self._marks.append((group.mark, self.steps + self.num_ranges))
            self._frees = group.frees
        return batch, rows

    def free(self) -> None:
        """Free the slots of a group whose last batch was taken, once its rows were."""
        for slots in self._frees:
            self._free[self._num_free : self._num_free + len(slots)] = slots
            self._num_free += len(slots)
        self._frees = []

    def close(self) -> None:
        """End the reads, and let go of the rows."""
        stop(self._reader, self._threads)
        self._slots, self._block = self._slots[:0].copy(), None


def ranges_of(num_nodes: int) -> tuple[int, int]:
    """Return the ranges of a table: node >> the first number is that of a node, the second is how many there are."""
    shift = max(6, (-(-num_nodes // RANGES) - 1).bit_length())
    return shift, max(1, -(-num_nodes // (1 << shift)))


def swept_table(features: Column) -> DenseFeatures | None:
    """Return the table of a column's rows that can be swept, the owners' where halos are packed; None: it has none."""
    table = features.owned if features.is_packed and not features.by_node_type else features
    return table if type(table) is DenseFeatures else None


def fill_swept(sampled: Iterator[WaitingBatch], maker: BatchMaker, sweep: Sweep) -> Iterator[MiniBatch]:
    """Yield sampled batches in order, with their features, which are read range by range for all that wait.

    Args:
        sampled: Batches in the order in which they are wanted; closed with this iterator.
        maker: Fills the batches.
        sweep: Of the maker's features; closed with this iterator.
    """
    try:
        while True:
            added = 0
            # Two batches are sampled for one that is handed over, so that the next group is there in time.
            while sweep.takes_more and (added < 2 or not sweep.is_ready):
                batch, added = next(sampled, None), added + 1
                sweep.end() if batch is None else sweep.add(batch)
            batch = None
            sweep.advance()
            if sweep.is_ready:
                waiting, rows = sweep.take()
                batch = maker.fill(waiting.batch(maker.pool.take), rows)
                sweep.free()
                del waiting, rows
                if sweep.is_empty and not sweep.takes_more:
                    sweep.close()  # Lightning stops at the last batch: no thread may outlive it
                yield batch
                del batch
            elif sweep.is_empty and not sweep.takes_more:
                return
            else:
                sweep.wait()
    finally:
        sampled.close()
        sweep.close()


@kernel
def _mark(nodes, mark, shift, newest, lacks, lacking, newest_rows):
    """Let a group be the newest one of nodes; return how many it was not yet."""
    new = 0
    for i in range(len(nodes)):
        if i + _AHEAD < len(nodes):
            prefetch(newest, np.int64(nodes[i + _AHEAD]))
        node = np.int64(nodes[i])
        number, old = node >> shift, newest[node]
        if old == mark:
            continue
        new += 1
        newest_rows[old] -= 1
        newest_rows[mark] += 1
        if lacks[number, old]:
            lacking[number, old] -= 1
        lacking[number, mark] += 1
        newest[node] = mark
    return new


@kernel
def _list_needed(newest, first, lacks, lives, words, before, nodes, marks):
    """List the nodes of a range that are to be read, and their marks; forget marks of groups that are gone."""
    at = 0
    for i in range(len(newest)):
        if i & 63 == 0:
            before[i >> 6] = at
        mark = newest[i]
        if mark == 0:
            continue
        if lacks[mark]:
            words[i >> 6] |= np.uint64(1) << np.uint64(i & 63)
            nodes[at], marks[at] = first + i, mark
            at += 1
        elif not lives[mark]:
            newest[i] = 0


@kernel
def _by_range(ids, shift, order, ends):
    """List the places of ids range by range; those of range i are [ends[i], ends[i + 1]) of the order."""
    for node in ids:
        ends[(node >> shift) + 1] += 1
    for number in range(1, len(ends)):
        ends[number] += ends[number - 1]
    at = ends[:-1].copy()
    for i in range(len(ids)):
        number = ids[i] >> shift
        order[at[number]] = i
        at[number] += 1


@kernel
def _find_slots(ids, chosen, first, words, before, slots, out):
    """Write the slots of the chosen ids, which are in the range that begins with the first, where they were read."""
    for i in chosen:
        at = ids[i] - first
        word, bit = words[at >> 6], np.uint64(1) << np.uint64(at & 63)
        if word & bit:
            out[i] = before[at >> 6] + np.int64(popcount(word & (bit - np.uint64(1))))
            prefetch(slots, out[i])
    for i in chosen:
        if out[i] >= 0:
            out[i] = slots[out[i]]


@kernel
def _put_rows(rows, slots, out):
    width, flat = rows.shape[1], out.reshape(-1)
    line = LINE_BYTES // rows.itemsize
    for i in range(len(slots)):
        if i + _AHEAD < len(slots):
            coming = np.int64(slots[i + _AHEAD]) * width
            for j in range(0, width, line):
                prefetch_line(flat, coming + j)
            prefetch_line(flat, coming + width - 1)
        row, target = rows[i], out[np.uint64(slots[i])]
        for j in range(width):
            target[j] = row[j]


def _as_items(rows: np.ndarray) -> np.ndarray:
    """View rows as the widest integers that divide them: compiled loops then copy any dtype."""
    row_bytes = rows[:1].nbytes if len(rows) else rows.dtype.itemsize * math.prod(rows.shape[1:])
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    return rows.reshape(len(rows), -1).view(np.dtype(f"u{size}"))
