"""Row gather on the CPU: whole cache lines, prefetched, written past the cache where rows are whole lines."""

from ...jit import kernel
from ..intrinsics import copy_line, prefetch, store_fence, stream_line

AHEAD_ROWS = 8  # rows between a prefetch and its use
AHEAD_ITEMS = 32  # the same where a row is one item


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
def stream_rows(table, rows, row_items, line_items, out):
    """Copy rows of whole 64-byte lines with stores that bypass the cache.

    Args:
        table, out: one-dimensional views of a contiguous table; out is 64-byte aligned.
        rows: (num_rows,) positions.
        row_items, line_items: items a row and a line.
    """
    num = len(rows)
    for i in range(num):
        if i + AHEAD_ROWS < num:
            coming = rows[i + AHEAD_ROWS] * row_items
            for at in range(0, row_items, line_items):
                prefetch(table, coming + at)
        source = rows[i] * row_items
        target = i * row_items
        for at in range(0, row_items, line_items):
            stream_line(out, target + at, table, source + at)
    store_fence()


@kernel
def copy_rows(table, rows, row_items, line_items, out):
    """Copy rows of any length: whole lines, then the items that are left; arguments as for `stream_rows`."""
    num = len(rows)
    whole = row_items - row_items % line_items
    for i in range(num):
        if i + AHEAD_ROWS < num:
            coming = rows[i + AHEAD_ROWS] * row_items
            for at in range(0, row_items, line_items):
                prefetch(table, coming + at)
        source = rows[i] * row_items
        target = i * row_items
        for at in range(0, whole, line_items):
            copy_line(out, target + at, table, source + at)
        for at in range(whole, row_items):
            out[target + at] = table[source + at]


@kernel
def copy_items(table, rows, out):
    """Copy one item a row."""
    num = len(rows)
    for i in range(num):
        if i + AHEAD_ITEMS < num:
            prefetch(table, rows[i + AHEAD_ITEMS])
        out[i] = table[rows[i]]
