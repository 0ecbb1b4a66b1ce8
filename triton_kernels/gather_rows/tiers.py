"""Rows in several tables: the table and row of each node, and where the tables are in memory."""

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cpu import ROW_BITS, SCALE_BYTES

_ROW_MASK = (1 << ROW_BITS) - 1


class RowCode(NamedTuple):
    """The form of rows quantised to a few bits, each row with a scale of its own.

    A row is one run of bytes: the scale as little-endian float32; then the codes in two's complement, two a byte with
    4 bits, the first one in the low half; then zeros up to a multiple of 4 bytes. A value is code * scale in float32.

    Attributes:
        dim: values a row, >= 0.
        bits: 8 or 4.
    """

    dim: int
    bits: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row, a multiple of 4."""
        return SCALE_BYTES + -(-(self.dim * self.bits) // 32) * 4

    @property
    def levels(self) -> int:
        """The largest code; codes are in [-levels, levels]."""
        return 2 ** (self.bits - 1) - 1


def pack_places(table: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return table and row of each node as one number, so that one random read finds both.

    Args:
        table: (num_nodes,) integers in [0, 2**15): of a `Placement`, its `dev_num` moved up to begin at 0.
        row: (num_nodes,) integers in [0, 2**48): its `buf_pos`.

    Returns:
        (num_nodes,) int64, table << 48 | row.
    """
    return (np.asarray(table, np.int64) << ROW_BITS) | np.asarray(row, np.int64)


def unpack_places(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the int64 tables and rows of packed places."""
    return places >> ROW_BITS, places & _ROW_MASK


class RowTables:
    """Tables of equal rows, kept alive, as addresses for the gather.

    Args:
        tables: (num_rows, ...) arrays or tensors, C-contiguous, of one number of bytes a row; tensors of any device
            that the reading device can address; None for a table that cannot be read, whose rows a gather leaves out.
        row_bytes: bytes of a row where no table is given.

    Raises:
        ValueError: a table is not contiguous, or its rows have another length.
    """

    def __init__(self, tables: list[np.ndarray | Tensor | None], row_bytes: int | None = None):
        self.tables = tuple(tables)
        for number, table in enumerate(self.tables):
            if table is None:
                continue
            contiguous = table.is_contiguous() if isinstance(table, Tensor) else table.flags.c_contiguous
            if not contiguous:
                raise ValueError(f"table {number} must be C-contiguous: pass a contiguous copy")
            own = table.dtype.itemsize * int(np.prod(table.shape[1:], dtype=np.int64))
            row_bytes = own if row_bytes is None else row_bytes
            if own != row_bytes:
                raise ValueError(f"table {number} must have rows of {row_bytes} bytes, got {own}")
        self.row_bytes = 0 if row_bytes is None else row_bytes
        self.bases = np.array([_address(table) for table in self.tables], np.int64)
        self._on_device: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self.tables)

    def bases_on(self, device: torch.device) -> Tensor:
        """Return the (num_tables,) int64 addresses on a device."""
        if device not in self._on_device:
            self._on_device[device] = torch.from_numpy(self.bases).to(device)
        return self._on_device[device]

    @cached_property
    def item_bytes(self) -> int:
        """The widest of 8, 4, 2 and 1 bytes that divides the rows and the addresses."""
        for size in (8, 4, 2):
            if self.row_bytes % size == 0 and not (self.bases % size).any():
                return size
        return 1

    @cached_property
    def alignment(self) -> int:
        """The largest power of two up to 16 that divides the rows and the addresses, in bytes."""
        if self.row_bytes % 16 == 0 and not (self.bases % 16).any():
            return 16
        return self.item_bytes


def _address(table: np.ndarray | Tensor | None) -> int:
    if table is None or len(table) == 0:
        return 0
    return table.data_ptr() if isinstance(table, Tensor) else table.ctypes.data
