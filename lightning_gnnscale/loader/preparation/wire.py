"""Arrays as they travel: int64 in the narrowest integers that hold all values, bool as bits."""

from typing import NamedTuple

import numpy as np

from ...jit import kernel
from ...sampler.subgraph import Allocate
from ...triton_kernels.intrinsics import prefetch

NARROW = tuple(np.dtype(name) for name in ("uint8", "int8", "uint16", "int16", "int32"))
_WIDE = np.dtype(np.int64)
_AHEAD = 32  # items between a prefetch and its use


class Wire(NamedTuple):
    """An array as it travels.

    Attributes:
        values: one of NARROW in place of int64 where all values fit, bits (uint8) in place of bool.
        dtype: of the array that it stands for.
        shape: likewise.
    """

    values: np.ndarray
    dtype: np.dtype
    shape: tuple[int, ...]


def narrowest(low: int, high: int) -> np.dtype:
    """Return the first dtype of NARROW that holds both, or int64."""
    return next((dtype for dtype in NARROW if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max), _WIDE)


def narrowed(array: np.ndarray) -> Wire:
    """Return an array as it travels; it may share the array's memory."""
    values = np.ascontiguousarray(array)
    if array.dtype == np.bool_:
        values = np.packbits(values)
    elif array.dtype == np.int64 and array.size:
        values = values.astype(narrowest(int(array.min()), int(array.max())), copy=False)
    return Wire(values, array.dtype, array.shape)


def _in_shape(wire: Wire) -> np.ndarray:
    """Return the values in the array's shape, their dtype maybe still narrow."""
    if wire.dtype == np.bool_:
        size = int(np.prod(wire.shape, dtype=np.int64))
        return np.unpackbits(wire.values, count=size).view(np.bool_).reshape(wire.shape)
    return wire.values


def widened(wire: Wire, allocate: Allocate) -> np.ndarray:
    """Return the array again."""
    out = allocate(wire.shape, wire.dtype)
    out[...] = _in_shape(wire)
    return out


def selected(wire: Wire, positions: np.ndarray | None, num: int, allocate: Allocate) -> np.ndarray:
    """Return the values at (num,) positions, of full width; positions None: the first `num`."""
    values = _in_shape(wire)
    out = allocate((num, *wire.shape[1:]), wire.dtype)
    if positions is None:
        out[...] = values[:num]
    elif values.ndim == 1:
        _select(values, positions, out)
    else:
        out[...] = values[positions]
    return out


@kernel
def _select(values, positions, out):
    num = len(positions)
    for i in range(num):
        if i + _AHEAD < num:
            prefetch(values, np.int64(positions[i + _AHEAD]))
        out[i] = values[positions[i]]
