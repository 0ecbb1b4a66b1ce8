"""Nodes of several kinds: where those of each kind are, and their features, a table a kind."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..graph import GraphSchema
from ..jit import kernel
from ..triton_kernels.gather_rows import RowCode
from .features import CSRFeatures, DenseFeatures, FeatureTable, SparseRows, checked_rows, merge_rows
from .packed_features import PackedFeatures


class KindRows(NamedTuple):
    """Gathered rows of nodes of several kinds.

    Attributes:
        kind: (num_rows,) int64 kind of each node.
        tables: By kind, the rows of its nodes in the order in which they come: (num, dim) array or `SparseRows`; None
            for a kind without features.
    """

    kind: np.ndarray
    tables: list

    @property
    def num_rows(self) -> int:
        """Number of nodes."""
        return len(self.kind)

    @property
    def num_featured(self) -> int:
        """Number of nodes of kinds with features."""
        return sum(_count(table) for table in self.tables if table is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of the kinds and the rows."""
        return self.kind.nbytes + sum(table.nbytes for table in self.tables if table is not None)

    def rank(self) -> np.ndarray:
        """Return (num_rows,) int64: the row of each node in the table of its kind."""
        rank = np.empty(len(self.kind), np.int64)
        for number in range(len(self.tables)):
            own = np.flatnonzero(self.kind == number)
            rank[own] = np.arange(len(own))
        return rank


class NodeKinds(NamedTuple):
    """Which kind a node is of, and which row of its kind it has: kinds stand in runs of ids.

    Attributes:
        starts: (num_runs + 1,) int64, ascending: run r is [starts[r], starts[r + 1]), of kind r % num_kinds.
        rows: (num_runs,) int64 row of the first node of each run among the nodes of its kind.
        num_kinds: Number of kinds.
    """

    starts: np.ndarray
    rows: np.ndarray
    num_kinds: int

    @classmethod
    def of_runs(cls, starts: np.ndarray, num_kinds: int) -> "NodeKinds":
        """Return the kinds of runs that follow each other; rows count up from 0 in each kind."""
        lengths = np.diff(starts).reshape(-1, num_kinds)
        return cls(starts, (np.cumsum(lengths, axis=0) - lengths).reshape(-1), num_kinds)

    def among(self, *nodes: np.ndarray) -> "NodeKinds":
        """Return the kinds of positions in ids, in place of the ids themselves: each of (num,) ascending ones."""
        starts, first = [], 0
        for ids in nodes:
            starts.append(first + np.searchsorted(ids, self.starts))
            first += len(ids)
        runs = [own[:-1] for own in starts[:-1]]  # a run may be of no node
        return NodeKinds.of_runs(np.concatenate([*runs, starts[-1]]), self.num_kinds)

    def locate(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the (num,) int64 kinds of nodes, and their rows."""
        kind, row = np.empty(len(nodes), np.int64), np.empty(len(nodes), np.int64)
        _locate(self.starts, self.rows, self.num_kinds, nodes, kind, row)
        return kind, row

    def kind_of(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (num,) int64 kinds of nodes."""
        return self.locate(nodes)[0]

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return the (num_nodes,) value of each node's kind, of (num_kinds,) values."""
        return np.repeat(np.resize(values, len(self.rows)), np.diff(self.starts))


class KindsWithRows(NamedTuple):
    """The kinds of nodes that have rows; rows are counted in the order of the nodes' ids, so those of a part are a run.

    Attributes:
        nodes: Where the nodes of each kind are; its row of a node is the node's row here.
        node_types: Names of all kinds.
        has_rows: (num_kinds,) bool.
        part_offsets: (num_parts + 1,) int64 rows of the parts: part p has [part_offsets[p], part_offsets[p + 1]).

    Cost: 16 bytes for each kind in each part; a row is found by a binary search among these.
    """

    nodes: NodeKinds
    node_types: tuple[str, ...]
    has_rows: np.ndarray
    part_offsets: np.ndarray

    @classmethod
    def of(cls, store: Any, kinds: Sequence[str] | None) -> "KindsWithRows | None":
        """Return what `kinds` of a store say; None where all nodes have rows.

        Raises:
            ValueError: the store has no kinds, one of that name is not there, or none of them has a node.
        """
        if kinds is None:
            return None
        has_rows = chosen_kinds(kinds, store.schema)
        if has_rows.all():
            return None
        starts, num_kinds = np.array(store.node_kinds.starts, np.int64), len(has_rows)
        lengths = np.diff(starts) * np.resize(has_rows, len(starts) - 1)
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        if not first[-1]:
            raise ValueError(f"kinds={list(kinds)} have no nodes in the store: leave them out, and name others")
        nodes = NodeKinds(starts, first[:-1].copy(), num_kinds)
        return cls(nodes, store.schema.node_types, has_rows, first[::num_kinds].copy())

    @property
    def names(self) -> list[str]:
        """Names of the kinds that have rows."""
        return [name for name, has in zip(self.node_types, self.has_rows, strict=True) if has]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, also of kinds without rows."""
        return int(self.nodes.starts[-1])

    @property
    def num_rows(self) -> int:
        """Number of rows, one a node of these kinds."""
        return int(self.part_offsets[-1])

    def row_ids(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (num,) int64 rows of some nodes.

        Args:
            nodes: (num,) int64 in [0, num_nodes).

        Raises:
            ValueError: a node is of a kind without rows.
        """
        kind, row = self.nodes.locate(nodes)
        known = self.has_rows[kind]
        if not known.all():
            name = self.node_types[kind[np.argmin(known)]]
            named = [one for one in self.node_types if one in (*self.names, name)]
            raise ValueError(
                f"nodes of kind {name!r} have no learned rows, those of kind {', '.join(self.names)} do: make the "
                f"embedding with {said_kinds(named)}"
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
        """Whether a store has these kinds of nodes at these ids."""
        if store.schema is None or store.schema.node_types != self.node_types:
            return False
        return np.array_equal(store.node_kinds.starts, self.nodes.starts)


def chosen_kinds(kinds: Sequence[str], schema: GraphSchema | None) -> np.ndarray:
    """Return (num_kinds,) bool: which kinds of nodes are named.

    Raises:
        ValueError: there are no kinds, or these are not the names of some.
    """
    if schema is None:
        raise ValueError(f"kinds={kinds!r}: the graph has nodes of one kind, which all have rows: leave it out")
    known = ", ".join(schema.node_types)
    if isinstance(kinds, str) or not isinstance(kinds, Sequence) or not kinds:
        raise ValueError(f"kinds must be a list of some of {known}, got {kinds!r}")
    wrong = next((name for name in kinds if name not in schema.node_types), None)
    if wrong is not None:
        raise ValueError(f"kinds must be some of {known}, got {wrong!r}")
    return np.isin(schema.node_types, list(kinds))


def said_kinds(names: Sequence[str]) -> str:
    """Return the argument that names kinds, as Python and the command line say it."""
    return f"kinds={list(names)} (on the command line ++model.inputs.kinds=[{','.join(names)}])"


@dataclass(frozen=True)
class KindFeatures(FeatureTable):
    """The features of all kinds, gathered by node; a `FeatureTable` but for the rows, which are `KindRows`.

    Attributes:
        tables: By kind, its rows in the order of its nodes' ids; None for a kind without features.
        kinds: Where the nodes of each kind are.
    """

    tables: tuple[DenseFeatures | CSRFeatures | PackedFeatures | None, ...]
    kinds: NodeKinds
    is_sparse = False
    by_kind = True  # rows come as `KindRows`

    @property
    def num_rows(self) -> int:
        """Number of nodes, also of kinds without features."""
        return int(self.kinds.starts[-1])

    @property
    def storage(self) -> tuple[RowCode | None, ...] | None:
        """The form of the codes of each kind, None for one whose rows are none; None where no kind has codes."""
        codes = tuple(None if table is None else table.storage for table in self.tables)
        return codes if any(codes) else None

    @property
    def raw(self) -> "KindFeatures":
        """The tables of the rows as they are stored, see `DenseFeatures.raw`."""
        if self.storage is None:
            return self
        return replace(self, tables=tuple(None if table is None else table.raw for table in self.tables))

    @property
    def dims(self) -> list[int]:
        """Width of each kind's rows; 0 without features."""
        return [0 if table is None else table.dim for table in self.tables]

    @property
    def dim(self) -> int:
        """Width of the widest rows."""
        return max(self.dims)

    @property
    def dtype(self) -> np.dtype:
        """The dtype that holds the values of all kinds."""
        return np.result_type(*(table.dtype for table in self.tables if table is not None))

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(table.nbytes for table in self.tables if table is not None)

    @property
    def row_bytes(self) -> np.ndarray:
        """(num_nodes,) int32 bytes of each node's row as it is stored; 0 for sparse rows, and without features."""
        widths = [0 if table is None or table.is_sparse else stored_row_bytes(table) for table in self.tables]
        return self.kinds.spread(np.array(widths, np.int32))

    @property
    def has_row(self) -> np.ndarray:
        """(num_nodes,) bool: whether a node is of a kind with features."""
        return self.kinds.spread(np.array([table is not None for table in self.tables]))

    @property
    def batch_row_bytes(self) -> float:
        """Mean bytes of one row in a batch, over the nodes of all kinds."""
        total = sum(table.batch_row_bytes * table.num_rows for table in self.tables if table is not None)
        return total / max(1, self.num_rows)

    def gather(self, nodes: np.ndarray, take: Any = None) -> KindRows:
        """Copy rows.

        Args:
            nodes: (num,) integers in [0, num_rows).
            take: Gives memory for dense rows, called with (shape, dtype); None: new memory.
        """
        kind, row = self.kinds.locate(checked_rows(nodes, self.num_rows))
        rows: list = []
        for number, table in enumerate(self.tables):
            chosen = row[kind == number]
            if table is None:
                rows.append(None)
            elif table.is_sparse or take is None:
                rows.append(table.gather(chosen))
            else:
                rows.append(table.gather(chosen, out=take((len(chosen), table.dim), table.dtype)))
        return KindRows(kind, rows)

    @property
    def is_packed(self) -> bool:
        """Whether the rows of halos are packed."""
        return any(isinstance(table, PackedFeatures) for table in self.tables)

    def of_part(self, part: int) -> "KindFeatures":
        """Return the tables as a part reads them, where rows of its halo are packed."""
        tables = [table.of_part(part) if isinstance(table, PackedFeatures) else table for table in self.tables]
        return replace(self, tables=tuple(tables))

    def load(self, nodes: np.ndarray) -> tuple["KindFeatures", np.ndarray | None]:
        """Read the rows of (num,) ascending ids into tables in memory, kind by kind; see `DenseFeatures.load`.

        Returns:
            The tables, and (num,) int32 the place among the nodes whose row in them each node has; None: its own.
        """
        nodes = checked_rows(nodes, self.num_rows)
        kind, row = self.kinds.locate(nodes)
        order, loaded = None, []
        for number, table in enumerate(self.tables):
            own = np.flatnonzero(kind == number)
            rows, places = (None, None) if table is None else table.load(row[own])
            loaded.append(rows)
            if places is not None:
                order = np.arange(len(nodes), dtype=np.int32) if order is None else order
                order[own] = own[places]
        return replace(self, tables=tuple(loaded), kinds=self.kinds.among(nodes)), order

    def holding(self, rows: KindRows, kinds: NodeKinds) -> "KindFeatures":
        """Return a table in memory of gathered rows; kinds: where the nodes of each kind are among them."""
        tables = [
            CSRFeatures(own.indptr, own.indices, own.data, own.dim)
            if isinstance(own, SparseRows)
            else own
            if own is None
            else DenseFeatures(own)
            for own in rows.tables
        ]
        return replace(self, tables=tuple(tables), kinds=kinds)


def merge_kinds(blocks: Sequence[KindRows], places: Sequence[np.ndarray]) -> KindRows:
    """Return the rows of several blocks, each at its place; arguments as for `merge_rows`."""
    kind = np.empty(sum(block.num_rows for block in blocks), blocks[0].kind.dtype)
    for block, own in zip(blocks, places, strict=True):
        kind[own] = block.kind
    tables: list = []
    rank = KindRows(kind, blocks[0].tables).rank()
    for number, first in enumerate(blocks[0].tables):
        pieces = [block.tables[number] for block in blocks]
        at = [rank[own[block.kind == number]] for block, own in zip(blocks, places, strict=True)]
        if first is None:
            tables.append(None)
        elif isinstance(first, SparseRows):
            tables.append(merge_rows(pieces, at))
        else:
            tables.append(np.empty((sum(map(len, pieces)), first.shape[1]), first.dtype))
            for piece, own in zip(pieces, at, strict=True):
                tables[-1][own] = piece
    return KindRows(kind, tables)


def _count(rows) -> int:
    return rows.num_rows if isinstance(rows, SparseRows) else len(rows)


def stored_row_bytes(table: DenseFeatures) -> int:
    """Return the bytes of a dense row as it is stored."""
    return table.raw.dim * np.dtype(table.raw.dtype).itemsize


@kernel
def _locate(starts, rows, num_kinds, nodes, kind, row):
    run = 0
    for i in range(len(nodes)):
        node = nodes[i]
        if not (starts[run] <= node < starts[run + 1]):  # ids near each other are mostly of one run
            low, high = 0, len(starts) - 1
            while low < high:
                middle = (low + high) >> 1
                if starts[middle + 1] <= node:
                    low = middle + 1
                else:
                    high = middle
            run = low
        kind[i] = run % num_kinds
        row[i] = rows[run] + node - starts[run]
