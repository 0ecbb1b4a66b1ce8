"""HeiStream and CUTTANA, written from their papers, as peers of the streamed partitioners: their cuts, not their speed.

Nodes come in the order of their ids, each with all its neighbours, from rows that are held in memory. That is what the
published programs read from disk: seconds are those of this code, and bytes are not the papers'.
"""

import numpy as np

from lightning_gnnscale.graph import id_dtype
from lightning_gnnscale.jit import kernel
from lightning_gnnscale.partitioner import phases
from lightning_gnnscale.partitioner.graph_access.simple_graph import symmetric_adjacency
from lightning_gnnscale.partitioner.graph_input import GraphInput, graph_partitioner
from lightning_gnnscale.partitioner.multilevel.clustering import cluster_nodes
from lightning_gnnscale.partitioner.multilevel.cycle import empty_heap, heap_put, heap_take
from lightning_gnnscale.partitioner.multilevel.quotient import contract
from lightning_gnnscale.partitioner.multilevel.weighted_graph import ONE, RowThreads, WeightedGraph
from lightning_gnnscale.rng import fold

SLACK = 1.03
GAMMA = 1.5
COARSE_NODES = 64  # a part, at which HeiStream ends the contraction of a batch
ROUNDS = 5  # of HeiStream's refinement at a level
THETA, DEGREE_SCALE, HUB = 2.0, 100.0, 1000  # CUTTANA's, as published


def _rows(graph: GraphInput) -> WeightedGraph:
    degree = graph.open_simple()
    with phases.phase("rows"):
        adjacency = symmetric_adjacency(graph.simple, degree, id_dtype(graph.num_nodes), graph.progress)
    return WeightedGraph(*adjacency, ONE, np.ones((1, 1), np.int32))


def _cap(num_nodes: int, num_parts: int) -> int:
    return max(-(-num_nodes // num_parts), int(SLACK * num_nodes / num_parts))


def _penalty(num_parts: int, num_nodes: float, num_edges: float) -> float:
    """Return Fennel's alpha."""
    return num_parts ** (GAMMA - 1) * num_edges / max(1.0, num_nodes) ** GAMMA


@graph_partitioner("heistream", resumable=False, slack=SLACK)
def heistream(graph: GraphInput, num_parts: int, *, buffer_nodes: int = 1 << 15) -> np.ndarray:
    """Partition batch by batch: a batch and the parts so far are contracted, assigned by Fennel's rule, and refined.

    Args:
        graph: the graph.
        num_parts: number of parts.
        buffer_nodes: nodes of a batch.

    Returns:
        (num_nodes,) int32 part ids.

    Source: Faraj and Schulz, Buffered Streaming Graph Partitioning, ACM JEA 27, 2022. Differs: edges to nodes of later
        batches are left out (the paper's minimal model); clusters and contraction are this project's label
        propagation, which is the same method.
    """
    rows, threads = _rows(graph), RowThreads(1)
    num_nodes = rows.num_nodes
    part, load = np.full(num_nodes, -1, np.int32), np.zeros(num_parts, np.int64)
    cap = _cap(num_nodes, num_parts)
    alpha = _penalty(num_parts, num_nodes, len(rows.indices) / 2)
    with phases.phase("batches"):
        for first in range(0, num_nodes, buffer_nodes):
            last = min(num_nodes, first + buffer_nodes)
            indptr, indices, towards = _batch(rows.indptr, rows.indices, first, last, part, num_parts)
            batch, seed = WeightedGraph(indptr, indices, ONE, np.ones((last - first, 1), np.int32)), fold(0, first)
            part[first:last] = _assign_batch(batch, towards, load, cap, alpha, seed + int(graph.seed), threads)
    return part


def _assign_batch(batch: WeightedGraph, towards, load, cap: int, alpha: float, seed: int, threads) -> np.ndarray:
    num_parts, levels = len(load), []
    limit = np.array([max(1, batch.num_nodes // (COARSE_NODES * num_parts // 4 + 1))])
    while batch.num_nodes > COARSE_NODES * num_parts and len(batch.indices):
        coarse, coarse_of = contract(batch, cluster_nodes(batch, limit, fold(seed, len(levels)), threads))
        if coarse.num_nodes > 0.95 * batch.num_nodes:
            break
        levels.append((batch, towards, coarse_of))
        merged = np.zeros((coarse.num_nodes, num_parts), towards.dtype)
        np.add.at(merged, coarse_of, towards)
        batch, towards = coarse, merged
    part = np.full(batch.num_nodes, -1, np.int32)
    _place(*batch, towards, part, load, cap, alpha, 1 + ROUNDS)
    for finer, finer_towards, coarse_of in reversed(levels):
        part = part[coarse_of]
        _place(*finer, finer_towards, part, load, cap, alpha, ROUNDS)
    return part


@kernel
def _batch(indptr, indices, first, last, part, num_parts):
    """Return the rows of a batch within it, and (nodes, num_parts) int32, each node's edges to parts so far."""
    own, towards = np.zeros(last - first + 1, np.int64), np.zeros((last - first, num_parts), np.int32)
    near, filled = np.empty(indptr[last] - indptr[first], np.int32), 0
    for v in range(first, last):
        for e in range(indptr[v], indptr[v + 1]):
            u = indices[e]
            if first <= u < last:
                near[filled] = u - first
                filled += 1
            elif u < first:
                towards[v - first, part[u]] += 1
        own[v - first + 1] = filled
    return own, near[:filled].copy(), towards


@kernel
def _place(indptr, indices, edge_weight, node_weight, towards, part, load, cap, alpha, rounds):
    """Give each node the part of the highest score by Fennel's rule, of those with space; again and again."""
    each = np.int64(-1) if len(edge_weight) == len(indices) else np.int64(0)
    conn = np.zeros(len(load), np.float64)
    for _ in range(rounds):
        moved = 0
        for v in range(len(part)):
            weight, own = node_weight[v, 0], part[v]
            for p in range(len(load)):
                conn[p] = towards[v, p]
            for e in range(indptr[v], indptr[v + 1]):
                if part[indices[e]] >= 0:
                    conn[part[indices[e]]] += edge_weight[e & each]
            if own >= 0:
                load[own] -= weight
            best, most = -1, -np.inf
            for p in range(len(load)):
                score = conn[p] - weight * alpha * GAMMA * load[p] ** (GAMMA - 1)
                if score > most and (load[p] + weight <= cap or p == own):
                    best, most = p, score
            if best < 0:
                best = np.argmin(load)
            load[best] += weight
            part[v] = best
            moved += best != own
        if moved == 0:
            break


@graph_partitioner("cuttana", resumable=False, slack=SLACK)
def cuttana(graph: GraphInput, num_parts: int, *, buffer_nodes: int = 1_000_000, sub_parts: int = 4096) -> np.ndarray:
    """Place nodes out of a buffer, those first of which most is known; then trade small sub-parts between parts.

    Args:
        graph: the graph.
        num_parts: number of parts.
        buffer_nodes: nodes that wait at most.
        sub_parts: sub-parts of all parts together, about.

    Returns:
        (num_nodes,) int32 part ids.

    Source: Hajidehi, Sridhar and Seltzer, CUTTANA, PVLDB 18(1), 2024. Differs: the best trade is found by looking at
        all of them, not in a segment tree; its threads are left out.
    """
    rows, each = _rows(graph), max(1, sub_parts // num_parts)
    num_nodes, num_edges = rows.num_nodes, len(rows.indices) / 2
    slack = SLACK - 1
    loose = 1 + min(2 * slack, slack + 0.5)
    cap = loose * num_nodes / num_parts
    limits = np.array([cap, loose * cap / each + 1])
    alphas = np.array([_penalty(num_parts, num_nodes, num_edges), _penalty(each, cap, loose * num_edges / num_parts)])
    with phases.phase("stream"):
        part, sub = np.full((2, num_nodes), -1, np.int32)
        heap = empty_heap(num_nodes)
        _stream(rows.indptr, rows.indices, part, sub, num_parts, each, limits, alphas, buffer_nodes, *heap)
    with phases.phase("trades"):
        label = part * each + sub
        parts = np.arange(num_parts * each, dtype=np.int32) // each
        first = np.full(num_parts * each, -1, np.int32)
        first[label[::-1]] = np.arange(num_nodes - 1, -1, -1, dtype=np.int32)
        coarse, coarse_of = contract(rows, first[label])
        at = np.empty(coarse.num_nodes, np.int32)
        at[coarse_of] = parts[label]
        _trade(
            coarse.indptr,
            coarse.indices,
            coarse.edge_weight,
            coarse.node_weight,
            at,
            num_parts,
            _cap(num_nodes, num_parts),
        )
    return at[coarse_of]


@kernel
def _stream(indptr, indices, part, sub, num_parts, each, limits, alphas, space, heap, place, keys, size):
    num_nodes = len(part)
    load, sub_load = np.zeros(num_parts, np.int64), np.zeros((num_parts, each), np.int64)
    known, waits = np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.bool_)
    ready, num_ready = np.empty(num_nodes, np.int32), 0
    v = 0
    while v < num_nodes or size[0] > 0:
        take = np.int64(-1)
        if num_ready > 0:  # all its neighbours are placed: nothing more will be known of it
            num_ready -= 1
            take = np.int64(ready[num_ready])
            keys[take] = np.inf
            heap_put(heap, place, keys, size, take, np.inf)
            take = np.int64(heap_take(heap, place, keys, size))
        elif v < num_nodes and size[0] < space:
            degree = indptr[v + 1] - indptr[v]
            if degree >= HUB or degree == 0:
                take = v
            else:
                waits[v] = True
                heap_put(heap, place, keys, size, v, THETA * known[v] / degree + degree / DEGREE_SCALE)
                if known[v] == degree:
                    ready[num_ready] = v
                    num_ready += 1
            v += 1
        else:
            take = np.int64(heap_take(heap, place, keys, size))
        if take < 0:
            continue
        waits[take] = False
        _put(take, indptr, indices, part, sub, load, sub_load, limits, alphas)
        for e in range(indptr[take], indptr[take + 1]):
            u = np.int64(indices[e])
            known[u] += 1
            if waits[u]:
                degree = indptr[u + 1] - indptr[u]
                heap_put(heap, place, keys, size, u, THETA * known[u] / degree + degree / DEGREE_SCALE)
                if known[u] == degree:
                    ready[num_ready] = u
                    num_ready += 1


@kernel
def _put(v, indptr, indices, part, sub, load, sub_load, limits, alphas):
    """Place a node in a part, and in a sub-part of it, by Fennel's rule."""
    conn = np.zeros(len(load), np.int64)
    for e in range(indptr[v], indptr[v + 1]):
        if part[indices[e]] >= 0:
            conn[part[indices[e]]] += 1
    own = _best(conn, load, limits[0], alphas[0])
    inner = np.zeros(sub_load.shape[1], np.int64)
    for e in range(indptr[v], indptr[v + 1]):
        if part[indices[e]] == own:
            inner[sub[indices[e]]] += 1
    part[v], sub[v] = own, _best(inner, sub_load[own], limits[1], alphas[1])
    load[own] += 1
    sub_load[own, sub[v]] += 1


@kernel
def _best(conn, load, limit, alpha):
    best, most = np.argmin(load), -np.inf
    for p in range(len(load)):
        score = conn[p] - alpha * GAMMA * load[p] ** (GAMMA - 1)
        if load[p] + 1 <= limit and score > most:
            best, most = p, score
    return best


@kernel
def _trade(indptr, indices, edge_weight, node_weight, part, num_parts, cap):
    """Move the sub-part that lowers the cut most to another part with space, until none does."""
    conn, load = np.zeros((len(part), num_parts), np.int64), np.zeros(num_parts, np.int64)
    for s in range(len(part)):
        load[part[s]] += node_weight[s, 0]
        for e in range(indptr[s], indptr[s + 1]):
            conn[s, part[indices[e]]] += edge_weight[e]
    while True:
        best, target, most = -1, -1, 0
        for s in range(len(part)):
            over = load[part[s]] > cap
            for p in range(num_parts):
                gain = conn[s, p] - conn[s, part[s]]
                if p != part[s] and load[p] + node_weight[s, 0] <= cap:
                    if over:
                        gain += np.int64(1) << 40  # a part over its cap sheds what costs least
                    if gain > most:
                        best, target, most = s, p, gain
        if best < 0:
            break
        own = part[best]
        load[own] -= node_weight[best, 0]
        load[target] += node_weight[best, 0]
        part[best] = target
        for e in range(indptr[best], indptr[best + 1]):
            conn[indices[e], own] -= edge_weight[e]
            conn[indices[e], target] += edge_weight[e]
