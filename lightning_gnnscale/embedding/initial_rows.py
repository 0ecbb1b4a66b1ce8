"""Initial values as a function of (seed, node, column): the same for any sharding and any number of processes."""

import numpy as np

from ..jit import kernel
from ..rng import GOLDEN, combine, mix64

HALF, LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
STEP = 2.0**-31  # of 32 random bits to [0, 2)


@kernel
def fill_initial(out, nodes, key, scale):
    """Fill rows with values uniform in [-scale, scale).

    Args:
        out: (num, dim) floating, filled in place.
        nodes: (num,) integers that the values go by.
        key: uint64, of the seed.
    """
    for i in range(len(nodes)):
        node_key = combine(key, nodes[i])
        for pair in range((out.shape[1] + 1) // 2):
            random = mix64(node_key + np.uint64(pair) * GOLDEN)  # SplitMix64 itself: its state moves by GOLDEN
            out[i, 2 * pair] = (np.float64(random >> HALF) * STEP - 1.0) * scale
            if 2 * pair + 1 < out.shape[1]:
                out[i, 2 * pair + 1] = (np.float64(random & LOW) * STEP - 1.0) * scale


def default_scale(dim: int) -> float:
    """Return the scale at which a row's expected squared length is 1."""
    return float(np.sqrt(3.0 / max(1, dim)))
