"""Which gradient rows are sent: those that are not zero, small ones drawn by their norm."""

import numpy as np
import torch
from torch import Tensor

from ...rng import combine_array


def draw_rows(rows: Tensor, threshold: float, key: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Choose rows with probability min(1, norm / (threshold x mean norm)), scaled so that their mean is what they were.

    Where norms are alike nearly all rows are sent; where a few rows carry most of the gradient, few are.

    Args:
        rows: (num_rows, width).
        threshold: in mean norms of the rows that are not zero, >= 0; 0 takes every row that is not zero.
        key: uint64. ids: (num_rows,) int64; with the norms a row's chance hangs on (key, id) alone.

    Returns:
        (num_rows,) bool, and the (num_chosen, width) chosen rows, each divided by its probability.

    Source: importance sampling; for a given expected number of rows, probabilities ~ norm have the least variance.
    """
    if threshold == 0:
        # by value, not by norm: the square of a small number is 0, and NaN is not above it
        chosen = (rows != 0).any(dim=1)
        return chosen, rows[chosen]
    probability = inclusion_probability(rows.norm(dim=1).double(), threshold)
    chosen = uniform(key, ids) < probability
    return chosen, rows[chosen] / probability[chosen].to(rows.dtype).unsqueeze(1)


def inclusion_probability(size: Tensor, threshold: float) -> Tensor:
    """Return (num,) float64 probabilities min(1, size / (threshold x mean size)); the mean is over sizes above 0.

    Args:
        size: (num,) float64, >= 0; one that is not finite is taken for certain: whoever receives it must learn of it.
        threshold: > 0.
    """
    finite = size.isfinite()
    counted = size[finite & (size > 0)]
    floor = threshold * counted.sum() / max(1, len(counted))
    chances = (size / floor.clamp(min=torch.finfo(size.dtype).tiny)).clamp(max=1)
    return torch.where(finite, chances, torch.ones_like(chances))


def uniform(key: int, ids: Tensor) -> Tensor:
    """Return (num,) float64 in [0, 1), each a hash of (key, id), on the device of ids."""
    bits = combine_array(np.uint64(key), ids.cpu().numpy()) >> np.uint64(11)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-53).to(ids.device)
