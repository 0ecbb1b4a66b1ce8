"""A partition store as PyG's loaders read one: a `FeatureStore` and a `GraphStore` in one, nothing of it in memory."""

import os
import warnings

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, GraphStore, TensorAttr
from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout

from ..errors import PartitionStoreError
from ..graph import MASK_NAMES
from .features import SparseRows
from .reader import PartitionStore


class PyGStore(FeatureStore, GraphStore):
    """A store as PyG takes a graph: `gs.NeighborLoader(PyGStore(...), [10, 5], input_nodes=...)`, or (it, it) to PyG's.

    Nodes have store ids; `store.user_ids(batch.n_id.numpy())` names them. `x` is float32, float64 where rows are so;
    `y`, and a mask by its name, `train_mask`. Batches of `gs.NeighborLoader` also have `edge_attr` and `edge_weight` of
    stores that hold them. Both are read by row.

    Args:
        store: A `PartitionStore`, or its folder or URL.

    Attributes:
        store: The store.

    Raises:
        PartitionStoreError: there is none.
        ValueError: it has node types or edge types, which would be dropped.

    Cost: what is asked for; all of a table where no index is given, and edges are mapped.
    """

    def __init__(self, store: str | os.PathLike | PartitionStore):
        super().__init__()
        self.store = store if isinstance(store, PartitionStore) else PartitionStore.open(store)
        schema = self.store.schema
        if schema is not None:
            raise ValueError(
                f"PyGStore has one node type and one edge type, but the store {schema.num_node_types} and "
                f"{schema.num_edge_types}: use PartitionDataModule, whose batches have to_hetero()"
            )
        self._arrays = {}
        if self.store.labels is not None:
            self._arrays["y"] = self.store.labels
        for name in MASK_NAMES:
            if name in self.store.masks:
                self._arrays[f"{name}_mask"] = self.store.masks[name]

    def __reduce__(self):
        return type(self), (self.store,)

    def __repr__(self) -> str:
        return f"PyGStore({self.store!r})"

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.store.num_nodes

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Return x, y and the masks, those that the store has."""
        names = ([] if self.store.features is None else ["x"]) + list(self._arrays)
        return [TensorAttr(None, name) for name in names]

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """Return the one edge type there is."""
        return [EdgeAttr(None, EdgeLayout.CSC, True, (self.num_nodes, self.num_nodes))]

    def edge_values(self, e_id: np.ndarray) -> dict[str, Tensor]:
        """Return `edge_attr` and `edge_weight` of edges, those that the store has.

        Args:
            e_id: (num,) int64 positions in `store.csc`.
        """
        tables = {"edge_attr": self.store.edge_features, "edge_weight": self.store.edge_weight}
        return {name: torch.from_numpy(table[e_id]) for name, table in tables.items() if table is not None}

    def _get_tensor(self, attr: TensorAttr) -> Tensor | None:
        index = slice(None) if attr.index is None else attr.index
        index = index.cpu().numpy() if isinstance(index, Tensor) else index
        if attr.attr_name in self._arrays:
            return torch.from_numpy(np.array(self._arrays[attr.attr_name][index]))
        if attr.attr_name != "x" or self.store.features is None:
            return None
        nodes = np.arange(self.num_nodes)[index] if isinstance(index, slice) else np.asarray(index, np.int64)
        rows = self.store.features.read(nodes)
        rows = rows.dense() if isinstance(rows, SparseRows) else rows
        return torch.from_numpy(np.asarray(rows, np.promote_types(rows.dtype, np.float32)))

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        if attr.attr_name in self._arrays:
            return tuple(self._arrays[attr.attr_name].shape)
        features = self.store.features
        return None if features is None or attr.attr_name != "x" else (self.num_nodes, features.dim)

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        if edge_attr.layout != EdgeLayout.CSC:
            return None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            indptr, indices = (torch.from_numpy(np.asarray(one)) for one in self.store.csc)
        return indices, indptr

    def _put_tensor(self, tensor: Tensor, attr: TensorAttr) -> bool:
        raise PartitionStoreError(f"{self.store.root}: a store is read only; write another by write_partition_store")

    def _put_edge_index(self, edge_index: tuple[Tensor, Tensor], edge_attr: EdgeAttr) -> bool:
        raise PartitionStoreError(f"{self.store.root}: a store is read only; write another by write_partition_store")

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        raise PartitionStoreError(f"{self.store.root}: a store is read only")

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        raise PartitionStoreError(f"{self.store.root}: a store is read only")
