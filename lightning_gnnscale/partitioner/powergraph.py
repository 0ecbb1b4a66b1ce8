"""PowerGraph's greedy vertex-cut: four cases on the parts that hold the ends of an edge."""

import numpy as np

from ..jit import kernel
from ..triton_kernels.intrinsics import prefetch
from .graph_input import GraphInput, graph_partitioner
from .hdrf import (
    NUM_LEAST,
    ROWS_AHEAD,
    SHARED,
    SMALLEST,
    ReplicaState,
    find_least,
    first_part,
    hold,
    least_loaded,
    leave,
)
from .vertex_cut import EdgePass, place_edges


@graph_partitioner("powergraph")
def powergraph(graph: GraphInput, num_parts: int, *, masters: str = "majority") -> np.ndarray:
    """Place each edge (u, v) by the greedy rules, and give each node a master among its parts.

    With A(v) the parts that hold an edge of v, the edge goes to the least loaded part

    1. of A(u) and A(v) in common, where there is one;
    2. else, where neither is empty, of the end with more edges still to be placed, of either where these are equal;
    3. of the one that is not empty;
    4. of all, where both are empty.

    Args:
        graph: the graph, without `balance`: the rules balance edges. Its seed decides masters="random"
            alone.
        num_parts: in [1, num_nodes].
        masters: "majority": the part with most of a node's edges, the lowest of several; "last": the part of its
            last edge; "random": one of its parts, by a hash of (seed, node).

    Returns:
        (num_nodes,) int32 part ids. Nodes without an edge go to the parts with the fewest nodes.

    Raises:
        ValueError: an option outside its range, or a layout that the edges contradict.
        EdgeStreamError: the edges changed between the passes.

    Cost: two passes; time grows with the parts that hold an edge's ends, not with num_parts. Memory a node:
        4 + 4 * ceil(num_parts / 32) bytes, and the masters': 4 bytes; for "majority" num_parts bytes with up to 16
        parts, 4 + min(degree, num_parts) with more.
    Source: Gonzalez et al., PowerGraph, OSDI 2012, section 4.2, run in order on one machine ("coordinated"). Differs:
        of several least loaded parts the lowest is taken.
    """

    def start(degree) -> ReplicaState:
        state = ReplicaState.empty(degree, num_parts)
        state.rows[:, 0] = degree
        return state

    def place(src, dst, state: ReplicaState, part) -> int:
        _place_by_cases(src, dst, *state, part)
        return len(src)

    return place_edges(graph, num_parts, masters, ReplicaState, start, [EdgePass("placing", place)])


@kernel
def _place_by_cases(src, dst, rows, load, least, limits, part):
    """Place a block of edges by PowerGraph's four cases; writes `part`, changes the state."""
    flat, width, length = rows.reshape(-1), rows.shape[1], len(src)
    smallest, num_least = limits[SMALLEST], limits[NUM_LEAST]
    for i in range(length):
        if i + ROWS_AHEAD < length:
            prefetch(flat, width * np.int64(src[i + ROWS_AHEAD]))
            prefetch(flat, width * np.int64(dst[i + ROWS_AHEAD]))
        u, v = src[i], dst[i]
        chosen = _by_cases(rows, u, v, load, least)
        part[i] = chosen
        rows[u, 0] -= 1
        rows[v, 0] -= 1
        hold(rows, u, v, chosen)
        load[chosen] += 1
        num_least -= leave(least, chosen, 1)
        if num_least == 0:
            smallest += 1
            num_least = find_least(load, smallest, least)
    limits[SMALLEST], limits[NUM_LEAST] = smallest, num_least


@kernel(inline="always")
def _by_cases(rows, u, v, load, least):
    """Return the part that the greedy rules choose, the lowest of several."""
    both = least_loaded(rows, u, v, SHARED, load, least)
    if both >= 0:
        return both
    of_u, of_v = least_loaded(rows, u, u, SHARED, load, least), least_loaded(rows, v, v, SHARED, load, least)
    if of_u < 0 and of_v < 0:
        return first_part(least)
    if of_v < 0 or (of_u >= 0 and rows[u, 0] > rows[v, 0]):
        return of_u
    if of_u < 0 or rows[v, 0] > rows[u, 0]:
        return of_v
    u_first = load[of_u] < load[of_v] or (load[of_u] == load[of_v] and of_u < of_v)
    return of_u if u_first else of_v
