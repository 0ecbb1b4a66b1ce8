"""Parts of a streamed graph by way of its clusters: the graph of clusters is partitioned in memory."""

import numpy as np

from ..rng import fold
from . import phases
from .checkpoint import Checkpoint
from .multilevel import Effort, partition_in_memory
from .multilevel.clustering import cluster_limit, cluster_nodes
from .multilevel.contraction import number_clusters
from .multilevel.cycle import level_cap
from .multilevel.edge_clustering import EdgeClusters
from .multilevel.edge_graph import EdgeGraph
from .multilevel.quotient import build_quotient
from .multilevel.weighted_graph import BlockGraph
from .row_threads import RowThreads

CLUSTERING, PARTS = "clustering", "parts"  # phases of a checkpoint

_SALT = 0x464C4147  # keeps this use of the seed apart from all others
_CLUSTERS_A_PART = 100.0  # full clusters that a part is made of at least; fewer where their graph is too large
_SHRINKAGE = 0.8  # a round that leaves more of the clusters is the last


class RowClusters:
    """Clusters of a graph in rows; see `EdgeClusters` for what the methods do. A step is a pass of `cluster_nodes`."""

    def __init__(self, graph: BlockGraph, seed: int, threads: RowThreads, saved: dict | None = None):
        self.graph, self.seed, self.threads = graph, seed, threads
        self.label = None if saved is None else saved["label"]

    @staticmethod
    def steps_of(rounds: int) -> int:
        return rounds

    def step(self, number: int, limit: np.ndarray) -> None:
        key = fold(self.seed, _SALT, number)
        self.label = cluster_nodes(self.graph, limit, key, self.threads, passes=1, label=self.label)

    def arrays(self) -> dict[str, np.ndarray]:
        return {"label": self.label}


def coarse_parts(
    graph: BlockGraph | EdgeGraph,
    cap: np.ndarray,
    seed: int,
    passes: int,
    max_edges: int,
    effort: Effort,
    threads: RowThreads,
    saved: Checkpoint,
    phase: str,
    arrays: dict[str, np.ndarray],
    facts: dict[str, np.ndarray],
) -> np.ndarray:
    """Cluster a graph, partition the graph of clusters, and carry its parts over to the nodes.

    Args:
        graph: the graph.
        cap: (num_parts, D) int64, what each part may weigh.
        seed: decides every random choice.
        passes: rounds of label propagation, >= 1.
        max_edges: edges of the graph of clusters above which clusters grow coarser or are joined, up to one a part.
        effort: how hard to try in memory.
        threads: their number does not change the result.
        saved: the run's checkpoint; it is written after every pass.
        phase, arrays: what it held.
        facts: arrays by name that are saved, too.

    Returns:
        (num_nodes,) int16 part ids.
    """
    if phase == PARTS:
        return arrays["part"]
    quotient, coarse_of = _quotient(graph, len(cap), seed, passes, max_edges, threads, saved, phase, arrays, facts)
    phases.note(quotient_nodes=quotient.num_nodes, quotient_edges=len(quotient.indices) // 2)
    with phases.phase("multilevel"):
        coarse_cap = level_cap(quotient, cap, np.full(len(cap), 1 / len(cap)))
        coarse_part = partition_in_memory(quotient, coarse_cap, seed, effort=effort, threads=threads)
    del quotient
    part = coarse_part[coarse_of]
    if saved.path is not None:
        saved.save(PARTS, {"part": part, **facts})
    return part


def _quotient(graph, num_parts: int, seed: int, passes: int, max_edges: int, threads, saved, phase, arrays, facts):
    """Return the graph of clusters, and (num_nodes,) int32, the cluster of every node."""
    make = EdgeClusters if isinstance(graph, EdgeGraph) else RowClusters
    clusters = make(graph, seed, threads, arrays if phase == CLUSTERING else None)
    per_part, done, until = _CLUSTERS_A_PART, 0, clusters.steps_of(passes)
    before = 2 * graph.num_nodes  # clusters of the round before: the first one is not the last for lack of growth
    if phase == CLUSTERING:
        per_part, done, until, before = (arrays[name].item() for name in ("per_part", "done", "until", "before"))
    round_steps = clusters.steps_of(1) - clusters.steps_of(0)
    while True:
        limit = cluster_limit(graph, num_parts, per_part)
        with phases.phase("clustering"):
            for i in range(done, until):
                clusters.step(i, limit)
                if saved.path is not None:
                    so_far = {"done": i + 1, "until": until, "per_part": per_part, "before": before}
                    saved.save(CLUSTERING, {**clusters.arrays(), **so_far, **facts})
        with phases.phase("quotient"):
            coarse_of, num_coarse = number_clusters(clusters.label)
            # Clusters that no longer grow by moving nodes are joined as they are.
            last = per_part <= 1 or num_coarse > _SHRINKAGE * before
            largest = cluster_limit(graph, num_parts, 1.0) if last else None
            quotient = build_quotient(graph, coarse_of, num_coarse, max_edges, largest, fold(seed, _SALT), threads)
        if quotient is not None:
            return quotient, coarse_of
        per_part, done, until, before = max(1.0, per_part / 2), until, until + round_steps, num_coarse
