"""The graph of clusters: contracted in memory, or added up in a hash table while a graph streams by."""

from itertools import pairwise

import numpy as np

from ...jit import kernel
from ...rng import fold
from ...triton_kernels.intrinsics import prefetch
from .. import phases
from .clustering import cluster_nodes
from .pair_table import EdgeSample, PairTable, edge_pairs, is_sampled, rows_of_pairs, shard_of, table_bytes
from .weighted_graph import BlockGraph, EdgeGraph, RowThreads, WeightedGraph, add_weights, total_weight

SHARDS = 2  # hash tables, one for a thread at a time; a fixed part of the method
STEP_ENTRIES = 1 << 19  # entries looked at between two calls of the tables
JOINED_EDGES = 0.5  # a node, held at most while clusters are joined by a sample of their edges
ENOUGH_EDGES = 64  # of a cluster: where so many fit, a sample of the edges tells which clusters belong together

_SALT, _SAMPLE_SALT = 0x53485249, 0x53414D50  # separate these uses of the seed from all others
_ENTRIES_AHEAD, _FEW, _ONE = np.uint64(32), np.uint64(16), np.uint64(1)
_ROWS_AHEAD, _NODES_AHEAD = 16, 16
_ENOUGH_TO_JOIN = 16  # edges of a cluster, to join those that belong together
_EDGES_A_PAIR = 4  # at least, of a graph for whose pairs there is space from the start
_GROWTH = 2  # of what a cluster may weigh, from one contraction to the next


def contract(
    graph: WeightedGraph, label: np.ndarray, threads: RowThreads | None = None, sample: int | None = None
) -> tuple[WeightedGraph, np.ndarray]:
    """Return the graph of clusters.

    Args:
        graph: the graph.
        label: (num_nodes,) int32, equal for nodes of a cluster, in [0, num_nodes).
        threads: their number does not change the result. None: one.
        sample: entries of a row that are read, >= 1: of a longer row every second, third and so on, which stands for
            those left out. An edge then weighs about as much in one of its rows as in the other. None: all.

    Returns:
        The coarse graph, its nodes in the order of their clusters' lowest node; and (num_nodes,) int32, the coarse node
        of every node.

    Cost: O(num_nodes + num_entries) time; a row's neighbours come in the order in which members list them.
    """
    coarse_of, num_coarse = number_clusters(label)
    members, starts, most = _sort_by_cluster(coarse_of, num_coarse, graph.indptr)
    node_weight = np.zeros((num_coarse, graph.node_weight.shape[1]), np.int32)
    add_weights(coarse_of, graph.node_weight, node_weight)
    indptr = np.zeros(num_coarse + 1, np.int64)
    indices = np.empty(len(graph.indices), np.int32)
    edge_weight = np.empty(len(graph.indices), graph.edge_weight.dtype)
    sample = len(graph.indices) + 1 if sample is None else sample
    rows = (*graph[:3], coarse_of, members, starts, most, sample, indptr, indices, edge_weight)
    ranges = RowThreads(1).run(_add_edges, most, *rows) if threads is None else threads.run(_add_edges, most, *rows)
    # Each range of rows has left space behind it, of the edges inside its clusters and those that became one.
    total = 0
    for start, stop, filled in ranges:
        indptr[start + 1 : stop + 1] += total
        total += filled
    pieces = [slice(most[start], most[start] + filled) for start, _, filled in ranges]
    indices, edge_weight = (
        array[pieces[0]].copy() if len(pieces) == 1 else np.concatenate([array[piece] for piece in pieces])
        for array in (indices, edge_weight)
    )
    return WeightedGraph(indptr, indices, edge_weight, node_weight), coarse_of


@kernel
def number_clusters(label):
    number, coarse_of = np.empty(len(label), np.int32), np.empty(len(label), np.int32)
    number[:] = -1
    num_coarse = 0
    for v in range(len(label)):
        if v + _NODES_AHEAD < len(label):
            prefetch(number, np.int64(label[v + _NODES_AHEAD]))
        c = label[v]
        if number[c] < 0:
            number[c] = num_coarse
            num_coarse += 1
        coarse_of[v] = number[c]
    return coarse_of, num_coarse


@kernel
def _sort_by_cluster(coarse_of, num_coarse, indptr):
    """Return the nodes cluster by cluster, where each cluster begins, and where its entries would if all were kept."""
    starts, most = np.zeros(num_coarse + 1, np.int64), np.zeros(num_coarse + 1, np.int64)
    for v in range(len(coarse_of)):
        if v + _NODES_AHEAD < len(coarse_of):
            prefetch(starts, np.int64(coarse_of[v + _NODES_AHEAD]) + 1)
            prefetch(most, np.int64(coarse_of[v + _NODES_AHEAD]) + 1)
        starts[coarse_of[v] + 1] += 1
        most[coarse_of[v] + 1] += indptr[v + 1] - indptr[v]
    for c in range(num_coarse):
        starts[c + 1] += starts[c]
        most[c + 1] += most[c]
    cursor = starts[:-1].copy()
    members = np.empty(len(coarse_of), np.int32)
    for v in range(len(coarse_of)):
        if v + 2 * _NODES_AHEAD < len(coarse_of):
            prefetch(cursor, np.int64(coarse_of[v + 2 * _NODES_AHEAD]))
            prefetch(members, cursor[coarse_of[v + _NODES_AHEAD]])
        members[cursor[coarse_of[v]]] = v
        cursor[coarse_of[v]] += 1
    return members, starts, most


@kernel
def _add_edges(
    first,
    end,
    indptr,
    indices,
    edge_weight,
    coarse_of,
    members,
    starts,
    most,
    sample,
    out_indptr,
    out_indices,
    out_weight,
):
    """Fill the coarse rows [first, end) one after the other, from where they would begin if all entries were kept.

    Returns:
        The range of rows, and how many entries they have; their ends in `out_indptr` are counted from its beginning.
    """
    each = ~np.uint64(0) if len(edge_weight) == len(indices) else np.uint64(0)
    num_coarse = len(starts) - 1
    place = np.empty(num_coarse, np.int64)  # of a neighbour in the row that is filled
    place[:] = -1
    begin = total = most[first]
    last = starts[end]
    for c in range(first, end):
        row_start = total
        for m in range(starts[c], starts[c + 1]):
            if m + _ROWS_AHEAD < last:
                prefetch(indptr, np.int64(members[m + _ROWS_AHEAD]))
                near = np.int64(members[m + _ROWS_AHEAD // 2])
                prefetch(indices, indptr[near])
                near = np.uint64(members[m + _ROWS_AHEAD // 4])
                for e in range(
                    np.uint64(indptr[near]), min(np.uint64(indptr[near]) + _FEW, np.uint64(indptr[near + _ONE]))
                ):
                    prefetch(coarse_of, np.int64(indices[e]))
            v = np.uint64(members[m])
            low, high = np.uint64(indptr[v]), np.uint64(indptr[v + _ONE])
            step = np.uint64(1 + np.int64(high - low - min(_ONE, high - low)) // sample)
            for e in range(low, high, step):
                if e + _ENTRIES_AHEAD < high:
                    prefetch(coarse_of, np.int64(indices[e + _ENTRIES_AHEAD]))
                other = np.uint64(coarse_of[np.uint64(indices[e])])
                if other == np.uint64(c):
                    continue
                if place[other] < row_start:
                    place[other] = total
                    out_indices[np.uint64(total)], out_weight[np.uint64(total)] = other, 0
                    total += 1
                out_weight[np.uint64(place[other])] += np.int64(step) * edge_weight[e & each]
        out_indptr[c + 1] = total - begin
    return first, end, total - begin


def shrink(
    graph: WeightedGraph, max_edges: int, largest: np.ndarray, seed: int, threads: RowThreads, few_nodes: float = 0
) -> tuple[WeightedGraph, np.ndarray]:
    """Contract a graph step by step until it has at most max_edges edges, or its clusters can grow no further.

    Args:
        graph: the graph.
        max_edges: edges that are few enough, >= 0.
        largest: (D,) int64, weight up to which a cluster grows, below 2**31.
        seed: decides order and ties.
        threads: their number does not change the result.
        few_nodes: nodes that are few enough, whatever their edges.

    Returns:
        The coarse graph, and (num_nodes,) int32, the coarse node of every node.
    """
    coarse_of = np.arange(graph.num_nodes, dtype=np.int32)
    mean = -(-total_weight(graph) // max(1, graph.num_nodes))
    limit = np.minimum(largest, np.maximum(2, _GROWTH * mean))
    step = 0
    while len(graph.indices) // 2 > max_edges and graph.num_nodes > few_nodes:
        label = cluster_nodes(graph, limit, fold(seed, _SALT, step), threads, passes=1)
        coarse, number = contract(graph, label, threads)
        if coarse.num_nodes == graph.num_nodes and (limit >= largest).all():
            break
        graph, coarse_of = coarse, number[coarse_of]
        limit, step = np.minimum(largest, _GROWTH * limit), step + 1
    return graph, coarse_of


def build_quotient(
    graph: BlockGraph | EdgeGraph,
    coarse_of: np.ndarray,
    num_coarse: int,
    max_edges: int,
    largest: np.ndarray | None,
    seed: int,
    threads: RowThreads,
    enough: float = ENOUGH_EDGES,
    grown: np.ndarray | None = None,
) -> WeightedGraph | None:
    """Return the graph of clusters of a graph that is streamed.

    Where there are more than max_edges edges, half of all that is counted is dropped and only half of the further edges
    are counted, again and again, where `enough` edges a cluster fit: weights then are those of a sample. Where they do
    not, it is given up; or, with `largest`, what was streamed so far is contracted in memory, and the pass goes on
    with coarser clusters.

    Args:
        graph: the graph; its edges weigh one each.
        coarse_of: (num_nodes,) int32, the cluster number of every node; changed in place where clusters are joined.
        num_coarse: number of clusters.
        max_edges: edges of the quotient graph at most; with `largest` more where clusters can grow no further.
        largest: (D,) int64, weight up to which clusters are joined. None: they are not.
        seed: decides how clusters are joined.
        threads: their number does not change the result.
        enough: edges a cluster, > 0, of which a sample is good enough.
        grown: (D,) int64, weight of a cluster. Where it is given, up to half an edge a node is held for a while: then
            fewer edges are enough, and clusters are joined by them up to this weight, until max_edges are left, or a
            sample of so many.

    Returns:
        The quotient graph, or None where it has too many edges.

    Cost: one pass, O(num_nodes + num_entries) time; about 27 bytes an edge of the quotient graph while it fills, 43
        while its rows are made, 16 afterwards.
    Source: edges are sampled as in Gottesbüren et al., linear-time multilevel partitioning via edge sparsification,
        2025; while they stream by, which is ours.
    """
    shift = num_coarse.bit_length()  # clusters that are joined later leave numbers out
    by_rows = not isinstance(graph, EdgeGraph)
    pairs = _pairs_of_rows if by_rows else _pairs_of_edges
    sample = EdgeSample(fold(seed, _SAMPLE_SALT))
    few, few_nodes = max_edges, max_edges / enough
    if grown is not None and num_coarse > few_nodes and JOINED_EDGES * graph.num_nodes > max_edges:
        max_edges, enough = int(JOINED_EDGES * graph.num_nodes), min(enough, _ENOUGH_TO_JOIN)
    # What is in doubt is left to grow: few of many edges run between clusters that differ.
    expected = min(max_edges, graph.total_edge_weight // 2 // _EDGES_A_PAIR) / SHARDS
    tables = [PairTable(shift, None if by_rows else shard, expected=expected) for shard in range(SHARDS)]
    for keys, written in pairs(graph, coarse_of, shift, sample, threads):
        threads.map(lambda shard: tables[shard].add(keys, written[shard]), range(SHARDS))  # noqa: B023
        while enough * num_coarse <= max_edges < sum(table.size for table in tables):
            sample.halve(tables, threads)
        if sum(table.size for table in tables) > max_edges:
            if largest is None:
                return None
            partial = _assemble(graph, tables, coarse_of, num_coarse)
            partial, joined = shrink(partial, max_edges // 2, largest, fold(seed, num_coarse), threads)
            coarse_of[:] = joined[coarse_of]
            num_coarse = partial.num_nodes
            tables = [PairTable.of(partial, shift, shard) for shard in range(SHARDS)]
            max_edges = max(max_edges, len(partial.indices))  # where clusters can grow no further
            del partial
    quotient = _assemble(graph, tables, coarse_of, num_coarse)
    if len(quotient.indices) // 2 > few and grown is not None:
        quotient, joined = shrink(quotient, few, grown, fold(seed, num_coarse), threads, few_nodes)
        if len(quotient.indices) // 2 > few and quotient.num_nodes > few_nodes:
            return None  # too thin a sample would be left of so many clusters
        coarse_of[:] = joined[coarse_of]
        quotient = _thinned(graph, quotient, few, coarse_of, sample, threads)
    phases.note(quotient_sample=sample.rate)
    return quotient


def _thinned(graph, quotient: WeightedGraph, max_edges: int, coarse_of, sample: EdgeSample, threads) -> WeightedGraph:
    """Return a graph of clusters with a sample of its weight, halved until it has at most max_edges edges."""
    num_coarse = quotient.num_nodes
    while len(quotient.indices) // 2 > max_edges:
        tables = [PairTable.of(quotient, num_coarse.bit_length(), shard) for shard in range(SHARDS)]
        sample.halve(tables, threads)
        quotient = _assemble(graph, tables, coarse_of, num_coarse)
    return quotient


def quotient_bytes(num_edges: float) -> int:
    """Return what `build_quotient` holds at its peak for a graph of so many edges: tables that grow, or its rows."""
    return int(max(1.5 * SHARDS * table_bytes(num_edges / SHARDS), 43 * num_edges))


def _pairs_of_rows(graph: BlockGraph, coarse_of, shift: int, sample: EdgeSample, threads: RowThreads):
    """Yield keys of pairs of clusters, and by shard the ranges that hold its own, every edge once."""
    keys = np.empty(STEP_ENTRIES, np.int64)
    for block in graph.blocks():
        steps = np.searchsorted(block.indptr, np.arange(0, len(block.indices), STEP_ENTRIES), side="left")
        bounds = np.unique(np.append(steps, len(block.indptr) - 1))
        for start, stop in pairwise(bounds.tolist()):
            entries = int(block.indptr[stop] - block.indptr[start])
            if entries > len(keys):
                keys = np.empty(entries, np.int64)
            rows = block.indptr[start : stop + 1]
            ends = threads.run(_cluster_pairs, rows, start, *block[:3], coarse_of, shift, keys, sample.bound)
            yield keys, ([one[:2] for one in ends], [one[2:] for one in ends])


def _pairs_of_edges(graph: EdgeGraph, coarse_of, shift: int, sample: EdgeSample, threads: RowThreads):
    """Yield what `_pairs_of_rows` does, every STEP_ENTRIES edges: however they come in chunks; shards lie mixed."""
    keys, filled, seen = np.empty(STEP_ENTRIES, np.int64), 0, 0
    for src, dst in graph.edges("quotient"):
        start = 0
        while start < len(src):
            stop = min(len(src), start + STEP_ENTRIES - seen)
            filled += edge_pairs(src[start:stop], dst[start:stop], coarse_of, shift, keys[filled:], sample.bound)
            seen += stop - start
            start = stop
            if seen == STEP_ENTRIES:
                yield keys, ([(0, filled)],) * SHARDS
                filled = seen = 0
    yield keys, ([(0, filled)],) * SHARDS


def _assemble(
    graph: BlockGraph | EdgeGraph, tables: list[PairTable], coarse_of: np.ndarray, num_coarse: int
) -> WeightedGraph:
    """Make rows, their neighbours ascending, and add up the nodes' weights; the tables are used up."""
    weight_dtype = np.int32 if graph.total_edge_weight // 2 <= np.iinfo(np.int32).max else np.int64
    rows = rows_of_pairs(tables, num_coarse, weight_dtype)
    node_weight = np.zeros((num_coarse, graph.node_weight.shape[1]), np.int32)
    add_weights(coarse_of, graph.node_weight, node_weight)
    return WeightedGraph(*rows, node_weight)


@kernel
def _cluster_pairs(start, stop, offset, first_node, indptr, indices, coarse_of, shift, keys, bound):
    """Write the pairs of clusters of the entries of rows [offset + start, offset + stop), each edge once.

    Args:
        bound: which edges count; see `EdgeSample`.

    Returns:
        Where they are in `keys`: first and one after the last of shard 0, then of shard 1, which lies at the end.
    """
    first, end = indptr[offset + start] - indptr[offset], indptr[offset + stop] - indptr[offset]
    front, back, step = np.uint64(first), np.uint64(end - 1), np.uint64(1)
    last, ahead = np.uint64(indptr[offset + stop]), np.uint64(_ENTRIES_AHEAD)
    counts_all = bound[0] == ~np.uint64(0)
    for row in range(np.uint64(offset + start), np.uint64(offset + stop)):
        v = np.uint64(first_node) + row
        mine = np.int64(coarse_of[v])
        for e in range(np.uint64(indptr[row]), np.uint64(indptr[row + step])):
            u = np.uint64(indices[e])
            if e + ahead < last:
                prefetch(coarse_of, np.int64(indices[e + ahead]))
            if u > v and (counts_all or is_sampled(u, v, bound)):
                other = np.int64(coarse_of[u])
                key = (min(mine, other) << shift) + max(mine, other)
                # Both places are free as long as an entry is left; without a branch, which would be mispredicted.
                keys[front] = keys[back] = key
                shard, counts = shard_of(key), np.uint64(other != mine)
                front += counts & (step - shard)
                back -= counts & shard
    return first, np.int64(front), np.int64(back + step), end
