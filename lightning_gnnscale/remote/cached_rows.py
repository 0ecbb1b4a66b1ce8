"""Memory of cached rows: slots that hold one row each, and rows put together out of slots and of what was sent."""

from typing import Protocol

import numpy as np

from ..jit import kernel
from ..partition_store.features import SparseRows, as_bits
from ..placement.cache_policies import write_rows
from ..sampler.protocol import Allocate
from ..triton_kernels.gather_rows import RowTables, gather_tiers

SENT = (
    1 << 48
)  # a place from here on is a row that was sent, one below is a slot: table 1 and table 0 of `gather_tiers`


class RowSlots(Protocol):
    """Slots for rows of one feature table."""

    def assemble(self, places: np.ndarray, rows, allocate: Allocate):
        """Return rows in order.

        Args:
            places: (num,) int64, a slot, or SENT + position in `rows`.
            rows: The rows that were sent.
            allocate: Allocates the result.

        Raises:
            ValueError: rows are of another kind than those of the slots.
        """

    def store(self, slots: np.ndarray, positions: np.ndarray, assembled) -> None:
        """Copy rows of an assembled result, at the given positions, to slots."""

    def num_bytes(self, rows) -> int:
        """Return the bytes of rows that are sent or assembled."""


class DenseSlots:
    """Slots for dense rows.

    Args:
        num_slots: Number of slots.
        dim, dtype: Length and dtype of a row.
    """

    def __init__(self, num_slots: int, dim: int, dtype: np.dtype | type):
        self._table = np.empty((num_slots, dim), dtype)

    def assemble(self, places: np.ndarray, rows: np.ndarray, allocate: Allocate) -> np.ndarray:
        table = self._table
        if not isinstance(rows, np.ndarray) or rows.dtype != table.dtype or rows.shape[1:] != table.shape[1:]:
            given = f"{rows.dtype} of shape {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
            raise ValueError(f"rows must be {table.dtype} of shape (num, {table.shape[1]}), got {given}")
        out = allocate((len(places), table.shape[1]), table.dtype)
        return gather_tiers(places, None, RowTables([table, np.ascontiguousarray(rows)]), out)

    def store(self, slots: np.ndarray, positions: np.ndarray, assembled: np.ndarray) -> None:
        row_bytes = self._table.shape[1] * self._table.itemsize
        write_rows(_bytes_of(self._table), slots, _bytes_of(assembled), positions, row_bytes)

    def num_bytes(self, rows: np.ndarray) -> int:
        return rows.nbytes


class SparseSlots:
    """Slots for sparse rows, each as wide as the widest row of the feature table.

    Args:
        num_slots: Number of slots.
        dim, dtype: Length and dtype of a row.
        width: Largest number of stored values in a row.
    """

    def __init__(self, num_slots: int, dim: int, dtype: np.dtype | type, width: int):
        self.dim, self.width, self._data_dtype = dim, width, np.dtype(dtype)
        self._lengths = np.zeros(num_slots, np.int32)
        self._indices = np.empty((num_slots, width), np.int32)
        self._bits = as_bits(np.empty((num_slots, width), dtype))

    def assemble(self, places: np.ndarray, rows: SparseRows, allocate: Allocate) -> SparseRows:
        if not isinstance(rows, SparseRows) or rows.data.dtype != self._data_dtype or rows.dim != self.dim:
            raise ValueError(f"rows must be sparse, {self._data_dtype} of dim {self.dim}, got {type(rows).__name__}")
        indptr = allocate((len(places) + 1,), np.int64)
        _count_values(places, self._lengths, rows.indptr, indptr)
        indices = allocate((int(indptr[-1]),), np.int32)
        data = allocate((int(indptr[-1]),), self._data_dtype)
        _copy_values(
            places, self._indices, self._bits, rows.indptr, rows.indices, as_bits(rows.data), indptr, indices,
            as_bits(data),
        )  # fmt: skip
        return SparseRows(indptr, indices, data, self.dim)

    def store(self, slots: np.ndarray, positions: np.ndarray, assembled: SparseRows) -> None:
        widest = int(np.diff(assembled.indptr)[positions].max(initial=0))
        if widest > self.width:
            raise ValueError(f"a row has {widest} values, the widest was to have {self.width}: give the table's widest")
        _store_values(
            slots, positions, assembled.indptr, assembled.indices, as_bits(assembled.data), self._lengths,
            self._indices, self._bits,
        )  # fmt: skip

    def num_bytes(self, rows: SparseRows) -> int:
        return rows.indptr.nbytes + rows.indices.nbytes + rows.data.nbytes


def _bytes_of(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(-1).view(np.uint8)


@kernel
def _count_values(places, lengths, sent_indptr, indptr):
    indptr[0] = 0
    for i in range(len(places)):
        if places[i] < SENT:
            length = np.int64(lengths[places[i]])
        else:
            sent = places[i] - SENT
            length = sent_indptr[sent + 1] - sent_indptr[sent]
        indptr[i + 1] = indptr[i] + length


@kernel
def _copy_values(places, slot_indices, slot_bits, sent_indptr, sent_indices, sent_bits, indptr, indices, bits):
    for i in range(len(places)):
        first = indptr[i]
        if places[i] < SENT:
            slot = places[i]
            for k in range(indptr[i + 1] - first):
                indices[first + k] = slot_indices[slot, k]
                bits[first + k] = slot_bits[slot, k]
        else:
            start = sent_indptr[places[i] - SENT]
            for k in range(indptr[i + 1] - first):
                indices[first + k] = sent_indices[start + k]
                bits[first + k] = sent_bits[start + k]


@kernel
def _store_values(slots, positions, indptr, indices, bits, lengths, slot_indices, slot_bits):
    for i in range(len(slots)):
        first = indptr[positions[i]]
        length = indptr[positions[i] + 1] - first
        lengths[slots[i]] = length
        for k in range(length):
            slot_indices[slots[i], k] = indices[first + k]
            slot_bits[slots[i], k] = bits[first + k]
