"""From a sampled subgraph to a batch of PyG's own type: the user's `Data`, cut down to the nodes and edges sampled."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..foreign import is_tensor
from ..graph import CSC, id_dtype
from ..sampler.device_stream import MadeOnDevice
from ..sampler.on_device import on_host
from ..sampler.protocol import Subgraph
from ..triton_kernels.gather_rows import gather_rows
from ..triton_kernels.sample_neighbors.cpu import read_hop
from ..triton_kernels.sample_neighbors.device_graph import placing
from .batch_maker import BatchMaker
from .buffer_pool import BufferPool
from .staged_part import StagedPart


def check_data(data) -> tuple[np.ndarray, np.ndarray]:
    """Return the (num_edges,) sources and targets of a homogeneous graph.

    Raises:
        ValueError: it is not a homogeneous `Data`, has no `edge_index`, or one with ids out of range.
    """
    from torch_geometric.data import Data

    if not isinstance(data, Data):
        raise ValueError(
            f"data must be a torch_geometric.data.Data or HeteroData, got {type(data).__name__}: other graphs need "
            "torch_geometric's own loaders"
        )
    if data.edge_index is None:
        other = next((name for name in ("adj_t", "adj") if name in data), None)
        remedy = f"set it from data.{other}" if other else "set it to a (2, num_edges) tensor of node ids"
        raise ValueError(f"data has no edge_index: {remedy}")
    edge_index = data.edge_index
    edge_index = edge_index.as_tensor() if hasattr(edge_index, "as_tensor") else torch.as_tensor(edge_index)
    if edge_index.ndim != 2 or len(edge_index) != 2 or edge_index.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"data.edge_index must be integers of shape (2, num_edges), got {edge_index.dtype} of shape "
            f"{tuple(edge_index.shape)}"
        )
    if data.num_nodes is None:
        raise ValueError("data.num_nodes is not known: set it")
    check_layouts("data", data._store)
    sources, targets = edge_index.cpu().numpy()
    for row, ids in enumerate((sources, targets)):
        if len(ids) and not (ids.min() >= 0 and ids.max() < data.num_nodes):
            raise ValueError(
                f"data.edge_index[{row}] must be in [0, {data.num_nodes}), data.num_nodes, got {ids.min()} to "
                f"{ids.max()}"
            )
    return sources, targets


def check_layouts(name: str, store) -> None:
    """Refuse attributes from which torch cannot take rows.

    Args:
        name: What the store is called.
        store: PyG's storage of one node type or edge type, or of a whole `Data`.

    Raises:
        ValueError: one is sparse by rows, columns or blocks.
    """
    for key, value in store.items():
        if isinstance(value, Tensor) and value.layout not in (torch.strided, torch.sparse_coo) and key not in _WHOLE:
            layout = str(value.layout).removeprefix("torch.")
            raise ValueError(
                f"{name}.{key} is {layout}, of which torch takes no rows: pass .to_dense(), or .to_sparse_coo()"
            )


def compress(
    sources: np.ndarray, targets: np.ndarray, num_nodes: int, is_sorted: bool
) -> tuple[CSC, np.ndarray | None]:
    """Group edges by target as PyG does, so that whole neighbourhoods come in its order.

    Args:
        sources, targets: (num_edges,) integers in [0, num_nodes).
        num_nodes: number of rows.
        is_sorted: targets ascend: edges keep their order. False: PyG's `index_sort`, whose order of edges into one
            node is that of torch's sort, which is not stable and may differ from one kind of machine to another.

    Returns:
        CSC whose rows are NOT ascending, indices of `id_dtype(num_nodes)`; and order, (num_edges,): edge i of the CSC
        is edge order[i] of the input, None where they are the same.

    Raises:
        ValueError: is_sorted, and targets do not ascend.

    Cost: O(num_edges log num_edges) time, O(num_edges) where they are sorted.
    """
    order = None
    if is_sorted:
        descents = np.flatnonzero(targets[1:] < targets[:-1])
        if len(descents):
            raise ValueError(
                f"is_sorted=True needs data.edge_index[1] ascending, got {targets[descents[0]]} before "
                f"{targets[descents[0] + 1]}: pass is_sorted=False"
            )
    else:
        from torch_geometric.utils import index_sort

        order = index_sort(torch.from_numpy(targets))[1].numpy()
        sources = sources[order]
        order = order.astype(id_dtype(len(order)), copy=False)
    indptr = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(np.bincount(targets, minlength=num_nodes), out=indptr[1:])
    return CSC(indptr, sources.astype(id_dtype(num_nodes))), order


_WHOLE = ("adj", "adj_t")  # no rows are taken from these
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # views of dtypes that numpy lacks


@dataclass(frozen=True, eq=False)
class DataBatchMaker(BatchMaker):
    """Sample one batch and cut the user's `Data` down to it; may be called from several threads at once.

    PyG decides for each batch what is a node's or an edge's attribute, and along which dimension: an attribute that
    the user replaces takes effect, as in PyG's loader.

    Args:
        sampler: a `NeighborSampler`.
        data: a homogeneous `torch_geometric.data.Data`.
        both_ways: Whether batches have the reverse of each sampled edge, as PyG's "bidirectional" means it.
        edge_order: (num_edges,) the user's number of each edge of the graph, None where they are the same.
        input_id: (num_nodes,) what the batch names as `input_id` for each seed, None for the seed itself.
    """

    data: Any = None
    both_ways: bool = False
    edge_order: np.ndarray | None = None
    input_id: np.ndarray | None = None

    def build(self, staged: StagedPart, items: np.ndarray, key: int):
        """Return the `Data` of (items, key).

        Args:
            staged: the whole graph.
            items: (num_seeds,) the batch's seeds.
            key: uint64, see `rng.batch_key`.
        """
        with self._workspace(staged.graph) as space:
            sampled = self.sampler.sample(staged.state, items, key, space, self.pool.take, True, with_row_scale=False)
        if sampled.stream is not None:
            order = None if self.both_ways else staged.on_device(self._order_there)
            if order is not None:
                return self._build_there(items, sampled, *order)
            sampled = on_host(sampled, self.pool.take)
        edge_index, e_id = torch.from_numpy(sampled.edge_index), torch.from_numpy(self._user_edges(sampled.e_id))
        if self.both_ways:
            edge_index, e_id = _both_ways(edge_index, e_id)
            sampled = sampled._replace(num_sampled_nodes=None, num_sampled_edges=None)
        batch = self._cut(torch.from_numpy(sampled.n_id), edge_index, e_id)
        return self._describe(batch, items, sampled)

    def _order_there(self, staged: StagedPart) -> tuple[Tensor | None] | None:
        """Return `edge_order` on the sampler's device; None where that has no space for it."""
        if self.edge_order is None:
            return (None,)
        if not self.sampler.fits(self.edge_order.nbytes):
            return None
        return (placing(self.sampler.on, True)(self.edge_order),)

    def _build_there(self, items: np.ndarray, sampled: Subgraph, order: Tensor | None):
        """Return the `Data` of a subgraph that stayed on a device, with attributes of the host by ids that are copied.

        The host waits for it, in the thread that makes batches: PyG's batch has no place for an event.
        """
        with sampled.stream.running():
            e_id = sampled.e_id if order is None else order[sampled.e_id].long()
            made = MadeOnDevice.begin(sampled.stream, [sampled.n_id, e_id])
            batch = self._cut(sampled.n_id, sampled.edge_index, e_id, made)
            batch = self._describe(batch, items, sampled)
            sampled.stream.mark().synchronize()
        return batch

    def _user_edges(self, edges: np.ndarray) -> np.ndarray:
        if self.edge_order is not None:
            read_hop(self.edge_order, edges, 0, len(edges), edges)
        return edges

    def _cut(self, n_id: Tensor, edge_index: Tensor, e_id: Tensor, made: MadeOnDevice | None = None):
        """Return a copy of the data with node attributes at n_id and edge attributes at e_id.

        Args:
            made: Has both on the host, where they are on a device; None: they are on the host.
        """
        data = self.data
        batch = copy.copy(data)

        def at(key: str, value: Any, number: int) -> Any:
            index = (n_id, e_id)[number]
            if made is not None and not (is_tensor(value) and value.device == index.device):
                index = torch.from_numpy(made.read()[number])
            return self._select(key, value, index)

        for key, value in data._store.items():
            if key == "edge_index":
                batch[key] = edge_index.to(value.device) if made is None else edge_index
            elif key == "num_nodes":
                batch.num_nodes = len(n_id)
            elif data.is_node_attr(key):
                batch[key] = at(key, value, 0)
            elif data.is_edge_attr(key):
                batch[key] = at(key, value, 1)
        for key, value in (("n_id", n_id), ("e_id", e_id)):
            if key not in batch:
                batch[key] = value
        return batch

    def _select(self, key: str, value, index: Tensor):
        """Return the attribute at the index: in pooled memory where its rows lie one after another in host memory."""
        dim = self.data.__cat_dim__(key, value, self.data._store)
        if dim == 0 and _as_table(value) is not None:
            return _rows(self.pool, value, index)
        from torch_geometric.loader.utils import index_select

        return index_select(value, index.to(value.device) if is_tensor(value) else index, dim=dim)

    def _describe(self, batch, items: np.ndarray, sampled: Subgraph):
        if sampled.num_sampled_nodes is not None:
            batch.num_sampled_nodes, batch.num_sampled_edges = sampled.num_sampled_nodes, sampled.num_sampled_edges
        if sampled.edge_weight is not None:
            batch.edge_weight = torch.as_tensor(sampled.edge_weight)
            batch.averaging_weights = sampled.averaging_weights
        batch.input_id = torch.from_numpy(items.copy() if self.input_id is None else self.input_id[items])
        batch.batch_size = len(items)
        return batch


def _as_table(value) -> np.ndarray | None:
    """Return a numpy view with the value's rows, or None where there is none."""
    if isinstance(value, np.ndarray):
        return value if value.flags.c_contiguous and not value.dtype.hasobject else None
    plain = type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu"
    if not plain or value.requires_grad or value.is_conj() or value.is_neg() or not value.is_contiguous():
        return None
    try:
        return value.numpy()
    except TypeError:  # bfloat16 and the like
        return value.view(_RAW[value.element_size()]).numpy() if value.element_size() in _RAW else None


def _rows(pool: BufferPool, value, index: Tensor) -> Tensor:
    """Return rows of a view of `_as_table`, in pooled memory."""
    table = _as_table(value)
    out = pool.take((len(index), *table.shape[1:]), table.dtype)
    gathered = torch.from_numpy(gather_rows(table, index.numpy(), out))
    return gathered.view(value.dtype) if isinstance(value, Tensor) else gathered


def _both_ways(edge_index: Tensor, e_id: Tensor) -> tuple[Tensor, Tensor]:
    """Return each edge in both directions, once: PyG's own rule."""
    from torch_geometric.sampler.utils import to_bidirectional

    row, col, e_id = to_bidirectional(*edge_index, *edge_index, e_id, e_id)
    return torch.stack([row, col]), e_id


@dataclass(frozen=True, eq=False)
class SampledBatchMaker(BatchMaker):
    """Let one of PyG's loaders make each batch from the samples of a `DataSampler`; in several threads at once.

    Args:
        sampler: Hands out positions in the loader's input.
        pool: Memory of the batches' wide attributes, which PyG would copy into new memory at several times the cost.
        loader: A `NodeLoader` or `LinkLoader`, whose sampler is the next argument; only used to make batches.
        data_sampler: Samples by the key of the batch.
    """

    loader: Any = None
    data_sampler: Any = None

    def build(self, staged: StagedPart, items: np.ndarray, key: int):
        """Return the `Data` or `HeteroData` of (items, key); arguments as in `BatchMaker.build`."""
        loader = copy.copy(self.loader)
        loader.filter_per_worker = False
        with self.data_sampler.keyed(key):
            sampled = type(loader).collate_fn(loader, torch.from_numpy(items))
        if loader.transform_sampler_output is not None:
            sampled, loader.transform_sampler_output = loader.transform_sampler_output(sampled), None
        loader.data, tables = _without_columns(loader.data)
        whole = _take_ends(loader.data, sampled)
        batch = type(loader).filter_fn(loader, sampled)
        for edge_type, edge_index in whole.items():
            store = batch if edge_type is None else batch[edge_type]
            store.edge_index = edge_index.to(store.edge_index.device)
        for node_type, name, value, of_edges in tables:
            index = sampled.edge if of_edges else sampled.node
            index = index if node_type is None else index[node_type]
            if index is not None:  # as PyG has it where both directions of several edge types are asked for
                index = index.to(torch.int64).cpu()
                (batch if node_type is None else batch[node_type])[name] = _rows(self.pool, value, index)
        values = getattr(self.loader.data[0], "edge_values", None) if isinstance(self.loader.data, tuple) else None
        for name, value in {} if values is None else values(batch.e_id.numpy()).items():
            batch[name] = value  # PyG leaves these in its stores
        return batch


def _take_ends(data, sampled) -> dict[tuple | None, Tensor]:
    """Take the ends of edges out of PyG's sample where they are the halves of one tensor, so that it makes no copy.

    Returns:
        That (2, num_edges) tensor by edge type; by None where `data` has one.
    """
    from torch_geometric.data import Data, HeteroData

    whole = {}
    if not isinstance(data, Data | HeteroData):
        return whole
    several = isinstance(data, HeteroData)
    for edge_type, store in data.edge_items() if several else [(None, data)]:
        row, col = (ends.get(edge_type) if several else ends for ends in (sampled.row, sampled.col))
        both = None if row is None or col is None else row._base
        halves = both is not None and both is col._base and len(both) == 2 * len(row)
        if not halves or row.data_ptr() != both.data_ptr() or "edge_index" not in store:
            continue
        whole[edge_type] = both.view(2, -1)
        if several:
            sampled.row[edge_type], sampled.col[edge_type] = row[:0], col[:0]
        else:
            sampled.row, sampled.col = row[:0], col[:0]
    return whole


def _without_columns(data) -> tuple[Any, list[tuple]]:
    """Return a copy of a graph whose tables have no columns left, so that PyG's filter copies nothing of them.

    Returns:
        The copy; and of each table its node type or edge type (None where there is one), its name, the table, and
        whether it is of edges. Of PyG's stores: the stores, and no tables.
    """
    from torch_geometric.data import Data, HeteroData

    if not isinstance(data, Data | HeteroData):
        return data, []
    thin, tables = copy.copy(data), []
    if isinstance(data, Data):
        stores = [(None, data._store, thin._store, of_edges) for of_edges in (False, True)]
    else:
        stores = [(node_type, store, thin[node_type], False) for node_type, store in data.node_items()]
        stores += [(node_type, store, thin[node_type], True) for node_type, store in data.edge_items()]
    for node_type, store, rest, of_edges in stores:
        for name, value in store.items():
            if getattr(value, "ndim", 0) < 2 or data.__cat_dim__(name, value, store) != 0 or _as_table(value) is None:
                continue
            if store.is_edge_attr(name) if of_edges else store.is_node_attr(name):
                tables.append((node_type, name, value, of_edges))
                rest[name] = value[:, :0]
    return thin, tables
