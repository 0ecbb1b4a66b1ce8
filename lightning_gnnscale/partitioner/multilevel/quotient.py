"""The graph of clusters, added up in a hash table while a graph streams by."""

from itertools import pairwise

import numpy as np

from ...jit import kernel
from ...triton_kernels.intrinsics import prefetch
from ..row_threads import RowThreads
from .contraction import number_clusters
from .edge_graph import EdgeGraph
from .weighted_graph import BlockGraph, WeightedGraph

SHARDS = 2  # hash tables, one for a thread at a time; a fixed part of the method
STEP_ENTRIES = 1 << 19  # entries looked at between two calls of the tables
FIRST_BITS = 16  # slots of a new table, as a power of two
MAX_LOAD = 0.6  # of a table's slots

_EMPTY = np.int64(-1)
_ENTRIES_AHEAD, _KEYS_AHEAD = 32, 12
_HASH = np.uint64(0x9E3779B97F4A7C15)


def build_quotient(
    graph: BlockGraph | EdgeGraph, label: np.ndarray, max_edges: int, threads: RowThreads
) -> tuple[WeightedGraph | None, np.ndarray]:
    """Return the graph of clusters of a graph that is streamed.

    Args:
        graph: the graph; its edges weigh one each.
        label: (num_nodes,) labels, equal for nodes of a cluster, in [0, num_nodes).
        max_edges: edges of the quotient graph above which it is given up.
        threads: their number does not change the result.

    Returns:
        The quotient graph, or None where it has too many edges; and (num_nodes,) int32, the cluster number of every
        node, in the order of the clusters' lowest nodes.

    Cost: one pass, O(num_nodes + num_entries) time; about 27 bytes an edge of the quotient graph while it fills, 40
        while its rows are made, 16 afterwards.
    """
    coarse_of, num_coarse = number_clusters(label)
    tables = [_Table() for _ in range(SHARDS)]
    pairs = _pairs_of_edges if isinstance(graph, EdgeGraph) else _pairs_of_rows
    for keys, written in pairs(graph, coarse_of, num_coarse, threads):
        threads.map(lambda shard: tables[shard].add(keys, written, shard), range(SHARDS))  # noqa: B023
        if sum(table.size for table in tables) > max_edges:
            return None, coarse_of
    return _assemble(graph, tables, coarse_of, num_coarse), coarse_of


def _pairs_of_rows(graph: BlockGraph, coarse_of, num_coarse: int, threads: RowThreads):
    """Yield keys of pairs of clusters, and the ranges in which they stand, every edge once."""
    keys = np.empty(STEP_ENTRIES, np.int64)
    for block in graph.blocks():
        steps = np.searchsorted(block.indptr, np.arange(0, len(block.indices), STEP_ENTRIES), side="left")
        bounds = np.unique(np.append(steps, len(block.indptr) - 1))
        for start, stop in pairwise(bounds.tolist()):
            entries = int(block.indptr[stop] - block.indptr[start])
            if entries > len(keys):
                keys = np.empty(entries, np.int64)
            rows = block.indptr[start : stop + 1]
            yield keys, threads.run(_cluster_pairs, rows, start, *block[:3], coarse_of, num_coarse, keys)


def _pairs_of_edges(graph: EdgeGraph, coarse_of, num_coarse: int, threads: RowThreads):
    """Yield what `_pairs_of_rows` does."""
    keys, filled = np.empty(STEP_ENTRIES, np.int64), 0
    for src, dst in graph.edges("quotient"):
        for start in range(0, len(src), STEP_ENTRIES):
            stop = min(len(src), start + STEP_ENTRIES)
            if filled + stop - start > STEP_ENTRIES:
                yield keys, [(0, filled)]
                filled = 0
            filled += _edge_pairs(src[start:stop], dst[start:stop], coarse_of, num_coarse, keys[filled:])
    yield keys, [(0, filled)]


class _Table:
    """Weights by key, with open addressing; it grows as it fills."""

    def __init__(self):
        self.keys, self.weights = _new_slots(FIRST_BITS)
        self.size = 0

    def add(self, keys: np.ndarray, ranges: list[tuple[int, int]], shard: int) -> None:
        """Add one to the weight of each key in ranges of `keys` that belongs to the shard."""
        for position, stop in ranges:
            while position < stop:
                room = int(MAX_LOAD * len(self.keys)) - self.size
                position, added = _add_keys(keys, position, stop, shard, room, self.keys, self.weights)
                self.size += added
                if position < stop:
                    self._grow()

    def _grow(self) -> None:
        keys, weights = self.keys, self.weights
        self.keys, self.weights = _new_slots(len(keys).bit_length())
        _rehash(keys, weights, self.keys, self.weights)


def _new_slots(bits: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(1 << bits, _EMPTY, np.int64), np.zeros(1 << bits, np.int64)


def _assemble(
    graph: BlockGraph | EdgeGraph, tables: list[_Table], coarse_of: np.ndarray, num_coarse: int
) -> WeightedGraph:
    """Make rows, their neighbours ascending, and add up the nodes' weights; the tables are used up."""
    num_edges = sum(table.size for table in tables)
    weight_dtype = np.int32 if graph.total_edge_weight // 2 <= np.iinfo(np.int32).max else np.int64
    low, high = np.empty(num_edges, np.int32), np.empty(num_edges, np.int32)
    weight = np.empty(num_edges, weight_dtype)
    done = 0
    while tables:
        table = tables.pop()
        done = _list_edges(table.keys, table.weights, num_coarse, low, high, weight, done)
    indptr, indices, edge_weight = _sort_rows(low, high, weight, num_coarse)
    node_weight = np.zeros((num_coarse, graph.node_weight.shape[1]), np.int32)
    _add_weights(coarse_of, graph.node_weight, node_weight)
    return WeightedGraph(indptr, indices, edge_weight, node_weight)


@kernel
def _cluster_pairs(start, stop, offset, first_node, indptr, indices, coarse_of, num_coarse, keys):
    """Write the pairs of clusters of the entries of rows [offset + start, offset + stop), each edge once.

    Returns:
        Where they stand in `keys`: first, and one after the last.
    """
    first = indptr[offset + start] - indptr[offset]
    place, last = first, indptr[offset + stop]
    for row in range(offset + start, offset + stop):
        v = first_node + row
        mine = np.int64(coarse_of[v])
        for e in range(indptr[row], indptr[row + 1]):
            u = indices[e]
            if e + _ENTRIES_AHEAD < last:
                prefetch(coarse_of, np.int64(indices[e + _ENTRIES_AHEAD]))
            if u > v:
                other = np.int64(coarse_of[u])
                keys[place] = min(mine, other) * num_coarse + max(mine, other)
                place += other != mine
    return first, place


@kernel
def _edge_pairs(src, dst, coarse_of, num_coarse, keys):
    """Write the pairs of clusters of edges that lead out of their cluster; return how many."""
    place = 0
    for i in range(len(src)):
        if i + _ENTRIES_AHEAD < len(src):
            prefetch(coarse_of, np.int64(src[i + _ENTRIES_AHEAD]))
            prefetch(coarse_of, np.int64(dst[i + _ENTRIES_AHEAD]))
        mine, other = np.int64(coarse_of[src[i]]), np.int64(coarse_of[dst[i]])
        keys[place] = min(mine, other) * num_coarse + max(mine, other)
        place += other != mine
    return place


@kernel
def _add_keys(keys, position, stop, shard, room, table_keys, table_weights):
    """Add keys[position:stop]; stop before a new key when there is no room. Return where it stopped, new keys."""
    slots = np.int64(len(table_keys) - 1)
    added = 0
    while position < stop:
        key = keys[position]
        mixed = np.uint64(key) * _HASH
        if position + _KEYS_AHEAD < stop:
            early = np.int64((np.uint64(keys[position + _KEYS_AHEAD]) * _HASH) >> np.uint64(20)) & slots
            prefetch(table_keys, early)
            prefetch(table_weights, early)
        if np.int64(mixed >> np.uint64(63)) == shard:
            slot = np.int64(mixed >> np.uint64(20)) & slots
            while table_keys[slot] != key:
                if table_keys[slot] == _EMPTY:
                    if added >= room:
                        return position, added
                    table_keys[slot] = key
                    added += 1
                    break
                slot = (slot + 1) & slots
            table_weights[slot] += 1
        position += 1
    return position, added


@kernel
def _rehash(old_keys, old_weights, table_keys, table_weights):
    slots = np.int64(len(table_keys) - 1)
    for i in range(len(old_keys)):
        if old_keys[i] != _EMPTY:
            slot = np.int64((np.uint64(old_keys[i]) * _HASH) >> np.uint64(20)) & slots
            while table_keys[slot] != _EMPTY:
                slot = (slot + 1) & slots
            table_keys[slot], table_weights[slot] = old_keys[i], old_weights[i]


@kernel
def _list_edges(table_keys, table_weights, num_coarse, low, high, weight, done):
    for i in range(len(table_keys)):
        if table_keys[i] != _EMPTY:
            low[done], high[done] = table_keys[i] // num_coarse, table_keys[i] % num_coarse
            weight[done] = table_weights[i]
            done += 1
    return done


@kernel
def _sort_rows(low, high, weight, num_nodes):
    """Return both directions of every edge as rows with ascending neighbours: two stable counting sorts."""
    num_edges = len(low)
    starts = np.zeros(num_nodes + 1, np.int64)
    for i in range(num_edges):
        starts[low[i] + 1] += 1
        starts[high[i] + 1] += 1
    for c in range(num_nodes):
        starts[c + 1] += starts[c]
    by_column = np.empty(2 * num_edges, np.int64)  # edge number, its sign the direction, sorted by neighbour
    cursor = starts[:-1].copy()
    for i in range(num_edges):
        by_column[cursor[high[i]]] = i
        cursor[high[i]] += 1
        by_column[cursor[low[i]]] = ~i
        cursor[low[i]] += 1
    indices = np.empty(2 * num_edges, np.int32)
    edge_weight = np.empty(2 * num_edges, weight.dtype)
    cursor = starts[:-1].copy()
    for k in range(2 * num_edges):
        i = by_column[k]
        if i >= 0:
            row, column = low[i], high[i]
        else:
            i = ~i
            row, column = high[i], low[i]
        indices[cursor[row]], edge_weight[cursor[row]] = column, weight[i]
        cursor[row] += 1
    return starts, indices, edge_weight


@kernel
def _add_weights(coarse_of, node_weight, coarse_weight):
    every = np.int64(-1) if len(node_weight) == len(coarse_of) else np.int64(0)
    for v in range(len(coarse_of)):
        for d in range(node_weight.shape[1]):
            coarse_weight[coarse_of[v], d] += node_weight[v & every, d]
