"""What a sampler is, and what it samples: a small graph over the local ids of its part, before features and labels."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import short
from ..graph import COLUMNS, CSC, GraphSchema
from ..jit import kernel
from ..rng import permutation
from ..triton_kernels.intrinsics import prefetch
from ..triton_kernels.sample_neighbors import Workspace
from ..triton_kernels.sample_neighbors.whole_rows import edges_between_tensors, row_scale_of_tensors

Allocate = Callable[[tuple[int, ...], type], np.ndarray]
_AHEAD = 32  # rows between a prefetch and its use


class Subgraph(NamedTuple):
    """A sampled graph; see `MiniBatch` for the attributes they share.

    Attributes:
        n_id: (num_nodes,) int64 local ids of the part, seeds first.
        edge_index: (2, num_edges) int64, grouped by target.
        indptr: (num_targets + 1,) int64.
        num_seeds: number of target nodes of the loss, at the head of n_id.
        e_id: (num_edges,) int64 positions in the part's CSC, or None where they were not asked for.
        num_sampled_nodes, num_sampled_edges: per hop, or None.
        edge_weight: (num_edges,) float32; None: the loader attaches the store's weights, where it has some.
        averaging_weights: edge_weight has 1 / degree in it, see `MiniBatch`.
        loss_weight: (num_seeds,) float32 or None.
        row_scale: (num_targets,) float32, times edge_weight where there is one: 1 / (probability that an edge of the
            row was sampled), by which stored weights are multiplied. None: 1; beside an edge_weight: stored weights do
            not count.
        pairs: (2, num_pairs) int64 positions in n_id below num_seeds, the links to train on; None without.
        negatives: (num_pairs, num_negatives) int64 likewise, each the false other end of pairs[0]; one row where all
            pairs share them; None without.
        pair_type: (num_pairs,) int64 edge type of each pair; None without edge types.
        source_negatives: As negatives, each the false first end of pairs[1]; None where there are none.
        seed_of: (num_nodes,) int64 seed that each node was sampled for, in disjoint trees; else None.
        seed_time: (num_seeds,) int64 time of each seed, where times count; else None.
        pair_edges: (num_pairs,) int64 positions in the part's CSC of the pairs, whose classes and features are wanted;
            else None.
        edge_label, pair_attr: See `MiniBatch`, where the sampler has them itself; else None.
        edge_type: (num_edges,) int64 edge type of each edge, where the sampler knows it; None: it is read by e_id.
        node_type: (num_nodes,) int64 node type of each node, where the sampler knows it; None: that of its id.
        stream: The `CopyStream` on which a device made the arrays, which are its tensors then; None: they are numpy's.
        columns: Columns of its edges by their names in a batch, (num_edges, ...) of the stored dtypes, where the
            sampler has them; those that are not here are read by e_id.
    """

    n_id: np.ndarray
    edge_index: np.ndarray
    indptr: np.ndarray
    num_seeds: int
    e_id: np.ndarray | None = None
    num_sampled_nodes: list[int] | None = None
    num_sampled_edges: list[int] | None = None
    edge_weight: np.ndarray | None = None
    loss_weight: np.ndarray | None = None
    row_scale: np.ndarray | None = None
    averaging_weights: bool = False
    pairs: np.ndarray | None = None
    negatives: np.ndarray | None = None
    pair_type: np.ndarray | None = None
    source_negatives: np.ndarray | None = None
    seed_of: np.ndarray | None = None
    seed_time: np.ndarray | None = None
    pair_edges: np.ndarray | None = None
    edge_label: np.ndarray | None = None
    pair_attr: np.ndarray | None = None
    edge_type: np.ndarray | None = None
    node_type: np.ndarray | None = None
    stream: Any = None
    columns: Mapping[str, np.ndarray] | None = None


class BatchSampler(ABC):
    """What the loader asks of a sampler: subclass it, write the four methods, and set the attributes that differ.

    A sampler is a plain value: what it learns of a part is the state that `prepare` returns, which the other methods
    get. A batch is a function of state, items and key, and no generator is shared: a random choice is a hash of the key
    and of what it is about, such as `combine_array(fold(key, step), nodes)` of `lightning_gnnscale.rng`, a uint64 for
    each node. `sample` is called by several threads at once, on the CPU; Python in it runs one thread at a time, which
    `source=gs.Processes()` gets around. Make it a frozen dataclass in a module that can be imported, so that worker
    processes find it; an option of yours must not have the name of an attribute below. `seed_slices`, `num_slices` and
    `induced_subgraph` of `gs.sampler` do what most samplers need:

        class SeedsOnly(BatchSampler):
            def num_batches(self, num_targets, batch_size, drop_last):
                return num_slices(num_targets, batch_size, drop_last)

            def prepare(self, part, targets, seed):
                return part.csc, targets

            def items(self, state, batch_size, drop_last, order_key):
                return seed_slices(state[1], batch_size, drop_last, order_key)

            def sample(self, state, items, key, workspace, allocate, return_e_id):
                return induced_subgraph(state[0], items, len(items), workspace, allocate, return_e_id)

    A class that does not derive from this one, and has the four methods, is taken too, and these attributes are read of
    it where it has them. A public name that is nearly one of them is refused.

    Attributes:
        requires: What the graph must have, a dict: a name of `graph.COLUMNS` ("edge_weight", "node_time", ...) to the
            line that refuses a graph without it. It may be a property that depends on options; it is compared when a
            fit begins, before the first batch. Default {}.
        direction: "in", or "both" where the part's edges are also to be followed backwards. Default "in".
        per_hop: Most neighbours of a node for each hop, -1 for all. Default (): not known.
        num_layers: Hops around its seeds that a batch reaches, where `per_hop` does not say. Default None: not known.
        sampler: The `BatchSampler` that samples the neighbourhoods for this one. Default None: it samples them itself.
        locality: A `LocalityBias` towards near rows. Default None.
        takes_locality: Whether `with_locality` returns a sampler with such a bias. Default False.
        temporal_strategy, strictly_before: How times count, as `NeighborSampler` has them. Default None, False: not.
        by_time: Whether links have times, and neighbours are sampled before them. Default False.
        weighted: Whether edges are sampled in proportion to the store's weights, so that batches carry averaging
            weights in place of the stored ones. `requires` says whether weights are needed. Default False.
        by_edge_type: Whether edges are grouped by edge type, which costs memory for each part. Default False.
        has_edge_types: Whether `sample` fills `Subgraph.edge_type`. Default False.
        trains_on_links: Whether batches are links, and every core node is a target. Default False: labelled ones are.
        labelled: Whether those links are edges with classes. Default False.
        seeds_per_item: Most nodes that one item puts at the head of a batch, >= 1. Default 1.
        hop_by_hop: Whether `begin` and `finish` sample what `sample` does, as those of `NeighborSampler`. Default
        False.
        asks: Whether a hop's rows lie with other workers, so that it is asked for in a task of its own. Default False.
    """

    requires: Mapping[str, str] = {}
    direction = "in"
    per_hop = ()
    num_layers = None
    sampler = None
    locality = None
    takes_locality = False
    temporal_strategy = None
    strictly_before = False
    by_time = False
    weighted = False
    by_edge_type = False
    has_edge_types = False
    trains_on_links = False
    labelled = False
    seeds_per_item = 1
    hop_by_hop = False
    asks = False

    @abstractmethod
    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        """Return the batches of one pass over a part with this many target nodes."""

    @abstractmethod
    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> Any:
        """Return the state that sampling from a part needs.

        Args:
            part: A `PartGraph`; or, where batches cross parts (`scope="graph"`, and `"auto"` under gradient averaging
                for samplers that do not mix parts), the `WholeGraph`: try both. Each has `csc`, in whose row v,
                `indices[indptr[v]:indptr[v + 1]]`, are the in-neighbours of v; `degree`, of the full graph; `part`; and
                `weights_at(positions)`, the weights of edges by their positions in `csc`, None without weights. They
                are arrays that are read and not changed, `indptr` of int64, `indices` of int32 or int64. Nodes
                are local ids, core nodes first. `num_core`, `halo_nodes` and `hops` are a part's alone: a halo node has
                a row too, with the edges that the part sees.
            targets: (num_targets,) local ids of its target nodes, ascending.
            seed: Seed of the run.
        """

    @abstractmethod
    def items(self, state: Any, batch_size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
        """Return what each batch of a pass starts from; `order_key` None keeps the natural order."""

    @abstractmethod
    def sample(
        self, state: Any, items: np.ndarray, key: int, workspace: Workspace, allocate: Allocate, return_e_id: bool
    ) -> Subgraph:
        """Sample one batch: a function of state, items and key.

        Args:
            state: What `prepare` returned for the part.
            items: One entry of `items`, which stays as it is: copy what you change.
            key: uint64, a hash of seed, epoch, part and number of the batch.
            workspace: One thread's reusable memory.
            allocate: Gives memory for the results.
            return_e_id: Whether `Subgraph.e_id` is asked for.
        """

    def with_targets(self, state: Any, targets: np.ndarray) -> Any:
        """Return a state of `prepare` with other targets; of samplers whose batches mix parts: their states have
        targets.
        """
        return state._replace(targets=targets)

    def check_schema(self, schema: GraphSchema | None) -> None:  # noqa: B027 - most samplers name no relation
        """Raise ValueError where the graph's schema, None without one, has not the edge types that samples name."""

    def with_locality(self, locality: Any) -> "BatchSampler":
        """Return a sampler with another `LocalityBias`; of one with `takes_locality`, a dataclass unless overridden."""
        return replace(self, locality=locality)


_METHODS = tuple(sorted(BatchSampler.__abstractmethods__))
_MEMBERS = tuple(name for name in vars(BatchSampler) if not name.startswith("_"))


class _Adapted(BatchSampler):
    """A sampler of a class of its own, with the defaults of `BatchSampler` for what that does not have."""

    def __init__(self, own: Any):
        vars(self).update({name: getattr(own, name) for name in _MEMBERS if hasattr(own, name)}, own=own)
        if not isinstance(self.sampler, BatchSampler):
            self.sampler = None

    def __repr__(self) -> str:
        return repr(self.own)

    def with_locality(self, locality: Any) -> BatchSampler:
        return _Adapted(replace(self.own, locality=locality))


_Adapted.__abstractmethods__ = frozenset()  # it takes the methods of what it adapts


def as_batch_sampler(sampler: Any) -> BatchSampler:
    """Return a sampler that has all of `BatchSampler`: as it is, or a user's own one adapted.

    Raises:
        ValueError: it has not the four methods, or an attribute that is nearly one of `BatchSampler`.
    """
    if not isinstance(sampler, BatchSampler) and not all(callable(getattr(sampler, name, None)) for name in _METHODS):
        lacks = ", ".join(name for name in _METHODS if not callable(getattr(sampler, name, None)))
        raise ValueError(
            f"sampler must be one such as gs.NeighborSampler([15, 10]), got {short(sampler)}, without {lacks}"
        )
    package = __name__.split(".")[0]
    ours = {name for cls in type(sampler).__mro__ if cls.__module__.split(".")[0] == package for name in dir(cls)}
    for name in sorted(set(dir(sampler)) - ours - set(_MEMBERS)):
        nearly = [] if name.startswith("_") else get_close_matches(name, _MEMBERS, n=1, cutoff=0.87)
        if nearly:
            raise ValueError(
                f"{type(sampler).__name__}.{name} is no attribute of a sampler: write {nearly[0]}, or another name, "
                "see gs.sampler.BatchSampler"
            )
    adapted = sampler if isinstance(sampler, BatchSampler) else _Adapted(sampler)
    if not isinstance(adapted.requires, Mapping):
        raise ValueError(
            f"{type(sampler).__name__}.requires must be a dict of names to the lines that refuse a graph without them, "
            f"got {short(adapted.requires)}"
        )
    if adapted.direction not in ("in", "both"):
        raise ValueError(f"{type(sampler).__name__}.direction must be in or both, got {short(adapted.direction)}")
    if unknown := sorted(set(adapted.requires) - set(COLUMNS)):
        raise ValueError(
            f"{type(sampler).__name__}.requires must name what a graph can have, {', '.join(COLUMNS)}, got {unknown[0]}"
        )
    return adapted


def seed_slices(targets: np.ndarray, size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
    """Return the seeds of each batch of a pass: consecutive chunks of `size`, the last one shorter or left out.

    Args:
        targets: (num_targets,) local ids.
        size: seeds a batch, >= 1.
        drop_last: leave out a short last chunk.
        order_key: targets are first permuted by it; None keeps their order.
    """
    if order_key is not None:
        targets = targets[permutation(len(targets), order_key)]
    stop = len(targets) - len(targets) % size if drop_last else len(targets)
    return [targets[start : min(start + size, stop)] for start in range(0, stop, size)]


def num_slices(num_values: int, size: int, drop_last: bool) -> int:
    """Return the length of `seed_slices`."""
    return num_values // size if drop_last else -(-num_values // size)


def row_scale(csc: CSC | None, sampled) -> np.ndarray:
    """Return (num_targets,) float32, 1 for empty rows; a tensor where the graph is tensors:

    length of the row, over edges sampled from it if they weigh alike.

    With edge_weight = 1 / (length * probability) either is 1 / (probability of the edge). Without a CSC all are 1.
    """
    if isinstance(sampled.indptr, Tensor):
        if csc is None:
            return torch.ones_like(sampled.indptr[1:], dtype=torch.float32)
        return row_scale_of_tensors(csc.indptr, sampled)
    if csc is None:
        return np.ones(len(sampled.indptr) - 1, np.float32)
    scale = np.empty(len(sampled.indptr) - 1, np.float32)
    _scale_rows(np.asarray(csc.indptr), sampled.n_id, sampled.indptr, sampled.edge_weight is None, scale)
    return scale


def induced_subgraph(
    csc: CSC, nodes: np.ndarray, num_seeds: int, workspace: Workspace, allocate: Allocate, return_e_id: bool
) -> Subgraph:
    """Return all edges between the given nodes; every node is a target.

    Args:
        csc: the part's; or tensors that a device reads, then so is the result, and the workspace is of a device.
        nodes: (num_nodes,) distinct local ids, seeds first; kept in this order.
        num_seeds: how many of them are seeds.
        workspace: one thread's reusable memory.
        allocate: gives memory for the results.
        return_e_id: also return the positions of the edges.

    Raises:
        ValueError: a node is given twice.

    Cost: O(sum of the nodes' degrees).
    """
    count = workspace.place(nodes)
    on_device = isinstance(csc.indptr, Tensor)
    if count < len(nodes):
        workspace.finish(count)
        raise ValueError(f"nodes must be distinct, got {len(nodes)} ids of {count} nodes: give each once, seeds first")
    nodes = workspace.upload(nodes) if on_device else nodes
    edge_index, indptr, e_id = edges_between(csc.indptr, csc.indices, nodes, workspace, allocate, return_e_id)
    workspace.finish(count)
    if on_device:
        return Subgraph(nodes, edge_index, indptr, num_seeds, e_id)
    n_id = allocate((len(nodes),), np.int64)
    n_id[:] = nodes
    return Subgraph(n_id, edge_index, indptr, num_seeds, e_id)


def edges_between(
    indptr: np.ndarray,
    indices: np.ndarray,
    targets: np.ndarray,
    workspace: Workspace,
    allocate: Allocate,
    return_e_id: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return edge_index, indptr and e_id of all edges from nodes that the workspace has placed into some targets.

    Args:
        indptr, indices: the edges by target.
        targets: (num_targets,) rows.
        workspace: with the sources in their places.
        allocate, return_e_id: as for `induced_subgraph`.
    """
    if isinstance(indptr, Tensor):
        return edges_between_tensors(indptr, indices, targets, workspace, return_e_id)
    inside = allocate((len(targets) + 1,), np.int64)
    _count_inside(indptr, indices, targets, workspace.label, workspace.base, inside)
    edge_index = allocate((2, int(inside[-1])), np.int64)
    e_id = allocate((int(inside[-1]),), np.int64) if return_e_id else np.empty(0, np.int64)
    _emit_inside(indptr, indices, targets, workspace.label, workspace.base, edge_index, e_id)
    return edge_index, inside, e_id if return_e_id else None


@kernel
def _scale_rows(indptr, targets, sampled_indptr, over_sampled, scale):
    num = len(scale)
    for i in range(num):
        if i + _AHEAD < num:
            prefetch(indptr, targets[i + _AHEAD])
        degree = max(indptr[targets[i] + 1] - indptr[targets[i]], 1)
        scale[i] = degree / max(sampled_indptr[i + 1] - sampled_indptr[i], 1) if over_sampled else degree


@kernel
def _count_inside(indptr, indices, nodes, label, base, out_indptr):
    out_indptr[0] = 0
    for i in range(len(nodes)):
        inside = 0
        for edge in range(indptr[nodes[i]], indptr[nodes[i] + 1]):
            inside += label[indices[edge]] >= base
        out_indptr[i + 1] = out_indptr[i] + inside


@kernel
def _emit_inside(indptr, indices, nodes, label, base, edge_index, e_id):
    count = 0
    for i in range(len(nodes)):
        for edge in range(indptr[nodes[i]], indptr[nodes[i] + 1]):
            known = label[indices[edge]]
            if known >= base:
                edge_index[0, count] = known - base
                edge_index[1, count] = i
                if len(e_id):
                    e_id[count] = edge
                count += 1
