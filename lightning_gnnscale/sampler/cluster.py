"""Batches with all edges between their nodes: a few clusters of a part (Cluster-GCN), or a whole part."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import check_count
from ..graph import CSC
from ..jit import kernel
from ..rng import combine_array, fold, permutation
from ..triton_kernels.sample_neighbors import Workspace
from .neighbor import check_device, check_direction
from .protocol import Allocate, BatchSampler, Subgraph, induced_subgraph


class WholePart(NamedTuple):
    """A part as `FullBatchSampler` reads it."""

    csc: CSC
    num_core: int


@dataclass(frozen=True)
class FullBatchSampler(BatchSampler):
    """Take a part as one batch: core nodes first, then the halo; every node is a target of edges.

    The loss goes over the core nodes in the train mask: `batch_size` is the number of core nodes.

    Args:
        direction: "in" follows edges to their sources; "both" also backwards.
    """

    direction: str = "in"

    def __post_init__(self):
        check_direction(self.direction)

    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        """Return 1, or 0 for a part without target nodes."""
        return int(num_targets > 0)

    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> WholePart:
        """Return the part's edges and how many nodes it owns; nothing is copied."""
        return WholePart(part.csc, part.num_core)

    def items(self, state: WholePart, batch_size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
        """Return one batch, of all core nodes."""
        return [np.arange(state.num_core)]

    def sample(
        self, state: WholePart, items: np.ndarray, key: int, workspace: Workspace, allocate: Allocate, return_e_id: bool
    ) -> Subgraph:
        """Return the whole part, halo included; nothing is sampled. Cost: O(num_local + num_edges)."""
        csc = state.csc
        n_id = np.arange(csc.num_rows, dtype=np.int64)
        indptr = np.array(csc.indptr, np.int64)
        edge_index = allocate((2, csc.num_edges), np.int64)
        edge_index[0] = csc.indices
        edge_index[1] = np.repeat(n_id, np.diff(indptr))
        e_id = np.arange(csc.num_edges, dtype=np.int64) if return_e_id else None
        return Subgraph(n_id, edge_index, indptr, state.num_core, e_id)


Cluster = Callable[[Any, int, int], np.ndarray]


class ClusterState(NamedTuple):
    """A part as `ClusterSampler` reads it: core nodes by cluster, and which of them are targets."""

    csc: CSC
    nodes: np.ndarray
    offsets: np.ndarray
    is_target: np.ndarray


@dataclass(frozen=True)
class ClusterSampler(BatchSampler):
    """Sample batches of whole clusters of core nodes; halo nodes take no part.

    Clusters with target nodes are assigned out first, so that as few batches as possible have none; such a batch has
    `batch_size` 0. Every cluster stands in exactly one batch of a pass.

    Args:
        num_clusters: clusters of a part, >= 1; at most one a target node is made.
        clusters_per_batch: clusters of a batch, >= 1.
        direction: "in" or "both".
        cluster: (part, num_clusters, seed) -> (num_core,) int32 cluster ids; None: `breadth_first_clusters`.
        device: Where the edges between a batch's nodes are looked up, see `NeighborSampler`.

    Raises:
        ValueError: a count is below 1, or the direction or device is unknown.

    Source: Chiang et al., Cluster-GCN, KDD 2019, section 3.2, edges between the clusters of a batch included. Differs:
        clusters are not sampled with METIS unless `cluster` does so, and adjacency is not renormalised.
    """

    num_clusters: int
    clusters_per_batch: int = 1
    direction: str = "in"
    cluster: Cluster | None = field(default=None, compare=False)
    device: str = "auto"

    def __post_init__(self):
        for name in ("num_clusters", "clusters_per_batch"):
            check_count(name, getattr(self, name))
        check_direction(self.direction)
        check_device(self.device)

    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        """Return the batches of a pass: each has at most `clusters_per_batch` clusters."""
        return -(-min(self.num_clusters, num_targets) // self.clusters_per_batch)

    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> ClusterState:
        """Cut the core of a part into clusters.

        Raises:
            ValueError: `cluster` returns another shape than (num_core,), or ids that are out of range.
        """
        num_clusters = min(self.num_clusters, len(targets))
        cluster_id = (self.cluster or breadth_first_clusters)(part, num_clusters, seed)
        if cluster_id.shape != (part.num_core,) or (len(cluster_id) and not 0 <= cluster_id.min()):
            raise ValueError(f"cluster must return ({part.num_core},) ids >= 0, got shape {cluster_id.shape}")
        if len(cluster_id) and cluster_id.max() >= num_clusters:
            raise ValueError(f"cluster must return ids below {num_clusters}, got {cluster_id.max()}")
        is_target = np.zeros(part.num_core, np.bool_)
        is_target[targets] = True
        offsets = np.concatenate([[0], np.cumsum(np.bincount(cluster_id, minlength=num_clusters))])
        return ClusterState(part.csc, np.argsort(cluster_id, kind="stable"), offsets, is_target)

    def items(self, state: ClusterState, batch_size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
        """Return the ids of each batch's clusters; `batch_size` and `drop_last` play no part."""
        num_clusters = len(state.offsets) - 1
        order = np.arange(num_clusters) if order_key is None else permutation(num_clusters, order_key)
        targets_before = np.concatenate([[0], np.cumsum(state.is_target[state.nodes])])
        bearing = np.diff(targets_before[state.offsets])[order] > 0
        assigned = np.concatenate([order[bearing], order[~bearing]])
        num_batches = -(-num_clusters // self.clusters_per_batch)
        return [assigned[batch::num_batches] for batch in range(num_batches)]

    def sample(
        self,
        state: ClusterState,
        items: np.ndarray,
        key: int,
        workspace: Workspace,
        allocate: Allocate,
        return_e_id: bool,
    ) -> Subgraph:
        """Return all edges between the nodes of the clusters `items`; nothing is sampled."""
        members = [state.nodes[state.offsets[cluster] : state.offsets[cluster + 1]] for cluster in items]
        nodes, num_seeds = seeds_first(np.concatenate(members), state.is_target)
        return induced_subgraph(state.csc, nodes, num_seeds, workspace, allocate, return_e_id)


def seeds_first(nodes: np.ndarray, is_target: np.ndarray) -> tuple[np.ndarray, int]:
    """Return (distinct nodes, targets first and each group ascending; the number of targets).

    Args:
        nodes: local ids, repeats allowed.
        is_target: (num_core,) or (num_local,) bool.
    """
    nodes = np.unique(nodes)
    target = is_target[nodes]
    return np.concatenate([nodes[target], nodes[~target]]), int(target.sum())


def breadth_first_clusters(part: Any, num_clusters: int, seed: int) -> np.ndarray:
    """Cut the core of a part into equal chunks of a breadth-first order that starts at keyed random nodes.

    Args:
        part: a `PartGraph`.
        num_clusters: chunks, >= 1.
        seed: with the part's id it decides the order of the starts.

    Returns:
        (num_core,) int32 in [0, num_clusters); sizes differ by at most one.

    Cost: O(num_core + num_edges) time, 16 bytes a node.
    """
    starts = np.argsort(combine_array(fold(seed, part.part), np.arange(part.num_core)), kind="stable")
    order = _breadth_first(part.csc.indptr, part.csc.indices, starts)
    cluster_id = np.empty(part.num_core, np.int32)
    cluster_id[order] = np.arange(part.num_core) * num_clusters // max(part.num_core, 1)
    return cluster_id


@kernel
def _breadth_first(indptr, indices, starts):
    """Return all nodes below len(starts) in breadth-first order, from each start that was not reached before."""
    num_core = len(starts)
    seen = np.zeros(num_core, np.bool_)
    order = np.empty(num_core, np.int64)
    head = tail = 0
    for start in starts:
        if seen[start]:
            continue
        seen[start] = True
        order[tail] = start
        tail += 1
        while head < tail:
            node = order[head]
            head += 1
            for edge in range(indptr[node], indptr[node + 1]):
                neighbor = indices[edge]
                if neighbor < num_core and not seen[neighbor]:
                    seen[neighbor] = True
                    order[tail] = neighbor
                    tail += 1
    return order
