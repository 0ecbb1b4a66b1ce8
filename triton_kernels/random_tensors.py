"""The counter-based generator of `rng.py` on tensors, wherever they are: the same bits, uint64 kept as int64."""

import torch
from torch import Tensor

from ..rng import GOLDEN

_GOLDEN, _MULTIPLY_1, _MULTIPLY_2 = (word - (1 << 64) for word in (int(GOLDEN), 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def signed(word: int) -> int:
    """Return the int64 of a uint64's bits."""
    return word - (1 << 64) if word >> 63 else word


def mix64_tensor(value: Tensor) -> Tensor:
    """Mix int64 tensors: `rng.mix64`."""
    value = (value ^ _shifted(value, 30)) * _MULTIPLY_1
    value = (value ^ _shifted(value, 27)) * _MULTIPLY_2
    return value ^ _shifted(value, 31)


def combine_tensor(key: int | Tensor, values: Tensor) -> Tensor:
    """Fold integers into a key, a uint64 or a tensor: `rng.combine`."""
    key = key if isinstance(key, Tensor) else signed(int(key))
    return mix64_tensor(mix64_tensor(values + _GOLDEN) ^ key)


def below_tensor(random: Tensor, bound: int | Tensor) -> Tensor:
    """Map random words to [0, bound): `rng.below`."""
    return (_shifted(random, 32) * bound) >> 32


def unit_tensor(random: Tensor) -> Tensor:
    """Map random words to float64 in [0, 1): `rng.unit`."""
    return _shifted(random, 11).to(torch.float64) * 2.0**-53


def _shifted(value: Tensor, by: int) -> Tensor:
    return (value >> by) & ((1 << (64 - by)) - 1)
