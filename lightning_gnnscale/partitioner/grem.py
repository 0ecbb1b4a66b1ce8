"""GREM: a partition of the first edges, carried over the rest in chunks while earlier placements are refined."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..graph import id_dtype
from ..jit import kernel
from ..triton_kernels.intrinsics import prefetch
from . import phases
from .checkpoint import Checkpoint
from .graph_access.edge_shuffle import PIECE_EDGES, EdgeFile, copy_edges, shuffle_edges
from .graph_access.resumed_graph import open_or_reopen
from .graph_access.scratch import AUTO, reserve, scratch_folder
from .graph_access.simple_graph import SimpleGraph, graph_facts
from .grem_placement import PlacementState, place_edges
from .grem_seed import MULTILEVEL, check_seed_method, seed_partitioner
from .registry import check_number, refuse_balance, register_partitioner

_TOLERANCE = 1e-12  # relative: keeps a whole number whole where its quotient was rounded
_PLACING = "placing"
_AHEAD = 32  # edges


def _memory(num_nodes: int, num_edges: int, num_parts: int, options: Mapping) -> float:
    placed_into = 4 * num_parts if options["mode"] == "direct" else 12
    chunk = options["chunk_edges"] or options["chunk_edges_share"] * num_edges
    return (16 + placed_into) * num_nodes + 34 * chunk


@register_partitioner("grem", memory=_memory)
def grem(
    stream,
    num_parts: int,
    *,
    seed: int = 0,
    masks=None,
    balance=None,
    progress=None,
    mode: str = "recursive",
    refine: bool = True,
    chunk_edges_share: float = 0.1,
    chunk_edges: int | None = None,
    seed_method: str = MULTILEVEL,
    order: str = "shuffle",
    epsilon: float = 0.03,
    deduplicate: bool | None = None,
    scratch: str | os.PathLike | None = AUTO,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int = 8,
) -> np.ndarray:
    """Partition by greedy streaming with refinement, after an in-memory partition of the first chunk.

    Args:
        stream: an EdgeStream.
        num_parts: in [1, num_nodes].
        seed: decides the order of the edges and is passed to the seed method.
        masks: not used.
        balance: must be None: GREM's only bound is `epsilon`.
        progress: called as progress(what, done, total) once a chunk.
        mode: "recursive" bisects, and bisects the parts with their inner edges again; "direct" places into all parts
            at once: faster, with a larger cut and 4 * num_parts bytes of counts a node.
        refine: place a node anew in every chunk that meets it; False fixes its first part (greedy streaming).
        chunk_edges_share: edges a chunk as a share of all simple edges, in (0, 1]; it decides cut and memory.
        chunk_edges: edges a chunk, >= 1, in place of the share; kept through all levels of the recursion. Not to be
            confused with the stream's own chunks, which change nothing.
        seed_method: "multilevel" (in memory), or a registered partitioner for the first chunk: "metis", "random", ...;
            nodes beyond a part's cap in its result are placed like those of later chunks.
        order: "shuffle" brings the edges into a random order on scratch disk; "given" takes them as they stream,
            which is right only where that order is random: edges sorted by id ruin the cut.
        epsilon: a part holds at most (1 + epsilon) * ceil(num_nodes / num_parts) nodes, >= 0.
        deduplicate, scratch: see `open_simple_graph`; scratch disk is needed.
        checkpoint: file to save the state to; when it stands there already, the work goes on from it. It is removed
            at the end. None: nothing is saved.
        checkpoint_every: chunks between two saves, >= 1.

    Returns:
        (num_nodes,) int32 part ids. Nodes that no edge has met go to the relatively lightest parts.

    Raises:
        ValueError: an option outside its range, or a layout that the edges contradict.
        EdgeStreamError: the edges changed between the passes.
        GNNScaleError: too little scratch disk, before anything is written.

    Cost: two passes over the stream, and log2(num_parts) over scratch disk ("recursive"), of 2 ids an edge (4 in
        "recursive"). Memory: 16 bytes a node and 4 for every part that is placed into at a time (2 in "recursive",
        which takes 4 more); one chunk, 2 ids an edge; and what the seed method takes for a chunk.
    Source: Waleffe et al., Armada, Algorithms 1 and 2. Differs: nodes without a part are placed and counted too, and
        a node is taken out of its part before room is looked for (as printed the cut is random); any num_parts; ties
        stay, then go to the relatively lightest part, then to the lowest.
    """
    refuse_balance("grem", balance)
    _check_options(mode, refine, chunk_edges_share, chunk_edges, seed_method, order, epsilon, checkpoint_every)
    folder = scratch_folder(scratch)
    if folder is None:
        raise ValueError("partitioner 'grem' needs scratch disk: give scratch=<a folder> or scratch=auto")
    decisive = {"mode": mode, "refine": refine, "share": chunk_edges_share, "chunk_edges": chunk_edges, "seed": seed}
    decisive |= {"seed_method": seed_method, "order": order, "epsilon": epsilon, "num_parts": num_parts}
    settings = {"method": "grem", **decisive, "deduplicate": deduplicate}
    saved = Checkpoint(checkpoint, stream, settings, checkpoint_every)
    graph, _, arrays = open_or_reopen(stream, saved, deduplicate, scratch, progress)
    chunk_edges = chunk_edges or share_of_edges(chunk_edges_share, graph.num_edges)
    phases.note(chunk_edges=chunk_edges)
    run = _Run(graph, num_parts, epsilon, refine, chunk_edges, (seed_method, seed, scratch), saved, progress, arrays)
    del arrays
    edges = _ordered_edges(graph, folder, order, seed, num_parts > 2 and mode == "recursive", progress)
    if mode == "direct" or num_parts == 1:
        part_id = run.place(edges, graph.num_nodes, (1,) * num_parts, [run.cap] * num_parts, 0, "placing")
    else:
        part_id = _bisect(edges, run)
    saved.remove()
    return part_id


def share_of_edges(share: float, num_edges: int) -> int:
    """Return a share of the edges, rounded up, at least 1."""
    return max(1, math.ceil(share * num_edges * (1 - _TOLERANCE)))


def part_cap(num_nodes: int, num_parts: int, epsilon: float) -> int:
    """Return the nodes that a part may hold: floor((1 + epsilon) * ceil(num_nodes / num_parts))."""
    return math.floor(-(-num_nodes // num_parts) * (1 + epsilon) * (1 + _TOLERANCE))


def side_caps(num_nodes: int, share: tuple[int, int], cap: int) -> list[int]:
    """Return the caps of the two sides of a bisection.

    Args:
        num_nodes: Number of nodes to be bisected, at most cap * sum(share).
        share: Number of parts that each side will be divided into.
        cap: Largest number of nodes in each of these parts.

    Returns:
        ceil(num_nodes * share / sum(share) * r) for each side, with r = (cap * sum(share) / num_nodes)^(1 / levels):
        the remaining slack is spent evenly over the ceil(log2(sum(share))) levels to come.
    """
    num_parts = sum(share)
    slack = (cap * num_parts / max(1, num_nodes)) ** (1 / math.ceil(math.log2(num_parts)))
    return [min(math.ceil(num_nodes * part / num_parts * slack * (1 - _TOLERANCE)), cap * part) for part in share]


class _Run:
    """What all passes of one run have in common, and the state in which an earlier process left them."""

    def __init__(self, graph, num_parts, epsilon, refine, chunk_edges, seeding, saved, progress, arrays):
        self.cap = part_cap(graph.num_nodes, num_parts, epsilon)
        self.num_parts = num_parts
        self.part_id = arrays.get("part_id", np.zeros(graph.num_nodes, np.int32))
        self.first_step = int(arrays.get("step", -1))
        self._graph, self._refine, self._chunk_edges, self._epsilon = graph, refine, chunk_edges, epsilon
        self._seed_method, self._seed, self._scratch = seeding
        self._saved, self._progress = saved, progress
        self._left_state = {name: arrays[name] for name in PlacementState._fields if name in arrays}

    def place(self, edges: EdgeFile, num_nodes: int, share, caps, step: int, what: str) -> np.ndarray:
        """Stream the edges once and return the (num_nodes,) parts; `step` numbers the passes of a run."""
        state = PlacementState.empty(num_nodes, len(share), self._refine)
        if step == self.first_step:
            state = PlacementState(**self._left_state)
        self._left_state = {}
        facts = {"part_id": self.part_id, "step": np.int64(step), **graph_facts(self._graph), **state._asdict()}

        def after_chunk(done: int) -> None:
            self._saved.after_chunk(_PLACING, facts)
            if self._progress is not None:
                self._progress(what, done, edges.num_edges)

        caps = np.array(caps, np.int64)
        seed_parts = seed_partitioner(self._seed_method, share, caps, self._epsilon, self._seed, self._scratch)
        place_edges(edges, caps, self._chunk_edges, seed_parts, state, after_chunk)
        return state.part


def _check_options(mode, refine, chunk_edges_share, chunk_edges, seed_method, order, epsilon, checkpoint_every) -> None:
    for name, value, allowed in (
        ("mode", mode, ("recursive", "direct")),
        ("refine", refine, (True, False)),
        ("order", order, ("shuffle", "given")),
    ):
        if value not in allowed:
            raise ValueError(f"partitioner.{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    check_number("partitioner.chunk_edges_share", chunk_edges_share, at_least=0)
    if not 0 < chunk_edges_share <= 1:
        raise ValueError(f"partitioner.chunk_edges_share must be in (0, 1], got {chunk_edges_share!r}")
    if chunk_edges is not None:
        check_number("partitioner.chunk_edges", chunk_edges, at_least=1)
        if chunk_edges != int(chunk_edges):
            raise ValueError(f"partitioner.chunk_edges must be a whole number, got {chunk_edges!r}")
    check_seed_method(seed_method)
    check_number("partitioner.epsilon", epsilon, at_least=0)
    check_number("partitioner.checkpoint_every", checkpoint_every, at_least=1)


def _ordered_edges(graph: SimpleGraph, folder: Path, order: str, seed: int, rewritten: bool, progress) -> EdgeFile:
    files = 2 if rewritten else 1
    needed = files * graph.num_edges * 2 * id_dtype(graph.num_nodes).itemsize
    reserve(folder, needed, f"{files} orders of {graph.num_edges} edges")
    with phases.phase("order"):
        return (
            shuffle_edges(graph, folder, seed, progress) if order == "shuffle" else copy_edges(graph, folder, progress)
        )


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
            side = run.place(edges, len(nodes), share, side_caps(len(nodes), share, run.cap), step, what)
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
    """Write the edges inside each side that is to be divided again to a file of its own, its nodes numbered anew."""
    inner = [EdgeFile(edges.folder, edges.dtype) if parts > 1 else None for parts in share]
    if inner == [None, None]:
        return inner
    rank = np.empty(len(side), edges.dtype)
    _rank_in_side(side, rank)
    kept = np.empty((2, PIECE_EDGES, 2), edges.dtype)
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
