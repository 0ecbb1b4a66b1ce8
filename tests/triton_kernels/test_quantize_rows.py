"""Row quantisation on the CPU: bits, no bias, bounded errors, a closed loop that converges, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantize_forms import BITS, DTYPES, KEY, odd_ids, odd_rows, run_form, same_bits

from lightning_gnnscale import rng
from lightning_gnnscale.triton_kernels.quantize_rows import decode_rows, encode_rows, row_bytes
from tests.says import said


def levels_of(bits):
    return 2 ** (bits - 1) - 1


def scale_of(codes):
    """The rows' scales, read through torch's own bfloat16."""
    return codes[:, :2].contiguous().view(torch.bfloat16).to(torch.float64)


@pytest.mark.parametrize(
    ("width", "bits", "expected"), [(128, 4, 66), (65, 2, 19), (1, 2, 3), (3, 16, 8), (63, 8, 65), (63, 4, 34)]
)
def test_bytes_of_a_row(width, bits, expected):
    assert row_bytes(width, bits) == expected


@given(
    width=st.one_of(st.sampled_from([1, 2, 3, 4, 5, 63, 64, 65, 128]), st.integers(1, 200)),
    num_rows=st.integers(1, 12),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(DTYPES),
    with_held=st.booleans(),
    key=st.integers(0, 2**64 - 1),
    seed=st.integers(0, 10**6),
)
def test_compiled_and_plain_torch_give_the_same_bits(width, num_rows, bits, dtype, with_held, key, seed):
    x, row_ids = odd_rows(num_rows, width, dtype, seed), odd_ids(num_rows, seed)
    held = odd_rows(num_rows, width, dtype, seed + 1) if with_held else None
    results = [run_form(form, x, bits, key, row_ids, held) for form in ("op", "reference")]
    for compiled, plain in zip(*results, strict=True):
        assert same_bits(compiled, plain)
    if with_held:
        codes, after = results[0][0], results[0][-1]
        assert same_bits(decode_rows(codes, width, bits, add_to=held.clone()), after)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_unsigned_codes_stand_from_the_lowest_bits_up(bits):
    levels, per_byte = levels_of(bits), 8 // bits
    q = np.resize(np.arange(-levels, levels + 1), 2 * levels + 1 + 4 - per_byte)  # whole steps: nothing is random
    codes = encode_rows(torch.tensor(q[None], dtype=torch.float32), bits, KEY, torch.tensor([5]))[0].tolist()
    assert codes[:2] == {8: [0xFE, 0x42], 4: [0xE0, 0x40], 2: [0x80, 0x3F]}[bits]  # 127.0, 7.0, 1.0
    expected = [0] * (row_bytes(len(q), bits) - 2)
    for i, code in enumerate(q + levels):
        expected[i // per_byte] |= int(code) << i % per_byte * bits
    assert codes[2:] == expected


def test_wide_codes_are_little_endian_int16():
    q = np.array([[-32767, -256, -1, 0, 1, 255, 32767]])
    codes = np.concatenate([np.array([[0x80, 0x3F]], np.uint8), q.astype("<i2").view(np.uint8)], axis=1)  # scale 1.0
    decoded = decode_rows(torch.from_numpy(codes), 7, 16, dtype=torch.float64)
    assert decoded.tolist() == (q * (1.0 / 32767)).tolist()
    again = encode_rows(decoded, 16, KEY, torch.tensor([0]))
    # Samples lie in [2**-17, 1 - 2**-17]: a product one rounding beside a whole number always becomes that number.
    assert again.tolist() == codes.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_is_the_next_bfloat16(dtype):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((300, 3)) * np.logspace(-29, 38, 300)[:, None])
    x = torch.cat([x.clamp(-3.38e38, 3.38e38), torch.tensor([[1.0, 0, 0], [1 + 2**-7, 0, 0], [1 + 2**-20, 0, 0]])])
    x = x.to(dtype)
    codes = encode_rows(x, 8, KEY, torch.arange(len(x)))
    scale, top = scale_of(codes), x.abs().amax(1).double()
    before = (codes[:, :2].contiguous().view(torch.int16) - 1).view(torch.bfloat16)[:, 0].double()
    assert (scale[:, 0] >= top).all() and (before < top).all()
    assert scale[-3:, 0].tolist() == [1.0, 1 + 2**-7, 1 + 2**-7]


@given(st.integers(1, 70), st.sampled_from(BITS), st.sampled_from(DTYPES), st.integers(-90, 120), st.integers(0, 10**6))
def test_errors_stay_below_a_step(width, bits, dtype, exponent, seed):
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((4, width)) * 2.0**exponent).to(dtype)
    codes = encode_rows(x, bits, seed, torch.arange(4))
    error = (decode_rows(codes, width, bits, dtype).double() - x.double()).abs()
    # Five roundings of the dtype (quotient, product, step, product, and the clamp's reach), each of at most the scale.
    slack = 5 * torch.finfo(dtype).eps
    assert (error <= scale_of(codes) * (1 / levels_of(bits) + slack)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("over", ["keys", "row_ids"])
def test_the_mean_is_the_value(bits, dtype, over):
    num_samples, width = 4000, 37
    row = torch.from_numpy(np.random.default_rng(bits).standard_normal((1, width))).to(dtype)
    if over == "keys":
        codes = torch.cat([encode_rows(row, bits, rng.fold(key), torch.tensor([7])) for key in range(num_samples)])
    else:
        codes = encode_rows(row.expand(num_samples, width), bits, KEY, torch.arange(num_samples))
    decoded = decode_rows(codes, width, bits, dtype).double()
    step = float(scale_of(codes)[0, 0]) / levels_of(bits)
    fraction = (row.double() / step) % 1
    variance = fraction * (1 - fraction) * step**2 / num_samples
    bias = step * 2.0**-17 + 4 * torch.finfo(dtype).eps * row.abs().double()
    error = decoded.mean(0) - row.double()
    assert (error.abs() <= 5 * variance.sqrt() + bias).all()
    # The columns' samples are independent: the error of their sum has the sum of their variances.
    assert error.sum().abs() <= 5 * variance.sum().sqrt() + bias.sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_a_closed_loop_converges(bits, dtype):
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((20, 65))).to(dtype)
    sender, receiver, row_ids = torch.zeros_like(x), torch.zeros_like(x), torch.arange(20)
    # Each round leaves at most (1 + 2**-7) / L of the largest error. Ternary codes (L = 1) have no such bound: their
    # errors shrink in the mean, here to about 0.91 a round.
    for round_ in range(600 if bits == 2 else 25):
        codes = encode_rows(x, bits, rng.fold(round_), row_ids, held=sender)
        decode_rows(codes, 65, bits, add_to=receiver)
        assert torch.equal(sender, receiver)
    # What is left is below the rounding of the sum.
    assert ((x - sender).abs() <= 2 * torch.finfo(dtype).eps * x.abs().amax()).all()


@pytest.mark.parametrize("bits", BITS)
def test_a_row_does_not_depend_on_its_position(bits):
    x, row_ids = odd_rows(50, 41, torch.float32, 5), odd_ids(50, 5)
    order = torch.from_numpy(np.random.default_rng(6).permutation(50))
    codes = encode_rows(x, bits, KEY, row_ids)
    assert torch.equal(encode_rows(x[order], bits, KEY, row_ids[order]), codes[order])
    for i in (0, 17, 49):
        assert torch.equal(encode_rows(x[i : i + 1], bits, KEY, row_ids[i : i + 1])[0], codes[i])


def test_rows_that_hold_no_numbers_and_rows_of_zeros():
    x = torch.ones(7, 9)
    x[0, 3], x[1, 0], x[2, 8], x[3, 2] = torch.nan, torch.inf, -torch.inf, 3.4e38
    x[4], x[5] = 0, -0.0
    for bits in BITS:
        codes = encode_rows(x, bits, KEY, torch.arange(7))
        decoded = decode_rows(codes, 9, bits)
        assert decoded[:4].isnan().all()
        assert (codes[4:6, :2] == 0).all() and (decoded[4:6] == 0).all()
        assert torch.equal(decoded[6], x[6])


def test_strides_and_gradients_of_what_is_read_do_not_matter():
    wide = torch.randn(6, 20, requires_grad=True)
    x, row_ids = wide[::2, ::2], torch.arange(6)[::2]
    codes = encode_rows(x, 4, KEY, row_ids)
    assert torch.equal(codes, encode_rows(x.detach().clone(), 4, KEY, row_ids.clone()))
    spread = torch.zeros(3, 2 * codes.shape[1], dtype=torch.uint8)
    spread[:, ::2] = codes
    assert torch.equal(decode_rows(spread[:, ::2], 10, 4), decode_rows(codes, 10, 4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype):
    x = torch.zeros(0, 5, dtype=dtype)
    codes = encode_rows(x, 4, 0, torch.zeros(0, dtype=torch.int64), held=x.clone())
    assert codes.shape == (0, 5) and codes.dtype == torch.uint8
    decoded = decode_rows(codes, 5, 4, dtype)
    assert decoded.shape == (0, 5) and decoded.dtype == dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "bits 16 8 4 2 3"),
        ({"key": -1}, "key [0, 2**64) -1"),
        ({"key": 2**64}, "key must be in"),
        ({"x": torch.zeros(4, 6, dtype=torch.float16)}, "float32 float64"),
        ({"x": torch.zeros(6)}, "torch.float32 (6,)"),
        ({"x": torch.zeros(4, 0)}, "width 1 0"),
        ({"row_ids": torch.arange(5)}, "row_ids torch.int64 (4,) (5,)"),
        ({"row_ids": torch.arange(4, dtype=torch.int32)}, "row_ids torch.int64"),
        ({"held": torch.zeros(4, 6, dtype=torch.float64)}, "held torch.float32"),
        ({"held": torch.zeros(6, 4).t()}, "held contiguous strides"),
        ({"out": torch.zeros(4, 4, dtype=torch.uint8)}, "out torch.uint8 (4, 5)"),
    ],
)
def test_what_cannot_be_encoded_is_refused(change, message):
    arguments = {"x": torch.zeros(4, 6), "bits": 4, "key": 0, "row_ids": torch.arange(4)} | change
    with pytest.raises(ValueError, match=said(message)):
        encode_rows(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 1}, "bits 16 8 4 2 1"),
        ({"width": 9}, "uint8 (num_rows, 7) 9 4 (4, 5)"),
        ({"codes": torch.zeros(4, 5)}, "codes uint8"),
        ({"dtype": torch.bfloat16}, "out float32 float64"),
        ({"out": torch.zeros(3, 6)}, "out torch.float32 (4, 6)"),
        ({"add_to": torch.zeros(6, 4).t()}, "add_to contiguous"),
        ({"out": torch.zeros(4, 6), "add_to": torch.zeros(4, 6)}, "out add_to"),
    ],
)
def test_what_cannot_be_decoded_is_refused(change, message):
    arguments = {"codes": torch.zeros(4, 5, dtype=torch.uint8), "width": 6, "bits": 4} | change
    with pytest.raises(ValueError, match=said(message)):
        decode_rows(**arguments)
