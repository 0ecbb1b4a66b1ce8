"""The flagship: multilevel partitioning of an edge file of any order, in memory that grows with the nodes alone."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from ..errors import check_number, short
from ..graph import id_dtype
from ..rng import fold
from . import phases
from .constraints import VOLUME, Constraints, judge, node_weights, resolve_constraints
from .graph_input import GraphInput, graph_partitioner
from .multilevel import Effort, partition_in_memory
from .multilevel.clustering import cluster_limit
from .multilevel.cycle import level_cap, polished
from .multilevel.edge_form import EdgeClusters
from .multilevel.hubs import hub_parts
from .multilevel.low_degrees import MAX_MEAN_DEGREE
from .multilevel.neighbour_joins import FEW_NEIGHBOURS
from .multilevel.quotient import ENOUGH_EDGES, JOINED_EDGES, build_quotient, contract, number_clusters, quotient_bytes
from .multilevel.refinement import JetSpace, inner_cap, rebalance, refine
from .multilevel.row_counts import count_parts
from .multilevel.row_form import RowClusters
from .multilevel.sweeps import SWEEPS, sweep
from .multilevel.weighted_graph import (
    MAX_PARTS,
    ONE,
    PART_DTYPE,
    BlockGraph,
    EdgeGraph,
    RowThreads,
    WeightedGraph,
    part_loads,
    rows_of,
)
from .part_order import numbered

BLOCK_EDGES = 1 << 23
MIN_QUOTIENT_EDGES = 1 << 20  # a quotient graph of so many edges is never too large
AT_ONCE = 1 << 20  # entries of a graph that is contracted level by level, without a graph of clusters of its own
CLUSTERING, PARTS, REFINEMENT = "clustering", "parts", "refinement"  # phases, also of a checkpoint


class Tries(NamedTuple):
    """How hard to try: the settings of an `effort`.

    Attributes:
        passes, refinement_rounds, quotient_edges_per_node: See `streaming_multilevel`.
        runs, cycles: The same, of the graph of clusters, and of a whole graph of at most AT_ONCE entries.
        patience, max_rounds: See `Effort`; of both graphs too.
        clusters_first: Whether graphs of at most AT_ONCE entries are treated as larger ones are.
        enough_edges: Of a cluster: where the bound on the edges of the quotient graph lets each have so many, a sample
            of them will do.
        polish: What a larger graph that fits one block is given after its sweeps: patience and rounds of Jet, and
            cycles; first where nodes have few neighbours, FEW_NEIGHBOURS on average, then where they have more.
        sweeps_in_vain: Sweeps in a row that lower the cut by little, after which only the last one is left.
        rounds_of_edges: refinement_rounds without scratch disk, where each takes several passes over the stream.
        tries, level_passes, sample: Of a graph that fits one block: initial partitions, passes of label propagation a
            level in memory, and neighbours that a node looks at then, see `cluster_nodes`. Where `sample` is given,
            clusters are found in one pass, and their graph by twice as many entries of each row.
        joins: Whether a graph whose nodes have few neighbours is contracted from the start, see `join_neighbours`.
        loosely: How nodes leave parts that are over their caps after sweeps, see `rebalance`.
        held_blocks: Blocks of rows that are held in memory where the whole graph is no more: one, or as many as are in
            memory while blocks are read.
        combines, flows, entries_of_runs: See `Effort`; flows also in the polish. Where `runs` is given, all are made.
    """

    passes: int
    refinement_rounds: int
    quotient_edges_per_node: float
    runs: tuple[int, int]
    cycles: tuple[int, int]
    patience: tuple[int, int] = (Effort().patience,) * 2
    max_rounds: tuple[int, int] = (Effort().max_rounds,) * 2
    clusters_first: bool = False
    enough_edges: float = ENOUGH_EDGES
    polish: tuple[tuple[int, int, int], tuple[int, int, int]] = ((8, 60, 0), (3, 8, 0))
    sweeps_in_vain: int = 1
    rounds_of_edges: int = 1
    tries: int = Effort().tries
    level_passes: int = Effort().passes
    sample: int | None = None
    joins: bool = False
    loosely: bool = True
    held_blocks: int = 1
    combines: bool = False
    flows: int = 0
    entries_of_runs: int | None = None


_UNPOLISHED = ((0, 0, 0),) * 2
EFFORTS = {
    "fast": Tries(2, 2, 1.0, (1, 1), (0, 0), (3, 3), (5, 8), True, 8, _UNPOLISHED, 1, 1, 3, 2, 16, True, False, 2),
    "default": Tries(3, 6, 2.0, (2, 3), (0, 1), sweeps_in_vain=2, rounds_of_edges=2),
    "best": Tries(
        2,
        10,
        4.0,
        (6, 9),
        (0, 1),
        polish=((8, 60, 0), (8, 60, 1)),
        sweeps_in_vain=2,
        rounds_of_edges=6,
        combines=True,
        flows=4,
        entries_of_runs=3 << 20,
    ),
}
_SALT = 0x464C4147  # separates this use of the seed from all others
_IN_MEMORY = 60  # bytes an edge of a graph that is partitioned in memory
_CLUSTERS_A_PART = 100.0  # full clusters that a part is made of at least; fewer where their graph is too large
_MANY_CLUSTERS = 1000  # a part: with fewer, a thin sample of their edges costs less of the cut than coarser ones
_THIN_SAMPLE = 8  # edges a cluster
_SHRINKAGE = 0.8  # a round that leaves more of the clusters is the last
_WORTHWHILE = 0.006  # of all edges: what sweeps in vain, all together, would lower the cut by at most
# Initial partitions, and nodes a part of the graph that they are made of: on grids they decide how parts lie.
_TRIES_OF_FEW, _STOP_OF_FEW = 32, 20
_SWEPT_BACK = 1.02  # of a part's cap: less is swept back without a pass of its own
_LOSS = 0.25  # of the connection to its own part that a node may lose for a start, on the streamed graph


def _memory(num_nodes: int, num_edges: int, num_parts: int, options: Mapping) -> float:
    whole = max(num_nodes, 2 * num_edges) <= options["block_edges"]
    if whole and 2 * num_edges <= AT_ONCE:
        return 20 * num_nodes + _IN_MEMORY // 2 * num_edges  # whose edges weigh one each
    per_node = options["quotient_edges_per_node"]
    per_node = EFFORTS[options["effort"]].quotient_edges_per_node if per_node is None else per_node
    wanted = max(MIN_QUOTIENT_EDGES, per_node * num_nodes)
    edges = min(wanted, num_edges)
    # Clusters and their graph, as it is added up and then as it is partitioned; or the refinement of nodes.
    counted = edges if options["scratch"] is None else max(edges, min(JOINED_EDGES * num_nodes, num_edges))
    clusters = 20 * num_nodes + max(quotient_bytes(counted), _IN_MEMORY * edges)
    if whole:
        return max(20 * num_nodes + _IN_MEMORY // 2 * num_edges, clusters + 8 * num_edges)
    if options["scratch"] is None:
        return max(63 * num_nodes, clusters + 12 * num_nodes)
    # Two blocks; or the rows of a graph that fills no more, which are held, and where each begins.
    held = max(num_nodes, 2 * num_edges) <= EFFORTS[options["effort"]].held_blocks * options["block_edges"]
    return max(32 * num_nodes, clusters) + 2 * 4 * options["block_edges"] + 8 * num_nodes * held


@graph_partitioner("streaming_multilevel", memory=_memory, slack=1.03)
def streaming_multilevel(
    graph: GraphInput,
    num_parts: int,
    *,
    effort: str = "default",
    passes: int | None = None,
    refinement_rounds: int | None = None,
    quotient_edges_per_node: float | None = None,
    runs: int | None = None,
    cycles: int | None = None,
    block_edges: int = BLOCK_EDGES,
    num_threads: int | None = None,
) -> np.ndarray:
    """Partition by clustering the streamed graph, partitioning the graph of clusters in memory, and refining.

    The graph's rows go to scratch disk and are read block by block: label propagation clusters them, the edges between
    clusters are added up to a quotient graph, which a multilevel method partitions in memory; its parts are carried
    over to the nodes and refined on the streamed blocks. Where clusters are hardly more than trees and a tenth of the
    edges is between hubs, these begin as one part, and no graph of clusters is made (`multilevel.hubs`). A graph that
    fits one block is read into memory, without scratch disk, and but for "fast" refined once more by Jet; "fast" also
    holds the rows of one that fits two, which it treats as a larger one otherwise. One of trees and chains is
    contracted level by level from the start; by "fast" also one whose nodes have few neighbours
    (`multilevel.neighbour_joins`), but for "fast" one of at most 2**20 entries. In memory "best" combines several
    results, and straightens borders by flows (`multilevel.flow`).
    Without scratch disk the edges are read from the stream instead, pass after pass, in the order in which they are
    listed, and counters for every node replace its row (see `multilevel.edge_form`). A repeated edge then cannot be
    distinguished from another, except for the two directions of layout "both_ways". It stays, and adds to the weight
    of its pair and to the volume of its nodes; a warning says how many there are.

    Args:
        graph: the graph. Its seed decides every random choice; its masks are those that are balanced. Where there is a
            checkpoint, every pass for clusters and every round of refinement is saved.
        graph.balance: {"nodes": 1.05, "volume": 1.10, "train": 1.05}, any of them: the largest part over the mean.
            None: nodes at 1.03. What cannot be kept is reported with its size.
        num_parts: in [1, num_nodes].
        effort: "fast", "default" or "best": what the next five options are where they are None, see `EFFORTS`; also how
            many rounds of Jet there are at each level in memory, and at the end for a graph that fits one block.
        passes: Passes of label propagation over the streamed graph, >= 1 (by effort 2, 3, 2; by "fast" 1 over a graph
            that fits one block); without scratch disk each reads the stream twice.
        refinement_rounds: Rounds of refinement over the streamed graph, >= 0. With scratch disk (2, 6, 10) at most one
            sweep more than that, each a pass; where sweeps gain little, the next is the last. Without (1, 2, 6):
            rounds of Jet.
        quotient_edges_per_node: Upper bound on the edges of the quotient graph per node of the graph, >= 0 (1, 2, 4);
            at least 2**20 edges are always allowed. Where there would be more, a sample of the edges is taken if that
            leaves many of each cluster (8 with "fast" or fewer than 1,000 clusters a part, else 64). Else, with scratch
            disk, clusters are joined in memory by up to half an edge a node, if that is 16 of each; else they grow
            coarser by another pass; those that no longer grow node by node are joined in memory, up to one per part.
        runs: Number of times that the graph in memory is partitioned, >= 1; the best result is kept, which "best"
            combines with each of the others. Of the quotient graph 1, 2, 6, of a whole graph of at most 2**20 entries
            1, 3, 9; with "best" fewer where the graph is large, but two at least.
        cycles: Number of times that it is then contracted within its parts and refined again, >= 0. Of the quotient
            graph 0, 0, 0, of such a whole graph 0, 1, 1.
        block_edges: Entries (two per edge) in a block, >= 1; they change the result.
        num_threads: Number of threads, >= 1; None: all cores. The result does not depend on it.

    Returns:
        (num_nodes,) int32 part ids.

    Raises:
        ValueError: an option outside its range, or a constraint that no partition can meet; or `deduplicate=True`
            without scratch disk.
        GNNScaleError: too little scratch disk, before anything is written.
        EdgeStreamError: the edges changed between the passes.

    Cost: O(num_nodes + num_edges) time; 32 bytes a node with one constraint, or 20 and 60 an edge of the quotient
        graph or of half an edge a node 27 to 80, whichever are more, and two blocks; scratch disk as in
        `open_external_csc` for what does not fit one. Without scratch disk 63 bytes a node where nodes alone are
        balanced, else 4 more a constraint, or 32 and 60 an edge of that graph;
        3 + 2 * passes passes over the stream, and for a round of refinement 2 (3 with more than 8 parts) and one for
        each round of rebalancing: 17 to 25 in all by default, up to 90 where several constraints are hard to meet.
    Source: ours. Label propagation and projection: Meyerhenke, Sanders and Schulz, SEA 2014; refinement: Gilbert et
        al., Jet, 2024; the streamed form, its sweeps and balances of several weights are this project's.
    """
    if num_parts > MAX_PARTS:
        raise ValueError(
            f"partitioner.num_parts of 'streaming_multilevel' must be in [1, {MAX_PARTS}], got {num_parts}"
        )
    if effort not in EFFORTS:
        raise ValueError(f"partitioner.effort must be one of {', '.join(EFFORTS)}, got {short(effort)}")
    given = {"passes": passes, "refinement_rounds": refinement_rounds, "runs": runs, "cycles": cycles}
    given |= {"quotient_edges_per_node": quotient_edges_per_node, "num_threads": num_threads}
    for name, value in given.items():
        if value is not None:
            least = 0 if name in ("refinement_rounds", "cycles", "quotient_edges_per_node") else 1
            check_number(f"partitioner.{name}", value, at_least=least)
    tries = EFFORTS[effort]
    passes, refinement_rounds, per_node = (
        default if value is None else value
        for value, default in zip((passes, refinement_rounds, quotient_edges_per_node), tries[:3], strict=True)
    )
    form = StreamedEdges if graph.scratch is None else StreamedRows
    threads, source = RowThreads(None if num_threads is None else int(num_threads)), None
    try:
        source = form(graph, block_edges, threads, tries.held_blocks)
        constraints = resolve_constraints(graph.balance, graph.masks, source.degree, num_parts)
        node_weight = node_weights(constraints, source.degree, np.int32)
        cap = np.repeat(constraints.cap[None], num_parts, axis=0)
        whole = source.one_block
        if not whole and graph.scratch is None and given["refinement_rounds"] is None:
            refinement_rounds = tries.rounds_of_edges
        entries = int(source.degree.sum(dtype=np.int64))
        few_neighbours = entries <= FEW_NEIGHBOURS * graph.num_nodes
        of_few = MAX_MEAN_DEGREE if not tries.joins else FEW_NEIGHBOURS
        at_once = whole and entries <= max(AT_ONCE * (not tries.clusters_first), of_few * graph.num_nodes)
        runs = tries.runs[at_once] if runs is None else int(runs)
        cycles = tries.cycles[at_once] if cycles is None else int(cycles)
        patience, max_rounds = tries.patience[at_once], tries.max_rounds[at_once]
        in_all = Effort(runs=runs, cycles=cycles, patience=patience, max_rounds=max_rounds, joins=tries.joins)
        in_all = in_all._replace(combines=tries.combines, flows=tries.flows)
        if given["runs"] is None:
            in_all = in_all._replace(entries_of_runs=tries.entries_of_runs)
        sample = tries.sample if whole else None
        if whole:
            in_all = in_all._replace(tries=tries.tries, passes=tries.level_passes, sample=sample)
        if few_neighbours and (tries.joins or not at_once):
            in_all = in_all._replace(tries=_TRIES_OF_FEW, stop=_STOP_OF_FEW)
        if sample is not None and given["passes"] is None:
            passes = 1
        if at_once:
            with phases.phase("multilevel"):
                read = source.in_memory(node_weight)
                part = partition_in_memory(read, cap, graph.seed, effort=in_all, threads=threads)
                part = numbered(read, part, num_parts)
        else:
            source.keep_degree(source.degree if whole else _volume(constraints, node_weight))
            max_edges = max(MIN_QUOTIENT_EDGES, int(per_node * graph.num_nodes))
            read = source.in_memory(node_weight) if source.held else source.streamed(node_weight)
            clusters = partial(_clusters, graph, read, cap, int(passes), (max_edges, tries.enough_edges), threads)
            clusters = partial(clusters, sample=sample)
            parts = StreamedParts(graph, read, cap, in_all, threads, tries.sweeps_in_vain, tries.loosely)
            part = parts.refined(clusters, int(refinement_rounds))
            polish = tries.polish[not few_neighbours]
            if whole and polish[1]:
                with phases.phase(REFINEMENT):
                    part = polished(read, part, cap, graph.seed, polish, threads, parts.price, tries.flows)
            if phases.counts_quality() and isinstance(source, StreamedRows):
                _count_quality(read, part, num_parts, threads)
        judge(constraints, part_loads(node_weight, part, num_parts))
    finally:
        threads.close()
        if source is not None:
            source.close()
    return part.astype(np.int32)


def _count_quality(graph: BlockGraph | WeightedGraph, part: np.ndarray, num_parts: int, threads: RowThreads) -> None:
    """Count what the quality is made of while the rows are there: later it takes the stream, and a bit a part."""
    with phases.phase("quality"):
        counts = count_parts(graph, part, num_parts, threads, backwards=True)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(part, minlength=num_parts))])
        phases.leave_counts(**counts._asdict(), part_offsets=offsets)


def _volume(constraints: Constraints, node_weight: np.ndarray) -> np.ndarray | None:
    """Return the degrees as far as constraints weigh them."""
    dimensions = np.flatnonzero(constraints.kinds == VOLUME)
    return node_weight[:, dimensions[0]] if len(dimensions) else None


class StreamedParts:
    """The parts of a graph that is streamed, by way of its clusters.

    Args:
        given: what the method was given, for its seed and its checkpoint.
        graph: the graph as it is streamed.
        cap: (num_parts, D) int64, what each part may weigh.
        effort: how hard to try in memory.
        threads: their number does not change the result.
        in_vain, loosely: see `Tries`.

    Attributes:
        price: (num_parts, D) float64, what a unit of weight costs in each part after the sweeps.
    """

    def __init__(
        self,
        given: GraphInput,
        graph: BlockGraph | EdgeGraph | WeightedGraph,
        cap: np.ndarray,
        effort: Effort,
        threads: RowThreads,
        in_vain: int = 1,
        loosely: bool = True,
    ):
        self.given, self.graph, self.cap, self.effort, self.threads = given, graph, cap, effort, threads
        self.in_vain, self.loosely, self.price = in_vain, loosely, np.zeros(cap.shape)

    def refined(self, clusters: Callable[[], tuple[WeightedGraph | None, np.ndarray]], rounds: int) -> np.ndarray:
        """Return (num_nodes,) int16: the parts of the clusters, carried over to the nodes and refined on the stream.

        Args:
            clusters: returns the graph of clusters, and (num_nodes,) int32, the cluster of every node; or None, and
                parts of the nodes.
            rounds: rounds of refinement, >= 0.
        """
        given, graph, cap = self.given, self.graph, self.cap
        left = given.left_in(REFINEMENT)
        part = np.empty(graph.num_nodes, PART_DTYPE) if left else self._coarse(clusters)
        with phases.phase(REFINEMENT):
            if not isinstance(graph, EdgeGraph):
                return self._swept(left or {"part": part}, rounds)
            load, space = part_loads(graph.node_weight, part, len(cap)), JetSpace.empty(graph.num_nodes)
            refined = (fold(given.seed, _SALT, 2), self.threads, space, _LOSS, rounds + 1, rounds)
            refine(graph, part, load, cap, *refined, lambda state: given.save(REFINEMENT, state), left or None)
        return part

    def _swept(self, state: dict[str, np.ndarray], rounds: int) -> np.ndarray:
        """Refine parts by sweeps, a pass each, from a state on that is saved after each.

        Args:
            state: parts; where sweeps have gone before, "round": the number of the next one, and how many gained little
                before it, and "price": the lasting prices.
            rounds: number of the last sweep; 0: none.
        """
        graph, cap, part = self.graph, self.cap, state["part"]
        load = part_loads(graph.node_weight, part, len(cap))
        (number, few), last = state.get("round", np.zeros(2, np.int64)).tolist(), rounds  # a sweep more than rounds
        self.price = price = state.get("price", self.price)
        border = np.ones(graph.num_nodes, np.bool_)
        while number <= last and rounds:
            if number == 0 or (number == last and (load > _SWEPT_BACK * cap).any()):
                self._balance(part, load, number)
                border[:] = True
            pressure, slack = SWEEPS[max(0, len(SWEEPS) - 1 - (last - number))]
            gained = sweep(graph, part, load, cap, price, pressure, slack, self.threads, number % 2 == 0, border)
            little = gained < _WORTHWHILE / self.in_vain * graph.total_edge_weight / 2
            few = few + 1 if little else 0
            number = last if few >= self.in_vain and number < last else number + 1  # the last one balances
            self.given.save(REFINEMENT, {"part": part, "round": np.array([number, few]), "price": price})
        self._balance(part, load, last + 1)
        return part

    def _balance(self, part: np.ndarray, load: np.ndarray, number: int) -> None:
        """Move nodes out of parts that are over their caps, where there are any."""
        if (load <= self.cap).all():
            return
        target, ratio = np.empty(len(part), PART_DTYPE), np.empty(len(part), np.float64)
        key = fold(self.given.seed, _SALT, 2, number)
        space = (target, ratio, self.loosely)
        rebalance(self.graph, part, load, self.cap, inner_cap(self.cap), key, self.threads, *space)

    def _coarse(self, clusters: Callable[[], tuple[WeightedGraph | None, np.ndarray]]) -> np.ndarray:
        """Partition the graph of clusters, and carry its parts over to the nodes."""
        given, cap = self.given, self.cap
        left = given.left_in(PARTS)
        if left:
            return left["part"]
        quotient, coarse_of = clusters()
        if quotient is None:
            given.save(PARTS, {"part": coarse_of})
            return coarse_of
        phases.note(quotient_nodes=quotient.num_nodes, quotient_edges=len(quotient.indices) // 2)
        with phases.phase("multilevel"):
            coarse_cap = level_cap(quotient, cap, np.full(len(cap), 1 / len(cap)))
            coarse_part = partition_in_memory(
                quotient, coarse_cap, given.seed, effort=self.effort, threads=self.threads
            )
            coarse_part = numbered(quotient, coarse_part, len(cap))
        del quotient
        part = coarse_part[coarse_of]
        given.save(PARTS, {"part": part})
        return part


def _clusters(
    given: GraphInput,
    graph: WeightedGraph | BlockGraph | EdgeGraph,
    cap: np.ndarray,
    passes: int,
    edges: tuple[int, float],
    threads: RowThreads,
    sample: int | None = None,
) -> tuple[WeightedGraph | None, np.ndarray]:
    """Return the graph of clusters that label propagation finds, and (num_nodes,) int32, the cluster of every node.

    Where clusters tell nothing, but hubs do, there is no such graph: returned are None, and parts, see `hub_parts`.

    Args:
        given, graph, cap, threads: see `StreamedParts`.
        passes: rounds of label propagation, >= 1.
        edges: Edges of the graph of clusters, above which a sample of its edges is taken, or clusters grow coarser
            or are joined, up to one a part; and how many a cluster are enough for a sample.
        sample: see `Tries`.
    """
    left = given.left_in(CLUSTERING)
    if isinstance(graph, EdgeGraph):
        clusters = EdgeClusters(graph, given.seed, threads, left)
    else:
        clusters = RowClusters(graph, given.seed, threads, left, sample)
    per_part, done, until, num_parts = _CLUSTERS_A_PART, 0, clusters.steps_of(passes), len(cap)
    before = 2 * graph.num_nodes  # clusters of the round before: the first one is not the last for lack of growth
    if left:
        per_part, done, until, before = (left[name].item() for name in ("per_part", "done", "until", "before"))
    del left
    round_steps = clusters.steps_of(1) - clusters.steps_of(0)
    while True:
        limit = cluster_limit(graph, num_parts, per_part)
        with phases.phase(CLUSTERING):
            for i in range(done, until):
                clusters.step(i, limit)
                so_far = {"done": i + 1, "until": until, "per_part": per_part, "before": before}
                given.save(CLUSTERING, {**clusters.arrays(), **so_far})
        # With all its edges their graph is as good as the graph itself.
        too_many = not isinstance(graph, EdgeGraph) and graph.total_edge_weight // 2 > edges[0]
        if too_many and until == clusters.steps_of(passes):
            with phases.phase("quotient"):
                part = hub_parts(graph, clusters.label, cap, given.seed, threads)
            if part is not None:
                return None, part
        if sample is not None and isinstance(graph, WeightedGraph):
            with phases.phase("quotient"):
                quotient, coarse_of = contract(graph, clusters.label, threads, 2 * sample)
            if len(quotient.indices) // 2 <= edges[0]:
                return quotient, coarse_of
            del quotient
        with phases.phase("quotient"):
            coarse_of, num_coarse = number_clusters(clusters.label)
            # Clusters that no longer grow by moving nodes are joined as they are.
            last = per_part <= 1 or num_coarse > _SHRINKAGE * before
            largest = cluster_limit(graph, num_parts, 1.0) if last else None
            key = fold(given.seed, _SALT)
            enough = edges[1] if num_coarse > _MANY_CLUSTERS * num_parts else min(_THIN_SAMPLE, edges[1])
            grown = None if last or isinstance(graph, EdgeGraph) else limit
            quotient = build_quotient(graph, coarse_of, num_coarse, edges[0], largest, key, threads, enough, grown)
        if quotient is not None:
            return quotient, coarse_of
        # Too many edges between clusters: they may grow to twice the weight in another round.
        per_part, done, until, before = max(1.0, per_part / 2), until, until + round_steps, num_coarse


class StreamedRows:
    """The graph in rows, on scratch disk, or in memory where they fit a block.

    Args:
        given: what the method was given.
        block_edges, threads, held_blocks: see `open_external_csc`.

    Attributes:
        degree: (num_nodes,) entries a row.
        one_block: whether the whole graph fits a block.
        held: whether it is to be read `in_memory`.
    """

    def __init__(self, given: GraphInput, block_edges: int, threads: RowThreads, held_blocks: int = 1):
        self._csc = given.open_rows(block_edges, threads, held_blocks)
        self.degree = self._csc.degree
        self.one_block = max(len(self.degree), 2 * self._csc.num_edges) <= block_edges
        self.held = self.one_block or self._csc.held

    def in_memory(self, node_weight: np.ndarray) -> WeightedGraph:
        """Return the whole graph; its arrays are valid until the next read."""
        for block in self._csc.blocks():
            return WeightedGraph(block.indptr, block.indices, ONE, node_weight)
        return WeightedGraph(np.zeros(len(self.degree) + 1, np.int64), np.empty(0, np.int32), ONE, node_weight)

    def streamed(self, node_weight: np.ndarray) -> BlockGraph:
        return BlockGraph(self._csc, node_weight)

    def keep_degree(self, degree: np.ndarray | None) -> None:
        """The degrees are a part of the rows: nothing changes."""

    def close(self) -> None:
        self._csc.close()


class StreamedEdges:
    """The graph in edges, read from the stream again and again; arguments and attributes are those of `StreamedRows`.

    Cost: one pass, and an id a node for the degrees.
    """

    def __init__(self, given: GraphInput, block_edges: int, threads: RowThreads, held_blocks: int = 1):
        self._given, self.degree = given, given.open_simple()
        if self.degree is None:  # a resumed run has them where they are balanced
            self.degree = given.left.get("degree", np.zeros(given.num_nodes, id_dtype(given.num_nodes)))
        self.held = self.one_block = max(len(self.degree), 2 * given.simple.num_edges) <= block_edges

    def in_memory(self, node_weight: np.ndarray) -> WeightedGraph:
        return rows_of(self.streamed(node_weight), self.degree)

    def streamed(self, node_weight: np.ndarray) -> EdgeGraph:
        return EdgeGraph(self._given.simple, node_weight, self._given.progress)

    def keep_degree(self, degree: np.ndarray | None) -> None:
        """Free the degrees, and keep only what a resumed run will need of them."""
        self.degree, self._given.facts = degree, {} if degree is None else {"degree": degree}

    def close(self) -> None:
        """Nothing is open between two passes."""
