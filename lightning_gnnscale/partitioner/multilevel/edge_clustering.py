"""Clusters straight from the edges in the order of their stream: every node counts the clusters of its neighbours."""

from typing import NamedTuple

import numpy as np

from ...jit import kernel
from ...triton_kernels.intrinsics import prefetch

_ROWS_AHEAD, _WEIGHTS_AHEAD = 24, 12  # edges

# Columns of EdgeClusters.nodes.
CLUSTER, SUPPORT, CANDIDATE, CANDIDATE_SUPPORT = range(4)


class EdgeClusters(NamedTuple):
    nodes: np.ndarray
    weight: np.ndarray

    @classmethod
    def start(cls, num_nodes, node_weight, ids):
        nodes = np.zeros((num_nodes, 4), ids)
        nodes[:, CLUSTER] = np.arange(num_nodes)
        nodes[:, CANDIDATE] = -1
        weight = np.empty((num_nodes, node_weight.shape[1]), np.int32)
        weight[:] = node_weight
        return cls(nodes, weight)


@kernel
def cluster_block(src, dst, nodes, weight, node_weight, limit):
    every = np.int64(-1) if len(node_weight) == len(nodes) else np.int64(0)
    rows, moved = nodes.reshape(-1), 0
    for i in range(len(src)):
        if i + _ROWS_AHEAD < len(src):
            prefetch(rows, 4 * np.int64(src[i + _ROWS_AHEAD]))
            prefetch(rows, 4 * np.int64(dst[i + _ROWS_AHEAD]))
        u, v = src[i], dst[i]
        for end in range(2):
            if end == 1:
                u, v = v, u
            c = nodes[v, CLUSTER]
            if c == nodes[u, CLUSTER]:
                nodes[u, SUPPORT] += 1
            elif c == nodes[u, CANDIDATE]:
                nodes[u, CANDIDATE_SUPPORT] += 1
            elif nodes[u, CANDIDATE_SUPPORT] == 0:
                nodes[u, CANDIDATE], nodes[u, CANDIDATE_SUPPORT] = c, 1
            else:
                nodes[u, CANDIDATE_SUPPORT] -= 1
                continue
            if nodes[u, CANDIDATE_SUPPORT] > nodes[u, SUPPORT]:
                own, c = nodes[u, CLUSTER], nodes[u, CANDIDATE]
                fits, alive = True, False
                for d in range(node_weight.shape[1]):
                    fits = fits and np.int64(weight[c, d]) + node_weight[u & every, d] <= limit[d]
                    alive = alive or weight[c, d] > 0
                if fits and alive:
                    for d in range(node_weight.shape[1]):
                        weight[own, d] -= node_weight[u & every, d]
                        weight[c, d] += node_weight[u & every, d]
                    s = nodes[u, SUPPORT]
                    nodes[u, CLUSTER], nodes[u, SUPPORT] = c, nodes[u, CANDIDATE_SUPPORT]
                    nodes[u, CANDIDATE], nodes[u, CANDIDATE_SUPPORT] = own, s
                    moved += 1
    return moved
