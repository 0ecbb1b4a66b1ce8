"""Edges of a PyG `Data` object."""

import dataclasses
from collections.abc import Iterator

from ..errors import EdgeStreamError
from .array import ArrayStream
from .options import StreamOptions


def is_pyg_data(source) -> bool:
    """Whether the source has PyG's `edge_index`; nothing is imported for the answer."""
    return hasattr(source, "edge_index") or hasattr(source, "adj_t")


def open_pyg(data, options: StreamOptions) -> ArrayStream:
    """Stream `data.edge_index` (2, num_edges); num_nodes is the data's own where the options do not say.

    Raises:
        EdgeStreamError: the data has no edge_index, or it holds no integers.
    """
    name = type(data).__name__
    if getattr(data, "edge_index", None) is None:
        raise EdgeStreamError(f"{name}: has no edge_index; convert adj_t with torch_geometric.transforms or give edges")
    if options.num_nodes is None and not options.relabel:
        options = dataclasses.replace(options, num_nodes=_known_num_nodes(data))
    return ArrayStream(f"{name}.edge_index", data.edge_index, options)


def _known_num_nodes(data) -> int | None:
    """Return what the data says of its nodes, without PyG's guess from the largest id."""
    return next((count for count in _node_counts(data) if count is not None), None)


def _node_counts(data) -> Iterator[int | None]:
    keys = data.keys() if callable(getattr(data, "keys", None)) else ()
    if "num_nodes" in keys:
        yield int(data.num_nodes)
    for key in ("x", "y", "pos", "train_mask"):
        value = getattr(data, key, None)
        if value is not None and getattr(value, "ndim", 0) > 0:
            yield int(value.shape[0])
