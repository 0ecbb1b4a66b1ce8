"""GraphSAGE over CSC rows."""

from dataclasses import replace

import torch
from torch import Tensor
from torch_geometric.nn import SAGEConv

from ..triton_kernels.aggregate import aggregate
from .backbone import Backbone, maps_first
from .block import Block
from .row_layers import SummingLayer
from .sparse_linear import SparseInput, head_rows, linear


class SAGELayer(SAGEConv, SummingLayer):
    """PyG's `SAGEConv` (same parameters and names): mean over in-edges; a weighted sum where edges have weights."""

    sums_once = streams = adds_own = True

    @property
    def projected_channels(self) -> int:
        return 2 * self.out_channels

    def transform(self, x: Tensor | SparseInput) -> Tensor:
        return torch.cat([linear(x, self.lin_l.weight), linear(x, self.lin_r.weight)], dim=-1)

    def combine(self, projected: Tensor, block: Block) -> Tensor:
        neighbors, root = projected.split(self.out_channels, dim=-1)
        return self._sum(neighbors, block) + self.lin_l.bias + root[: block.num_targets]

    def forward(self, x: Tensor | SparseInput, block: Block) -> Tensor:
        root = linear(head_rows(x, block.num_targets), self.lin_r.weight, self.lin_l.bias)
        if maps_first(x, block, self.in_channels, self.out_channels):
            return self._sum(linear(x, self.lin_l.weight), block) + root
        return linear(self._sum(x, block), self.lin_l.weight) + root

    @property
    def neighbor_weight(self) -> Tensor:
        return self.lin_l.weight

    def add_own(self, mapped: Tensor, own: Tensor | SparseInput) -> Tensor:
        return mapped + linear(own, self.lin_r.weight, self.lin_l.bias)

    def from_sum(self, summed: Tensor, own: Tensor, projected: bool) -> Tensor:
        if projected:
            return summed + self.lin_l.bias + own[:, self.out_channels :]
        return super().from_sum(summed, own, projected)

    def map_own(self, own: Tensor | SparseInput) -> Tensor:
        return linear(own, self.lin_r.weight)

    def from_total(self, total: Tensor) -> Tensor:
        return total + self.lin_l.bias

    @staticmethod
    def _sum(x: Tensor, block: Block) -> Tensor:
        reduce = "mean" if block.edge_weight is None else "sum"
        return aggregate(x, block.indptr, block.indices, block.edge_weight, reduce)


class GraphSAGE(Backbone):
    """GraphSAGE with mean aggregation: a linear map of the node plus one of the mean over its in-neighbours.

    Args:
        in_channels, hidden_channels, out_channels, num_layers, dropout, input_dropout, norm, activation: see
            `Backbone`. An `edge_weight` turns the mean into a weighted sum (weights 1 / degree give the mean back).

    Source: Hamilton, Ying and Leskovec, Inductive representation learning on large graphs, NeurIPS 2017.
    """

    averages = sums_once = streams = True

    def make_layer(self, index: int) -> SAGELayer:
        return SAGELayer(self.layer_channels(index), self.layer_channels(index + 1))

    def prepare_rows(self, block: Block) -> Block:
        if block.edge_weight is not None:
            return block
        share = block.indptr.diff().clamp(min=1).to(self.dtype).reciprocal()
        return replace(block, edge_weight=share[block.target_of_edges()])

    def row_scale(self, degree: Tensor, weighted: bool) -> Tensor | None:
        return None if weighted else degree.clamp(min=1).reciprocal()

    def reverse_weight(self, outer: Block) -> Tensor:
        return outer.degree.to(self.dtype).reciprocal()[outer.indices]
