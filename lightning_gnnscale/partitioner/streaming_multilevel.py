"""The flagship: multilevel partitioning of an edge file of any order, in memory that grows with the nodes alone."""

import os
import zlib
from collections.abc import Mapping

import numpy as np

from ..jit import kernel
from ..rng import fold
from . import phases
from .checkpoint import Checkpoint
from .coarse_parts import coarse_parts
from .constraints import NODES, VOLUME, Constraints, judge, resolve_constraints, weight_of
from .graph_access.scratch import AUTO
from .graph_access.streamed_graph import StreamedEdges, StreamedRows
from .multilevel import Effort, partition_in_memory
from .multilevel.cycle import part_loads
from .multilevel.jet import JetSpace, refine
from .multilevel.quotient import quotient_bytes
from .multilevel.weighted_graph import MAX_PARTS, PART_DTYPE
from .registry import check_number, register_partitioner
from .row_threads import RowThreads

BLOCK_EDGES = 1 << 23
MIN_QUOTIENT_EDGES = 1 << 20  # a quotient graph of so many edges is never too large
REFINEMENT = "refinement"  # a phase, also of a checkpoint

_SALT = 0x464C4147  # keeps this use of the seed apart from all others
_IN_MEMORY = 60  # bytes an edge of a graph that is partitioned in memory
_LOSS = 0.25  # of the connection to its own part that a node may lose for a start, on the streamed graph


def _memory(num_nodes: int, num_edges: int, num_parts: int, options: Mapping) -> float:
    entries = max(num_nodes, 2 * num_edges)
    if entries <= options["block_edges"]:
        return 20 * num_nodes + _IN_MEMORY // 2 * num_edges  # whose edges weigh one each
    wanted = max(MIN_QUOTIENT_EDGES, options["quotient_edges_per_node"] * num_nodes)
    edges = min(wanted, num_edges)
    # Clusters and their graph, as it is added up and then as it is partitioned; or the refinement of nodes.
    clusters = 20 * num_nodes + max(quotient_bytes(edges), _IN_MEMORY * edges)
    if options["scratch"] is None:
        return max(63 * num_nodes, clusters + 12 * num_nodes)
    return max(45 * num_nodes, clusters) + 2 * 4 * options["block_edges"]


@register_partitioner("streaming_multilevel", memory=_memory)
def streaming_multilevel(
    stream,
    num_parts: int,
    *,
    seed: int = 0,
    masks=None,
    balance=None,
    progress=None,
    passes: int = 3,
    refinement_rounds: int = 2,
    quotient_edges_per_node: float = 2.0,
    runs: int | None = None,
    cycles: int | None = None,
    block_edges: int = BLOCK_EDGES,
    num_threads: int | None = None,
    deduplicate: bool | None = None,
    scratch: str | os.PathLike | None = AUTO,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int = 8,
) -> np.ndarray:
    """Partition by clustering the streamed graph, partitioning the graph of clusters in memory, and refining.

    The graph's rows go to scratch disk and are read block by block: label propagation clusters them, the edges between
    clusters are added up to a quotient graph, which a multilevel method partitions in memory; its parts are carried
    over to the nodes and refined on the streamed blocks. A graph that fits one block is partitioned in memory at once.
    Without scratch disk the edges are read from the stream instead, pass after pass, in the order in which they are
    listed, and counters for every node take the place of its row (see `multilevel.edge_clustering`, `edge_steps`).

    Args:
        stream: An EdgeStream.
        num_parts: In [1, num_nodes].
        seed: Decides every random choice.
        masks: {"train": (num_nodes,) bool, ...}, those that are balanced.
        balance: {"nodes": 1.05, "volume": 1.10, "train": 1.05}, any of them: the largest part over the mean. None:
            nodes at 1.03. What cannot be kept is told with its size.
        progress: Called as progress(what, done, total).
        passes: Passes of label propagation over the streamed graph, >= 1; without scratch disk each reads the stream
            twice.
        refinement_rounds: Rounds of Jet refinement over the streamed graph, >= 0.
        quotient_edges_per_node: Upper bound on the edges of the quotient graph per node of the graph, >= 0; at least
            2**20 edges are always allowed. Where there would be more, clusters grow coarser; clusters that no longer
            grow node by node are joined in memory, up to one per part.
        runs: Number of times that the graph in memory is partitioned, >= 1; the best result is kept. None: 2 if that is
            the whole graph, 1 if it is the quotient graph.
        cycles: Number of times that it is then contracted within its parts and refined again, >= 0. None: 1 for the
            whole graph, 0 for the quotient graph.
        block_edges: Entries (two per edge) in a block, >= 1; they change the result.
        num_threads: Number of threads, >= 1; None: all cores. The result does not depend on it.
        deduplicate, scratch: See `open_simple_graph`. Without scratch disk (scratch=None) a repeated edge cannot be
            told from another, except for the two directions of layout "both_ways". It stays, and adds to the weight of
            its pair and to the volume of its nodes; a warning says how many there are.
        checkpoint: File to save the state to. If it exists already, the work resumes from it. It is removed at the end.
            None: nothing is saved.
        checkpoint_every: Chunks of the first pass between two saves, >= 1. Later, every pass for clusters and every
            round of refinement is saved.

    Returns:
        (num_nodes,) int32 part ids.

    Raises:
        ValueError: an option outside its range, or a constraint that no partition can meet; or `deduplicate=True`
            without scratch disk.
        GNNScaleError: too little scratch disk, before anything is written.
        EdgeStreamError: the edges changed between the passes.

    Cost: O(num_nodes + num_edges) time; 45 bytes a node with one constraint, or 20 and 60 an edge of the quotient
        graph, whichever are more, and two blocks; scratch disk as told by `open_external_csc`. Without scratch disk 63
        bytes a node where nodes alone are balanced, else 4 more a constraint, or 32 and 60 an edge of that graph;
        3 + 2 * passes passes over the stream, and for a round of refinement 2 (3 with more than 8 parts) and one for
        each round of rebalancing: 17 to 25 in all by default, up to 90 where several constraints are hard to meet.
    Source: ours. Label propagation and projection: Meyerhenke, Sanders and Schulz, SEA 2014; refinement: Gilbert et
        al., Jet, 2024; the streamed form and balances of several weights are this project's.
    """
    if num_parts > MAX_PARTS:
        raise ValueError(
            f"partitioner.num_parts of 'streaming_multilevel' must be in [1, {MAX_PARTS}], got {num_parts}"
        )
    check_number("partitioner.passes", passes, at_least=1)
    check_number("partitioner.refinement_rounds", refinement_rounds, at_least=0)
    if runs is not None:
        check_number("partitioner.runs", runs, at_least=1)
    if cycles is not None:
        check_number("partitioner.cycles", cycles, at_least=0)
    check_number("partitioner.quotient_edges_per_node", quotient_edges_per_node, at_least=0)
    check_number("partitioner.checkpoint_every", checkpoint_every, at_least=1)
    if num_threads is not None:
        check_number("partitioner.num_threads", num_threads, at_least=1)
    settings = {
        "num_parts": num_parts,
        "seed": seed,
        "balance": balance,
        "masks": {name: zlib.crc32(np.asarray(masks[name])) for name in balance or {} if name in (masks or {})},
        "passes": int(passes),
        "runs": runs,
        "cycles": cycles,
        "block_edges": block_edges,
        "deduplicate": deduplicate,
        "scratch": scratch is not None,
        "quotient_edges_per_node": quotient_edges_per_node,
        "refinement_rounds": int(refinement_rounds),
    }
    saved = Checkpoint(checkpoint, stream, {"method": "streaming_multilevel", **settings}, checkpoint_every)
    phase, arrays = saved.load() or ("", {})
    given = (block_edges, deduplicate, progress, saved, phase, arrays)
    source = StreamedEdges(stream, *given) if scratch is None else StreamedRows(stream, scratch, *given)
    threads = RowThreads(None if num_threads is None else int(num_threads))
    try:
        constraints = resolve_constraints(balance, masks, source.degree, num_parts)
        node_weight = node_weights(constraints, source.degree)
        cap = np.repeat(constraints.cap[None], num_parts, axis=0)
        whole = source.one_block
        effort = Effort(
            runs=1 + whole if runs is None else int(runs), cycles=int(whole) if cycles is None else int(cycles)
        )
        if whole:
            with phases.phase("multilevel"):
                part = partition_in_memory(source.in_memory(node_weight), cap, seed, effort=effort, threads=threads)
        else:
            source.keep_degree(_volume(constraints, node_weight))
            graph, facts = source.streamed(node_weight), source.facts
            part = _streamed_parts(graph, cap, settings, effort, threads, saved, phase, arrays, facts)
        judge(constraints, part_loads(node_weight, part, num_parts))
    finally:
        threads.close()
        source.close()
    saved.remove()
    return part.astype(np.int32)


def node_weights(constraints: Constraints, degree: np.ndarray) -> np.ndarray:
    """Return (num_nodes, D) int32 weights; or (1, 1) where only nodes are balanced."""
    if constraints.kinds.tolist() == [NODES]:
        return np.ones((1, 1), np.int32)
    weight = np.empty((len(degree), len(constraints.kinds)), np.int32)
    _fill_weights(constraints.kinds, constraints.flags, degree, weight)
    return weight


def _volume(constraints: Constraints, node_weight: np.ndarray) -> np.ndarray | None:
    """Return the degrees as far as constraints weigh them."""
    dimensions = np.flatnonzero(constraints.kinds == VOLUME)
    return node_weight[:, dimensions[0]] if len(dimensions) else None


def _streamed_parts(graph, cap, settings: dict, effort, threads, saved: Checkpoint, phase: str, arrays: dict, facts):
    """Return (num_nodes,) int16: the parts of the clusters, carried over to the nodes and refined on the stream."""
    seed, rounds = settings["seed"], settings["refinement_rounds"]
    if phase == REFINEMENT:
        part = np.empty(graph.num_nodes, PART_DTYPE)
    else:
        max_edges = max(MIN_QUOTIENT_EDGES, int(settings["quotient_edges_per_node"] * graph.num_nodes))
        coarse = (seed, settings["passes"], max_edges, effort, threads, saved, phase, arrays, facts)
        part = coarse_parts(graph, cap, *coarse)

    def save(state: dict[str, np.ndarray]) -> None:
        if saved.path is not None:
            saved.save(REFINEMENT, {**state, **facts})

    with phases.phase(REFINEMENT):
        load, space = part_loads(graph.node_weight, part, len(cap)), JetSpace.empty(graph.num_nodes)
        refined = (fold(seed, _SALT, 2), threads, space, _LOSS, rounds + 1, rounds, save)
        refine(graph, part, load, cap, *refined, arrays if phase == REFINEMENT else None)
    return part


@kernel
def _fill_weights(kinds, flags, degree, weight):
    for v in range(len(degree)):
        for d in range(len(kinds)):
            weight[v, d] = weight_of(kinds[d], degree[v], flags, d, v)
