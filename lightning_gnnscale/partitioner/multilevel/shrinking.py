"""Contraction until a graph has few edges: what keeps the graph of clusters within its bound."""

import numpy as np

from ...rng import fold
from ..row_threads import RowThreads
from .clustering import cluster_nodes
from .contraction import contract
from .weighted_graph import WeightedGraph, total_weight

_SALT = 0x53485249  # keeps this use of the seed apart from all others
_GROWTH = 2  # of what a cluster may weigh, from one contraction to the next


def shrink(
    graph: WeightedGraph, max_edges: int, largest: np.ndarray, seed: int, threads: RowThreads
) -> tuple[WeightedGraph, np.ndarray]:
    """Contract a graph step by step until it has at most max_edges edges, or its clusters can grow no further.

    Args:
        graph: the graph.
        max_edges: edges that are few enough, >= 0.
        largest: (D,) int64, weight up to which a cluster grows, below 2**31.
        seed: decides order and ties.
        threads: their number does not change the result.

    Returns:
        The coarse graph, and (num_nodes,) int32, the coarse node of every node.
    """
    coarse_of = np.arange(graph.num_nodes, dtype=np.int32)
    mean = -(-total_weight(graph) // max(1, graph.num_nodes))
    limit = np.minimum(largest, np.maximum(2, _GROWTH * mean))
    step = 0
    while len(graph.indices) // 2 > max_edges:
        label = cluster_nodes(graph, limit, fold(seed, _SALT, step), threads, passes=1)
        coarse, number = contract(graph, label)
        if coarse.num_nodes == graph.num_nodes and (limit >= largest).all():
            break
        graph, coarse_of = coarse, number[coarse_of]
        limit, step = np.minimum(largest, _GROWTH * limit), step + 1
    return graph, coarse_of
