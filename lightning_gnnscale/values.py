"""Integers and times as users give them, exact or refused: the one rule of every door.

What is checked is what a dtype can hold wrongly: int32 ids are never read for it, uint64 ones are.
"""

from collections.abc import Iterator
from datetime import date
from numbers import Integral
from typing import Any

import numpy as np

from .errors import one_line_of
from .foreign import is_tensor, torch_layout

ALWAYS = np.iinfo(np.int64).min  # the time of what has none: there from the beginning
_LOWEST, _HIGHEST = ALWAYS, np.iinfo(np.int64).max
_BLOCK = 1 << 20  # values looked at together, so that a map of a file is never whole in memory


def exact_integers(
    name: str,
    values: Any,
    low: int = _LOWEST,
    high: int = _HIGHEST,
    unit: str = "row",
    whole_floats: bool = False,
    booleans: bool = False,
) -> np.ndarray:
    """Return integers as int64, none changed: the array itself where it is that already.

    Args:
        name: Of what they are, for messages.
        values: (num,) or (any, num) array, tensor or list; rows are counted along the last axis.
        low, high: The smallest and the largest that are allowed.
        unit: What a row is called.
        whole_floats, booleans: Floats without a fraction, and booleans as 0 and 1, are taken too.

    Raises:
        ValueError: no integers, a fraction, NaN, or a value outside of [low, high]; names the first such row.

    Cost: one read, and none of a dtype that holds nothing outside of [low, high].
    """
    array = as_array(name, values)
    kind = array.dtype.kind
    if array.size == 0 and kind in "fO":
        return array.astype(np.int64)
    if kind == "b" and booleans:
        return array.astype(np.int64)
    if kind == "f" and whole_floats:
        _refuse_fractions(name, array, unit)
    elif kind not in "iu":
        raise ValueError(f"{name} must be integers, got {array.dtype}{_how_to_convert(array.dtype)}")
    refuse_outside(name, array, low, high, unit)
    return array.astype(np.int64, copy=False)


def exact_times(name: str, values: Any, unit: str = "row") -> np.ndarray:
    """Return times as integers that int64 holds: whole numbers as they are, dates as nanoseconds since 1970.

    Args:
        name, unit: Of what they are, and what a row is called, for messages.
        values: (num,) integers, in any unit, or datetime64; an array, a tensor or a list.

    Raises:
        ValueError: floats, which would have to be rounded, durations, a date that is missing, or a time that int64
            does not hold; names the first such row.

    Cost: one read of uint64; a copy of dates in another unit than nanoseconds.
    """
    array = as_array(name, values)
    kind = array.dtype.kind
    if kind == "M":
        return _nanoseconds(name, array, unit)
    if array.size == 0 and kind in "fO":
        return array.astype(np.int64)
    if kind not in "iu":
        raise ValueError(f"{name} must be {_TIMES}, got {array.dtype}{_how_to_tell_time(array)}")
    refuse_outside(name, array, _LOWEST, _HIGHEST, unit)
    return array


def same_clock(given: dict[str, Any]) -> None:
    """Refuse dates beside numbers, times by the name of what has them: nothing says when a number is."""
    dates = {name: as_array(name, values).dtype.kind == "M" for name, values in given.items() if values is not None}
    if len(set(dates.values())) > 1:
        one, other = (next(name for name in dates if dates[name] is wanted) for wanted in (True, False))
        raise ValueError(
            f"{one} are dates and {other} are numbers: give both as dates, or both as numbers of one unit and start"
        )


def as_array(name: str, values: Any) -> np.ndarray:
    """Return values as an array, tensors without a copy; objects become integers or dates where they are."""
    refuse_masked(name, values)
    try:
        array = np.asanyarray(of_tensor(values))
    except Exception as error:  # of any library: each has errors of its own
        raise ValueError(f"{name}: numpy cannot hold it: {' '.join(str(error).split())}") from None
    if array.dtype.kind == "f" and isinstance(values, list | tuple) and array.ndim == 1:
        array = _of_objects(np.array(values, object), array)  # numpy makes floats of integers on both sides of 2**63
    return _of_objects(array, array) if array.dtype.kind == "O" else array


def refuse_masked(name: str, values: Any) -> None:
    """Refuse an array that hides some of its values; the others of a masked array would be taken with them."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise ValueError(f"{name}: the array masks {int(values.mask.sum())} of its values: fill them, .filled(value)")


def of_tensor(values: Any) -> Any:
    """Return a tensor as an array that shares its memory, bfloat16 as the same float32 numbers; others as they are.

    Arrays of bfloat16, a dtype that packages add to numpy, become float32 too.

    ValueError: numpy holds no such tensor: sparse, nested, without data (device "meta"), quantised, or of 8 bits.
    """
    if isinstance(values, np.ndarray):
        return values.astype(np.float32) if values.dtype.name == "bfloat16" else values
    if not is_tensor(values):
        return values
    try:
        tensor = values.detach().cpu()
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        layout = "nested" if getattr(values, "is_nested", False) else torch_layout(values)
        raise ValueError(
            f"a {layout} tensor of {values.dtype} on {values.device} cannot be read as an array"
            f" ({one_line_of(error)[:80]}): give a dense one, such as .to_dense(), .dequantize() or .float() returns"
        ) from None


def refuse_outside(name: str, array: np.ndarray, low: int, high: int, unit: str = "row") -> None:
    """Refuse integers, or floats without fractions, outside of [low, high]: names the first such row and its value."""
    if array.dtype.kind in "iu":
        held = np.iinfo(array.dtype)
        if low <= held.min and held.max <= high:
            return
    for begin, block in _blocks(array):
        least, most = int(block.min()), int(block.max())
        if low <= least and most <= high:
            continue
        bad = (block < low) if least < low else (block > high)
        row = begin + int(np.argmax(bad.reshape(-1, bad.shape[-1]).any(axis=0)))
        value = block[..., row - begin][bad[..., row - begin]].flat[0]
        raise ValueError(f"{name}: {unit} {row}: {value} is {_outside(int(value), low, high)}")


def _blocks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, block) along the last axis, none of them empty."""
    if array.size == 0:
        return
    array = array.reshape(1) if array.ndim == 0 else array
    step = max(1, _BLOCK * array.shape[-1] // array.size)
    for begin in range(0, array.shape[-1], step):
        yield begin, array[..., begin : begin + step]


def _outside(value: int, low: int, high: int) -> str:
    if low > _LOWEST and high < _HIGHEST:
        return f"not in [{low}, {high + 1})"
    return f"below {low}" if value < low else "beyond int64, which ids and times are kept in"


def _refuse_fractions(name: str, array: np.ndarray, unit: str) -> None:
    for begin, block in _blocks(array):
        with np.errstate(invalid="ignore"):
            bad = ~((block == np.floor(block)) & (np.abs(block) < 2.0**63))  # also of NaN and infinities
        if bad.any():
            row = int(np.argmax(bad.reshape(-1, bad.shape[-1]).any(axis=0)))
            value = block[..., row][bad[..., row]].flat[0]
            raise ValueError(f"{name}: {unit} {begin + row}: {value} is no whole number")


def _nanoseconds(name: str, array: np.ndarray, unit: str) -> np.ndarray:
    missing = np.isnat(array)
    if missing.any():
        row = int(np.argmax(missing.reshape(-1)))
        raise ValueError(f"{name}: {unit} {row}: has no time (NaT): give it one, or leave the row out")
    if array.dtype == np.dtype("M8[ns]"):
        return array.view(np.int64)
    with np.errstate(over="ignore"):
        try:
            exact = array.astype("M8[ns]")
        except (OverflowError, ValueError):
            exact = np.full_like(array, np.datetime64("NaT"), "M8[ns]")
    changed = exact.astype(array.dtype) != array
    if changed.any():
        row = int(np.argmax(changed.reshape(-1)))
        raise ValueError(
            f"{name}: {unit} {row}: {array.reshape(-1)[row]} is no whole nanosecond from 1677 to 2262: give numbers"
        )
    return exact.view(np.int64)


def _of_objects(objects: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """Return Python's integers or dates as an array of them, else `otherwise`."""
    given = objects.reshape(-1).tolist()
    if given and all(isinstance(one, Integral) and not isinstance(one, bool) for one in given):
        least, most = min(given), max(given)
        dtype = (
            np.int64 if _LOWEST <= least and most <= _HIGHEST else np.uint64 if 0 <= least and most < 2**64 else None
        )
        return otherwise if dtype is None else np.array(given, dtype).reshape(objects.shape)
    if given and all(isinstance(one, date | np.datetime64) for one in given):
        try:
            exact, fine = objects.astype("M8[us]"), objects.astype("M8[ns]")  # which wraps beyond 1677 to 2262
            return fine if (fine.astype("M8[us]") == exact).all() else exact
        except (OverflowError, ValueError, TypeError):
            return otherwise
    return otherwise


_TIMES = "whole numbers, such as seconds, or dates"


def _how_to_convert(dtype: np.dtype) -> str:
    if dtype.kind in "fc":
        return ": convert whole numbers with .astype('int64'), tensors with .long()"
    if dtype.kind == "b":
        return ": convert with .astype('int64') where 0 and 1 are meant"
    return ": give whole numbers"


def _how_to_tell_time(array: np.ndarray) -> str:
    if array.dtype.kind == "f":
        missing = np.flatnonzero(np.isnan(array.reshape(-1)))
        told = f" with none (NaN) in row {missing[0]}" if len(missing) else ""
        return f"{told}: round them, or scale them, as (1000 * t).round().astype('int64')"
    if array.dtype.kind == "m":
        return ": give dates, or the durations as numbers, .astype('int64')"
    return ": give numbers"
