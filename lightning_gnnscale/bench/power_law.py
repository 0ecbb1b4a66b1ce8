"""The generated graph of the speed benchmarks."""

import numpy as np

from ..graph import CSC, build_csc


def power_law_graph(num_nodes: int, num_edges: int, seed: int) -> CSC:
    """Return arcs with both ends drawn independently, in proportion to Pareto(1.8) + 1 weights."""
    rng = np.random.default_rng(seed)
    upper = np.cumsum(rng.pareto(1.8, num_nodes) + 1)
    upper /= upper[-1]
    src, dst = (np.searchsorted(upper, rng.random(num_edges)).astype(np.int32) for _ in range(2))
    return build_csc(src, dst, num_nodes)
