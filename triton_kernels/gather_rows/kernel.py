"""Row gather out of several tables in Triton: own memory, peers and pinned host memory are all addresses."""

import triton
import triton.language as tl

_ROW_BITS = tl.constexpr(48)
_ROW_MASK = tl.constexpr((1 << 48) - 1)
_SCALE_BYTES = tl.constexpr(4)


@triton.jit
def gather_tiers_kernel(
    places_ptr, nodes_ptr, bases_ptr, out_ptr, reads_ptr, num,
    ROW_ITEMS: tl.constexpr, ALIGNMENT: tl.constexpr, HAS_NODES: tl.constexpr, COUNT: tl.constexpr,
    NUM_TABLES: tl.constexpr, TABLES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy rows to out, ROWS at a time, COLUMNS items at a time; each program takes every num_programs-th block.

    Rows of a table with base 0 are left as they are and not counted. ROWS, COLUMNS and TABLES (>= NUM_TABLES) are
    powers of two; ALIGNMENT divides every address of a row, in bytes.
    """
    item = out_ptr.dtype.element_ty
    item_bytes: tl.constexpr = item.primitive_bitwidth // 8
    table_ids = tl.arange(0, TABLES)
    counts = tl.zeros((TABLES,), tl.int64)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for start in range(first, num, tl.num_programs(0).to(tl.int64) * ROWS):
        at = start + tl.arange(0, ROWS)
        inside = at < num
        position = at
        if HAS_NODES:
            position = tl.load(nodes_ptr + at, mask=inside, other=0).to(tl.int64)
        place = tl.load(places_ptr + position, mask=inside, other=0)
        table = place >> _ROW_BITS
        base = tl.load(bases_ptr + table, mask=inside, other=0)
        found = inside & (base != 0)
        source = base + (place & _ROW_MASK) * (ROW_ITEMS * item_bytes)
        source = tl.multiple_of(source.to(tl.pointer_type(item)), ALIGNMENT)
        target = out_ptr + at * ROW_ITEMS
        for column in tl.static_range(0, ROW_ITEMS, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            mask = found[:, None]
            if column + COLUMNS > ROW_ITEMS:
                mask = mask & (columns < ROW_ITEMS)[None, :]
            value = tl.load(source[:, None] + columns[None, :], mask=mask)
            tl.store(target[:, None] + columns[None, :], value, mask=mask)
        if COUNT:
            counts += tl.sum(((table[:, None] == table_ids[None, :]) & found[:, None]).to(tl.int64), 0)
    if COUNT:
        tl.atomic_add(reads_ptr + table_ids, counts, mask=(table_ids < NUM_TABLES) & (counts > 0))


@triton.jit
def decode_tiers_kernel(
    places_ptr, nodes_ptr, bases_ptr, out_ptr, reads_ptr, num,
    DIM: tl.constexpr, BITS: tl.constexpr, ROW_BYTES: tl.constexpr, HAS_NODES: tl.constexpr, COUNT: tl.constexpr,
    NUM_TABLES: tl.constexpr, TABLES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Decode quantised rows to out (num, DIM), ROWS at a time; the rest as in `gather_tiers_kernel`."""
    table_ids = tl.arange(0, TABLES)
    counts = tl.zeros((TABLES,), tl.int64)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for start in range(first, num, tl.num_programs(0).to(tl.int64) * ROWS):
        at = start + tl.arange(0, ROWS)
        inside = at < num
        position = at
        if HAS_NODES:
            position = tl.load(nodes_ptr + at, mask=inside, other=0).to(tl.int64)
        place = tl.load(places_ptr + position, mask=inside, other=0)
        table = place >> _ROW_BITS
        base = tl.load(bases_ptr + table, mask=inside, other=0)
        found = inside & (base != 0)
        source = tl.multiple_of(base + (place & _ROW_MASK) * ROW_BYTES, 4)
        scale = tl.load(source.to(tl.pointer_type(tl.float32)), mask=found, other=0.0)
        codes = (source + _SCALE_BYTES).to(tl.pointer_type(tl.int8))
        target = out_ptr + at * DIM
        for column in tl.static_range(0, DIM, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            mask = found[:, None] & (columns < DIM)[None, :]
            if BITS == 8:
                code = tl.load(codes[:, None] + columns[None, :], mask=mask, other=0).to(tl.int32)
            else:
                pair = tl.load(codes[:, None] + (columns // 2)[None, :], mask=mask, other=0).to(tl.int32)
                code = (((pair >> (4 * (columns % 2))[None, :]) & 15) ^ 8) - 8
            value = code.to(tl.float32) * scale[:, None]
            tl.store(target[:, None] + columns[None, :], value.to(out_ptr.dtype.element_ty), mask=mask)
        if COUNT:
            counts += tl.sum(((table[:, None] == table_ids[None, :]) & found[:, None]).to(tl.int64), 0)
    if COUNT:
        tl.atomic_add(reads_ptr + table_ids, counts, mask=(table_ids < NUM_TABLES) & (counts > 0))
