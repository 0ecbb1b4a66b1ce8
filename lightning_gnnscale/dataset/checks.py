"""Values that no run could learn from, refused before any work; arrays are read a bounded block at a time."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..partition_store.node_tables import not_finite

UNKNOWN = -1
SPARSE_LABELS = 100  # labels that go this many times further than they are many are taken for a mistake
_BLOCK_VALUES = 1 << 20


def check_sparse_features(features: Any) -> None:
    """Refuse CSR features with NaN or infinities, which would spoil every weight that they reach.

    Args:
        features: with `indptr`, `indices` and `data`, one row a node.

    Raises:
        ValueError: names the row and the column.

    Cost: one read of the values, a block at a time.
    """
    position = _first_not_finite(features.data)
    if position is not None:
        raise not_finite(features, position[0])


def check_edge_values(name: str, values: Any) -> None:
    """Refuse edge weights or features with NaN or infinities.

    Args:
        name: for the message.
        values: (num_edges,) or (num_edges, dim) array, memmap or .npy path, by edge id.

    Raises:
        ValueError: names the edge.

    Cost: as `check_sparse_features`.
    """
    values = np.load(values, mmap_mode="r") if isinstance(values, str) or hasattr(values, "__fspath__") else values
    position = _first_not_finite(np.asarray(values))
    if position is not None:
        column = "".join(f", column {index}" for index in position[1:])
        raise ValueError(f"{name}: edge {position[0]}{column} is {values[position]}; give finite numbers")


def checked_classes(labels: np.ndarray, num_classes: int | None) -> int:
    """Return the number of classes, or of labels a node where there are several.

    Args:
        labels: (num_nodes,) classes from 0, -1 or NaN = unknown; or (num_nodes, num_labels) of 0, 1 and -1.
        num_classes: as the user gave it, or None.

    Raises:
        ValueError: labels that cannot be meant; names the row.
    """
    if labels.dtype.kind not in "fiub":
        raise ValueError(f"labels must be numbers, got {labels.dtype}")
    if labels.ndim not in (1, 2):
        raise ValueError(f"labels must have shape (num_nodes,) or (num_nodes, num_labels), got {labels.shape}")
    return _checked_several(labels, num_classes) if labels.ndim == 2 else _checked_single(labels, num_classes)


def _checked_several(labels: np.ndarray, num_classes: int | None) -> int:
    any_known = False
    for begin, rows in _blocks(labels):
        known = (rows == 0) | (rows == 1)
        bad = np.argwhere(~known & (rows != UNKNOWN))
        if len(bad):
            row, column = bad[0]
            raise ValueError(
                f"labels of several a node must be 0, 1 or -1 (unknown), got {rows[row, column]} in row {begin + row}, "
                f"column {column}"
            )
        any_known = any_known or bool(known.any())
    if not any_known:
        raise ValueError("labels: no node has one, all are -1; training needs some")
    if num_classes is not None and num_classes != labels.shape[1]:
        raise ValueError(
            f"num_classes must be {labels.shape[1]}, the columns of the labels, or None; got {num_classes}"
        )
    return labels.shape[1]


def _checked_single(labels: np.ndarray, num_classes: int | None) -> int:
    if labels.dtype.kind == "f":
        labels = np.where(np.isnan(labels), UNKNOWN, labels)
        broken = np.flatnonzero((labels != np.round(labels)) | np.isinf(labels))
        if len(broken):
            raise ValueError(
                f"labels must be whole numbers, -1 where unknown, got {labels[broken[0]]} in row {broken[0]}"
            )
    labels = labels.astype(np.int64, copy=False)
    if len(labels) and labels.min() < UNKNOWN:
        row = int(labels.argmin())
        raise ValueError(f"labels must be -1 (unknown) or a class from 0, got {labels[row]} in row {row}")
    largest = int(labels.max(initial=UNKNOWN))
    if largest == UNKNOWN:
        raise ValueError("labels: no node has one, all are -1; training needs some")
    if num_classes is not None:
        if largest >= num_classes:
            row = int(labels.argmax())
            raise ValueError(f"labels must be below num_classes {num_classes}, got {largest} in row {row}")
        return num_classes
    distinct = len(np.unique(labels[labels >= 0]))
    if largest + 1 > SPARSE_LABELS * distinct:
        raise ValueError(
            f"labels go up to {largest} (row {int(labels.argmax())}), but only {distinct} values occur: renumber them "
            f"from 0, or set num_classes={largest + 1}"
        )
    return largest + 1


def _first_not_finite(array: np.ndarray) -> tuple[int, ...] | None:
    """Return where the first NaN or infinity stands, or None."""
    if array.dtype.kind != "f":
        return None
    for begin, rows in _blocks(array):
        bad = np.argwhere(~np.isfinite(rows))
        if len(bad):
            row, *rest = (int(index) for index in bad[0])
            return (begin + row, *rest)
    return None


def _blocks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, rows) of about `_BLOCK_VALUES` values each."""
    step = max(1, _BLOCK_VALUES // max(1, int(np.prod(array.shape[1:]))))
    for begin in range(0, len(array), step):
        yield begin, array[begin : begin + step]
