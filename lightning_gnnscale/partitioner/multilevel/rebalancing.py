"""Rebalancing: nodes leave overfull parts, those first that lose least for what they relieve."""

import numpy as np

from ...jit import kernel
from ...rng import fold
from ..row_threads import RowThreads
from .edge_graph import EdgeGraph
from .potential import has_room, is_over, potential, relief_of
from .steps import steps_of
from .weighted_graph import BlockGraph, WeightedGraph

LOOSE_ROUNDS = 20  # from then on a part is entered only where there is room, unless nothing moves
STREAMED_LOOSE_ROUNDS = 1  # the same on disk, where a round costs a pass: more of them hardly lower the cut
MAX_ROUNDS = 40
STALLED = 0.9  # of the potential: a loose round in memory that leaves more has stalled
INNER = 0.998

_SALT = 0x52454241  # keeps this use of the seed apart from all others


def rebalance(
    graph: WeightedGraph | BlockGraph | EdgeGraph,
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

    Each round reads the graph once (edges: see `EdgeSteps`): every node of an overfull part finds the part that it
    leaves to at the least loss of edges per relief. Then nodes move, cheapest first, as long as their part is overfull
    and their move still relieves. What falls with every move is the potential, the sum over parts and dimensions of
    max(0, load / cap - 1)^2: a heavy node may enter a full part, which then sheds a light one. After
    LOOSE_ROUNDS rounds (on disk: STREAMED_LOOSE_ROUNDS), in memory also after one that leaves more than STALLED of the
    potential, a move must fit, as long as there are such moves: that settles the last few units. On disk it ends as
    soon as `cap` is kept, in memory only when `inner` is, or when loose rounds stall twice.

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
    steps = steps_of(graph, threads)
    stuck = stalled = False
    in_memory = isinstance(graph, WeightedGraph)
    loose_rounds, enough = (LOOSE_ROUNDS, inner) if in_memory else (STREAMED_LOOSE_ROUNDS, cap)
    before = potential(load, inner)
    for i in range(0 if (load <= cap).all() else MAX_ROUNDS):
        if (load <= enough).all():
            return True
        over = (load > inner).any(axis=1)
        strict = (stalled or i >= loose_rounds) and not stuck
        steps.find_ways_out(part, load, inner, over, strict, np.uint64(fold(seed, _SALT, i)), target, ratio)
        leaving = np.flatnonzero(target >= 0)
        leaving = leaving[np.argsort(-ratio[leaving], kind="stable")]
        moved = _leave(leaving, graph.node_weight, part, load, inner, target, strict)
        del leaving  # the next round needs the memory
        if not moved and not strict:
            break
        stuck = not moved
        if in_memory and not strict:
            now = potential(load, inner)
            if stalled and now > STALLED * before:
                break
            before, stalled = now, now > STALLED * before
    return not (load > cap).any()


def inner_cap(cap: np.ndarray) -> np.ndarray:
    """Return the caps to work against so that `cap` is kept: single moves stall within a node's weight of a cap.

    With one dimension they do not, and `cap` itself is returned.
    """
    return cap if cap.shape[1] == 1 else np.maximum(1, (cap * INNER).astype(np.int64))


@kernel
def _leave(leaving, node_weight, part, load, cap, target, strict):
    """Move nodes in the order given while their part is overfull and their move relieves; return how many moved."""
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    moved = 0
    for i in range(len(leaving)):
        v = leaving[i]
        own, other = part[v], target[v]
        if not is_over(own, load, cap) or (strict and not has_room(v & every, other, load, cap, node_weight)):
            continue
        if relief_of(v & every, own, other, load, cap, node_weight) <= 0.0:
            continue
        for d in range(node_weight.shape[1]):
            load[own, d] -= node_weight[v & every, d]
            load[other, d] += node_weight[v & every, d]
        part[v] = other
        moved += 1
    return moved
