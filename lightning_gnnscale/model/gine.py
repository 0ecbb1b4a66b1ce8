"""GINE over CSC rows."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch_geometric.nn import GINEConv

from ..errors import is_integer, short
from ..keywords import passes_on
from ..triton_kernels.aggregate import aggregate, take_rows
from .backbone import Backbone
from .block import Block
from .layer_inputs import SparseInput, dense_rows
from .row_layers import RowLayer


class GINELayer(GINEConv, RowLayer):
    """PyG's `GINEConv` (same parameters and names) over a block with edge features."""

    def forward(self, x: Tensor | SparseInput, block: Block) -> Tensor:
        x = dense_rows(x)
        if x.requires_grad:
            gathered = take_rows(x, block.indices, block.by_source.indptr, block.by_source.edges)
        else:
            gathered = x.index_select(0, block.indices)
        messages = (gathered + self.lin(block.edge_attr)).relu()
        places = torch.arange(len(block.indices), device=x.device)
        summed = aggregate(messages, block.indptr, places, block.edge_weight)
        return self.nn(summed + (1 + self.eps) * x[: block.num_targets])


class GINE(Backbone):
    """Graph isomorphism network with edge features: a sum of relu(neighbour + a linear map of the edge's features).

    Args:
        in_channels, hidden_channels, out_channels, num_layers, dropout, input_dropout, norm, activation: see
            `Backbone`. Each layer maps its sum by two linear layers, of width hidden_channels between them.
        edge_dim: columns of the edge features, >= 1. An `edge_weight` multiplies an edge's message.

    Raises:
        ValueError: edge_dim is missing: without edge features this is another model.

    Cost: a message an edge is held, of the width that the layer reads.
    Source: Hu et al., Strategies for pre-training graph neural networks, ICLR 2020. Differs: the sum of a row that was
        sampled is scaled up to its degree, so that it is unbiased.
    """

    needs_degree = True

    @passes_on(Backbone)
    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        edge_dim: int | None = None,
        **options,
    ):
        if not is_integer(edge_dim) or edge_dim < 1:
            raise ValueError(
                f"model.edge_dim must be the columns of the edge features, at least 1, got {short(edge_dim)}: GINE "
                "reads them, so give edge_features= with the graph, or take another model"
            )
        self.edge_dim = edge_dim
        super().__init__(in_channels, hidden_channels, out_channels, num_layers, **options)

    def make_layer(self, index: int) -> GINELayer:
        maps = nn.Sequential(
            nn.Linear(self.layer_channels(index), self.hidden_channels),
            nn.ReLU(),
            nn.Linear(self.hidden_channels, self.layer_channels(index + 1)),
        )
        return GINELayer(maps, edge_dim=self.edge_dim)

    def prepare(self, block: Block) -> Block:
        block = replace(block, edge_attr=block.edge_attr.to(self.dtype))
        if block.edge_weight is not None:
            return replace(block, edge_weight=block.edge_weight.to(self.dtype))
        if block.degree is None:
            return block
        counts = block.indptr.diff().clamp(min=1)
        scale = (block.degree[: block.num_targets].to(self.dtype) / counts).clamp(min=1)
        return replace(block, edge_weight=scale[block.target_of_edges()])

    def projected_channels(self, index: int, sparse: bool) -> int | None:
        return None  # what is summed depends on the edge
