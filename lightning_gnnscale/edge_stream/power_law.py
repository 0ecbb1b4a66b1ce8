"""Power laws of the generated graphs: how heavy a node may be, how large communities are, who lives in which."""

import numpy as np

from ..jit import kernel
from ..rng import below, combine


def largest_weight(exponent: float, ratio: float) -> float:
    """Return the cap c of Pareto weights at which c / E[min(w, c)] is a given ratio.

    Args:
        exponent: P(w > x) = x ** (1 - exponent) for x >= 1; > 2.
        ratio: the largest expected degree over the mean one, >= 1.
    """
    low, high = 1.0, 1e15
    for _ in range(200):
        middle = np.sqrt(low * high)
        slope = exponent - 2.0
        mean_weight = 1.0 + (1.0 - middle**-slope) / slope
        low, high = (middle, high) if middle / mean_weight < ratio else (low, middle)
    return float(low)


def mean_size(smallest: float, largest: float, exponent: float, num_communities: int = 4096) -> float:
    """Return the mean of sizes s in [smallest, largest] whose density falls as s ** -exponent."""
    return float(_quantiles(smallest, largest, exponent, num_communities).mean())


def community_sizes(num_nodes: int, num_communities: int, exponent: float, largest: float) -> np.ndarray:
    """Return the sizes at equally spaced quantiles of a power law that ends at `largest`.

    Args:
        num_nodes: what the sizes add up to, but for rounding.
        num_communities: how many.
        exponent: density of sizes s ~ s ** -exponent, >= 1.
        largest: >= num_nodes / num_communities.

    Returns:
        (num_communities,) int64, descending, each >= 1.
    """
    low, high = 1e-9, largest
    for _ in range(200):
        middle = np.sqrt(low * high)
        total = _quantiles(middle, largest, exponent, num_communities).sum()
        low, high = (middle, high) if total < num_nodes else (low, middle)
    sizes = np.rint(_quantiles(low, largest, exponent, num_communities)).astype(np.int64)
    return np.maximum(sizes, 1)[::-1].copy()


def _quantiles(smallest: float, largest: float, exponent: float, count: int) -> np.ndarray:
    share = (np.arange(count) + 0.5) / count
    if abs(exponent - 1.0) < 1e-9:
        return smallest * (largest / smallest) ** share
    power = 1.0 - exponent
    return largest * ((smallest / largest) ** power * (1.0 - share) + share) ** (1.0 / power)


@kernel
def settle(key, neighbors_inside, sizes, out):
    """Give each node a community with more nodes than it has neighbours inside, in proportion to the sizes.

    Args:
        key: uint64 that the node's hash starts from.
        neighbors_inside: (num_nodes,) float64, expected neighbours of a node in its own community.
        sizes: (num_communities,) int64, descending; they add up to less than 2**31.
        out: (num_nodes,) int32; a node for which no community is large enough goes to the largest one.
    """
    ends = np.cumsum(sizes)
    for v in range(len(out)):
        low, high = 1, len(sizes)
        while low < high:  # the last community of the front that is large enough
            middle = (low + high + 1) // 2
            if sizes[middle - 1] > neighbors_inside[v]:
                low = middle
            else:
                high = middle - 1
        out[v] = np.searchsorted(ends[:low], below(combine(key, v), ends[low - 1]), side="right")
