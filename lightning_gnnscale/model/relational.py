"""The base of backbones over node types and edge types: maps of each node type's features, and maps by group."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.inits import glorot, zeros

from ..errors import check_integer
from ..graph import GraphSchema, TypeCounts
from ..keywords import passes_on
from .backbone import ACTIVATIONS, Backbone
from .block import Block, edge_counts, make_block, stable_order
from .dropout import drop, dropout
from .layer_inputs import MOST_CHANNELS, TimeEncoding, as_input, check_edge_inputs, is_by_node_type, is_sparse, linear
from .row_layers import RowEdges


def map_groups(
    values: Tensor, group: Tensor, weight: Tensor, bias: Tensor | None = None, counts: Sequence[int] | None = None
) -> Tensor:
    """Multiply rows by the matrix of their group.

    Args:
        values: (num_rows, in_channels), or (num_rows, heads, in_channels) with a matrix a head.
        group: (num_rows,) int64, ascending.
        weight: (num_groups, in_channels, out_channels), or (num_groups, heads, in_channels, out_channels).
        bias: (num_groups, out_channels) or None.
        counts: Rows of each group, where the host knows; None: a GPU is asked, and waited for.

    Returns:
        (num_rows, out_channels) or (num_rows, heads, out_channels).
    """
    counts = torch.bincount(group, minlength=len(weight)).tolist() if counts is None else list(counts)
    chunks: list[Tensor] = []
    offsets = [None] * len(weight) if bias is None else bias.unbind()
    # unbind: the gradient of all matrices is put together once, that of weight[i] would be as large for each i.
    for rows, matrix, offset in zip(values.split(counts), weight.unbind(), offsets, strict=True):
        if not len(rows):
            continue
        if matrix.dim() == 3:
            chunks.append((rows.transpose(0, 1) @ matrix).transpose(0, 1))
        else:
            chunks.append(rows @ matrix if offset is None else torch.addmm(offset, rows, matrix))
    return torch.cat(chunks) if chunks else values.new_zeros((*values.shape[:-1], weight.shape[-1]))


class TypedLinear(nn.Module):
    """A linear map of each node type.

    Args:
        in_channels, out_channels: widths, >= 1.
        num_node_types: number of node types, >= 1.
    """

    def __init__(self, in_channels: int, out_channels: int, num_node_types: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_node_types, in_channels, out_channels))
        self.bias = nn.Parameter(torch.empty(num_node_types, out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sample the maps again; biases are 0."""
        glorot(self.weight)
        zeros(self.bias)

    def forward(self, x: Tensor, node_type: Tensor | None, counts: Sequence[int] | None = None) -> Tensor:
        """Return the (num_rows, out_channels) maps of (num_rows, in_channels) rows.

        Args:
            x: the rows.
            node_type: (num_rows,) int64; None where there is one node type.
            counts: rows of each node type, where the host knows.
        """
        if len(self.weight) == 1:
            return torch.addmm(self.bias[0], x, self.weight[0])
        places, back = places_of_node_types(node_type, len(self.weight))
        return map_groups(x[places], node_type[places], self.weight, self.bias, counts)[back]

    def map_nodes(self, x: Tensor, block: Block) -> Tensor:
        """Return the maps of the first nodes of a block, as many as there are rows."""
        node_type = None if block.node_type is None else block.node_type[: len(x)]
        return self(x, node_type, block.node_counts(len(x), len(self.weight)))


def places_of_node_types(node_type: Tensor, num_node_types: int) -> tuple[Tensor, Tensor]:
    """Return the (num_rows,) positions of rows by node type, in the order given, and the place of each row then.

    Raises:
        ValueError: a node type is out of range; on the CPU alone, a device would have to be waited for.
    """
    if node_type.device.type == "cpu" and len(node_type):
        low, high = int(node_type.min()), int(node_type.max())
        if low < 0 or high >= num_node_types:
            raise ValueError(f"node types must be in [0, {num_node_types}), got {low} to {high}")
    places = stable_order(node_type)
    back = torch.empty_like(places)
    back[places] = torch.arange(len(places), device=places.device)
    return places, back


class RelationalBackbone(Backbone):
    """Base of the models over node types and edge types.

    The features of each node type are mapped to hidden_channels by a linear map of the node type, then come the
    activation and dropout. A node type without features has a learned vector, which is the bias of that map; where
    learned rows of its nodes are given (`inputs=`), they are its features. Layers follow as in `Backbone`; layer 0
    reads what was mapped.

    Args:
        in_channels: columns of the features: one number for all node types, or by name of the node type, 0 for one
            without features. A node type that reads learned rows counts their columns.
        hidden_channels, out_channels, num_layers, dropout, input_dropout, norm, activation: see `Backbone`.
        schema: node types and edge types, a `GraphSchema` or its `as_json`.
        edge_dim: columns of the edge features that layers read; None: they are not read.
        time_channels: cosines of the time between an edge and its seed (`TimeEncoding`), which are read as further
            columns of the edge features; batches must be disjoint trees with times. None: times are not read.

    Raises:
        ValueError: no schema, a node type whose columns are not given, or an argument outside what is listed here.
    """

    takes_negative_weights = False
    reads_edge_types = True

    @passes_on(Backbone)
    def __init__(
        self,
        in_channels: int | Mapping[str, int],
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        schema: GraphSchema | Mapping[str, Any] | None = None,
        edge_dim: int | None = None,
        time_channels: int | None = None,
        **options,
    ):
        self.schema = read_schema(type(self).__name__, schema)
        self.type_channels = type_channels(in_channels, self.schema)
        check_edge_inputs(edge_dim, time_channels)
        self.edge_dim, self.time_channels = edge_dim, time_channels
        super().__init__(max(1, *self.type_channels), hidden_channels, out_channels, num_layers, **options)
        self.in_channels = dict(in_channels) if isinstance(in_channels, Mapping) else int(in_channels)
        self.input_weights = nn.ParameterList(
            torch.empty(hidden_channels, width) for width in self.type_channels if width
        )
        self.type_vectors = nn.Parameter(torch.empty(self.schema.num_node_types, hidden_channels))
        self._reset_inputs()
        self.time = None if time_channels is None else TimeEncoding(time_channels)

    @property
    def num_edge_types(self) -> int:
        return self.schema.num_edge_types

    def layer_channels(self, index: int) -> int:
        return max(1, *self.type_channels) if index == 0 else super().layer_channels(index)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset_inputs()

    def _reset_inputs(self) -> None:
        for weight in self.input_weights:
            glorot(weight)
        with torch.no_grad():
            for vector, width in zip(self.type_vectors, self.type_channels, strict=True):
                nn.init.zeros_(vector) if width else nn.init.normal_(vector)

    def forward(
        self,
        x: Any,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        indptr: Tensor | None = None,
        num_sampled_nodes: Sequence[int] | None = None,
        edge_attr: Tensor | None = None,
        edge_type: Tensor | None = None,
        node_type: Tensor | None = None,
        edge_time: Tensor | None = None,
        seed_time: Tensor | None = None,
        seed_of: Tensor | None = None,
        num_sampled_edges: Sequence[int] | None = None,
        type_counts: TypeCounts | None = None,
    ) -> Tensor:
        """Run all layers over a batch, see `Backbone.forward`.

        Args:
            x: `RowsByNodeType`; or (num_nodes, in_channels), or sparse rows, where all node types have the same
                columns; None where no node type has features.
            edge_type: (num_edges,) int64 edge type of each edge; None where there is one.
            node_type: (num_nodes,) int64 node type of each node; None where there is one, or where x has it.
            type_counts: nodes and edges of each type, as a `MiniBatch` has them; without them a GPU is asked for some.

        Raises:
            ValueError: node types, edge types, features or times that do not fit the model.
        """
        edge_attr = self.edge_inputs(edge_attr, edge_index[1], edge_time, seed_time, seed_of)
        node_type = x.node_type if is_by_node_type(x) else node_type
        mapped = self.map_features(x, node_type, type_counts)
        edges = {"edge_weight": edge_weight, "edge_attr": edge_attr, "edge_type": edge_type}
        edges |= {"type_counts": type_counts, "num_edge_types": self.num_edge_types}
        counts = edge_counts(num_sampled_nodes, num_sampled_edges)
        block = make_block(edge_index, len(mapped), indptr, node_type=node_type, edges_of=counts, **edges)
        return self.run(mapped, block, num_sampled_nodes)

    def map_features(self, x: Any, node_type: Tensor | None, counts: TypeCounts | None = None) -> Tensor:
        """Map each node type's rows to hidden_channels, with activation and dropout.

        Args:
            x, node_type: as in `forward`.
            counts: as its type_counts.

        Returns:
            (num_nodes, hidden_channels).
        """
        num_node_types, reference = self.schema.num_node_types, self.reference
        type_number = x.node_type if is_by_node_type(x) else node_type
        type_number = None if type_number is None else torch.as_tensor(type_number).to(reference.device)
        if type_number is None and (num_node_types > 1 or x is None):
            raise ValueError(
                f"{type(self).__name__} needs node_type, the node type of each node: the schema has "
                f"{num_node_types} node types"
                if num_node_types > 1
                else f"{type(self).__name__} needs features, but there are none: give inputs=DistributedEmbedding(...)"
            )
        weights = iter(self.input_weights)
        maps = [next(weights) if width else None for width in self.type_channels]
        if type_number is None or (num_node_types == 1 and isinstance(maps[0], Tensor) and not is_by_node_type(x)):
            mapped = self._map_rows(0, x, maps[0], None)
        else:
            places, back = places_of_node_types(type_number, num_node_types)
            known = None if counts is None else counts.of("nodes", len(type_number), num_node_types)
            chunks = places.split(known or torch.bincount(type_number, minlength=num_node_types).tolist())
            shared = None if x is None or is_by_node_type(x) else as_input(x, reference)
            rows = [
                self._map_rows(number, x.tables[number], maps[number], None, len(chosen))
                if is_by_node_type(x)
                else self._map_rows(number, shared, maps[number], chosen, len(chosen))
                for number, chosen in enumerate(chunks)
            ]
            mapped = torch.cat(rows)[back]
        return dropout(ACTIVATIONS[self.activation](mapped), self.dropout, self.training)

    def _map_rows(
        self, node_type: int, table: Any, weight: Tensor | None, chosen: Tensor | None, count: int = 0
    ) -> Tensor:
        """Return the mapped rows of a node type: of its own table, or those chosen of one that all node types share."""
        given = 0 if table is None else table.dim if is_sparse(table) else table.shape[1]
        check_columns(type(self).__name__, self.schema.node_types[node_type], given, self.type_channels[node_type])
        vector = self.type_vectors[node_type]
        if weight is None:
            return vector.expand(count, -1)
        table = as_input(table, weight)
        table = table[chosen] if chosen is not None and not is_sparse(table) else table
        mapped = linear(drop(table, self.input_dropout, self.training), weight, vector)
        return mapped[chosen] if chosen is not None and is_sparse(table) else mapped

    def prepare(self, block: Block) -> Block:
        """Return the edges as the layers read them: with the edge type of each, and grouped by edge type.

        Raises:
            ValueError: edge types or node types are missing where there are several, or an edge type is out of range.
        """
        relations, node_types = block.edge_type, self.schema.num_node_types
        self.check_edge_types(relations)
        if relations is None:
            relations = torch.zeros(len(block.indices), dtype=torch.int64, device=block.indices.device)
        if node_types > 1 and block.node_type is None:
            raise ValueError(
                f"{type(self).__name__} needs node_type, the node type of each node: the schema has {node_types}"
            )
        weight = None if block.edge_weight is None else block.edge_weight.to(self.dtype)
        attr = None if block.edge_attr is None else block.edge_attr.to(self.dtype)
        block = replace(block, edge_type=relations, edge_weight=weight, edge_attr=attr)
        return replace(block, by_edge_type=block.edges_by_type())

    def check_edge_types(self, edge_type: Any) -> None:
        """Refuse edge types, (num_edges,) or None, that the schema does not have, or none where it has several."""
        if edge_type is None and self.schema.num_edge_types > 1:
            raise ValueError(
                f"{type(self).__name__} needs edge_type, the edge type of each edge: the schema has "
                f"{self.schema.num_edge_types} edge types"
            )
        # On the CPU alone, as ids are: a device would have to be waited for.
        here = not (isinstance(edge_type, Tensor) and edge_type.is_cuda)
        if here and edge_type is not None and len(edge_type) and int(edge_type.max()) >= self.schema.num_edge_types:
            raise ValueError(f"edge_type must be below {self.schema.num_edge_types}, got {int(edge_type.max())}")

    def projected_channels(self, index: int, sparse: bool) -> int | None:
        return self.hidden_channels if index == 0 else None

    def project(self, index: int, x: Any, node_type: Tensor | None = None) -> Tensor:
        """Return the mapped features, (num_rows, hidden_channels); index is 0, see `map_features`."""
        return self.map_features(x, node_type)

    def layer_projected(self, index: int, projected: Tensor, block: Block) -> Tensor:
        return self.apply_layer(index, as_input(projected, self.reference), self.prepare(block))

    def layer(self, index: int, x: Any, block: Block) -> Tensor:
        return self.layer_projected(index, self.map_features(x, block.node_type) if index == 0 else x, block)

    def values_of_edge(self, width: int) -> int:
        # Rows of pairs, before maps and after them, are at most as many as edges.
        return 6 * max(self.hidden_channels, self.out_channels) + self.edge_channels

    def row_edges(self, block: Block, node_ids: Tensor, kept: dict, local_only: bool = False) -> RowEdges:
        raise ValueError(
            f"{type(self).__name__} reads node types and edge types, which full-graph training does not: train on "
            "parts with PartitionDataModule"
        )


def read_schema(model: str, schema: GraphSchema | Mapping[str, Any] | None) -> GraphSchema:
    """Return the schema of `GraphSchema.as_json`, or the one given; ValueError where there is none."""
    if schema is None:
        raise ValueError(
            f"{model} needs schema=, the node types and edge types of the graph: say schema=dm.schema; a graph without "
            "edge types is for GraphSAGE, GAT or GCN"
        )
    return schema if isinstance(schema, GraphSchema) else GraphSchema.of_json(schema)


def check_columns(model: str, node_type: str, given: int, taken: int) -> None:
    """Raise ValueError unless a node type's features have the columns that a model takes."""
    if given != taken:
        raise ValueError(
            f"features of node type {node_type!r} have {given} columns, {model} takes {taken}: say so in in_channels "
            "(0: none, a learned vector replaces them)"
        )


def type_channels(in_channels: int | Mapping[str, int], schema: GraphSchema) -> list[int]:
    """Return the columns of each node type's features, 0 for none; ValueError: one is missing, unknown or below 0."""
    if not isinstance(in_channels, Mapping):
        in_channels = dict.fromkeys(schema.node_types, in_channels)
    if set(in_channels) != set(schema.node_types):
        raise ValueError(
            f"model.in_channels must give the columns of each node type ({', '.join(schema.node_types)}), 0 for "
            f"one without features, got {', '.join(in_channels) or 'none'}"
        )
    for name in schema.node_types:
        check_integer("model.in_channels", in_channels[name], 0, MOST_CHANNELS)
    return [int(in_channels[name]) for name in schema.node_types]
