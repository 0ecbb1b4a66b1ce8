"""Feature tables: dense rows, also as bfloat16 or quantised, or sparse rows (CSR), gathered by node id."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ..dataset.feature_storage import dense_batch_row_bytes, row_code, sparse_batch_row_bytes
from ..errors import PartitionStoreError
from ..jit import kernel
from ..triton_kernels.gather_rows import RowCode, RowTables, encode_codes, gather_rows, gather_tiers, unpack_places
from .array_file import mapped_at_random
from .planned_reads import RankedNodes, read_ranges, read_rows


class Column(Protocol):
    """Values of the nodes of a graph, one row each, wherever they lie. Columns derive from it for what they leave out.

    A column may wrap others: `LoadedRows` has some rows of another in memory, `PackedFeatures` reads halos where they
    lie packed, `FeatureBuffer` spreads rows over tiers, `DistributedFeatures` asks their owners.

    Attributes:
        num_rows, dim, dtype: Number of rows, columns of a row as it is read, and the dtype that `read` gives.
        is_sparse: Whether rows come as `SparseRows`.
        by_node_type: Whether rows come as `TypedRows`, of node types with columns of their own.
        is_packed: Whether the rows of halos lie packed, part after part.
        halo_count: (num_rows,) uint8 number of halos that a node is in, where that is known.
        storage: How rows are quantised, one a node type where rows come by node type; None: they are plain numbers.
        supports: What else it can do: "async" where `read_async` returns before the rows are there, "expect" where it
            prepares what `expect` names.
    """

    num_rows: int
    dim: int
    dtype: np.dtype
    is_sparse: bool
    by_node_type = False
    is_packed = False
    halo_count = None
    storage = None
    supports: frozenset[str] = frozenset()

    @property
    def raw(self) -> "Column":
        """The column of the rows as they are stored: this one, where they are plain numbers."""
        return self

    def read(self, ids: np.ndarray, out: Any = None) -> Any:
        """Return a copy of rows, bit for bit what is stored, quantised ones decoded.

        Args:
            ids: (num,) integers in [0, num_rows), in any order.
            out: Where dense rows go: a (num, dim) array of `dtype`, where there is a `storage` also of float16 or a
                tensor of bfloat16, which stored bfloat16 fills without loss; or a function of (shape, dtype) that gives
                such memory, called once a node type; None: new memory. Sparse rows take no memory of others.

        Returns:
            (num, dim) rows, `SparseRows` or `TypedRows`.
        """

    def read_async(self, ids: np.ndarray, out: Any = None) -> Future:
        """Return a future whose result is that of `read`, done already unless `supports` has "async"."""
        done: Future = Future()
        done.set_result(self.read(ids, out))
        return done

    def load(self, ids: np.ndarray) -> "tuple[Column, np.ndarray | None]":
        """Read the rows of (num,) ascending ids into a column in memory.

        Returns:
            The column, and (num,) the row of it that each id has; None where row i is that of ids[i].
        """

    def at_random(self) -> "Column":
        """Return the column over maps whose faults read a page each, where memory does not hold it; by default it."""
        return self

    def expect(self, batches: Iterable[np.ndarray]) -> None:
        """Be told the ids of the batches to come, in order, so that rows can be prepared; a no-op by default."""


def memory_of(out: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return the memory that rows go to; out: as of `Column.read`."""
    if out is None:
        return np.empty(shape, dtype)
    return out(shape, dtype) if callable(out) else out


@dataclass(frozen=True)
class DenseFeatures(Column):
    """Dense rows over a memory map. `dataclasses.replace(features, array=...)` is the same table over a copy of rows.

    Attributes:
        array: The rows as they are stored: (num_rows, dim) of any dtype that numpy stores, or quantised,
            (num_rows, storage.row_bytes) uint8.
        storage: The form of quantised rows; None where the rows are plain numbers.

    Raises:
        ValueError: array has another width or dtype than storage says.
    """

    array: np.ndarray
    storage: RowCode | None = None
    is_sparse = False

    def __post_init__(self):
        code, array = self.storage, self.array
        if code is not None and (array.dtype != np.uint8 or array.shape[1:] != (code.row_bytes,)):
            raise ValueError(
                f"rows of {code.dim} values of {code.bits} bits must be uint8 of shape (num_rows, {code.row_bytes}), "
                f"got {array.dtype} of shape {array.shape}"
            )

    @property
    def raw(self) -> "DenseFeatures":
        """The table of the rows as they are stored, quantised ones as bytes: what caches hold and workers send."""
        return self if self.storage is None else DenseFeatures(self.array)

    @property
    def num_rows(self) -> int:
        """Number of rows, one a node."""
        return self.array.shape[0]

    @property
    def dim(self) -> int:
        """Features of a row, decoded."""
        return self.array.shape[1] if self.storage is None else self.storage.dim

    @property
    def dtype(self) -> np.dtype:
        """What `read` gives: float32 for codes."""
        return self.array.dtype if self.storage is None else np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.array.nbytes

    @property
    def batch_row_bytes(self) -> float:
        """Bytes of one row in a batch, see `dense_batch_row_bytes`."""
        return dense_batch_row_bytes(self.dim, self.dtype)

    def reading(self, rows: Callable[[], np.ndarray]) -> AbstractContextManager[np.ndarray]:
        """Return what gives `array` while some rows of it are read; rows: gives their (num,) ids, asked if need be."""
        return nullcontext(self.array)

    def read(self, ids: np.ndarray, out: Any = None) -> np.ndarray:
        """Return (num, dim) rows, see `Column.read`; quantised ones, code * scale in float32, also fill float16."""
        out = out((len(ids), self.dim), self.dtype) if callable(out) else out
        return gather_rows(self.array, checked_rows(ids, self.num_rows), out, self.storage)

    def at_random(self) -> "DenseFeatures":
        """Return the table over a map for reads at random, see `mapped_at_random`."""
        return replace(self, array=mapped_at_random(self.array))

    def load(self, nodes: np.ndarray, out: np.ndarray | None = None) -> tuple["DenseFeatures", None]:
        """Read the rows of (num,) ascending ids into a table in memory, by planned reads; see `read_rows`.

        Args:
            nodes: ids.
            out: (num, ...) of the array's dtype, the memory that is filled; None: new memory.

        Returns:
            The table, and (num,) int32 rows of it where they are not in the order of the ids; here None.
        """
        return replace(self, array=read_rows(self.array, checked_rows(nodes, self.num_rows), out)), None


@dataclass(frozen=True)
class SparseRows:
    """A block of sparse rows.

    Attributes:
        indptr: (num_rows + 1,) int64.
        indices: (num_values,) int32 columns, each at most once in a row.
        data: (num_values,) the stored dtype.
        dim: number of columns.
    """

    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray
    dim: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.indptr) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.indptr.nbytes + self.indices.nbytes + self.data.nbytes

    def dense(self, out: np.ndarray | None = None) -> np.ndarray:
        """Return (num_rows, dim) of the stored dtype, zero where nothing is stored; `out` is overwritten."""
        if out is None:
            out = np.zeros((self.num_rows, self.dim), self.data.dtype)
        else:
            out[...] = 0
        rows = np.repeat(np.arange(self.num_rows), np.diff(self.indptr))
        out[rows, self.indices] = self.data
        return out


@dataclass(frozen=True)
class CSRFeatures(Column):
    """Sparse rows over memory maps.

    Attributes:
        indptr: (num_rows + 1,) int64.
        indices: (num_values,) int32.
        data: (num_values,) any dtype of 1, 2, 4 or 8 bytes.
        dim: number of columns.
    """

    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray
    dim: int
    is_sparse = True

    @property
    def num_rows(self) -> int:
        """Number of rows, one a node."""
        return len(self.indptr) - 1

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the stored values, which `read` gives."""
        return self.data.dtype

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.indptr.nbytes + self.indices.nbytes + self.data.nbytes

    @property
    def batch_row_bytes(self) -> float:
        """Bytes of one row in a batch, see `sparse_batch_row_bytes`."""
        return sparse_batch_row_bytes(len(self.indices), self.num_rows)

    def read(self, ids: np.ndarray, out: Any = None) -> SparseRows:
        """Return sparse rows, see `Column.read`.

        Raises:
            PartitionStoreError: a column is outside [0, dim).
        """
        nodes = checked_rows(ids, self.num_rows)
        indptr = np.zeros(len(nodes) + 1, np.int64)
        row_lengths(self.indptr, nodes, indptr)
        indices = np.empty(indptr[-1], np.int32)
        data = np.empty(indptr[-1], self.data.dtype)
        copy_sparse_rows(self.indptr, self.indices, as_bits(self.data), nodes, indptr, indices, as_bits(data))
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.dim:
            raise PartitionStoreError(
                f"features: stored rows name columns {indices.min()} to {indices.max()}, outside [0, {self.dim}):"
                " the store is damaged; write it again with overwrite=True"
            )
        return SparseRows(indptr, indices, data, self.dim)

    def at_random(self) -> "CSRFeatures":
        """Return the table over maps for reads at random, see `mapped_at_random`."""
        return replace(self, indices=mapped_at_random(self.indices), data=mapped_at_random(self.data))

    def load(self, nodes: np.ndarray) -> tuple["CSRFeatures", None]:
        """Read the rows of (num,) ascending ids into a table in memory, by planned reads; see `DenseFeatures.load`."""
        nodes = checked_rows(nodes, self.num_rows)
        begin, end = (np.asarray(self.indptr[at], np.int64) for at in (nodes, nodes + 1))
        indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(end - begin)])
        indices, data = (
            read_ranges(values, begin * values.itemsize, end * values.itemsize).view(values.dtype)
            for values in (self.indices, self.data)
        )
        return replace(self, indptr=indptr, indices=indices, data=data), None


@dataclass(frozen=True)
class LoadedRows(Column):
    """The rows of some nodes of a `Column`, in memory.

    Attributes:
        held: The nodes.
        table: Their rows, in a table of the source's class.
        num_rows: Number of rows in the source table.
        order: (num,) int32 row in `table` of each held node, by ascending id. None: rows are in ascending order of id.
        beside: Rows of other nodes that are in memory anyway, in ascending order of id; None: there are none.
    """

    held: RankedNodes
    table: DenseFeatures | CSRFeatures
    num_rows: int
    order: np.ndarray | None = None
    beside: "LoadedRows | None" = None

    @classmethod
    def of(cls, features, held: RankedNodes, beside: "LoadedRows | None" = None) -> "LoadedRows":
        """Read the rows of a set of nodes of a `Column`, none of which are beside."""
        table, order = features.load(held.count().nodes)
        return cls(held, table, features.num_rows, order, beside)

    @property
    def dim(self) -> int:
        """Features of a row, as of the table."""
        return self.table.dim

    @property
    def dtype(self) -> np.dtype:
        """What `read` gives, as of the table."""
        return self.table.dtype

    @property
    def is_sparse(self) -> bool:
        """Whether rows come as `SparseRows`."""
        return self.table.is_sparse

    @property
    def by_node_type(self) -> bool:
        """Whether rows come as `TypedRows`."""
        return self.table.by_node_type

    @property
    def nbytes(self) -> int:
        """Bytes in memory, without the rows of `beside`."""
        order = 0 if self.order is None else self.order.nbytes
        return self.table.nbytes + self.held.words.nbytes + self.held.before.nbytes + order

    def read(self, ids: np.ndarray, out: Any = None) -> Any:
        """Return rows of ids that are held, here or beside; see `Column.read`."""
        if self.beside is None:
            return self.table.read(self.held.ranks(ids, self.order), out)
        places = self.held.ranks(ids, self.order, self.beside.held)
        tables = self.table, self.beside.table
        if self.is_sparse:
            table, rows = unpack_places(places)
            at = np.flatnonzero(table == 0), np.flatnonzero(table)
            return merge_rows([one.read(rows[where]) for one, where in zip(tables, at, strict=True)], at)
        out = memory_of(out, (len(ids), self.dim), self.dtype)
        return gather_tiers(places, None, RowTables([one.array for one in tables]), out, code=self.table.storage)


def as_stored(features: Column) -> tuple[Column, RowCode | tuple[RowCode | None, ...] | None]:
    """Return the table whose rows are what is stored, and their code; of plain numbers the table itself and None.

    Where node types have tables of their own, there is one code per node type.
    """
    return features.raw, features.storage


def to_stored(rows: np.ndarray, storage: str | None) -> np.ndarray:
    """Return rows in the form that they are stored in; values beyond 16 bits become infinite, quantised rows NaN."""
    if storage is None:
        return rows
    code = row_code(storage, rows.shape[1])
    with np.errstate(over="ignore"):
        return rows.astype(storage, copy=False) if code is None else encode_codes(rows, code)


def stack_rows(blocks: Sequence[SparseRows]) -> SparseRows:
    """Return the sparse rows of several blocks (at least one), one after the other."""
    starts = np.cumsum([0, *(block.indptr[-1] for block in blocks)])
    indptr = [block.indptr[1:] + start for block, start in zip(blocks, starts, strict=False)]
    indices, data = (np.concatenate([getattr(block, name) for block in blocks]) for name in ("indices", "data"))
    return SparseRows(np.concatenate([np.zeros(1, np.int64), *indptr]), indices, data, blocks[0].dim)


def merge_rows(blocks: Sequence[SparseRows], places: Sequence[np.ndarray]) -> SparseRows:
    """Return the sparse rows of several blocks, each at its place.

    Args:
        blocks: at least one.
        places: for each block (num_rows,) integers; together they are 0, 1, ... in any order.
    """
    rows = stack_rows(blocks)
    return CSRFeatures(rows.indptr, rows.indices, rows.data, rows.dim).read(np.argsort(np.concatenate(places)))


def checked_rows(nodes: np.ndarray, num_rows: int) -> np.ndarray:
    """Return ids as an integer array, all inside [0, num_rows), or raise ValueError."""
    nodes = np.asarray(nodes)
    if nodes.dtype.kind not in "iu" and len(nodes):
        raise ValueError(f"node ids must be integers, got {nodes.dtype}")
    if len(nodes) and (nodes.min() < 0 or nodes.max() >= num_rows):
        raise ValueError(f"node ids must be in [0, {num_rows}), got {nodes.min()} to {nodes.max()}")
    return nodes.astype(np.int64, copy=False)


def as_bits(values: np.ndarray) -> np.ndarray:
    """View values as unsigned integers of their size: compiled loops then copy any dtype, NaN patterns too."""
    if values.dtype.itemsize not in (1, 2, 4, 8):
        raise ValueError(f"sparse values must have 1, 2, 4 or 8 bytes each, got {values.dtype}")
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


@kernel
def row_lengths(indptr, rows, out):
    """Running lengths of the chosen rows into out (len(rows) + 1,)."""
    out[0] = 0
    for i in range(len(rows)):
        out[i + 1] = out[i] + indptr[rows[i] + 1] - indptr[rows[i]]


@kernel
def copy_sparse_rows(indptr, indices, bits, rows, out_indptr, out_indices, out_bits):
    """Copy the chosen rows, one after the other."""
    for i in range(len(rows)):
        target = out_indptr[i]
        for source in range(indptr[rows[i]], indptr[rows[i] + 1]):
            out_indices[target] = indices[source]
            out_bits[target] = bits[source]
            target += 1
