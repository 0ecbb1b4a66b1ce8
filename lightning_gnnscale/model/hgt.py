"""Heterogeneous graph transformer over CSC rows."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn.inits import glorot, ones

from ..keywords import passes_on
from ..triton_kernels.aggregate import aggregate, edge_dot, edge_softmax
from .backbone import check_heads
from .block import Block
from .relational import RelationalBackbone, TypedLinear, map_groups
from .row_layers import RowLayer


class HGTLayer(nn.Module, RowLayer):
    """PyG's `HGTConv` over a block: keys, queries and values by node type, matrices and a prior by edge type and head.

    Args:
        channels: width of what is read and given.
        num_relations, num_node_types: how many there are.
        heads: attention heads; divides channels.
        edge_dim: columns of what is read of an edge, 0 for nothing.
    """

    def __init__(self, channels: int, num_relations: int, num_node_types: int, heads: int, edge_dim: int):
        super().__init__()
        self.heads, self.head_channels = heads, channels // heads
        self.key_value = TypedLinear(channels, 2 * channels, num_node_types)
        self.query, self.out = (
            TypedLinear(channels, channels, num_node_types),
            TypedLinear(channels, channels, num_node_types),
        )
        shape = (num_relations, heads, self.head_channels, self.head_channels)
        self.key_maps, self.value_maps = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.prior, self.skip = (
            nn.Parameter(torch.empty(num_relations, heads)),
            nn.Parameter(torch.empty(num_node_types)),
        )
        self.edge = nn.Linear(edge_dim, heads, bias=False) if edge_dim else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sample all maps again; priors and gates begin at 1."""
        for module in (self.key_value, self.query, self.out, self.edge):
            if module is not None:
                module.reset_parameters()
        for value in (self.key_maps, self.value_maps):
            glorot(value)
        ones(self.prior)
        ones(self.skip)

    def forward(self, x: Tensor, block: Block) -> Tensor:
        """Return (num_targets, channels) from (num_sources, channels)."""
        own = x[: block.num_targets]
        mapped = self.key_value.map_nodes(x, block)
        key, value = (part.unflatten(1, (self.heads, -1)) for part in mapped.chunk(2, dim=1))
        query = self.query.map_nodes(own, block).unflatten(1, (self.heads, -1))
        # Both matrices of an edge type are applied on the side of the target, where it has a row for all its edges:
        # q (k A)' = (q A') k', and the shares of a pair sum values before M maps them.
        pairs = block.target_pairs
        keys = self.key_maps.transpose(-1, -2)
        query = map_groups(query[pairs.target], pairs.relation, keys, counts=pairs.counts)
        query = query * (self.prior[pairs.relation] / math.sqrt(self.head_channels)).unsqueeze(-1)
        scores = edge_dot(query, key, pairs.indptr, pairs.sources)
        if self.edge is not None:
            scores = scores + self.edge(block.edge_attr).index_select(0, pairs.edges)
        if block.edge_weight is not None:
            scores = scores + block.edge_weight.log().index_select(0, pairs.edges).unsqueeze(-1)
        share = edge_softmax(scores, block.indptr, pairs.place)
        summed = aggregate(value, pairs.indptr, pairs.sources, share)
        mapped = map_groups(summed, pairs.relation, self.value_maps, counts=pairs.counts)
        out = aggregate(mapped.flatten(1), pairs.target_indptr, pairs.target_pairs)
        gate = self.skip.sigmoid()
        gate = gate if block.node_type is None else gate[block.node_type[: len(own)]].unsqueeze(1)
        return gate * self.out.map_nodes(F.gelu(out), block) + (1 - gate) * own


class HGT(RelationalBackbone):
    """Heterogeneous graph transformer: attention with keys, queries and values by node type, matrices by edge type.

    All layers are hidden_channels wide; a linear map to out_channels follows the last. Between layers come norm and
    dropout, without an activation: layers have their own.

    Args:
        in_channels, hidden_channels, out_channels, num_layers, dropout, input_dropout, norm, activation, schema,
            edge_dim, time_channels: see `RelationalBackbone`; the activation is that after the map of the features.
            Features and times of edges have a share in each edge's score.
        heads: attention heads of each layer, >= 1; divides hidden_channels.

    An `edge_weight` w multiplies an edge's share before the softmax divides (log w is added to its score).

    Raises:
        ValueError: hidden_channels is not a multiple of heads.

    Cost: a row for each pair of an edge type and a node that has edges of it.
    Source: Hu et al., Heterogeneous graph transformer, WWW 2020, equations (3) to (5), as PyG's `HGTConv`. Differs: a
        node without in-edges keeps its own value through the gate; times are encoded as TGAT does, into the score.
    """

    @passes_on(RelationalBackbone)
    def __init__(
        self,
        in_channels: int | Mapping[str, int],
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        heads: int = 4,
        **options,
    ):
        self.heads, hidden_channels = check_heads(heads, hidden_channels)
        super().__init__(in_channels, hidden_channels, out_channels, num_layers, **options)
        self.output = nn.Linear(hidden_channels, out_channels)

    def make_layer(self, index: int) -> HGTLayer:
        schema = self.schema
        return HGTLayer(
            self.hidden_channels, schema.num_edge_types, schema.num_node_types, self.heads, self.edge_channels
        )

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.output.reset_parameters()

    def finish_layer(self, index: int, x: Tensor) -> Tensor:
        return self.output(x) if index == self.num_layers - 1 else super().finish_layer(index, x)

    def activate(self, index: int, x: Tensor) -> Tensor:
        return self.norms[index](x)
