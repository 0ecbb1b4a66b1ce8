"""Row gather against plain indexing, bit for bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.loader import BufferPool
from lightning_gnnscale.triton_kernels.gather_rows import gather_rows
from tests.oracles.gather_rows import gather_rows_reference
from tests.says import said

DTYPES = ["u1", "i1", "?", "f2", "i2", "f4", "i4", "f8", "i8", "c16"]


def random_table(shape, dtype, seed):
    """Random bits: NaN patterns and all."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == "?" else 256, num_bytes, np.uint8)
    return bits.view(dtype).reshape(shape)


@given(
    dtype=st.sampled_from(DTYPES),
    dim=st.sampled_from([1, 2, 3, 7, 8, 15, 16, 31, 32, 63, 64, 65, 128]),
    num_rows=st.integers(0, 100),
    out_kind=st.sampled_from(["fresh", "pooled", "shifted"]),
    rows_dtype=st.sampled_from([np.int32, np.int64, np.uint16]),
    seed=st.integers(0, 1000),
)
def test_equals_indexing(dtype, dim, num_rows, out_kind, rows_dtype, seed):
    table = random_table((37, dim), dtype, seed)
    rows = np.random.default_rng(seed).integers(0, 37, num_rows).astype(rows_dtype)
    out = None
    if out_kind == "pooled":
        out = BufferPool().take((num_rows, dim), dtype)
        assert out.ctypes.data % 64 == 0
    elif out_kind == "shifted":  # aligned for the dtype, not for a cache line
        itemsize = np.dtype(dtype).itemsize
        out = np.empty(num_rows * dim * itemsize + 64 + itemsize, np.uint8)
        start = -out.ctypes.data % 64 + itemsize
        out = out[start : start + num_rows * dim * itemsize].view(dtype).reshape(num_rows, dim)
    got = gather_rows(table, rows, out)
    assert got.dtype == table.dtype and got.shape == (num_rows, dim)
    assert got.tobytes() == gather_rows_reference(table, rows).tobytes()
    assert out is None or got is out


@pytest.mark.parametrize("shape", [(9,), (9, 2, 3), (9, 4, 16), (9, 0)])
def test_tables_of_any_rank(shape):
    table = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    rows = np.array([8, 0, 0, 3])
    np.testing.assert_array_equal(gather_rows(table, rows), table[rows])


def test_nothing_outside_of_out_is_written():
    table = random_table((50, 16), "f4", 1)
    for start in (64, 68):
        raw = np.full(64 * 40 + 256, 7, np.uint8)
        first = -raw.ctypes.data % 64 + start
        out = raw[first : first + 64 * 40].view("f4").reshape(40, 16)
        gather_rows(table, np.arange(40), out)
        assert (raw[:first] == 7).all() and (raw[first + 64 * 40 :] == 7).all()


def test_memory_maps(tmp_path):
    table = random_table((20, 16), "f4", 2)
    np.save(tmp_path / "table.npy", table)
    rows = np.array([19, 4, 4])
    assert gather_rows(np.load(tmp_path / "table.npy", mmap_mode="r"), rows).tobytes() == table[rows].tobytes()


@pytest.mark.parametrize(("rows", "at", "value"), [([0, 9], 1, 9), ([-1], 0, -1), ([3, 2, 2**40], 2, 2**40)])
def test_rows_out_of_range_are_named(rows, at, value):
    with pytest.raises(ValueError, match=said(f"rows[{at}] [0, 9) {value}")):
        gather_rows(np.zeros((9, 4)), np.array(rows))


def test_what_does_not_fit_is_refused():
    table = np.zeros((9, 4), np.float32)
    with pytest.raises(ValueError, match=said("out float32")):
        gather_rows(table, np.array([1]), np.empty((1, 5), np.float32))
    with pytest.raises(ValueError, match=said("out float32")):
        gather_rows(table, np.array([1]), np.empty((1, 4), np.float64))
    with pytest.raises(ValueError, match=said("table C-contiguous")):
        gather_rows(table[:, ::2], np.array([1]))
    with pytest.raises(ValueError, match="Python objects"):
        gather_rows(np.array([[None]]), np.array([0]))
    with pytest.raises(ValueError, match="one-dimensional integers"):
        gather_rows(table, np.array([0.5]))
