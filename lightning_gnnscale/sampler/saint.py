"""GraphSAINT: random subgraphs, with the weights that keep aggregation and loss unbiased."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import check_count, short
from ..graph import CSC
from ..jit import kernel
from ..rng import GOLDEN, below, fold, mix64, unit
from ..triton_kernels.sample_neighbors import Workspace
from .cluster import seeds_first
from .neighbor import check_direction
from .protocol import Allocate, BatchSampler, Subgraph, induced_subgraph

KINDS = ("node", "edge", "walk")
_NORM = 0x5A1E7  # first word of the keys of pre-sampling: no batch key is folded from it


class SaintState(NamedTuple):
    """A part as `SaintSampler` reads it.

    Attributes:
        rows: local ids that an edge or a walk may start at.
        is_target: (num_local,) bool.
        edge_weight: (num_edges,) float32, (1 / degree of the target) / P(edge sampled | its target sampled).
        loss_weight: (num_local,) float32, 1 / (expected samples of the node in a batch * number of targets).
    """

    csc: CSC
    rows: np.ndarray
    is_target: np.ndarray
    edge_weight: np.ndarray
    loss_weight: np.ndarray


@dataclass(frozen=True)
class SaintSampler(BatchSampler):
    """Sample random subgraphs of a part, halo included, and weigh edges and losses by how often they are sampled.

    `edge_weight` makes a plain sum of messages an unbiased mean over all neighbours of a sampled node; the sum of the
    seeds' losses times `loss_weight` has the mean loss over the part's targets as its expectation. Both are estimated
    by sampling `num_norm_samples` subgraphs while a part is loaded. A batch may have no targets (`batch_size` 0),
    except with walks, which start at targets.

    Args:
        kind: "node": nodes in proportion to their in-degree; "edge": the ends of edges, an edge in inverse proportion
            to the degree of its ends (in a part with both directions); "walk": what random walks from targets visit.
        budget: samples of nodes or edges, with replacement, >= 1.
        num_roots: walks of a batch, >= 1.
        walk_length: steps of a walk, >= 1.
        batches_per_pass: batches of one pass over a part, >= 1.
        num_norm_samples: subgraphs sampled to estimate the weights, >= 1.
        direction: "in" or "both".

    Raises:
        ValueError: the kind is unknown or a count is below 1.

    Cost: loading a part samples `num_norm_samples` subgraphs; 8 bytes an edge and a node while it stands.
    Source: Zeng et al., GraphSAINT, ICLR 2020, section 3.2 and Algorithm 2. Differs: weights are those of a mean.
    """

    kind: str = "walk"
    budget: int = 4000
    num_roots: int = 1000
    walk_length: int = 2
    batches_per_pass: int = 10
    num_norm_samples: int = 50
    direction: str = "in"

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {short(self.kind)}")
        for name in ("budget", "num_roots", "walk_length", "batches_per_pass", "num_norm_samples"):
            check_count(name, getattr(self, name))
        check_direction(self.direction)

    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        """Return `batches_per_pass`, or 0 for a part without target nodes."""
        return self.batches_per_pass if num_targets else 0

    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> SaintState:
        """Sample `num_norm_samples` subgraphs of the part, and count how often nodes and edges are in them."""
        is_target = np.zeros(part.num_local, np.bool_)
        is_target[targets] = True
        rows = targets if self.kind == "walk" else np.flatnonzero(np.diff(part.csc.indptr))
        nothing = np.empty(0, np.float32)
        state = SaintState(part.csc, rows, is_target, nothing, nothing)
        node_count, edge_count = self._count_samples(state, seed, part.part)
        return state._replace(
            edge_weight=_edge_weight(part.csc.indptr, part.degree, node_count, edge_count),
            loss_weight=self.num_norm_samples / (np.maximum(node_count, 1) * np.float32(max(len(targets), 1))),
        )

    def items(self, state: SaintState, batch_size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
        """Return `batches_per_pass` empty arrays: a batch starts from its key alone."""
        return [np.empty(0, np.int64)] * self.batches_per_pass

    def sample(
        self,
        state: SaintState,
        items: np.ndarray,
        key: int,
        workspace: Workspace,
        allocate: Allocate,
        return_e_id: bool,
    ) -> Subgraph:
        """Sample a subgraph by the key, and weigh its edges and the losses of its seeds."""
        sampled = self._sample(state, key, workspace, allocate)
        edge_weight = allocate(sampled.e_id.shape, np.float32)
        np.take(state.edge_weight, sampled.e_id, out=edge_weight)
        loss_weight = state.loss_weight[sampled.n_id[: sampled.num_seeds]]
        loss_weight = loss_weight.astype(np.float32, copy=False)
        return sampled._replace(edge_weight=edge_weight, averaging_weights=True, loss_weight=loss_weight)

    def _sample(self, state: SaintState, key: int, workspace: Workspace, allocate: Allocate) -> Subgraph:
        csc, key = state.csc, np.uint64(key)
        if self.kind == "node":
            nodes = _sample_nodes(csc.indptr, self.budget if csc.num_edges else 0, key)
        elif self.kind == "edge":
            nodes = _sample_edges(csc.indptr, csc.indices, state.rows, self.budget if len(state.rows) else 0, key)
        else:
            nodes = _walk(csc.indptr, csc.indices, state.rows, self.num_roots, self.walk_length, key)
        nodes, num_seeds = seeds_first(nodes, state.is_target)
        return induced_subgraph(csc, nodes, num_seeds, workspace, allocate, return_e_id=True)

    def _count_samples(self, state: SaintState, seed: int, part: int) -> tuple[np.ndarray, np.ndarray]:
        """Return how many of the pre-sampled subgraphs held each node and each edge."""
        workspace = Workspace(state.csc.num_rows, state.csc.indices.dtype)
        node_count, edge_count = np.zeros(state.csc.num_rows, np.int32), np.zeros(state.csc.num_edges, np.int32)
        for sample in range(self.num_norm_samples):
            sampled = self._sample(state, fold(_NORM, seed, part, sample), workspace, np.empty)
            node_count[sampled.n_id] += 1
            edge_count[sampled.e_id] += 1
        return node_count, edge_count


@kernel
def _edge_weight(indptr, degree, node_count, edge_count):
    """Return (C_target / C_edge) / degree per edge; an edge that was never sampled counts as sampled once."""
    weight = np.empty(len(edge_count), np.float32)
    for node in range(len(indptr) - 1):
        for edge in range(indptr[node], indptr[node + 1]):
            weight[edge] = max(node_count[node], 1) / (max(edge_count[edge], 1) * np.float64(degree[node]))
    return weight


@kernel
def _sample_nodes(indptr, budget, key):
    """Nodes in proportion to their in-degree: the targets of uniform edges."""
    nodes = np.empty(budget, np.int64)
    num_edges = indptr[-1]
    for i in range(budget):
        edge = np.int64(unit(mix64(key + np.uint64(i + 1) * GOLDEN)) * num_edges)
        nodes[i] = np.searchsorted(indptr, edge, side="right") - 1
    return nodes


@kernel
def _sample_edges(indptr, indices, rows, budget, key):
    """Both ends of edges: a uniform row, then a uniform edge of it."""
    nodes = np.empty(2 * budget, np.int64)
    for i in range(budget):
        word = mix64(key + np.uint64(i + 1) * GOLDEN)
        target = rows[below(word, len(rows))]
        start = indptr[target]
        edge = start + below(mix64(word), indptr[target + 1] - start)
        nodes[2 * i] = target
        nodes[2 * i + 1] = indices[edge]
    return nodes


@kernel
def _walk(indptr, indices, rows, num_roots, walk_length, key):
    """What walks visit: uniform roots among `rows`, then uniform in-neighbours; a walk ends at an empty row."""
    nodes = np.empty(num_roots * (walk_length + 1), np.int64)
    count = 0
    for i in range(num_roots):
        word = mix64(key + np.uint64(i + 1) * GOLDEN)
        node = np.int64(rows[below(word, len(rows))])
        nodes[count] = node
        count += 1
        for _ in range(walk_length):
            start = indptr[node]
            degree = indptr[node + 1] - start
            if degree == 0:
                break
            word = mix64(word + GOLDEN)
            node = np.int64(indices[start + below(word, degree)])
            nodes[count] = node
            count += 1
    return nodes[:count]
