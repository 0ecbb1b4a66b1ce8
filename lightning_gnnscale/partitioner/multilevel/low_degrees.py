"""Trees and chains: where nodes have few neighbours, clusters follow the edges, and no vote among neighbours is needed.

Label propagation makes a long path into short pieces, whose graph is a path again: level after level of it, each with
ends in the wrong place. Leaves that join their only neighbour, one after the other, make pieces as heavy as allowed.
"""

import numpy as np

from ...jit import kernel
from .weighted_graph import PART_DTYPE, WeightedGraph, add_weights

MAX_MEAN_DEGREE = 3.0  # where nodes have more neighbours, leaves are few, and label propagation gives them to clusters
MAX_LEFT = 0.5  # of the nodes, for trees and chains to be worth a level of their own


def join_low_degrees(graph: WeightedGraph, limit: np.ndarray, group: np.ndarray | None) -> np.ndarray | None:
    """Cluster a graph that is mostly trees and chains.

    Leaves join their neighbour as long as it has space, again and again, so that trees become connected pieces; of the
    rest, nodes with two neighbours join along their chains.

    Args:
        graph: the graph.
        limit: (D,) int64, weight up to which a cluster grows.
        group: (num_nodes,) int16; nodes of different groups never share a cluster. None: one group.

    Returns:
        (num_nodes,) int32 labels, each the id of a node; None where the graph is not of this kind.

    Cost: O(num_nodes + num_entries) time; 25 + 8 D bytes a node.
    """
    if len(graph.indices) > MAX_MEAN_DEGREE * graph.num_nodes:
        return None
    weight = np.zeros((graph.num_nodes, graph.node_weight.shape[1]), np.int64)
    label = np.arange(graph.num_nodes, dtype=np.int32)
    add_weights(label, graph.node_weight, weight)
    group = np.zeros(1, PART_DTYPE) if group is None else group
    _join(graph.indptr, graph.indices, limit, group, weight, label)
    num_left = np.count_nonzero(label == np.arange(graph.num_nodes))
    return label if num_left <= MAX_LEFT * graph.num_nodes else None


@kernel
def _join(indptr, indices, limit, group, weight, label):
    """Write the cluster of every node; `weight` is used up."""
    num_nodes = len(label)
    by_group = np.int64(-1) if len(group) == num_nodes else np.int64(0)
    left = np.zeros(num_nodes, np.int64)  # neighbours that have not been taken off; -1: the node itself has been
    order, num_ordered = np.empty(num_nodes, np.int32), 0
    for v in range(num_nodes):
        for e in range(indptr[v], indptr[v + 1]):
            left[v] += group[indices[e] & by_group] == group[v & by_group]
        if left[v] == 1:
            order[num_ordered] = v
            num_ordered += 1
    taken = 0
    while taken < num_ordered:  # leaves, and what becomes one
        v = order[taken]
        taken += 1
        if left[v] == 0:  # the last of its tree
            continue
        left[v] = -1
        for e in range(indptr[v], indptr[v + 1]):
            u = indices[e]
            if left[u] >= 0 and group[u & by_group] == group[v & by_group]:
                left[u] -= 1
                if left[u] == 1:
                    order[num_ordered] = u
                    num_ordered += 1
                if _joins(v, u, weight, limit):
                    label[v] = u
    for v in range(num_nodes):
        if left[v] == 2 and label[v] == v:
            _join_chain(v, indptr, indices, limit, group, by_group, left, weight, label)
    for i in range(taken - 1, -1, -1):  # a leaf belongs to what its neighbour belongs to
        label[order[i]] = label[label[order[i]]]


@kernel
def _join_chain(v, indptr, indices, limit, group, by_group, left, weight, label):
    """Cut the chain of nodes with two neighbours that a node is in into pieces; `left` tells -2 of its nodes then."""
    first, before = v, np.int64(-1)
    while True:  # back to where the chain begins, or once around
        back = _next_of(first, before, indptr, indices, group, by_group, left)
        if back < 0 or back == v:
            break
        first, before = back, first
    root = first
    while first >= 0:
        left[first] = -2
        if first != root and _joins(first, root, weight, limit):
            label[first] = root
        else:
            root = first
        first = _next_of(first, np.int64(-1), indptr, indices, group, by_group, left)


@kernel
def _next_of(v, before, indptr, indices, group, by_group, left):
    """Return a neighbour with two neighbours, but not the one before; -1 where there is none."""
    for e in range(indptr[v], indptr[v + 1]):
        u = np.int64(indices[e])
        if left[u] == 2 and u != before and group[u & by_group] == group[v & by_group]:
            return u
    return np.int64(-1)


@kernel(inline="always")
def _joins(v, u, weight, limit):
    """Add the weight of a node to that of another, where both together are within the limit; return whether."""
    for d in range(len(limit)):
        if weight[u, d] + weight[v, d] > limit[d]:
            return False
    for d in range(len(limit)):
        weight[u, d] += weight[v, d]
    return True


def parts_along(graph: WeightedGraph, share: np.ndarray) -> np.ndarray | None:
    """Give parts consecutive nodes of a walk from leaf to leaf: the best there is for a path, and good for a tree.

    Args:
        graph: the graph.
        share: (num_parts,) float64, what each part should hold of all weight; sums to 1.

    Returns:
        (num_nodes,) int16 part ids; None where nodes have many neighbours.
    """
    if len(graph.indices) > MAX_MEAN_DEGREE * graph.num_nodes:
        return None
    by_degree = np.argsort(np.diff(graph.indptr), kind="stable")
    order = _depth_first(graph.indptr, graph.indices, by_degree)
    weight = np.broadcast_to(graph.node_weight, (graph.num_nodes, graph.node_weight.shape[1]))[order]
    reached = np.cumsum(weight, axis=0, dtype=np.float64) - weight / 2
    passed = (reached / np.maximum(1, weight.sum(axis=0))).mean(axis=1)
    part = np.empty(graph.num_nodes, PART_DTYPE)
    part[order] = np.searchsorted(np.cumsum(share)[:-1], passed)
    return part


@kernel
def _depth_first(indptr, indices, starts):
    """Return all nodes in the order of a depth-first walk of each component, begun at the first of its `starts`."""
    num_nodes = len(indptr) - 1
    order, stack = np.empty(num_nodes, np.int32), np.empty(len(indices) + num_nodes, np.int32)
    seen, reached = np.zeros(num_nodes, np.bool_), 0
    for start in starts:
        stack[0], waiting = start, 1
        while waiting > 0:
            waiting -= 1
            v = stack[waiting]
            if seen[v]:
                continue
            seen[v] = True
            order[reached] = v
            reached += 1
            for e in range(indptr[v], indptr[v + 1]):
                if not seen[indices[e]]:
                    stack[waiting] = indices[e]
                    waiting += 1
    return order
