"""What changes in a graph that is stored already: edges and nodes that come, change or go, in the user's own ids."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ..edge_stream import EdgeStream, NodeIds, open_edge_stream
from ..edge_stream.open import listed_nodes as ids_of
from ..edge_stream.relations import HeteroStream, IdsByNodeType
from ..errors import EdgeStreamError, check_mapping, short
from ..foreign import csr_of, is_pyg
from ..traits import StreamTraits
from ..values import ALWAYS, same_clock
from .columns import EDGE_COLUMNS, TABLES, CSRArrays, EdgeColumns, masks_by_name, opened, read_rows, read_values
from .graph_dataset import GraphDataset

NODE_COLUMNS = ("features", "labels", "node_time")  # besides masks and further columns by name
BESIDE_DATASET = ("removed_edges", "removed_nodes", "new_node_types", "new_edge_types", "reader")
_SPLITS = ("train", "val", "test")


@dataclass(kw_only=True)
class GraphChange(EdgeColumns):
    """A change of a stored graph; what goes is taken from the old graph, before anything is added.

    Nodes are named by the user's ids: those of `relabel=True` or `nodes=`, else the numbers of rows in the data set
    that the store was written from. Each column is an array, a tensor, a table, or a path, as in `GraphDataset`.

    Of a graph with several node types or edge types, `nodes` and `edges` are by type, each with its columns, as
    `hetero_graph` takes them: nodes={"paper": {"nodes": ids, "features": rows}}, edges={"author,writes,paper":
    {"edges": "new.csv", "time": "new.csv:year"}}; so are `removed_edges` and `removed_nodes`. A graph of one node type
    takes the columns of its nodes plainly, too, and one of one edge type those of its edges.

    Args:
        edges: New edges, as `open_edge_stream` takes them, or an `EdgeStream`. Their ends are nodes of the store, or in
            `nodes`. Where the store has reverses added, those of new edges are added too, and an edge that is there
            already is not stored again.
        nodes: (num_rows,) ids, each once: those that the store lacks are new, the others change.
        features, labels, node_time: (num_rows, ...) rows of `nodes`. New nodes need each column that the store has,
            except for labels (unknown) and masks (in none).
        masks: {"train": (num_rows,) bool, ...}; or (num_rows,) words, see `GraphDataset`. Masks not named stay.
        node_columns: Further columns by name.
        edge_weight, edge_features, edge_time, edge_label: (num_edges, ...) values of the new edges. All that the store
            has are needed, except for edge_label (unknown).
        removed_edges: Edges that go, as `edges` are given; of several between the same two nodes all go, and their
            reverses where the store has them added.
        removed_nodes: (num,) ids of nodes that go, with all their edges.
        new_node_types, new_edge_types: Names of node types, and "source,name,target" of edge types, that the store
            lacks and this change adds; with their nodes and edges.
        reader: Options of the reader of all files of edges, for example {"separator": ";"}.

    Raises:
        ValueError: rows without `nodes`, or values without `edges`; or columns beside those by type.
    """

    edges: Any = None
    nodes: Any = None
    features: Any = None
    labels: Any = None
    masks: Any = None
    node_time: Any = None
    node_columns: dict[str, Any] = field(default_factory=dict)
    removed_edges: Any = None
    removed_nodes: Any = None
    new_node_types: Any = None
    new_edge_types: Any = None
    reader: Mapping = field(default_factory=dict)

    def __post_init__(self):
        self.reader = {} if self.reader is None else self.reader
        check_mapping("reader", self.reader, "{header: true}")
        for name in ("new_node_types", "new_edge_types"):
            setattr(self, name, _listed_types(name, getattr(self, name)))
        columns = {} if self.node_columns is None else self.node_columns
        check_mapping("node_columns", columns, '{"degree": "degree.npy"}')
        self.node_columns = {str(name): read_rows(f"node_columns[{name!r}]", rows) for name, rows in columns.items()}
        self.masks = _masks(self.masks)
        for name in (*NODE_COLUMNS, *EDGE_COLUMNS):
            if getattr(self, name) is not None:
                read = read_rows if name in TABLES else read_values
                setattr(self, name, read(name, getattr(self, name)))
        rows = [name for name in NODE_COLUMNS if getattr(self, name) is not None]
        rows += [f"masks[{name!r}]" for name in self.masks] + [f"node_columns[{name!r}]" for name in self.node_columns]
        if rows and self.nodes is None:
            raise ValueError(f"{rows[0]} is given without nodes: name the node of each row, nodes=")
        if rows and isinstance(self.nodes, Mapping):
            raise ValueError(f"{rows[0]} is given beside nodes by node type: give it there, with its nodes")
        clocks = {name: getattr(self, name) for name in ("node_time", "edge_time")}
        same_clock({name: opened(times) for name, times in clocks.items() if times is not None})
        values = [name for name in EDGE_COLUMNS if getattr(self, name) is not None]
        if values and self.edges is None:
            raise ValueError(f"{values[0]} is given without edges: give the new edges, edges=")
        if values and is_by_type(self.edges):
            raise ValueError(f"{values[0]} is given beside edges by edge type: give it there, with its edges")

    @classmethod
    def of(cls, given: Any, **removed: Any) -> "GraphChange":
        """Return a change; of a `GraphDataset` or PyG's `Data`, whose nodes and edges are added or changed.

        Args:
            given: A `GraphChange`, a `GraphDataset`, PyG's `Data` or `HeteroData`, or None.
            removed: `BESIDE_DATASET`, beside a data set; or all arguments of the class.

        Raises:
            ValueError: something else is given, or arguments besides a `GraphChange`.
        """
        removed = {name: value for name, value in removed.items() if value is not None}
        given_too = [name for name, value in removed.items() if not (isinstance(value, Mapping) and not value)]
        if given is None:
            return cls(**removed)
        if isinstance(given, cls):
            if given_too:
                raise ValueError(f"{given_too[0]} is given besides a GraphChange: name it there")
            return given
        if is_pyg(given):
            from .pyg import load_pyg

            given = load_pyg(given, to_undirected=False)
        if not isinstance(given, GraphDataset):
            raise ValueError(f"a change must be a GraphChange, a GraphDataset or Data of PyG, got {short(given)}")
        doubled = [name for name in given_too if name not in BESIDE_DATASET]
        if doubled:
            raise ValueError(f"{doubled[0]} is given besides a data set, which has its own: give either")
        return cls(**_of_dataset(given), **removed)

    def stream(self, what: str, known: Any) -> EdgeStream | None:
        """Open `edges` or `removed_edges`; their ends are numbered by `known`, which has the members of `NodeIds`."""
        source = getattr(self, what)
        if source is None:
            return None
        if isinstance(source, EdgeStream):
            source.count()  # ids by first appearance are known after a whole pass
            return RenamedStream(source, known)
        try:
            stream = open_edge_stream(source, relabel=True, **self.reader)
            stream.list_nodes(known)
            return stream
        except EdgeStreamError as error:
            raise EdgeStreamError(f"{what}: {error}") from None


class RenamedStream(EdgeStream):
    """The edges of a stream with nodes numbered by other ids, which the stream's own numbers stand for.

    Args:
        stream: Edges.
        known: Numbers the user's ids, see `KnownIds`.
    """

    def __init__(self, stream: EdgeStream, known: Any):
        super().__init__(stream.name, np.dtype(np.int64), stream.options, stream.num_edges)
        self.num_nodes, self.node_ids, self._stream = len(known), None, stream
        self._number = known.renamed(StreamTraits(stream).node_ids)

    def source_files(self) -> list:
        """Return the files of the stream."""
        return self._stream.source_files()

    def _identity(self) -> dict:
        return {"renamed": self._stream.fingerprint()}

    def _numbered_blocks(self, first_edge: int):
        with closing(self._stream.chunks()) as chunks:
            for chunk in chunks:
                yield self._number(chunk.src), self._number(chunk.dst)


def is_by_type(edges: Any) -> bool:
    """Whether edges are by edge type: a mapping, or a list of "source,name,target=path" and mappings."""
    of_types = isinstance(edges, list | tuple) and all(isinstance(one, str | Mapping) for one in edges)
    return isinstance(edges, Mapping) or (of_types and len(edges) > 0)


def _listed_types(name: str, given: Any) -> list[str]:
    """Return names of new types as a list of texts."""
    given = [] if given is None else list(given) if isinstance(given, list | tuple) else given
    if not isinstance(given, list) or any(isinstance(one, bool | int | float | Mapping) for one in given):
        example = '["venue"]' if name == "new_node_types" else '["author,likes,paper"]'
        raise ValueError(f"{name} must be a list such as {example}, got {short(given)}")
    return [one if isinstance(one, str) else ",".join(map(str, one)) for one in given]


def _of_typed_dataset(dataset: GraphDataset) -> dict[str, Any]:
    """Return the arguments of a change that adds the edges of a data set of several types, and its nodes' rows.

    Labels, masks and times of a node type in which every node is without them are not given.
    """
    stream, nodes = dataset.stream, {}
    _, num_edges = stream.count()
    ids = listed_by_type(stream)
    for number, name in enumerate(stream.schema.node_types):
        rows = slice(*stream.type_offsets[number : number + 2].tolist())
        count, flat = rows.stop - rows.start, {"labels": dataset.labels, "time": dataset.node_time}
        given = {what: np.asarray(opened(values))[rows] for what, values in flat.items() if values is not None}
        if "labels" in given and not _any_known(given["labels"], dataset.regression):
            given.pop("labels")
        if "time" in given and (given["time"] == ALWAYS).all():
            given.pop("time")
        masks = {mask: np.asarray(opened(one))[rows] for mask, one in dataset.masks.items()}
        if any(mask.any() for mask in masks.values()):
            given["masks"] = masks
        for what, table in {"features": dataset.features, **dataset.node_columns}.items():
            own = table.get(name) if isinstance(table, Mapping) else rows_between(table, rows)
            if own is not None and what == "features":
                given[what] = own
            elif own is not None:
                given.setdefault("columns", {})[what] = own
        if count and (given or _are_listed(ids[number])):
            nodes[name] = {"nodes": np.arange(count) if ids[number] is None else ids[number], **given}
    values = {name: getattr(dataset, name) for name in EDGE_COLUMNS} if num_edges else {}
    return {"edges": stream if num_edges else None, "nodes": nodes or None, **values}


def listed_by_type(stream: HeteroStream) -> list[NodeIds | None]:
    """Return the user's ids of each node type of a stream; None where they are numbers of rows."""
    ids = StreamTraits(stream).node_ids
    if isinstance(ids, IdsByNodeType):
        return ids.ids
    return [ids] if ids is not None else [None] * stream.num_node_types


def rows_between(table: Any, rows: slice) -> Any:
    """Return some rows of a table of features, dense or sparse; None of none."""
    if table is None:
        return None
    sparse = csr_of(table)
    if sparse is None and not isinstance(table, tuple):
        return np.asarray(opened(table))[rows]
    indptr, indices, data, shape = table if sparse is None else sparse
    first, last = int(indptr[rows.start]), int(indptr[rows.stop])
    shape = (rows.stop - rows.start, int(shape[1]))
    return CSRArrays(indptr[rows.start : rows.stop + 1] - first, indices[first:last], data[first:last], shape)


def _are_listed(ids: Any) -> bool:
    """Whether ids of nodes were given, and not taken from the edges."""
    return isinstance(ids, NodeIds) and ids.listed is not None


def _any_known(labels: np.ndarray, regression: bool) -> bool:
    return bool(np.isfinite(labels).any() if regression else (labels >= 0).any())


def _of_dataset(dataset: GraphDataset) -> dict[str, Any]:
    """Return the arguments of a change that adds a data set's edges and gives its nodes their rows."""
    if isinstance(dataset.stream, HeteroStream):
        return _of_typed_dataset(dataset)
    own = {f.name for f in fields(GraphChange)} & {f.name for f in fields(GraphDataset)}
    columns = {name: getattr(dataset, name) for name in own}
    num_nodes, num_edges = dataset.stream.count()
    ids = StreamTraits(dataset.stream).node_ids
    has_rows = bool(dataset.masks or dataset.node_columns) or any(columns[name] is not None for name in NODE_COLUMNS)
    nodes = None
    if has_rows or _are_listed(ids):
        nodes = np.arange(num_nodes) if ids is None else ids
    return {**columns, "edges": dataset.stream if num_edges else None, "nodes": nodes}


def _masks(masks: Any) -> dict[str, Any]:
    """Return masks by name; of a column of words all three, since each word takes its node out of the others."""
    if masks is None or isinstance(masks, Mapping):
        return masks_by_name(masks)
    found = masks_by_name(masks)
    size = len(next(iter(found.values())))
    return {name: found.get(name, np.zeros(size, bool)) for name in _SPLITS}


def listed_nodes(what: str, nodes: Any) -> NodeIds | None:
    """Return ids of nodes, each once, see `listed_ids`; None where none are given."""
    return nodes if nodes is None or isinstance(nodes, NodeIds) else ids_of(nodes, what)
