"""How the gathers are launched on a GPU: word widths, tiles and offsets by arithmetic, and what Hopper's code holds."""

import pytest
from own_python import run_python

from lightning_gnnscale.triton_kernels.gather_rows import RowCode
from lightning_gnnscale.triton_kernels.gather_rows.tiers import (
    THREADS,
    decoding_plan,
    needs_wide_offsets,
    row_plan,
    tile_columns,
)

# Bytes of a row, alignment of the tables and the output, and the bytes that a thread loads at once.
WORDS = [
    (128, 16, 16), (256, 16, 16), (400, 16, 16), (512, 4096, 16), (1024, 16, 16), (3072, 16, 16),
    (2408, 16, 8), (512, 8, 8), (100, 16, 4), (5732, 16, 4), (260, 16, 4), (512, 4, 4), (130, 16, 2), (512, 2, 2),
    (1433, 16, 1), (1, 16, 1), (512, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize(("row_bytes", "alignment", "word_bytes"), WORDS)
def test_words_are_as_wide_as_rows_and_addresses_allow(row_bytes, alignment, word_bytes):
    plan = row_plan(row_bytes, alignment)
    assert plan.word_bytes == word_bytes
    assert plan.item_bytes == min(8, word_bytes) and plan.row_items * plan.item_bytes == row_bytes
    tile_bytes = plan.rows * plan.columns * plan.item_bytes
    assert tile_bytes == THREADS * word_bytes * (4 if word_bytes == 16 else 8) or plan.rows == 1


@pytest.mark.parametrize("row_bytes", [64, 128, 256, 512, 1024, 2048])
def test_eight_programs_of_a_multiprocessor_have_64_kib_under_way(row_bytes):
    plan = row_plan(row_bytes, 16)
    assert plan.programs_per_sm * plan.rows * plan.columns * plan.item_bytes == 64 << 10
    assert plan.programs_per_sm * THREADS * plan.max_registers == 1 << 16
    assert plan.rows >= 4, "several rows a program"


@pytest.mark.parametrize("row_items", [1, 2, 3, 25, 33, 50, 63, 64, 65, 301, 1433])
@pytest.mark.parametrize("most", [128, 1024])
def test_a_row_is_padded_by_half_of_it_at_most(row_items, most):
    columns = tile_columns(row_items, most)
    assert columns & (columns - 1) == 0 and 1 <= columns <= most
    padded = -(-row_items // columns) * columns
    assert 2 * padded <= 3 * row_items
    wider = 2 * columns
    too_wide = wider > most or columns >= row_items or -(-row_items // wider) * wider * 2 > 3 * row_items
    assert too_wide, "no wider tile would do"


@pytest.mark.parametrize(
    ("code", "value_bytes", "alignment", "word_bytes"),
    [
        (RowCode(128, 8), 4, 16, 16), (RowCode(128, 4), 4, 16, 16), (RowCode(128, 8), 2, 16, 16),
        (RowCode(65, 8), 4, 16, 4), (RowCode(66, 4), 2, 16, 4), (RowCode(128, 8), 4, 4, 4), (RowCode(1, 4), 2, 16, 2),
        (RowCode(128, 16), 4, 16, 16),
    ],
)  # fmt: skip
def test_decoded_values_are_stored_in_wide_words_where_they_fit(code, value_bytes, alignment, word_bytes):
    plan = decoding_plan(code, value_bytes, alignment)
    assert plan.word_bytes == word_bytes
    assert plan.rows * plan.columns * 32 // code.bits <= THREADS * 16, "at most 16 values a thread"


def test_offsets_have_64_bits_from_2_to_the_31_on():
    row_items, step = 64, 1056 * 16  # rows of 512 bytes, all programs of an H200
    last = (1 << 31) // row_items - 3 * step - 1
    assert not needs_wide_offsets(last, step, row_items)
    assert needs_wide_offsets(last + 1, step, row_items)
    # The largest number that a program works out: a position two steps past the last block, plus one of its rows.
    assert (last + 2 * step + 15) * row_items < 1 << 31
    assert not needs_wide_offsets(2**31 - 1 - 3 * step, step)
    assert needs_wide_offsets(2**31 - 3 * step, step)


COMPILE = """
from tests.triton_kernels.hopper import compiled
from lightning_gnnscale.triton_kernels.gather_rows import RowCode, kernel
from lightning_gnnscale.triton_kernels.gather_rows.tiers import decoding_plan, row_plan

POINTERS = dict(places_ptr="*i64", nodes_ptr="*i64", bases_ptr="*i64", reads_ptr="*i64")
SHARED = POINTERS | dict(num="i32", HAS_NODES=True, COUNT=True, NUM_TABLES=5, TABLES=8, WIDE_NODES=False)
ITEMS = {8: "*i64", 4: "*i32", 2: "*i16", 1: "*u8"}
"""

ROWS = """
for row_bytes, load, wide in ROWS:
    plan = row_plan(row_bytes, 16)
    own = dict(ROW_ITEMS=plan.row_items, ALIGNMENT=plan.word_bytes, ROWS=plan.rows, COLUMNS=plan.columns, WIDE=wide)
    found = compiled(
        kernel.gather_tiers_kernel, (*POINTERS, "out_ptr"), dict(maxnreg=plan.max_registers),
        out_ptr=ITEMS[plan.item_bytes], **own, **SHARED,
    )
    passes = -(-plan.row_items // plan.columns)
    a_pass = 4 if plan.word_bytes == 16 else 8
    loads, stores = found.moves["ld.global." + load], found.moves["st.global." + load]
    if load != "b64":  # which reads places, nodes and bases too
        assert loads == a_pass * passes, (row_bytes, found)
    assert stores == a_pass * passes, (row_bytes, found)
    assert found.spilled in (0, None), (row_bytes, found)
    assert found.registers is None or found.registers <= (plan.max_registers or 128), (row_bytes, found)
    assert len(found.atomics) == 1, "of whole numbers, once a program"
"""

CODES = """
for bits, dim, item, store in CODES:
    code = RowCode(dim, bits)
    plan = decoding_plan(code, 4 if item == "fp32" else 2, 16)
    own = dict(DIM=dim, BITS=bits, ROW_BYTES=code.row_bytes, ROWS=plan.rows, WORDS=plan.columns, WIDE=False)
    found = compiled(
        kernel.decode_tiers_kernel, (*POINTERS, "out_ptr"), dict(maxnreg=plan.max_registers),
        out_ptr="*" + item, **own, **SHARED,
    )
    assert found.moves["st.global." + store] and not any("b8" in name for name in found.moves), (bits, dim, found)
    assert found.spilled in (0, None), (bits, dim, found)
    assert found.registers is None or found.registers <= (plan.max_registers or 128), (bits, dim, found)
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "rows",
    [
        [(128, "v2.b64", False), (256, "v2.b64", False), (512, "v2.b64", True), (400, "v2.b64", False)],
        [(1024, "v2.b64", False), (2048, "v2.b64", False), (2408, "b64", False), (260, "b32", False)],
    ],
)
def test_hopper_moves_rows_in_words_of_16_bytes_four_at_a_time(rows, tmp_path):
    pytest.importorskip("triton")
    run_python(f"{COMPILE}\nROWS = {rows!r}\n{ROWS}", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.sweep
def test_hopper_reads_codes_in_words_of_4_bytes(tmp_path):
    pytest.importorskip("triton")
    codes = [(8, 128, "fp32", "v4.b32"), (4, 128, "fp32", "v4.b32"), (4, 128, "fp16", "v4.b32"), (8, 65, "fp32", "b32")]
    codes += [(16, 128, "fp32", "v2.b32"), (16, 65, "fp32", "b32"), (16, 128, "bf16", "b32")]  # two values a word
    run_python(f"{COMPILE}\nCODES = {codes!r}\n{CODES}", TRITON_CACHE_DIR=str(tmp_path))
