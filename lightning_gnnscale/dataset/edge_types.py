"""The edge type of each edge of a user's file: a column of names, or of the user's own numbers."""

import os
from pathlib import Path

import numpy as np

from ..edge_stream.options import split_columns, table_path
from ..graph import GraphSchema, check_num_edge_types

NODE_TYPE = "node"  # of a graph with one node type


def column_of(edges: str, edge_type: str, name: str = "edge_type") -> str:
    """Return the path of the edge types, which may be the name of a column of the edge file; name: for messages.

    Raises:
        ValueError: a name, where the edge file has no columns to look it up in.
    """
    if table_path(edge_type) is not None or Path(edge_type).suffix == ".npy":
        return edge_type
    if table_path(edges) is None or split_columns(edges)[1] is not None:
        raise ValueError(
            f"{name}: {edge_type!r} is taken for a column, and {os.fspath(edges)} is no .csv, .tsv or .parquet file "
            "that has columns; give types.npy or types.csv:edge_type, one type an edge"
        )
    return f"{edges}:{edge_type}"


def header_of(edges: object, column: object) -> dict[str, bool]:
    """Return what a column named in a text file of edges says to its reader: the file has a header."""
    if not (isinstance(edges, str) and isinstance(column, str)) or table_path(edges) is None:
        return {}
    in_edges = (table_path(column) is None and Path(column).suffix != ".npy") or split_columns(column)[0] == edges
    return {"header": True} if in_edges and ".parquet" not in Path(edges).suffixes else {}


def numbered(edge_types: np.ndarray, path: str) -> tuple[np.ndarray, GraphSchema]:
    """Return the number of the edge type of each edge, and the names in that order, which is sorted.

    Args:
        edge_types: (num_edges,) strings or integers, as in the file.
        path: Their file, for messages.

    Raises:
        ValueError: neither strings nor integers, or a row without one.
    """
    if edge_types.ndim != 1 or edge_types.dtype.kind not in "iuUO":
        raise ValueError(
            f"edge_type: {path} must be one column of names or integers, got {edge_types.dtype} of shape "
            f"{edge_types.shape}"
        )
    if edge_types.dtype == object:
        import pyarrow as pa

        column = pa.array(edge_types, pa.string()).dictionary_encode()
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise ValueError(f"edge_type: {path} has none at row {row} (counted from 0); give each edge a type")
        found, places = column.dictionary.to_numpy(zero_copy_only=False).astype(str), column.indices.to_numpy()
        order = np.argsort(found)
        names, numbers = found[order], np.argsort(order)[places]
    else:
        names, numbers = np.unique(edge_types, return_inverse=True)
    if not len(names):
        raise ValueError(f"edge_type: {path} is empty; give each edge a type")
    check_num_edge_types(2 * len(names), "edge_type")
    return numbers, GraphSchema((NODE_TYPE,), tuple((NODE_TYPE, str(name), NODE_TYPE) for name in names))
