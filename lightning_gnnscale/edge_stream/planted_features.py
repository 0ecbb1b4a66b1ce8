"""Feature rows of a generated graph: the centre of a node's community plus Gaussian noise, both from hashes."""

import math
from collections.abc import Iterator

import numpy as np

from ..jit import kernel
from ..rng import combine


def feature_ranges(
    community: np.ndarray, num_communities: int, dim: int, noise: float, keys: tuple, num_rows: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first node, float32 rows) of consecutive nodes.

    Args:
        community: (num_nodes,) int32 in [0, num_communities).
        dim: columns.
        noise: standard deviation of the noise in every column; centres have an expected length of 1.
        keys: uint64 keys of the centres and of the noise.
        num_rows: nodes at a time, >= 1.
    """
    centres = np.empty((num_communities, dim), np.float32)
    _gaussian_rows(keys[0], 0, 1.0 / math.sqrt(dim), centres)
    for first in range(0, len(community), num_rows):
        last = min(first + num_rows, len(community))
        rows = np.empty((last - first, dim), np.float32)
        _gaussian_rows(keys[1], first, noise, rows)
        _add_centres(centres, community[first:last], rows)
        yield first, rows


@kernel
def _gaussian_rows(key, first_row, scale, out):
    """Fill float32 rows with N(0, scale**2), two values a hash (Box and Muller, 1958)."""
    low_32, half, width = np.uint64(0xFFFFFFFF), 0.5, 1.0 / 4294967296.0
    num_rows, dim = out.shape
    for i in range(num_rows):
        row = combine(key, first_row + i)
        for j in range(0, dim, 2):
            random = combine(row, j)
            radius = scale * np.sqrt(-2.0 * np.log((np.float64(random >> np.uint64(32)) + half) * width))
            angle = 2.0 * np.pi * np.float64(random & low_32) * width
            out[i, j] = radius * np.cos(angle)
            if j + 1 < dim:
                out[i, j + 1] = radius * np.sin(angle)


@kernel
def _add_centres(centres, community, rows):
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            rows[i, j] += centres[community[i], j]
