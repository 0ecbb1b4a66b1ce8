"""Row gathers: the checks, and the choice of the implementation."""

import math
import threading
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from .. import triton_kernels_of
from ..intrinsics import LINE_BYTES
from . import cpu
from .tiers import RowCode, RowTables, decoding_plan, needs_wide_offsets, row_plan

_HALF_ROWS = 1024  # decoded at a time on their way to float16
_ITEM = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_scratch = threading.local()


def gather_rows(
    table: np.ndarray, rows: np.ndarray, out: np.ndarray | None = None, code: RowCode | None = None
) -> np.ndarray:
    """Copy rows of a table, bit for bit, in the order asked for.

    Args:
        table: (num_rows, ...) array or memory map of any dtype without Python objects, C-contiguous.
        rows: (num,) integers in [0, num_rows).
        out: (num, ...) of the table's dtype, C-contiguous, filled in place; fresh memory if None. Where a row is a
            multiple of 64 bytes and `out` is 64-byte aligned, it is written past the cache.
        code: The form of a table (num_rows, code.row_bytes) uint8, whose rows are decoded on the way: out is then
            (num, code.dim) float32, or float16 or a tensor of bfloat16 where one is given, the float32 values rounded
            to nearest.

    Returns:
        `out`.

    Raises:
        ValueError: a row is out of range, or `table` or `out` does not fit.

    Cost: one read and one write of num rows. Fresh memory costs several times the copy: pass a reused `out`.
    """
    rows = np.ascontiguousarray(rows)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise ValueError(f"rows must be one-dimensional integers, got {rows.dtype} of shape {rows.shape}")
    if rows.dtype not in (np.int32, np.int64):
        rows = rows.astype(np.int64)
    if code is not None and (table.dtype != np.uint8 or table.shape[1:] != (code.row_bytes,)):
        raise ValueError(
            f"a quantised table must be uint8 of shape (num_rows, {code.row_bytes}) for {code.dim} values of "
            f"{code.bits} bits, got {table.dtype} of shape {table.shape}"
        )
    shape = (len(rows), *(table.shape[1:] if code is None else (code.dim,)))
    dtype = table.dtype if code is None else _decoded_dtype(out)
    if out is None:
        out = np.empty(shape, dtype)
    if isinstance(out, Tensor) and out.dtype != torch.bfloat16:
        return torch.from_numpy(gather_rows(table, rows, out.numpy(), code))
    _check(table, rows, out, shape, dtype)
    row_bytes = table.dtype.itemsize * math.prod(table.shape[1:])
    if len(rows) == 0 or row_bytes == 0:
        return out
    unit = _unit(row_bytes, table, out) if code is None and row_bytes <= 8 else None
    if unit is not None and unit.itemsize == row_bytes:
        cpu.copy_items(np.asarray(table).reshape(-1).view(unit), rows, out.reshape(-1).view(unit))
        return out
    addresses = _addresses(len(rows))
    np.multiply(rows, row_bytes, out=addresses, dtype=np.int64)
    addresses += table.ctypes.data
    if code is not None:
        return _decode_found(addresses, code, out)
    _copy_found(addresses, row_bytes, out.reshape(-1).view(np.uint8))
    return out


def encode_codes(rows: np.ndarray, code: RowCode) -> np.ndarray:
    """Return quantised rows, rounded to nearest: a value is at most half a scale from what it decodes to.

    The scale of a row is its largest magnitude / code.levels, at least 2**-126; a row of zeros has the scale 0 and
    decodes to zeros. A row with NaN, infinity or a value beyond float32 decodes to NaN. With 16 bits each value is
    rounded to bfloat16 by itself; one beyond it becomes infinite.

    Args:
        rows: (num, code.dim) floats; float64 is rounded to float32 first.
        code: the form.

    Returns:
        (num, code.row_bytes) uint8, a function of the rows alone.

    Source: the row-wise quantisation of FBGEMM's embedding tables, in its symmetric form: with an offset beside the
        scale, as FBGEMM's fused rows have, a 0 would not stay exactly 0.
    """
    if rows.ndim != 2 or rows.shape[1] != code.dim or rows.dtype.kind != "f":
        raise ValueError(f"rows must be floats of shape (num, {code.dim}), got {rows.dtype} of shape {rows.shape}")
    if code.bits == 16:
        out = np.zeros((len(rows), code.row_bytes // 2), np.int16)
        with np.errstate(over="ignore"):
            single = torch.from_numpy(np.ascontiguousarray(rows, np.float32))
        out[:, : code.dim] = single.bfloat16().view(torch.int16).numpy()
        return out.view(np.uint8)
    rows = np.ascontiguousarray(rows, np.float64 if rows.dtype.itemsize == 8 else np.float32)
    packed = np.empty((len(rows), -(-code.dim * code.bits // 8)), np.int8)
    scales = np.empty(len(rows), "<f4")
    value, codes = np.empty(code.dim, np.float32), np.zeros(code.dim + code.dim % 2, np.int8)
    cpu.encode_all(rows, code.levels, code.bits, value, codes, scales, packed)
    out = np.zeros((len(rows), code.row_bytes), np.uint8)
    out[:, : cpu.SCALE_BYTES] = scales.view(np.uint8).reshape(-1, cpu.SCALE_BYTES)
    out[:, cpu.SCALE_BYTES : cpu.SCALE_BYTES + packed.shape[1]] = packed.view(np.uint8)
    return out


def gather_tiers(
    places: np.ndarray | Tensor,
    nodes: np.ndarray | Tensor | None,
    tables: RowTables,
    out: np.ndarray | Tensor,
    reads: np.ndarray | Tensor | None = None,
    code: RowCode | None = None,
) -> np.ndarray | Tensor:
    """Copy rows of several tables, bit for bit, in the requested order.

    Args:
        places: (num_nodes,) int64 table and row of each node, as from `pack_places`; not checked.
        nodes: (num,) integers in [0, num_nodes); None: places are those of the requested rows, (num,).
        tables: Tables that rows are copied from. If a table is None, its rows in `out` are left as they are. For a CUDA
            device, tables may be in its own memory, in that of peers whose access is enabled, and in pinned host
            memory.
        out: (num, ...) array, or tensor on the device that does the work, filled in place. It is C-contiguous and has
            rows of as many bytes as the tables. If a row is a multiple of 64 bytes and `out` is in host memory and
            64-byte aligned, it is written past the cache.
        reads: (num_tables,) int64 counters on the device of `out`; the number of rows copied from each table is added
            in place.
        code: Format of quantised rows, which are decoded on the way; `out` is then (num, code.dim) float32 or
            float16, or a tensor of bfloat16.

    Returns:
        `out`.

    Raises:
        ValueError: nodes are out of range (on a CUDA device this waits for it), or `out` does not fit.

    Cost: one random 8-byte read more than `gather_rows` a row; at 512 bytes a row about 1.1 of its time.
    """
    num = len(places) if nodes is None else len(nodes)
    contiguous = out.is_contiguous() if isinstance(out, Tensor) else out.flags.c_contiguous
    row_bytes = out.dtype.itemsize * math.prod(out.shape[1:])
    wanted_bytes = tables.row_bytes
    if code is not None:
        if tables.row_bytes != code.row_bytes:
            raise ValueError(f"tables must have quantised rows of {code.row_bytes} bytes, got {tables.row_bytes}")
        wanted_bytes = code.dim * _decoded_dtype(out).itemsize
    if len(out) != num or not contiguous or row_bytes != wanted_bytes:
        raise ValueError(f"out must be C-contiguous, {num} rows of {wanted_bytes} bytes, got {len(out)} of {row_bytes}")
    if num == 0 or row_bytes == 0:
        return out
    if isinstance(out, Tensor) and out.is_cuda:
        if nodes is not None:
            low, high = (int(end) for end in torch.aminmax(nodes))
            if low < 0 or high >= len(places):
                raise ValueError(f"nodes must be in [0, {len(places)}), got {low} to {high}")
        with torch.cuda.device(out.device):
            gather_tiers_with_triton(places, nodes, tables, out, reads, code)
    else:
        _gather_tiers_on_cpu(*(_as_array(value) for value in (places, nodes)), tables, out, reads, code)
    return out


def _gather_tiers_on_cpu(places, nodes, tables, out, reads, code) -> None:
    reads = np.zeros(len(tables), np.int64) if reads is None else _as_array(reads)
    num = len(places) if nodes is None else len(nodes)
    addresses = _addresses(num)
    if nodes is None:
        cpu.find_places(places, tables.bases, tables.row_bytes, addresses, reads)
    else:
        nodes = np.ascontiguousarray(nodes)
        if nodes.ndim != 1 or nodes.dtype.kind not in "iu":
            raise ValueError(f"nodes must be one-dimensional integers, got {nodes.dtype} of shape {nodes.shape}")
        if nodes.dtype not in (np.int32, np.int64):
            nodes = nodes.astype(np.int64)
        counted = reads.copy()  # a node out of range leaves the counts as they were
        outside = cpu.find_rows(places, nodes, tables.bases, tables.row_bytes, addresses, counted)
        if outside >= 0:
            raise ValueError(f"nodes[{outside}] must be in [0, {len(places)}), got {nodes[outside]}")
        reads[:] = counted
    if code is not None:
        _decode_found(addresses, code, out if out.dtype == torch.bfloat16 else _as_array(out))
        return
    _copy_found(addresses, tables.row_bytes, _as_bytes(out))


def _copy_found(addresses: np.ndarray, row_bytes: int, out: np.ndarray) -> None:
    """Copy rows from their addresses to the bytes of out; a row at 0 stays as it is."""
    if row_bytes % LINE_BYTES == 0 and out.ctypes.data % LINE_BYTES == 0:
        cpu.stream_found(addresses, row_bytes, LINE_BYTES // 8, out.view(np.uint64))
    else:
        unit = _unit(row_bytes, out)
        cpu.copy_found(addresses, row_bytes, LINE_BYTES // unit.itemsize, out.view(unit))


def _decode_found(addresses: np.ndarray, code: RowCode, out: np.ndarray | Tensor) -> np.ndarray | Tensor:
    """Decode rows from their addresses into out, (num, code.dim) as of `gather_rows`; a row at 0 stays as it is."""
    if out.dtype == np.float32:
        streams = code.dim % cpu.LINE_ITEMS == 0 and out.ctypes.data % LINE_BYTES == 0
        cpu.decode_found(addresses, code.row_bytes, code.dim, code.bits, streams, out.reshape(-1))
        return out
    for first in range(0, len(out), _HALF_ROWS):
        found = addresses[first : first + _HALF_ROWS]
        values = np.empty((len(found), code.dim), np.float32)
        _decode_found(found, code, values)
        here = found != 0
        if isinstance(out, Tensor):
            out[first : first + _HALF_ROWS][torch.from_numpy(here)] = torch.from_numpy(values[here]).to(out.dtype)
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            out[first : first + _HALF_ROWS][here] = values[here]
    return out


def gather_tiers_with_triton(
    places, nodes, tables: RowTables, out: Tensor, reads, code: RowCode | None = None, max_programs=None
) -> None:
    """Launch the Triton form on the current device; arguments as for `gather_tiers`, tensors, at least one row.

    Args:
        max_programs: Largest number of programs in one launch; each takes block after block. None: as many as the
            device runs at once.
    """
    lowest_bit = out.data_ptr() & -out.data_ptr()
    if code is None:
        plan = row_plan(tables.row_bytes, min(tables.alignment, lowest_bit))
        row_items, target = plan.row_items, out.view(-1).view(torch.uint8).view(_ITEM[plan.item_bytes])
        own = {"ROW_ITEMS": row_items, "ALIGNMENT": plan.word_bytes, "COLUMNS": plan.columns}
    else:
        plan = decoding_plan(code, out.element_size(), lowest_bit)
        row_items, target = code.dim, out.view(-1)
        own = {"DIM": code.dim, "BITS": code.bits, "ROW_BYTES": code.row_bytes, "WORDS": plan.columns}
    num = len(out)
    num_programs = min(-(-num // plan.rows), max_programs or _programs_at_once(out, plan.programs_per_sm))
    kernels, options = _triton_kernels(), {"num_warps": 4}
    if out.is_cuda and plan.max_registers is not None:
        options["maxnreg"] = plan.max_registers
    kernel = kernels.gather_tiers_kernel if code is None else kernels.decode_tiers_kernel
    kernel[(num_programs,)](
        places, places if nodes is None else nodes, tables.bases_on(out.device), target,
        places if reads is None else reads, num,
        HAS_NODES=nodes is not None, COUNT=reads is not None, NUM_TABLES=len(tables),
        TABLES=1 << (len(tables) - 1).bit_length(), ROWS=plan.rows,
        WIDE=needs_wide_offsets(num, num_programs * plan.rows, row_items),
        WIDE_NODES=needs_wide_offsets(len(places), num_programs * plan.rows), **own, **options,
    )  # fmt: skip


def _programs_at_once(out: Tensor, programs_per_sm: int) -> int:
    device = torch.cuda.get_device_properties(out.device) if out.is_cuda else None
    return programs_per_sm * (device.multi_processor_count if device else 1)


def _triton_kernels() -> ModuleType | None:
    return triton_kernels_of(__package__)


def _addresses(num: int) -> np.ndarray:
    """Return (num,) int64 of this thread, reused: fresh memory costs more than the look-up."""
    held = getattr(_scratch, "addresses", None)
    if held is None or len(held) < num:
        held = _scratch.addresses = np.empty(max(4096, num + num // 4), np.int64)
    return held[:num]


def _as_array(value):
    return value.numpy() if isinstance(value, Tensor) else value


def _as_bytes(out: np.ndarray | Tensor) -> np.ndarray:
    """View an array or a tensor of any dtype, bfloat16 too, as bytes."""
    if isinstance(out, Tensor):
        return out.detach().view(-1).view(torch.uint8).numpy()
    return out.reshape(-1).view(np.uint8)


def _decoded_dtype(out: np.ndarray | Tensor | None) -> np.dtype | torch.dtype:
    """Return the dtype that quantised rows are decoded to: float16 or bfloat16 where `out` has it, else float32."""
    if out is None:
        return np.dtype(np.float32)
    allowed = (torch.float32, torch.float16, torch.bfloat16) if isinstance(out, Tensor) else (np.float32, np.float16)
    if out.dtype not in allowed:
        raise ValueError(f"quantised rows are decoded to float32, float16 or bfloat16, got out of {out.dtype}")
    return out.dtype


def _check(table, rows, out, shape, dtype):
    if table.dtype.hasobject:
        raise ValueError(f"table must not hold Python objects, got dtype {table.dtype}")
    if not table.flags.c_contiguous:
        raise ValueError("table must be C-contiguous: pass numpy.ascontiguousarray(table)")
    contiguous = out.is_contiguous() if isinstance(out, Tensor) else out.flags.c_contiguous
    if tuple(out.shape) != shape or out.dtype != dtype or not contiguous:
        raise ValueError(f"out must be C-contiguous {dtype} of shape {shape}, got {out.dtype} of shape {out.shape}")
    outside = cpu.first_outside(rows, len(table))
    if outside >= 0:
        raise ValueError(f"rows[{outside}] must be in [0, {len(table)}), got {rows[outside]}")


def _unit(row_bytes: int, *arrays: np.ndarray) -> np.dtype:
    """Return the widest unsigned dtype that divides a row and is aligned in every array."""
    for items in (8, 4, 2):
        if row_bytes % items == 0 and all(array.ctypes.data % items == 0 for array in arrays):
            return np.dtype(f"u{items}")
    return np.dtype(np.uint8)
