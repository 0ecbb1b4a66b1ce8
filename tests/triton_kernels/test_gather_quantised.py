"""Rows of codes: how they are made, and decoded while they are gathered, against plain arithmetic, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_python import run_python
from tier_tables import spread

from lightning_gnnscale.loader import BufferPool
from lightning_gnnscale.triton_kernels.gather_rows import (
    RowCode,
    RowTables,
    encode_codes,
    gather_rows,
    gather_tiers,
    op,
    unpack_places,
)
from tests.oracles.gather_rows import decode_codes_reference, encode_codes_reference
from tests.says import said
from tests.tiers import all_pairs

LAUNCH_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the interpreter takes CPU tensors
DIMS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 128, 500]


def some_rows(num, dim, dtype=np.float32, seed=0):
    """Rows of many magnitudes, the first one of zeros."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((num, dim)) * np.exp(random.normal(0, 2, (num, 1)))
    rows[:1] = 0
    return rows.astype(dtype)


def scales(raw):
    return np.ascontiguousarray(raw[:, :4]).view(np.float32)


@given(
    bits=st.sampled_from([8, 4]),
    dim=st.sampled_from([0, *DIMS]),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
    seed=st.integers(0, 1000),
)
def test_values_come_back_within_half_a_scale(bits, dim, dtype, seed):
    code, rows = RowCode(dim, bits), some_rows(20, dim, dtype, seed)
    raw = encode_codes(rows, code)
    assert raw.tobytes() == encode_codes_reference(rows, code).tobytes()
    assert raw.shape == (20, code.row_bytes) and code.row_bytes % 4 == 0
    values = decode_codes_reference(raw, code)
    # The quotient before rounding and the product after it are off by 2**-24 of at most `levels` scales each.
    assert (np.abs(values - rows.astype(np.float32)) <= scales(raw) * (0.5 + code.levels * 2.0**-22)).all()
    assert not values[0].any() and not raw[0].any()
    assert ((values == 0) | (rows != 0)).all(), "a zero stays exactly zero"


def test_bfloat16_is_rounded_to_nearest_and_keeps_what_is_no_number():
    rows = np.random.default_rng(0).integers(0, 2**32, (500, 7), np.uint32)
    rows[:5, 0] = 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001  # two ties, above one, beyond, tiny
    rows, code = rows.view(np.float32), RowCode(7, 16)
    raw = encode_codes(rows, code)
    values, wanted = (decode_codes_reference(each, code) for each in (raw, encode_codes_reference(rows, code)))
    np.testing.assert_array_equal(values, wanted)  # NaN of any payload is NaN
    assert values[:5, 0].tolist() == [1.0, 1.015625, 1.0078125, np.inf, 0.0] and raw.shape == (500, 16)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_magnitude_of_a_row_is_kept_to_the_last_bit_or_two(bits):
    rows = some_rows(500, 17)[1:]
    values = decode_codes_reference(encode_codes(rows, RowCode(17, bits)), RowCode(17, bits))
    largest = np.abs(rows).max(1)
    assert (np.abs(np.abs(values).max(1) - largest) <= largest * 2.0**-23).all()


def test_bytes_lie_as_documented():
    raw = encode_codes(np.array([[7, -7, 0, 3, -1]], np.float32), RowCode(5, 4))
    assert raw.tolist() == [[0, 0, 128, 63, 0x97, 0x30, 0x0F, 0]]
    raw = encode_codes(np.array([[127, -127, -1]], np.float32), RowCode(3, 8))
    assert raw.tolist() == [[0, 0, 128, 63, 127, 129, 255, 0]]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_a_row_that_is_no_numbers_decodes_to_nan_alone(bits, bad):
    rows = some_rows(3, 5, np.float64)
    rows[1, 4] = bad
    code = RowCode(5, bits)
    raw = encode_codes(rows, code)
    assert raw.tobytes() == encode_codes_reference(rows, code).tobytes()
    values = gather_rows(raw, np.arange(3), code=code)
    assert np.isnan(values[1]).all() and np.isfinite(values[[0, 2]]).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_tiny_rows_decode_to_no_subnormal_values(bits):
    rows = np.float32([[1e-45, -1e-40], [2e-38, 1e-39], [1e-37, 3e-38]])
    values = decode_codes_reference(encode_codes(rows, RowCode(2, bits)), RowCode(2, bits))
    assert (np.abs(values - rows) <= 2.0**-126).all()
    assert ((values == 0) | (np.abs(values) >= 2.0**-126)).all()


@given(
    bits=st.sampled_from([16, 8, 4]),
    dim=st.sampled_from([0, *DIMS]),
    num=st.integers(0, 60),
    out_kind=st.sampled_from(["fresh", "pooled", "shifted", "half", "upper half"]),
    rows_dtype=st.sampled_from([np.int32, np.int64, np.uint16]),
    seed=st.integers(0, 1000),
)
def test_gathered_rows_equal_the_plain_decoding(bits, dim, num, out_kind, rows_dtype, seed):
    code = RowCode(dim, bits)
    raw = encode_codes(some_rows(37, dim, seed=seed), code)
    rows = np.random.default_rng(seed).integers(0, 37, num).astype(rows_dtype)
    expected = decode_codes_reference(raw[rows], code)
    out, memory = None, BufferPool().take(num * dim * 4 + 128, np.uint8)
    memory[:] = 7
    start = 4 if out_kind == "shifted" else 0
    if out_kind == "half":
        out = np.empty((num, dim), np.float16)
    elif out_kind == "upper half":
        out = torch.empty(num, dim, dtype=torch.bfloat16)
        assert torch.equal(gather_rows(raw, rows, out, code), torch.from_numpy(expected).bfloat16())
        return
    elif out_kind != "fresh":
        out = memory[start : start + num * dim * 4].view(np.float32).reshape(num, dim)
    got = gather_rows(raw, rows, out, code)
    assert out is None or got is out
    assert got.tobytes() == expected.astype(got.dtype).tobytes()
    assert (memory[:start] == 7).all() and (memory[start + num * dim * 4 :] == 7).all()


@all_pairs
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("half", [False, True])
def test_rows_of_several_tables_equal_the_plain_decoding(bits, dim, half):
    pytest.importorskip("triton")
    code, nodes = RowCode(dim, bits), np.random.default_rng(dim).integers(0, 41, 70)
    raw = encode_codes(some_rows(41, dim), code)
    expected = decode_codes_reference(raw, code)[nodes].astype(np.float16 if half else np.float32)
    for unreachable in ((), (0, 2)):
        places, tables = spread(torch.from_numpy(raw), 4, dim, unreachable)
        there = ~np.isin(unpack_places(places)[0][nodes], unreachable)
        wanted = np.where(there[:, None], expected, expected.dtype.type(5))
        counts = np.bincount(unpack_places(places)[0][nodes][there], minlength=4)
        out, reads = np.full(expected.shape, 5, expected.dtype), np.zeros(4, np.int64)
        arrays = RowTables([table if table is None else table.numpy() for table in tables.tables], tables.row_bytes)
        gather_tiers(places, nodes, arrays, out, reads, code)
        assert out.tobytes() == wanted.tobytes() and reads.tolist() == counts.tolist()
        if LAUNCH_DEVICE == "cuda":
            tables = RowTables([None if table is None else table.cuda() for table in tables.tables], tables.row_bytes)
        for by_node in (True, False):
            out = torch.full(expected.shape, 5, dtype=torch.float16 if half else torch.float32, device=LAUNCH_DEVICE)
            reads = torch.zeros(4, dtype=torch.int64, device=LAUNCH_DEVICE)
            given_places = torch.from_numpy(places if by_node else places[nodes]).to(LAUNCH_DEVICE)
            given_nodes = torch.from_numpy(nodes).to(LAUNCH_DEVICE) if by_node else None
            op.gather_tiers_with_triton(given_places, given_nodes, tables, out, reads, code, max_programs=3)
            assert out.cpu().numpy().tobytes() == wanted.tobytes() and reads.tolist() == counts.tolist()


def test_what_does_not_fit_is_refused():
    code = RowCode(5, 8)
    raw = encode_codes(np.ones((3, 5), np.float32), code)
    with pytest.raises(ValueError, match=said("uint8 (num_rows, 12) 5 8")):
        gather_rows(raw[:, :8].copy(), np.array([0]), code=code)
    with pytest.raises(ValueError, match=said("float32 float16 bfloat16 out float64")):
        gather_rows(raw, np.array([0]), np.empty((1, 5)), code)
    with pytest.raises(ValueError, match=said("rows[0] [0, 3) 3")):
        gather_rows(raw, np.array([3]), code=code)
    with pytest.raises(ValueError, match=said("tables rows 12 bytes 20")):
        gather_tiers(np.arange(3), None, RowTables([np.zeros((3, 5), np.float32)]), np.empty((3, 5), "f4"), code=code)
    with pytest.raises(ValueError, match=said("out 3 20 3 16")):
        gather_tiers(np.arange(3), None, RowTables([raw]), np.empty((3, 4), np.float32), code=code)
    with pytest.raises(ValueError, match=said("rows (num, 5) int64")):
        encode_codes(np.ones((3, 5), np.int64), code)


PLAIN = """
import numpy as np
from lightning_gnnscale.triton_kernels.gather_rows import RowCode, encode_codes, gather_rows
from tests.oracles.gather_rows import decode_codes_reference, encode_codes_reference
for bits in (8, 4):
    for dim in (1, 17, 64):
        code, rows = RowCode(dim, bits), np.random.default_rng(0).standard_normal((9, dim)).astype(np.float32)
        raw = encode_codes(rows, code)
        assert raw.tobytes() == encode_codes_reference(rows, code).tobytes()
        assert gather_rows(raw, np.arange(9), code=code).tobytes() == decode_codes_reference(raw, code).tobytes()
"""


@pytest.mark.sweep
def test_the_loops_keep_their_bounds_where_nothing_is_compiled():
    run_python(PLAIN, NUMBA_DISABLE_JIT="1")
