"""Refinement: Jet moves many nodes at once to lower the cut; rebalancing moves nodes out of overfull parts."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np

from ...jit import kernel
from ...rng import fold
from .edge_form import EdgeSteps
from .row_form import RowSteps, has_space, is_over, potential, relief_of
from .weighted_graph import PART_DTYPE, BlockGraph, EdgeGraph, RowThreads, WeightedGraph, total_weight

WORTHWHILE = 1e-3  # a cut that falls by less than this share counts as unchanged
PRICE_STEP = 0.15  # of the mean edge weight a unit of weight, by which an overload of 1 raises a price
LOOSE_ROUNDS = 20  # from then on a part is entered only where there is space, unless nothing moves
FEW_LOOSE_ROUNDS = 1  # the same on disk, where a round costs a pass, and with one dimension: more hardly lower the cut
MAX_ROUNDS = 40
STALLED = 0.9  # of the potential: a loose round in memory that leaves more has stalled
INNER = 0.998
FIRST_LEAVING = 1 << 11  # nodes of overfull parts that are sorted at first

_SALT = 0x52454241  # separates this use of the seed from all others


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


@dataclass
class Search:
    """How far refinement has come: plain numbers, so that they can be saved.

    Attributes:
        round: rounds done.
        balanced: whether the parts are within their caps now.
        best, best_balanced: the cut of the best parts so far, -1 before the first; and whether those are balanced.
        mark: the cut that a worthwhile one must undercut.
        waited: rounds without one.
    """

    round: int = 0
    balanced: bool = False
    best: int = -1
    best_balanced: bool = False
    mark: int = -1
    waited: int = 0

    def judge(self, cut: int) -> bool:
        """Take the cut of this round into account; return whether its parts are the best so far."""
        better = self.best < 0 or (self.balanced, -cut) > (self.best_balanced, -self.best)
        if better and (self.mark < 0 or self.balanced > self.best_balanced or cut < (1 - WORTHWHILE) * self.mark):
            self.mark, self.waited = cut, 0
        else:
            self.waited += 1
        if better:
            self.best, self.best_balanced = cut, self.balanced
        return better


def refine(
    graph: WeightedGraph | BlockGraph | EdgeGraph,
    part: np.ndarray,
    load: np.ndarray,
    cap: np.ndarray,
    seed: int,
    threads: RowThreads,
    space: JetSpace,
    loss: float,
    patience: int,
    max_rounds: int,
    after_round=None,
    saved: dict[str, np.ndarray] | None = None,
    price: np.ndarray | None = None,
    border: np.ndarray | None = None,
) -> tuple[int, bool]:
    """Rebalance, then lower the cut round by round; the best balanced state is kept.

    A round reads the graph twice (edges: see `EdgeSteps`). First every node looks for the part that it is best
    connected to; it is a candidate if it would gain, or lose less than `loss` of its connection to its own part. Then
    every candidate counts again, as if all candidates with a larger gain had moved; it moves if it still does not
    lose. Rebalancing follows where needed. Nodes that moved rest for one round.

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
        after_round: called after a round with arrays by name, to be saved.
        saved: such arrays, to go on from; `part` and `load` are overwritten.
        price: (num_parts, D) float64, what a unit of weight costs in each part to begin with. None: nothing.
        border: (num_nodes,) bool, true of all nodes that have a neighbour in another part. None: not known.

    Returns:
        The cut (edge weight between parts) and whether all parts are within their caps.

    Cost: O(num_entries) a round; 13 bytes a node for `space`.
    Source: Gilbert et al., Jet, SIAM J. Sci. Comput. 46(5), 2024. Differs: prices, and rebalancing for
        vectors of weights.
    """
    inner, steps = inner_cap(cap), steps_of(graph, threads, border, part)
    spare, best_load = (space.target, space.gain), load.copy()
    if saved is None:
        space.moved[:] = False
        price = np.zeros(load.shape) if price is None else price
        search = Search(balanced=rebalance(graph, part, load, cap, inner, fold(seed, 0), threads, *spare))
    else:
        part[:], space.best[:], space.moved[:] = saved["part"], saved["best"], saved["moved"]
        load[:], best_load[:], price = saved["load"], saved["best_load"], saved["price"].copy()
        search = Search(*saved["search"].tolist())
    price_step = PRICE_STEP * graph.total_edge_weight / np.maximum(1, total_weight(graph))
    while True:
        # Jet's first filter: nodes that gain, or lose little, become candidates for their best part.
        last = search.round == max_rounds
        cut = steps.cut(part) if last else steps.select(part, price, loss, *space[:3])
        if search.judge(cut):
            space.best[:], best_load[:] = part, load
        if last or search.waited >= patience or cut == 0:
            break
        # Jet's afterburner: a candidate moves only if it still pays once all better candidates have moved.
        steps.reconsider(part, price, *space[:3])
        load += sum(
            threads.run(_apply, range(len(part) + 1), graph.node_weight, part, len(cap), space.target, space.moved)
        )
        # Ours: a part above its cap becomes dearer in that dimension, so that fewer nodes choose it next.
        price = np.maximum(0.0, price + price_step * (load / inner - 1.0))
        search.round += 1
        search.balanced = rebalance(graph, part, load, cap, inner, fold(seed, search.round), threads, *spare)
        if after_round is not None:
            arrays = {"part": part, "best": space.best, "moved": space.moved, "price": price, "load": load}
            after_round({**arrays, "best_load": best_load, "search": np.array(astuple(search), np.int64)})
    part[:], load[:] = space.best, best_load
    return search.best, search.best_balanced


@kernel
def _apply(start, stop, node_weight, part, num_parts, target, moved):
    """Let nodes of [start, stop) move; return (num_parts, D), what parts gain in weight."""
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    gained = np.zeros((num_parts, node_weight.shape[1]), np.int64)
    for v in range(start, stop):
        if moved[v]:
            for d in range(node_weight.shape[1]):
                gained[part[v], d] -= node_weight[v & every, d]
                gained[target[v], d] += node_weight[v & every, d]
            part[v] = target[v]
    return gained


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
    loosely: bool = True,
) -> bool:
    """Move nodes until no part is over its cap in any dimension, or until no single move helps.

    Each round reads the graph once (edges: see `EdgeSteps`): every node of an overfull part finds the part that it
    leaves to at the least loss of edges per relief. Then nodes move, cheapest first, as long as their part is overfull
    and their move still relieves. What falls with every move is the potential, the sum over parts and dimensions of
    max(0, load / cap - 1)^2: a heavy node may enter a full part, which then sheds a light one. After LOOSE_ROUNDS
    rounds (on disk, or with one dimension: FEW_LOOSE_ROUNDS), in memory also after one that leaves more than STALLED of
    the potential, a move must fit, as long as there are such moves: that settles the last few units. On disk it ends
    as soon as `cap` is kept, in memory only when `inner` is, or when loose rounds stall twice.

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
        loosely: whether there are rounds first in which a move need not fit; without, each takes what there is space
            for, which is enough where parts are over their caps by little.

    Returns:
        Whether all parts are within their caps.

    Cost: O(num_entries + num_nodes) a round at most; nodes of other parts are skipped.
    """
    steps = steps_of(graph, threads)
    stuck = stalled = False
    in_memory = isinstance(graph, WeightedGraph)
    loose_rounds = LOOSE_ROUNDS if in_memory and cap.shape[1] > 1 else FEW_LOOSE_ROUNDS
    loose_rounds *= loosely
    enough = inner if in_memory else cap
    before = potential(load, inner)
    for i in range(0 if (load <= cap).all() else MAX_ROUNDS):
        if (load <= enough).all():
            return True
        over = (load > inner).any(axis=1)
        strict = (stalled or i >= loose_rounds) and not stuck
        steps.find_ways_out(part, load, inner, over, strict, np.uint64(fold(seed, _SALT, i)), target, ratio)
        moved = 0
        for leaving in _cheapest_first(np.flatnonzero(target >= 0), ratio):
            moved += _leave(leaving, graph.node_weight, part, load, inner, target, strict)
            if (load <= inner).all():
                break
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


def _cheapest_first(leaving: np.ndarray, ratio: np.ndarray) -> Iterator[np.ndarray]:
    """Yield nodes in the order of falling ratios, in pieces: often the first is all that is needed."""
    most = FIRST_LEAVING
    while len(leaving) > most:
        cost = -ratio[leaving]
        first = cost <= np.partition(cost, most)[most]
        some = leaving[first]
        yield some[np.argsort(cost[first], kind="stable")]
        leaving, most = leaving[~first], 8 * most
    yield leaving[np.argsort(-ratio[leaving], kind="stable")]


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
        if not is_over(own, load, cap) or (strict and not has_space(v & every, other, load, cap, node_weight)):
            continue
        if relief_of(v & every, own, other, load, cap, node_weight) <= 0.0:
            continue
        for d in range(node_weight.shape[1]):
            load[own, d] -= node_weight[v & every, d]
            load[other, d] += node_weight[v & every, d]
        part[v] = other
        moved += 1
    return moved


def steps_of(graph, threads: RowThreads, border=None, part=None) -> RowSteps | EdgeSteps:
    """Return the steps over a graph's rows or, where it has none, over its edges; see `RowSteps`."""
    return EdgeSteps(graph, threads) if isinstance(graph, EdgeGraph) else RowSteps(graph, threads, border, part)
