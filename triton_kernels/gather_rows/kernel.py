"""Row gather out of several tables in Triton: own memory, peers and pinned host memory are all addresses."""

import triton
import triton.language as tl

_ROW_BITS = tl.constexpr(48)
_ROW_MASK = tl.constexpr((1 << 48) - 1)


@triton.jit
def gather_tiers_kernel(
    places_ptr, nodes_ptr, bases_ptr, out_ptr, reads_ptr, num,
    ROW_ITEMS: tl.constexpr, ALIGNMENT: tl.constexpr, HAS_NODES: tl.constexpr, COUNT: tl.constexpr,
    NUM_TABLES: tl.constexpr, TABLES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy rows to out, ROWS at a time, COLUMNS items at a time; each program takes every num_programs-th block.

    Rows of a table with base 0 are left as they are and not counted. ROWS, COLUMNS and TABLES (>= NUM_TABLES) are
    powers of two; ALIGNMENT is what divides every address of a row, in bytes.
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
