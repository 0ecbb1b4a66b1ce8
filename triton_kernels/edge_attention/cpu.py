"""Edges grouped by source, as a compiled loop."""

import numpy as np

from ...jit import kernel


@kernel(error_model="numpy")
def group_by_source(indptr, indices, num_src):
    """Return the offsets, rows and edges of the edges by source, in the order of their rows."""
    offsets = np.zeros(num_src + 1, np.int64)
    for e in range(len(indices)):
        offsets[indices[e] + 1] += 1
    for s in range(num_src):
        offsets[s + 1] += offsets[s]
    cursor = offsets[:-1].copy()
    rows, edges = np.empty(len(indices), indices.dtype), np.empty(len(indices), np.int64)
    for v in range(len(indptr) - 1):
        for e in range(indptr[v], indptr[v + 1]):
            position = cursor[indices[e]]
            cursor[indices[e]] += 1
            rows[position] = v
            edges[position] = e
    return offsets, rows, edges
