"""What goes into a store, checked before any work begins, and the ids of its nodes there."""

import hashlib
import json
import mmap
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..edge_stream.options import split_columns, table_path
from ..edge_stream.relations import HeteroStream
from ..edge_stream.stream import backing_file, backing_memmap, file_state, file_states
from ..errors import UNREADABLE, EdgeStreamError, why_no_array
from ..foreign import csr_of, is_csr
from ..graph import Batch, id_dtype
from ..jit import kernel
from ..object_store import is_url, local_copy
from ..traits import PartitioningTraits
from ..values import as_array, exact_times, of_tensor, refuse_masked, refuse_outside
from .array_file import little_endian
from .features import FEATURE_STORAGE, row_code, stored_form
from .manifest import EDGE_COLUMNS, type_prefix


class StoreIds(NamedTuple):
    """The two id spaces.

    Attributes:
        part_offsets: (num_parts + 1,) int64, part p owns the store ids [part_offsets[p], part_offsets[p + 1]).
        original_nid: (num_nodes,) original id of each store id.
        store_nid: (num_nodes,) store id of each original id.
    """

    part_offsets: np.ndarray
    original_nid: np.ndarray
    store_nid: np.ndarray


def relabel(part_id: np.ndarray, num_parts: int) -> StoreIds:
    """Number the nodes part by part.

    Args:
        part_id: (num_nodes,) int32 in [0, num_parts).
        num_parts: number of parts, some of which may be empty.

    Returns:
        StoreIds; the maps have `id_dtype(num_nodes)`.

    Cost: O(num_nodes + num_parts) time and two id arrays.
    """
    original_nid, part_offsets = group_by_part(part_id, num_parts, np.empty(len(part_id), id_dtype(len(part_id))))
    store_nid = np.empty_like(original_nid)
    _invert(original_nid, store_nid)
    return StoreIds(part_offsets, original_nid, store_nid)


@kernel
def group_by_part(part_id, num_parts, out):
    """Fill out with the positions of part_id sorted by part, stably; return it and the (num_parts + 1,) offsets."""
    offsets = np.zeros(num_parts + 1, np.int64)
    for i in range(len(part_id)):
        offsets[part_id[i] + 1] += 1
    for part in range(num_parts):
        offsets[part + 1] += offsets[part]
    cursor = offsets[:-1].copy()
    for i in range(len(part_id)):
        out[cursor[part_id[i]]] = i
        cursor[part_id[i]] += 1
    return out, offsets


@kernel
def _invert(original_nid, store_nid):
    for store_id in range(len(original_nid)):
        store_nid[original_nid[store_id]] = store_id


_HASH_BLOCK = 1 << 24
_NAMES_OF_BATCHES = {*vars(Batch), "n_id", "e_id", "edge_index", "indptr", "indices", "degree", "batch_size", "part"}
_NAMES_OF_BATCHES |= {"key", "num_nodes", "num_edges"}


class SparseSource(NamedTuple):
    """CSR features in original node order; any integer dtypes for the index arrays."""

    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray
    shape: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What is known of nodes and edges besides the edges themselves, in original order; a `GraphDataset` has it too.

    Args:
        features: (num_nodes, dim) array, memmap or .npy path of any number dtype; a scipy CSR matrix; or
            (indptr, indices, data, shape); or a dict of these by node type. With `node_ids` of the stream, row i is
            about `np.asarray(stream.node_ids)[i]`, the ids by first appearance, which nothing here can check.
        labels: (num_nodes,) classes, -1 (or NaN) unknown; or (num_nodes, num_labels).
        masks: Name to (num_nodes,) bool; or a column of the words train, val and test, see `GraphDataset`.
        edge_weight: (num_edges,) by source edge id. edge_features: (num_edges, dim) by source edge id.
        feature_storage: How features are stored: None, as given; "float32" or "float16"; "int8" or "int4", dense rows
            quantised to 8 or 4 bits with a scale per row, off by at most half a scale (a row's largest magnitude / 127,
            or / 7) and decoded to float32 as batches are filled. A row with values that are not finite is all NaN then.
        node_time, edge_time: (num_nodes,) and (num_edges,) integers, when a node or an edge is there; the reverse of an
            edge is there when it is.
        regression: whether labels are numbers to predict, (num_nodes,) or (num_nodes, num_targets) with NaN = unknown.
        edge_label: (num_edges,) integers by source edge id, class of each edge from 0, -1 = unknown; or None.
        node_columns: Further columns of the nodes by name, each given as `features` is: batches have them in `columns`.
    """

    features: Any = None
    labels: Any = None
    masks: Any = None
    edge_weight: Any = None
    edge_features: Any = None
    feature_storage: str | None = None
    node_time: Any = None
    edge_time: Any = None
    regression: bool = False
    edge_label: Any = None
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


@dataclass(frozen=True, kw_only=True)
class StoreInputs(Columns):
    """Everything that decides a store's bytes; columns are arrays, features also `SparseSource`, masks a dict."""

    stream: Any
    part_id: np.ndarray
    num_parts: int
    seed: int
    method: str
    options: dict
    pack_halo: bool

    @property
    def relations(self) -> HeteroStream | None:
        """The stream, where it distinguishes node types and edge types; else None."""
        return self.stream if isinstance(self.stream, HeteroStream) else None

    @property
    def typed_features(self) -> dict[int, Any]:
        """Features by number of node type where node types have features of their own, else {}."""
        return self.features if isinstance(self.features, dict) else {}

    @property
    def node_rows(self) -> Iterator[tuple[str, int | None, Any]]:
        """Yield (name of the file, node type, rows) of each table of `node_columns`; node type None: of all nodes."""
        for name, given in sorted((self.node_columns or {}).items()):
            for node_type, rows in given.items() if isinstance(given, dict) else [(None, given)]:
                yield f"{type_prefix(node_type)}column_{name}", node_type, rows

    @property
    def edge_values(self) -> dict[str, np.ndarray]:
        """The given values by edge id, by the name of their file."""
        values = {name: getattr(self, name) for name in EDGE_COLUMNS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def num_nodes(self) -> int:
        return len(self.part_id)

    @property
    def carries_edge_ids(self) -> bool:
        return bool(self.edge_values) or self.relations is not None

    def fingerprint(self) -> str:
        """Return `input_fingerprint` of these inputs."""
        partitioner = self.method, self.num_parts, self.seed, self.options
        return input_fingerprint(self.stream, *partitioner, self, self.pack_halo)


def check_inputs(stream, p, columns: Columns, pack_halo: bool) -> StoreInputs:
    """Load what is given by path, and check shapes, dtypes and ranges.

    Raises:
        ValueError: an argument does not fit the graph; the message names it, what came and what is allowed.
    """
    num_nodes, _ = stream.count()
    part_id = np.asarray(as_array("part_id", p.part_id))
    if part_id.shape != (num_nodes,):
        raise ValueError(f"part_id must have one entry per node, ({num_nodes},), got {part_id.shape}")
    if num_nodes and part_id.dtype.kind not in "iu":
        raise ValueError(f"part_id must be integers, got {part_id.dtype}")
    if not isinstance(p.num_parts, int | np.integer) or isinstance(p.num_parts, bool) or p.num_parts < 1:
        raise ValueError(f"num_parts must be an integer of at least 1, got {p.num_parts}")
    if num_nodes and not 0 <= part_id.min() <= part_id.max() < p.num_parts:
        raise ValueError(f"part_id must be in [0, {p.num_parts}), got {part_id.min()} to {part_id.max()}")
    arrays = load_arrays(stream, columns)
    check_storage(columns.feature_storage, arrays["features"])
    facts = PartitioningTraits(p)
    return StoreInputs(
        stream=stream,
        part_id=np.ascontiguousarray(part_id, dtype=np.int32),
        num_parts=int(p.num_parts),
        seed=int(facts.seed or 0),
        method=str(facts.method),
        options=dict(facts.options or {}),
        **arrays,
        pack_halo=packs_halo(pack_halo, arrays["features"]),
        feature_storage=columns.feature_storage,
        regression=bool(columns.regression) and arrays["labels"] is not None,
    )


def packs_halo(asked: bool, features) -> bool:
    """Return whether halo rows are packed: not without features."""
    return bool(asked) and features is not None and (not isinstance(features, Mapping) or len(features) > 0)


def load_arrays(stream, columns: Columns) -> dict[str, Any]:
    """Return the arrays of nodes and edges as `StoreInputs` holds them, by its names.

    Args:
        stream: Edges, counted.
        columns: As given.

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
        "labels": _one_column(_load_rows("labels", columns.labels, num_nodes, (1, 2))),
        "masks": {str(name): _load_mask(name, mask, num_nodes) for name, mask in masks},
        "node_time": _load_times("node_time", columns.node_time, num_nodes),
        **{name: _load_edge_column(name, getattr(columns, name), num_edges) for name in EDGE_COLUMNS},
    }


def checked_name(name: Any) -> str:
    """Return the name of a node column.

    Raises:
        ValueError: it is no plain word, or one that a batch uses itself.
    """
    if not str(name).isidentifier() or str(name) in _NAMES_OF_BATCHES:
        raise ValueError(
            f"node_columns: a name must be a plain word that batches do not use themselves, such as image, got {name!r}"
        )
    return str(name)


def _load_node_rows(rows, stream, num_nodes: int, name: str = "features") -> Any:
    """Return rows of all nodes, or a dict of rows by the number of their node type."""
    try:
        if isinstance(rows, Mapping):
            return _features_by_node_type(rows, stream)
        return load_features(rows, num_nodes)
    except ValueError as error:
        if name == "features":
            raise
        told = str(error)
        raise ValueError(f"{name}{told.removeprefix('features')}" if told.startswith("features") else told) from None


def _features_by_node_type(features: Mapping, stream) -> dict[int, np.ndarray | SparseSource]:
    """Return features by the number of their node type."""
    if not isinstance(stream, HeteroStream):
        raise ValueError("features by node type need a heterogeneous graph: give one array, or a HeteroGraph")
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


def check_storage(storage: str | None, features) -> None:
    """Refuse a `feature_storage` that is unknown, or does not go with the features.

    Args:
        storage: As given; None goes with everything.
        features: An array, CSR features with `indptr`, `data` and `shape`, or None.

    Raises:
        ValueError: one line with the remedy.
    """
    if storage is None:
        return
    if isinstance(features, Mapping) and storage in FEATURE_STORAGE:
        for rows in features.values():
            check_storage(storage, rows)
        return
    if storage not in FEATURE_STORAGE:
        raise ValueError(f"feature_storage must be null or one of {', '.join(FEATURE_STORAGE)}, got {storage!r}")
    if features is None:
        raise ValueError(f"feature_storage={storage} says how features are stored, and there are none: leave it out")
    sparse = is_csr(features)
    dtype = features.data.dtype if sparse else features.dtype
    if dtype.kind != "f":
        raise ValueError(f"feature_storage={storage} takes floats, the features are {dtype}: leave it out to keep them")
    if sparse and row_code(storage, features.shape[1]) is not None:
        raise ValueError(
            f"feature_storage={storage} needs dense features, but these are sparse (CSR): use float16 or float32"
        )


def feature_bytes(features, storage: str | None) -> int:
    """Return the bytes of features as a store holds them; arguments as for `check_storage`."""
    if features is None:
        return 0
    if isinstance(features, Mapping):
        return sum(feature_bytes(rows, storage) for rows in features.values())
    if is_csr(features):
        width = np.dtype(storage or features.data.dtype).itemsize
        return len(features.indices) * (4 + width) + len(features.indptr) * 8
    dtype, items = stored_form(storage, features.shape[1], features.dtype)
    return features.shape[0] * items * dtype.itemsize


def load_features(features, num_nodes: int) -> np.ndarray | SparseSource | None:
    """Return features as an array (memory-mapped where a path is given) or as a SparseSource.

    Args:
        features: (num_nodes, dim) array, memmap, table, tensor, or path of .npy, .parquet or .csv; a sparse matrix of
            SciPy or torch; or (indptr, indices, data, shape).
        num_nodes: rows expected.
    """
    if features is None:
        return None
    sparse = csr_of(features)
    features = features if sparse is None else sparse
    if isinstance(features, tuple) and len(features) == 4:
        return _sparse_source(*features, num_nodes)
    return _load_rows("features", features, num_nodes, (2,))


def _sparse_source(indptr, indices, data, shape, num_nodes: int) -> SparseSource:
    source = SparseSource(np.asarray(indptr), np.asarray(indices), np.asarray(data), tuple(int(s) for s in shape))
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
    """Return the file of a path that may name columns of the file, as "nodes.parquet:label" does."""
    found = table_path(path)
    return Path(path) if found is None else found[0]


def _one_column(labels):
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
        masks = _local(masks)
        if table_path(masks) is None:
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
        raise ValueError(f"masks: a name must be a plain word, got {name!r}")
    if mask.dtype != bool or mask.shape != (num_nodes,):
        raise ValueError(
            f"masks[{name!r}] must be bool of shape ({num_nodes},), got {mask.dtype} of shape {mask.shape}"
            + (" (indices become a mask by mask[indices] = True)" if mask.dtype != bool else "")
            + _without_edges("masks", num_nodes, mask.shape)
        )
    return mask


def input_fingerprint(
    stream, method, num_parts, seed, options, columns: Columns | None = None, pack_halo: bool = False
) -> str:
    """Return a digest of a store's input, computed before any partitioning is made.

    A file is identified by its path, size, modification time and shape; an array in memory by its contents.

    Args:
        stream: EdgeStream whose `fingerprint()` is used.
        method, num_parts, seed, options: The partitioner and its arguments, as recorded in a `Partitioning`.
        columns: `Columns` or a `GraphDataset`; None: none.
        pack_halo: As for `write_partition_store`.

    Returns:
        32 hexadecimal digits.

    Cost: one read of the arrays that are in memory, about 0.8 GB/s.
    """
    columns = columns or Columns()
    features = columns.features
    facts: dict[str, Any] = {
        "stream": stream.fingerprint(),
        "to_undirected": bool(stream.to_undirected),
        "remove_self_loops": bool(stream.remove_self_loops),
        "partitioner": [str(method), int(num_parts), int(seed), _plain(options)],
        "features": _rows_identity(features, stream),
        "labels": identity(_one_column(opened(columns.labels))),
        "masks": {str(name): identity(mask) for name, mask in (columns.masks or {}).items()},
        "edges": [identity(columns.edge_weight), identity(columns.edge_features)],
        "pack_halo": packs_halo(pack_halo, features),
    }
    if columns.feature_storage is not None:  # left out where it is None, so that stores of older releases stay valid
        facts["feature_storage"] = str(columns.feature_storage)
    if columns.node_time is not None or columns.edge_time is not None:
        facts["times"] = [identity(columns.node_time), identity(columns.edge_time)]
    if columns.regression:
        facts["regression"] = True
    if not stream.remove_self_loops and _reverses_apart(stream):
        facts["reversed_loops"] = True  # stores of older releases lack the reverses of self-loops
    for name in EDGE_COLUMNS.keys() - {"edge_weight", "edge_features", "edge_time"}:  # those have their place above
        if getattr(columns, name) is not None:
            facts[name] = identity(getattr(columns, name))
    if columns.node_columns:
        facts["node_columns"] = {str(n): _rows_identity(rows, stream) for n, rows in columns.node_columns.items()}
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _reverses_apart(stream) -> bool:
    """Whether the reverse of a self-loop is of another edge type."""
    if not stream.to_undirected or not isinstance(stream, HeteroStream):
        return False
    pairs = zip(stream.schema.edge_types, stream.schema.reverse, strict=True)
    return any(ends[0] == ends[2] and back != number for number, (ends, back) in enumerate(pairs))


def _rows_identity(rows, stream) -> Any:
    """Return a JSON value that identifies features or a node column, as given or as loaded."""
    if isinstance(rows, Mapping):
        rows = _features_by_node_type(rows, stream) if isinstance(next(iter(rows), 0), str) else rows
    elif rows is not None and not isinstance(rows, np.ndarray | SparseSource):
        rows = load_features(rows, _num_rows(rows))
    return _feature_identity(rows)


def _feature_identity(features) -> Any:
    if isinstance(features, Mapping):
        return {str(node_type): _feature_identity(rows) for node_type, rows in sorted(features.items())}
    return [identity(part) for part in features] if isinstance(features, tuple) else identity(features)


def changed_inputs(before: dict, after: dict) -> str | None:
    """Return the first input whose files differ between two calls of `input_files`, or None."""
    for name in before:
        if before[name] != after.get(name):
            return f"{name} ({next(path for path, *_ in before[name] or after[name])})"
    return None


def input_files(stream, columns: Columns, part_id=None) -> dict:
    """Return the state of the files behind a store's inputs, by name: [path, size, change, inode] each.

    Arrays in memory have no files. A file that is gone has no size.

    Cost: one look at each file, whose content is not read.
    """
    features, names = columns.features, ("labels", "edge_weight", "edge_features", "node_time", "edge_time")
    arrays = {name: getattr(columns, name) for name in names} | {"part_id": part_id}
    arrays |= {f"masks[{str(name)!r}]": mask for name, mask in (columns.masks or {}).items()}
    others = {name: getattr(columns, name) for name in EDGE_COLUMNS if name not in names}
    arrays |= {name: values for name, values in others.items() if values is not None}
    for name, given in {"features": features, **(columns.node_columns or {})}.items():
        by_node_type = isinstance(given, Mapping)
        arrays |= {f"{name}[{key!r}]": rows for key, rows in given.items()} if by_node_type else {name: given}
    files = {"edges": file_states(stream)}
    for name, array in arrays.items():
        parts = [] if array is None else [named_file(array) if isinstance(array, str | os.PathLike) else array]
        if is_csr(array):
            parts = [array.indptr, array.indices, array.data]
        elif isinstance(array, tuple):
            parts = [*array[:3]]
        files[name] = [file_state(path) for path in map(backing_file, parts) if path is not None]
    return files


def identity(array) -> Any:
    """Return a JSON value that identifies this array: its file's facts, or a hash of its content."""
    if array is None:
        return None
    if isinstance(array, tuple):
        return list(array)
    array = np.asanyarray(opened(array))
    form = [list(array.shape), little_endian(array.dtype).str]
    memmap = backing_memmap(array)
    if memmap is not None and memmap.filename is not None and memmap.mode != "c":  # copies on write are not the file
        facts = os.stat(memmap.filename)
        place = array.ctypes.data - np.frombuffer(memmap._mmap, np.uint8).ctypes.data
        return [
            *form,
            str(Path(memmap.filename).resolve()),
            facts.st_size,
            facts.st_mtime_ns,
            place,
            list(array.strides),
        ]
    return [*form, _content_hash(array)]


def opened(array):
    """Return an array as it is, tables, columns and tensors as arrays, or the file at a path.

    A .npy file is memory-mapped, a table file (Parquet, .csv, .tsv) read; one at a URL is fetched first.

    Raises:
        ValueError: the file holds no array that can be mapped.
    """
    if not isinstance(array, str | os.PathLike):
        refuse_masked("array", array)
        return array if isinstance(array, np.ndarray) else _as_rows(array)
    path = _local(array)
    if table_path(path) is not None:
        return _as_rows(path)
    try:
        return np.load(path, mmap_mode="r")
    except UNREADABLE as error:
        raise ValueError(f"{array}: not a .npy file that numpy can map ({why_no_array(error)})") from None


def _local(path: str | os.PathLike) -> str | os.PathLike:
    """Return a path as it is, or that of the copy of a URL, with the columns that it names."""
    if not is_url(path):
        return path
    file, columns = split_columns(path)
    return local_copy(file) if columns is None else f"{local_copy(file)}:{columns}"


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
    memmap = backing_memmap(np.asanyarray(array))
    if memmap is None or memmap.filename is None:
        return
    need = memmap.offset - memmap.offset % mmap.ALLOCATIONGRANULARITY + len(memmap._mmap)
    try:
        size = os.stat(memmap.filename).st_size
    except FileNotFoundError:
        return  # its bytes stay as long as they are mapped
    if size < need:
        raise ValueError(f"{memmap.filename}: cut short while it was read: {need} bytes were there, {size} are left")


def _content_hash(array: np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=16)
    rows = array.reshape(1) if array.ndim == 0 else array
    row_bytes = max(1, rows.nbytes // max(1, len(rows)))
    step = max(1, _HASH_BLOCK // row_bytes)
    for start in range(0, len(rows), step):
        block = np.ascontiguousarray(rows[start : start + step], dtype=little_endian(rows.dtype))
        digest.update(block.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _num_rows(features) -> int:
    if isinstance(features, tuple):
        return int(features[3][0])
    return opened(features).shape[0]


def _plain(value: Any) -> Any:
    """Options as JSON: numpy scalars become numbers, anything unknown its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
