"""Layer-wise importance sampling: a fixed number of nodes for each layer of the model (LADIES)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..graph import CSC
from ..triton_kernels.sample_layer import check_layer_sizes, sample_layers
from ..triton_kernels.sample_neighbors import Workspace
from .locality import LocalityBias
from .neighbor import check_device, check_direction
from .protocol import Allocate, BatchSampler, Subgraph, num_slices, row_scale, seed_slices


class LayerState(NamedTuple):
    """A part as `LayerwiseSampler` reads it.

    Attributes:
        preferred: for each hop (num_local,) bool, the nodes of its neighbour set; None without locality.
    """

    csc: CSC
    targets: np.ndarray
    preferred: tuple[np.ndarray, ...] | None


@dataclass(frozen=True)
class LayerwiseSampler(BatchSampler):
    """Sample `nodes_per_layer` nodes for each layer from all in-neighbours of the layer before, by importance.

    The cost of a batch grows with the number of layers, not with powers of a fan-out. Edges carry averaging weights,
    1 / (degree * probability of the source), so that a weighted sum over a row has the mean over all neighbours as
    its expectation; so has a stack of linear layers.

    The batch has PyG's form: seeds, then the nodes of each hop, each entry's row sampled once at the hop after it. A
    node that several hops sample has an entry for each (the last hop takes what is there): `n_id` may repeat a node,
    as PyG's disjoint samples do. LADIES samples the rows of all earlier nodes again in every layer, which one CSC
    cannot hold; entries for each hop keep the layers independent in one CSC that any model reads. They cost few
    feature rows: 1.1% on a power-law graph of 1,000,000 nodes, three hops of 8,192. An edge from a node to itself
    comes from another entry: a GAT, which gives each entry a self-loop of its own, counts both.

    Args:
        nodes_per_layer: nodes sampled, >= 1: one number for all hops, or one for each, the hop next to the seeds first.
        num_layers: hops, one a layer of the model; None: 2, or the length of the list.
        direction: "in" follows edges to their sources; "both" also backwards (the part is made symmetric once).
        locality: prefer near rows; the importance of preferred nodes is multiplied by its scale.
        device: Where training batches are sampled, see `NeighborSampler`.

    Raises:
        ValueError: a number below 1, a list of another length than num_layers, or an unknown direction or device.

    Source: Zou et al., LADIES, NeurIPS 2019; the differences are told at `sample_layers`.
    """

    nodes_per_layer: int | Sequence[int]
    num_layers: int | None = None
    direction: str = "in"
    locality: LocalityBias | None = None
    device: str = "auto"
    takes_locality = True
    read_rows: ClassVar[Callable | None] = None  # see `sample_layers`

    def __post_init__(self):
        sizes = check_layer_sizes(self.nodes_per_layer, self.num_layers)
        object.__setattr__(self, "nodes_per_layer", sizes)
        object.__setattr__(self, "num_layers", len(sizes))
        check_direction(self.direction)
        check_device(self.device)

    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        """Return the batches of one pass: `batch_size` target nodes each."""
        return num_slices(num_targets, batch_size, drop_last)

    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> LayerState:
        """Return the part's edges, and with `locality` the preferred nodes of each hop."""
        if self.locality is None:
            return LayerState(part.csc, targets, None)
        # Masks are made at scale 1 too: the scale may rise while the part stays in memory.
        preferred = []
        for nodes in self.locality.neighbor_sets(part, self.num_layers):
            preferred.append(np.zeros(part.num_local, np.bool_))
            preferred[-1][nodes] = True
        return LayerState(part.csc, targets, tuple(preferred))

    def items(self, state: LayerState, batch_size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
        """Return the seeds of each batch, target nodes in the order of the key."""
        return seed_slices(state.targets, batch_size, drop_last, order_key)

    def sample(
        self,
        state: LayerState,
        items: np.ndarray,
        key: int,
        workspace: Workspace,
        allocate: Allocate,
        return_e_id: bool,
    ) -> Subgraph:
        """Sample the layers of one batch, from its seeds outwards."""
        sampled = sample_layers(
            state.csc,
            items,
            self.nodes_per_layer,
            key,
            preferred=state.preferred,
            scale=1.0 if self.locality is None else self.locality.scale,
            return_e_id=return_e_id,
            workspace=workspace,
            allocate=allocate,
            read_rows=self.read_rows,
        )
        return Subgraph(
            sampled.n_id,
            sampled.edge_index,
            sampled.indptr,
            sampled.num_sampled_nodes[0],
            sampled.e_id,
            sampled.num_sampled_nodes,
            sampled.num_sampled_edges,
            edge_weight=sampled.edge_weight,
            row_scale=row_scale(state.csc, sampled) if return_e_id else None,
            averaging_weights=True,
        )
