"""Row gather on the CPU: whole cache lines, prefetched, written past the cache where rows are whole lines."""

import numpy as np

from ...jit import kernel
from ..intrinsics import (
    LINE_BYTES,
    bfloat_at,
    byte_at,
    copy_item_from,
    copy_line_from,
    decode_line4,
    decode_line8,
    decode_line16,
    float_at,
    prefetch,
    prefetch_address,
    store_fence,
    stream_decoded_line4,
    stream_decoded_line8,
    stream_decoded_line16,
    stream_line_from,
)

AHEAD_ROWS = 16  # rows between a prefetch and its use
AHEAD_ITEMS = 64  # the same where a row is one item
AHEAD_PLACES = 32  # between the prefetch of a place and its use
LINE_ITEMS = LINE_BYTES // 4  # decoded values of a line
SCALE_BYTES = 4  # at the head of a quantised row
LEAST_SCALE = 2.0**-126  # then no row decodes to subnormal values, which some devices round to 0
ROW_BITS = 48  # of a place: the row in its table; the number of the table above


@kernel
def first_outside(rows, num_rows):
    """Return the first position whose row is not in [0, num_rows), or -1."""
    # A branch-free pass first: it is one vector instruction an item, and the usual answer.
    outside = 0
    for i in range(len(rows)):
        outside += (rows[i] < 0) | (rows[i] >= num_rows)
    if outside == 0:
        return -1
    for i in range(len(rows)):
        if rows[i] < 0 or rows[i] >= num_rows:
            return i
    return -1


@kernel
def copy_items(table, rows, out):
    """Copy one item a row."""
    num = len(rows)
    for i in range(num):
        if i + AHEAD_ITEMS < num:
            prefetch(table, rows[i + AHEAD_ITEMS])
        out[i] = table[np.uint64(rows[i])]


@kernel
def find_rows(places, nodes, bases, row_bytes, addresses, reads):
    """Write the address of the row of each node, and count the rows of each table.

    Separate from the copy, the look-up costs half as much as inside it: two random reads do not wait in turns.

    Args:
        places: (num_places,) int64, table << ROW_BITS | row.
        nodes: (num,) positions in places.
        bases: (num_tables,) int64 addresses; 0 for a table that cannot be read: its rows are neither found nor counted.
        row_bytes: bytes a row.
        addresses: (num,) int64, filled; 0 for a row of a table that cannot be read.
        reads: (num_tables,) int64, added to.

    Returns:
        The first position whose node is not in [0, num_places), where it stopped, or -1.
    """
    num, num_places = len(nodes), len(places)
    for i in range(num):
        if i + AHEAD_PLACES < num:
            prefetch(places, nodes[i + AHEAD_PLACES])
        node = nodes[i]
        if node < 0 or node >= num_places:
            return i
        addresses[i] = _find(places[node], bases, row_bytes, reads)
    return -1


@kernel
def find_places(places, bases, row_bytes, addresses, reads):
    """Do as `find_rows`, with the place of each row given; places: (num,)."""
    for i in range(len(places)):
        addresses[i] = _find(places[i], bases, row_bytes, reads)


@kernel
def _find(place, bases, row_bytes, reads):
    table = place >> ROW_BITS
    base = bases[table]
    if base == 0:
        return 0
    reads[table] += 1
    return base + (place & ((1 << ROW_BITS) - 1)) * row_bytes


@kernel
def stream_found(addresses, row_bytes, line_items, out):
    """Copy rows of whole 64-byte lines from their addresses with stores that bypass the cache.

    Args:
        addresses: (num,) int64; a row at 0 is left as it is in out.
        row_bytes: bytes a row. line_items: items of out a line.
        out: one-dimensional view, 64-byte aligned.
    """
    num = len(addresses)
    lines = row_bytes // LINE_BYTES
    row_items = lines * line_items
    for i in range(num):
        if i + AHEAD_ROWS < num:
            coming = addresses[i + AHEAD_ROWS]
            for at in range(0, row_bytes, LINE_BYTES):
                prefetch_address(coming + at)
        source, target = addresses[i], i * row_items
        if source == 0:
            continue
        for line in range(lines):
            stream_line_from(out, target + line * line_items, source + line * LINE_BYTES)
    store_fence()


@kernel
def copy_found(addresses, row_bytes, line_items, out):
    """Copy rows of any length from their addresses: whole lines, then items; arguments as for `stream_found`."""
    num = len(addresses)
    item_bytes = LINE_BYTES // line_items
    row_items = row_bytes // item_bytes
    whole = row_bytes - row_bytes % LINE_BYTES
    for i in range(num):
        if i + AHEAD_ROWS < num:
            coming = addresses[i + AHEAD_ROWS]
            for at in range(0, row_bytes, LINE_BYTES):
                prefetch_address(coming + at)
        source, target = addresses[i], i * row_items
        if source == 0:
            continue
        for at in range(0, whole, LINE_BYTES):
            copy_line_from(out, target, source + at)
            target += line_items
        for at in range(whole, row_bytes, item_bytes):
            copy_item_from(out, target, source + at)
            target += 1


@kernel
def decode_found(addresses, row_bytes, dim, bits, streams, out):
    """Decode quantised rows from their addresses.

    Args:
        addresses: (num,) int64; a row at 0 is left as it is in out.
        row_bytes, dim, bits: As in `RowCode`.
        streams: write past the cache; out is then 64-byte aligned and dim a multiple of 16.
        out: one-dimensional float32 view.
    """
    num = len(addresses)
    whole = dim - dim % LINE_ITEMS
    line_bytes = LINE_ITEMS * bits // 8
    for i in range(num):
        if i + AHEAD_ROWS < num:
            coming = addresses[i + AHEAD_ROWS]
            for at in range(0, row_bytes, LINE_BYTES):
                prefetch_address(coming + at)
            prefetch_address(coming + row_bytes - 1)  # a row seldom begins with a line
        if addresses[i] == 0:
            continue
        step, source, target = np.float32(1), addresses[i], i * dim
        if bits != 16:
            step, source = float_at(source), source + SCALE_BYTES
        for _ in range(0, whole, LINE_ITEMS):
            if bits == 16:
                if streams:
                    stream_decoded_line16(out, target, source, step)
                else:
                    decode_line16(out, target, source, step)
            elif bits == 8:
                if streams:
                    stream_decoded_line8(out, target, source, step)
                else:
                    decode_line8(out, target, source, step)
            else:
                if streams:
                    stream_decoded_line4(out, target, source, step)
                else:
                    decode_line4(out, target, source, step)
            target += LINE_ITEMS
            source += line_bytes
        for column in range(dim - whole):
            if bits == 16:
                out[target + column] = bfloat_at(source + 2 * column)
                continue
            if bits == 8:
                code = int(byte_at(source + column))
            else:
                code = (int(byte_at(source + column // 2)) >> 4 * (column % 2) & 15 ^ 8) - 8
            out[target + column] = np.float32(code) * step
    if streams:
        store_fence()


@kernel(error_model="numpy")
def encode_all(rows, levels, bits, value, codes, scales, out):
    """Encode row after row; the loops are separate so that each becomes vector instructions.

    Args:
        rows: (num, dim) floats, C-contiguous.
        levels: the largest code.
        value: (dim,) float32 scratch.
        codes: (dim + dim % 2,) int8 scratch; items past dim stay 0.
        scales: (num,) float32, filled.
        out: (num, dim) int8, or with 4 bits (num, ceil(dim / 2)), filled.
    """
    dim = rows.shape[1]
    for i in range(len(rows)):
        row, packed = rows[i], out[i]
        top = np.float32(0)
        finite = True
        for c in range(dim):
            value[c] = np.float32(row[c])
        for c in range(dim):
            top = max(top, abs(value[c]))
            finite &= abs(value[c]) < np.float32(np.inf)
        if not finite:
            scales[i] = np.float32(np.nan)
            packed[:] = 0
            continue
        scale = np.float32(0)
        if top > 0:
            scale = max(top / np.float32(levels), np.float32(LEAST_SCALE))
        scales[i] = scale
        divisor = scale if scale > 0 else np.float32(1)
        for c in range(dim):
            codes[c] = np.int8(np.rint(value[c] / divisor))
        if bits == 8:
            for c in range(len(packed)):
                packed[c] = codes[c]
        else:
            for c in range(len(packed)):
                packed[c] = (codes[2 * c] & 15) | codes[2 * c + 1] << 4
