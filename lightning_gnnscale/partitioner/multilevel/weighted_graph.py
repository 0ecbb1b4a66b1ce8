"""Graphs as the multilevel method reads them: weighted rows, or edges pass after pass; and threads that share them."""

import collections
import queue
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numba
import numpy as np

from ...jit import kernel
from ...system import usable_cores
from ...triton_kernels.intrinsics import prefetch
from ..graph_access.simple_graph import SimpleGraph, symmetric_adjacency

PART_DTYPE = np.dtype(np.int16)  # of part ids while they are worked on: small arrays stay in the processor's cache
MAX_PARTS = int(np.iinfo(PART_DTYPE).max)
ONE = np.ones(1, np.int32)  # every edge weighs one
MIN_ENTRIES = 1 << 14  # below this many entries a thread costs more than it saves

_HASH = np.uint64(0x9E3779B97F4A7C15)
_LABELS_AHEAD = 16
_ROWS, _HALF = np.uint64(6), np.uint64(32)  # 64 consecutive nodes go to one share


class WeightedRows(NamedTuple):
    """Consecutive rows of a symmetric graph.

    Attributes:
        first_node: the node of row 0.
        indptr: (num_rows + 1,) int64, from 0.
        indices: (num_entries,) int32 or int64, neighbours; every edge is in both rows, self-loops in none.
        edge_weight: (num_entries,) int32 or int64; or (1,): every entry weighs that.
    """

    first_node: int
    indptr: np.ndarray
    indices: np.ndarray
    edge_weight: np.ndarray


class WeightedGraph(NamedTuple):
    """A graph in memory: one block.

    Attributes:
        indptr, indices, edge_weight: see `WeightedRows`.
        node_weight: (num_nodes, D) int32; or (1, D): every node weighs that.
    """

    indptr: np.ndarray
    indices: np.ndarray
    edge_weight: np.ndarray
    node_weight: np.ndarray

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def degree(self) -> np.ndarray:
        """(num_nodes,) entries a row."""
        return np.diff(self.indptr)

    @property
    def total_edge_weight(self) -> int:
        """The weight of all entries: twice that of the edges."""
        times = len(self.indices) if len(self.edge_weight) == 1 else 1
        return int(self.edge_weight.sum(dtype=np.int64)) * times

    def blocks(self, backwards: bool = False) -> Iterator[WeightedRows]:
        yield WeightedRows(0, self.indptr, self.indices, self.edge_weight)


class BlockGraph(NamedTuple):
    """A graph on disk, read block by block, in order, as often as asked.

    Attributes:
        csc: an ExternalCSC.
        node_weight: as in `WeightedGraph`.
    """

    csc: object
    node_weight: np.ndarray

    @property
    def num_nodes(self) -> int:
        return self.csc.num_nodes

    @property
    def degree(self) -> np.ndarray:
        """(num_nodes,) entries a row."""
        return self.csc.degree

    @property
    def total_edge_weight(self) -> int:
        """The weight of all entries: twice that of the edges."""
        return 2 * self.csc.num_edges

    def blocks(self, backwards: bool = False) -> Iterator[WeightedRows]:
        for block in self.csc.blocks(backwards=backwards):
            yield WeightedRows(block.first_node, block.indptr, block.indices, ONE)


def total_weight(graph: WeightedGraph | BlockGraph) -> np.ndarray:
    """Return (D,) int64: the weight of all nodes."""
    times = graph.num_nodes if len(graph.node_weight) == 1 else 1
    return graph.node_weight.sum(axis=0, dtype=np.int64) * times


class EdgeGraph(NamedTuple):
    """A graph whose edges are read from its stream as often as asked; every edge weighs one.

    Attributes:
        simple: the undirected simple graph behind the stream.
        node_weight: (num_nodes, D) int32; or (1, D): every node weighs that.
        progress: called as progress(what, edges done, edges in all) once a chunk; or None.
    """

    simple: SimpleGraph
    node_weight: np.ndarray
    progress: Callable | None = None

    @property
    def num_nodes(self) -> int:
        return self.simple.num_nodes

    @property
    def num_edges(self) -> int:
        return self.simple.num_edges

    @property
    def total_edge_weight(self) -> int:
        """The weight of all edges, each counted at both ends."""
        return 2 * self.simple.num_edges

    def edges(self, what: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield all edges once, in blocks of (src, dst) that the next step overwrites."""
        return self.simple.one_pass(what, self.progress)


def rows_of(graph: EdgeGraph, degree: np.ndarray) -> WeightedGraph:
    """Return the whole graph in memory, its rows in the order of the stream; see `symmetric_adjacency`."""
    adjacency = symmetric_adjacency(graph.simple, degree, degree.dtype, graph.progress, "rows")
    return WeightedGraph(*adjacency, ONE, graph.node_weight)


def part_loads(node_weight: np.ndarray, part: np.ndarray, num_parts: int) -> np.ndarray:
    """Return (num_parts, D) int64: what each part weighs."""
    load = np.zeros((num_parts, node_weight.shape[1]), np.int64)
    add_weights(part, node_weight, load)
    return load


@kernel
def add_weights(label, node_weight, weight):
    """Add the weight of every node to that of what it belongs to: a cluster, a coarse node, a part."""
    every, flat = np.int64(-1) if len(node_weight) == len(label) else np.int64(0), weight.reshape(-1)
    for v in range(len(label)):
        if v + _LABELS_AHEAD < len(label):
            prefetch(flat, np.int64(label[v + _LABELS_AHEAD]) * node_weight.shape[1])
        for d in range(node_weight.shape[1]):
            weight[label[v], d] += node_weight[v & every, d]


@kernel(inline="always")
def share_of(node, num_shares):
    """Return which of the shares a node belongs to that threads divide nodes into."""
    return np.int64((((np.uint64(node) >> _ROWS) * _HASH >> _HALF) * np.uint64(num_shares)) >> _HALF)


def num_cores() -> int:
    """Return how many threads the partitioners use: the cores of this process, at most NUMBA_NUM_THREADS."""
    cores = usable_cores()
    return max(1, min(cores, numba.config.NUMBA_NUM_THREADS))


class RowThreads:
    """Runs kernels over ranges of rows; a kernel must give a row the same result whatever range the row is in.

    Args:
        num_threads: >= 1; None: `num_cores()`.
    """

    def __init__(self, num_threads: int | None = None):
        self.num_threads = num_cores() if num_threads is None else num_threads
        self._helpers: list[threading.Thread] = []
        self._calls: queue.SimpleQueue = queue.SimpleQueue()

    def run(self, kernel, indptr: np.ndarray | range, *args) -> list:
        """Call kernel(start_row, stop_row, *args) so that all rows are covered; return the results in row order.

        Args:
            kernel: a compiled function.
            indptr: (num_rows + 1,), by which the ranges get about equal numbers of entries; range(num_rows + 1): of
                rows.
        """
        return self.map(lambda rows: kernel(*rows, *args), self.ranges(indptr))

    def ranges(self, indptr: np.ndarray | range) -> list[tuple[int, int]]:
        """Return (start_row, stop_row) of the ranges that `run` makes of all rows; see there."""
        num_rows = len(indptr) - 1
        num_entries = int(indptr[-1] - indptr[0])
        num_ranges = min(self.num_threads, num_entries // MIN_ENTRIES)
        if num_ranges <= 1:
            return [(0, num_rows)]
        bounds = [bisect_left(indptr, indptr[0] + num_entries * i // num_ranges) for i in range(num_ranges)] + [
            num_rows
        ]
        return list(pairwise(bounds))

    def share(self, kernel, num_entries: int, *args) -> list:
        """Call kernel(share, num_shares, *args) for all shares of the nodes; return the results in order.

        Args:
            kernel: a compiled function that reads all entries and writes to nodes of its own share alone.
            num_entries: what it reads; few of them make one share.
        """
        num_shares = min(self.num_threads, max(1, num_entries // MIN_ENTRIES))
        if num_shares == 1:
            return [kernel(0, 1, *args)]
        return self.map(lambda share: kernel(share, num_shares, *args), range(num_shares))

    def map(self, function, items) -> list:
        """Call function(item) for each item, several at a time, this thread too; return the results in order."""
        items = list(items)
        if self.num_threads == 1 or len(items) <= 1:
            return [function(item) for item in items]
        while len(self._helpers) < min(self.num_threads, len(items)) - 1:
            helper = threading.Thread(target=_help, args=(self._calls,), name="gnnscale-rows", daemon=True)
            helper.start()
            self._helpers.append(helper)
        shared = _SharedItems(function, items)
        for _ in range(min(self.num_threads, len(items)) - 1):
            self._calls.put(shared.take_turns)
        shared.take_turns()
        return shared.results()

    def each(self, function, items) -> list:
        """Call function(item, threads) for each item, several at a time, with the threads that are left to one."""
        items = list(items)
        at_a_time = min(self.num_threads, len(items))
        if at_a_time <= 1:
            return [function(item, self) for item in items]

        def call(item):
            own = RowThreads(self.num_threads // at_a_time)
            try:
                return function(item, own)
            finally:
                own.close()

        return self.map(call, items)

    def close(self) -> None:
        """End the threads."""
        for _ in self._helpers:
            self._calls.put(None)
        for helper in self._helpers:
            helper.join()
        self._helpers.clear()

    def __del__(self):
        for _ in self._helpers:
            self._calls.put(None)


def _help(calls: queue.SimpleQueue) -> None:
    """Make calls until there is None to make."""
    while (call := calls.get()) is not None:
        call()
        del call  # what it holds is not kept until the next one


class _SharedItems:
    """Items that several threads take one after the other, each the next one that nobody has taken.

    A call costs a few microseconds, a tenth of what futures take: batches of a tenth of a millisecond are shared too.
    """

    def __init__(self, function, items: list):
        self._function, self._items = function, items
        self._left = collections.deque(range(len(items)))
        self._done: queue.SimpleQueue = queue.SimpleQueue()

    def take_turns(self) -> None:
        """Take items until none is left; after an error nobody takes any."""
        while self._left:
            try:
                i = self._left.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                self._done.put((i, self._function(self._items[i]), None))
            except BaseException as error:
                while self._left:
                    with suppress(IndexError):
                        self._done.put((self._left.popleft(), None, None))
                self._done.put((i, None, error))

    def results(self) -> list:
        """Wait for what other threads have taken; return the results in order, or raise the first item's error."""
        found = sorted((self._done.get() for _ in self._items), key=itemgetter(0))
        for error in [one[2] for one in found if one[2] is not None]:
            raise error
        return [result for _, result, _ in found]
