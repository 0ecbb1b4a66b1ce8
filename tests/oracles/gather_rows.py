"""Row gathers as plain indexing, and quantised rows as plain arithmetic."""

import numpy as np

from lightning_gnnscale.triton_kernels.gather_rows import RowCode, unpack_places
from lightning_gnnscale.triton_kernels.gather_rows.cpu import LEAST_SCALE, SCALE_BYTES


def gather_rows_reference(table: np.ndarray, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return table[rows]; arguments as for `gather_rows`."""
    gathered = np.asarray(table)[rows]
    if out is None:
        return gathered
    out[...] = gathered
    return out


def gather_tiers_reference(places, nodes, tables, out, reads=None):
    """Write the row of each node, found in one of several arrays; arguments as for `gather_tiers`."""
    table, row = unpack_places(places if nodes is None else places[nodes])
    for number, rows in enumerate(tables.tables):
        if rows is None or len(rows) == 0:
            continue
        here = table == number
        out[here] = rows[row[here]]
        if reads is not None:
            reads[number] += here.sum()
    return out


def encode_codes_reference(rows: np.ndarray, code: RowCode) -> np.ndarray:
    """Return (num, code.row_bytes) uint8 quantised rows; arguments as for `encode_codes`."""
    with np.errstate(over="ignore"):
        rows = rows.astype(np.float32)
    if code.bits == 16:
        return _bfloat16_reference(rows, code)
    largest = np.abs(rows).max(1, initial=0)
    broken = ~np.isfinite(largest)
    rows[broken] = 0
    scale = np.where(largest == 0, largest, np.maximum(largest / np.float32(code.levels), np.float32(LEAST_SCALE)))
    codes = np.rint(rows / np.where(broken | (scale == 0), np.float32(1), scale)[:, None]).astype(np.int8)
    out = np.zeros((len(rows), code.row_bytes), np.uint8)
    out[:, :SCALE_BYTES] = np.where(broken, np.float32(np.nan), scale).view(np.uint8).reshape(-1, SCALE_BYTES)
    if code.bits == 4:
        codes = np.pad(codes, ((0, 0), (0, code.dim % 2)))
        codes = (codes[:, ::2] & 15) | codes[:, 1::2] << 4
    out[:, SCALE_BYTES : SCALE_BYTES + codes.shape[1]] = codes.view(np.uint8)
    return out


def _bfloat16_reference(rows: np.ndarray, code: RowCode) -> np.ndarray:
    """Round float32 to bfloat16: to the nearest, of two as near to the even one."""
    bits = rows.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    out = np.zeros((len(rows), code.row_bytes // 2), np.uint16)
    out[:, : code.dim] = np.where(np.isnan(rows), np.uint64(0x7FC0), rounded)
    return out.view(np.uint8)


def decode_codes_reference(raw: np.ndarray, code: RowCode) -> np.ndarray:
    """Return the (num, code.dim) float32 values of quantised rows."""
    if code.bits == 16:
        return (np.ascontiguousarray(raw).view("<u2")[:, : code.dim].astype(np.uint32) << 16).view(np.float32)
    scale = np.ascontiguousarray(raw[:, :SCALE_BYTES]).view("<f4")
    codes = raw[:, SCALE_BYTES:].view(np.int8)
    if code.bits == 4:
        codes = np.stack([codes << 4 >> 4, codes >> 4], 2).reshape(len(raw), 2 * codes.shape[1])
    return codes[:, : code.dim].astype(np.float32) * scale
