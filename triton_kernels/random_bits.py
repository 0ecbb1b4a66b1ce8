"""The counter-based generator of `rng.py` in Triton: the same bits."""

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLY_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = tl.constexpr(0x94D049BB133111EB)
_LOW_32 = tl.constexpr(0xFFFFFFFF)


@triton.jit
def mix64(value):
    """Mix a uint64 tensor: `rng.mix64`."""
    value = (value ^ (value >> 30)) * _MULTIPLY_1
    value = (value ^ (value >> 27)) * _MULTIPLY_2
    return value ^ (value >> 31)


@triton.jit
def combine(key, value):
    """Fold a uint64 tensor into a uint64 key: `rng.combine`."""
    return mix64(key ^ mix64(value + GOLDEN))


@triton.jit
def sample_below(key, sample, bound):
    """Return sample number `sample` of a key, a uint64 in [0, bound): two 32-bit samples a word, upper half first."""
    sample += tl.zeros((), tl.int64)  # the interpreter counts loops in Python's integers
    word = mix64(key + ((sample >> 1) + 1).to(tl.uint64) * GOLDEN)
    bits = tl.where((sample & 1) == 0, word >> 32, word & _LOW_32)
    return (bits * bound.to(tl.uint64)) >> 32
