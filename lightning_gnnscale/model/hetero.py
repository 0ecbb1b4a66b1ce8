"""Any plain model of PyG on heterogeneous graphs: `to_hetero`, over the batches of this package."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..graph import GraphSchema, TypeCounts
from ..traits import BackboneTraits
from .block import stable_order
from .layer_inputs import as_input, dense_rows, is_by_node_type
from .relational import check_columns, places_of_node_types, read_schema, type_channels


class Hetero(nn.Module):
    """A model of PyG's plain layers with a copy of each layer for each edge type, by `torch_geometric.nn.to_hetero`.

    It takes what batches have, makes PyG's dicts of that, and returns rows in the batch's order. It computes all nodes
    of a batch in each layer, and cannot be evaluated layer by layer: give the DataModule evaluation="sampled".

    Args:
        model: Module called as (x, edge_index), and with `edge_weight` and `edge_attr` where its forward names them;
            layers whose in_channels are (-1, -1), of SAGEConv also -1, take node types of different columns. Or a
            callable that makes one, given out_channels=, such as a partial.
        schema: Node types and edge types, a `GraphSchema` or its `as_json`. Each node type must be the target of an
        edge type.
        in_channels: Columns of the features, as for `RelationalBackbone`; a node type with 0 has a learned vector.
        vector_channels: Columns of those vectors.
        edge_dim: Columns of the edge features, for a model that takes `edge_attr`; None: it settles them itself.
        out_channels: Width of the outputs, those of the model; None: found by a trial run.
        aggr: How a node's messages over several edge types are joined: "sum", "mean", "min", "max" or "mul".

    Raises:
        ValueError: a node type that no edge type leads to, missing columns, or outputs of another width.

    Source: Schlichtkrull et al., ESWC 2018, as `torch_geometric.nn.to_hetero` generalises it.
    """

    reads_edge_types = True

    def __init__(
        self,
        model: nn.Module | Callable[..., nn.Module],
        schema: GraphSchema | Mapping[str, Any] | None,
        in_channels: int | Mapping[str, int],
        vector_channels: int = 64,
        aggr: str = "sum",
        edge_dim: int | None = None,
        out_channels: int | None = None,
    ):
        from torch_geometric.nn import to_hetero

        super().__init__()
        model = model if isinstance(model, nn.Module) else model(out_channels=out_channels)
        self.schema = read_schema("Hetero", schema)
        self.type_channels = type_channels(in_channels, self.schema)
        without = [name for at, name in enumerate(self.schema.node_types) if at not in self.schema.targets]
        if without:
            raise ValueError(
                f"Hetero needs an edge type that leads to each node type, and none does to {', '.join(without)}: "
                "add reverse edge types, or train RGCN, RGAT or HGT"
            )
        named = inspect.signature(model.forward).parameters
        self.supports_edge_weight = "edge_weight" in named and BackboneTraits(model).supports_edge_weight
        self.supports_edge_attr = "edge_attr" in named and BackboneTraits(model).supports_edge_attr
        self.name = type(model).__name__
        if edge_dim is not None:
            self.edge_dim = edge_dim
        for attribute in ("out_channels", "num_layers"):
            if isinstance(getattr(model, attribute, None), int):
                setattr(self, attribute, getattr(model, attribute))
        if out_channels is not None and getattr(self, "out_channels", out_channels) != out_channels:
            raise ValueError(
                f"{self.name} gives out_channels={self.out_channels}, not {out_channels}: make it with that"
            )
        if out_channels is not None:
            self.out_channels = out_channels
        self.model = to_hetero(model, (list(self.schema.node_types), list(self.schema.edge_types)), aggr=aggr)
        self.type_vectors = nn.ParameterList(torch.empty(vector_channels) for width in self.type_channels if width == 0)
        for vector in self.type_vectors:
            nn.init.normal_(vector)
        if any(is_lazy(parameter) for parameter in self.model.parameters()):
            self._settle_widths()

    def forward(
        self,
        x: Any,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
        edge_type: Tensor | None = None,
        node_type: Tensor | None = None,
        type_counts: TypeCounts | None = None,
    ) -> Tensor:
        """Run the model over a batch.

        Args:
            x: `RowsByNodeType`; or (num_nodes, in_channels) where all node types have the same columns; None where
            none has any.
            edge_index: (2, num_edges) int64, source and target.
            edge_weight, edge_attr: (num_edges,) and (num_edges, edge_dim), for models that name them.
            edge_type: (num_edges,) int64 edge type of each edge; None where there is one.
            node_type: (num_nodes,) int64 node type of each node; None where there is one, or where x has it.
            type_counts: nodes and edges of each type, as a `MiniBatch` has them; without them a GPU is asked.

        Returns:
            (num_nodes, out_channels).

        Raises:
            ValueError: node types, features or weights that do not fit the model.
        """
        type_number = x.node_type if is_by_node_type(x) else node_type
        if type_number is None and isinstance(x, Tensor) and self.schema.num_node_types == 1:
            type_number = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        if edge_type is None and self.schema.num_edge_types == 1:
            edge_type = edge_index.new_zeros(edge_index.shape[1])
        if type_number is None or edge_type is None:
            raise ValueError(
                f"Hetero({self.name}) needs node_type and edge_type: the schema has {self.schema.num_node_types} "
                f"node types and {self.schema.num_edge_types} edge types"
            )
        if edge_weight is not None and not self.supports_edge_weight:
            raise ValueError(f"{self.name} takes no edge_weight: use another sampler, or a model that takes it")
        if edge_attr is not None and not self.supports_edge_attr:
            raise ValueError(f"{self.name} takes no edge_attr: leave edge features out with stored_edge_features=False")
        places, back = places_of_node_types(type_number, self.schema.num_node_types)
        chunks = places.split(self._counts("nodes", type_number, self.schema.num_node_types, type_counts))
        local = torch.cat([torch.arange(len(chosen), device=places.device) for chosen in chunks])[back]
        given = {"edge_weight": edge_weight, "edge_attr": edge_attr}
        given = {name: values for name, values in given.items() if values is not None}
        edges, by_edge_type = {}, {name: {} for name in given}
        of_types = self._counts("edges", edge_type, self.schema.num_edge_types, type_counts)
        for relation, chosen in zip(self.schema.edge_types, stable_order(edge_type).split(of_types), strict=True):
            edges[relation] = local[edge_index[:, chosen]]
            for name, values in given.items():
                by_edge_type[name][relation] = values[chosen].to(next(self.parameters()).dtype)
        rows = {
            name: self._rows(number, x, chosen)
            for number, (name, chosen) in enumerate(zip(self.schema.node_types, chunks, strict=True))
        }
        out = self.model(rows, edges, **by_edge_type)
        if not isinstance(out, dict):
            raise ValueError(f"{self.name} must return rows of nodes, got {type(out).__name__}")
        return torch.cat([out[name] for name in self.schema.node_types])[back]

    @staticmethod
    def _counts(what: str, types: Tensor, num_types: int, known: TypeCounts | None) -> list[int]:
        """Return how many nodes or edges are of each type: as the host knows, else as the device says."""
        counts = None if known is None else known.of(what, known.ends[-1], num_types)
        return torch.bincount(types, minlength=num_types).tolist() if counts is None else counts

    def _rows(self, node_type: int, x: Any, chosen: Tensor) -> Tensor:
        """Return the (num, columns) rows of a node type's nodes."""
        table = x.tables[node_type] if is_by_node_type(x) else None if x is None else x[chosen]
        reference = next(parameter for parameter in self.parameters() if not is_lazy(parameter))
        table = None if table is None else dense_rows(as_input(table, reference))
        given = 0 if table is None else table.shape[1]
        check_columns("Hetero", self.schema.node_types[node_type], given, self.type_channels[node_type])
        if table is not None:
            return table
        return self.type_vectors[self.type_channels[:node_type].count(0)].expand(len(chosen), -1)

    @torch.no_grad()
    def _settle_widths(self) -> None:
        """Run once, so that no parameter is without a shape: optimizers and ranks need to know them."""
        vectors = iter(self.type_vectors)
        rows = {
            name: torch.zeros(1, width) if width else next(vectors).expand(1, -1)
            for name, width in zip(self.schema.node_types, self.type_channels, strict=True)
        }
        was_training, edges = self.training, torch.zeros(2, 1, dtype=torch.int64)
        given = {}
        if hasattr(self, "edge_dim"):
            given["edge_attr"] = dict.fromkeys(self.schema.edge_types, torch.zeros(1, self.edge_dim))
        self.eval()
        self.model(rows, dict.fromkeys(self.schema.edge_types, edges), **given)
        self.train(was_training)
