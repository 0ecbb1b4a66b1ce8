"""The batch that samplers and loaders hand to models: PyG's names, plus what the strategies need."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..graph import Batch, GraphSchema, TypeCounts
from .device_stream import MadeOnDevice


class SparseFeatures(NamedTuple):
    """Feature rows in compressed form, as tensors.

    Attributes:
        indptr: (num_rows + 1,) int64, row i is indices[indptr[i]:indptr[i + 1]].
        indices: (num_values,) int32 or int64 columns, distinct within a row.
        data: (num_values,) values.
        dim: number of columns.
    """

    indptr: Tensor
    indices: Tensor
    data: Tensor
    dim: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.indptr) - 1

    def dense(self) -> Tensor:
        """Return (num_rows, dim) on the device of the rows, with the dtype of `data`."""
        rows = torch.arange(self.num_rows, device=self.indptr.device)
        rows = torch.repeat_interleave(rows, self.indptr.diff(), output_size=len(self.indices))
        out = torch.zeros(self.num_rows, self.dim, dtype=self.data.dtype, device=self.data.device)
        out[rows, self.indices.long()] = self.data
        return out

    def apply(self, function: Callable[[Tensor], Tensor]) -> "SparseFeatures":
        """Return the rows with the function applied to each tensor."""
        return SparseFeatures(function(self.indptr), function(self.indices), function(self.data), self.dim)


def sparse_rows_to_torch(rows) -> SparseFeatures:
    """Return sparse rows of a feature table as tensors that share its memory.

    Args:
        rows: has numpy arrays `indptr`, `indices`, `data`, and `dim`.
    """
    indptr, indices, data = (torch.from_numpy(np.ascontiguousarray(a)) for a in (rows.indptr, rows.indices, rows.data))
    return SparseFeatures(indptr, indices, data, int(rows.dim))


class RowsByNodeType(NamedTuple):
    """Features of some nodes of several node types, each of its own width and dtype.

    Attributes:
        node_type: (num_rows,) int64, the node type of each node.
        tables: By node type, the rows of its nodes in the order in which they come: (num, dim), or `SparseFeatures`;
            None for a node type without features.
    """

    node_type: Tensor
    tables: list

    @property
    def num_rows(self) -> int:
        """Number of nodes."""
        return len(self.node_type)

    def places(self, node_type: int) -> Tensor:
        """Return the (num,) int64 positions of a node type's nodes."""
        return torch.nonzero(self.node_type == node_type).flatten()

    def apply(self, function: Callable[[Tensor], Tensor]) -> "RowsByNodeType":
        """Return the rows with the function applied to each tensor."""
        tables = [
            table if table is None else function(table) if isinstance(table, Tensor) else table.apply(function)
            for table in self.tables
        ]
        return RowsByNodeType(function(self.node_type), tables)


def rows_by_node_type(rows) -> RowsByNodeType:
    """Return what a `TypedFeatures` has gathered as tensors that share its memory; what is a tensor stays as it is."""
    tables = [
        table
        if table is None or isinstance(table, Tensor)
        else torch.from_numpy(table)
        if isinstance(table, np.ndarray)
        else sparse_rows_to_torch(table)
        for table in rows.tables
    ]
    types = rows.node_type
    return RowsByNodeType(types if isinstance(types, Tensor) else torch.from_numpy(types), tables)


# Of fields with a value for each of a batch's nodes, edges or seeds, in their order; see `columns_of`.
_NODES, _EDGES, _SEEDS = ({"of": what} for what in ("nodes", "edges", "seeds"))


@dataclass
class MiniBatch(Batch):
    """One batch: a small graph with features and labels, its target nodes first.

    The batch is a function of its key alone (Invariant 3). It has PyG's attributes, so a PyG model takes it unchanged.

    Attributes:
        n_id: (num_nodes,) int64 store ids; the first `batch_size` are the seeds. Distinct, but for layer-wise samples.
        edge_index: (2, num_edges) int64, source and target as positions in n_id, grouped by target in ascending order.
        indptr: (num_targets + 1,) int64, the edges of each target. Targets are the first `num_targets` nodes: those of
            all hops but the last in a batch sampled hop by hop, all nodes in one that is not.
        batch_size: number of seeds; 0 in a batch of clusters or a random subgraph without target nodes.
        part: the part that the batch was sampled from.
        key: uint64 as a Python int; everything random about the batch, dropout included, follows from it.
        degree: (num_nodes,) int64 in-degree in the full graph; float32 sums of weights where the store has weights.
        self_weight: (num_nodes,) float32, the weight of the self-loop that GCN adds to each node: 1, or less where the
            full graph has self-loops there, which count once. None: 1 for all.
        num_sampled_nodes: seeds, then new nodes of each hop; None where the batch was not sampled hop by hop.
        num_sampled_edges: edges of each hop; None likewise.
        x_dense: (num_nodes, dim) features as the store gives them (codes as float32), or None.
        x_csr: features in compressed form, or None.
        y: (num_nodes,) int64, or (num_nodes, num_labels), or None.
        train_mask, val_mask, test_mask: (num_nodes,) bool, or None where the store has no such mask.
        edge_weight: (num_edges,) float32 by which a plain sum multiplies messages, or None.
        averaging_weights: edge_weight has 1 / degree in it: the plain sum is the unbiased mean over all neighbours, and
            times the degree of the target their unbiased sum. False: it is stored weights over the edges'
            probabilities.
        loss_weight: (batch_size,) float32 by which the sum of the seeds' losses is weighted, or None for their mean.
        e_id: (num_edges,) int64 positions of the edges in the store's edge arrays, or None.
        pairs: (2, num_pairs) int64 positions of the links to train on, among the seeds, or None. PyG's names of what
            follows from them (`src_index`, `dst_pos_index`, `dst_neg_index`) are there too.
        negatives: (num_pairs, num_negatives) int64 positions of false other ends of pairs[0], or (1, num_negatives)
            where all pairs share them, or None. In sampled evaluation -1 where there is none.
        pair_type: (num_pairs,) int64 relation of each pair, which then is (head, tail); None without relations.
        source_negatives: As negatives: positions of false first ends of pairs[1], or None.
        edge_attr: (num_edges, dim) features of the edges in the order of edge_index, of the stored dtype, or None where
            the store has none. An edge that was added as the reverse of an edge has that edge's.
        edge_label, pair_attr: (num_pairs,) int64 class of each pair, -1 = unknown, and its (num_pairs, dim) features,
            for `EdgeClassifier`; or None.
        node_type: (num_nodes,) int64 node type of each node, or None in a graph of one node type and one edge type.
        edge_type: (num_edges,) int64 edge type of each edge, or None likewise.
        x_by_node_type: `RowsByNodeType` in place of `x_dense` and `x_csr` where node types have features of their own,
        or None.
        schema: `GraphSchema` that node_type and edge_type are numbers of, or None.
        seed_time: (batch_size,) int64 time of each seed, no later than which its neighbours were sampled, or None.
        edge_time: (num_edges,) int64 time of each edge, or None.
        columns: Further columns of the nodes by name: (num_nodes, dim) tensors, `SparseFeatures` or `RowsByNodeType`.
        seed_of: (num_nodes,) int64 seed that each node was sampled for, in a batch of disjoint trees; else None.
        made: What made the batch on a device, where it is; None: it was made on the host.
        type_counts: Its nodes and edges of each type, counted where batches go to a GPU ahead of their use; else None.
        unread: `Column` of its features while they are not read, in a chunk of a batch that mixes several; else None.
    """

    n_id: Tensor = field(metadata=_NODES)
    edge_index: Tensor
    indptr: Tensor
    batch_size: int
    part: int
    key: int
    degree: Tensor | None = field(default=None, metadata=_NODES)
    self_weight: Tensor | None = field(default=None, metadata=_NODES)
    num_sampled_nodes: list[int] | None = None
    num_sampled_edges: list[int] | None = None
    x_dense: Tensor | None = field(default=None, metadata=_NODES)
    x_csr: SparseFeatures | None = None
    y: Tensor | None = field(default=None, metadata=_NODES)
    train_mask: Tensor | None = field(default=None, metadata=_NODES)
    val_mask: Tensor | None = field(default=None, metadata=_NODES)
    test_mask: Tensor | None = field(default=None, metadata=_NODES)
    edge_weight: Tensor | None = field(default=None, metadata=_EDGES)
    loss_weight: Tensor | None = field(default=None, metadata=_SEEDS)
    e_id: Tensor | None = field(default=None, metadata=_EDGES)
    averaging_weights: bool = False
    pairs: Tensor | None = None
    negatives: Tensor | None = None
    edge_attr: Tensor | None = field(default=None, metadata=_EDGES)
    node_type: Tensor | None = field(default=None, metadata=_NODES)
    edge_type: Tensor | None = field(default=None, metadata=_EDGES)
    x_by_node_type: RowsByNodeType | None = None
    schema: GraphSchema | None = None
    seed_time: Tensor | None = field(default=None, metadata=_SEEDS)
    edge_time: Tensor | None = field(default=None, metadata=_EDGES)
    seed_of: Tensor | None = None
    pair_type: Tensor | None = None
    source_negatives: Tensor | None = None
    edge_label: Tensor | None = None
    pair_attr: Tensor | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    made: MadeOnDevice | None = None
    type_counts: TypeCounts | None = None
    unread: Any = None

    @property
    def host_ids(self) -> np.ndarray:
        """(num_nodes,) int64: `n_id` on the host; of a batch that was made on a device the copy is waited for."""
        return self.n_id.numpy() if self.made is None else self.made.read()[0]

    @property
    def x(self) -> Tensor | RowsByNodeType | None:
        """(num_nodes, dim) features; compressed ones are made dense on their device at the first access, and kept.

        Of node types with features of their own `RowsByNodeType`.
        """
        if self.x_by_node_type is not None:
            return self.x_by_node_type
        if self.x_dense is None and self.x_csr is not None:
            self.x_dense = self.x_csr.dense()
        return self.x_dense

    @x.setter
    def x(self, value: Tensor | RowsByNodeType | None) -> None:
        by_node_type = isinstance(value, RowsByNodeType)
        self.x_dense, self.x_by_node_type = (None, value) if by_node_type else (value, None)

    @property
    def has_features(self) -> bool:
        """Whether features are there, in any form."""
        return any(form is not None for form in (self.x_dense, self.x_csr, self.x_by_node_type))

    @property
    def indices(self) -> Tensor:
        """(num_edges,) int64, the source of each edge: with `indptr` the CSC of the batch."""
        return self.edge_index[0]

    @property
    def src_index(self) -> Tensor | None:
        """(num_pairs,) int64: first ends of the links, as PyG's triplets name them."""
        return None if self.pairs is None else self.pairs[0]

    @property
    def dst_pos_index(self) -> Tensor | None:
        """(num_pairs,) int64: their other ends."""
        return None if self.pairs is None else self.pairs[1]

    @property
    def dst_neg_index(self) -> Tensor | None:
        """(num_pairs, num_negatives) int64: false other ends."""
        return None if self.negatives is None else self.negatives.expand(self.pairs.shape[1], -1)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, seeds included."""
        return len(self.n_id)

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.edge_index.shape[1]

    @property
    def num_targets(self) -> int:
        """Number of nodes that have a row of `indptr`; they come first."""
        return len(self.indptr) - 1

    def apply(self, function: Callable[[Tensor], Tensor]) -> "MiniBatch":
        """Return a batch with the function applied to each tensor, compressed features included."""
        changed = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Tensor):
                changed[one.name] = function(value)
            elif isinstance(value, SparseFeatures | RowsByNodeType):
                changed[one.name] = value.apply(function)
        for name, rows in self.columns.items():
            found = changed.setdefault("columns", {})
            found[name] = function(rows) if isinstance(rows, Tensor) else rows.apply(function)
        return replace(self, **changed)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "MiniBatch":
        """Return the batch on a device; tensors that are there already are shared.

        Args:
            device: where to.
            non_blocking: do not wait for copies from pinned memory.
        """
        return self.apply(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def to_data(self):
        """Return the batch as a `torch_geometric.data.Data` that shares its tensors, for code that asks for PyG's type.

        It has what there is of x (compressed features become dense), edge_index, edge_attr, edge_weight, y, the masks,
        n_id, e_id, batch_size, input_id (the store ids of the seeds), num_sampled_nodes and num_sampled_edges, the
        links by PyG's names, their edge types and false first ends, and degree, part and key.

        Of a heterogeneous graph it also has node_type, edge_type and the times.

        Raises:
            ValueError: node types have features of their own, which are no one tensor.
        """
        from torch_geometric.data import Data

        if self.x_by_node_type is not None:
            raise ValueError("to_data needs features of one width, and each node type has its own: use to_hetero()")
        links = {name: getattr(self, name) for name in ("src_index", "dst_pos_index", "dst_neg_index")}
        names = (
            "x",
            "edge_index",
            "edge_attr",
            "edge_weight",
            "y",
            "train_mask",
            "val_mask",
            "test_mask",
            "n_id",
            "e_id",
        )
        more = ("batch_size", "num_sampled_nodes", "num_sampled_edges", "degree", "self_weight", "part", "key")
        more += ("pair_type", "source_negatives", "edge_label", "pair_attr")
        more += ("node_type", "edge_type", "edge_time", "seed_time", "seed_of")
        given = {name: getattr(self, name) for name in (*names, *more)} | links
        data = Data(**{name: value for name, value in given.items() if value is not None}, num_nodes=self.num_nodes)
        data.input_id = self.n_id[: self.batch_size]
        for name, rows in self.columns.items():
            data[name] = rows.dense() if isinstance(rows, SparseFeatures) else rows
        return data

    def to_hetero(self):
        """Return the batch as a `torch_geometric.data.HeteroData`, for models that take PyG's dicts.

        Nodes of a node type come in the order in which they stand here, so that the seeds are first; each has `n_id`,
        `x`, `y` and the masks where the batch has them, and the seeds' node type `batch_size`. Each edge type has
        `edge_index`, and `edge_attr`, `edge_weight` and `time` where there are any.

        Raises:
            ValueError: the graph has one node type and one edge type; or seeds are of several node types.
        """
        from torch_geometric.data import HeteroData

        if self.schema is None:
            raise ValueError("to_hetero needs a batch of a heterogeneous graph: use to_data() for one node type")
        data, place = HeteroData(), torch.empty_like(self.node_type)
        node_types = self.node_type[: self.batch_size].unique()
        if len(node_types) > 1:
            raise ValueError(f"seeds must be of one node type for to_hetero, got {len(node_types)} node types")
        by_node = {"n_id": self.n_id, "y": self.y, "seed_of": self.seed_of}
        by_node |= {f"{name}_mask": getattr(self, f"{name}_mask") for name in ("train", "val", "test")}
        for node_type, name in enumerate(self.schema.node_types):
            chosen = torch.nonzero(self.node_type == node_type).flatten()
            place[chosen] = torch.arange(len(chosen), device=chosen.device)
            store = data[name]
            store.num_nodes = len(chosen)
            for key, values in by_node.items():
                if values is not None:
                    store[key] = values[chosen]
            x = self.x_dense[chosen] if self.x_dense is not None else None
            if self.x_by_node_type is not None:
                x = self.x_by_node_type.tables[node_type]
                x = x.dense() if isinstance(x, SparseFeatures) else x
            if x is not None:
                store.x = x
            if node_types.numel() and node_type == int(node_types[0]):
                store.batch_size = self.batch_size
        by_edge = {"edge_attr": self.edge_attr, "edge_weight": self.edge_weight, "time": self.edge_time}
        for number, edge_type in enumerate(self.schema.edge_types):
            chosen = torch.nonzero(self.edge_type == number).flatten()
            data[edge_type].edge_index = place[self.edge_index[:, chosen]]
            for key, values in by_edge.items():
                if values is not None:
                    data[edge_type][key] = values[chosen]
        return data

    def pin_memory(self) -> "MiniBatch":
        """Return a copy in page-locked memory, from which copies to a CUDA device do not block."""
        return self.apply(lambda tensor: tensor.pin_memory())


def columns_of(what: str) -> tuple[str, ...]:
    """Return the names of a batch's columns with a value for each of its "nodes", "edges" or "seeds"."""
    return tuple(one.name for one in fields(MiniBatch) if one.metadata.get("of") == what)
