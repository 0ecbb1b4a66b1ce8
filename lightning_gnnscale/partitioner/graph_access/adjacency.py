"""The whole undirected simple graph as rows of neighbours in memory, for the partitioners that need it all at once."""

import numpy as np

from ...graph import CSC
from ...jit import kernel
from .simple_graph import SimpleGraph


def symmetric_adjacency(graph: SimpleGraph, degree: np.ndarray, dtype: np.dtype, progress=None) -> CSC:
    """Return both directions of every edge of a simple graph.

    Args:
        graph: what `open_simple_graph` returned.
        degree: (num_nodes,) integers, what it returned beside the graph.
        dtype: int32 or int64, of the neighbours' ids.
        progress: called as progress("adjacency", edges done, edges in all) once a chunk.

    Returns:
        CSC whose rows are in the order of the stream.

    Cost: one pass; two ids an edge, and 8 bytes a node beside the result.
    """
    indptr = np.zeros(graph.num_nodes + 1, np.int64)
    np.cumsum(degree, out=indptr[1:])
    indices = np.empty(indptr[-1], dtype)
    cursor = indptr[:-1].copy()
    for src, dst in graph.one_pass("adjacency", progress):
        _place(src, dst, cursor, indices)
    return CSC(indptr, indices)


@kernel
def _place(src, dst, cursor, indices):
    for i in range(len(src)):
        u, v = src[i], dst[i]
        indices[cursor[u]] = v
        indices[cursor[v]] = u
        cursor[u] += 1
        cursor[v] += 1
