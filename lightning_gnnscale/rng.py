"""The counter-based generator: every random choice is a hash of what it decides, never of what came before.

`mix64` is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). A key is folded left to right,
`combine(key, value) = mix64(key ^ mix64(value + GOLDEN))`, in the order seed, epoch, part, batch, then hop, node,
sample. The numpy form below works on whole arrays; the compiled form is for kernels. Both give the same bits.
"""

import numba
import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_27, _30, _31, _32, _11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32), np.uint64(11)
_LOW_32 = np.uint64(0xFFFFFFFF)
_LOW_64 = (1 << 64) - 1
_GOLDEN_INT, _MULTIPLY_1_INT, _MULTIPLY_2_INT = int(GOLDEN), int(_MULTIPLY_1), int(_MULTIPLY_2)
_SHORT, _ROUNDS = 4096, 6  # of `distinct_positions`: items that are permuted outright, rounds of the network
_TO_UNIT = 1.0 / 9007199254740992.0  # 2**-53


@numba.njit(nogil=True, inline="always")
def mix64(value):
    """Mix one uint64 into one uint64, bijectively (compiled form)."""
    value = np.uint64(value)
    value = (value ^ (value >> _30)) * _MULTIPLY_1
    value = (value ^ (value >> _27)) * _MULTIPLY_2
    return value ^ (value >> _31)


@numba.njit(nogil=True, inline="always")
def combine(key, value):
    """Fold one integer into a uint64 key (compiled form)."""
    return mix64(np.uint64(key) ^ mix64(np.uint64(value) + GOLDEN))


@numba.njit(nogil=True, inline="always")
def below(random, bound):
    """Map a uint64 to an int64 in [0, bound) by its upper 32 bits; bound <= 2**31, bias below bound / 2**32."""
    return np.int64(((random >> _32) * np.uint64(bound)) >> _32)


@numba.njit(nogil=True, inline="always")
def unit(random):
    """Map a uint64 to a float64 in [0, 1) by its upper 53 bits."""
    return np.float64(random >> _11) * _TO_UNIT


def mix64_array(values: np.ndarray) -> np.ndarray:
    """Mix an array of integers into uint64, elementwise: the numpy form of `mix64`."""
    values = np.asarray(values).astype(np.uint64)
    with np.errstate(over="ignore"):
        values = (values ^ (values >> _30)) * _MULTIPLY_1
        values = (values ^ (values >> _27)) * _MULTIPLY_2
    return values ^ (values >> _31)


def combine_array(key: int | np.ndarray, values: np.ndarray) -> np.ndarray:
    """Fold integers into a key, elementwise: the numpy form of `combine`; key and values broadcast."""
    with np.errstate(over="ignore"):
        shifted = np.asarray(values).astype(np.uint64) + GOLDEN
    return mix64_array(np.asarray(key).astype(np.uint64) ^ mix64_array(shifted))


def fold(*values: int) -> int:
    """Fold integers of any size, left to right, into one uint64 key (a Python int), starting from 0."""
    key = 0
    for value in values:
        key = combine_int(key, value)
    return key


def combine_int(key: int, value: int) -> int:
    """Fold one integer of any size into a key below 2**64: `combine` of Python ints, ten times as fast as arrays."""
    return _mix64_int(int(key) ^ _mix64_int((int(value) + _GOLDEN_INT) & _LOW_64))


def _mix64_int(value: int) -> int:
    """Mix a Python int in [0, 2**64)."""
    value = ((value ^ (value >> 30)) * _MULTIPLY_1_INT) & _LOW_64
    value = ((value ^ (value >> 27)) * _MULTIPLY_2_INT) & _LOW_64
    return value ^ (value >> 31)


def batch_key(seed: int, epoch: int, part: int, batch: int) -> int:
    """Return the uint64 key that decides everything random about one batch (Invariant 3)."""
    return fold(seed, epoch, part, batch)


def permutation(num_items: int, key: int) -> np.ndarray:
    """Return a permutation of [0, num_items) that is a function of the key alone.

    Returns:
        (num_items,) int64: positions sorted by their hash. No two are equal: with one key, `combine` is one-to-one.

    Cost: O(num_items log num_items) time, 16 bytes an item.
    """
    return np.argsort(combine_array(key, np.arange(num_items)))


def distinct_positions(num_items: int, count: int, key: int) -> np.ndarray:
    """Sample positions from [0, num_items) without replacement, in a random order: a function of the arguments alone.

    Args:
        num_items: at most 2**62.
        count: at most `num_items`.
        key: uint64.

    Returns:
        (count,) int64: the head of a permutation, which is not made where it is much longer than the head.

    Cost: O(count) memory, about 60 bytes each, and O(count log count) time.
    Source: cycle walking over a Feistel network (Black and Rogaway, CT-RSA 2002).
    """
    if num_items <= max(_SHORT, 4 * count):
        return permutation(num_items, key)[:count].copy()
    half = np.uint64(((num_items - 1).bit_length() + 1) // 2)
    sampled = _feistel(np.arange(count, dtype=np.uint64), half, key)
    outside = np.flatnonzero(sampled >= num_items)
    while len(outside):  # at most three of four are outside each time
        walked = _feistel(sampled[outside], half, key)
        sampled[outside] = walked
        outside = outside[walked >= num_items]
    return sampled.astype(np.int64)


def _feistel(values: np.ndarray, half: np.uint64, key: int) -> np.ndarray:
    """Permute uint64 values of 2 * half bits by rounds that each hash one half into the other."""
    mask = np.uint64((1 << int(half)) - 1)
    left, right = values >> half, values & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (combine_array(fold(key, number), right) & mask)
    return (left << half) | right
