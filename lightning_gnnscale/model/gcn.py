"""GCN and SGC over CSC rows."""

from torch import Tensor
from torch_geometric.nn import GCNConv, SGConv

from ..triton_kernels.aggregate import aggregate
from .backbone import Backbone, drop_templates, maps_first
from .block import Block, inverse_root, normalized
from .dropout import RowDropout
from .edge_bins import StreamedLayer
from .layer_inputs import SparseInput, as_input, dense_rows, is_sparse, linear
from .row_layers import Propagation, RowEdges, SummingLayer, sum_rows


class GCNLayer(GCNConv, SummingLayer):
    """PyG's `GCNConv` (same parameters and names) over a block whose `edge_weight` is the normalisation."""

    sums_once = streams = True

    @property
    def projected_channels(self) -> int:
        return self.out_channels

    def transform(self, x: Tensor | SparseInput) -> Tensor:
        return linear(x, self.lin.weight)

    def combine(self, projected: Tensor, block: Block) -> Tensor:
        return aggregate(projected, block.indptr, block.indices, block.edge_weight) + self.bias

    def forward(self, x: Tensor | SparseInput, block: Block) -> Tensor:
        if maps_first(x, block, self.in_channels, self.out_channels):
            return self.combine(self.transform(x), block)
        return linear(aggregate(x, block.indptr, block.indices, block.edge_weight), self.lin.weight, self.bias)

    @property
    def neighbor_weight(self) -> Tensor:
        return self.lin.weight

    def add_own(self, mapped: Tensor, own: Tensor | SparseInput) -> Tensor:
        return mapped + self.bias

    def from_total(self, total: Tensor) -> Tensor:
        return total + self.bias


class GCN(Backbone):
    """Graph convolutional network: symmetric normalisation with self-loops, by the full graph's in-degrees.

    Self-loops that the graph has count once, as in PyG.

    Args:
        in_channels, hidden_channels, out_channels, num_layers, dropout, input_dropout, norm, activation: see
            `Backbone`.

    Source: Kipf and Welling, Semi-supervised classification with graph convolutional networks, ICLR 2017.
    Differs: rows that were sampled are scaled up to their degree, so that their sum is unbiased.
    """

    needs_degree = True
    takes_negative_weights = False
    sums_once = symmetric_sums = streams = True

    def make_layer(self, index: int) -> GCNLayer:
        return GCNLayer(self.layer_channels(index), self.layer_channels(index + 1))

    def prepare(self, block: Block) -> Block:
        return normalized(block, self.dtype)

    def row_scale(self, degree: Tensor, weighted: bool) -> Tensor:
        return inverse_root(degree)

    def reverse_weight(self, outer: Block) -> Tensor:
        return outer.edge_weight  # symmetric


class SGC(Backbone):
    """Simplified graph convolution: num_layers propagations, one linear map, nothing between them.

    The map commutes with propagation: it comes first where it makes rows narrower. Each hop of a sampled batch is
    one propagation.

    On the full graph dense features without dropout are propagated and exchanged once, and kept. Sparse ones are mapped
    first, in every epoch, and rows of the narrower map are exchanged: propagated they would be dense, num_nodes x
    in_channels.

    Args:
        in_channels, out_channels: widths.
        hidden_channels: not used; it exists so that all backbones are built alike.
        num_layers: propagations, >= 1.
        dropout: probability on the features (the model has no hidden layer to drop).
        input_dropout: as dropout; the larger of the two counts.

    Raises:
        ValueError: out_channels is missing, or see `Backbone`.

    Source: Wu et al., Simplifying graph convolutional networks, ICML 2019.
    """

    needs_degree = True
    takes_negative_weights = False
    sums_once = symmetric_sums = streams = True

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int | None = None,
        out_channels: int | None = None,
        num_layers: int = 2,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
    ):
        if out_channels is None:
            raise ValueError("model.out_channels must be given")
        super().__init__(in_channels, out_channels, out_channels, num_layers, dropout, max(dropout, input_dropout))
        self.conv = SGConv(in_channels, out_channels, K=num_layers)
        drop_templates(self.modules())
        self.maps_first = out_channels <= in_channels

    def make_layer(self, index: int) -> Propagation:
        return Propagation()

    def prepare(self, block: Block) -> Block:
        return normalized(block, self.dtype)

    def layer_channels(self, index: int) -> int:
        if index == 0:
            return self.in_channels
        return self.out_channels if self.maps_first or index == self.num_layers else self.in_channels

    def reset_parameters(self) -> None:
        self.conv.reset_parameters()

    def apply_layer(self, index: int, x: Tensor | SparseInput, block: Block) -> Tensor:
        if index == 0:
            x = linear(x, self.conv.lin.weight) if self.maps_first else dense_rows(x)
        return self._propagate(index, x, block)

    def projected_channels(self, index: int, sparse: bool) -> int | None:
        narrower = self.out_channels < self.in_channels or sparse
        return self.out_channels if index == 0 and self.maps_first and narrower else None

    def project(self, index: int, x) -> Tensor:
        return linear(as_input(x, self.reference), self.conv.lin.weight)

    def layer_projected(self, index: int, projected: Tensor, block: Block) -> Tensor:
        return self._propagate(index, as_input(projected, self.reference), self.prepare(block))

    def sum_channels(self, index: int, projected: bool) -> int | None:
        if "sums_once" not in vars(type(self)):
            return None
        return self.out_channels if projected else self.layer_channels(index)

    def row_scale(self, degree: Tensor, weighted: bool) -> Tensor:
        return inverse_root(degree)

    def layer_from_sum(self, index: int, summed: Tensor, own: Tensor, projected: bool) -> Tensor:
        summed = as_input(summed, self.reference)
        if index == 0 and self.maps_first and not projected:
            summed = linear(summed, self.conv.lin.weight)
        return self._finish(index, summed)

    def streamed_layer(self, index: int, projected: bool, sparse: bool) -> StreamedLayer | None:
        maps = index == 0 and self.maps_first
        if "streams" not in vars(type(self)) or (sparse and not maps):
            return None
        form = "projected" if projected else "map" if maps else "rows"
        channels = self.out_channels if projected or maps else self.layer_channels(index)
        return StreamedLayer(channels, channels if projected else self.layer_channels(index), form, False)

    def map_sources(self, index: int, x: Tensor | SparseInput, edge_type: int | None = None) -> Tensor:
        return linear(as_input(x, self.reference), self.conv.lin.weight)

    def layer_from_total(self, index: int, total: Tensor) -> Tensor:
        return self._finish(index, as_input(total, self.reference))

    def forward_rows(self, x, edges: RowEdges) -> Tensor:
        """Run over the rows of one process; dense features without dropout are propagated once and kept."""
        x, lin = as_input(x, self.reference), self.conv.lin
        drop = RowDropout.sample(self.input_dropout, self.training)
        if not drop.active and not is_sparse(x):
            propagated = edges.keep("propagated", lambda: self._propagate_rows(x, edges, training=False))
            return linear(propagated, lin.weight, lin.bias)
        x = drop(x, edges.node_ids)
        if not self.maps_first:
            return linear(self._propagate_rows(dense_rows(x), edges, self.training), lin.weight, lin.bias)
        return self._propagate_rows(linear(x, lin.weight), edges, self.training) + lin.bias

    def _propagate_rows(self, x: Tensor, edges: RowEdges, training: bool) -> Tensor:
        """Propagate num_layers times; rows of the halo come exactly unless `training`."""
        block = edges.block
        h = aggregate(x, block.indptr, block.indices, block.edge_weight)
        for layer in self.convs[1:]:
            h, _ = sum_rows(layer.exchange, h, edges, RowDropout(0.0), training)
        return h

    def _propagate(self, index: int, x: Tensor, block: Block) -> Tensor:
        return self._finish(index, aggregate(x, block.indptr, block.indices, block.edge_weight))

    def _finish(self, index: int, x: Tensor) -> Tensor:
        if index < self.num_layers - 1:
            return x
        lin = self.conv.lin
        return x + lin.bias if self.maps_first else linear(x, lin.weight, lin.bias)
