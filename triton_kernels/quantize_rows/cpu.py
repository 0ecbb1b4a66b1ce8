"""Row quantisation on the CPU: a row at a time, each stage a plain loop over a row of scratch that stays in the cache.

The loops are separate so that the compiler turns each into vector instructions; one loop for all would stay scalar.
"""

import numpy as np

from ...jit import kernel
from ...rng import GOLDEN, combine, mix64

SCALE_INF, SCALE_NAN = 0x7F80, 0x7FC0  # bits of bfloat16
# The bits of a float: the shift to those of bfloat16, what to take off first, and the bits of 2**-100.
FLOAT_BITS = {
    np.dtype(np.float32): (16, 0, (127 - 100) << 23),
    np.dtype(np.float64): (45, (1023 - 127) << 52, (1023 - 100) << 52),
}
_INTEGER = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}
_CODE = {16: np.int16, 8: np.uint8, 4: np.uint8, 2: np.uint8}
_PACKED = {16: np.uint8, 8: np.uint8, 4: np.uint16, 2: np.uint32}  # the codes that share a byte, as one item


def encode(x: np.ndarray, held: np.ndarray | None, key: int, row_ids: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Write the codes of x, or of x - held, to out; arguments as for `encode_rows`, contiguous."""
    num_groups = -(-x.shape[1] // 4)
    value = np.empty(x.shape[1], x.dtype)
    words = np.empty(num_groups, np.uint64)
    codes = np.zeros(num_groups * 4, _CODE[bits])  # those past the width stay 0, and so do the spare bits of a row
    encode_all(
        x, x[:0] if held is None else held, np.uint64(key), row_ids, 2 ** (bits - 1) - 1, bits, FLOAT_BITS[x.dtype],
        value, value.view(_INTEGER[x.dtype]), words, words.view(np.uint16), codes, codes.view(_PACKED[bits]), out,
    )  # fmt: skip


def decode(codes: np.ndarray, bits: int, out: np.ndarray, add: bool) -> None:
    """Write the decoded rows to out, or add them to it; arguments as for `decode_rows`, contiguous."""
    row = np.empty(-(-out.shape[1] // 4) * 4, _CODE[bits])
    decode_all(codes, 2 ** (bits - 1) - 1, bits, row, row.view(_PACKED[bits]), out, add)


@kernel(error_model="numpy")
def encode_all(
    x, held, key, row_ids, levels, bits, float_bits, value, value_bits, words, samples, codes, packed, out
):  # fmt: skip
    """Encode row after row.

    Args:
        held: (num_rows, width), or no rows for none.
        levels: 2**(bits - 1) - 1.
        float_bits: the entry of `FLOAT_BITS`.
        value, value_bits: (width,) scratch of the dtype of x, and the same memory as integers.
        words, samples: (ceil(width / 4),) uint64 scratch, and the same memory as uint16.
        codes, packed: zeros for a row of codes, and the same memory as items of one byte's codes.
    """
    width = x.shape[1]
    offset = levels if bits < 16 else 0
    for i in range(len(x)):
        if len(held) > 0:
            for c in range(width):
                value[c] = x[i, c] - held[i, c]
        else:
            for c in range(width):
                value[c] = x[i, c]
        scale = round_up(largest(value_bits), float_bits)
        out[i, 0], out[i, 1] = scale & 0xFF, scale >> 8
        if scale == 0 or scale == SCALE_NAN:
            codes[:width] = offset
        else:
            fill_words(combine(key, np.uint64(row_ids[i])), words)
            round_row(value, x.dtype.type(levels) / to_float(scale, x), samples, levels, offset, codes)
        pack(packed, bits, out[i, 2:])
        if len(held) > 0:
            add_row(codes, offset, to_float(scale, x) / x.dtype.type(levels), held[i])


@kernel(error_model="numpy")
def decode_all(packed_rows, levels, bits, codes, packed, out, add):
    """Decode row after row into out, or onto it; codes and packed are scratch as in `encode_all`."""
    offset = levels if bits < 16 else 0
    for i in range(len(out)):
        scale = np.int64(packed_rows[i, 0]) | np.int64(packed_rows[i, 1]) << 8
        step = to_float(scale, out) / out.dtype.type(levels)
        unpack(packed_rows[i, 2:], bits, packed)
        if add:
            add_row(codes, offset, step, out[i])
        else:
            for c in range(out.shape[1]):
                out[i, c] = out.dtype.type(np.int32(codes[c]) - np.int32(offset)) * step


@kernel
def largest(value_bits):
    """Return the bits, less the sign, of the largest magnitude: infinity, then NaN, are above all numbers."""
    integer = value_bits.dtype.type
    magnitude = integer(np.iinfo(value_bits.dtype).max)
    top = integer(0)
    for c in range(len(value_bits)):
        top = max(top, integer(value_bits[c] & magnitude))
    return np.int64(top)


@kernel
def round_up(top, float_bits):
    """Return the bfloat16 bits of the float with bits `top`, rounded up: 0, or at least 2**-100; NaN past the last."""
    if top == 0:
        return 0
    shift, below, least = float_bits
    rounded = (max(top, least) - below + (1 << shift) - 1) >> shift
    return rounded if rounded < SCALE_INF else SCALE_NAN


@kernel
def to_float(scale, like):
    """Return the bfloat16 with the bits `scale` in the dtype of `like`."""
    return like.dtype.type(np.uint32(scale << 16).view(np.float32))


@kernel
def fill_words(row_key, words):
    """Fill words with the random bits of a row: four samples of 16 bits a word, the lowest first."""
    for w in range(len(words)):
        words[w] = mix64(row_key + np.uint64(w + 1) * GOLDEN)


@kernel(error_model="numpy")
def round_row(value, factor, samples, levels, offset, codes):
    """Write floor(value * factor) + offset, plus 1 where the sample in (0, 1) is below the fraction."""
    floating = value.dtype.type
    most, one, unit, half = floating(levels), floating(1), floating(2.0**-16), floating(2.0**-17)
    shift = floating(offset)
    for c in range(len(value)):
        scaled = min(max(value[c] * factor, -most), most)  # the rounding of the factor may lead past the levels
        lower = np.floor(scaled)
        lower += one if scaled - lower > floating(samples[c]) * unit + half else floating(0)
        codes[c] = np.int32(lower + shift)


@kernel
def add_row(codes, offset, step, row):
    """Add the decoded codes to a row."""
    for c in range(len(row)):
        row[c] += row.dtype.type(np.int32(codes[c]) - np.int32(offset)) * step


@kernel
def pack(packed, bits, row):
    """Write the bytes of a quantised row, the first code of a byte in its lowest bits."""
    if bits == 4:
        for j in range(len(row)):
            row[j] = packed[j] | packed[j] >> 4
    elif bits == 2:
        for j in range(len(row)):
            row[j] = packed[j] | packed[j] >> 6 | packed[j] >> 12 | packed[j] >> 18
    else:
        for j in range(len(row)):
            row[j] = packed[j]


@kernel
def unpack(row, bits, packed):
    """Spread the bytes of a row over a row of codes."""
    if bits == 4:
        for j in range(len(row)):
            byte = np.uint32(row[j])
            packed[j] = (byte | byte << 4) & 0x0F0F
    elif bits == 2:
        for j in range(len(row)):
            byte = np.uint32(row[j])
            packed[j] = (byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303
    else:
        for j in range(len(row)):
            packed[j] = row[j]
