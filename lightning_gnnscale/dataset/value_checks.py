"""Values that no run could learn from, refused before any work; arrays are read in bounded blocks."""

import warnings
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from ..foreign import is_csr
from ..graph import MASK_NAMES
from .columns import check_whole, opened

UNKNOWN = -1
_BLOCK_VALUES = 1 << 20
_LARGEST_CLASS = 2**31 - 1
_UNEVEN = 500  # times the magnitude of another column: the layers then hear one column alone
_LARGE = 100  # magnitudes below this do no harm beside columns that are nearly 0
_LOOKED_AT = 1024  # rows of a block, evenly spaced


def check_values(features: Any, labels: Any, edge_weight: Any, edge_features: Any, finite: bool = True) -> None:
    """Refuse sparse features, labels and edge values that would spoil training; dense features are left out.

    Dense features, the largest of all, are checked while they are stored: another read of them would cost more than
    the partitioning that it saves. Values are as for `write_partition_store`; without `finite` NaN and infinities pass.

    Cost: one read of the values, in blocks of 2^20.
    """
    if labels is not None:
        check_label_values(np.asarray(labels))
    for rows in features.values() if isinstance(features, Mapping) else (features,):
        if finite and is_csr(rows):
            check_sparse_features(rows)
    for name, values in (("edge_weight", edge_weight), ("edge_features", edge_features)):
        if finite and values is not None:
            check_edge_values(name, values)


class ColumnRanges:
    """The least and the largest value of each column of features, over rows that are looked at as they are stored.

    Cost: of each block at most 2 * 1,024 rows, evenly spaced.
    """

    def __init__(self):
        self._low = self._high = None

    def add(self, rows: np.ndarray) -> None:
        """Look at rows of a (num_rows, dim) block of numbers."""
        if rows.ndim != 2 or not rows.size or rows.dtype.kind not in "fiu":
            return
        rows = np.asarray(rows[:: max(1, len(rows) // _LOOKED_AT)])
        low, high = rows.min(axis=0).astype(np.float64), rows.max(axis=0).astype(np.float64)
        self._low = low if self._low is None else np.minimum(self._low, low)
        self._high = high if self._high is None else np.maximum(self._high, high)

    def tell(self, name: str) -> None:
        """Warn where a column's magnitude is hundreds of times that of another, and large by itself."""
        if self._low is None:
            return
        magnitude = np.maximum(-self._low, self._high)
        usable = np.flatnonzero(np.isfinite(magnitude) & (magnitude > 0))
        if len(usable) < 2:
            return
        small, large = usable[magnitude[usable].argmin()], usable[magnitude[usable].argmax()]
        if magnitude[large] < _LARGE or magnitude[large] / _UNEVEN < magnitude[small]:
            return
        told = " and ".join(f"column {at} from {self._low[at]:g} to {self._high[at]:g}" for at in (large, small))
        warnings.warn(
            f"{name}: columns are of very different scale, {told}, which training may not learn from: standardise "
            "them, (x - mean) / std of each column",
            stacklevel=3,
        )


def tell_odd_nodes(labels: Any, masks: Mapping[str, np.ndarray]) -> None:
    """Warn of nodes that are in two masks, and of labels that are NaN."""
    names = sorted(masks, key=lambda name: (MASK_NAMES.index(name) if name in MASK_NAMES else len(MASK_NAMES), name))
    shared = {pair: int(np.count_nonzero(masks[pair[0]] & masks[pair[1]])) for pair in combinations(names, 2)}
    told = ", ".join(f"{one} and {other} {count}" for (one, other), count in shared.items() if count)
    if told:
        warnings.warn(
            f"masks share nodes, {told}: what is trained or chosen on is no test; make them disjoint", stacklevel=3
        )
    if labels is not None and labels.dtype.kind == "f":
        missing = sum(int(np.isnan(rows).sum()) for _, rows in blocks(labels))
        if missing:
            told = f"labels: {missing} of {len(labels)} nodes have NaN, and count as unlabelled (-1)"
            warnings.warn(told, stacklevel=3)


def check_sparse_features(features: Any) -> None:
    """Refuse CSR features with NaN or infinities; names the row and the column."""
    position = _first_not_finite(features.data)
    if position is not None:
        raise not_finite(features, position[0])


def check_edge_values(name: str, values: Any) -> None:
    """Refuse edge weights or features with NaN or infinities, also as float32, as weights are stored.

    Names the edge.
    """
    values = np.asarray(opened(values))
    stored, kept = (np.float32, " of float32") if name == "edge_weight" else (values.dtype, "")
    position = _first_not_finite(values, stored)
    if position is not None:
        column = "".join(f", column {index}" for index in position[1:])
        raise ValueError(f"{name}: edge {position[0]}{column} is {values[position]}; give finite numbers{kept}")


def least_value(values: Any) -> float:
    """Return the smallest of edge values, 0.0 of none."""
    return min((float(rows.min()) for _, rows in blocks(np.asarray(opened(values)))), default=0.0)


def num_classes_of(values: Any) -> int:
    """Return one more than the largest of (num_edges,) classes of edges, 0 where none is known; cost as above."""
    return max((int(rows.max()) for _, rows in blocks(np.asarray(opened(values)))), default=-1) + 1


def check_label_values(labels: np.ndarray) -> None:
    """Refuse labels other than classes from 0, -1 and NaN, or of several a node other than 0, 1 and -1."""
    for begin, rows in blocks(labels):
        if labels.ndim == 2:
            _check_several(begin, rows)
        else:
            _check_single(begin, rows)


def blocks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, rows) of about `_BLOCK_VALUES` values each."""
    step = max(1, _BLOCK_VALUES // max(1, int(np.prod(array.shape[1:]))))
    for begin in range(0, len(array), step):
        check_whole(array)
        yield begin, array[begin : begin + step]


def bad_value(place: str, value, held_as: str, most: float) -> ValueError:
    """Return the error for a value that is not finite, or beyond `most`, the largest of the floats it is stored as."""
    if np.isfinite(value):
        return ValueError(f"{place} is {value}, and {held_as} holds {most:g} at most; choose a wider feature_storage")
    return ValueError(f"{place} is {value}; give finite numbers")


def not_finite(features, position: int, dtype: np.dtype | None = None) -> ValueError:
    """Return the error for a NaN, an infinity, or a value beyond `dtype`, at a position of CSR features' `data`."""
    row = int(np.searchsorted(features.indptr, position, side="right")) - 1
    column, value = features.indices[position], features.data[position]
    held = np.dtype(dtype or features.data.dtype)
    return bad_value(f"features: row {row}, column {column}", value, held.name, float(np.finfo(held).max))


def _check_several(begin: int, rows: np.ndarray) -> None:
    bad = np.argwhere((rows != 0) & (rows != 1) & (rows != UNKNOWN))
    if len(bad):
        row, column = bad[0]
        raise ValueError(
            f"several labels per node must each be 0, 1 or -1 (unknown), got {rows[row, column]} in row {begin + row}, "
            f"column {column}{': np.nan_to_num(labels, nan=-1)' if np.isnan(rows[row, column]) else ''}"
        )


def _check_single(begin: int, rows: np.ndarray) -> None:
    if rows.dtype.kind == "f":
        broken = np.flatnonzero(((rows != np.round(rows)) | np.isinf(rows)) & ~np.isnan(rows))
        if len(broken):
            raise ValueError(
                f"labels must be whole numbers, -1 where unknown, got {rows[broken[0]]} in row {begin + broken[0]}"
            )
    high = np.flatnonzero(rows > _LARGEST_CLASS)
    if len(high):
        raise ValueError(f"labels must be classes below 2**31, got {rows[high[0]]} in row {begin + high[0]}")
    low = np.flatnonzero(rows < UNKNOWN) if rows.dtype.kind in "fi" else ()
    if len(low):
        raise ValueError(f"labels must be -1 (unknown) or a class from 0, got {rows[low[0]]} in row {begin + low[0]}")


def _first_not_finite(array: np.ndarray, stored: np.dtype | None = None) -> tuple[int, ...] | None:
    """Return the position of the first value that is NaN or infinite in the dtype `stored`, or None."""
    if array.dtype.kind != "f":
        return None
    for begin, rows in blocks(array):
        with np.errstate(over="ignore"):
            bad = np.argwhere(~np.isfinite(rows.astype(stored or rows.dtype, copy=False)))
        if len(bad):
            row, *rest = (int(index) for index in bad[0])
            return (begin + row, *rest)
    return None
