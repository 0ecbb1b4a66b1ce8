"""How the Triton gathers are launched: the words that rows move in, the tiles of a program, and 32 or 64-bit offsets.

Functions of numbers alone, so that a machine without a GPU can check them.
"""

from typing import NamedTuple

from .cpu import SCALE_BYTES
from .tiers import RowCode

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
    """Return how rows of `row_bytes` >= 1 are copied.

    Args:
        alignment: A power of two that divides the address of every table and of the output, in bytes.
    """
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

    Args:
        code: The form of the rows, of at least one column.
        value_bytes: Bytes of a decoded value.
        alignment: A power of two that divides the address of the output, in bytes.
    """
    row = code.dim * value_bytes
    word_bytes = min(WORD_BYTES, alignment, row & -row)
    wide = word_bytes == WORD_BYTES
    code_words = (code.row_bytes - SCALE_BYTES) // 4
    words = THREADS * _LOADS * (4 if wide else 1) * code.bits // 32
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

    Args:
        num_rows: Rows of the array.
        step_rows: Rows of all programs together: positions are worked out up to two steps past the end.
        row_items: Items of a row.
    """
    return (num_rows + 3 * step_rows) * row_items >= 1 << 31


def _occupancy(wide: bool) -> tuple[int, int | None]:
    return (_PROGRAMS_PER_SM, _REGISTERS) if wide else (_NARROW_PROGRAMS_PER_SM, None)
