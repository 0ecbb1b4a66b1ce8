"""PowerGraph's greedy vertex-cut: four cases on the parts that hold the ends of an edge."""

import os

import numpy as np

from .graph_access.scratch import AUTO
from .registry import refuse_balance, register_partitioner
from .replica_placing import ReplicaState, place_by_cases
from .vertex_cut import EdgePass, VertexCut, place_edges


@register_partitioner("powergraph")
def powergraph(
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
    """Place each edge (u, v) by the greedy rules, and give each node a master among its parts.

    With A(v) the parts that hold an edge of v, the edge goes to the least loaded part

    1. of A(u) and A(v) in common, where there is one;
    2. else, where neither is empty, of the end with more edges still to be placed, of either where they are as many;
    3. of the one that is not empty;
    4. of all, where both are empty.

    Args:
        stream: an EdgeStream.
        num_parts: in [1, num_nodes].
        seed: decides masters="random" alone.
        masks: not used.
        balance: must be None: it is edges that the rules balance.
        progress: called as progress(what, done, total) once a chunk.
        masters: "majority": the part with most of a node's edges, the lowest of several; "last": the part of its
            last edge; "random": one of its parts, by a hash of (seed, node).
        deduplicate, scratch: see `open_simple_graph`.
        checkpoint, checkpoint_every: see `spring`.

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
    refuse_balance("powergraph", balance)

    def start(graph, degree) -> ReplicaState:
        state = ReplicaState.empty(degree, num_parts)
        state.rows[:, 0] = degree
        return state

    def place(src, dst, state: ReplicaState, part) -> int:
        place_by_cases(src, dst, *state, part)
        return len(src)

    cut = VertexCut("powergraph", {}, ReplicaState, start, passes=(EdgePass("placing", place),))
    return place_edges(
        cut, stream, num_parts, seed, masters, deduplicate, scratch, checkpoint, checkpoint_every, progress
    )
