"""The multilevel cycle in memory: contract, grow parts of the smallest graph, refine on the way back."""

from typing import NamedTuple

import numpy as np

from ...jit import kernel
from ...rng import below, combine, fold
from .clustering import cluster_limit, cluster_nodes
from .flow import straighten
from .low_degrees import join_low_degrees, parts_along
from .neighbour_joins import join_neighbours
from .quotient import contract
from .refinement import JetSpace, refine
from .row_form import border_of
from .weighted_graph import MAX_PARTS, PART_DTYPE, RowThreads, WeightedGraph, part_loads, total_weight

MIN_SHRINKAGE = 0.95  # a level that keeps more of its nodes than this ends the descent
MOST_AT_ONCE = 1 << 22  # entries of a graph of which several runs are made at a time; of more, threads share a run
TRIED_PARTS = 512  # of all initial partitions together: of many parts one is as good as the next
_SALT, _POLISH_SALT = 0x47524F57, 0x504F4C49  # separate these uses of the seed from all others


class Effort(NamedTuple):
    """How much work the multilevel cycle may do.

    Attributes:
        per_part: Least number of full clusters that make up a part.
        stop: Number of nodes per part at which contraction ends.
        tries: Number of initial partitions of the smallest graph; fewer, of TRIED_PARTS together, where parts are many.
        passes: Passes of label propagation.
        patience, max_rounds: Rounds of refinement without gain before it stops, and rounds in all.
        runs: Number of whole cycles with different seeds; the best result is kept.
        cycles: Number of further cycles from there; each contracts within parts and refines again.
        sample: Neighbours that a node looks at, see `cluster_nodes`.
        joins: Whether nodes with few neighbours join one of them each, without passes.
        combines: Whether the best result is combined with those of the other runs, a cycle each, before `cycles`.
        flows: Rounds of flows at each level of such cycles, and of `cycles`; see `straighten`.
        entries_of_runs: Of all runs together: on a larger graph there are fewer, but two at least. None: no limit.
    """

    per_part: float = 20.0
    stop: int = 60
    tries: int = 8
    passes: int = 3
    patience: int = 8
    max_rounds: int = 60
    runs: int = 1
    cycles: int = 0
    sample: int | None = None
    joins: bool = False
    combines: bool = False
    flows: int = 0
    entries_of_runs: int | None = None


def partition_in_memory(
    graph: WeightedGraph,
    cap: np.ndarray,
    seed: int = 0,
    share: np.ndarray | None = None,
    effort: Effort | None = None,
    threads: RowThreads | None = None,
) -> np.ndarray:
    """Partition a graph that is in memory.

    Args:
        graph: the graph.
        cap: (num_parts, D) int64, what each part may weigh in each dimension.
        seed: decides every random choice.
        share: (num_parts,) float64, what each part should hold of all weight; sums to 1. None: equal shares.
        effort: how hard to try.
        threads: their number does not change the result. None: all cores.

    Returns:
        (num_nodes,) int16 part ids. Caps that could not be kept are the caller's to judge.

    Cost: about O(num_entries * rounds); 30 bytes a node and 8 an entry for all levels together, of graphs of up to
        MOST_AT_ONCE entries for each run that a thread makes.
    Source: multilevel partitioning with label propagation (Meyerhenke, Sanders and Schulz, SEA 2014) and Jet; results
        are combined as in Sanders and Schulz, Distributed Evolutionary Graph Partitioning, ALENEX 2012.
    """
    threads = RowThreads() if threads is None else threads
    effort = Effort() if effort is None else effort
    num_parts = len(cap)
    share = np.full(num_parts, 1 / num_parts) if share is None else share
    if num_parts == 1:
        return np.zeros(graph.num_nodes, PART_DTYPE)
    if effort.entries_of_runs is not None:
        enough = max(2, effort.entries_of_runs // max(1, len(graph.indices)))
        effort = effort._replace(runs=min(effort.runs, enough))
    space = JetSpace.empty(graph.num_nodes)
    if len(graph.indices) > MOST_AT_ONCE or effort.runs == 1:
        found = [run_cycle(graph, cap, fold(seed, i), share, effort, threads, space) for i in range(effort.runs)]
    else:

        def run(i: int, own: RowThreads):
            return run_cycle(graph, cap, fold(seed, i), share, effort, own, JetSpace.empty(graph.num_nodes))

        found = threads.each(run, range(effort.runs))
    found.reverse()  # of equals the last is the best
    best, *others = sorted(found, key=lambda one: one[0])
    others = [one[1] for one in others] if effort.combines else []
    del found  # the parts of the other runs are not kept for nothing
    for i, other in enumerate(others + [None] * effort.cycles, effort.runs):
        found = run_cycle(graph, cap, fold(seed, i), share, effort, threads, space, best[1], other)
        best = found if found[0] <= best[0] else best
    return best[1]


def polished(
    graph: WeightedGraph,
    part: np.ndarray,
    cap: np.ndarray,
    seed: int,
    polish: tuple[int, int, int],
    threads: RowThreads,
    price: np.ndarray | None = None,
    flows: int = 0,
) -> np.ndarray:
    """Refine parts of a graph in memory, then contract it within them and refine again; return the best parts.

    Args:
        graph, cap, seed, threads: see `partition_in_memory`.
        part: (num_nodes,) int16; changed in place.
        polish: patience and rounds of refinement, and cycles.
        price: see `refine`.
        flows: rounds of flows after each refinement; see `straighten`.
    """
    patience, max_rounds, cycles = polish
    effort, share = Effort(patience=patience, max_rounds=max_rounds, flows=flows), np.full(len(cap), 1 / len(cap))
    space = JetSpace.empty(graph.num_nodes)
    key = fold(seed, _POLISH_SALT)
    best = _improve(graph, part, cap, key, effort, threads, space, True, price, flows=flows)[0], part
    for i in range(cycles):
        found = run_cycle(graph, cap, fold(seed, _POLISH_SALT, i), share, effort, threads, space, best[1])
        best = found if found[0] <= best[0] else best
    return best[1]


def run_cycle(
    graph, cap, seed: int, share, effort: Effort, threads: RowThreads, space: JetSpace, part=None, other=None
):
    """Go down and up once; with parts given, clusters stay within them and the parts are where the way up begins.

    With other parts given too, clusters stay within both: what the two have in common stays together, and where they
    differ, pieces as large as that go from one part to another.

    Returns:
        (violated, cut) to compare by, less is better; and (num_nodes,) int16 part ids.
    """
    num_parts = len(cap)
    limit = cluster_limit(graph, num_parts, effort.per_part)
    # Down: clusters become nodes until the graph is small.
    each = 1 if other is None else MAX_PARTS // num_parts  # groups within a part; where parts are many, some share one
    group = part if other is None else part * PART_DTYPE.type(each) + other % PART_DTYPE.type(each)
    levels, coarse, group = _descend(graph, limit, seed, effort.stop * num_parts, group, effort, threads)
    at_level = level_cap(coarse, cap, share)
    if group is not None:
        part = group // PART_DTYPE.type(each)
    else:
        # At the bottom: the best of several greedy partitions.
        along, num_tries = parts_along(coarse, share), max(1, min(effort.tries, TRIED_PARTS // num_parts))

        def make(i: int, own: RowThreads):
            key = fold(seed, 1, i)
            start = along if i == num_tries else grow_parts(coarse, share, key)
            return _try(coarse, start, at_level, key, effort, own)

        tries = threads.each(make, range(num_tries + (along is not None)))
        part = min(tries, key=lambda found: found[0])[1]
    # Up: the parts are carried over to each finer graph and refined there.
    state, flows = None, effort.flows if group is not None else 0
    for i, (finer, coarse_of) in enumerate([*reversed(levels)]):
        border = _carried_border(coarse, part, coarse_of)
        part = part[coarse_of]
        at_level = cap if finer is graph else level_cap(finer, cap, share)
        given = fold(seed, 2, i), effort, threads, space, finer is graph, None, border, flows
        state = _improve(finer, part, at_level, *given)[0]
        coarse = finer
    if state is None:
        state = _improve(graph, part, cap, fold(seed, 3), effort, threads, space, True, flows=flows)[0]
    return state, part


def level_cap(graph: WeightedGraph, cap: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Return (num_parts, D) int64 caps for a coarse graph: half of its heaviest node above the mean is let pass."""
    mean = np.ceil(total_weight(graph) * share[:, None]).astype(np.int64)
    return np.maximum(cap, mean + graph.node_weight.max(axis=0) // 2)


def _descend(graph, limit, seed: int, stop: int, group, effort: Effort, threads: RowThreads):
    """Contract until `stop` nodes are left or nothing shrinks; return the levels, the smallest graph, its groups."""
    levels = []
    while graph.num_nodes > stop:
        label, key = join_low_degrees(graph, limit, group), fold(seed, 0, len(levels))
        if label is None and effort.joins and group is None:
            label = join_neighbours(graph, limit, key)
        if label is None:
            label = cluster_nodes(graph, limit, key, threads, group, effort.passes, sample=effort.sample)
        coarse, coarse_of = contract(graph, label, threads)
        if coarse.num_nodes > MIN_SHRINKAGE * graph.num_nodes:
            break
        levels.append((graph, coarse_of))
        if group is not None:
            finer_group, group = group, np.empty(coarse.num_nodes, PART_DTYPE)
            group[coarse_of] = finer_group
        graph = coarse
    return levels, graph, None if group is None else group.copy()


def _carried_border(coarse: WeightedGraph, part: np.ndarray, coarse_of: np.ndarray) -> np.ndarray | None:
    """Return (num_finer_nodes,) bool: the nodes of clusters with a neighbour in another part; None where most are."""
    border = border_of(coarse, part)
    return border[coarse_of] if 2 * np.count_nonzero(border) < coarse.num_nodes else None


def _try(graph, part, cap, seed: int, effort: Effort, threads: RowThreads):
    state, load = _improve(graph, part, cap, seed, effort, threads, JetSpace.empty(graph.num_nodes), False)
    over = np.maximum(0.0, load / cap - 1)
    penalty = float((over + 20 * over**2).sum())
    return (state[1] + 1) * (1 + 4 * penalty / len(cap)), part


def _improve(
    graph,
    part,
    cap,
    seed: int,
    effort: Effort,
    threads: RowThreads,
    space: JetSpace,
    finest: bool,
    price=None,
    border=None,
    flows: int = 0,
):
    load = part_loads(graph.node_weight, part, len(cap))
    cut, balanced = refine(
        graph,
        part,
        load,
        cap,
        seed,
        threads,
        space.first(graph.num_nodes),
        0.25 if finest else 0.75,
        effort.patience,
        effort.max_rounds,
        price=price,
        border=border,
    )
    return (not balanced, cut - straighten(graph, part, load, cap, flows)), load


def empty_heap(num_nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the four arrays of a heap that any of num_nodes nodes may enter."""
    return (
        np.empty(num_nodes, np.int32),
        np.full(num_nodes, -1, np.int32),
        np.empty(num_nodes, np.float64),
        np.zeros(1, np.int64),
    )


@kernel
def heap_put(nodes, place, keys, size, v, key):
    """Add a node, or change its key."""
    i = np.int64(place[v])
    is_new = i < 0
    if is_new:
        i = size[0]
        size[0] += 1
    falls = not is_new and key < keys[v]
    rises = is_new or key > keys[v]
    keys[v] = key
    if rises:
        _rise(nodes, place, keys, i, v)
    elif falls:
        _sink(nodes, place, keys, size, i, v)


@kernel(inline="always")
def heap_take(nodes, place, keys, size):
    """Remove the node with the largest key and return it; the heap must not be empty."""
    top = nodes[0]
    place[top] = -1
    size[0] -= 1
    if size[0] > 0:
        _sink(nodes, place, keys, size, np.int64(0), nodes[size[0]])
    return top


@kernel(inline="always")
def heap_clear(nodes, place, size):
    """Remove all nodes."""
    for i in range(size[0]):
        place[nodes[i]] = -1
    size[0] = 0


@kernel(inline="always")
def _rise(nodes, place, keys, i, v):
    key = keys[v]
    while i > 0:
        parent = (i - 1) >> 1
        if keys[nodes[parent]] >= key:
            break
        nodes[i] = nodes[parent]
        place[nodes[i]] = i
        i = parent
    nodes[i] = v
    place[v] = i


@kernel
def _sink(nodes, place, keys, size, i, v):
    key = keys[v]
    while True:
        child = 2 * i + 1
        if child >= size[0]:
            break
        if child + 1 < size[0] and keys[nodes[child + 1]] > keys[nodes[child]]:
            child += 1
        if keys[nodes[child]] <= key:
            break
        nodes[i] = nodes[child]
        place[nodes[i]] = i
        i = child
    nodes[i] = v
    place[v] = i


def grow_parts(graph: WeightedGraph, share: np.ndarray, seed: int) -> np.ndarray:
    """Grow one part after the other from a random node, always taking the node that raises the cut least.

    A part is full when the mean over dimensions of load / (share * total) reaches 1; the last part takes the rest.

    Args:
        graph: the graph.
        share: (num_parts,) float64, what each part should hold of all weight; sums to 1.
        seed: decides the starting nodes.

    Returns:
        (num_nodes,) int16 part ids.

    Source: greedy graph growing, Karypis and Kumar, SIAM J. Sci. Comput. 20(1), 1998; vectors of weights are ours.
    """
    part = np.full(graph.num_nodes, len(share) - 1, PART_DTYPE)
    total = np.maximum(total_weight(graph), 1).astype(np.float64)
    _grow(*graph, total, share, np.uint64(fold(seed, _SALT)), part, *empty_heap(graph.num_nodes))
    return part


@kernel
def _grow(indptr, indices, edge_weight, node_weight, total, share, key, part, heap, place, keys, size):
    each = np.int64(-1) if len(edge_weight) == len(indices) else np.int64(0)
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    num_nodes, num_dims = len(part), node_weight.shape[1]
    last = len(share) - 1
    order = np.empty(num_nodes, np.int32)  # a random order to start from
    for v in range(num_nodes):
        order[v] = v
    for v in range(num_nodes - 1, 0, -1):
        other = below(combine(key, v), v + 1)
        order[v], order[other] = order[other], order[v]
    next_start = 0
    for p in range(last):
        heap_clear(heap, place, size)
        filled = 0.0
        while filled < 1.0:
            if size[0] == 0:
                while next_start < num_nodes and part[order[next_start]] != last:
                    next_start += 1
                if next_start == num_nodes:
                    return
                v = order[next_start]
            else:
                v = heap_take(heap, place, keys, size)
            weight = 0.0
            for d in range(num_dims):
                weight += node_weight[v & every, d] / (total[d] * share[p])
            weight /= num_dims
            if filled > 0.0 and filled + weight > 1.0 + weight / 2:
                break
            filled += weight
            part[v] = p
            for e in range(indptr[v], indptr[v + 1]):
                u = indices[e]
                if part[u] != last:
                    continue
                inner = 2.0 * np.float64(edge_weight[e & each])
                if place[u] >= 0:
                    rank = keys[u] + inner
                else:
                    degree = 0.0
                    for f in range(indptr[u], indptr[u + 1]):
                        degree += edge_weight[f & each]
                    rank = inner - degree
                heap_put(heap, place, keys, size, u, rank)
