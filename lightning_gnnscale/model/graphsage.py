"""GraphSAGE over CSC rows, and NGNN: network in graph neural network, on GraphSAGE."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from ..errors import check_count, short
from ..keywords import passes_on
from ..triton_kernels.aggregate import aggregate
from .backbone import Backbone, maps_first
from .block import Block
from .layer_inputs import SparseInput, head_rows, linear
from .row_layers import SummingLayer


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


POSITIONS = ("input", "hidden", "all")


class NGNNLayer(SAGELayer):
    """A `SAGELayer` followed, inside the layer, by feed-forward layers: ReLU, then a linear map, each time."""

    sums_once = streams = True

    def __init__(self, in_channels: int, out_channels: int, feed_forward_layers: int):
        super().__init__(in_channels, out_channels)
        self.feed_forward = nn.ModuleList(nn.Linear(out_channels, out_channels) for _ in range(feed_forward_layers))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for layer in getattr(self, "feed_forward", ()):
            layer.reset_parameters()

    def combine(self, projected: Tensor, block: Block) -> Tensor:
        return self._feed(super().combine(projected, block))

    def forward(self, x: Tensor | SparseInput, block: Block) -> Tensor:
        return self._feed(super().forward(x, block))

    def add_own(self, mapped: Tensor, own: Tensor | SparseInput) -> Tensor:
        return self._feed(super().add_own(mapped, own))

    def from_sum(self, summed: Tensor, own: Tensor, projected: bool) -> Tensor:
        out = super().from_sum(summed, own, projected)
        return self._feed(out) if projected else out

    def from_total(self, total: Tensor) -> Tensor:
        return self._feed(super().from_total(total))

    def _feed(self, x: Tensor) -> Tensor:
        for layer in self.feed_forward:
            x = layer(F.relu(x))
        return x


class NGNN(GraphSAGE):
    """GraphSAGE deepened inside its layers: feed-forward layers after the convolution of each hidden layer.

    Args:
        in_channels, hidden_channels, out_channels, num_layers, dropout, input_dropout, norm, activation: see
            `Backbone`.
        feed_forward_layers: linear layers inside each layer that has them, >= 1.
        position: "input" (the first layer), "hidden" (those between the first and the last) or "all" (both); the
            last layer, which gives the classes, never has any.

    Raises:
        ValueError: feed_forward_layers below 1, an unknown position, or one that no layer of the model has.

    Source: Song et al., Network In Graph Neural Network, 2021 (arXiv 2111.11638).
    """

    sums_once = streams = True

    @passes_on(Backbone)
    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        feed_forward_layers: int = 1,
        position: str = "all",
        **options,
    ):
        check_count("model.feed_forward_layers", feed_forward_layers)
        check_count("model.num_layers", num_layers)
        if position not in POSITIONS:
            raise ValueError(f"model.position must be one of {list(POSITIONS)}, got {short(position)}")
        needed = 3 if position == "hidden" else 2
        if num_layers < needed:
            raise ValueError(f"model.num_layers must be at least {needed} for position {position!r}, got {num_layers}")
        self.feed_forward_layers, self.position = feed_forward_layers, position
        super().__init__(in_channels, hidden_channels, out_channels, num_layers, **options)

    def make_layer(self, index: int) -> SAGELayer:
        last = index == self.num_layers - 1
        kind = "input" if index == 0 else "hidden"
        if last or self.position not in (kind, "all"):
            return super().make_layer(index)
        return NGNNLayer(self.layer_channels(index), self.layer_channels(index + 1), self.feed_forward_layers)
