"""Nodes of several node types: where those of each type are, and their features, one table per type."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import short
from ..graph import GraphSchema
from ..jit import kernel
from ..triton_kernels.gather_rows import RowCode
from .features import Column, CSRFeatures, DenseFeatures, SparseRows, checked_rows, merge_rows
from .packed_features import PackedFeatures


class TypedRows(NamedTuple):
    """Gathered rows of nodes of several node types.

    Attributes:
        node_type: (num_rows,) int64 type of each node.
        tables: By node type, the rows of its nodes in the order in which they come: (num, dim) array or `SparseRows`;
            None for a node type without features.
    """

    node_type: np.ndarray
    tables: list

    @property
    def num_rows(self) -> int:
        """Number of nodes."""
        return len(self.node_type)

    @property
    def num_featured(self) -> int:
        """Number of nodes of node types with features."""
        return sum(_count(table) for table in self.tables if table is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of the node types and the rows."""
        return self.node_type.nbytes + sum(table.nbytes for table in self.tables if table is not None)

    def rank(self) -> np.ndarray:
        """Return (num_rows,) int64: the row of each node in the table of its node type."""
        rank = np.empty(len(self.node_type), np.int64)
        for number in range(len(self.tables)):
            own = np.flatnonzero(self.node_type == number)
            rank[own] = np.arange(len(own))
        return rank


class NodeTypes(NamedTuple):
    """The node type of a node, and its row among the nodes of that type: the nodes of a type are in runs of ids.

    Attributes:
        starts: (num_runs + 1,) int64, ascending: run r is [starts[r], starts[r + 1]), of node type r % num_node_types.
        rows: (num_runs,) int64 row of the first node of each run among the nodes of its node type.
        num_node_types: Number of node types.
    """

    starts: np.ndarray
    rows: np.ndarray
    num_node_types: int

    @classmethod
    def of_runs(cls, starts: np.ndarray, num_node_types: int) -> "NodeTypes":
        """Return the node types of consecutive runs; rows count up from 0 in each node type."""
        lengths = np.diff(starts).reshape(-1, num_node_types)
        return cls(starts, (np.cumsum(lengths, axis=0) - lengths).reshape(-1), num_node_types)

    def among(self, *nodes: np.ndarray) -> "NodeTypes":
        """Return the node types by position in arrays of ids instead of by id; each array ascends."""
        starts, first = [], 0
        for ids in nodes:
            starts.append(first + np.searchsorted(ids, self.starts))
            first += len(ids)
        runs = [own[:-1] for own in starts[:-1]]  # a run may be of no node
        return NodeTypes.of_runs(np.concatenate([*runs, starts[-1]]), self.num_node_types)

    def locate(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the (num,) int64 node types, and their rows."""
        node_type, row = np.empty(len(nodes), np.int64), np.empty(len(nodes), np.int64)
        _locate(self.starts, self.rows, self.num_node_types, nodes, node_type, row)
        return node_type, row

    def type_of(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (num,) int64 node types."""
        return self.locate(nodes)[0]

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return (num_nodes,) values: for each node that of its type among (num_node_types,) values."""
        return np.repeat(np.resize(values, len(self.rows)), np.diff(self.starts))


class NodeTypesWithRows(NamedTuple):
    """The node types that have rows. Rows follow the order of the nodes' ids, so those of a part are one run.

    Attributes:
        nodes: Where the nodes of each node type are, and the row of each node.
        node_types: Names of all node types.
        has_rows: (num_node_types,) bool.
        part_offsets: (num_parts + 1,) int64 rows of the parts: part p has [part_offsets[p], part_offsets[p + 1]).

    Cost: 16 bytes for each node type in each part; a row is found by a binary search among these.
    """

    nodes: NodeTypes
    node_types: tuple[str, ...]
    has_rows: np.ndarray
    part_offsets: np.ndarray

    @classmethod
    def of(cls, store: Any, node_types: Sequence[str] | None) -> "NodeTypesWithRows | None":
        """Return the store's node types named by `node_types`; None where all nodes have rows.

        Raises:
            ValueError: the store has no node types, one of these names is not among them, or none of them has nodes.
        """
        if node_types is None:
            return None
        has_rows = chosen_node_types(node_types, store.schema)
        if has_rows.all():
            return None
        starts, num_node_types = np.array(store.node_types.starts, np.int64), len(has_rows)
        lengths = np.diff(starts) * np.resize(has_rows, len(starts) - 1)
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        if not first[-1]:
            raise ValueError(
                f"node_types={list(node_types)} have no nodes in the store: leave them out, and name others"
            )
        nodes = NodeTypes(starts, first[:-1].copy(), num_node_types)
        return cls(nodes, store.schema.node_types, has_rows, first[::num_node_types].copy())

    @property
    def names(self) -> list[str]:
        """Names of the node types that have rows."""
        return [name for name, has in zip(self.node_types, self.has_rows, strict=True) if has]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, also of node types without rows."""
        return int(self.nodes.starts[-1])

    @property
    def num_rows(self) -> int:
        """Number of rows, one a node of these node types."""
        return int(self.part_offsets[-1])

    def row_ids(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (num,) int64 rows of some nodes.

        Args:
            nodes: (num,) int64 in [0, num_nodes).

        Raises:
            ValueError: a node's type has no rows.
        """
        node_type, row = self.nodes.locate(nodes)
        known = self.has_rows[node_type]
        if not known.all():
            name = self.node_types[node_type[np.argmin(known)]]
            named = [one for one in self.node_types if one in (*self.names, name)]
            raise ValueError(
                f"nodes of type {name!r} have no learned rows, those of type {', '.join(self.names)} do: "
                f"make the embedding with {said_node_types(named)}"
            )
        return row

    def runs(self, rows: slice) -> Iterator[tuple[slice, slice]]:
        """Yield (ids of nodes, their rows) of each run of nodes among some rows, in ascending order."""
        starts, first = self.nodes.starts, self.nodes.rows
        begins, ends = np.maximum(first, rows.start), np.minimum(np.append(first[1:], self.num_rows), rows.stop)
        for run in np.flatnonzero(begins < ends).tolist():
            start, stop, shift = int(begins[run]), int(ends[run]), int(starts[run] - first[run])
            yield slice(start + shift, stop + shift), slice(start, stop)

    def fits(self, store: Any) -> bool:
        """Whether a store has these node types at these ids."""
        if store.schema is None or store.schema.node_types != self.node_types:
            return False
        return np.array_equal(store.node_types.starts, self.nodes.starts)


def chosen_node_types(node_types: Sequence[str], schema: GraphSchema | None) -> np.ndarray:
    """Return (num_node_types,) bool: which node types are named.

    Raises:
        ValueError: there are no node types, or a name is not one of theirs.
    """
    if schema is None:
        raise ValueError(
            f"node_types={node_types!r}: the graph has one node type, and all its nodes have rows: leave it out"
        )
    known = ", ".join(schema.node_types)
    if isinstance(node_types, str) or not isinstance(node_types, Sequence) or not node_types:
        raise ValueError(f"node_types must be a list of some of {known}, got {short(node_types)}")
    wrong = next((name for name in node_types if name not in schema.node_types), None)
    if wrong is not None:
        raise ValueError(f"node_types must be some of {known}, got {short(wrong)}")
    return np.isin(schema.node_types, list(node_types))


def said_node_types(names: Sequence[str]) -> str:
    """Return the argument that names node types, as Python and the command line say it."""
    return f"node_types={list(names)} (on the command line ++model.inputs.node_types=[{','.join(names)}])"


@dataclass(frozen=True)
class TypedFeatures(Column):
    """The features of all node types, gathered by node; a `Column` but for the rows, which are `TypedRows`.

    Attributes:
        tables: By node type, its rows in the order of its nodes' ids; None for a node type without features.
        node_types: Where the nodes of each node type are.
    """

    tables: tuple[DenseFeatures | CSRFeatures | PackedFeatures | None, ...]
    node_types: NodeTypes
    is_sparse = False
    by_node_type = True  # rows come as `TypedRows`

    @property
    def num_rows(self) -> int:
        """Number of nodes, also of node types without features."""
        return int(self.node_types.starts[-1])

    @property
    def storage(self) -> tuple[RowCode | None, ...] | None:
        """The form of each node type's quantised rows, None for other types; None where no rows are quantised."""
        codes = tuple(None if table is None else table.storage for table in self.tables)
        return codes if any(codes) else None

    @property
    def raw(self) -> "TypedFeatures":
        """The tables of the rows as they are stored, see `DenseFeatures.raw`."""
        if self.storage is None:
            return self
        return replace(self, tables=tuple(None if table is None else table.raw for table in self.tables))

    @property
    def dims(self) -> list[int]:
        """Width of each node type's rows; 0 without features."""
        return [0 if table is None else table.dim for table in self.tables]

    @property
    def dim(self) -> int:
        """Width of the widest rows."""
        return max(self.dims)

    @property
    def dtype(self) -> np.dtype:
        """The dtype that holds the values of all node types."""
        return np.result_type(*(table.dtype for table in self.tables if table is not None))

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(table.nbytes for table in self.tables if table is not None)

    @property
    def row_bytes(self) -> np.ndarray:
        """(num_nodes,) int32 bytes of each node's row as it is stored; 0 for sparse rows, and without features."""
        widths = [0 if table is None or table.is_sparse else stored_row_bytes(table) for table in self.tables]
        return self.node_types.spread(np.array(widths, np.int32))

    @property
    def has_row(self) -> np.ndarray:
        """(num_nodes,) bool: whether a node's type has features."""
        return self.node_types.spread(np.array([table is not None for table in self.tables]))

    @property
    def batch_row_bytes(self) -> float:
        """Mean bytes of one row in a batch, over the nodes of all node types."""
        total = sum(table.batch_row_bytes * table.num_rows for table in self.tables if table is not None)
        return total / max(1, self.num_rows)

    def read(self, ids: np.ndarray, out: Any = None) -> TypedRows:
        """Return rows, see `Column.read`; `out` is a function."""
        node_type, row = self.node_types.locate(checked_rows(ids, self.num_rows))
        tables = enumerate(self.tables)
        rows = [None if table is None else table.read(row[node_type == number], out) for number, table in tables]
        return TypedRows(node_type, rows)

    @property
    def is_packed(self) -> bool:
        """Whether the rows of halos are packed."""
        return any(isinstance(table, PackedFeatures) for table in self.tables)

    def of_part(self, part: int) -> "TypedFeatures":
        """Return the tables as a part reads them, where rows of its halo are packed."""
        tables = [table.of_part(part) if isinstance(table, PackedFeatures) else table for table in self.tables]
        return replace(self, tables=tuple(tables))

    def at_random(self) -> "TypedFeatures":
        """Return the tables over maps for reads at random."""
        return replace(self, tables=tuple(None if table is None else table.at_random() for table in self.tables))

    def load(self, nodes: np.ndarray) -> tuple["TypedFeatures", np.ndarray | None]:
        """Read the rows of (num,) ascending ids into tables in memory, by node type; see `DenseFeatures.load`.

        Returns:
            The tables, and for each node the (num,) int32 position of the node whose row it has; None: its own.
        """
        nodes = checked_rows(nodes, self.num_rows)
        node_type, row = self.node_types.locate(nodes)
        order, loaded = None, []
        for number, table in enumerate(self.tables):
            own = np.flatnonzero(node_type == number)
            rows, places = (None, None) if table is None else table.load(row[own])
            loaded.append(rows)
            if places is not None:
                order = np.arange(len(nodes), dtype=np.int32) if order is None else order
                order[own] = own[places]
        return replace(self, tables=tuple(loaded), node_types=self.node_types.among(nodes)), order

    def holding(self, rows: TypedRows, node_types: NodeTypes) -> "TypedFeatures":
        """Return a table in memory of gathered rows; node_types: where the nodes of each node type are among them."""
        tables = [
            CSRFeatures(own.indptr, own.indices, own.data, own.dim)
            if isinstance(own, SparseRows)
            else own
            if own is None
            else DenseFeatures(own)
            for own in rows.tables
        ]
        return replace(self, tables=tuple(tables), node_types=node_types)


def merge_node_types(blocks: Sequence[TypedRows], places: Sequence[np.ndarray]) -> TypedRows:
    """Return the rows of several blocks, each at its place; arguments as for `merge_rows`."""
    node_type = np.empty(sum(block.num_rows for block in blocks), blocks[0].node_type.dtype)
    for block, own in zip(blocks, places, strict=True):
        node_type[own] = block.node_type
    tables: list = []
    rank = TypedRows(node_type, blocks[0].tables).rank()
    for number, first in enumerate(blocks[0].tables):
        chunks = [block.tables[number] for block in blocks]
        at = [rank[own[block.node_type == number]] for block, own in zip(blocks, places, strict=True)]
        if first is None:
            tables.append(None)
        elif isinstance(first, SparseRows):
            tables.append(merge_rows(chunks, at))
        else:
            tables.append(np.empty((sum(map(len, chunks)), first.shape[1]), first.dtype))
            for chunk, own in zip(chunks, at, strict=True):
                tables[-1][own] = chunk
    return TypedRows(node_type, tables)


def _count(rows) -> int:
    return rows.num_rows if isinstance(rows, SparseRows) else len(rows)


def stored_row_bytes(table: DenseFeatures) -> int:
    """Return the bytes of a dense row as it is stored."""
    return table.raw.dim * np.dtype(table.raw.dtype).itemsize


@kernel
def _locate(starts, rows, num_node_types, nodes, node_type, row):
    run = own = 0
    first, last, shift = starts[0], starts[1], rows[0] - starts[0]
    for i in range(len(nodes)):
        node = nodes[i]
        if not (first <= node < last):  # ids near each other are mostly of one run
            low, high = 0, len(starts) - 1
            while low < high:
                middle = (low + high) >> 1
                if starts[middle + 1] <= node:
                    low = middle + 1
                else:
                    high = middle
            run, own = low, low % num_node_types
            first, last, shift = starts[run], starts[run + 1], rows[run] - starts[run]
        node_type[i] = own
        row[i] = node + shift
