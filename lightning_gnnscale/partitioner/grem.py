"""GREM: a partition of the first edges, carried over the rest in chunks while earlier placements are refined."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..edge_stream import open_edge_stream
from ..errors import check_number, short
from ..graph import id_dtype
from ..jit import kernel
from ..scratch import SLICE_EDGES, EdgeFile
from ..triton_kernels.intrinsics import prefetch
from . import phases
from .constraints import MAX_DIMENSIONS, NODES, judge, node_weights, resolve_constraints
from .graph_access.scratch import copy_edges, reserve, scratch_folder, shuffle_edges
from .graph_input import GraphInput, graph_partitioner
from .grem_placement import PlacementState, SeedParts, place_edges
from .multilevel import Effort, partition_in_memory
from .multilevel.weighted_graph import ONE, WeightedGraph, part_loads, total_weight
from .registry import (
    available_partitioners,
    complete_options,
    get_partitioner,
)

_TOLERANCE = 1e-12  # relative: keeps a whole number whole where its quotient was rounded
MULTILEVEL = "multilevel"  # the seed method of its own
_PLACING = "placing"
_DEGREE = "degree"  # an array of a checkpoint, where volumes are balanced
_EPSILON = 0.03
_AHEAD = 32  # edges
# On a chunk of 2 million entries full effort takes three times as long or more, and later chunks cut no fewer edges.
_SMALL_ENTRIES = 1 << 18
_LITTLE_EFFORT = Effort(tries=2, passes=2, patience=3, max_rounds=6)


def _memory(num_nodes: int, num_edges: int, num_parts: int, options: Mapping) -> float:
    placed_into = 4 * num_parts if options["mode"] == "direct" else 12
    chunk = options["chunk_edges"] or options["chunk_edges_share"] * num_edges
    return (16 + placed_into) * num_nodes + 34 * chunk


def _promised(num_nodes: int, num_parts: int, options: Mapping) -> float:
    return part_cap(num_nodes, num_parts, options["epsilon"]) * num_parts / num_nodes


@graph_partitioner("grem", memory=_memory, slack=_promised)
def grem(
    graph: GraphInput,
    num_parts: int,
    *,
    mode: str = "recursive",
    refine: bool = True,
    chunk_edges_share: float = 0.1,
    chunk_edges: int | None = None,
    seed_method: str = MULTILEVEL,
    order: str = "shuffle",
    epsilon: float = _EPSILON,
) -> np.ndarray:
    """Partition by greedy streaming with refinement, after an in-memory partition of the first chunk.

    Args:
        graph: the graph. Scratch disk is needed. Its seed decides the order of the edges and is passed to the seed
            method; its masks are those that are balanced.
        graph.balance: {"nodes": 1.05, "volume": 1.10, "train": 1.05}, any of them: the largest part over the mean. A
            node goes to a part that has space for it in all of them; where none has, to the one that passes its caps
            least, and nodes move at the end of a pass. What cannot be kept is reported with its size. Where nodes are
            not named `epsilon` bounds them; None: it alone.
        mode: "recursive" bisects, and bisects the parts with their inner edges again; "direct" places into all parts
            at once: faster, with a larger cut and 4 * num_parts bytes of counts a node.
        refine: place a node again in every chunk that meets it; False fixes its first part (greedy streaming).
        chunk_edges_share: edges a chunk as a share of all simple edges, in (0, 1]; it decides cut and memory.
        chunk_edges: edges a chunk, >= 1, instead of the share; kept through all levels of the recursion. Not to be
            confused with the stream's own chunks, which change nothing.
        seed_method: "multilevel" (in memory), or a registered partitioner for the first chunk: "metis", "random", ...;
            nodes beyond a part's cap in its result are placed like those of later chunks. Only "multilevel" looks at
            `graph.balance`.
        order: "shuffle" brings the edges into a random order on scratch disk; "given" takes them as they stream,
            which is right only where that order is random: edges sorted by id ruin the cut.
        epsilon: a part holds at most (1 + epsilon) * ceil(num_nodes / num_parts) nodes, >= 0; with
            `graph.balance` (1 + epsilon) times the mean. Not to be given together with a balance of nodes.

    Returns:
        (num_nodes,) int32 part ids. Nodes that no edge has met go to the relatively lightest parts.

    Cost: two passes over the stream, and log2(num_parts) over scratch disk ("recursive"), of 2 ids an edge (4 in
        "recursive"). Memory: 16 bytes a node and 4 for every part that is placed into at a time (2 in "recursive",
        which takes 4 more); one chunk, 2 ids an edge; what the seed method takes for a chunk; and where more than
        nodes is balanced 4 bytes a node and constraint (up to 8 in "recursive").
    Source: Waleffe et al., Armada, Algorithms 1 and 2. Differs: nodes without a part are placed and counted too, and
        a node is taken out of its part before space is looked for (as printed the cut is random); any num_parts; ties
        stay, then go to the relatively lightest part, then to the lowest; balances of several weights are ours.
    """
    _check_options(mode, refine, chunk_edges_share, chunk_edges, seed_method, order, epsilon)
    folder = scratch_folder(graph.scratch)
    if folder is None:
        raise ValueError("partitioner 'grem' needs scratch disk: give scratch=<a folder> or scratch=auto")
    _check_balance(graph.balance, epsilon)
    degree = graph.open_simple()
    chunk_edges = chunk_edges or share_of_edges(chunk_edges_share, graph.simple.num_edges)
    phases.note(chunk_edges=chunk_edges)
    *bounds, constraints = _bounds(graph, num_parts, epsilon, degree)
    del degree
    run = _Run(graph, num_parts, bounds, refine, chunk_edges, seed_method)
    edges = _ordered_edges(graph, folder, order, num_parts > 2 and mode == "recursive")
    if mode == "direct" or num_parts == 1:
        share, caps = (1,) * num_parts, np.repeat(run.cap[None], num_parts, axis=0)
        part_id = run.place(edges, run.weight, graph.num_nodes, share, caps, 0, _PLACING)
    else:
        part_id = _bisect(edges, run)
    if constraints is not None:
        judge(constraints, part_loads(_node_weight(run.weight), part_id, num_parts))
    return part_id


def share_of_edges(share: float, num_edges: int) -> int:
    """Return a share of the edges, rounded up, at least 1."""
    return max(1, math.ceil(share * num_edges * (1 - _TOLERANCE)))


def part_cap(num_nodes: int, num_parts: int, epsilon: float) -> int:
    """Return the nodes that a part may hold: floor((1 + epsilon) * ceil(num_nodes / num_parts))."""
    return math.floor(-(-num_nodes // num_parts) * (1 + epsilon) * (1 + _TOLERANCE))


def side_caps(num_nodes: int, share: tuple[int, int], cap: int) -> list[int]:
    """Return the caps of the two sides of a bisection into `share` parts each, whose parts hold `cap` nodes at most.

    Each is ceil(num_nodes * share / sum(share) * r), with r = (cap * sum(share) / num_nodes)^(1 / levels): the
    remaining slack is spent evenly over the ceil(log2(sum(share))) levels to come.
    """
    num_parts = sum(share)
    slack = (cap * num_parts / max(1, num_nodes)) ** (1 / math.ceil(math.log2(num_parts)))
    return [min(math.ceil(num_nodes * part / num_parts * slack * (1 - _TOLERANCE)), cap * part) for part in share]


def _check_balance(balance: Mapping | None, epsilon: float) -> None:
    if balance and "nodes" in balance and epsilon != _EPSILON:
        raise ValueError(
            f"partitioner.epsilon={epsilon:g} and partitioner.balance.nodes={balance['nodes']} both bound the nodes: "
            "give one of them"
        )
    if balance and "nodes" not in balance and len(balance) >= MAX_DIMENSIONS:
        raise ValueError(
            f"partitioner.balance of 'grem' takes at most {MAX_DIMENSIONS} constraints with nodes among them, got "
            f"{len(balance)} without: leave one out"
        )


def _bounds(graph: GraphInput, num_parts: int, epsilon: float, degree: np.ndarray | None) -> tuple:
    """Return what a part may hold in each of D dimensions; one where nodes alone are bounded.

    Returns:
        (D,) int64, what each part may weigh; (D,) float64, about the cap over the mean; (num_nodes, D) int32 weights,
        None: of one each; and the Constraints, None: nothing but `epsilon`.
    """
    if not graph.balance:
        return np.array([part_cap(graph.num_nodes, num_parts, epsilon)]), np.array([1 + epsilon]), None, None
    balance = graph.balance if "nodes" in graph.balance else {"nodes": 1 + epsilon, **graph.balance}
    if "volume" not in balance:
        degree = np.ones(graph.num_nodes, np.int8)
    elif degree is None:  # a resumed run has them where they are balanced
        degree = graph.left[_DEGREE]
    constraints = resolve_constraints(balance, graph.masks, degree, num_parts)
    alone = constraints.kinds.tolist() == [NODES]
    weight = None if alone else node_weights(constraints, degree, np.int32)
    if "volume" in balance:
        graph.facts = {_DEGREE: weight[:, constraints.names.index("volume")]}
    return constraints.cap, constraints.slack, weight, constraints


def _node_weight(weight: np.ndarray | None) -> np.ndarray:
    """Return weights as `WeightedGraph` has them."""
    return np.ones((1, 1), np.int32) if weight is None else weight


class _Run:
    """What all passes of one run have in common, and the state in which an earlier process left them."""

    def __init__(self, graph: GraphInput, num_parts: int, bounds, refine: bool, chunk_edges: int, seed_method):
        left = graph.left_in(_PLACING)
        left.pop(_DEGREE, None)
        self.num_parts = num_parts
        self.cap, self.slack, self.weight = bounds  # see `_bounds`
        self.part_id = left.pop("part_id", np.zeros(graph.num_nodes, np.int32))
        self.first_step = int(left.pop("step", -1))
        self._graph, self._refine, self._chunk_edges = graph, refine, chunk_edges
        self._seed_method, self._left_state = seed_method, left

    def side_caps(self, weight: np.ndarray | None, num_nodes: int, share: tuple[int, int]) -> np.ndarray:
        """Return (2, D) int64 caps of the two sides of a bisection; a dimension beyond its cap is divided evenly."""
        totals = [num_nodes] if weight is None else weight.sum(axis=0, dtype=np.int64).tolist()
        caps = [max(cap, -(-total // sum(share))) for cap, total in zip(self.cap.tolist(), totals, strict=True)]
        return np.array([side_caps(total, share, cap) for total, cap in zip(totals, caps, strict=True)], np.int64).T

    def place(self, edges: EdgeFile, weight, num_nodes: int, share, caps: np.ndarray, step: int, what: str):
        """Stream the edges once, as step number `step` of the run, and return the (num_nodes,) parts."""
        graph, placed_caps = self._graph, caps[:, 0] if weight is None else caps
        state = PlacementState.empty(num_nodes, placed_caps, self._refine)
        if step == self.first_step:
            state = PlacementState(**self._left_state)
        self._left_state = {}

        def after_chunk(done: int) -> None:
            graph.after_chunk(_PLACING, lambda: {"part_id": self.part_id, "step": np.int64(step), **state._asdict()})
            graph.tell(what, done, edges.num_edges)

        limits = caps, self.slack, weight
        seed_parts = seed_partitioner(self._seed_method, share, *limits, graph.seed, graph.scratch)
        place_edges(edges, np.ascontiguousarray(placed_caps), self._chunk_edges, seed_parts, state, after_chunk, weight)
        return state.part


def _check_options(mode, refine, chunk_edges_share, chunk_edges, seed_method, order, epsilon) -> None:
    for name, value, allowed in (
        ("mode", mode, ("recursive", "direct")),
        ("refine", refine, (True, False)),
        ("order", order, ("shuffle", "given")),
    ):
        if value not in allowed:
            raise ValueError(f"partitioner.{name} must be one of {', '.join(map(str, allowed))}, got {short(value)}")
    check_number("partitioner.chunk_edges_share", chunk_edges_share, at_least=0)
    if not 0 < chunk_edges_share <= 1:
        raise ValueError(f"partitioner.chunk_edges_share must be in (0, 1], got {short(chunk_edges_share)}")
    if chunk_edges is not None:
        check_number("partitioner.chunk_edges", chunk_edges, at_least=1)
        if chunk_edges != int(chunk_edges):
            raise ValueError(f"partitioner.chunk_edges must be a whole number, got {short(chunk_edges)}")
    check_seed_method(seed_method)
    check_number("partitioner.epsilon", epsilon, at_least=0)


def _ordered_edges(graph: GraphInput, folder: Path, order: str, rewritten: bool) -> EdgeFile:
    simple, files = graph.simple, 2 if rewritten else 1
    needed = files * simple.num_edges * 2 * id_dtype(graph.num_nodes).itemsize
    reserve(folder, needed, f"{files} orders of {simple.num_edges} edges")
    with phases.phase("order"):
        if order == "shuffle":
            return shuffle_edges(simple, folder, graph.seed, graph.progress)
        return copy_edges(simple, folder, graph.progress)


def _bisect(edges: EdgeFile, run: _Run) -> np.ndarray:
    """Bisect until every range of parts is one part; the first half of a range keeps its first part's id meanwhile."""
    part_id = run.part_id
    waiting = [(edges, np.arange(len(part_id), dtype=edges.dtype), 0, run.num_parts, 0)]
    while waiting:
        edges, nodes, first, num_parts, step = waiting.pop()
        if step + num_parts - 1 <= run.first_step:
            continue  # an earlier process has finished this range
        share = (num_parts // 2, num_parts - num_parts // 2)
        middle = first + share[0]
        if step < run.first_step:
            side = (part_id[nodes] >= middle).astype(np.int32)
        else:
            what = f"placing, parts {first} to {first + num_parts - 1}"
            weight = run.weight
            weight = weight[nodes] if weight is not None and len(nodes) < len(part_id) else weight
            caps = run.side_caps(weight, len(nodes), share)
            side = run.place(edges, weight, len(nodes), share, caps, step, what)
            del weight
            part_id[nodes[side == 1]] = middle
        with phases.phase("split"):
            inner = _inner_edges(edges, side, share)
        edges.close()
        # The last in is the first out: steps count the ranges in the order of a depth-first walk.
        for s, first_part, next_step in ((1, middle, step + share[0]), (0, first, step + 1)):
            if share[s] > 1:
                waiting.append((inner[s], nodes[side == s], first_part, share[s], next_step))
    return part_id


def _inner_edges(edges: EdgeFile, side: np.ndarray, share: tuple[int, int]) -> list[EdgeFile | None]:
    """Write the edges inside each side that is to be divided again to a file of its own, its nodes numbered again."""
    inner = [EdgeFile(edges.folder, edges.dtype) if parts > 1 else None for parts in share]
    if inner == [None, None]:
        return inner
    rank = np.empty(len(side), edges.dtype)
    _rank_in_side(side, rank)
    kept = np.empty((2, SLICE_EDGES, 2), edges.dtype)
    for pairs in edges.pieces():
        for s, count in enumerate(_split_pairs(pairs, rank, kept[0], kept[1])):
            if inner[s] is not None:
                inner[s].append(kept[s, :count])
    return inner


@kernel
def _rank_in_side(side, rank):
    """Number the nodes of side 0 from 0 on, and those of side 1 from -1 down."""
    first, second = 0, -1
    for v in range(len(side)):
        if side[v] == 0:
            rank[v] = first
            first += 1
        else:
            rank[v] = second
            second -= 1


@kernel
def _split_pairs(pairs, rank, kept_0, kept_1):
    """Copy the edges inside each side, by their new numbers; return how many there are in each."""
    count_0, count_1 = 0, 0
    for i in range(len(pairs)):
        if i + _AHEAD < len(pairs):
            prefetch(rank, np.int64(pairs[i + _AHEAD, 0]))
            prefetch(rank, np.int64(pairs[i + _AHEAD, 1]))
        u, v = rank[pairs[i, 0]], rank[pairs[i, 1]]
        if u >= 0 and v >= 0:
            kept_0[count_0, 0], kept_0[count_0, 1] = u, v
            count_0 += 1
        elif u < 0 and v < 0:
            kept_1[count_1, 0], kept_1[count_1, 1] = -1 - u, -1 - v
            count_1 += 1
    return count_0, count_1


def check_seed_method(name: str) -> None:
    """Raise ValueError unless the name is "multilevel" or a registered partitioner other than GREM."""
    allowed = [MULTILEVEL, *(known for known in available_partitioners() if known not in ("grem", MULTILEVEL))]
    if name not in allowed:
        raise ValueError(f"partitioner.seed_method must be one of {', '.join(allowed)}, got {short(name)}")


def seed_partitioner(
    method: str, share: tuple[int, ...], caps: np.ndarray, slack: np.ndarray, weight, seed: int, scratch
) -> SeedParts:
    """Return a function that partitions a first chunk.

    Args:
        method: "multilevel", or the name of a registered partitioner. The latter makes sum(share) parts of equal size,
            which are then joined, unless all shares are equal.
        share: (num_parts,) relative sizes of the parts, whole numbers >= 1.
        caps: (num_parts, D) int64 largest weights of the parts over all nodes.
        slack: (D,) float64, the largest part over the mean among the chunk's nodes, as far as the caps allow it. Used
            by "multilevel" only, as is `weight`, (num_nodes, D) or None; other methods have their own balance.

    Returns:
        A `SeedParts`. If a chunk has fewer nodes than there are parts, each node gets a part of its own.
    """
    even = len(set(share)) == 1
    num_parts = len(share) if even or method == MULTILEVEL else sum(share)

    def seed_parts(ends: np.ndarray, neighbors: np.ndarray, edges: EdgeFile, num_edges: int) -> np.ndarray:
        rank = np.empty(len(ends), neighbors.dtype)
        num_nodes = _rank_nodes(ends, rank)
        if num_nodes < num_parts:
            found = np.arange(num_nodes)
        elif method == MULTILEVEL:
            return _multilevel(ends, neighbors, rank, num_nodes, np.array(share), caps, slack, weight, seed)
        else:
            found = _registered(method, rank, num_nodes, num_parts, edges, num_edges, seed, scratch)
        if num_parts > len(share):
            found = np.searchsorted(np.cumsum(share), found, side="right")
        return found.astype(np.int32)

    return seed_parts


def _multilevel(ends, neighbors, rank, num_nodes, share, caps, slack, weight, seed) -> np.ndarray:
    indptr, indices = np.zeros(num_nodes + 1, np.int64), np.empty(len(neighbors), rank.dtype)
    _compact_rows(ends, neighbors, rank, indptr, indices)
    met = None if weight is None else weight[np.diff(ends, prepend=0) > 0]
    graph = WeightedGraph(indptr, indices, ONE, _node_weight(met))
    mean = -(-total_weight(graph) * share[:, None] // share.sum())
    cap = np.clip(np.floor(mean * slack).astype(np.int64), 1, np.maximum(caps, 1))
    effort = Effort() if len(indices) <= _SMALL_ENTRIES else _LITTLE_EFFORT
    return partition_in_memory(graph, cap, seed, share / share.sum(), effort)


def _registered(method, rank, num_nodes, num_parts, edges, num_edges, seed, scratch) -> np.ndarray:
    pairs = np.empty((num_edges, 2), edges.dtype)
    edges.read(0, pairs)
    _rename(pairs, rank)
    stream = open_edge_stream((pairs[:, 0], pairs[:, 1]), num_nodes=num_nodes, layout="once")
    options = {"scratch": scratch} if "scratch" in complete_options(method, {}) else {}
    with phases.recording():  # its graph and its phases are not those of the whole
        return np.asarray(get_partitioner(method)(stream, num_parts, seed=seed, **options))


@kernel
def _rank_nodes(ends, rank):
    """Number the nodes that have an edge; return how many there are."""
    num_nodes, start = 0, 0
    for v in range(len(ends)):
        if ends[v] > start:
            rank[v] = num_nodes
            num_nodes += 1
        start = ends[v]
    return num_nodes


@kernel
def _compact_rows(ends, neighbors, rank, indptr, indices):
    row, start = 0, 0
    for v in range(len(ends)):
        if ends[v] > start:
            row += 1
            indptr[row] = ends[v]
        start = ends[v]
    for e in range(len(neighbors)):
        indices[e] = rank[neighbors[e]]


@kernel
def _rename(pairs, rank):
    """Put the ranks in, the smaller first: no edge then looks like the reverse of another."""
    for i in range(len(pairs)):
        u, v = rank[pairs[i, 0]], rank[pairs[i, 1]]
        pairs[i, 0], pairs[i, 1] = min(u, v), max(u, v)
