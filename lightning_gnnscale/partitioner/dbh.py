"""Degree-based hashing: every edge goes to the part of its end with fewer edges, so that hubs are cut."""

from typing import NamedTuple

import numpy as np

from ..jit import kernel
from ..rng import below, combine, fold
from ..triton_kernels.intrinsics import prefetch
from .graph_input import GraphInput, graph_partitioner
from .vertex_cut import EdgePass, place_edges

_SALT = 0x444248  # separates this use of the seed from all others
_DEGREES_AHEAD = 24  # edges


class _DBHState(NamedTuple):
    """The (num_nodes,) degrees: placing changes nothing."""

    degree: np.ndarray


@graph_partitioner("dbh")
def dbh(graph: GraphInput, num_parts: int, *, masters: str = "majority") -> np.ndarray:
    """Place each edge by a hash of its end with the lower degree, and give each node a master among its parts.

    Args:
        graph: the graph, without `balance`: edges are balanced by probability. Its seed is that of the hash, and of
            masters="random".
        num_parts: in [1, num_nodes].
        masters: "majority": the part with most of a node's edges, the lowest of several; "last": the part of its
            last edge; "random": one of its parts, by a hash of (seed, node).

    Returns:
        (num_nodes,) int32 part ids. Nodes without an edge go to the parts with the fewest nodes.

    Raises:
        ValueError: an option outside its range, or a layout that the edges contradict.
        EdgeStreamError: the edges changed between the passes.

    Cost: two passes. Memory a node: one id, and the masters': 4 bytes; for "majority" num_parts bytes with up to 16
        parts, 4 + min(degree, num_parts) with more.
    Source: Xie et al., Distributed Power-law Graph Computing, NIPS 2014, with the degrees of the whole graph.
        Differs: of two ends with one degree the lower id is hashed.
    """
    key = np.uint64(fold(graph.seed, _SALT))

    def place(src, dst, state: _DBHState, part) -> int:
        _place_by_hash(src, dst, state.degree, key, num_parts, part)
        return len(src)

    return place_edges(graph, num_parts, masters, _DBHState, _DBHState, [EdgePass("placing", place)])


@kernel
def _place_by_hash(src, dst, degree, key, num_parts, part):
    length = len(src)
    for i in range(length):
        if i + _DEGREES_AHEAD < length:
            prefetch(degree, np.int64(src[i + _DEGREES_AHEAD]))
            prefetch(degree, np.int64(dst[i + _DEGREES_AHEAD]))
        u, v = src[i], dst[i]
        u_lower = degree[u] < degree[v] or (degree[u] == degree[v] and u < v)
        part[i] = below(combine(key, u if u_lower else v), num_parts)
