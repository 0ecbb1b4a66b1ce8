"""R-GAT over CSC rows."""

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn.inits import glorot, zeros

from ..errors import check_count
from ..keywords import passes_on
from ..triton_kernels.aggregate import take_rows
from ..triton_kernels.edge_attention import edge_attention
from .backbone import check_heads
from .block import Block
from .dropout import dropout
from .relational import RelationalBackbone, TypedLinear, map_groups
from .row_layers import RowLayer

NEGATIVE_SLOPE = 0.2


class RGATLayer(nn.Module, RowLayer):
    """PyG's `RGATConv` (additive, across edge types; same parameters and names), plus a map of the node itself.

    Args:
        in_channels: width of what is read.
        out_channels: width of a head.
        num_relations, num_node_types: how many there are.
        num_bases: matrices that the maps of edge types are made of; None: each has its own.
        heads: attention heads; side by side with concat, else averaged.
        dropout: probability on attention.
        edge_dim: columns of what is read of an edge, 0 for nothing.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_relations: int,
        num_node_types: int,
        num_bases: int | None,
        heads: int,
        concat: bool,
        dropout: float,
        edge_dim: int,
    ):
        super().__init__()
        self.out_channels, self.heads, self.concat, self.dropout = out_channels, heads, concat, dropout
        width = heads * out_channels
        if num_bases is None:
            self.weight = nn.Parameter(torch.empty(num_relations, in_channels, width))
        else:
            self.att = nn.Parameter(torch.empty(num_relations, num_bases))
            self.basis = nn.Parameter(torch.empty(num_bases, in_channels, width))
        self.num_bases = num_bases
        self.q, self.k = nn.Parameter(torch.empty(width, heads)), nn.Parameter(torch.empty(width, heads))
        self.lin_edge = nn.Linear(edge_dim, width, bias=False) if edge_dim else None
        self.e = nn.Parameter(torch.empty(width, heads)) if edge_dim else None
        self.root = TypedLinear(in_channels, width if concat else out_channels, num_node_types)
        self.bias = nn.Parameter(torch.empty(width if concat else out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sample all maps again."""
        for value in (*((self.att, self.basis) if self.num_bases else (self.weight,)), self.q, self.k, self.e):
            glorot(value)
        if self.lin_edge is not None:
            glorot(self.lin_edge.weight)
        self.root.reset_parameters()
        zeros(self.bias)

    def forward(self, x: Tensor, block: Block) -> Tensor:
        """Return (num_targets, width) from (num_sources, in_channels)."""
        weight = torch.einsum("rb,bio->rio", self.att, self.basis) if self.num_bases else self.weight
        sources, pairs = block.source_pairs, block.target_pairs
        values = map_groups(x[sources.source], sources.relation, weight, counts=sources.counts)
        # A target's query is a product with weight @ q: its mapped row is not needed.
        query = map_groups(x[pairs.target], pairs.relation, weight @ self.q, counts=pairs.counts)
        edge_score = take_rows(query, pairs.pair_of_edges(), pairs.indptr, pairs.edges)
        if self.lin_edge is not None:
            edge_score = edge_score + F.linear(block.edge_attr, self.e.t() @ self.lin_edge.weight)
        out = edge_attention(
            values.view(-1, self.heads, self.out_channels), values @ self.k, None, block.indptr, sources.place,
            edge_score, None if block.edge_weight is None else block.edge_weight.log(),
            partial(dropout, probability=self.dropout, training=True) if self.dropout and self.training else None,
            NEGATIVE_SLOPE,
            block.by_source_pair if values.requires_grad else None,
        )  # fmt: skip
        own = self.root.map_nodes(x[: block.num_targets], block)
        return (out.flatten(1) if self.concat else out.mean(dim=1)) + own + self.bias


class RGAT(RelationalBackbone):
    """Relational graph attention network: a map of each edge type, and one softmax over all in-edges of a node.

    Args:
        in_channels, hidden_channels, out_channels, num_layers, dropout, input_dropout, norm, activation, schema,
            edge_dim, time_channels: see `RelationalBackbone`. Features and times of edges have a share in each edge's
            score.
        heads: attention heads of each layer, >= 1; divides hidden_channels. Those of the last layer are averaged.
        attention_dropout: probability in [0, 1) on attention; None = dropout.
        num_bases: matrices in each layer of which those of the edge types are linear combinations, >= 1; None: each
            edge type has its own.

    An `edge_weight` w multiplies an edge's share before the softmax divides (log w is added to its score).

    Raises:
        ValueError: hidden_channels is not a multiple of heads, num_bases below 1.

    Cost: a row for each pair of an edge type and a source that has edges of it.
    Source: Busbridge et al., Relational graph attention networks, 2019: additive attention across edge types, with
        query and key shared by the edge types as in PyG's `RGATConv`. Differs: a linear map of the node itself, by
        node type, is added, since edge types hold no self-loops.
    """

    @passes_on(RelationalBackbone, activation="elu")
    def __init__(
        self,
        in_channels: int | Mapping[str, int],
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        heads: int = 4,
        attention_dropout: float | None = None,
        num_bases: int | None = None,
        **options,
    ):
        self.heads, hidden_channels = check_heads(heads, hidden_channels, attention_dropout)
        if num_bases is not None:
            check_count("model.num_bases", num_bases)
        self.num_bases, self.attention_dropout = num_bases, attention_dropout
        super().__init__(in_channels, hidden_channels, out_channels, num_layers, **options)

    def make_layer(self, index: int) -> RGATLayer:
        last, schema = index == self.num_layers - 1, self.schema
        return RGATLayer(
            self.hidden_channels,
            self.out_channels if last else self.hidden_channels // self.heads,
            schema.num_edge_types,
            schema.num_node_types,
            self.num_bases,
            heads=self.heads,
            concat=not last,
            dropout=self.dropout if self.attention_dropout is None else self.attention_dropout,
            edge_dim=self.edge_channels,
        )

    def values_of_edge(self, width: int) -> int:
        return super().values_of_edge(width) + 2 * self.heads * self.out_channels  # heads of the last layer
