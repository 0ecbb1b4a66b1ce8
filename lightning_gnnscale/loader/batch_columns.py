"""The columns of a part's nodes and edges, looked up by name and read for a batch, in pooled memory."""

import math
from typing import Any

import numpy as np
import torch

from ..graph import MASK_NAMES
from ..jit import kernel
from ..partition_store.features import SparseRows
from ..partition_store.part_graph import SeenEdges, WholeGraph
from ..partition_store.typed_features import TypedRows
from ..sampler.minibatch import MiniBatch, columns_of, rows_by_node_type, sparse_rows_to_torch
from ..sampler.protocol import Allocate, Subgraph
from ..triton_kernels.gather_rows import gather_rows
from .staged_part import StagedPart

OF_EDGES = columns_of("edges")
_SMALL_BYTES = 1 << 15  # up to which new memory costs less than pooled memory


def with_rows(batch: MiniBatch, rows: Any) -> MiniBatch:
    """Give a batch its feature rows, as `Column.read` returns them, and return it."""
    found = tensors(rows)
    if isinstance(rows, TypedRows):
        batch.x_by_node_type = found
    elif isinstance(rows, SparseRows):
        batch.x_csr = found
    else:
        batch.x_dense = found
    return batch


def tensors(rows: Any) -> Any:
    """Return rows as `Column.read` gives them in tensors that share their memory."""
    if isinstance(rows, TypedRows):
        return rows_by_node_type(rows)
    return sparse_rows_to_torch(rows) if isinstance(rows, SparseRows) else torch.from_numpy(rows)


def read_column(values: np.ndarray, ids: np.ndarray, allocate: Allocate, dtype: Any = None) -> torch.Tensor:
    """Return the values of (num,) nodes or edges.

    Args:
        values: (num_rows, ...) the column.
        ids: (num,) integers in [0, num_rows).
        allocate: Gives the memory of all but small results, for example `BufferPool.take`.
        dtype: What batches have; None: the column's.
    """
    shape = (len(ids), *values.shape[1:])
    if math.prod(shape) * values.itemsize <= _SMALL_BYTES:
        found = np.asarray(values)[ids]
    elif dtype is not None and values.dtype != dtype and values.ndim == 1:
        found = allocate(shape, dtype)
        found[:] = gather_rows(values, ids, allocate(shape, values.dtype))
    else:
        found = gather_rows(values, ids, allocate(shape, values.dtype))
    return torch.from_numpy(found if dtype is None else found.astype(dtype, copy=False))


def node_data(staged: StagedPart, local: np.ndarray, allocate: Allocate) -> dict[str, torch.Tensor]:
    """Return degree, masks and the other columns of (num_nodes,) local ids, by their names in a batch."""
    graph = staged.graph
    degree = np.float32 if graph.degree.dtype.kind == "f" else np.int64
    data = {"degree": read_column(graph.degree, local, allocate, degree)}
    if graph.self_weight is not None:
        data["self_weight"] = read_column(graph.self_weight, local, allocate)
    if staged.mask_names:
        bits = read_column(staged.masks, local, allocate).numpy()
        for name in staged.mask_names:
            own = np.uint8(1 << MASK_NAMES.index(name))
            data[f"{name}_mask"] = torch.from_numpy(np.not_equal(bits & own, 0, out=allocate(local.shape, np.bool_)))
    for name, values in staged.nodes.items():
        data[name] = read_column(values, local, allocate, staged.dtypes.get(name))
    return data


def type_data(graph, n_id: np.ndarray, sampled: Subgraph, allocate: Allocate) -> dict[str, Any]:
    """Return node types, edge types and times of edges, by their names in a batch."""
    data = {"schema": graph.schema}
    given = sampled.columns or {}
    for name in ("edge_type", "edge_time"):
        values = graph.columns.get(name)
        if values is not None and name == "edge_type" and sampled.edge_type is not None:
            data[name] = torch.from_numpy(sampled.edge_type)
        elif values is not None and name in given:
            data[name] = torch.from_numpy(given[name].astype(np.int64, copy=False))
        elif values is not None:
            if sampled.e_id is None:
                raise ValueError(f"the sampler gave no e_id, by which {name} is read: fill Subgraph.e_id")
            data[name] = read_column(values, sampled.e_id, allocate, np.int64)
    if graph.node_types is not None:
        known = sampled.node_type
        data["node_type"] = torch.from_numpy(graph.node_types.type_of(n_id) if known is None else known)
    return data


def edge_data(staged: StagedPart, sampled: Subgraph, e_id: np.ndarray | None, allocate: Allocate) -> dict[str, Any]:
    """Return the columns of a batch's edges, by their names in it; e_id: (num_edges,) store positions of them."""
    data: dict[str, Any] = {"averaging_weights": sampled.averaging_weights}
    given = sampled.columns or {}
    for name in OF_EDGES:
        if name in staged.edges and not (name == "edge_weight" and keeps_weights(sampled)):
            here = name in given
            data[name] = torch.from_numpy(given[name]) if here else read_column(staged.edges[name], e_id, allocate)
    if "edge_weight" in data:
        weight = _scaled(data["edge_weight"].numpy(), sampled)
        data |= {"edge_weight": torch.from_numpy(weight), "averaging_weights": False}
    elif sampled.edge_weight is not None:
        data["edge_weight"] = torch.from_numpy(sampled.edge_weight)
    if staged.graph.seen is not None:
        data["averaging_weights"] |= "edge_weight" not in data
        corrected = _corrected(staged.graph.seen, sampled, data.get("edge_weight"), data["averaging_weights"])
        data["edge_weight"] = torch.from_numpy(corrected)
    return data


def _corrected(seen: SeenEdges, sampled: Subgraph, weight: torch.Tensor | None, is_mean: bool) -> np.ndarray:
    """Return (num_edges,) float32 weights of edges that are not always there, by which sums of messages are corrected.

    A weight w that edges have becomes w / p, p the probability that the edge is there: sums are unbiased over who holds
    which parts. Weights of a mean (those of a sampler, or 1) become (w / p) / sum(w / p) over the row, which is
    unbiased as rows get long, and stays a mean of what is there in short ones.
    """
    ends = seen.part_of[sampled.n_id]
    given = np.ones(0, np.float32) if weight is None else weight.numpy()
    out = np.empty(sampled.edge_index.shape[1], np.float32)
    inverse = 1 / np.maximum(seen.probability, 1e-12)
    _weigh_seen(sampled.indptr, sampled.edge_index[0], ends, seen.sort, inverse, given, is_mean, out)
    return out


@kernel
def _weigh_seen(indptr, sources, part_of, sort, inverse, given, is_mean, out):
    for row in range(len(indptr) - 1):
        total = 0.0
        for edge in range(indptr[row], indptr[row + 1]):
            here, there = part_of[row], part_of[sources[edge]]
            value = 1.0 if here == there else inverse[sort[here], sort[there]]
            if len(given):
                value *= given[edge]
            out[edge] = value
            total += value
        if is_mean and total > 0:
            for edge in range(indptr[row], indptr[row + 1]):
                out[edge] /= total


def pair_data(staged: StagedPart, sampled: Subgraph, allocate: Allocate) -> dict[str, torch.Tensor]:
    """Return classes and features of the links that are edges, by their names in a batch."""
    if sampled.pair_edges is None:
        given = {"edge_label": sampled.edge_label, "pair_attr": sampled.pair_attr}
        return {name: torch.from_numpy(values) for name, values in given.items() if values is not None}
    if "edge_label" not in staged.edges:
        raise ValueError("labelled=True needs classes of edges, but the store has none: write it with edge_label=")
    at = positions_of(staged.graph, sampled.pair_edges)
    data = {"edge_label": read_column(staged.edges["edge_label"], at, allocate, np.int64)}
    if "edge_attr" in staged.edges:
        data["pair_attr"] = read_column(staged.edges["edge_attr"], at, allocate)
    return data


def keeps_weights(sampled: Subgraph) -> bool:
    """Whether a sampler's own weights stand for the stored ones: it gives some, and no `row_scale` (GraphSAINT)."""
    return sampled.edge_weight is not None and sampled.row_scale is None


def _scaled(weight: np.ndarray, sampled: Subgraph) -> np.ndarray:
    """Return stored weights over the probabilities of their edges, in float32; in place where they are."""
    weight = weight.astype(np.float32, copy=False)
    if sampled.row_scale is not None:
        weight *= np.repeat(sampled.row_scale, np.diff(sampled.indptr))
    if sampled.edge_weight is not None:
        weight *= sampled.edge_weight
    return weight


def edge_ids(graph, sampled: Subgraph) -> np.ndarray:
    """Return positions in the store's edge arrays.

    Raises:
        ValueError: the sampler did not give them, or the part does not know them.
    """
    if sampled.e_id is None:
        raise ValueError(
            f"the sampler gave no e_id for part {graph.part}, by which stored edge weights and edge features are read: "
            "fill Subgraph.e_id where return_e_id is true, or write the store without both"
        )
    return positions_of(graph, sampled.e_id)


def positions_of(graph, edges: np.ndarray) -> np.ndarray:
    """Return (num,) positions in the store's edge arrays of (num,) edges of a part's CSC."""
    if isinstance(graph, WholeGraph):
        return edges
    if graph.edge_id is None:
        raise ValueError(
            f"part {graph.part} has no edge positions: its store has neither edge weights nor edge features"
        )
    return graph.edge_id[edges]
