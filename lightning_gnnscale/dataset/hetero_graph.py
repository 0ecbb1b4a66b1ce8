"""Heterogeneous graphs: the description of node types and edge types, and the data set made from it."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..edge_stream.open import open_edge_stream
from ..edge_stream.options import CHUNK_EDGES, UnreadColumns
from ..edge_stream.relations import EdgesByType, HeteroStream, IdsByNodeType, PairIds
from ..edge_stream.stream import EdgeStream
from ..errors import check_integer, check_mapping, short
from ..foreign import is_csr
from ..graph import MASK_NAMES, GraphSchema
from ..partitioner.graph_access.scratch import AUTO, nameless_map, scratch_folder
from ..values import ALWAYS, as_array, exact_integers, exact_times, same_clock
from .columns import load_features, masks_by_name, one_column, opened, read_rows, read_values
from .edge_types import column_of, header_of, numbered
from .graph_dataset import GraphDataset, as_mask
from .split import random_split

_OF_NODES = ("num_nodes", "features", "labels", "masks", "time", "nodes", "columns")
_OF_EDGES = ("edges", "time", "weight", "features", "labels", "relation", "reader")
IN_MEMORY_BYTES = 64 << 20  # of an edge value that is joined from several edge types
EdgeType = tuple[str, str, str]


@dataclass
class HeteroGraph:
    """The node types of a graph, the edge types between them, and the data of each.

    Everything may be an array, a tensor, a column, a table or a path, as for `GraphDataset` and `open_edge_stream`.

    Args:
        nodes: By name of a node type, its number of nodes, or a mapping: `num_nodes`;
            `features`, (num_nodes, dim), dense or sparse; `labels`, (num_nodes,) or (num_nodes, num_labels); `masks`,
            by name or a column of words; `time`, (num_nodes,) integers or dates; `nodes`, the (num_nodes,) ids by
            which the edges name them, each once. Without `nodes` the edges name rows.
        edges: By edge type, "source,name,target" or a tuple of the three, the edges; or a mapping of `edges` and, one
            an edge, `time`, `weight`, `features`, `labels` (classes of edges, -1 = unknown); `reader`, options of the
            edge reader. Ids of either end are those of its node type. "source,*,target" stands for one source of all
            edge types between two node types, with `relation`, (num_edges,) names or a column of the edge file that
            holds them; "*" for any edge types, names or numbers of `edge_types`.
        edge_types: The edge types of "*", in this order, before those of other keys of `edges`; None: the keys.
        to_undirected: Whether reverses are added: of an edge type within one node type to the edge type itself, of
            another as an edge type "target,rev_name,source". `separate_reverses` gives those within one node type an
            edge type of their own, too; None: they share it, which a warning says.
        remove_self_loops: Whether edges from a node to itself are left out.
        chunk_edges: See `open_edge_stream`.
        name: Name of the data set.
        fractions, split_seed: Random split of the labelled nodes where no node type has masks; see `random_split`.
        num_classes: Number of classes; None: counted in the labels.
        feature_storage: See `write_partition_store`.
        regression: Whether labels are numbers, see `GraphDataset`.
        reader: Options of the readers of all edge files; an edge type's own `reader` comes first.

    Raises:
        ValueError: an unknown node type, edge type or key, or rows that do not fit the nodes.

    Cost: labels and masks of all nodes in memory. Times, weights, features and labels of the edges of several edge
        types are joined: above 64 MiB each in a file in the system's temporary folder.
    """

    nodes: Mapping[str, Any]
    edges: Mapping[Any, Any]
    edge_types: Sequence[Any] | None = None
    to_undirected: bool = True
    separate_reverses: bool | None = None
    remove_self_loops: bool = False
    chunk_edges: int = CHUNK_EDGES
    name: str = "typed"
    fractions: tuple[float, float, float] = (0.7, 0.15, 0.15)
    split_seed: int = 0
    num_classes: int | None = None
    feature_storage: str | None = None
    regression: bool = False
    reader: Mapping[str, Any] | None = None
    _node_types: dict[str, dict] = field(init=False, repr=False)

    def __post_init__(self):
        check_mapping("nodes", self.nodes, '{"author": 100, "paper": {"features": "paper.npy"}}')
        check_mapping("edges", self.edges, '{"author,writes,paper": "writes.csv"}')
        check_mapping("reader", {} if self.reader is None else self.reader, "{separator: ';'}")
        check_integer("split_seed", self.split_seed)
        self._node_types = {str(node_type): _keyed(f"nodes[{node_type!r}]", given, _OF_NODES, "num_nodes")
                       for node_type, given in self.nodes.items()}  # fmt: skip
        listed = () if self.edge_types is None else self.edge_types
        if isinstance(listed, str) or not isinstance(listed, Iterable):
            raise ValueError(f'edge_types must be a list such as ["author,writes,paper"], got {short(listed)}')
        names = {name: _edge_type(name) for name in self.edges}
        given = {name: _keyed(f"edges[{name!r}]", source, _OF_EDGES, "edges") for name, source in self.edges.items()}
        found = {name: _names_in(name, given[name]) for name, parts in names.items() if parts[1:2] == ("*",)}
        self._listed = GraphSchema(tuple(self._node_types), self._edge_types(names, found))
        self._sources = []
        for name, parts in names.items():
            if name in found:
                numbers, types = found[name]
                given[name]["relation"] = np.array([self._listed.edge_type_number(one) for one in types])[numbers]
            number = None if "*" in parts else self._listed.edge_type_number(parts)
            self._sources.append((number, given[name]))
        within = [",".join(name) for name in self._listed.edge_types if name[0] == name[2]]
        if self.to_undirected and self.separate_reverses is None and within:
            more = f" and {len(within) - 1} more, each" if len(within) > 1 else ""
            warnings.warn(
                f"reverses of {within[0]}{more} share its edge type: separate_reverses=True gives them one of their "
                "own, which a model needs where the direction matters; False keeps this and says nothing",
                stacklevel=3,
            )

    def _edge_types(self, names: Mapping[Any, tuple], found: Mapping[Any, tuple]) -> tuple[EdgeType, ...]:
        """Return all edge types: those given, then those of the keys of `edges` and of their columns of names."""
        listed = [_edge_type(name) for name in self.edge_types or ()]
        for name, parts in names.items():
            if name in found:
                listed += found[name][1]
            elif parts != ("*",) and (self.edge_types is None or ("*",) in names.values()):
                listed.append(parts)
        return tuple(dict.fromkeys(listed))

    @classmethod
    def of_hetero(cls, data, to_undirected: bool = False, **options) -> "HeteroGraph":
        """Return the description of a PyG `HeteroData`.

        Of a node type it reads `x`, `y`, the masks, `time` and `num_nodes`; of an edge type `edge_index`, `edge_attr`,
        `edge_weight` and `time`. Other data of nodes or edges is named in a warning.

        Args:
            data: The graph.
            to_undirected: Whether reverses are added; most graphs of PyG have them.
            options: Further arguments of `HeteroGraph`.
        """
        from .pyg import tell_unread_types

        nodes, edges = {}, {}
        for node_type in data.node_types:
            store = data[node_type]
            masks = {name: store[f"{name}_mask"] for name in MASK_NAMES if f"{name}_mask" in store}
            given = {"features": store.get("x"), "labels": store.get("y"), "time": store.get("time")}
            nodes[node_type] = {"num_nodes": store.num_nodes, **given, "masks": masks or None}
        for edge_type in data.edge_types:
            store = data[edge_type]
            if "edge_index" not in store:
                raise ValueError(f"{edge_type}: has no edge_index: adj_t of heterogeneous graphs is not read")
            features = store.get("edge_attr")
            if features is not None and features.dim() == 1:
                features = features.unsqueeze(1)
            edges[edge_type] = {
                "edges": store.edge_index,
                "time": store.get("time"),
                "weight": store.get("edge_weight"),
                "features": features,
            }
        tell_unread_types(data)
        return cls(nodes, edges, to_undirected=to_undirected, **options)

    def dataset(self) -> GraphDataset:
        """Return the data set: nodes of all node types in one space, node type after node type."""
        counts = {node_type: self._num_nodes(node_type) for node_type in self._node_types}
        schema = self._schema()
        ids = {node_type: self._node_types[node_type]["nodes"] for node_type in counts}
        sources, values = [], []
        for number, given in self._sources:
            sources.append(self._edges_of(number, given, ids, counts))
            values.append(given)
        options = {"chunk_edges": self.chunk_edges, "remove_self_loops": self.remove_self_loops}
        sizes = list(counts.values())
        stream = HeteroStream(sources, schema, sizes, to_undirected=self.to_undirected, **options)
        stream.node_ids = (
            IdsByNodeType(list(ids.values()), sizes) if any(one is not None for one in ids.values()) else None
        )
        labels = self._rows_of_all("labels", counts, np.nan if self.regression else -1)
        self._check_clock()
        masks = self._masks(counts)
        if not masks and labels is not None:
            masks = random_split(labels, self.fractions, self.split_seed, self.regression)
        of_edges = {f"edge_{name}": _joined(name, values, sources) for name in ("weight", "features", "time")}
        of_edges["edge_label"] = _joined("labels", values, sources)
        return GraphDataset(
            name=self.name,
            stream=stream,
            features={node_type: given["features"] for node_type, given in self._node_types.items()},
            labels=labels,
            masks=masks,
            num_classes=self.num_classes,
            feature_storage=self.feature_storage,
            node_time=self._rows_of_all("time", counts, ALWAYS),
            regression=self.regression,
            node_columns=self._node_columns(),
            **of_edges,
        )

    def _schema(self) -> GraphSchema:
        """Return node types and edge types, reverses after the listed ones."""
        listed = self._listed
        if not self.to_undirected:
            return listed
        names, reverse = list(listed.edge_types), [0] * listed.num_edge_types
        for number, (source, name, target) in enumerate(listed.edge_types):
            if source == target and not self.separate_reverses:
                reverse[number] = number
                continue
            reverse[number] = len(names)
            names.append((target, f"rev_{name}", source))
            reverse.append(number)
        return GraphSchema(listed.node_types, tuple(names), tuple(reverse))

    def _num_nodes(self, node_type: str) -> int:
        """Return the number of nodes of a node type; all given values must agree on it."""
        given, counts = self._node_types[node_type], {}
        if given["num_nodes"] is not None:
            if not isinstance(given["num_nodes"], int | np.integer) or isinstance(given["num_nodes"], bool):
                raise ValueError(
                    f"nodes[{node_type!r}] must be a number of nodes, or a mapping such as {{nodes: x.csv:id, "
                    f"features: x.csv:a,b}}, got {given['num_nodes']!r}"
                )
            counts["num_nodes"] = int(given["num_nodes"])
        for name in ("features", "labels", "time"):
            if given[name] is not None:
                where = f"nodes[{node_type!r}].{name}"
                given[name] = (
                    read_rows(where, given[name]) if name == "features" else read_values(where, given[name], False)
                )
                counts[name] = _num_rows(where, given[name])
        if given["nodes"] is not None:
            given["nodes"] = _listed(node_type, given["nodes"])
            counts["nodes"] = len(given["nodes"])
        if not counts:
            raise ValueError(
                f"nodes[{node_type!r}]: how many are there? give num_nodes, features, labels, time or nodes"
            )
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ValueError(f"nodes[{node_type!r}]: numbers of nodes differ: {told}; give each one row a node")
        return next(iter(counts.values()))

    def _edges_of(self, number: int | None, given: dict, ids: dict, counts: dict[str, int]) -> EdgesByType:
        """Return the edges of one source, with the edge type of each."""
        relation = number
        if number is None:
            relation = _relation_numbers(given["relation"], self._listed, given["edges"])
            ends = [self._listed.edge_types[one] for one in _used(relation, self._listed.num_edge_types)]
        else:
            ends = [self._listed.edge_types[number]]
        node_types = [{edge_type[end] for edge_type in ends} for end in (0, 2)]
        named = sorted({node_type for node_type in node_types[0] | node_types[1] if ids[node_type] is not None})
        listed = bool(named)
        if listed and max(map(len, node_types)) > 1:  # the node type of an end is known once its edge type is
            raise ValueError(
                f'edges["*"]: nodes[{named[0]!r}] lists ids, and edge types of several node types in one source name '
                f"rows by number: give those of each two node types a file of their own, {ends[0][0]},*,{ends[0][2]}"
            )
        of_type, column = {} if given["reader"] is None else given["reader"], given["column"]
        check_mapping("reader of edges", of_type, "{separator: ';'}")
        reader = {**header_of(given["edges"], column), **(self.reader or {}), **of_type}
        stream = given["edges"]
        if not isinstance(stream, EdgeStream):
            with _told_for_types(column):
                stream = open_edge_stream(stream, chunk_edges=self.chunk_edges, relabel=listed or None, **reader)
        if listed:
            source, _, target = ends[0]
            stream.node_ids = PairIds(ids[source], ids[target])
            stream.num_nodes = max(counts[source], counts[target])
        if number is not None and given["relation"] is not None:
            raise ValueError(
                f'relation= is for edges of several types, "{ends[0][0]},*,{ends[0][2]}": say that, or leave it out'
            )
        return EdgesByType(stream, relation)

    def _node_columns(self) -> dict[str, dict[str, Any]]:
        """Return the further columns by name, and each by node type."""
        found: dict[str, dict[str, Any]] = {}
        for node_type, given in self._node_types.items():
            columns = {} if given["columns"] is None else given["columns"]
            check_mapping(f"nodes[{node_type!r}].columns", columns, '{"degree": "degree.npy"}')
            for name, rows in columns.items():
                found.setdefault(name, {})[node_type] = rows
        return found

    def _rows_of_all(self, name: str, counts: dict[str, int], missing: float) -> np.ndarray | None:
        """Return (num_nodes,) values of all node types, `missing` for those without; None if no type has any."""
        given = {node_type: one[name] for node_type, one in self._node_types.items() if one[name] is not None}
        if not given:
            return None
        if name == "time":
            given = {node_type: _int64_times(f"nodes[{node_type!r}].time", times) for node_type, times in given.items()}
        given = {node_type: np.asarray(one_column(rows)) for node_type, rows in given.items()}
        shapes = {rows.shape[1:] for rows in given.values()}
        if len(shapes) > 1:
            raise ValueError(f"{name}: node types have {sorted(shapes)} columns: give all of them as many")
        least = np.int64 if name == "time" else np.float32 if self.regression else np.int8
        dtype = np.result_type(*(rows.dtype for rows in given.values()), least)
        out = np.full((sum(counts.values()), *shapes.pop()), missing, dtype)
        first = 0
        for node_type, count in counts.items():
            if node_type in given:
                out[first : first + count] = given[node_type]
            first += count
        return out

    def _check_clock(self) -> None:
        """Refuse dates for some node types or edge types and numbers for others."""
        given = {
            f"times of {node_type}": one["time"]
            for node_type, one in self._node_types.items()
            if one["time"] is not None
        }
        for at, (number, one) in enumerate(self._sources):
            if one["time"] is not None:
                of = f"edges {at}" if number is None else ",".join(self._listed.edge_types[number])
                given[f"times of {of}"] = opened(one["time"])
        same_clock(given)

    def _masks(self, counts: dict[str, int]) -> dict[str, np.ndarray]:
        """Return masks over the nodes of all node types; a node type without them is in none."""
        masks: dict[str, np.ndarray] = {}
        first, total = 0, sum(counts.values())
        for node_type, count in counts.items():
            for name, mask in masks_by_name(self._node_types[node_type]["masks"]).items():
                whole = masks.setdefault(name, np.zeros(total, bool))
                where = f"nodes[{node_type!r}].masks[{name!r}]"
                whole[first : first + count] = as_mask(
                    where, np.asarray(read_values(where, mask, keep_path=False)), count
                )
            first += count
        return masks


def _num_rows(where: str, rows: Any) -> int:
    shape = rows.shape if is_csr(rows) else np.shape(opened(rows))
    if not shape:
        raise ValueError(f"{where} must have a row for each node, got {rows!r}")
    return int(shape[0])


def _keyed(where: str, given: Any, allowed: Sequence[str], single: str) -> dict:
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


def _listed(node_type: str, nodes: Any):
    from ..edge_stream.table import listed_ids  # imports pyarrow

    try:
        return listed_ids(nodes)
    except ValueError as error:
        raise ValueError(f"nodes[{node_type!r}].nodes: {error}") from None


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


def _joined(name: str, values: list[dict], sources: list[EdgesByType]) -> Any:
    """Return the values of all edges, source after source; without values 0, times always, labels -1.

    Above `IN_MEMORY_BYTES` the values of several sources are in a file in the system's temporary folder.
    """
    given = []
    for one, source in zip(values, sources, strict=True):
        given.append(None if one[name] is None else _rows_of_edges(name, one[name], source))
    if all(rows is None for rows in given):
        return None
    if len(given) == 1:
        return given[0]
    widths = {rows.shape[1:] for rows in given if rows is not None}
    if len(widths) > 1:
        raise ValueError(f"features of edges: edge types have {sorted(widths)} columns: give all of them as many")
    width, missing = widths.pop(), {"time": ALWAYS, "weight": 1, "labels": -1}.get(name, 0)
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
            joined[first + start : first + stop] = missing if rows is None else rows[start:stop]
        first += count
    return joined


def _rows_of_edges(name: str, rows: Any, source: EdgesByType) -> Any:
    """Return the values of the edges of one source, times and classes as integers."""
    if name == "features":
        return load_features(rows, _edges(source))
    rows = as_array(f"{source.stream.name}: {name}", opened(rows)).reshape(-1)
    if name in ("weight", "labels") and rows.dtype.kind not in "fiub":
        raise ValueError(f"{source.stream.name}: {name} of edges must be numbers, one an edge, got {rows.dtype}")
    if name == "time":
        return _int64_times(f"{source.stream.name}: time", rows, "edge")
    if name == "labels" and rows.dtype == np.uint64:  # no dtype joins it with the others exactly
        return exact_integers(f"{source.stream.name}: labels", rows, 0, 2**31 - 1, "edge")
    return rows


def _int64_times(name: str, times: Any, unit: str = "row") -> np.ndarray:
    return exact_times(name, times, unit).astype(np.int64, copy=False)  # numpy joins uint64 with others to floats


def _edges(source: EdgesByType) -> int:
    return source.stream.count()[1]
