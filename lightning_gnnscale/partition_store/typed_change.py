"""A change of a graph with several node types or edge types: nodes by node type, edges by edge type, in numbers."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from ..dataset.columns import EDGE_COLUMNS, opened
from ..dataset.graph_change import GraphChange, is_by_type, listed_by_type, listed_nodes
from ..dataset.hetero_edges import clocks_of_edges, described_edges, joined_columns, keyed, opened_edges
from ..edge_stream import NodeIds
from ..edge_stream.options import CHUNK_EDGES
from ..edge_stream.relations import EdgesByType, HeteroStream
from ..errors import EdgeStreamError, is_integer, short
from ..graph import GraphSchema
from ..values import ALWAYS, same_clock
from .known_ids import KnownIdsByType
from .reader import PartitionStore

_OF_NODES = ("nodes", "features", "labels", "masks", "time", "columns")
_IN_CHANGE = {"time": "node_time", "columns": "node_columns"}  # other names of these in `GraphChange`
_BLOCK_EDGES = 1 << 22


class MappedEdges(HeteroStream):
    """The edges of a heterogeneous stream with its nodes in other numbers.

    Args:
        edges: The stream.
        numbers: (num_nodes of it,) number of each of its nodes; negative of those that no edge may name.
        sources: Of its edges, with edge types in the numbers of `schema`.
        schema: Node types and edge types.
        sizes: By node type, number of nodes in the other numbers.
        said: Names a node of the stream, for messages.
        rules: to_undirected and remove_self_loops.
    """

    def __init__(
        self,
        edges: HeteroStream,
        numbers: np.ndarray,
        sources: Sequence[EdgesByType],
        schema: GraphSchema,
        sizes: Sequence[int],
        said: Callable[[int], str] = str,
        **rules: bool,
    ):
        super().__init__(sources, schema, sizes, edges.chunk_edges, **rules)
        self._edges, self._numbers, self._said = edges, numbers, said

    @property
    def seekable(self) -> bool:
        """Whether edges can be skipped without reading them: those of the stream are read from the first on."""
        return False

    def _numbered_blocks(self, first_edge: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with closing(self._edges.chunks()) as chunks:
            for chunk in chunks:
                ends = [self._numbers[nodes] for nodes in (chunk.src, chunk.dst)]
                for nodes, found in zip((chunk.src, chunk.dst), ends, strict=True):
                    if len(found) and found.min() < 0:
                        at = int(np.argmin(found))
                        raise EdgeStreamError(
                            f"edge {chunk.first_edge + at}: node {self._said(int(nodes[at]))} is neither in the store "
                            "nor among the new nodes: list a new node in nodes, with its rows"
                        )
                yield ends[0].astype(self.dtype, copy=False), ends[1].astype(self.dtype, copy=False)


def grown_schema(store: PartitionStore, change: GraphChange) -> GraphSchema:
    """Return the schema of the updated store: new types come behind those that there are.

    Raises:
        ValueError: a new type is there already, or has an end that is not.
    """
    schema = store.schema
    if not change.new_node_types and not change.new_edge_types:
        return schema
    named = [tuple(part.strip() for part in name.split(",")) for name in change.new_edge_types]
    for what, new, old in (("node", change.new_node_types, schema.node_types), ("edge", named, schema.edge_types)):
        again = next((one for one in new if one in old), None)
        if again is not None:
            told = again if what == "node" else ",".join(again)
            raise ValueError(f"new_{what}_types: {told} is in the store already: leave it out")
    reverse = list(schema.reverse)
    edge_types = [*schema.edge_types, *named]
    if reverse:
        pairs = zip(schema.edge_types, reverse, strict=True)
        apart = any(ends[0] == ends[2] and back != at for at, (ends, back) in enumerate(pairs))
        for at, ends in enumerate(named, len(reverse)):
            shared = ends[0] == ends[-1] and not apart
            reverse.append(at if shared else len(edge_types))
            if not shared:
                edge_types.append((ends[-1], f"rev_{ends[1 % len(ends)]}", ends[0]))
        reverse += [reverse.index(at) for at in range(len(reverse), len(edge_types))]
    try:
        return GraphSchema((*schema.node_types, *change.new_node_types), tuple(edge_types), tuple(reverse))
    except ValueError as error:
        raise ValueError(f"new_node_types, new_edge_types: {error}") from None


def rows_by_type(change: GraphChange, schema: GraphSchema) -> dict[int, GraphChange]:
    """Return the rows of the nodes of each node type, by its number, as a change of its own."""
    found = {}
    for number, where, given in _by_node_type("nodes", change.nodes, schema):
        if number is None:  # plainly, of the only node type
            names = ("nodes", "features", "labels", "masks", "node_time", "node_columns")
            return {0: GraphChange(**{name: getattr(change, name) for name in names})}
        if is_integer(given):
            raise ValueError(f"{where} must be the ids of its nodes, or a mapping of nodes and columns, got {given}")
        columns = keyed(where, given, _OF_NODES, "nodes")
        columns = {_IN_CHANGE.get(name, name): columns[name] for name in _OF_NODES}
        try:
            found[number] = GraphChange(**columns)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return found


def check_clocks(change: GraphChange, rows: Mapping[int, GraphChange], schema: GraphSchema) -> None:
    """Refuse dates beside numbers among the times of a change's nodes and edges."""
    clocks = {f"times of {schema.node_types[number]}": own.node_time for number, own in rows.items()}
    clocks = {name: opened(times) for name, times in clocks.items() if times is not None}
    if change.edge_time is not None:
        clocks["edge_time"] = opened(change.edge_time)
    elif is_by_type(change.edges):
        with _told("edges"):
            clocks |= clocks_of_edges(schema, _described(schema, change.edges)[1])
    same_clock(clocks)


def removed_by_type(change: GraphChange, schema: GraphSchema) -> dict[int, NodeIds]:
    """Return the ids of the nodes that go, by number of node type."""
    listed = _by_node_type("removed_nodes", change.removed_nodes, schema)
    return {number or 0: listed_nodes(where, given) for number, where, given in listed}


def _by_node_type(what: str, given: Any, schema: GraphSchema) -> Iterator[tuple[int | None, str, Any]]:
    """Yield (number of the node type, name for messages, what is given); number None: plainly, of the only one."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        if schema.num_node_types > 1:
            told, first = ", ".join(schema.node_types), schema.node_types[0]
            raise ValueError(f"{what}: the store has node types {told}: give them by node type, {{{first}: ...}}")
        yield None, what, given
        return
    for name, one in given.items():
        if name not in schema.node_types:
            remedy = f"; new_node_types=[{name}] adds it" if what == "nodes" else ""
            raise ValueError(
                f"{what}: node type {name!r} must be one of the store's: {', '.join(schema.node_types)}{remedy}"
            )
        yield schema.node_types.index(name), f"{what}[{name!r}]", one


def added_edges(
    store: PartitionStore, change: GraphChange, known: KnownIdsByType, schema: GraphSchema
) -> tuple[MappedEdges, dict[str, Any], dict[str, Any]]:
    """Open the new edges.

    Returns:
        The edges, nodes in numbers of `known`; their columns by the names of `EDGE_COLUMNS`; and what of these may be
        missing, by name what edges without it have.
    """
    edges, columns, lacking = _opened("edges", change, known, schema)
    if edges.to_undirected and not store.manifest["to_undirected"]:
        raise ValueError("edges: to_undirected=True, but the store has edges as they are listed: open them without it")
    may_lack = {}
    for name, types in lacking.items():
        if name in store.manifest["files"]:
            _check_lacking(store, schema, name, types)
            may_lack[name] = EDGE_COLUMNS[name].without
    return _in_numbers(edges, known, schema), columns, may_lack


def removed_edges(change: GraphChange, known: KnownIdsByType, schema: GraphSchema) -> MappedEdges:
    """Open the edges that go, nodes in numbers of `known`."""
    edges, columns, _ = _opened("removed_edges", change, known, schema)
    given = next((EDGE_COLUMNS[name].in_type for name, values in columns.items() if values is not None), None)
    if given is not None and is_by_type(change.removed_edges):
        raise ValueError(f"removed_edges: {given} is not read, edges go by their two nodes: leave it out")
    return _in_numbers(edges, known, schema)


def _in_numbers(edges: HeteroStream, known: KnownIdsByType, schema: GraphSchema) -> MappedEdges:
    """Return edges with nodes in numbers of `known`, edge types in those of the store."""
    if edges.schema is schema:
        return MappedEdges(edges, known.numbers_by_type(), edges.sources, schema, known.sizes)
    ids, numbers = listed_by_type(edges), []
    for at, (name, count) in enumerate(zip(edges.schema.node_types, np.diff(edges.type_offsets), strict=True)):
        number = schema.node_types.index(name) if name in schema.node_types else None
        if number is None:
            numbers.append(np.full(count, -1))
            continue
        rows = known.by_type[number].find_listed(ids[at], int(count))
        numbers.append(np.where(rows >= 0, known.numbers_of(number, np.maximum(rows, 0)), -1))
    renamed = np.full(edges.schema.num_edge_types, -1)
    used = _used_types(edges.sources)
    for at in used:
        renamed[at] = _number_of("edges", schema, edges.schema.edge_types[at])
    sources = [EdgesByType(source.stream, renamed[source.relation]) for source in edges.sources]
    _refuse_reverses("edges", schema, sources)

    def said(node: int) -> str:
        node_type = int(edges.type_of(np.array([node]))[0])
        row = node - int(edges.type_offsets[node_type])
        name = row if ids[node_type] is None else ids[node_type].plain(np.array([row]))[0]
        return f"{short(name)} of node type {edges.schema.node_types[node_type]}"

    return MappedEdges(edges, np.concatenate(numbers), sources, schema, known.sizes, said)


def _opened(
    what: str, change: GraphChange, known: KnownIdsByType, schema: GraphSchema
) -> tuple[HeteroStream, dict[str, Any], dict[str, set[int]]]:
    """Return edges as they are given, their columns, and the edge types of edges that lack each column."""
    given = getattr(change, what)
    plain = {name: getattr(change, name) if what == "edges" else None for name in EDGE_COLUMNS}
    if isinstance(given, HeteroStream):
        given.count()
        types = {int(_number_of(what, schema, given.schema.edge_types[at])) for at in _used_types(given.sources)}
        return given, plain, {name: types for name, values in plain.items() if values is None}
    if given is None:
        return HeteroStream([], schema, known.sizes), dict.fromkeys(EDGE_COLUMNS), {}
    if not is_by_type(given):
        listed = [one for one, has in zip(schema.edge_types, schema.listed, strict=True) if has]
        if len(listed) > 1:
            told = "; ".join(",".join(one) for one in listed[:20])
            raise ValueError(f"{what}: the store has edge types {told}: give them by edge type, as hetero_graph does")
        columns = {EDGE_COLUMNS[name].in_type: values for name, values in plain.items() if values is not None}
        given = {",".join(listed[0]): {"edges": given, **columns}}
    with _told(what):
        found, sources = _described(schema, given)
        if found.edge_types != schema.edge_types:  # of a column of names
            schema.edge_type_number(found.edge_types[schema.num_edge_types])
        streams = [opened_edges(one, schema, _nodes_of(known, one), CHUNK_EDGES, change.reader) for one in sources]
        _refuse_reverses(what, schema, streams)
        edges = HeteroStream(streams, schema, known.sizes)
        edges.count()
        values = [one for _, one in sources]
        lacking = {
            name: _used_types([one for one, own in zip(streams, values, strict=True) if own[column.in_type] is None])
            for name, column in EDGE_COLUMNS.items()
        }
        return edges, joined_columns(values, streams), {name: types for name, types in lacking.items() if types}


def _described(schema: GraphSchema, edges: Any) -> tuple[GraphSchema, list]:
    """Return what `described_edges` does, with edge types in the numbers of a schema."""
    return described_edges(schema.node_types, edges, [",".join(one) for one in schema.edge_types])


def _nodes_of(known: KnownIdsByType, source: tuple) -> dict[str, dict[str, Any]]:
    """Return the ids by node type as `opened_edges` takes them; of all edge types in one source they are rows."""
    by_rows = source[0] is None and not known.has_names
    named = zip(known.node_types, known.by_type, strict=True)
    return {name: {"nodes": None if by_rows else own, "num_nodes": len(own)} for name, own in named}


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Have errors name the argument, and how an edge type that the store lacks is added."""
    try:
        yield
    except (ValueError, EdgeStreamError) as error:
        kind, told = EdgeStreamError if isinstance(error, EdgeStreamError) else ValueError, str(error)
        told = told if told.startswith(f"{what}:") else f"{what}: {told.removeprefix('edges: ')}"
        unknown = what == "edges" and told.startswith(f"{what}: edge type '") and " must be one of: " in told
        remedy = f"; new_edge_types=['{told.split(chr(39))[1]}'] adds it" if unknown else ""
        raise kind(f"{told}{remedy}") from None


def _number_of(what: str, schema: GraphSchema, edge_type: tuple[str, ...]) -> int:
    with _told(what):
        return schema.edge_type_number(edge_type)


def _used_types(sources: Sequence[EdgesByType]) -> set[int]:
    """Return the edge types that edges of some sources have."""
    there = [source for source in sources if source.stream.count()[1]]
    return {int(number) for source in there for number in np.unique(source.relation)}


def _refuse_reverses(what: str, schema: GraphSchema, sources: Sequence[EdgesByType]) -> None:
    for number in sorted(_used_types(sources)):
        if not schema.listed[number]:
            names = (",".join(schema.edge_types[one]) for one in (number, schema.reverse[number]))
            raise ValueError("{}: {} holds the reverses of {}, which the store adds: give those".format(what, *names))


def _check_lacking(store: PartitionStore, schema: GraphSchema, name: str, types: Collection[int]) -> None:
    """Refuse edges without a column that edges of their type have in the store; of labels some may be unknown.

    Cost: a read of the column up to the first edge that has it.
    """
    if name == "edge_label":
        return
    values, edge_type, wanted = store.edge_column(name), store.edge_type, np.array(sorted(types))
    for begin in range(0, len(values), _BLOCK_EDGES):
        block = slice(begin, begin + _BLOCK_EDGES)
        has = values[block] != EDGE_COLUMNS[name].without
        has = np.isin(edge_type[block], wanted) & (has if has.ndim == 1 else has.any(axis=1))
        if has.any():
            told = ",".join(schema.edge_types[int(edge_type[begin + int(np.argmax(has))])])
            raise ValueError(f"{name} is missing: the store has it of edges of {told}, and new ones need theirs")


def may_lack_time(store: PartitionStore, node_type: int) -> bool:
    """Whether no node of a node type has a time in the store; also of a type that it lacks.

    Cost: a read of the times up to the first one.
    """
    nodes = store.node_types
    if "node_time" not in store.manifest["files"] or node_type >= nodes.num_node_types:
        return True
    starts = nodes.starts
    runs = ((starts[run], starts[run + 1]) for run in range(node_type, len(starts) - 1, nodes.num_node_types))
    return all((store.node_time[begin:end] == ALWAYS).all() for begin, end in runs)
