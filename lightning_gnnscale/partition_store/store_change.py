"""A change in the numbers of the store that it is for, with every value checked before anything is written."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..dataset.columns import EDGE_COLUMNS, CSRArrays, load_arrays
from ..dataset.graph_change import GraphChange, is_by_type, listed_nodes
from ..edge_stream import EdgeStream
from ..edge_stream.options import StreamOptions
from ..edge_stream.relations import HeteroStream
from ..errors import EdgeStreamError
from ..graph import GraphSchema
from ..values import ALWAYS
from .change_checks import (
    NodeColumns,
    check_edge_values,
    check_node_values,
    checked_columns,
    checked_edge_columns,
)
from .features import to_stored
from .known_ids import KnownIds, KnownIdsByType
from .manifest import type_prefix
from .merged_rows import DroppedEdges, first_missing
from .reader import PartitionStore
from .typed_change import (
    MappedEdges,
    added_edges,
    check_clocks,
    grown_schema,
    may_lack_time,
    removed_by_type,
    removed_edges,
    rows_by_type,
)

_NO_NODES = np.empty(0, np.int64)


class ChangedTable(NamedTuple):
    """New rows of a per-node file.

    Attributes:
        name: Of the file, or the stem of its three files where rows are sparse.
        fill: What new nodes have that were given none.
        node_type: Number of the node type whose nodes have the file; None: all have.
        width: Columns of features, and of further columns, as they are given.
        rows: (num_given, ...) as they are stored, or `CSRArrays`; None: none are given.
        nodes: (num_given,) numbers of their nodes.
    """

    name: str
    fill: float = 0
    node_type: int | None = None
    width: int = 1
    rows: Any = None
    nodes: np.ndarray = _NO_NODES


@dataclass(frozen=True, kw_only=True)
class StoreChange:
    """What an update does, by numbers of `known`: original ids of old nodes, and new nodes behind them.

    Attributes:
        known: Numbers of the nodes, and which ones have new rows.
        schema: Of the updated graph; None: it has one node type and one edge type.
        tables: Of every per-node file of the updated store.
        removed: (num_removed,) ascending original ids of nodes that go.
        edges: New edges, in these numbers; None: there are none.
        num_edges: How many.
        near_new: (2, num) ends of those edges that a new node has.
        edge_values: (num_edges, ...) by the name of their file.
        dropped: Edges that go.
        digest: Of all this.
    """

    known: KnownIds | KnownIdsByType
    schema: GraphSchema | None
    tables: list[ChangedTable]
    removed: np.ndarray
    edges: EdgeStream | None
    num_edges: int
    near_new: np.ndarray
    edge_values: dict[str, np.ndarray]
    dropped: DroppedEdges
    digest: str

    @property
    def renumbers(self) -> bool:
        """Whether nodes come or go, so that store ids change."""
        return bool(self.known.num_new or len(self.removed))

    @property
    def changes_edges(self) -> bool:
        """Whether the rows of the store change."""
        return bool(self.renumbers or self.num_edges or len(self.dropped.row))


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
    given = _given(store, change) if store.schema is None else _given_by_type(store, change)
    known, edges, removed = given.known, given.edges, given.removed
    digest = hashlib.blake2b(digest_size=16)
    num_edges, near_new = _scan(edges, known, removed, digest)
    arrays = load_arrays(
        _Sizes(0, num_edges), checked_edge_columns(store, given.edge_columns, num_edges, given.may_lack)
    )
    check_edge_values(store, arrays, finite)
    edge_values = {name: arrays[name] for name in EDGE_COLUMNS if arrays[name] is not None}
    tables = _tables(store, given.schema, _rows_by_file(store, given, finite))
    dropped = _dropped(store, known, given.dropped)
    if given.schema is not None and given.schema is not store.schema:
        _check_new_types(store, given.schema, edges, known)
        digest.update(str(given.schema.as_json()).encode())
    for part in (removed, known.given, *dropped):
        _add(digest, part)
    for values in known.names(known.given).values():
        _add(digest, values)
    for name, rows in [(table.name, table.rows) for table in tables] + sorted(edge_values.items()):
        digest.update(name.encode())
        for one in rows[:3] if isinstance(rows, CSRArrays) else [rows]:
            _add(digest, one)
    for table in tables:
        _add(digest, table.nodes)
    return StoreChange(
        known=known, schema=given.schema, tables=tables, removed=removed, edges=edges if num_edges else None,
        num_edges=num_edges, near_new=near_new, edge_values=edge_values, dropped=dropped, digest=digest.hexdigest(),
    )  # fmt: skip


class _Given(NamedTuple):
    """A change with its nodes in numbers, before its values are looked at.

    Attributes:
        known: The numbers.
        schema: Of the updated graph, or None.
        removed: Ascending numbers of nodes that go.
        edges, dropped: Edges that come, and that go; None: none.
        edge_columns: Of the new edges, by the names of `EDGE_COLUMNS`.
        may_lack: Of these, what edges have that are given none.
        rows: (node type, rows as a change of their own, numbers of their nodes, how many are new), by node type.
    """

    known: Any
    schema: GraphSchema | None
    removed: np.ndarray
    edges: EdgeStream | None
    dropped: EdgeStream | None
    edge_columns: dict[str, Any]
    may_lack: dict[str, Any]
    rows: list[tuple[int | None, GraphChange, np.ndarray, int]]


def _given(store: PartitionStore, change: GraphChange) -> _Given:
    """Return a change of a graph with one node type and one edge type."""
    by_type = {name: is_by_type(getattr(change, name)) for name in ("edges", "removed_edges")}
    by_type |= {name: isinstance(getattr(change, name), Mapping) for name in ("nodes", "removed_nodes")}
    by_type |= {name: bool(getattr(change, name)) for name in ("new_node_types", "new_edge_types")}
    by_type |= {name: True for name in ("edges", "removed_edges") if isinstance(getattr(change, name), HeteroStream)}
    named = next((name for name, is_so in by_type.items() if is_so), None)
    if named is not None:
        raise ValueError(
            f"{named}: are by type, and {store.root} has one node type and one edge type, which its files cannot tell "
            "from others: give them plainly, or write a new store, from the whole graph"
        )
    known = KnownIds(store, listed_nodes("nodes", change.nodes))
    removed = _removed_nodes(known, {None: listed_nodes("removed_nodes", change.removed_nodes)})
    edges = change.stream("edges", known)
    if edges is not None and edges.to_undirected and not store.manifest["to_undirected"]:
        raise ValueError("edges: to_undirected=True, but the store has edges as they are listed: open them without it")
    columns = {name: getattr(change, name) for name in EDGE_COLUMNS}
    rows = [(None, change, known.given, known.num_new)]
    dropped = change.stream("removed_edges", known)
    return _Given(known, None, removed, edges, dropped, columns, {"edge_label": -1}, rows)


def _given_by_type(store: PartitionStore, change: GraphChange) -> _Given:
    """Return a change of a graph with several node types or edge types."""
    schema = grown_schema(store, change)
    rows = rows_by_type(change, schema)
    listed = {number: listed_nodes(f"nodes[{schema.node_types[number]!r}]", own.nodes) for number, own in rows.items()}
    check_clocks(change, rows, schema)
    known = KnownIdsByType(store, schema, listed)
    removed = _removed_nodes(known, removed_by_type(change, schema))
    edges, columns, may_lack = added_edges(store, change, known, schema)
    numbered = [
        (number, own, known.numbers_of(number, known.by_type[number].given), known.by_type[number].num_new)
        for number, own in sorted(rows.items())
    ]
    dropped = removed_edges(change, known, schema)
    return _Given(known, schema, removed, edges, dropped, columns, may_lack, numbered)


def _check_new_types(store: PartitionStore, schema: GraphSchema, edges: HeteroStream, known: KnownIdsByType) -> None:
    """Refuse new types that nothing is of: what they are would be in no file."""
    for number in range(store.schema.num_node_types, schema.num_node_types):
        if not known.by_type[number].num_new:
            raise ValueError(f"new_node_types: {schema.node_types[number]} has no nodes: list them in nodes")
    used = {int(one) for source in edges.sources if source.stream.num_edges for one in np.unique(source.relation)}
    for number in range(store.schema.num_edge_types, schema.num_edge_types):
        if schema.listed[number] and number not in used:
            raise ValueError(f"new_edge_types: there is no edge of {','.join(schema.edge_types[number])} in edges")


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

    @staticmethod
    def of(change: StoreChange, original: np.ndarray, store: PartitionStore, sizes: list[int]) -> EdgeStream:
        """Return the new edges; of a graph with node types and edge types with these; sizes: nodes of each type."""
        if change.schema is None:
            return AddedEdges(change, original, store)
        edges = change.edges
        if edges is None:
            edges = HeteroStream([], change.schema, sizes)
        rules = {rule: store.manifest[rule] for rule in ("to_undirected", "remove_self_loops")}
        return MappedEdges(edges, original, edges.sources, change.schema, sizes, **rules)

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


def _removed_nodes(known: KnownIds | KnownIdsByType, given: Mapping) -> np.ndarray:
    """Return the ascending numbers of nodes that go; given: their ids by node type, None where there is one."""
    found = [_NO_NODES]
    for node_type, ids in given.items():
        if ids is None or not len(ids):
            continue
        if node_type is None:
            found.append(known.index_of("removed_nodes", ids))
        else:
            what = f"removed_nodes[{known.node_types[node_type]!r}]"
            found.append(known.numbers_of(node_type, known.by_type[node_type].index_of(what, ids)))
    removed = np.sort(np.concatenate(found))
    both = np.intersect1d(removed, known.given)
    if len(both):
        raise ValueError(f"node {known.said(int(both[0]))} is in nodes and in removed_nodes: name it in one of them")
    return removed


def _scan(
    edges: EdgeStream | None, known: KnownIds | KnownIdsByType, removed: np.ndarray, digest
) -> tuple[int, np.ndarray]:
    """Return how many new edges there are, and those that a new node has; refuse edges of nodes that go."""
    near, num_edges = [np.empty((2, 0), np.int64)], 0
    if edges is None:
        return 0, near[0]
    with closing(edges.chunks()) as chunks:
        for chunk in chunks:
            for ends in (chunk.src, chunk.dst):
                gone = _first_in(ends, removed)
                if gone >= 0:
                    name = known.said(int(ends[gone]))
                    raise EdgeStreamError(
                        f"edges: edge {num_edges + gone} names node {name}, which removed_nodes removes"
                    )
                _add(digest, ends)
            is_near = (chunk.src >= known.num_old) | (chunk.dst >= known.num_old)
            near.append(np.stack([chunk.src[is_near], chunk.dst[is_near]]))
            num_edges += len(chunk.src)
    for source in edges.sources if isinstance(edges, HeteroStream) else ():
        _add(digest, source.relation)
    return num_edges, np.concatenate(near, axis=1)


def _first_in(nodes: np.ndarray, listed: np.ndarray) -> int:
    """Return the position of the first node that is among ascending ones; -1: none is."""
    if not len(listed) or not len(nodes):
        return -1
    place = np.minimum(np.searchsorted(listed, nodes), len(listed) - 1)
    found = np.flatnonzero(listed[place] == nodes)
    return int(found[0]) if len(found) else -1


class _TypeRows(NamedTuple):
    """Rows of one node type for a file: numbers of their nodes, rows as they are stored, columns as given."""

    nodes: np.ndarray
    rows: Any
    width: int


def _rows_by_file(store: PartitionStore, given: _Given, finite: bool) -> dict[str, list[_TypeRows]]:
    """Return the new rows by the name of their file, of one node type after the other."""
    found: dict[str, list] = {}
    for node_type, change, nodes, num_new in given.rows:
        stored = NodeColumns.of(store, node_type)
        may_lack = ("node_time",) if node_type is not None and may_lack_time(store, node_type) else ()
        try:
            arrays = load_arrays(_Sizes(len(nodes), 0), checked_columns(stored, change, num_new, may_lack))
            check_node_values(stored, arrays, finite)
        except ValueError as error:
            where = "" if node_type is None else f"nodes[{given.schema.node_types[node_type]!r}]: "
            raise ValueError(f"{where}{error}") from None
        for name, (rows, width) in _files_of(stored, arrays, node_type).items():
            if rows is not None:
                found.setdefault(name, []).append(_TypeRows(nodes, rows, width))
    return found


def _files_of(stored: NodeColumns, arrays: Mapping[str, Any], node_type: int | None) -> dict[str, tuple[Any, int]]:
    """Return rows of a node type as they are stored, by the name of their file, and their columns as given."""
    store, times = stored.store, arrays["node_time"]
    tables = {"features": arrays["features"], **{f"column_{n}": rows for n, rows in arrays["node_columns"].items()}}
    found = {}
    for name, rows in tables.items():
        own = name.removeprefix("column_")
        column = stored.features if name == "features" else stored.node_columns.get(own)
        storage = store.feature_storage if name == "features" else None
        prefix = type_prefix(node_type) if own in stored.by_type else ""
        stored_rows = _stored(rows, None if column is None else column.dtype, storage)
        found[prefix + name] = stored_rows, 1 if rows is None else int(rows.shape[1])
    found["labels"] = _labels(store, arrays["labels"]), 1
    found["node_time"] = None if times is None else times.astype(np.int64), 1
    return found | {f"mask_{name}": (mask, 1) for name, mask in arrays["masks"].items()}


def _tables(store: PartitionStore, schema: GraphSchema | None, given: Mapping[str, list]) -> list[ChangedTable]:
    """Return the changed rows of each per-node file of the updated store."""
    files, tables = store.manifest["files"], []
    columns = {"features": store.features, **{f"column_{name}": own for name, own in store.node_columns.items()}}
    for name, column in columns.items():
        if column is None:
            continue
        if not column.by_node_type:
            tables.append(ChangedTable(name, width=column.dim))
            continue
        for number in range(schema.num_node_types):
            own = f"{type_prefix(number)}{name}"
            is_old = number < len(column.tables) and column.tables[number] is not None
            if is_old or own in given:
                width = column.tables[number].dim if is_old else given[own][0].width
                tables.append(ChangedTable(own, node_type=number, width=width))
    if "labels" in files:
        tables.append(ChangedTable("labels", np.nan if store.regression else -1))
    if "node_time" in files:
        tables.append(ChangedTable("node_time", ALWAYS))
    tables += [ChangedTable(f"mask_{name}") for name in store.manifest["masks"]]
    return [table._replace(**_joined(given[table.name])) if table.name in given else table for table in tables]


def _joined(given: list[_TypeRows]) -> dict[str, Any]:
    """Return the rows of a file, and their nodes, of those of each node type."""
    nodes, rows, _ = zip(*given, strict=True)
    if len(given) == 1:
        return {"nodes": nodes[0], "rows": rows[0]}
    if not isinstance(rows[0], CSRArrays):
        return {"nodes": np.concatenate(nodes), "rows": np.concatenate(rows)}
    lengths = np.concatenate([np.diff(one.indptr) for one in rows])
    indptr, shape = np.concatenate([[0], np.cumsum(lengths)]), (len(lengths), rows[0].shape[1])
    indices, data = (np.concatenate([one[part] for one in rows]) for part in (1, 2))
    return {"nodes": np.concatenate(nodes), "rows": CSRArrays(indptr, indices, data, shape)}


def _stored(rows: Any, dtype: np.dtype | None, storage: str | None) -> Any:
    """Return rows as they are stored; dtype: of the file, None of a new one."""
    if rows is None:
        return None
    if isinstance(rows, CSRArrays):
        data = rows.data.astype(dtype or storage or rows.data.dtype)
        return CSRArrays(np.asarray(rows.indptr, np.int64), np.asarray(rows.indices, np.int32), data, rows.shape)
    return to_stored(rows, storage) if storage is not None else np.asarray(rows, dtype)


def _labels(store: PartitionStore, labels: np.ndarray | None) -> np.ndarray | None:
    if labels is None:
        return None
    if store.labels.ndim == 2:
        return labels.reshape(len(labels), -1).astype(np.float32)
    known = labels if labels.dtype.kind != "f" else np.where(np.isnan(labels), -1, labels)
    return known.astype(np.int64)


def _dropped(store: PartitionStore, known: KnownIds | KnownIdsByType, edges: EdgeStream | None) -> DroppedEdges:
    """Return the store ids of the ends of the edges that go, and their types; each once, ascending."""
    columns: list[np.ndarray] = [np.empty((3, 0), np.int64)]
    schema = None if store.schema is None or edges is None else edges.schema
    if edges is not None:
        with closing(edges.chunks()) as chunks:
            for chunk in chunks:
                places = np.arange(chunk.first_edge, chunk.first_edge + len(chunk.src))
                types = np.zeros(len(places), np.int64) if schema is None else edges.edge_type_of(places)
                new = np.flatnonzero((chunk.src >= known.num_old) | (chunk.dst >= known.num_old))
                if len(new):
                    ends = int(chunk.src[new[0]]), int(chunk.dst[new[0]])
                    raise _not_there(known, schema, *ends, int(types[new[0]]))
                columns.append(
                    np.stack([store.store_nid[chunk.dst], store.store_nid[chunk.src], types], dtype=np.int64)
                )
    row, src, types = np.concatenate(columns, axis=1)
    if store.manifest["to_undirected"]:
        back = types if schema is None else np.array(schema.reverse)[types]
        row, src, types = (np.concatenate(both) for both in ((row, src), (src, row), (types, back)))
    order = np.lexsort((types, src, row))
    row, src, types = row[order], src[order], types[order]
    first = np.ones(len(row), bool)
    first[1:] = (np.diff(row) != 0) | (np.diff(src) != 0) | (np.diff(types) != 0)
    found = DroppedEdges(row[first], src[first], types[first] if schema is not None else types[:0])
    missing = first_missing(store.csc, found, store.edge_type)
    if missing >= 0:
        ends = (int(store.original_nid[end[missing]]) for end in (found.src, found.row))
        raise _not_there(known, schema, *ends, 0 if schema is None else int(found.edge_type[missing]))
    return found


def _not_there(known, schema: GraphSchema | None, src: int, dst: int, edge_type: int) -> ValueError:
    of_type = ""
    if schema is not None:
        if not schema.listed[edge_type]:
            src, dst, edge_type = dst, src, schema.reverse[edge_type]
        of_type = f"of type {','.join(schema.edge_types[edge_type])} "
    ends = f"{of_type}from {known.said(src)} to {known.said(dst)}"
    return ValueError(f"removed_edges: no edge {ends} is in the store: name edges that it has")


def _add(digest, values: Any) -> None:
    """Add an array to a digest, or that there is none."""
    if values is None:
        digest.update(b"none")
        return
    values = np.asarray(values)
    digest.update(f"{values.dtype.str}{values.shape}".encode())
    digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
