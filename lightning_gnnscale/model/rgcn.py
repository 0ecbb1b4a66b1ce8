"""R-GCN over CSC rows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.inits import glorot

from ..errors import check_count
from ..graph import GraphSchema
from ..keywords import passes_on
from ..triton_kernels.aggregate import aggregate
from .backbone import Backbone
from .block import MULTIPLY_ADDS_PER_READ, Block, TargetPairs, row_sums
from .edge_bins import StreamedLayer
from .layer_inputs import as_input
from .relational import RelationalBackbone, TypedLinear, map_groups
from .row_layers import RowLayer


class RGCNLayer(nn.Module, RowLayer):
    """A mean over each edge type's in-neighbours, mapped by edge type, plus a map of the node by its type.

    Args:
        in_channels, out_channels: widths.
        num_relations, num_node_types: how many there are.
        num_bases: matrices that the maps of edge types are made of; None: each has its own.
    """

    streams = True

    def __init__(
        self, in_channels: int, out_channels: int, num_relations: int, num_node_types: int, num_bases: int | None
    ):
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight = nn.Parameter(torch.empty(num_bases or num_relations, in_channels, out_channels))
        self.comp = None if num_bases is None else nn.Parameter(torch.empty(num_relations, num_bases))
        self.root = TypedLinear(in_channels, out_channels, num_node_types)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sample all maps again."""
        glorot(self.weight)
        glorot(self.comp)
        self.root.reset_parameters()

    def forward(self, x: Tensor, block: Block) -> Tensor:
        """Return (num_targets, out_channels) from (num_sources, in_channels)."""
        return self._neighbors(x, block) + self.root.map_nodes(x[: block.num_targets], block)

    def _neighbors(self, x: Tensor, block: Block) -> Tensor:
        """Return the sum over edge types, by whichever order of maps and sums costs least.

        A mean reads a row an edge; an edge type maps a row for each pair (edge type, target), or (edge type,
        source) where it narrows rows. With bases rows of pairs may be summed by their coefficients before the
        maps.
        """
        pairs, width, out = block.target_pairs, self.in_channels, self.out_channels
        num_pairs, num_edges, read = len(pairs.target), len(block.indices), MULTIPLY_ADDS_PER_READ
        shares = _shares(block, pairs)
        maps, after = width * out, read * (num_edges * width + num_pairs * out)
        if self.comp is not None:
            num_bases = len(self.weight)
            composed = num_pairs * maps + len(self.comp) * num_bases * maps + read * num_pairs * out
            by_bases = read * num_pairs * num_bases * width + block.num_targets * num_bases * maps
            if by_bases < composed:
                means = aggregate(x, pairs.indptr, pairs.sources, shares, "mean" if shares is None else "sum")
                return self._sum_by_bases(means, pairs)
        weight = self.weight if self.comp is None else torch.einsum("rb,bio->rio", self.comp, self.weight)
        if out < width:
            sources = block.source_pairs
            if len(sources.source) * maps + read * num_edges * out < num_pairs * maps + after:
                mapped = map_groups(x[sources.source], sources.relation, weight, counts=sources.counts)
                if shares is None:
                    shares = pairs.indptr.diff().to(x.dtype).reciprocal()[pairs.pair_of_edges()]
                else:
                    shares = torch.empty_like(shares).index_copy(0, pairs.edges, shares)
                return aggregate(mapped, block.indptr, sources.place, shares)
        means = aggregate(x, pairs.indptr, pairs.sources, shares, "mean" if shares is None else "sum")
        mapped = map_groups(means, pairs.relation, weight, counts=pairs.counts)
        return aggregate(mapped, pairs.target_indptr, pairs.target_pairs)

    def _sum_by_bases(self, means: Tensor, pairs: TargetPairs) -> Tensor:
        coefficients = self.comp[pairs.relation[pairs.target_pairs]]
        total = means.new_zeros((len(pairs.target_indptr) - 1, self.out_channels))
        for coefficient, matrix in zip(coefficients.unbind(1), self.weight.unbind(), strict=True):
            total = total + aggregate(means, pairs.target_indptr, pairs.target_pairs, coefficient) @ matrix
        return total


def _shares(block: Block, pairs: TargetPairs) -> Tensor | None:
    """Return each edge's share of its pair's weights, in the order of `pairs.edges`; None: equal shares."""
    if block.edge_weight is None:
        return None
    weight = block.edge_weight[pairs.edges]
    pair = pairs.pair_of_edges()[pairs.edges]
    total = row_sums(weight, pairs.indptr, pair)
    return weight / torch.where(total > 0, total, torch.ones_like(total))[pair]


class RGCN(RelationalBackbone):
    """Relational graph convolutional network: for each edge type the mean over its in-neighbours, mapped by a matrix.

    Args:
        in_channels, hidden_channels, out_channels, num_layers, dropout, input_dropout, norm, activation, schema: see
            `RelationalBackbone`.
        num_bases: matrices in each layer of which those of the edge types are linear combinations, >= 1; None: each
            edge type has its own.

    With an `edge_weight` the mean in an edge type is weighted.

    Raises:
        ValueError: num_bases below 1.

    Cost: a row for each pair of an edge type and a node that has edges of it; never one for each edge and edge type.
    Source: Schlichtkrull et al., Modeling relational data with graph convolutional networks, ESWC 2018, equations (2)
        and (3). Differs: features are mapped by node type first, and the map of the node itself is one a node type.
    """

    averages = streams = True

    @passes_on(Backbone)
    def __init__(
        self,
        in_channels: int | Mapping[str, int],
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        schema: GraphSchema | Mapping[str, Any] | None = None,
        num_bases: int | None = None,
        **options,
    ):
        if num_bases is not None:
            check_count("model.num_bases", num_bases)
        self.num_bases = num_bases
        super().__init__(in_channels, hidden_channels, out_channels, num_layers, schema=schema, **options)

    def make_layer(self, index: int) -> RGCNLayer:
        schema = self.schema
        width = self.layer_channels(index + 1)
        return RGCNLayer(self.hidden_channels, width, schema.num_edge_types, schema.num_node_types, self.num_bases)

    def streamed_layer(self, index: int, projected: bool, sparse: bool) -> StreamedLayer | None:
        layer = self.convs[index]
        if (index == 0 and not projected) or any("streams" not in vars(type(module)) for module in (self, layer)):
            return None  # features are mapped by node type first
        return StreamedLayer(layer.out_channels, layer.in_channels, "map", adds_own=True, by_type=True)

    def map_sources(self, index: int, x: Any, edge_type: int | None = None) -> Tensor:
        weight, comp = self.convs[index].weight, self.convs[index].comp
        weight = weight[edge_type] if comp is None else torch.einsum("b,bio->io", comp[edge_type], weight)
        return as_input(x, self.reference) @ weight

    def map_own(self, index: int, x: Any, node_type: Tensor | None = None) -> Tensor:
        return self.convs[index].root(as_input(x, self.reference), node_type)

    def layer_from_total(self, index: int, total: Tensor) -> Tensor:
        return self.finish_layer(index, as_input(total, self.reference))
