"""What is known of nodes and edges besides the edges themselves: named columns, and how one is read and checked."""

import mmap
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..edge_stream.options import split_columns, table_path
from ..edge_stream.relations import HeteroStream
from ..edge_stream.stream import backing_memmap
from ..errors import UNREADABLE, EdgeStreamError, short, why_no_array
from ..foreign import csr_of, is_csr, is_sparse
from ..graph import Batch
from ..object_store import is_url, local_copy, query_of
from ..values import ALWAYS, exact_times, of_tensor, refuse_masked, refuse_outside

_NAMES_OF_BATCHES = {*vars(Batch), "n_id", "e_id", "edge_index", "indptr", "indices", "degree", "batch_size", "part"}
_NAMES_OF_BATCHES |= {"key", "num_nodes", "num_edges"}


class CSRArrays(NamedTuple):
    """Sparse node features, one row a node.

    Attributes:
        indptr: (num_nodes + 1,) int64.
        indices: (num_nonzeros,) int32, columns.
        data: (num_nonzeros,) values, any real dtype.
        shape: (num_nodes, dim).
    """

    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray
    shape: tuple[int, int]


class EdgeColumn(NamedTuple):
    """How a column of the edges is stored, and what it is called elsewhere.

    Attributes:
        in_batch: Its name in a `MiniBatch`.
        in_type: Its name among the columns of one edge type, see `hetero_graph`.
        dtype: As stored; None: as given.
        num_dims: 1, or 2 for rows of several values.
        without: The value of edges whose edge type has none.
    """

    in_batch: str
    in_type: str
    dtype: Any = None
    num_dims: int = 1
    without: int = 0


# By the names of their files. A column added here and to `EdgeColumns` is written, verified and mapped like the others.
EDGE_COLUMNS = {
    "edge_weight": EdgeColumn("edge_weight", "weight", np.float32, without=1),
    "edge_features": EdgeColumn("edge_attr", "features", num_dims=2),
    "edge_time": EdgeColumn("edge_time", "time", np.int64, without=ALWAYS),
    "edge_label": EdgeColumn("edge_label", "labels", np.int32, without=-1),
}
TABLES = {"features", *(name for name, column in EDGE_COLUMNS.items() if column.num_dims > 1)}  # several values a row


@dataclass(kw_only=True)
class EdgeColumns:
    """An argument for each of `EDGE_COLUMNS`, which all descriptions of a graph and of its changes take."""

    edge_weight: Any = None
    edge_features: Any = None
    edge_time: Any = None
    edge_label: Any = None


@dataclass(kw_only=True)
class Columns(EdgeColumns):
    """What is known of nodes and edges besides the edges themselves, in original order; a `GraphDataset` has it too.

    Args:
        features: (num_nodes, dim) array, memmap or .npy path of any number dtype; a scipy CSR matrix; or
            (indptr, indices, data, shape); or a dict of these by node type. With `node_ids` of the stream, row i is
            about `np.asarray(stream.node_ids)[i]`, the ids by first appearance, which nothing here can check.
        labels: (num_nodes,) classes, -1 (or NaN) unknown; or (num_nodes, num_labels).
        masks: Name to (num_nodes,) bool; or a column of the words train, val and test, see `GraphDataset`.
        edge_weight: (num_edges,) by source edge id. edge_features: (num_edges, dim) by source edge id.
        feature_storage: How features are stored: None, as given; "float32" or "float16"; "bfloat16", dense rows of 2
            bytes a value, rounded to nearest (an odd number of columns takes 2 bytes more), which are read as float32
            or into tensors of bfloat16 without loss; "int8" or "int4", dense rows quantised to 8 or 4 bits with a scale
            per row, off by at most half a scale (a row's largest magnitude / 127, or / 7) and decoded to float32 as
            batches are filled. A row with values that are not finite is all NaN then.
        edge_storage: How neighbours are stored: None, as ids of 4 or 8 bytes; "delta", as the difference to the one
            before, in as few bits as it takes: fewer bytes to read, and time to decode them.
        node_time, edge_time: (num_nodes,) and (num_edges,) integers, when a node or an edge is there; the reverse of an
            edge is there when it is.
        regression: whether labels are numbers to predict, (num_nodes,) or (num_nodes, num_targets) with NaN = unknown.
        edge_label: (num_edges,) integers by source edge id, class of each edge from 0, -1 = unknown; or None.
        node_columns: Further columns of the nodes by name, each given as `features` is: batches have them in `columns`.
    """

    features: Any = None
    labels: Any = None
    masks: Any = None
    feature_storage: str | None = None
    edge_storage: str | None = None
    node_time: Any = None
    regression: bool = False
    node_columns: Any = None

    @classmethod
    def of(cls, given: Any) -> "Columns":
        """Return the columns of a `GraphDataset`, or these, with masks by name.

        Raises:
            ValueError: it has no columns.
        """
        if not hasattr(given, "edge_label"):
            raise ValueError(f"columns must be a GraphDataset or Columns, got {type(given).__name__}: give features=")
        return cls(**{f.name: getattr(given, f.name) for f in fields(cls)} | {"masks": masks_by_name(given.masks)})


def load_arrays(stream, columns: Columns) -> dict[str, Any]:
    """Return the arrays of nodes and edges as `StoreInputs` holds them, by its names; the stream is counted.

    Raises:
        ValueError: one has another shape or dtype than the graph asks for.
    """
    num_nodes, num_edges = stream.count()
    masks = sorted(masks_by_name(columns.masks).items())
    return {
        "features": _load_node_rows(columns.features, stream, num_nodes),
        "node_columns": {
            checked_name(name): _load_node_rows(rows, stream, num_nodes, f"node_columns[{name!r}]")
            for name, rows in (columns.node_columns or {}).items()
        },
        "labels": one_column(_load_rows("labels", columns.labels, num_nodes, (1, 2))),
        "masks": {str(name): _load_mask(name, mask, num_nodes) for name, mask in masks},
        "node_time": _load_times("node_time", columns.node_time, num_nodes),
        **{name: _load_edge_column(name, getattr(columns, name), num_edges) for name in EDGE_COLUMNS},
    }


def checked_name(name: Any) -> str:
    """Return the name of a node column; ValueError unless it is a plain word that a batch does not use itself."""
    if not str(name).isidentifier() or str(name) in _NAMES_OF_BATCHES:
        raise ValueError(
            "node_columns: a name must be a plain word that batches do not use themselves, such as image, got "
            f"{short(name)}"
        )
    return str(name)


def _load_node_rows(rows, stream, num_nodes: int, name: str = "features") -> Any:
    """Return rows of all nodes, or a dict of rows by the number of their node type."""
    try:
        if isinstance(rows, Mapping):
            return features_by_node_type(rows, stream)
        return load_features(rows, num_nodes)
    except ValueError as error:
        if name == "features":
            raise
        told = str(error)
        raise ValueError(f"{name}{told.removeprefix('features')}" if told.startswith("features") else told) from None


def features_by_node_type(features: Mapping, stream) -> dict[int, np.ndarray | CSRArrays]:
    """Return features by the number of their node type."""
    if not isinstance(stream, HeteroStream):
        raise ValueError("features by node type need a heterogeneous graph: give one array, or say gs.hetero_graph")
    names, loaded = stream.schema.node_types, {}
    unknown = sorted(set(features) - set(names))
    if unknown:
        raise ValueError(f"features: no node type {unknown[0]!r}, allowed: {', '.join(names)}")
    for number, (name, count) in enumerate(zip(names, np.diff(stream.type_offsets), strict=True)):
        if features.get(name) is not None:
            try:
                loaded[number] = load_features(features[name], int(count))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return loaded


def _load_times(name: str, times, num_rows: int) -> np.ndarray | None:
    times = _load_rows(name, times, num_rows, (1,), "fiubmMO")
    return None if times is None else exact_times(name, times)


def _load_edge_column(name: str, given, num_edges: int) -> np.ndarray | None:
    """Return a column of the edges as given, checked against how it is stored: int64 are times, int32 classes."""
    column = EDGE_COLUMNS[name]
    if column.dtype is np.int64:
        return _load_times(name, given, num_edges)
    values = _load_rows(name, given, num_edges, (column.num_dims,))
    if values is None or column.dtype is not np.int32:
        return values
    if values.dtype.kind not in "iub":
        raise ValueError(f"{name} must be integers from 0, -1 = unknown, got {values.dtype}")
    if values.dtype.kind != "b":
        refuse_outside(name, values, -1, 2**31 - 1, "edge")
    return values


def load_features(features, num_nodes: int) -> np.ndarray | CSRArrays | None:
    """Return features of `num_nodes` rows as an array (memory-mapped where a path is given) or as a CSRArrays.

    They may be an array, a memmap, a table, a tensor, or the path of .npy, .parquet or .csv; a sparse matrix of SciPy
    or torch; or (indptr, indices, data, shape).
    """
    if features is None:
        return None
    sparse = csr_of(features)
    features = features if sparse is None else sparse
    if isinstance(features, tuple) and len(features) == 4:
        return _sparse_source(*features, num_nodes)
    return _load_rows("features", features, num_nodes, (2,))


def _sparse_source(indptr, indices, data, shape, num_nodes: int) -> CSRArrays:
    source = CSRArrays(*(np.asarray(of_tensor(one)) for one in (indptr, indices, data)), tuple(int(s) for s in shape))
    if source.shape[0] != num_nodes or len(source.indptr) != num_nodes + 1:
        told = _without_edges("features", num_nodes, source.shape)
        raise ValueError(f"features must have {num_nodes} rows, got CSR of shape {source.shape}{told}")
    lengths_fit = len(source.indices) == len(source.data) == source.indptr[-1] and source.indptr[0] == 0
    if not lengths_fit or (source.indptr[1:] < source.indptr[:-1]).any():
        raise ValueError("features: CSR indptr must rise from 0 to the number of indices and values")
    if source.shape[1] > np.iinfo(np.int32).max:
        raise ValueError(f"features: CSR may have at most 2**31 - 1 columns, got {source.shape[1]}")
    if source.indptr.dtype.kind not in "iu" or source.indices.dtype.kind not in "iu":
        raise ValueError(
            f"features: CSR indptr and indices must be integers, got {source.indptr.dtype}, {source.indices.dtype}"
        )
    if source.data.dtype.kind not in "fiub" or source.data.dtype.itemsize > 8:
        raise ValueError(f"features: CSR values must be numbers of at most 8 bytes, got {source.data.dtype}")
    return source


def read_rows(where: str, rows: Any) -> Any:
    """Return features as a data set holds them: sparse ones as CSR, others as `read_values` gives them."""
    if is_sparse(rows):
        return CSRArrays(*load_features(rows, rows.shape[0]))
    if type(rows) is tuple and len(rows) == 4:
        return CSRArrays(*rows)
    if is_csr(rows):
        return rows
    found = read_values(where, rows)
    return found[:, None] if isinstance(rows, str | os.PathLike) and np.ndim(found) == 1 else found


def read_values(where: str, values: Any, keep_path: bool = True) -> Any:
    """Return values of a column as an array, one a row; where: what they are of, for messages.

    With `keep_path` a path of .npy stays a path, so that each process maps the file itself.

    Raises:
        ValueError: no such file, or nothing that numpy can hold.
    """
    if isinstance(values, str | os.PathLike):
        if not named_file(values).is_file() and "://" not in str(values):
            raise ValueError(f"{where}: no such file: {values}")
        if keep_path and table_path(values) is None and query_of(values) is None:
            return values
    try:
        return np.asanyarray(of_tensor(opened(values)))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _without_edges(name: str, num_nodes: int, shape: tuple[int, ...]) -> str:
    """Return the remedy for more rows than nodes named by edges; "" where that is not the fault."""
    if name.startswith("edge") or not shape or shape[0] <= num_nodes:
        return ""
    return f": the graph has {num_nodes} nodes; if the last have no edges, give num_nodes={shape[0]} where it is opened"


def _load_rows(name: str, array, num_rows: int, ndims: tuple[int, ...], kinds: str = "fiub") -> np.ndarray | None:
    if array is None:
        return None
    if isinstance(array, str | os.PathLike) and not is_url(array) and not named_file(array).is_file():
        raise ValueError(f"{name}: no such file: {array}")
    file = f" (file {array})" if isinstance(array, str | os.PathLike) else ""
    try:
        array = np.asarray(opened(array))
    except TypeError as error:
        raise ValueError(f"{name}: numpy cannot hold it: {error}") from None
    if array.ndim not in ndims or array.shape[0] != num_rows:
        wanted = " or ".join(f"({num_rows}{', columns' * (ndim - 1)})" for ndim in ndims)
        raise ValueError(
            f"{name} must have shape {wanted}, got {array.shape}{file}{_without_edges(name, num_rows, array.shape)}"
        )
    if array.dtype.kind not in kinds or array.dtype.itemsize > 8:
        raise ValueError(f"{name} must be numbers or booleans of at most 8 bytes, got {array.dtype}{file}")
    return array


def named_file(path: str | os.PathLike) -> Path:
    """Return the file of a path that may name columns of the file, or the database of a query."""
    query, found = query_of(path), table_path(path)
    if query is not None:
        return Path(query[0])
    return Path(path) if found is None else found[0]


def one_column(labels):
    """Labels of shape (num_nodes, 1) are single labels."""
    return labels[:, 0] if np.ndim(labels) == 2 and np.shape(labels)[1] == 1 else labels


_SPLITS = {"train": ["train"], "val": ["val", "valid", "validation"], "test": ["test"]}


def masks_by_name(masks) -> dict[str, Any]:
    """Return masks by name: those given so as they are, or made of a column of words.

    Args:
        masks: {"train": mask, ...}; None; or (num_nodes,) words, an array, a column or its path ("nodes.csv:split"). A
            node is in the mask train, val (also valid, validation) or test of its word, in any case of letters; with
            another word or none it is in no mask.

    Raises:
        ValueError: the column holds no words, or none of these three.
    """
    if masks is None or isinstance(masks, Mapping):
        return dict(masks or {})
    from ..edge_stream.table import marked_by_words

    if isinstance(masks, str | os.PathLike):
        masks = local_path(masks)
        if table_path(masks) is None and query_of(masks) is None:
            masks = opened(masks)
    try:
        found, others = marked_by_words(masks, _SPLITS)
    except (ValueError, EdgeStreamError) as error:
        raise ValueError(f"masks: {error}") from None
    empty = [name for name, mask in found.items() if not mask.any()]
    if len(empty) == len(found):
        raise ValueError(f"masks: none of the words {', '.join(found)} is there, the column holds {', '.join(others)}")
    if empty and others:
        warnings.warn(
            f"masks: no node is in {' or in '.join(empty)}; nodes with {', '.join(others)} are in no mask", stacklevel=2
        )
    return {name: mask for name, mask in found.items() if name not in empty}


def _load_mask(name: str, mask, num_nodes: int) -> np.ndarray:
    mask = np.asarray(of_tensor(opened(mask)))
    if not str(name).isidentifier():
        raise ValueError(f"masks: a name must be a plain word, got {short(name)}")
    if mask.dtype != bool or mask.shape != (num_nodes,):
        raise ValueError(
            f"masks[{name!r}] must be bool of shape ({num_nodes},), got {mask.dtype} of shape {mask.shape}"
            + (" (indices become a mask by mask[indices] = True)" if mask.dtype != bool else "")
            + _without_edges("masks", num_nodes, mask.shape)
        )
    return mask


def opened(array):
    """Return an array as it is, tables, columns and tensors as arrays, or the file at a path.

    A .npy file is memory-mapped, a table file (Parquet, .csv, .tsv) and a query read; one at a URL is fetched first.

    Raises:
        ValueError: the file holds no array that can be mapped.
    """
    if not isinstance(array, str | os.PathLike):
        refuse_masked("array", array)
        return of_tensor(array) if isinstance(array, np.ndarray) else _as_rows(array)
    path = local_path(array)
    if table_path(path) is not None or query_of(path) is not None:
        return _as_rows(path)
    try:
        return np.load(path, mmap_mode="r")
    except UNREADABLE as error:
        raise ValueError(f"{array}: not a .npy file that numpy can map ({why_no_array(error)})") from None


def local_path(path: str | os.PathLike, storage_options: Mapping | None = None) -> str | os.PathLike:
    """Return a path as it is, or that of the copy of a URL, with the columns that it names."""
    if not is_url(path):
        return path
    file, columns = split_columns(path)
    local = str(local_copy(file, storage_options))
    return local if columns is None else f"{local}:{columns}"


def _as_rows(values):
    from ..edge_stream.table import rows_of  # imports pyarrow

    return rows_of(values)


def check_whole(array) -> None:
    """Refuse to read on in a memory map whose file was cut short: the system would end the process by a signal.

    Args:
        array: any array; those that no file backs pass.

    Raises:
        ValueError: the file ends before the array does; names it.
    """
    memmap = backing_memmap(array)
    if memmap is None or memmap.filename is None:
        return
    need = memmap.offset - memmap.offset % mmap.ALLOCATIONGRANULARITY + len(memmap._mmap)
    try:
        size = os.stat(memmap.filename).st_size
    except FileNotFoundError:
        return  # its bytes stay as long as they are mapped
    if size < need:
        raise ValueError(f"{memmap.filename}: cut short while it was read: {need} bytes were there, {size} are left")
