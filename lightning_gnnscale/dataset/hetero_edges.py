"""The edges of a heterogeneous graph: one source an edge type or several, and the values of the edges of all."""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..edge_stream.open import open_edge_stream
from ..edge_stream.options import UnreadColumns, split_columns, table_path
from ..edge_stream.relations import EdgesByType, PairIds
from ..edge_stream.stream import EdgeStream
from ..errors import check_mapping, short
from ..graph import GraphSchema, check_num_edge_types
from ..object_store import query_of
from ..partitioner.graph_access.scratch import AUTO, nameless_map, scratch_folder
from ..values import as_array, exact_integers, exact_times
from .columns import EDGE_COLUMNS, EdgeColumn, load_features, opened

_OF_EDGES = ("edges", *(column.in_type for column in EDGE_COLUMNS.values()), "relation", "reader")
_EXAMPLE = '["author,writes,paper=writes.parquet"]'
IN_MEMORY_BYTES = 64 << 20  # of an edge value that is joined from several edge types
EdgeType = tuple[str, str, str]
Source = tuple[int | None, dict]  # number of the edge type, None of several; and what is given of its edges


def described_edges(
    node_types: tuple[str, ...], edges: Mapping | Sequence, edge_types: Sequence | None
) -> tuple[GraphSchema, list[Source]]:
    """Return node types and edge types without added reverses, and the sources of the edges; see `hetero_graph`."""
    edges = _by_edge_type(edges)
    if isinstance(edge_types, str) or not isinstance(edge_types, Iterable | None):
        raise ValueError(f'edge_types must be a list such as ["author,writes,paper"], got {short(edge_types)}')
    names = {name: _edge_type(name) for name in edges}
    given = {name: keyed(f"edges[{name!r}]", source, _OF_EDGES, "edges") for name, source in edges.items()}
    found = {name: _names_in(name, given[name]) for name, parts in names.items() if parts[1:2] == ("*",)}
    schema = GraphSchema(node_types, _all_edge_types(edge_types, names, found))
    sources = []
    for name, parts in names.items():
        if name in found:
            numbers, types = found[name]
            given[name]["relation"] = np.array([schema.edge_type_number(one) for one in types])[numbers]
        sources.append((None if "*" in parts else schema.edge_type_number(parts), given[name]))
    return schema, sources


def _by_edge_type(edges: Any) -> Mapping[Any, Any]:
    """Return the edges by edge type, also for a list."""
    if isinstance(edges, str):
        edges = [edges]
    if not isinstance(edges, Sequence):
        check_mapping("edges", edges, '{"author,writes,paper": "writes.csv"}')
        return edges
    found: dict[str, Any] = {}
    for entry in edges:
        name, given = _entry(entry)
        if name in found:
            raise ValueError(f"edges: {name} is listed twice: join its files, or give a folder of Parquet")
        found[name] = given
    return found


def _entry(entry: Any) -> tuple[str, Any]:
    """Return the edge type of an entry of the list, and the description of its edges."""
    if isinstance(entry, Mapping) and "type" in entry:
        return str(entry["type"]), {key: value for key, value in entry.items() if key != "type"}
    name, equals, path = entry.partition("=") if isinstance(entry, str) else ("", "", "")
    if not (name.strip() and equals and path.strip()):
        raise ValueError(f'edges: {entry!r} is not "source,name,target=path", as in {_EXAMPLE}, and has no type=')
    return name.strip(), path.strip()


def _all_edge_types(
    edge_types: Sequence | None, names: Mapping[Any, tuple], found: Mapping[Any, tuple]
) -> tuple[EdgeType, ...]:
    """Return all edge types: those given, then those of the keys of `edges` and of their columns of names."""
    listed = [_edge_type(name) for name in edge_types or ()]
    for name, parts in names.items():
        if name in found:
            listed += found[name][1]
        elif parts != ("*",) and (edge_types is None or ("*",) in names.values()):
            listed.append(parts)
    return tuple(dict.fromkeys(listed))


def clocks_of_edges(schema: GraphSchema, sources: Sequence[Source]) -> dict[str, Any]:
    """Return the times of the edges as given, by words for messages."""
    found = {}
    for at, (number, given) in enumerate(sources):
        if given["time"] is not None:
            of = f"edges {at}" if number is None else ",".join(schema.edge_types[number])
            found[f"times of {of}"] = opened(given["time"])
    return found


def opened_edges(
    source: Source, schema: GraphSchema, nodes: Mapping[str, dict], chunk_edges: int, reader: Mapping[str, Any]
) -> EdgesByType:
    """Return the edges of one source, with the edge type of each.

    Args:
        source, schema: As `described_edges` gives them.
        nodes: By node type, `num_nodes` and the ids `nodes`, None: edges name rows.
        reader: Options of the readers of all files; those of the source come first.
    """
    number, given = source
    relation = number
    if number is None:
        relation = _relation_numbers(given["relation"], schema, given["edges"])
        ends = [schema.edge_types[one] for one in _used(relation, schema.num_edge_types)]
    else:
        ends = [schema.edge_types[number]]
    node_types = [{edge_type[end] for edge_type in ends} for end in (0, 2)]
    named = sorted({one for one in node_types[0] | node_types[1] if nodes[one]["nodes"] is not None})
    if named and max(map(len, node_types)) > 1:  # the node type of an end is known once its edge type is
        raise ValueError(
            f'edges["*"]: nodes[{named[0]!r}] lists ids, and edge types of several node types in one source name '
            f"rows by number: give those of each two node types a file of their own, {ends[0][0]},*,{ends[0][2]}"
        )
    of_type = {} if given["reader"] is None else given["reader"]
    column, stream = given["column"], given["edges"]
    check_mapping("reader of edges", of_type, "{separator: ';'}")
    options = {**header_of(stream, column), **reader, **of_type}
    if not isinstance(stream, EdgeStream):
        with _told_for_types(column):
            stream = open_edge_stream(stream, chunk_edges=chunk_edges, relabel=bool(named) or None, **options)
    if named:
        source_nodes, target_nodes = nodes[ends[0][0]], nodes[ends[0][2]]
        stream.node_ids = PairIds(source_nodes["nodes"], target_nodes["nodes"])
        stream.num_nodes = max(source_nodes["num_nodes"], target_nodes["num_nodes"])
    if number is not None and given["relation"] is not None:
        raise ValueError(
            f'relation= is for edges of several types, "{ends[0][0]},*,{ends[0][2]}": say that, or leave it out'
        )
    return EdgesByType(stream, relation)


def keyed(where: str, given: Any, allowed: Sequence[str], single: str) -> dict:
    """Return all keys of a node type's or an edge type's description; a value that is not a mapping is its main key."""
    if not isinstance(given, Mapping):
        given = {single: given}
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}, allowed: {', '.join(allowed)}")
    return {name: given.get(name) for name in allowed} | {"column": given.get("relation")}


def _edge_type(name: Any) -> tuple[str, ...]:
    text = name.split(",") if isinstance(name, str) else name
    is_text = isinstance(text, list | tuple) and all(isinstance(part, str) for part in text)
    parts = tuple(part.strip() for part in text) if is_text else ()
    if parts != ("*",) and len(parts) != 3:
        raise ValueError(
            f'an edge type must be "source,name,target", or "source,*,target" or "*" for several, got {short(name)}'
        )
    return parts


def _relation_numbers(relation: Any, schema: GraphSchema, edges: Any) -> np.ndarray:
    """Return (num_edges,) numbers of edge types given as numbers, names, or a column of the file of the edges."""
    if relation is None:
        raise ValueError('edges["*"] needs relation=, the name or number of the edge type of each edge')
    relation = _relation_column(relation, edges)
    if relation.dtype.kind in "iu":
        return relation
    names, places = np.unique(relation.astype(str), return_inverse=True)
    return np.array([schema.edge_type_number(str(name)) for name in names])[places]


def _relation_column(relation: Any, edges: Any) -> np.ndarray:
    if isinstance(relation, str):
        from ..edge_stream.table import ids_or_rows

        relation = column_of(edges, relation, "relation") if isinstance(edges, str) else relation
        relation = ids_or_rows(relation) if not relation.endswith(".npy") else opened(relation)
    return as_array("relation", relation)


def _names_in(name: Any, given: dict) -> tuple[np.ndarray, list[EdgeType]]:
    """Return of one source of all edge types between two node types the type of each edge, and the types, sorted."""
    source, _, target = _edge_type(name)
    if given["relation"] is None:
        raise ValueError(f"edges[{name!r}] needs relation=, the name of the edge type of each edge, or its column")
    told = given["relation"] if isinstance(given["relation"], str) else f"edges[{name!r}].relation"
    numbers, schema = numbered(_relation_column(given["relation"], given["edges"]), told)
    return numbers, [(source, one, target) for _, one, _ in schema.edge_types]


def _used(relation: np.ndarray, num_edge_types: int) -> np.ndarray:
    """Return the edge types that edges have; all of them where there is no edge, or one of a number out of range."""
    if not len(relation) or int(relation.min()) < 0 or int(relation.max()) >= num_edge_types:
        return np.arange(num_edge_types)  # which the stream refuses, with the edge
    return np.flatnonzero(np.bincount(relation.astype(np.int64), minlength=num_edge_types))


@contextmanager
def _told_for_types(relation: Any) -> Iterator[None]:
    """Have the warning of columns that are not read with the edges name what an edge type takes, but not `relation`."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    read = relation.rpartition(":")[2] if isinstance(relation, str) else None
    for one in told:
        unread = one.message
        if not isinstance(unread, UnreadColumns):
            warnings.warn_explicit(unread, one.category, one.filename, one.lineno)
        elif left := [column for column in unread.columns if column != read]:
            remedy = "an edge type takes such columns as relation, time, weight, features or labels, as time: "
            warnings.warn(UnreadColumns(unread.source, left, f"{remedy}{unread.source}:{left[0]}"), stacklevel=4)


def joined_columns(values: list[dict], sources: list[EdgesByType]) -> dict[str, Any]:
    """Return the columns of all edges, source after source, by the names of `GraphDataset`; None for those without."""
    return {name: _joined(column, values, sources) for name, column in EDGE_COLUMNS.items()}


def _joined(column: EdgeColumn, values: list[dict], sources: list[EdgesByType]) -> Any:
    """Return the values of all edges, source after source; `column.without` for those of a source without values.

    Above `IN_MEMORY_BYTES` the values of several sources are in a file in the system's temporary folder.
    """
    name, given = column.in_type, []
    for one, source in zip(values, sources, strict=True):
        given.append(None if one[name] is None else _rows_of_edges(column, one[name], source))
    if all(rows is None for rows in given):
        return None
    if len(given) == 1:
        return given[0]
    widths = {rows.shape[1:] for rows in given if rows is not None}
    if len(widths) > 1:
        raise ValueError(f"{name} of edges: edge types have {sorted(widths)} columns: give all of them as many")
    width = widths.pop()
    dtype = np.result_type(*(rows.dtype for rows in given if rows is not None), np.int64 if name == "time" else np.int8)
    counts = [_edges(source) for source in sources]
    for rows, count in zip(given, counts, strict=True):
        if rows is not None and len(rows) != count:
            raise ValueError(f"{name} of edges: an edge type of {count} edges has {len(rows)}: give one an edge")
    shape = (sum(counts), *width)
    row_bytes = dtype.itemsize * int(np.prod(width, dtype=np.int64))
    in_memory = shape[0] * row_bytes <= IN_MEMORY_BYTES
    joined = np.empty(shape, dtype) if in_memory else nameless_map(scratch_folder(AUTO), shape, dtype)
    first, step = 0, max(1, IN_MEMORY_BYTES // max(1, row_bytes))
    for rows, count in zip(given, counts, strict=True):
        for start in range(0, count, step):
            stop = min(start + step, count)
            joined[first + start : first + stop] = column.without if rows is None else rows[start:stop]
        first += count
    return joined


def _rows_of_edges(column: EdgeColumn, rows: Any, source: EdgesByType) -> Any:
    """Return the values of the edges of one source, times and classes as integers."""
    if column.num_dims > 1:
        return load_features(rows, _edges(source))
    name = column.in_type
    rows = as_array(f"{source.stream.name}: {name}", opened(rows)).reshape(-1)
    if name in ("weight", "labels") and rows.dtype.kind not in "fiub":
        raise ValueError(f"{source.stream.name}: {name} of edges must be numbers, one an edge, got {rows.dtype}")
    if name == "time":
        return int64_times(f"{source.stream.name}: time", rows, "edge")
    if name == "labels" and rows.dtype == np.uint64:  # no dtype joins it with the others exactly
        return exact_integers(f"{source.stream.name}: labels", rows, 0, 2**31 - 1, "edge")
    return rows


def int64_times(name: str, times: Any, unit: str = "row") -> np.ndarray:
    """Return times as `exact_times` does, in int64."""
    return exact_times(name, times, unit).astype(np.int64, copy=False)  # numpy joins uint64 with others to floats


def _edges(source: EdgesByType) -> int:
    return source.stream.count()[1]


NODE_TYPE = "node"  # of a graph with one node type


def column_of(edges: str, edge_type: str, name: str = "edge_type") -> str:
    """Return the path of the edge types, which may be the name of a column of the edge file; name: for messages.

    Raises:
        ValueError: a name, where the edge file has no columns to look it up in.
    """
    if table_path(edge_type) is not None or query_of(edge_type) is not None or Path(edge_type).suffix == ".npy":
        return edge_type
    query = query_of(edges)
    if query is not None:
        column = '"' + edge_type.replace('"', '""') + '"'
        return f"duckdb:{query[0]}?select {column} from ({query[1].rstrip().rstrip(';')})"
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
