"""Row quantisation in Triton: one program a row, one hash for four neighbouring values.

Launch with `enable_fp_fusion=False`: a fused multiplication and addition would change the bits.
"""

import triton
import triton.language as tl

from ..random_bits import GOLDEN, combine, mix64

_SCALE_INF = tl.constexpr(0x7F80)  # bits of bfloat16
_SCALE_NAN = tl.constexpr(0x7FC0)
_SAMPLE_UNIT = tl.constexpr(2.0**-16)
_SAMPLE_HALF = tl.constexpr(2.0**-17)


@triton.jit
def divide(numerator, denominator):
    """Divide, rounded to nearest: `/` of float32 is an approximation."""
    if numerator.dtype == tl.float32:
        return tl.div_rn(numerator, denominator)
    else:
        return numerator / denominator


@triton.jit
def round_up(top):
    """Return the bfloat16 bits of the float with bits `top`, rounded up: 0, or at least 2**-100; NaN past the last."""
    shift: tl.constexpr = 16 if top.dtype == tl.int32 else 45
    below: tl.constexpr = 0 if top.dtype == tl.int32 else (1023 - 127) << 52
    least: tl.constexpr = (127 - 100) << 23 if top.dtype == tl.int32 else (1023 - 100) << 52
    top = top.to(tl.int64)
    rounded = (tl.maximum(top, least) - below + ((1 << shift) - 1)) >> shift
    rounded = tl.where(rounded < _SCALE_INF, rounded, _SCALE_NAN)
    return tl.where(top == 0, 0, rounded).to(tl.int32)


@triton.jit
def largest(x_ptr, held_ptr, width, HAS_HELD: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bits, less the sign, of the largest magnitude of a row."""
    single: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    integer: tl.constexpr = tl.int32 if single else tl.int64
    magnitude: tl.constexpr = 0x7FFFFFFF if single else 0x7FFFFFFFFFFFFFFF
    top = tl.zeros((BLOCK,), integer)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = tl.load(x_ptr + columns, mask=columns < width, other=0.0)
        if HAS_HELD:
            value -= tl.load(held_ptr + columns, mask=columns < width, other=0.0)
        top = tl.maximum(top, value.to(integer, bitcast=True) & magnitude)
    return tl.max(top)


@triton.jit(do_not_specialize=["key"])
def encode_kernel(
    x_ptr, held_ptr, row_ids_ptr, out_ptr, key, width, row_bytes,
    BITS: tl.constexpr, HAS_HELD: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Encode one row; key holds the bits of a uint64, GROUPS (of four columns) is a power of two."""
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    floating = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * width
    held_ptr += row * width
    out_ptr += row * row_bytes
    scale = round_up(largest(x_ptr, held_ptr, width, HAS_HELD, 4 * GROUPS))
    tl.store(out_ptr, (scale & 0xFF).to(tl.uint8))
    tl.store(out_ptr + 1, (scale >> 8).to(tl.uint8))
    regular = (scale != 0) & (scale != _SCALE_NAN)
    number = (scale << 16).to(tl.float32, bitcast=True).to(floating)
    most = tl.full((), LEVELS, floating)
    factor = divide(most, number)
    step = divide(number, most)
    row_key = combine(key.to(tl.uint64), tl.load(row_ids_ptr + row).to(tl.uint64))
    for start in range(0, tl.cdiv(width, 4), GROUPS):
        groups = start + tl.arange(0, GROUPS)
        word = mix64(row_key + (groups + 1).to(tl.uint64) * GOLDEN)
        byte = tl.zeros((GROUPS,), tl.int32)
        for lane in tl.static_range(4):
            columns = groups * 4 + lane
            inside = columns < width
            value = tl.load(x_ptr + columns, mask=inside, other=0.0)
            if HAS_HELD:
                before = tl.load(held_ptr + columns, mask=inside, other=0.0)
                value -= before
            scaled = tl.where(regular, value * factor, 0.0)
            scaled = tl.minimum(tl.maximum(scaled, -most), most)
            # This floor takes subnormals for 0; one below 0 then keeps the code 0 that -1 + 1 would give.
            lower = tl.floor(scaled)
            sample = ((word >> (16 * lane)) & 0xFFFF).to(tl.int32).to(floating) * _SAMPLE_UNIT + _SAMPLE_HALF
            code = lower.to(tl.int32) + (scaled - lower > sample).to(tl.int32)
            if HAS_HELD:
                tl.store(held_ptr + columns, before + code.to(floating) * step, mask=inside)
            if BITS == 16:
                tl.store(out_ptr + 2 + 2 * columns, (code & 0xFF).to(tl.uint8), mask=inside)
                tl.store(out_ptr + 3 + 2 * columns, ((code >> 8) & 0xFF).to(tl.uint8), mask=inside)
            else:
                # Lanes fill a byte from its lowest bits up; the last lane of a byte stores it.
                byte |= tl.where(inside, code + LEVELS, 0) << (lane * BITS % 8)
                if (lane + 1) * BITS % 8 == 0:
                    position = 2 + groups * BITS // 2 + lane * BITS // 8
                    tl.store(out_ptr + position, byte.to(tl.uint8), mask=position < row_bytes)
                    byte = tl.zeros((GROUPS,), tl.int32)


@triton.jit
def decode_kernel(
    codes_ptr, out_ptr, width, row_bytes, BITS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Decode one row into out, or onto it; BLOCK columns at a time, a power of two."""
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    floating = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    codes_ptr += row * row_bytes
    out_ptr += row * width
    scale = tl.load(codes_ptr).to(tl.int32) | (tl.load(codes_ptr + 1).to(tl.int32) << 8)
    number = (scale << 16).to(tl.float32, bitcast=True).to(floating)
    step = divide(number, tl.full((), LEVELS, floating))
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        byte = tl.load(codes_ptr + 2 + columns * BITS // 8, mask=inside, other=0).to(tl.int32)
        if BITS == 16:
            upper = tl.load(codes_ptr + 3 + columns * 2, mask=inside, other=0).to(tl.int8, bitcast=True)
            code = byte | (upper.to(tl.int32) << 8)
        else:
            code = ((byte >> (columns * BITS % 8)) & (2**BITS - 1)) - LEVELS
        value = code.to(floating) * step
        if ADD:
            value = tl.load(out_ptr + columns, mask=inside, other=0.0) + value
        tl.store(out_ptr + columns, value, mask=inside)
