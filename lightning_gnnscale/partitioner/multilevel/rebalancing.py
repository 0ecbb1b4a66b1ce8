"""Rebalancing: nodes leave overfull parts, those first that lose least for what they relieve."""

import numpy as np

from ...jit import kernel
from ...rng import combine, fold
from ..row_threads import RowThreads
from .weighted_graph import BlockGraph, WeightedGraph

LOOSE_ROUNDS = 20  # from then on a part is entered only where there is room, unless nothing moves
MAX_ROUNDS = 40
INNER = 0.998

_SALT = 0x52454241  # keeps this use of the seed apart from all others


def rebalance(
    graph: WeightedGraph | BlockGraph,
    part: np.ndarray,
    load: np.ndarray,
    cap: np.ndarray,
    inner: np.ndarray,
    seed: int,
    threads: RowThreads,
    target: np.ndarray,
    ratio: np.ndarray,
) -> bool:
    """Move nodes until no part is over its cap in any dimension, or until no single move helps.

    Each round reads the graph once: every node of an overfull part finds the part that it leaves to at the least loss
    of edges per relief. Then nodes move, cheapest first, as long as their part is overfull and their move still
    relieves. What falls with every move is the potential, the sum over parts and dimensions of
    max(0, load / cap - 1)^2: a heavy node may enter a full part, which then sheds a light one. After
    LOOSE_ROUNDS rounds a move must fit, as long as there are such moves: that settles the last few units.

    Args:
        graph: the graph.
        part: (num_nodes,) int16; changed in place.
        load: (num_parts, D) int64, weight of each part; kept up to date.
        cap: (num_parts, D) int64.
        inner: (num_parts, D) int64, the caps that are worked against; see `inner_cap`.
        seed: decides between parts that are equally good.
        threads: threads that read; their number does not change the result.
        target: (num_nodes,) int16, overwritten.
        ratio: (num_nodes,) float64, overwritten.

    Returns:
        Whether all parts are within their caps.

    Cost: O(num_entries + num_nodes) a round at most; nodes of other parts are skipped.
    """
    stuck = False
    for i in range(0 if (load <= cap).all() else MAX_ROUNDS):
        over = (load > inner).any(axis=1)
        if not over.any():
            return True
        strict = i >= LOOSE_ROUNDS and not stuck
        target[:] = -1
        state = (graph.node_weight, part, load, inner, over, strict, np.uint64(fold(seed, _SALT, i)), target, ratio)
        for block in graph.blocks():
            threads.run(_find_way_out, block.indptr, *block, *state)
        leaving = np.flatnonzero(target >= 0)
        leaving = leaving[np.argsort(-ratio[leaving], kind="stable")]
        moved = _leave(leaving, graph.node_weight, part, load, inner, target, strict)
        if not moved and not strict:
            break
        stuck = not moved
    return not (load > cap).any()


def inner_cap(cap: np.ndarray) -> np.ndarray:
    """Return the caps to work against so that `cap` is kept: single moves stall within a node's weight of a cap.

    With one dimension they do not, and `cap` itself is returned.
    """
    return cap if cap.shape[1] == 1 else np.maximum(1, (cap * INNER).astype(np.int64))


@kernel
def _relief_of(v, own, other, load, cap, node_weight):
    """Return by how much the potential falls if a node moves; `v` is its row in `node_weight`."""
    relief = 0.0
    for d in range(node_weight.shape[1]):
        w = np.int64(node_weight[v, d])
        if w == 0:
            continue
        if load[own, d] > cap[own, d]:
            before = (load[own, d] - cap[own, d]) / cap[own, d]
            after = max(0, load[own, d] - w - cap[own, d]) / cap[own, d]
            relief += before * before - after * after
        if load[other, d] + w > cap[other, d]:
            before = max(0, load[other, d] - cap[other, d]) / cap[other, d]
            after = (load[other, d] + w - cap[other, d]) / cap[other, d]
            relief -= after * after - before * before
    return relief


@kernel
def has_room(v, part, load, cap, node_weight):
    for d in range(node_weight.shape[1]):  # noqa: SIM110 (compiled)
        if load[part, d] + node_weight[v, d] > cap[part, d]:
            return False
    return True


@kernel
def _find_way_out(
    start,
    stop,
    first_node,
    indptr,
    indices,
    edge_weight,
    node_weight,
    part,
    load,
    cap,
    over,
    strict,
    key,
    target,
    ratio,
):
    """For the nodes of overfull parts among rows [start, stop): the best part to leave to, and gain per relief."""
    each = np.int64(-1) if len(edge_weight) == len(indices) else np.int64(0)
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    num_parts = len(load)
    conn = np.zeros(num_parts, np.int64)
    for row in range(start, stop):
        v = first_node + row
        own = part[v]
        if not over[own]:
            continue
        conn[:] = 0
        for e in range(indptr[row], indptr[row + 1]):
            conn[part[indices[e]]] += edge_weight[e & each]
        best, best_ratio, best_tie = -1, -np.inf, np.uint64(0)
        for b in range(num_parts):
            if b == own or (strict and not has_room(v & every, b, load, cap, node_weight)):
                continue
            relief = _relief_of(v & every, own, b, load, cap, node_weight)
            if relief <= 0.0:
                continue
            gain = conn[b] - conn[own]
            r = gain / relief if gain < 0 else gain * relief
            if r < best_ratio:
                continue
            tie = combine(key ^ np.uint64(v), b)
            if r > best_ratio or tie > best_tie:
                best, best_ratio, best_tie = b, r, tie
        if best >= 0:
            target[v], ratio[v] = best, best_ratio


@kernel
def _leave(leaving, node_weight, part, load, cap, target, strict):
    """Move nodes in the order given while their part is overfull and their move relieves; return how many moved."""
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    moved = 0
    for i in range(len(leaving)):
        v = leaving[i]
        own, other = part[v], target[v]
        over = False
        for d in range(node_weight.shape[1]):
            over = over or load[own, d] > cap[own, d]
        if not over or (strict and not has_room(v & every, other, load, cap, node_weight)):
            continue
        if _relief_of(v & every, own, other, load, cap, node_weight) <= 0.0:
            continue
        for d in range(node_weight.shape[1]):
            load[own, d] -= node_weight[v & every, d]
            load[other, d] += node_weight[v & every, d]
        part[v] = other
        moved += 1
    return moved
