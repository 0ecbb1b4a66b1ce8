"""Clusters straight from the edges in the order of their stream, in memory that grows with the nodes alone.

A node begins with the one of its neighbours that a hash puts first: nodes whose neighbourhoods overlap tend to begin
with the same one. Label propagation follows, with two passes a round: the nodes with even ids add up the clusters of
their neighbours and move, then those with odd ids. What a node adds up in is a row of SLOTS counters, kept by the rule
of Misra and Gries; the first counts its own cluster, and exactly.
"""

import numpy as np

from ...graph import id_dtype
from ...jit import kernel
from ...rng import fold, mix64
from ...triton_kernels.intrinsics import prefetch
from .edge_graph import EdgeGraph
from .two_hops import join_two_hops
from .weighted_graph import PART_DTYPE

SLOTS = 8  # counters a node; with their clusters' ids they fill a line of the processor's cache

_SALT = 0x45434C55  # keeps this use of the seed apart from all others
_AHEAD = 24  # edges
_HASH = np.uint64(0x9E3779B97F4A7C15)


def cluster_edges(
    graph: EdgeGraph,
    limit: np.ndarray,
    seed: int,
    passes: int = 3,
    label: np.ndarray | None = None,
    first_pass: int = 0,
    after_pass=None,
) -> np.ndarray:
    """Cluster nodes so that many edges lie inside clusters and no cluster weighs more than a limit.

    Args:
        graph: the graph.
        limit: (D,) int64, weight up to which a cluster grows, below 2**31.
        seed: decides the first clusters and ties.
        passes: rounds of label propagation, two passes over the edges each, >= 0.
        label: (num_nodes,) `id_dtype(num_nodes)`, clusters to go on from; changed in place. None: begin, with one more
            pass over the edges.
        first_pass: rounds that went before, >= 0.
        after_pass: called with (label, rounds done) after a round.

    Returns:
        (num_nodes,) labels, each the id of a node.

    Raises:
        EdgeStreamError: the edges are not those of the first pass.

    Cost: 1 + 2 * passes passes over the edges; 40 + 4 D bytes a node (with int32 ids).
    Source: label propagation with counters of Misra and Gries, Science of Computer Programming 2(2), 1982; the
        beginning is a min-hash of neighbourhoods (Broder, 1997). The combination is this project's.
    """
    num_nodes, node_weight = graph.num_nodes, graph.node_weight
    ids = id_dtype(num_nodes)
    favourite = np.arange(num_nodes, dtype=ids)
    weight = np.zeros((num_nodes, node_weight.shape[1]), np.int32)
    limit = np.minimum(limit, np.iinfo(np.int32).max)
    if label is None:
        label = np.arange(num_nodes, dtype=ids)
        _weigh(label, node_weight, weight)
        key = np.uint64(fold(seed, _SALT))
        for src, dst in graph.edges("clustering"):
            _find_leaders(src, dst, favourite, key)
        _join_leaders(favourite, label, weight, node_weight, limit)
    else:
        _weigh(label, node_weight, weight)
    table = np.empty((num_nodes // 2 + 1, 2 * SLOTS), ids)
    for i in range(first_pass, first_pass + passes):
        for half in range(2):
            _clear(table, label, half)
            for src, dst in graph.edges("clustering"):
                _count_clusters(src, dst, label, table, half)
            key = np.uint64(fold(seed, _SALT, i, half))
            _move_half(table, label, favourite, weight, node_weight, limit, key, half)
        if after_pass is not None:
            after_pass(label, i + 1)
    del table
    join_two_hops(node_weight, limit, np.zeros(1, PART_DTYPE), label, weight, favourite)
    return label


@kernel
def _weigh(label, node_weight, weight):
    every = np.int64(-1) if len(node_weight) == len(label) else np.int64(0)
    for v in range(len(label)):
        for d in range(node_weight.shape[1]):
            weight[label[v], d] += node_weight[v & every, d]


@kernel
def _find_leaders(src, dst, leader, key):
    """Keep, for both ends of every edge, the node with the lowest hash among themselves and their neighbours."""
    for i in range(len(src)):
        if i + _AHEAD < len(src):
            prefetch(leader, np.int64(src[i + _AHEAD]))
            prefetch(leader, np.int64(dst[i + _AHEAD]))
        u, v = src[i], dst[i]
        first_u, first_v = mix64(key ^ np.uint64(u)), mix64(key ^ np.uint64(v))
        if first_v < mix64(key ^ np.uint64(leader[u])):
            leader[u] = v
        if first_u < mix64(key ^ np.uint64(leader[v])):
            leader[v] = u


@kernel
def _join_leaders(leader, label, weight, node_weight, limit):
    for v in range(len(label)):
        if leader[v] != v:
            _move(v, leader[v], label, weight, node_weight, limit)


@kernel
def _move(v, target, label, weight, node_weight, limit):
    """Move a node to a cluster that has members and room for it; return whether it went."""
    every = np.int64(-1) if len(node_weight) == len(label) else np.int64(0)
    alive = False
    for d in range(node_weight.shape[1]):
        if np.int64(weight[target, d]) + node_weight[v & every, d] > limit[d]:
            return False
        alive = alive or weight[target, d] > 0
    if alive:
        for d in range(node_weight.shape[1]):
            weight[label[v], d] -= node_weight[v & every, d]
            weight[target, d] += node_weight[v & every, d]
        label[v] = target
    return alive


@kernel
def _clear(table, label, half):
    """Empty the rows: clusters in the first SLOTS columns, their counts behind; the first is the node's own."""
    for row in range(len(table)):
        for k in range(SLOTS):
            table[row, k], table[row, SLOTS + k] = -1, 0
        if 2 * row + half < len(label):
            table[row, 0] = label[2 * row + half]


@kernel
def _count_clusters(src, dst, label, table, half):
    """Count the clusters of the neighbours of all nodes with this half's ids."""
    flat = table.reshape(-1)
    for i in range(len(src)):
        if i + _AHEAD < len(src):
            u, v = np.int64(src[i + _AHEAD]), np.int64(dst[i + _AHEAD])
            prefetch(label, u)
            prefetch(label, v)
            if u & 1 == half:
                prefetch(flat, (u >> 1) * 2 * SLOTS)
                prefetch(flat, (u >> 1) * 2 * SLOTS + SLOTS)
            if v & 1 == half:
                prefetch(flat, (v >> 1) * 2 * SLOTS)
                prefetch(flat, (v >> 1) * 2 * SLOTS + SLOTS)
        u, v = src[i], dst[i]
        if u & 1 == half:
            _count(table[u >> 1], label[v])
        if v & 1 == half:
            _count(table[v >> 1], label[u])


@kernel(inline="always")
def _count(row, cluster):
    free, found = -1, False
    for k in range(SLOTS):
        if row[k] == cluster:
            row[SLOTS + k] += 1
            found = True
            break
        if k > 0 and row[SLOTS + k] == 0:
            free = k
    if not found:
        if free > 0:
            row[free], row[SLOTS + free] = cluster, 1
        else:
            for k in range(1, SLOTS):
                row[SLOTS + k] -= 1


@kernel
def _move_half(table, label, favourite, weight, node_weight, limit, key, half):
    """Move the nodes of this half, one after the other, to the cluster that counts most and has room."""
    for row in range(len(table)):
        v = 2 * row + half
        if v >= len(label):
            break
        node_key = mix64(key ^ np.uint64(v)) | np.uint64(1)
        tried = 0
        while True:
            best, most, best_tie = -1, np.int64(1), np.uint64(0)
            for k in range(1, SLOTS):
                count = np.int64(table[row, SLOTS + k])
                if count < max(most, np.int64(table[row, SLOTS])):
                    continue
                tie = np.uint64(table[row, k]) * node_key
                if count > most or tie > best_tie or best < 0:
                    best, most, best_tie = k, count, tie
            if best < 0:
                break
            if tried == 0:
                favourite[v] = table[row, best]
            tried += 1
            if _move(v, table[row, best], label, weight, node_weight, limit):
                break
            table[row, SLOTS + best] = 0
