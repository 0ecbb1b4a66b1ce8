"""NGNN: network in graph neural network, on GraphSAGE."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import check_count, short
from .block import Block
from .graphsage import GraphSAGE, SAGELayer
from .sparse_linear import SparseInput

POSITIONS = ("input", "hidden", "all")


class NGNNLayer(SAGELayer):
    """A `SAGELayer` followed, inside the layer, by feed-forward layers: ReLU, then a linear map, each time."""

    sums_once = streams = True

    def __init__(self, in_channels: int, out_channels: int, feed_forward_layers: int):
        super().__init__(in_channels, out_channels)
        self.feed_forward = nn.ModuleList(nn.Linear(out_channels, out_channels) for _ in range(feed_forward_layers))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for linear in getattr(self, "feed_forward", ()):
            linear.reset_parameters()

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
        for linear in self.feed_forward:
            x = linear(F.relu(x))
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

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        dropout: float = 0.5,
        input_dropout: float = 0.0,
        norm: str | None = None,
        activation: str = "relu",
        feed_forward_layers: int = 1,
        position: str = "all",
    ):
        check_count("model.feed_forward_layers", feed_forward_layers)
        check_count("model.num_layers", num_layers)
        if position not in POSITIONS:
            raise ValueError(f"model.position must be one of {list(POSITIONS)}, got {short(position)}")
        needed = 3 if position == "hidden" else 2
        if num_layers < needed:
            raise ValueError(f"model.num_layers must be at least {needed} for position {position!r}, got {num_layers}")
        self.feed_forward_layers, self.position = feed_forward_layers, position
        super().__init__(
            in_channels, hidden_channels, out_channels, num_layers, dropout, input_dropout, norm, activation
        )

    def make_layer(self, index: int) -> SAGELayer:
        last = index == self.num_layers - 1
        kind = "input" if index == 0 else "hidden"
        if last or self.position not in (kind, "all"):
            return super().make_layer(index)
        return NGNNLayer(self.layer_channels(index), self.layer_channels(index + 1), self.feed_forward_layers)
