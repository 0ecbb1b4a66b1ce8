"""Contraction: clusters become nodes, edges between them are added up."""

import numpy as np

from ...jit import kernel
from .weighted_graph import WeightedGraph


def contract(graph: WeightedGraph, label: np.ndarray) -> tuple[WeightedGraph, np.ndarray]:
    """Return the graph of clusters.

    Args:
        graph: the graph.
        label: (num_nodes,) int32, equal for nodes of a cluster, in [0, num_nodes).

    Returns:
        The coarse graph, its nodes in the order of their clusters' lowest node; and (num_nodes,) int32, the coarse node
        of every node.

    Cost: O(num_nodes + num_entries) time; a row's neighbours come in the order in which members list them.
    """
    coarse_of, num_coarse = number_clusters(label)
    members, starts = _sort_by_cluster(coarse_of, num_coarse)
    node_weight = np.zeros((num_coarse, graph.node_weight.shape[1]), np.int32)
    _add_node_weights(coarse_of, graph.node_weight, node_weight)
    indptr = np.zeros(num_coarse + 1, np.int64)
    indices = np.empty(len(graph.indices), np.int32)
    edge_weight = np.empty(len(graph.indices), graph.edge_weight.dtype)
    total = _add_edges(
        graph.indptr, graph.indices, graph.edge_weight, coarse_of, members, starts, indptr, indices, edge_weight
    )
    return WeightedGraph(indptr, indices[:total].copy(), edge_weight[:total].copy(), node_weight), coarse_of


@kernel
def number_clusters(label):
    number = np.full(len(label), -1, np.int32)
    coarse_of = np.empty(len(label), np.int32)
    num_coarse = 0
    for v in range(len(label)):
        c = label[v]
        if number[c] < 0:
            number[c] = num_coarse
            num_coarse += 1
        coarse_of[v] = number[c]
    return coarse_of, num_coarse


@kernel
def _sort_by_cluster(coarse_of, num_coarse):
    starts = np.zeros(num_coarse + 1, np.int64)
    for v in range(len(coarse_of)):
        starts[coarse_of[v] + 1] += 1
    for c in range(num_coarse):
        starts[c + 1] += starts[c]
    cursor = starts[:-1].copy()
    members = np.empty(len(coarse_of), np.int32)
    for v in range(len(coarse_of)):
        members[cursor[coarse_of[v]]] = v
        cursor[coarse_of[v]] += 1
    return members, starts


@kernel
def _add_node_weights(coarse_of, node_weight, coarse_weight):
    every = np.int64(-1) if len(node_weight) == len(coarse_of) else np.int64(0)
    for v in range(len(coarse_of)):
        for d in range(node_weight.shape[1]):
            coarse_weight[coarse_of[v], d] += node_weight[v & every, d]


@kernel
def _add_edges(indptr, indices, edge_weight, coarse_of, members, starts, out_indptr, out_indices, out_weight):
    """Fill the coarse rows one after the other; `place` says where a neighbour stands in the row that is filled."""
    each = np.int64(-1) if len(edge_weight) == len(indices) else np.int64(0)
    num_coarse = len(starts) - 1
    place = np.full(num_coarse, -1, np.int64)
    total = np.int64(0)
    for c in range(num_coarse):
        row_start = total
        for m in range(starts[c], starts[c + 1]):
            v = members[m]
            for e in range(indptr[v], indptr[v + 1]):
                other = coarse_of[indices[e]]
                if other == c:
                    continue
                if place[other] < row_start:
                    place[other] = total
                    out_indices[total], out_weight[total] = other, 0
                    total += 1
                out_weight[place[other]] += edge_weight[e & each]
        out_indptr[c + 1] = total
    return total
