"""HDRF: every edge to the part that holds its ends and is little filled, hubs being the ones to be cut."""

import os

import numpy as np

from .graph_access.scratch import AUTO
from .registry import check_number, refuse_balance, register_partitioner
from .replica_placing import ReplicaState, place_by_score
from .vertex_cut import EdgePass, VertexCut, place_edges


@register_partitioner("hdrf")
def hdrf(
    stream,
    num_parts: int,
    *,
    seed: int = 0,
    masks=None,
    balance=None,
    progress=None,
    balance_weight: float = 1.0,
    epsilon: float = 1.0,
    masters: str = "majority",
    deduplicate: bool | None = None,
    scratch: str | os.PathLike | None = AUTO,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int = 8,
) -> np.ndarray:
    """Place each edge (u, v) in the part with the largest score, and give each node a master among its parts.

    With A(v) the parts that hold an edge of v, and degrees counted as the edges come, this one included:

        score(part) = g(u, part) + g(v, part) + balance_weight * (largest - load(part)) / (epsilon + largest - smallest)
        g(u, part) = 1 + (1 - theta_u) if part in A(u) else 0
        theta_u = degree(u) / (degree(u) + degree(v)) = 1 - theta_v

    Args:
        stream: an EdgeStream.
        num_parts: in [1, num_nodes].
        seed: decides masters="random" alone.
        masks: not used.
        balance: must be None: it is edges that HDRF balances.
        progress: called as progress(what, done, total) once a chunk.
        balance_weight: lambda, dimensionless, >= 0; up to 1 it only breaks ties between parts that hold as much.
        epsilon: in the balance term, in edges, > 0.
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
    Source: Petroni et al., HDRF, CIKM 2015. Differs: ties go to the lowest part; between parts that are held by the
        same ends it is the loads that are compared, which is the score without its rounding.
    """
    refuse_balance("hdrf", balance)
    check_number("partitioner.balance_weight", balance_weight, at_least=0)
    check_number("partitioner.epsilon", epsilon, at_least=1e-9)

    def place(src, dst, state: ReplicaState, part) -> int:
        place_by_score(src, dst, *state, float(balance_weight), float(epsilon), part)
        return len(src)

    cut = VertexCut(
        "hdrf",
        {"balance_weight": balance_weight, "epsilon": epsilon},
        ReplicaState,
        start=lambda graph, degree: ReplicaState.empty(degree, num_parts),
        passes=(EdgePass("placing", place),),
    )
    return place_edges(
        cut, stream, num_parts, seed, masters, deduplicate, scratch, checkpoint, checkpoint_every, progress
    )
