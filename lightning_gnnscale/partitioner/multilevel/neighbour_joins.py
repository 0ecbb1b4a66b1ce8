"""Clusters of a graph whose nodes have few neighbours, such as a mesh: one look at each node, in the order of ids.

A vote among four neighbours is mostly a tie, and rounds of votes make clusters of any shape. Here a node that is still
alone joins the cluster that it shares most edge weight with, once; clusters stay small, and the next level goes on.
"""

import numpy as np

from ...jit import kernel
from ...rng import fold, mix64
from ...triton_kernels.intrinsics import prefetch
from .clustering import join_two_hops
from .weighted_graph import PART_DTYPE, WeightedGraph, add_weights, total_weight

FEW_NEIGHBOURS = 8  # of a node, on average
GROWTH = 12  # times the mean node: what a cluster of one level may weigh
LOOKED_AT = 32  # neighbours of a node at most
MANY_ALONE = 0.25  # of the nodes: so many are worth another look, for others that like the same cluster

_SALT = 0x4E424A4E  # separates this use of the seed from all others
_AHEAD = np.uint64(24)
_ONE = np.uint64(1)


def join_neighbours(graph: WeightedGraph, limit: np.ndarray, seed: int) -> np.ndarray | None:
    """Cluster a graph whose nodes have few neighbours.

    Args:
        graph: the graph.
        limit: (D,) int64, weight up to which a cluster grows.
        seed: decides ties.

    Returns:
        (num_nodes,) int32 labels, each the id of a node; None where nodes have more than FEW_NEIGHBOURS on average.

    Cost: one pass, O(num_nodes + num_entries) time, by one thread; 8 + 4 D bytes a node.
    """
    if len(graph.indices) > FEW_NEIGHBOURS * graph.num_nodes:
        return None
    label = np.arange(graph.num_nodes, dtype=np.int32)
    weight = np.zeros((graph.num_nodes, graph.node_weight.shape[1]), np.int32)
    add_weights(label, graph.node_weight, weight)
    mean = -(-total_weight(graph) // max(1, graph.num_nodes))
    limit = np.minimum(np.minimum(limit, GROWTH * mean), np.iinfo(np.int32).max)
    favourite = label.copy()
    alone = _join(*graph, limit, np.uint64(fold(seed, _SALT)), label, weight.reshape(-1), favourite)
    if alone > MANY_ALONE * graph.num_nodes:
        join_two_hops(graph.node_weight, limit, np.zeros(1, PART_DTYPE), label, weight, favourite)
    return label


@kernel
def _join(indptr, indices, edge_weight, node_weight, limit, key, label, weight, favourite):
    """Write the cluster of each node, and of those that stay alone the one they like; return how many do."""
    each = ~np.uint64(0) if len(edge_weight) == len(indices) else np.uint64(0)
    every = ~np.uint64(0) if len(node_weight) == len(label) else np.uint64(0)
    dims, last, alone = np.uint64(node_weight.shape[1]), np.uint64(len(indices)), 0
    joined = np.zeros(len(label), np.bool_)
    near, weigh = np.empty(LOOKED_AT, label.dtype), np.empty(LOOKED_AT, np.int64)
    # Unsigned indices: numba tests every signed one for a negative.
    for v in range(np.uint64(len(label))):
        low, high = np.uint64(indptr[v]), np.uint64(indptr[v + _ONE])
        for e in range(low, high):
            if e + _AHEAD < last:
                prefetch(label, np.int64(indices[e + _AHEAD]))
                prefetch(weight, np.int64(indices[e + _AHEAD]) * np.int64(dims))
        if joined[v]:
            continue
        size, node_key = min(high - low, np.uint64(LOOKED_AT)), mix64(key ^ v) | _ONE
        for k in range(size):
            near[k], weigh[k] = label[np.uint64(indices[low + k])], edge_weight[(low + k) & each]
        best, most, best_tie = v, np.int64(0), np.uint64(0)
        for k in range(size):
            c, conn = np.uint64(near[k]), np.int64(0)
            for j in range(size):
                conn += weigh[j] * np.int64(near[j] == near[k])
            fits, tie = True, c * node_key
            for d in range(dims):
                fits = fits & (np.int64(weight[c * dims + d]) + node_weight[v & every, d] <= limit[d])
            better = fits & ((conn > most) | ((conn == most) & (tie > best_tie)))  # a branch would be mispredicted
            best, most, best_tie = c if better else best, conn if better else most, tie if better else best_tie
        if best == v:
            favourite[v] = _liked(v, near[:size], weigh)
            alone += 1
            continue
        label[v] = best
        joined[v] = joined[best] = True
        for d in range(dims):
            weight[best * dims + d] += node_weight[v & every, d]
            weight[v * dims + d] = 0
    return alone


@kernel
def _liked(v, near, weigh):
    """Return the cluster that a node shares most edge weight with, with space or not; itself without neighbours."""
    liked, most = np.int64(v), np.int64(0)
    for k in range(len(near)):
        conn = np.int64(0)
        for j in range(len(near)):
            conn += weigh[j] * np.int64(near[j] == near[k])
        if conn > most:
            liked, most = np.int64(near[k]), conn
    return liked
