"""The graph behind an edge stream as the multilevel method reads it without scratch disk: pass after pass."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ...jit import kernel
from ..graph_access.simple_graph import SimpleGraph
from .weighted_graph import ONE, WeightedGraph

_HASH = np.uint64(0x9E3779B97F4A7C15)
_ROWS, _HALF = np.uint64(6), np.uint64(32)  # 64 nodes that stand together go to one share


class EdgeGraph(NamedTuple):
    """A graph whose edges are read from its stream as often as asked; every edge weighs one.

    Attributes:
        simple: the undirected simple graph behind the stream.
        node_weight: (num_nodes, D) int32; or (1, D): every node weighs that.
        progress: called as progress(what, edges done, edges in all) once a chunk; or None.
    """

    simple: SimpleGraph
    node_weight: np.ndarray
    progress: Callable | None = None

    @property
    def num_nodes(self) -> int:
        return self.simple.num_nodes

    @property
    def num_edges(self) -> int:
        return self.simple.num_edges

    @property
    def total_edge_weight(self) -> int:
        """The weight of all edges, each counted at both ends."""
        return 2 * self.simple.num_edges

    def edges(self, what: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield all edges once, in blocks of (src, dst) that the next step overwrites."""
        return self.simple.one_pass(what, self.progress)


def rows_of(graph: EdgeGraph, degree: np.ndarray) -> WeightedGraph:
    """Return the whole graph in memory, its rows in the order of the stream.

    Args:
        graph: the graph.
        degree: (num_nodes,), entries a row.

    Raises:
        EdgeStreamError: the edges are not those of the first pass.

    Cost: one pass; 16 bytes a node and two ids an edge.
    """
    indptr = np.zeros(graph.num_nodes + 1, np.int64)
    np.cumsum(degree, out=indptr[1:])
    cursor, indices = indptr[:-1].copy(), np.empty(indptr[-1], degree.dtype)
    for src, dst in graph.edges("rows"):
        _fill_rows(src, dst, indptr, cursor, indices)
    return WeightedGraph(indptr, indices, ONE, graph.node_weight)


@kernel(inline="always")
def share_of(node, num_shares):
    """Return which of the shares a node belongs to that threads divide nodes into."""
    return np.int64((((np.uint64(node) >> _ROWS) * _HASH >> _HALF) * np.uint64(num_shares)) >> _HALF)


@kernel
def _fill_rows(src, dst, indptr, cursor, indices):
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if cursor[u] == indptr[u + 1] or cursor[v] == indptr[v + 1]:
            continue  # other edges than in the first pass: the check at its end tells
        indices[cursor[u]], indices[cursor[v]] = v, u
        cursor[u] += 1
        cursor[v] += 1
