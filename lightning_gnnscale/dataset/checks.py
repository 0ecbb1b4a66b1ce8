"""How many classes labels have; their values are checked as far as counting reads them."""

import numpy as np

from ..partition_store.values import UNKNOWN, blocks, check_label_values

SPARSE_LABELS = 100  # labels that go this many times further than they are many are taken for a mistake


def checked_classes(labels: np.ndarray, num_classes: int | None) -> int:
    """Return the number of classes, or of labels a node where there are several.

    Args:
        labels: (num_nodes,) classes from 0, -1 or NaN = unknown; or (num_nodes, num_labels) of 0, 1 and -1.
        num_classes: as the user gave it, or None.

    Raises:
        ValueError: labels that cannot be meant; names the row. Values of several a node are left to
            `check_label_values`, before they are stored.

    Cost: one read of classes; of several a node, of the first rows up to a known one.
    """
    if labels.dtype.kind not in "fiub":
        raise ValueError(f"labels must be numbers, got {labels.dtype}")
    if labels.ndim not in (1, 2):
        raise ValueError(f"labels must have shape (num_nodes,) or (num_nodes, num_labels), got {labels.shape}")
    return _checked_several(labels, num_classes) if labels.ndim == 2 else _checked_single(labels, num_classes)


def _checked_several(labels: np.ndarray, num_classes: int | None) -> int:
    if not any(((rows == 0) | (rows == 1)).any() for _, rows in blocks(labels)):
        check_label_values(labels)
        raise ValueError("labels: no node has one, all are -1; training needs some")
    if num_classes is not None and num_classes != labels.shape[1]:
        raise ValueError(
            f"num_classes must be {labels.shape[1]}, the columns of the labels, or None; got {num_classes}"
        )
    return labels.shape[1]


def _checked_single(labels: np.ndarray, num_classes: int | None) -> int:
    check_label_values(labels)
    if labels.dtype.kind == "f":
        labels = np.where(np.isnan(labels), UNKNOWN, labels)
    labels = labels.astype(np.int64, copy=False)
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
