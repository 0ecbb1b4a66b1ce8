"""A change in the numbers of the store that it is for, with every value checked before anything is written."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..dataset.columns import EDGE_COLUMNS, CSRArrays, load_arrays
from ..dataset.graph_change import SEVERAL_TYPES, GraphChange, listed_nodes
from ..edge_stream import EdgeStream
from ..edge_stream.options import StreamOptions
from ..errors import EdgeStreamError, short
from .change_checks import check_change_values, checked_columns
from .features import to_stored
from .known_ids import KnownIds
from .merged_rows import first_missing
from .reader import PartitionStore


class ChangedTable(NamedTuple):
    """New rows of a per-node file.

    Attributes:
        name: Of the file, or the stem of its three files where rows are sparse.
        rows: (num_given, ...) as they are stored, or `CSRArrays`; None: none are given.
        fill: What new nodes have that were given none.
    """

    name: str
    rows: Any
    fill: float = 0


@dataclass(frozen=True, kw_only=True)
class StoreChange:
    """What an update does, by numbers of `known`: original ids of old nodes, and new nodes behind them.

    Attributes:
        known: Numbers of the nodes, and which ones have new rows.
        tables: Of every per-node file of the store.
        removed: (num_removed,) ascending original ids of nodes that go.
        edges: New edges, in these numbers; None: there are none.
        num_edges: How many.
        near_new: (2, num) ends of those edges that a new node has.
        edge_values: (num_edges, ...) by the name of their file.
        drop_row, drop_src: (num_dropped,) store ids of the ends of edges that go, ascending by both.
        digest: Of all this.
    """

    known: KnownIds
    tables: list[ChangedTable]
    removed: np.ndarray
    edges: EdgeStream | None
    num_edges: int
    near_new: np.ndarray
    edge_values: dict[str, np.ndarray]
    drop_row: np.ndarray
    drop_src: np.ndarray
    digest: str

    @property
    def renumbers(self) -> bool:
        """Whether nodes come or go, so that store ids change."""
        return bool(self.known.num_new or len(self.removed))

    @property
    def changes_edges(self) -> bool:
        """Whether the rows of the store change."""
        return bool(self.renumbers or self.num_edges or len(self.drop_row))


def read_change(store: PartitionStore, change: GraphChange, finite: bool = True) -> StoreChange:
    """Read a change, and refuse what does not fit the store.

    Args:
        store: The store before.
        change: As the user gave it.
        finite: Refuse NaN and infinities in features and edge values.

    Raises:
        ValueError, EdgeStreamError: one line: an edge that names an unknown node, a removal of what is not there, or a
            column of another shape or dtype than the store's, or that the store lacks or needs.

    Cost: one pass over the new edges, and one over those that go, which are held, 8 to 16 bytes each; the new rows.
    """
    if store.schema is not None:
        raise ValueError(f"{store.root}: {SEVERAL_TYPES}")
    known = KnownIds(store, listed_nodes("nodes", change.nodes))
    removed = _removed_nodes(store, known, change)
    edges = change.stream("edges", known)
    digest = hashlib.blake2b(digest_size=16)
    num_edges, near_new = _scan(edges, known, removed, digest)
    if edges is not None and edges.to_undirected and not store.manifest["to_undirected"]:
        raise ValueError("edges: to_undirected=True, but the store has edges as they are listed: open them without it")
    columns = checked_columns(store, change, known, num_edges)
    arrays = load_arrays(_Sizes(len(known.given), num_edges), columns)
    check_change_values(store, arrays, finite)
    tables = _tables(store, arrays)
    drop_row, drop_src = _dropped(store, known, change)
    for part in (removed, known.given, drop_row, drop_src):
        _add(digest, part)
    for values in known.names(known.given).values():
        _add(digest, values)
    edge_values = {name: arrays[name] for name in EDGE_COLUMNS if arrays[name] is not None}
    for name, rows in [(table.name, table.rows) for table in tables] + sorted(edge_values.items()):
        digest.update(name.encode())
        for one in rows[:3] if isinstance(rows, CSRArrays) else [rows]:
            _add(digest, one)
    return StoreChange(
        known=known, tables=tables, removed=removed, edges=edges if num_edges else None, num_edges=num_edges,
        near_new=near_new, edge_values=edge_values, drop_row=drop_row, drop_src=drop_src, digest=digest.hexdigest(),
    )  # fmt: skip


class AddedEdges(EdgeStream):
    """The new edges of a change in original ids of the updated store: what its writer reads.

    Args:
        change: The change.
        original: (num_known,) original id of each number, -1 of a node that is removed.
        store: The store before, whose rules on reverses and self-loops hold.
    """

    def __init__(self, change: StoreChange, original: np.ndarray, store: PartitionStore):
        manifest, num_nodes = store.manifest, int((original >= 0).sum())
        rules = {rule: manifest[rule] for rule in ("to_undirected", "remove_self_loops")}
        chunk = {} if change.edges is None else {"chunk_edges": change.edges.chunk_edges}
        options = StreamOptions(num_nodes, **chunk, **rules)
        name = str(store.root) if change.edges is None else change.edges.name
        super().__init__(name, np.dtype(np.int64), options, change.num_edges)
        self._edges, self._original = change.edges, original

    def _identity(self) -> dict:
        return {} if self._edges is None else {"added": self._edges.fingerprint()}

    def _numbered_blocks(self, first_edge: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if self._edges is None:
            return
        with closing(self._edges.chunks()) as chunks:
            for chunk in chunks:
                yield self._original[chunk.src], self._original[chunk.dst]


class _Sizes(NamedTuple):
    """Numbers of rows, in the place of a stream."""

    num_nodes: int
    num_edges: int

    def count(self) -> tuple[int, int]:
        return self.num_nodes, self.num_edges


def _removed_nodes(store: PartitionStore, known: KnownIds, change: GraphChange) -> np.ndarray:
    removed = listed_nodes("removed_nodes", change.removed_nodes)
    if removed is None or not len(removed):
        return np.empty(0, np.int64)
    found = known.index_of("removed_nodes", removed)
    both = np.intersect1d(found, known.given)
    if len(both):
        raise ValueError(
            f"node {short(known.plain(int(both[0])))} is in nodes and in removed_nodes: name it in one of them"
        )
    return np.sort(found)


def _scan(edges: EdgeStream | None, known: KnownIds, removed: np.ndarray, digest) -> tuple[int, np.ndarray]:
    """Return how many new edges there are, and those that a new node has; refuse edges of nodes that go."""
    near, num_edges = [np.empty((2, 0), np.int64)], 0
    if edges is None:
        return 0, near[0]
    with closing(edges.chunks()) as chunks:
        for chunk in chunks:
            for ends in (chunk.src, chunk.dst):
                gone = _first_in(ends, removed)
                if gone >= 0:
                    name = short(known.plain(int(ends[gone])))
                    raise EdgeStreamError(
                        f"edges: edge {num_edges + gone} names node {name}, which removed_nodes removes"
                    )
                _add(digest, ends)
            is_near = (chunk.src >= known.num_old) | (chunk.dst >= known.num_old)
            near.append(np.stack([chunk.src[is_near], chunk.dst[is_near]]))
            num_edges += len(chunk.src)
    return num_edges, np.concatenate(near, axis=1)


def _first_in(nodes: np.ndarray, listed: np.ndarray) -> int:
    """Return the position of the first node that is among ascending ones; -1: none is."""
    if not len(listed) or not len(nodes):
        return -1
    place = np.minimum(np.searchsorted(listed, nodes), len(listed) - 1)
    found = np.flatnonzero(listed[place] == nodes)
    return int(found[0]) if len(found) else -1


def _tables(store: PartitionStore, arrays: Mapping[str, Any]) -> list[ChangedTable]:
    """Return the new rows of each per-node file, as they are stored."""
    files, tables = store.manifest["files"], []
    if store.features is not None:
        tables.append(
            ChangedTable("features", _stored(arrays["features"], store.features.dtype, store.feature_storage))
        )
    for name, column in store.node_columns.items():
        rows = arrays["node_columns"].get(name)
        tables.append(ChangedTable(f"column_{name}", _stored(rows, column.dtype, None)))
    if "labels" in files:
        tables.append(ChangedTable("labels", _labels(store, arrays["labels"]), np.nan if store.regression else -1))
    if "node_time" in files:
        times = arrays["node_time"]
        tables.append(ChangedTable("node_time", None if times is None else times.astype(np.int64)))
    return [*tables, *(ChangedTable(f"mask_{name}", arrays["masks"].get(name)) for name in store.manifest["masks"])]


def _stored(rows: Any, dtype: np.dtype, storage: str | None) -> Any:
    if rows is None:
        return None
    if isinstance(rows, CSRArrays):
        return CSRArrays(
            np.asarray(rows.indptr, np.int64), np.asarray(rows.indices, np.int32), rows.data.astype(dtype), rows.shape
        )
    return to_stored(rows, storage) if storage is not None else np.asarray(rows).astype(dtype, copy=False)


def _labels(store: PartitionStore, labels: np.ndarray | None) -> np.ndarray | None:
    if labels is None:
        return None
    if store.labels.ndim == 2:
        return labels.reshape(len(labels), -1).astype(np.float32)
    known = labels if labels.dtype.kind != "f" else np.where(np.isnan(labels), -1, labels)
    return known.astype(np.int64)


def _dropped(store: PartitionStore, known: KnownIds, change: GraphChange) -> tuple[np.ndarray, np.ndarray]:
    """Return the store ids (row, source) of the edges that go, each pair once, ascending."""
    stream = change.stream("removed_edges", known)
    nothing = np.empty(0, np.int64)
    if stream is None:
        return nothing, nothing
    pairs = []
    with closing(stream.chunks()) as chunks:
        for chunk in chunks:
            new = np.flatnonzero((chunk.src >= known.num_old) | (chunk.dst >= known.num_old))
            if len(new):
                raise _not_there(known, int(chunk.src[new[0]]), int(chunk.dst[new[0]]))
            pairs.append(np.stack([store.store_nid[chunk.dst], store.store_nid[chunk.src]]).astype(np.int64))
    row, src = np.concatenate([np.empty((2, 0), np.int64), *pairs], axis=1)
    if store.manifest["to_undirected"]:
        row, src = np.concatenate([row, src]), np.concatenate([src, row])
    key = np.unique(row * store.num_nodes + src)
    row, src = key // max(1, store.num_nodes), key % max(1, store.num_nodes)
    missing = first_missing(store.csc, row, src)
    if missing >= 0:
        ends = (int(store.original_nid[end[missing]]) for end in (src, row))
        raise _not_there(known, *ends)
    return row, src


def _not_there(known: KnownIds, src: int, dst: int) -> ValueError:
    ends = f"from {short(known.plain(src))} to {short(known.plain(dst))}"
    return ValueError(f"removed_edges: no edge {ends} is in the store: name edges that it has")


def _add(digest, values: Any) -> None:
    """Add an array to a digest, or that there is none."""
    if values is None:
        digest.update(b"none")
        return
    values = np.asarray(values)
    digest.update(f"{values.dtype.str}{values.shape}".encode())
    digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
