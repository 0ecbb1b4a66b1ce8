"""A model without layers: the embedding of a node is its row."""

from typing import Any

import torch
from torch import Tensor, nn

from .backbone import Backbone


class NoLayers(Backbone):
    """The rows of the nodes themselves, for decoders alone: no edge is read, in training or evaluation.

    Rows are learned where the module has `inputs=DistributedEmbedding(...)`; they may also be stored features.

    Args:
        in_channels: Width of the rows, and of the embeddings, >= 1.

    Raises:
        ValueError: in_channels is below 1.
    """

    accepts_sparse = False
    num_layers = 0

    def __init__(self, in_channels: int):
        nn.Module.__init__(self)
        if in_channels < 1:
            raise ValueError(f"model.in_channels must be at least 1, got {in_channels}")
        self.in_channels = self.out_channels = in_channels
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        self.empty = nn.Parameter(torch.empty(0), requires_grad=False)  # its device and dtype are the model's

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        edge_type: Tensor | None = None,
    ) -> Tensor:
        """Return the (num_nodes, in_channels) rows as they are; edges and what they carry pass no message."""
        return x

    def layer_channels(self, index: int) -> int:
        """Return the width of the rows."""
        return self.in_channels

    def layer(self, index: int, x: Any, block: Any) -> Tensor:
        """Raise IndexError: there are no layers."""
        raise IndexError(f"NoLayers has no layer {index}")
