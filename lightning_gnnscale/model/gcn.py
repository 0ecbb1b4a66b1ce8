"""GCN over CSC rows."""

from torch import Tensor
from torch_geometric.nn import GCNConv

from ..triton_kernels.aggregate import aggregate
from .backbone import Backbone, maps_first
from .block import Block, inverse_root, normalized
from .row_layers import SummingLayer
from .sparse_linear import SparseInput, linear


class GCNLayer(GCNConv, SummingLayer):
    """PyG's `GCNConv` (same parameters and names) over a block whose `edge_weight` is the normalisation."""

    sums_once = True

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
    sums_once = symmetric_sums = True

    def make_layer(self, index: int) -> GCNLayer:
        return GCNLayer(self.layer_channels(index), self.layer_channels(index + 1))

    def prepare(self, block: Block) -> Block:
        return normalized(block, self.dtype)

    def row_scale(self, degree: Tensor, weighted: bool) -> Tensor:
        return inverse_root(degree)

    def reverse_weight(self, outer: Block) -> Tensor:
        return outer.edge_weight  # symmetric
