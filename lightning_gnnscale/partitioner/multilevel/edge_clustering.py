"""Clusters straight from the edges in the order of their stream, in memory that grows with the nodes alone.

A node begins with the one of its neighbours that a hash puts first: nodes whose neighbourhoods overlap tend to begin
with the same one. Label propagation follows, with two passes a round: the nodes with even ids add up the clusters of
their neighbours and move, then those with odd ids. What a node adds up in is a row of SLOTS counters, which fills a
line of the processor's cache; the first counts its own cluster, and exactly.
"""

import numpy as np

from ...graph import id_dtype
from ...jit import kernel
from ...rng import fold, mix64
from ...triton_kernels.intrinsics import prefetch
from ..row_threads import RowThreads
from .clustering import weigh_clusters
from .counters import SLOTS, count
from .edge_graph import EdgeGraph, share_of
from .two_hops import join_two_hops
from .weighted_graph import PART_DTYPE

STEPS_A_ROUND = 2

_SALT = 0x45434C55  # keeps this use of the seed apart from all others
_AHEAD = 24  # edges


class EdgeClusters:
    """Clusters that grow so that many edges lie inside them and none weighs more than a limit.

    Args:
        graph: the graph.
        seed: decides the first clusters and ties.
        threads: threads that count; their number does not change the result.
        saved: what `arrays` returned, to go on from.

    Attributes:
        label: (num_nodes,) `id_dtype(num_nodes)`, the id of a node for each cluster.

    Cost: 12 + 4 D bytes a node, and 32 more during a step (with int32 ids).
    Source: label propagation with counters of Misra and Gries, Science of Computer Programming 2(2), 1982; the
        beginning is a min-hash of neighbourhoods (Broder, 1997). The combination is this project's.
    """

    def __init__(self, graph: EdgeGraph, seed: int, threads: RowThreads, saved: dict | None = None):
        ids = id_dtype(graph.num_nodes)
        self.graph, self.seed, self.threads = graph, seed, threads
        self.label = np.arange(graph.num_nodes, dtype=ids) if saved is None else saved["label"]
        self._favourite = self.label.copy() if saved is None else saved["favourite"]
        self._weight = np.zeros((graph.num_nodes, graph.node_weight.shape[1]), np.int32)
        weigh_clusters(self.label, graph.node_weight, self._weight)

    @staticmethod
    def steps_of(rounds: int) -> int:
        """Return how many steps begin the clusters and take so many rounds of label propagation."""
        return 1 + STEPS_A_ROUND * rounds

    def step(self, number: int, limit: np.ndarray) -> None:
        """Make one pass over the edges: the first begins the clusters, any two that follow are a round.

        Args:
            number: steps that went before.
            limit: (D,) int64, weight up to which a cluster grows, below 2**31.

        Raises:
            EdgeStreamError: the edges are not those of the first pass.
        """
        graph, limit = self.graph, np.minimum(limit, np.iinfo(np.int32).max)
        key = np.uint64(fold(self.seed, _SALT, number))
        state = (self.label, self._favourite, self._weight, graph.node_weight, limit)
        if number == 0:
            for src, dst in graph.edges("clustering"):
                self.threads.share(_find_leaders, len(src), src, dst, self._favourite, key)
            _join_leaders(*state)
            return
        half = (number - 1) % STEPS_A_ROUND
        table = np.empty((graph.num_nodes // 2 + 1, 2 * SLOTS), self.label.dtype)
        _clear(table, self.label, half)
        for src, dst in graph.edges("clustering"):
            self.threads.share(_count_clusters, len(src), src, dst, self.label, table, half)
        _move_half(table, *state, key, half)
        del table
        if half:
            alone = np.zeros(1, PART_DTYPE)
            join_two_hops(graph.node_weight, limit, alone, self.label, self._weight, self._favourite)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what is to be saved between two steps."""
        return {"label": self.label, "favourite": self._favourite}


@kernel
def _find_leaders(share, num_shares, src, dst, leader, key):
    """Keep, for the ends of edges, the node with the lowest hash among themselves and their neighbours."""
    for i in range(len(src)):
        if i + _AHEAD < len(src):
            prefetch(leader, np.int64(src[i + _AHEAD]))
            prefetch(leader, np.int64(dst[i + _AHEAD]))
        u, v = src[i], dst[i]
        first_u, first_v = mix64(key ^ np.uint64(u)), mix64(key ^ np.uint64(v))
        if share_of(u, num_shares) == share and first_v < mix64(key ^ np.uint64(leader[u])):
            leader[u] = v
        if share_of(v, num_shares) == share and first_u < mix64(key ^ np.uint64(leader[v])):
            leader[v] = u


@kernel
def _join_leaders(label, leader, weight, node_weight, limit):
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
def _count_clusters(share, num_shares, src, dst, label, table, half):
    """Count the clusters of the neighbours of this share's nodes with this half's ids."""
    flat = table.reshape(-1)
    for i in range(len(src)):
        if i + _AHEAD < len(src):
            u, v = np.int64(src[i + _AHEAD]), np.int64(dst[i + _AHEAD])
            if u & 1 == half and share_of(u, num_shares) == share:
                prefetch(label, v)
                prefetch(flat, (u >> 1) * 2 * SLOTS)
                prefetch(flat, (u >> 1) * 2 * SLOTS + SLOTS)
            if v & 1 == half and share_of(v, num_shares) == share:
                prefetch(label, u)
                prefetch(flat, (v >> 1) * 2 * SLOTS)
                prefetch(flat, (v >> 1) * 2 * SLOTS + SLOTS)
        u, v = src[i], dst[i]
        if u & 1 == half and share_of(u, num_shares) == share:
            count(table[u >> 1, :SLOTS], table[u >> 1, SLOTS:], label[v])
        if v & 1 == half and share_of(v, num_shares) == share:
            count(table[v >> 1, :SLOTS], table[v >> 1, SLOTS:], label[u])


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
