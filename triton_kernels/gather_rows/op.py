"""Row gather: the checks, and the choice of the implementation."""

import numpy as np

from ..intrinsics import LINE_BYTES
from . import cpu


def gather_rows(table: np.ndarray, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Copy rows of a table, bit for bit, in the order asked for.

    Args:
        table: (num_rows, ...) array or memory map of any dtype without Python objects, C-contiguous.
        rows: (num,) integers in [0, num_rows).
        out: (num, ...) of the table's dtype, C-contiguous, filled in place; fresh memory if None. Where a row is a
            multiple of 64 bytes and `out` is 64-byte aligned, it is written past the cache.

    Returns:
        `out`.

    Raises:
        ValueError: a row is out of range, or `out` does not fit.

    Cost: one read and one write of num rows. Fresh memory costs several times the copy: pass a reused `out`.
    """
    rows = np.ascontiguousarray(rows)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise ValueError(f"rows must be one-dimensional integers, got {rows.dtype} of shape {rows.shape}")
    if rows.dtype not in (np.int32, np.int64):
        rows = rows.astype(np.int64)
    shape = (len(rows), *table.shape[1:])
    if out is None:
        out = np.empty(shape, table.dtype)
    _check(table, rows, out, shape)
    row_bytes = table.dtype.itemsize * int(np.prod(table.shape[1:], dtype=np.int64))
    if len(rows) == 0 or row_bytes == 0:
        return out
    unit = _unit(row_bytes, table, out)
    items, row_items, line_items = unit.itemsize, row_bytes // unit.itemsize, LINE_BYTES // unit.itemsize
    source = np.asarray(table).reshape(-1).view(unit)
    target = out.reshape(-1).view(unit)
    if row_items == 1:
        cpu.copy_items(source, rows, target)
    elif row_bytes % LINE_BYTES == 0 and out.ctypes.data % LINE_BYTES == 0 and items == 8:
        cpu.stream_rows(source, rows, row_items, line_items, target)
    else:
        cpu.copy_rows(source, rows, row_items, line_items, target)
    return out


def _check(table, rows, out, shape):
    if table.dtype.hasobject:
        raise ValueError(f"table must not hold Python objects, got dtype {table.dtype}")
    if not table.flags.c_contiguous:
        raise ValueError("table must be C-contiguous: pass numpy.ascontiguousarray(table)")
    if out.shape != shape or out.dtype != table.dtype or not out.flags.c_contiguous:
        raise ValueError(
            f"out must be C-contiguous {table.dtype} of shape {shape}, got {out.dtype} of shape {out.shape}"
        )
    outside = cpu.first_outside(rows, len(table))
    if outside >= 0:
        raise ValueError(f"rows[{outside}] must be in [0, {len(table)}), got {rows[outside]}")


def _unit(row_bytes: int, *arrays: np.ndarray) -> np.dtype:
    """Return the widest unsigned dtype that divides a row and is aligned in every array."""
    for items in (8, 4, 2):
        if row_bytes % items == 0 and all(array.ctypes.data % items == 0 for array in arrays):
            return np.dtype(f"u{items}")
    return np.dtype(np.uint8)
