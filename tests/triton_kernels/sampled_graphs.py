"""Graphs that the sampling kernels are tested on."""

import numpy as np

from lightning_gnnscale.graph import CSC, build_csc


def random_csc(num_nodes, num_edges, seed=0, hub=False, dtype=np.int32) -> CSC:
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(0, num_nodes, num_edges), rng.integers(0, num_nodes, num_edges)
    if hub:
        src = np.concatenate([src, rng.integers(0, num_nodes, 300)])
        dst = np.concatenate([dst, np.zeros(300, np.int64)])
    csc = build_csc(src, dst, num_nodes)
    return CSC(csc.indptr, csc.indices.astype(dtype))


def star(degree: int) -> CSC:
    """Node 0 has the in-neighbours 1 .. degree."""
    indptr = np.concatenate([[0], np.full(degree + 1, degree)])
    return CSC(indptr.astype(np.int64), np.arange(1, degree + 1, dtype=np.int32))
