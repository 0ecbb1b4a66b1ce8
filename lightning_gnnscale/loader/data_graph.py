"""The graph of a PyG `Data`, checked and compressed in the order that PyG's own samplers would read it in."""

import numpy as np
import torch

from ..graph import CSC, id_dtype


def check_data(data) -> tuple[np.ndarray, np.ndarray]:
    """Return the (num_edges,) sources and targets of a homogeneous graph.

    Raises:
        ValueError: it is not a homogeneous `Data`, has no `edge_index`, or one with ids out of range.
    """
    from torch_geometric.data import Data

    if not isinstance(data, Data):
        raise ValueError(
            f"data must be a homogeneous torch_geometric.data.Data, got {type(data).__name__}: other graphs need "
            "torch_geometric's NeighborLoader"
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
    sources, targets = edge_index.cpu().numpy()
    for row, ids in enumerate((sources, targets)):
        if len(ids) and not (ids.min() >= 0 and ids.max() < data.num_nodes):
            raise ValueError(
                f"data.edge_index[{row}] must be in [0, {data.num_nodes}), data.num_nodes, got {ids.min()} to "
                f"{ids.max()}"
            )
    return sources, targets


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
