"""Degree-based hashing: every edge to the part of its end with fewer edges, so that hubs are the ones to be cut."""

import os
from typing import NamedTuple

import numpy as np

from ..jit import kernel
from ..rng import below, combine, fold
from ..triton_kernels.intrinsics import prefetch
from .graph_access.scratch import AUTO
from .registry import refuse_balance, register_partitioner
from .vertex_cut import EdgePass, VertexCut, place_edges

_SALT = 0x444248  # keeps this use of the seed apart from all others
_DEGREES_AHEAD = 24  # edges


class _DBHState(NamedTuple):
    """The (num_nodes,) degrees: placing changes nothing."""

    degree: np.ndarray


@register_partitioner("dbh")
def dbh(
    stream,
    num_parts: int,
    *,
    seed: int = 0,
    masks=None,
    balance=None,
    progress=None,
    masters: str = "majority",
    deduplicate: bool | None = None,
    scratch: str | os.PathLike | None = AUTO,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int = 8,
) -> np.ndarray:
    """Place each edge by a hash of its end with the lower degree, and give each node a master among its parts.

    Args:
        stream: An EdgeStream.
        num_parts: In [1, num_nodes].
        seed: Seed of the hash, and of masters="random".
        masks: Not used.
        balance: Must be None: edges are balanced by chance.
        progress: Called as progress(what, done, total) once a chunk.
        masters: "majority": the part with most of a node's edges, the lowest one on a tie; "last": the part of its last
            edge; "random": one of its parts, by a hash of (seed, node).
        deduplicate, scratch: See `open_simple_graph`.
        checkpoint, checkpoint_every: See `spring`.

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
    refuse_balance("dbh", balance)
    key = np.uint64(fold(seed, _SALT))

    def place(src, dst, state: _DBHState, part) -> int:
        _place_by_hash(src, dst, state.degree, key, num_parts, part)
        return len(src)

    cut = VertexCut("dbh", {}, _DBHState, lambda graph, degree: _DBHState(degree), (EdgePass("placing", place),))
    return place_edges(
        cut, stream, num_parts, seed, masters, deduplicate, scratch, checkpoint, checkpoint_every, progress
    )


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
