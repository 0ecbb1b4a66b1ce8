"""Rows in several tables, where the tables are in memory, and how the Triton gathers of them are launched."""

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cpu import ROW_BITS, SCALE_BYTES

_ROW_MASK = (1 << ROW_BITS) - 1


class RowCode(NamedTuple):
    """The form of rows quantised to a few bits, each row with a scale of its own, and of rows of bfloat16.

    A row is one run of bytes: the scale as little-endian float32; then the codes in two's complement, two a byte with
    4 bits, the first one in the low half; then zeros up to a multiple of 4 bytes. A value is code * scale in float32.
    With 16 bits the values are bfloat16, little-endian, without a scale: the upper halves of float32.

    Attributes:
        dim: values a row, >= 0.
        bits: 16, 8 or 4.
    """

    dim: int
    bits: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row, a multiple of 4."""
        return self.head_bytes + -(-(self.dim * self.bits) // 32) * 4

    @property
    def head_bytes(self) -> int:
        """Bytes of the scale before the codes."""
        return 0 if self.bits == 16 else SCALE_BYTES

    @property
    def levels(self) -> int:
        """The largest code; codes are in [-levels, levels]."""
        return 2 ** (self.bits - 1) - 1


def pack_places(table: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return table (< 2**15) and row (< 2**48) of each node as one int64, so that one random read finds both."""
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
            own = table.dtype.itemsize * math.prod(table.shape[1:])
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


THREADS = 128  # of a program: 4 warps
WORD_BYTES = 16  # the widest load of a thread
_LOADS = 4  # wide loads that each thread has under way
_NARROW_LOADS = 8  # the same for narrower words
_REGISTERS = 64  # a thread: 8 programs of THREADS then fit on a multiprocessor of 65,536 registers
_PROGRAMS_PER_SM = 8
_NARROW_PROGRAMS_PER_SM = 4  # of 128 registers a thread
_DECODING = 6, 80  # programs on a multiprocessor and registers a thread, where values are stored in wide words


class LaunchPlan(NamedTuple):
    """Tile and occupancy of a gather.

    Attributes:
        word_bytes: Bytes of a load (decoding: of a store) of one thread: 16, or what rows and addresses are aligned to.
        item_bytes: Bytes of the integers that rows are viewed as, at most 8; a wide load is two of them.
        row_items: Items of a row.
        rows, columns: Rows and items (decoding: 32-bit words of codes) of a tile, powers of two.
        programs_per_sm: Programs that run on a multiprocessor at once: more would wait for the first ones to end.
        max_registers: Limit on the registers of a thread, or None. With words of 16 bytes it costs no spill.
    """

    word_bytes: int
    item_bytes: int
    row_items: int
    rows: int
    columns: int
    programs_per_sm: int
    max_registers: int | None


def row_plan(row_bytes: int, alignment: int) -> LaunchPlan:
    """Return how rows of `row_bytes` >= 1 are copied; `alignment`, a power of two, divides all addresses, in bytes."""
    word_bytes = min(WORD_BYTES, alignment, row_bytes & -row_bytes)
    item_bytes = min(8, word_bytes)
    row_items = row_bytes // item_bytes
    wide = word_bytes == WORD_BYTES
    items = THREADS * (_LOADS if wide else _NARROW_LOADS) * word_bytes // item_bytes
    columns = tile_columns(row_items, items)
    rows = max(1, items // columns)
    return LaunchPlan(word_bytes, item_bytes, row_items, rows, columns, *_occupancy(wide))


def decoding_plan(code: RowCode, value_bytes: int, alignment: int) -> LaunchPlan:
    """Return how quantised rows are decoded: codes are read as 32-bit words, values stored in wide words if they fit.

    A decoded value has `value_bytes`; `alignment`, a power of two, divides the address of the output, in bytes.
    """
    row = code.dim * value_bytes
    word_bytes = min(WORD_BYTES, alignment, row & -row)
    wide = word_bytes == WORD_BYTES
    code_words = (code.row_bytes - code.head_bytes) // 4
    # 16 bits a value take twice the registers of 8 bits as they are read: half as many at a time spill none.
    words = THREADS * _LOADS * (4 if wide else 1) * min(code.bits, 8) // 32
    columns = tile_columns(code_words, words)
    rows = max(1, words // columns)
    occupancy = _DECODING if wide else _occupancy(False)
    return LaunchPlan(word_bytes, value_bytes, code.dim, rows, columns, *occupancy)


def tile_columns(row_items: int, most: int) -> int:
    """Return the largest power of two, up to `most`, with which tiles pad a row by half of it at most."""
    columns = min(most, 1 << (row_items - 1).bit_length())
    while 2 * (-(-row_items // columns) * columns) > 3 * row_items:
        columns //= 2
    return columns


def needs_wide_offsets(num_rows: int, step_rows: int, row_items: int = 1) -> bool:
    """Return whether offsets of items exceed 32 bits with sign.

    `step_rows` are those of all programs together: positions are worked out up to two steps past the end.
    """
    return (num_rows + 3 * step_rows) * row_items >= 1 << 31


def _occupancy(wide: bool) -> tuple[int, int | None]:
    return (_PROGRAMS_PER_SM, _REGISTERS) if wide else (_NARROW_PROGRAMS_PER_SM, None)
