"""What goes into a store, checked before any work begins, and the ids of its nodes there."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..dataset.columns import (
    EDGE_COLUMNS,
    Columns,
    features_by_node_type,
    load_arrays,
    load_features,
    named_file,
    one_column,
    opened,
)
from ..dataset.feature_storage import check_edge_storage, check_storage
from ..edge_stream.relations import HeteroStream
from ..edge_stream.stream import backing_file, backing_memmap, file_state, file_states
from ..foreign import is_csr
from ..graph import id_dtype
from ..jit import kernel
from ..traits import PartitioningTraits
from ..values import as_array
from .array_file import little_endian
from .manifest import type_prefix


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


def type_starts(part_id: np.ndarray, type_offsets: np.ndarray, num_parts: int) -> np.ndarray:
    """Return (num_parts * num_node_types + 1,) store ids at which each part's node types begin, part by part.

    Args:
        part_id: (num_nodes,) int32 parts by original id.
        type_offsets: (num_node_types + 1,) original ids at which node types begin.
        num_parts: Number of parts.
    """
    ends = pairwise(np.asarray(type_offsets).tolist())
    counts = np.stack([np.bincount(part_id[first:last], minlength=num_parts) for first, last in ends])
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts.T.reshape(-1), dtype=np.int64)])


_HASH_BLOCK = 1 << 24


@dataclass(kw_only=True)
class StoreInputs(Columns):
    """Everything that decides a store's bytes; columns are arrays, features also `CSRArrays`, masks a dict."""

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
    check_edge_storage(columns.edge_storage)
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
        edge_storage=columns.edge_storage,
        regression=bool(columns.regression) and arrays["labels"] is not None,
    )


def packs_halo(asked: bool, features) -> bool:
    """Return whether halo rows are packed: not without features."""
    return bool(asked) and features is not None and (not isinstance(features, Mapping) or len(features) > 0)


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
        "labels": identity(one_column(opened(columns.labels))),
        "masks": {str(name): identity(mask) for name, mask in (columns.masks or {}).items()},
        "edges": [identity(columns.edge_weight), identity(columns.edge_features)],
        "pack_halo": packs_halo(pack_halo, features),
    }
    if columns.feature_storage is not None:  # left out where it is None, so that stores of older releases stay valid
        facts["feature_storage"] = str(columns.feature_storage)
    if columns.edge_storage is not None:
        facts["edge_storage"] = str(columns.edge_storage)
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
        rows = features_by_node_type(rows, stream) if isinstance(next(iter(rows), 0), str) else rows
    elif rows is not None and not isinstance(rows, np.ndarray):
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
