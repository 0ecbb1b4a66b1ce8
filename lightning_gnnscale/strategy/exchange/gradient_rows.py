"""Which gradient rows are sent: those that are not zero, drawn by their norm where not all may go."""

import numpy as np
import torch
from torch import Tensor

from ...rng import combine_array


def draw_rows(rows: Tensor, keep: float, key: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Choose rows with probability min(1, c x norm), and scale them so that their mean is what they were.

    Args:
        rows: (num_rows, width).
        keep: expected share of the rows that are not zero, in (0, 1]; 1 takes all of them.
        key: uint64. ids: (num_rows,) int64; a row's chance hangs on (key, id) alone.

    Returns:
        (num_rows,) bool, and the (num_chosen, width) chosen rows, each divided by its probability.

    Cost: a sort of the norms.
    Source: importance sampling; for a given expected number of rows, probabilities ~ norm have the least variance.
    """
    if keep == 1:
        # by value, not by norm: the square of a small number is 0, and NaN is not above it
        chosen = (rows != 0).any(dim=1)
        return chosen, rows[chosen]
    norms = rows.norm(dim=1)
    probability = inclusion_probability(norms.double(), keep * int((norms > 0).sum()))
    chosen = uniform(key, ids) < probability
    return chosen, rows[chosen] / probability[chosen].to(rows.dtype).unsqueeze(1)


def inclusion_probability(size: Tensor, expected: float) -> Tensor:
    """Return (num,) float64 probabilities min(1, c x size) that add up to `expected`.

    Args:
        size: (num,) float64, >= 0.
        expected: at most the number of sizes above 0.
    """
    ordered, order = size.sort(descending=True)
    rest = ordered.flip(0).cumsum(0).flip(0)  # sum of this and all smaller sizes
    taken = torch.arange(len(size), dtype=size.dtype, device=size.device)  # how many larger ones are certain
    share = (expected - taken).clamp(min=0) / rest.clamp(min=torch.finfo(size.dtype).tiny)
    # The first place where what is left fits below 1: everything before it is certain.
    fits = share * ordered <= 1
    first = int(fits.int().argmax()) if len(size) and bool(fits.any()) else 0
    scaled = ordered * share[first] if len(size) else ordered
    scaled[:first] = 1
    out = torch.empty_like(size)
    out[order] = scaled.clamp(max=1)
    return out


def uniform(key: int, ids: Tensor) -> Tensor:
    """Return (num,) float64 in [0, 1), each a hash of (key, id), on the device of ids."""
    bits = combine_array(np.uint64(key), ids.cpu().numpy()) >> np.uint64(11)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-53).to(ids.device)
