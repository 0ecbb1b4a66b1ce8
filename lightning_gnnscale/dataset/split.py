"""Train, validation and test masks where a graph comes without."""

import math
from collections.abc import Sequence

import numpy as np

from ..rng import fold, permutation


def random_split(labels, fractions: Sequence[float] = (0.7, 0.15, 0.15), seed: int = 0) -> dict[str, np.ndarray]:
    """Split the labelled nodes at random.

    Args:
        labels: (num_nodes,), (num_nodes, 1) or (num_nodes, num_labels) numbers, -1 or NaN = unknown; nodes without a
            known label are left out.
        fractions: Shares of train, validation and test nodes; each in [0, 1], together at most 1.
        seed: Seed of the permutation.

    Returns:
        {"train", "val", "test"}: (num_nodes,) bool, disjoint.

    Raises:
        ValueError: fractions out of range, or labels that are no numbers.
    """
    fractions = [float(fraction) for fraction in fractions]
    if len(fractions) != 3 or min(fractions) < 0 or not sum(fractions) <= 1 + 1e-9:
        raise ValueError(f"split.fractions must be three numbers in [0, 1] that add up to at most 1, got {fractions}")
    labels = np.asarray(labels)
    if labels.dtype.kind not in "biuf":
        raise ValueError(f"labels must be numbers, got {labels.dtype}")
    known = labels >= 0
    labelled = np.flatnonzero(known if labels.ndim == 1 else known.any(axis=1))
    order = labelled[permutation(len(labelled), fold(seed))]
    bounds = [math.floor(len(order) * sum(fractions[:i]) + 0.5) for i in range(4)]
    masks = {}
    for name, start, stop in zip(("train", "val", "test"), bounds[:-1], bounds[1:], strict=True):
        masks[name] = np.zeros(len(labels), bool)
        masks[name][order[start:stop]] = True
    return masks
