"""A graph with its features, labels and masks: what a run starts from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..edge_stream import EdgeStream, NodeIds
from ..edge_stream.relations import EdgesByType, HeteroStream
from ..errors import check_integer, check_mapping, short
from ..foreign import has_all, is_csr
from ..graph import MASK_NAMES, GraphSchema, check_num_edge_types, numbered_schema
from ..traits import StreamTraits
from ..values import exact_integers, exact_times, of_tensor, same_clock
from .columns import (
    EDGE_COLUMNS,
    TABLES,
    EdgeColumns,
    checked_name,
    masks_by_name,
    one_column,
    opened,
    read_rows,
    read_values,
)
from .feature_storage import (
    check_edge_storage,
    check_storage,
    dense_batch_row_bytes,
    feature_bytes,
    row_code,
    sparse_batch_row_bytes,
)
from .value_checks import UNKNOWN, blocks, check_label_values

LINK_SPLITS = ("val", "test")
SPARSE_LABELS = 100  # labels this many times above the number of distinct ones are taken for a mistake


def checked_classes(labels: np.ndarray, num_classes: int | None) -> int:
    """Return the number of classes, or of labels a node where there are several.

    Args:
        labels: (num_nodes,) classes from 0, -1 or NaN = unknown; or (num_nodes, num_labels) of 0, 1 and -1. Values of
            the latter are left to `check_label_values`, before they are stored.
        num_classes: as the user gave it, or None.

    Cost: one read of classes; with several a node, of the first rows up to a known one.
    """
    if labels.dtype.kind not in "fiub":
        raise ValueError(f"labels must be numbers, got {labels.dtype}")
    if labels.ndim not in (1, 2):
        raise ValueError(f"labels must have shape (num_nodes,) or (num_nodes, num_labels), got {labels.shape}")
    return _checked_several(labels, num_classes) if labels.ndim == 2 else _checked_single(labels, num_classes)


def _checked_several(labels: np.ndarray, num_classes: int | None) -> int:
    if not any(((rows == 0) | (rows == 1)).any() for _, rows in blocks(labels)):
        check_label_values(labels)
        raise ValueError("labels: no node has one, all are -1; training needs some")
    if num_classes is not None and num_classes != labels.shape[1]:
        raise ValueError(
            f"num_classes must be {labels.shape[1]}, the columns of the labels, or None; got {num_classes}"
        )
    return labels.shape[1]


def _checked_single(labels: np.ndarray, num_classes: int | None) -> int:
    check_label_values(labels)
    largest, row, values = UNKNOWN, -1, np.empty(0, np.int64)
    for begin, rows in blocks(labels):
        if labels.dtype.kind == "f":
            rows = np.where(np.isnan(rows), UNKNOWN, rows)
        rows = rows.astype(np.int64, copy=False)
        if rows.max(initial=UNKNOWN) > largest:
            largest, row = int(rows.max()), begin + int(rows.argmax())
        if num_classes is None:
            values = np.union1d(values, rows[rows >= 0])
    if largest == UNKNOWN:
        raise ValueError("labels: no node has one, all are -1; training needs some")
    if num_classes is not None:
        if largest >= num_classes:
            raise ValueError(f"labels must be below num_classes {num_classes}, got {largest} in row {row}")
        return num_classes
    if largest + 1 > SPARSE_LABELS * len(values):
        raise ValueError(
            f"labels go up to {largest} (row {row}), but only {len(values)} values occur: renumber them "
            f"from 0, or set num_classes={largest + 1}"
        )
    return largest + 1


def check_link_names(links: Any) -> None:
    """Refuse links that are not by split, "val" or "test", which would never be evaluated."""
    check_mapping("links", links, '{"test": LinkSet(edges)}')
    for name, given in links.items():
        if name not in LINK_SPLITS:
            raise ValueError(f"links must be named {' or '.join(LINK_SPLITS)}, got {short(name)}")
        if given is not None and not has_all(given, "edges", "negatives", "_replace"):
            raise ValueError(f"links[{name!r}] must be a LinkSet(edges, ...), got {short(given)}")


def checked_targets(labels: np.ndarray) -> np.ndarray:
    """Return numbers to predict as (num_nodes, num_targets) float32, NaN where they are unknown."""
    if labels.dtype.kind not in "fiub" or labels.ndim not in (1, 2):
        raise ValueError(
            f"labels must be (num_nodes,) or (num_nodes, num_targets) numbers, got {labels.dtype} of {labels.shape}"
        )
    labels = labels.astype(np.float32).reshape(len(labels), -1)
    if np.isinf(labels).any():
        row = int(np.argmax(np.isinf(labels).any(axis=1)))
        raise ValueError(f"labels must be finite or NaN (unknown), got {labels[row].tolist()} in row {row}")
    if not np.isfinite(labels).any():
        raise ValueError("labels: no node has one, all are NaN; training needs some")
    return labels


@dataclass
class GraphDataset(EdgeColumns):
    """Edges as a stream, and per-node data in the order of the stream's ids.

    A stream with `relabel=True` numbers its ids by first appearance: row i describes `np.asarray(stream.node_ids)[i]`.
    Before the stream has been read once (`stream.count()`), rows are refused. With
    `open_edge_stream(..., nodes=ids)` row i describes ids[i].

    Rows are arrays, memmaps, tensors, tables or columns of pandas, polars or Arrow, or paths: of .npy, which is mapped,
    or of .parquet, .csv or .tsv, which are read. "nodes.csv:label" names a column.

    Attributes:
        name: short, used in the names of folders.
        stream: the edges.
        features: (num_nodes, dim) rows; a sparse matrix of SciPy or torch, `CSRArrays` or a tuple of its four; or None.
        labels: (num_nodes,) or (num_nodes, 1) integers with -1 = unknown, or (num_nodes, num_labels) of 0, 1 and -1
            for several labels a node, or None.
        masks: {"train": bool (num_nodes,), "val": ..., "test": ...}; of integers, the rows of the nodes, each once.
            Or (num_nodes,) words, "nodes.csv:split" or a column: train, val (valid, validation) and test in any case of
            letters; a node with another word or none is in no mask.
        num_classes: classes, or labels a node where there are several.
        edge_weight, edge_features: by edge id of the stream, or None.
        links: {"val": LinkSet, "test": LinkSet}, edges that the stream does not have, see `hold_out_edges`.
        source: what identifies it beyond the stream, for fingerprints: plain values.
        feature_storage: How a store of it holds the features, see `write_partition_store`; None: as given.
        edge_storage: How a store of it holds the neighbours, see `write_partition_store`; None: as ids.
        edge_type: (num_edges,) integers, edge type of each edge, in a graph of one node type; None: one edge type.
            `hetero_graph` makes graphs of several node types.
        schema: Names of the edge types of `edge_type`; None: they are named by their numbers.
        node_time, edge_time: (num_nodes,) and (num_edges,) integers or dates, when a node or an edge appears; or None.
            Dates of any unit become nanoseconds since 1970; floats, which would have to be rounded, are refused.
        edge_label: (num_edges,) integers, class of each edge from 0, -1 = unknown, for `EdgeClassifier`; or None.
        regression: Whether labels are numbers to predict, (num_nodes,) or (num_nodes, num_targets) floats with NaN =
            unknown, instead of classes; `num_classes` is then their number a node.

        node_columns: Further columns of the nodes by name, each like `features`; batches have them in `columns`, and a
            backbone whose `forward` names one gets it.

    Raises:
        ValueError: a shape, rows whose order cannot be known yet, or labels that are not classes. Other values are
            checked once, before they are stored.

    Cost: one read of the classes.
    """

    name: str
    stream: EdgeStream
    features: Any = None
    labels: Any = None
    masks: dict[str, np.ndarray] = field(default_factory=dict)
    num_classes: int | None = None
    source: dict = field(default_factory=dict)
    links: dict[str, Any] = field(default_factory=dict)
    feature_storage: str | None = None
    edge_type: Any = None
    schema: GraphSchema | None = None
    node_time: Any = None
    regression: bool = False
    node_columns: dict[str, Any] = field(default_factory=dict)
    edge_storage: str | None = None

    def __post_init__(self):
        if self.num_classes is not None:
            check_integer("num_classes", self.num_classes, 1)
            self.num_classes = int(self.num_classes)
        check_edge_storage(self.edge_storage)
        self.masks = masks_by_name(self.masks)
        if isinstance(self.stream, HeteroStream):
            self.schema = self.stream.schema
        elif self.edge_type is not None:
            self.edge_type = np.asarray(of_tensor(opened(self.edge_type)))
            self.stream = with_relations(self.stream, self.edge_type, self.schema)
            self.schema = self.stream.schema
        check_link_names(self.links)
        self.links = {name: self._checked_links(name, links) for name, links in self.links.items()}
        unknown = sorted(set(self.masks) - set(MASK_NAMES))
        if unknown:
            raise ValueError(f"masks must be named {', '.join(MASK_NAMES)}; got {', '.join(unknown)}")
        self._read_columns()
        for rows in self._tables():
            if len(rows.shape) != 2:
                raise ValueError(f"features must have shape (num_nodes, dim), got {rows.shape}")
            check_storage(self.feature_storage, rows)
        if self.features is None:
            check_storage(self.feature_storage, None)
        columns = {} if self.node_columns is None else self.node_columns
        check_mapping("node_columns", columns, '{"degree": "degree.npy"}')
        self.node_columns = {checked_name(name): rows for name, rows in columns.items()}
        self._check_row_order()
        self.masks = {name: self._mask(name, mask) for name, mask in self.masks.items()}
        if self.labels is not None and self.regression:
            self.labels = checked_targets(np.asarray(self.labels))
            self.num_classes = self.labels.shape[1]
        elif self.labels is not None:
            self.labels = one_column(self.labels)
            self.num_classes = checked_classes(np.asarray(self.labels), self.num_classes)

    def _checked_links(self, split: str, links: Any) -> Any:
        """Return the links of a split with int64 ids; fractions, NaN, negative and unknown ids are refused."""
        if links is None:
            return None
        most = np.iinfo(np.int64).max if self.stream.num_nodes is None else self.stream.num_nodes - 1
        edges = exact_integers(f"links[{split!r}].edges", links.edges, 0, most, "link", whole_floats=True)
        if links.time is None:
            return links._replace(edges=edges)
        return links._replace(edges=edges, time=exact_times(f"links[{split!r}].time", links.time, "link"))

    def _read_columns(self) -> None:
        """Turn columns into arrays; features at a .npy path stay a path, opened by each process."""
        if isinstance(self.features, Mapping):
            given = {node_type: rows for node_type, rows in self.features.items() if rows is not None}
            self.features = {name: read_rows(f"nodes[{name!r}].features", rows) for name, rows in given.items()} or None
        for name in ("features", "labels", "node_time", *EDGE_COLUMNS):
            rows = getattr(self, name)
            if rows is None or isinstance(rows, Mapping):
                continue
            read = read_rows if name in TABLES else read_values
            setattr(self, name, read_values(name, rows, keep_path=False) if name == "labels" else read(name, rows))
        same_clock({name: getattr(self, name) for name in ("node_time", "edge_time")})
        for name in ("node_time", "edge_time"):
            if isinstance(getattr(self, name), np.ndarray):
                setattr(self, name, exact_times(name, getattr(self, name)))

    def _mask(self, name: str, mask: Any) -> np.ndarray:
        mask = np.asarray(read_values(f"masks[{name!r}]", mask, keep_path=False))
        if mask.dtype == bool or mask.dtype.kind not in "iu":
            return mask  # checked where the store is written
        rows = next((rows for rows in (self.labels, self.features) if rows is not None), None)
        num_nodes = self.stream.count()[0] if rows is None else np.shape(opened(rows))[0]
        return as_mask(f"masks[{name!r}]", mask, num_nodes)

    @property
    def multilabel(self) -> bool:
        """Whether a node has several labels, one a column."""
        return self.labels is not None and np.ndim(self.labels) == 2 and not self.regression

    @property
    def feature_dim(self) -> int:
        """Feature columns of the node type that has most; 0 without."""
        return max((int(rows.shape[1]) for rows in self._tables()), default=0)

    @property
    def feature_dims(self) -> dict[str, int] | None:
        """Feature columns by node type, 0 for a node type without; None where all nodes have one table."""
        if not isinstance(self.features, Mapping):
            return None
        widths = dict(zip(self.features, (int(rows.shape[1]) for rows in self._tables()), strict=True))
        return {node_type: widths.get(node_type, 0) for node_type in self.schema.node_types}

    @property
    def type_sizes(self) -> dict[str, int] | None:
        """Number of nodes by node type; None in a graph of one node type and one edge type."""
        if not isinstance(self.stream, HeteroStream):
            return None
        return dict(zip(self.schema.node_types, np.diff(self.stream.type_offsets).tolist(), strict=True))

    @property
    def edge_dim(self) -> int | None:
        """Columns of the edge features; None without."""
        return None if self.edge_features is None else int(np.shape(opened(self.edge_features))[-1])

    @property
    def num_edge_classes(self) -> int:
        """Number of classes of edges, including `links`; 0 without."""
        labels = [links.label for links in self.links.values() if links is not None]
        labels.append(None if self.edge_label is None else opened(self.edge_label))
        return max((int(np.max(given, initial=-1)) + 1 for given in labels if given is not None), default=0)

    @property
    def feature_bytes(self) -> int:
        """Bytes of the features on disk, as a store of `feature_storage` holds them."""
        return sum(feature_bytes(rows, self.feature_storage) for rows in self._tables())

    @property
    def placeable_bytes(self) -> int:
        """Bytes of the dense features among them, which a placement can put on devices."""
        return sum(feature_bytes(rows, self.feature_storage) for rows in self._tables() if not is_csr(rows))

    @property
    def edge_row_bytes(self) -> int:
        """Bytes that one edge of the store takes beside its source: its float32 weight, its features as given."""
        total = self.stream.edge_type_dtype.itemsize if isinstance(self.stream, HeteroStream) else 0
        for name, column in EDGE_COLUMNS.items():
            if getattr(self, name) is not None:
                rows = np.asanyarray(opened(getattr(self, name)))
                total += math.prod(rows.shape[1:]) * np.dtype(column.dtype or rows.dtype).itemsize
        return total

    @property
    def batch_row_bytes(self) -> float:
        """Bytes of one feature row in a batch: as gathered, and its float32 copy; of sparse rows the nonzeros."""
        tables = self._tables()
        total = sum(self._batch_row_bytes(rows) * rows.shape[0] for rows in tables)
        num_nodes = self.stream.num_nodes if self.feature_dims is not None else sum(rows.shape[0] for rows in tables)
        return total / max(1, num_nodes)

    def _batch_row_bytes(self, rows) -> float:
        if is_csr(rows):
            return sparse_batch_row_bytes(len(rows.indices), rows.shape[0])
        code = row_code(self.feature_storage, rows.shape[1])
        gathered = np.float32 if code is not None else self.feature_storage or rows.dtype
        return dense_batch_row_bytes(rows.shape[1], np.dtype(gathered))

    def _check_row_order(self) -> None:
        node_ids = StreamTraits(self.stream).node_ids
        given = [name for name in ("features", "labels") if getattr(self, name) is not None]
        given += ["masks"] if self.masks else []
        if given and node_ids is not None and not node_ids.complete:
            raise ValueError(
                f"{given[0]}: the stream's relabel=True numbers ids by first appearance and it has not been read, so "
                "nothing says which node a row describes: say open_edge_stream(..., nodes=) with the id of each row; "
                "or call stream.count(), and place row i of your own at stream.node_ids.index_of(ids)[i]"
            )

    def _tables(self) -> list:
        """Return the features, of each node type that has some, as arrays with a shape."""
        if self.features is None:
            return []
        tables = list(self.features.values()) if isinstance(self.features, Mapping) else [self.features]
        return [rows if is_csr(rows) else np.asanyarray(opened(rows)) for rows in tables]


def with_relations(stream: EdgeStream, edge_type: np.ndarray, schema: GraphSchema | None) -> HeteroStream:
    """Return the edges of a graph of one node type, distinguished by edge type.

    Args:
        stream: Edges. With `to_undirected` the reverse of an edge has an edge type of its own, named "rev_...".
        edge_type: (num_edges,) edge type of each edge, from 0.
        schema: Names of the edge types, without those of reverses; None: their numbers.
    """
    if edge_type.ndim != 1 or edge_type.dtype.kind not in "iu":
        raise ValueError(f"edge_type must be (num_edges,) integers, got {edge_type.dtype} of shape {edge_type.shape}")
    if schema is None:
        numbers = int(edge_type.max(initial=0)) + 1
        check_num_edge_types(numbers * (2 if stream.to_undirected else 1), "edge_type")
        schema = numbered_schema(numbers, "edge_type")
    if schema.num_node_types > 1:
        raise ValueError("edge_type= is for graphs of one node type: make those of several by gs.hetero_graph")
    if stream.to_undirected and not schema.reverse:
        schema = schema.with_reverses(separate=True)
    num_nodes, _ = stream.count()
    options = {"chunk_edges": stream.chunk_edges, "remove_self_loops": stream.remove_self_loops}
    found = HeteroStream(
        [EdgesByType(stream, edge_type)], schema, [num_nodes], to_undirected=stream.to_undirected, **options
    )
    found.node_ids = stream.node_ids
    return found


def as_mask(key: str, array: np.ndarray, num_nodes: int, node_ids: NodeIds | None = None) -> np.ndarray:
    """Return a (num_nodes,) bool mask of one, or of (num,) node ids, each once; node_ids None: row numbers.

    Raises:
        ValueError: of another shape or type, or an unknown or repeated id.
    """
    if array.ndim != 1:
        raise ValueError(f"{key} must have one axis, got shape {array.shape}")
    if array.dtype == bool:
        if len(array) != num_nodes:
            raise ValueError(f"{key}: {len(array)} entries, but the graph has {num_nodes} nodes")
        return array
    texts = node_ids is not None and node_ids.are_strings
    if array.dtype.kind not in ("UO" if texts else "iu"):
        raise ValueError(f"{key} must hold bool or node ids, got {array.dtype}")
    if node_ids is not None:
        try:
            rows = node_ids.index_of(array)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    elif len(array) and not (0 <= array.min() and array.max() < num_nodes):
        raise ValueError(f"{key}: node ids must be in [0, {num_nodes}), got {array.min()} to {array.max()}")
    else:
        rows = array
    mask = np.zeros(num_nodes, bool)
    mask[rows] = True
    if mask.sum() < len(array):
        raise ValueError(
            f"{key}: {len(array)} ids, but only {mask.sum()} different ones; a mask of 0 and 1 a node must "
            "be saved as bool: numpy.save(file, mask.astype(bool)), or hold true and false in a column"
        )
    return mask
