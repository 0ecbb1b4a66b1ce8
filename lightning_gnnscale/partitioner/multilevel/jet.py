"""Jet refinement: many nodes move at once, some at a loss, and only moves that still pay together are made."""

from typing import NamedTuple

import numpy as np

from ...jit import kernel
from ...rng import fold
from ...triton_kernels.intrinsics import prefetch
from ..row_threads import RowThreads
from .rebalancing import inner_cap, rebalance
from .weighted_graph import PART_DTYPE, BlockGraph, WeightedGraph, total_weight

WORTHWHILE = 1e-3  # a cut that falls by less than this share counts as standing still
PRICE_STEP = 0.15  # of the mean edge weight a unit of weight, by which an overload of 1 raises a price

_ENTRIES_AHEAD = 32


class JetSpace(NamedTuple):
    """Arrays that refinement works in, made once for all levels.

    Attributes:
        target: (num_nodes,) int16, where a node would go; -1: it stays.
        gain: (num_nodes,) float64, edge weight that the cut would fall by (exact up to 2**53).
        moved: (num_nodes,) bool, nodes of the last round, which rest for one.
        best: (num_nodes,) int16, the best parts so far.
    """

    target: np.ndarray
    gain: np.ndarray
    moved: np.ndarray
    best: np.ndarray

    @classmethod
    def empty(cls, num_nodes: int) -> "JetSpace":
        return cls(
            np.empty(num_nodes, PART_DTYPE),
            np.empty(num_nodes, np.float64),
            np.empty(num_nodes, np.bool_),
            np.empty(num_nodes, PART_DTYPE),
        )

    def first(self, num_nodes: int) -> "JetSpace":
        """Return the same arrays for a smaller graph."""
        return JetSpace(*(array[:num_nodes] for array in self))


def refine(
    graph: WeightedGraph | BlockGraph,
    part: np.ndarray,
    load: np.ndarray,
    cap: np.ndarray,
    seed: int,
    threads: RowThreads,
    space: JetSpace,
    loss: float,
    patience: int,
    max_rounds: int,
) -> tuple[int, bool]:
    """Rebalance, then lower the cut round by round; the best balanced state is kept.

    A round reads the graph twice. First every node looks for the part that it is best connected to; it is a candidate
    if it would gain, or lose less than `loss` of its connection to its own part. Then every candidate counts again, as
    if all candidates with a larger gain had moved; it moves if it still does not lose. Rebalancing follows where
    needed. Nodes that moved rest for one round.

    Args:
        graph: the graph.
        part: (num_nodes,) int16; changed in place.
        load: (num_parts, D) int64, weight of each part; kept up to date.
        cap: (num_parts, D) int64.
        seed: decides ties of rebalancing.
        threads: threads that read; their number does not change the result.
        space: arrays to work in.
        loss: share of the inner connection, in [0, 1].
        patience: rounds without a cut that is lower by WORTHWHILE after which it ends.
        max_rounds: bound on the rounds.

    Returns:
        The cut (edge weight between parts) and whether all parts are within their caps.

    Cost: O(num_entries) a round; 13 bytes a node for `space`.
    Source: Gilbert et al., Jet, SIAM J. Sci. Comput. 46(5), 2024. Differs: prices, and rebalancing for
        vectors of weights.
    """
    space.moved[:] = False
    inner = inner_cap(cap)
    balanced = rebalance(graph, part, load, cap, inner, fold(seed, 0), threads, space.target, space.gain)
    best, best_balanced, mark, waited = -1, False, -1, 0
    best_load = load.copy()
    price = np.zeros(load.shape)
    price_step = PRICE_STEP * graph.total_edge_weight / np.maximum(1, total_weight(graph))
    for i in range(max_rounds + 1):
        cut = _select(graph, part, space, price, loss, threads)
        if best < 0 or (balanced, -cut) > (best_balanced, -best):
            if mark < 0 or balanced > best_balanced or cut < (1 - WORTHWHILE) * mark:
                mark, waited = cut, 0
            else:
                waited += 1
            best, best_balanced = cut, balanced
            space.best[:], best_load[:] = part, load
        else:
            waited += 1
        if waited >= patience or i == max_rounds or cut == 0:
            break
        for block in graph.blocks():
            threads.run(
                _reconsider, block.indptr, *block, graph.node_weight, part, price, space.target, space.gain, space.moved
            )
        _apply(graph.node_weight, part, load, space.target, space.moved)
        price = np.maximum(0.0, price + price_step * (load / inner - 1.0))
        balanced = rebalance(graph, part, load, cap, inner, fold(seed, i + 1), threads, space.target, space.gain)
    part[:], load[:] = space.best, best_load
    return best, best_balanced


def _select(graph, part: np.ndarray, space: JetSpace, price, loss: float, threads: RowThreads) -> int:
    """Find the candidates; return the cut."""
    across = 0
    for block in graph.blocks():
        across += sum(
            threads.run(_find_candidates, block.indptr, *block, graph.node_weight, part, price, loss, *space[:3])
        )
    return across // 2


@kernel
def _find_candidates(
    start, stop, first_node, indptr, indices, edge_weight, node_weight, part, price, loss, target, gain, moved
):
    """Write target and gain of rows [start, stop); return the weight of their edges to other parts."""
    each = np.int64(-1) if len(edge_weight) == len(indices) else np.int64(0)
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    num_parts = len(price)
    conn = np.zeros(num_parts, np.int64)
    across, last = np.int64(0), indptr[stop]
    for row in range(start, stop):
        v = first_node + row
        own = part[v]
        low, high = indptr[row], indptr[row + 1]
        outside = np.int64(0)
        for e in range(low, high):
            if e + _ENTRIES_AHEAD < last:
                prefetch(part, np.int64(indices[e + _ENTRIES_AHEAD]))
            b = part[indices[e]]
            w = edge_weight[e & each]
            conn[b] += w
            if b != own:
                outside += w
        target[v] = -1
        if outside > 0:
            across += outside
            if not moved[v]:
                best, most, inside = -1, -np.inf, np.float64(conn[own])
                for b in range(num_parts):
                    if b != own and conn[b] > 0:
                        score = np.float64(conn[b])
                        for d in range(node_weight.shape[1]):
                            score -= (price[b, d] - price[own, d]) * node_weight[v & every, d]
                        if score > most:
                            best, most = b, score
                g = most - inside
                if best >= 0 and (g >= 0 or -g < loss * inside):
                    target[v], gain[v] = best, g
        conn[:] = 0
    return across


@kernel
def _reconsider(start, stop, first_node, indptr, indices, edge_weight, node_weight, part, price, target, gain, moved):
    """Mark the candidates among rows [start, stop) that do not lose once all better candidates have moved."""
    each = np.int64(-1) if len(edge_weight) == len(indices) else np.int64(0)
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    for row in range(start, stop):
        v = first_node + row
        moved[v] = False
        mine = target[v]
        if mine < 0:
            continue
        own, my_gain = part[v], gain[v]
        g = 0.0
        for d in range(node_weight.shape[1]):
            g -= (price[mine, d] - price[own, d]) * node_weight[v & every, d]
        for e in range(indptr[row], indptr[row + 1]):
            u = indices[e]
            b = part[u]
            if target[u] >= 0 and (gain[u] > my_gain or (gain[u] == my_gain and u < v)):
                b = target[u]
            if b == mine:
                g += edge_weight[e & each]
            elif b == own:
                g -= edge_weight[e & each]
        moved[v] = g >= 0


@kernel
def _apply(node_weight, part, load, target, moved):
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    for v in range(len(part)):
        if moved[v]:
            for d in range(node_weight.shape[1]):
                load[part[v], d] -= node_weight[v & every, d]
                load[target[v], d] += node_weight[v & every, d]
            part[v] = target[v]
