"""Row gather out of several tables in Triton: own memory, peers and pinned host memory are all addresses.

A program takes every num_programs-th block of ROWS rows. While the rows of one block are on their way, the places of
the next block and the nodes of the block after it are read: a block waits for one read and not for three in a row.
"""

import triton
import triton.language as tl

_ROW_BITS = tl.constexpr(48)
_ROW_MASK = tl.constexpr((1 << 48) - 1)
_SCALE_BYTES = tl.constexpr(4)


@triton.jit
def _nodes_at(nodes_ptr, at, num, HAS_NODES: tl.constexpr, WIDE_NODES: tl.constexpr):
    """Return the position in places of each row: its node, or without nodes its own number."""
    number: tl.constexpr = tl.int64 if WIDE_NODES else tl.int32
    if HAS_NODES:
        return tl.load(nodes_ptr + at, mask=at < num, other=0).to(number)
    else:
        return at.to(number)


@triton.jit
def _find(place, bases_ptr, inside, ROW_BYTES: tl.constexpr):
    """Return the table, the address and the reachability of each row."""
    table = place >> _ROW_BITS
    base = tl.load(bases_ptr + table, mask=inside, other=0)
    return table, base + (place & _ROW_MASK) * ROW_BYTES, inside & (base != 0)


@triton.jit
def _load_words(source, found, column: tl.constexpr, ROW_ITEMS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = column + tl.arange(0, COLUMNS)
    mask = found[:, None]
    if column + COLUMNS > ROW_ITEMS:
        mask = mask & (columns < ROW_ITEMS)[None, :]
    return tl.load(source[:, None] + columns[None, :], mask=mask)


@triton.jit
def _store_words(target, value, found, column: tl.constexpr, ROW_ITEMS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = column + tl.arange(0, COLUMNS)
    mask = found[:, None]
    if column + COLUMNS > ROW_ITEMS:
        mask = mask & (columns < ROW_ITEMS)[None, :]
    tl.store(target[:, None] + columns[None, :], value, mask=mask)


@triton.jit(do_not_specialize=["num"])
def gather_tiers_kernel(
    places_ptr, nodes_ptr, bases_ptr, out_ptr, reads_ptr, num,
    ROW_ITEMS: tl.constexpr, ALIGNMENT: tl.constexpr, HAS_NODES: tl.constexpr, COUNT: tl.constexpr,
    NUM_TABLES: tl.constexpr, TABLES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    WIDE_NODES: tl.constexpr,
):  # fmt: skip
    """Copy rows to out, ROWS at a time, COLUMNS items at a time.

    Rows of a table with base 0 are left as they are and not counted. ROWS, COLUMNS and TABLES (>= NUM_TABLES) are
    powers of two; ALIGNMENT divides every address of a row, in bytes; WIDE: offsets into out need 64 bits.
    """
    item = out_ptr.dtype.element_ty
    number: tl.constexpr = tl.int64 if WIDE else tl.int32
    row_bytes: tl.constexpr = ROW_ITEMS * (item.primitive_bitwidth // 8)
    table_ids = tl.arange(0, TABLES)
    counts = tl.zeros((ROWS, TABLES), tl.int32)
    first = tl.program_id(0).to(number) * ROWS
    step = tl.num_programs(0).to(number) * ROWS
    rows = tl.arange(0, ROWS)
    at = first + rows
    place = tl.load(places_ptr + _nodes_at(nodes_ptr, at, num, HAS_NODES, WIDE_NODES), mask=at < num, other=0)
    coming = _nodes_at(nodes_ptr, at + step, num, HAS_NODES, WIDE_NODES)
    for start in range(first, num, step):
        at = start + rows
        table, address, found = _find(place, bases_ptr, at < num, row_bytes)
        source = tl.multiple_of(address.to(tl.pointer_type(item)), ALIGNMENT)
        target = out_ptr + at * ROW_ITEMS
        value = _load_words(source, found, 0, ROW_ITEMS, COLUMNS)
        place = tl.load(places_ptr + coming, mask=at + step < num, other=0)
        coming = _nodes_at(nodes_ptr, at + 2 * step, num, HAS_NODES, WIDE_NODES)
        # Of a row of several times COLUMNS, the next words are asked for before the last ones are stored.
        for column in tl.static_range(COLUMNS, ROW_ITEMS, COLUMNS):
            following = _load_words(source, found, column, ROW_ITEMS, COLUMNS)
            _store_words(target, value, found, column - COLUMNS, ROW_ITEMS, COLUMNS)
            value = following
        _store_words(target, value, found, (ROW_ITEMS - 1) // COLUMNS * COLUMNS, ROW_ITEMS, COLUMNS)
        if COUNT:
            counts += ((table[:, None] == table_ids[None, :]) & found[:, None]).to(tl.int32)
    if COUNT:
        counts = tl.sum(counts.to(tl.int64), 0)
        tl.atomic_add(reads_ptr + table_ids, counts, mask=(table_ids < NUM_TABLES) & (counts > 0))


@triton.jit(do_not_specialize=["num"])
def decode_tiers_kernel(
    places_ptr, nodes_ptr, bases_ptr, out_ptr, reads_ptr, num,
    DIM: tl.constexpr, BITS: tl.constexpr, ROW_BYTES: tl.constexpr, HAS_NODES: tl.constexpr, COUNT: tl.constexpr,
    NUM_TABLES: tl.constexpr, TABLES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr,
    WIDE_NODES: tl.constexpr,
):  # fmt: skip
    """Decode quantised rows, or bfloat16 where BITS is 16, to out (num, DIM), ROWS at a time, WORDS words of 32 bits at
    a time; the rest as in `gather_tiers_kernel`.
    """
    codes_of_word: tl.constexpr = 32 // BITS
    head_bytes: tl.constexpr = 0 if BITS == 16 else _SCALE_BYTES
    number: tl.constexpr = tl.int64 if WIDE else tl.int32
    table_ids = tl.arange(0, TABLES)
    counts = tl.zeros((ROWS, TABLES), tl.int32)
    lanes = tl.arange(0, codes_of_word)
    first = tl.program_id(0).to(number) * ROWS
    step = tl.num_programs(0).to(number) * ROWS
    rows = tl.arange(0, ROWS)
    at = first + rows
    place = tl.load(places_ptr + _nodes_at(nodes_ptr, at, num, HAS_NODES, WIDE_NODES), mask=at < num, other=0)
    coming = _nodes_at(nodes_ptr, at + step, num, HAS_NODES, WIDE_NODES)
    for start in range(first, num, step):
        at = start + rows
        table, address, found = _find(place, bases_ptr, at < num, ROW_BYTES)
        address = tl.multiple_of(address, 4)
        if BITS != 16:
            scale = tl.load(address.to(tl.pointer_type(tl.float32)), mask=found, other=0.0)
        codes = (address + head_bytes).to(tl.pointer_type(tl.int32))
        place = tl.load(places_ptr + coming, mask=at + step < num, other=0)
        coming = _nodes_at(nodes_ptr, at + 2 * step, num, HAS_NODES, WIDE_NODES)
        target = out_ptr + at * DIM
        for word in tl.static_range(0, (ROW_BYTES - head_bytes) // 4, WORDS):
            words = word + tl.arange(0, WORDS)
            inside = found[:, None] & (words < (ROW_BYTES - head_bytes) // 4)[None, :]
            packed = tl.load(codes[:, None] + words[None, :], mask=inside, other=0)
            # A code goes to the top of its word, and comes down with its sign.
            code = (packed[:, :, None] << (32 - BITS - BITS * lanes)[None, None, :]) >> (32 - BITS)
            if BITS == 16:
                value = (code << 16).to(tl.float32, bitcast=True)
            else:
                value = code.to(tl.float32) * scale[:, None, None]
            columns = (words * codes_of_word)[None, :, None] + lanes[None, None, :]
            mask = found[:, None, None] & (columns < DIM)
            tl.store(target[:, None, None] + columns, value.to(out_ptr.dtype.element_ty), mask=mask)
        if COUNT:
            counts += ((table[:, None] == table_ids[None, :]) & found[:, None]).to(tl.int32)
    if COUNT:
        counts = tl.sum(counts.to(tl.int64), 0)
        tl.atomic_add(reads_ptr + table_ids, counts, mask=(table_ids < NUM_TABLES) & (counts > 0))
