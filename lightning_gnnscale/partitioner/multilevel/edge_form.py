"""The steps of the multilevel method over edges in the order of their stream, in memory that grows with the nodes.

A few counters replace a node's row (Misra and Gries, Science of Computer Programming 2(2), 1982): of the
clusters that its neighbours are in while clusters grow, of their parts while parts are refined.
"""

import numpy as np

from ...graph import id_dtype
from ...jit import kernel
from ...rng import fold, mix64
from ...triton_kernels.intrinsics import prefetch
from .clustering import join_two_hops
from .row_form import best_way_out, surcharge
from .weighted_graph import PART_DTYPE, EdgeGraph, RowThreads, add_weights, share_of

SLOTS = 8
STEPS_A_ROUND = 2

_SALT = 0x45434C55  # separates this use of the seed from all others
_AHEAD = 24  # edges


@kernel(inline="always")
def count(values, counts, value):
    """Count a value in slots; the first belongs to one value for good, and is exact.

    A value without a slot takes one whose count is zero; where there is none, all but the first count one less. The
    others are thus too low by at most a SLOTS-th of all that they counted, and exact up to SLOTS values.

    Args:
        values, counts: (SLOTS,); changed in place. Slots without a value hold one that never comes.
        value: what to count.

    Source: Misra and Gries, Science of Computer Programming 2(2), 1982.
    """
    free, found = -1, False
    for k in range(SLOTS):
        if values[k] == value:
            counts[k] += 1
            found = True
            break
        if k > 0 and counts[k] == 0:
            free = k
    if not found:
        if free > 0:
            values[free], counts[free] = value, 1
        else:
            for k in range(1, SLOTS):
                counts[k] -= 1


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
        self.label = np.arange(graph.num_nodes, dtype=ids) if not saved else saved["label"]
        self._favourite = self.label.copy() if not saved else saved["favourite"]
        self._weight = np.zeros((graph.num_nodes, graph.node_weight.shape[1]), np.int32)
        add_weights(self.label, graph.node_weight, self._weight)

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
        _clear_table(table, self.label, half)
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
    """Move a node to a cluster that has members and space for it; return whether it went."""
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
def _clear_table(table, label, half):
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
    """Move the nodes of this half, one after the other, to the cluster that counts most and has space."""
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


class EdgeSteps:
    """What refinement and rebalancing read from a graph in edges; see `RowSteps` for what the methods do.

    Up to SLOTS parts the results are those of `RowSteps`, bit for bit.

    Args:
        graph: the graph.
        threads: their number does not change what is found.

    Cost: `select` takes one pass, or two with more than SLOTS parts, `find_ways_out` one, both with 48 bytes a node
        (with int32 ids); `reconsider` takes one pass and 4 bytes a node, `cut` one pass.
    """

    def __init__(self, graph: EdgeGraph, threads: RowThreads):
        self.graph, self.threads = graph, threads

    def select(self, part, price, loss: float, target, gain, moved) -> int:
        weight, exact = self.graph.node_weight, len(price) <= SLOTS
        slots, counts, cut = self._count_parts(part, np.ones(len(price), np.bool_))
        _choose_targets(part, slots, counts, weight, price, loss, exact, target, gain, moved)
        del slots, counts
        if not exact:
            _judge_targets(part, self._count_towards(part, target), weight, price, loss, target, gain)
        return cut

    def cut(self, part) -> int:
        edges = self.graph.edges("refinement")
        return sum(sum(self.threads.share(_count_cut, len(src), src, dst, part)) for src, dst in edges)

    def reconsider(self, part, price, target, gain, moved) -> None:
        difference = np.zeros(len(part), id_dtype(len(part)))
        for src, dst in self.graph.edges("refinement"):
            self.threads.share(_compare, len(src), src, dst, part, target, gain, difference)
        _mark_moves(part, difference, self.graph.node_weight, price, target, moved)

    def find_ways_out(self, part, load, cap, over, strict: bool, key, target, ratio) -> None:
        weight = self.graph.node_weight
        slots, counts, _ = self._count_parts(part, over)
        _choose_ways_out(part, slots, counts, weight, load, cap, over, strict, key, target, ratio)

    def _count_parts(self, part, active):
        """Return (num_nodes, SLOTS) parts and their counts, for the nodes of active parts; and the cut."""
        slots = np.empty((len(part), SLOTS), PART_DTYPE)
        counts = np.zeros((len(part), SLOTS), id_dtype(len(part)))
        _clear_slots(part, slots)
        cut = 0
        for src, dst in self.graph.edges("refinement"):
            cut += sum(self.threads.share(_count, len(src), src, dst, part, active, slots, counts))
        return slots, counts, cut

    def _count_towards(self, part, target):
        """Return (num_nodes,) edges between every node and the part that it would go to."""
        towards = np.zeros(len(part), id_dtype(len(part)))
        for src, dst in self.graph.edges("refinement"):
            self.threads.share(_count_one, len(src), src, dst, part, target, towards)
        return towards


@kernel
def _clear_slots(part, slots):
    for v in range(len(part)):
        slots[v, 0] = part[v]
        for k in range(1, SLOTS):
            slots[v, k] = -1


@kernel
def _count(share, num_shares, src, dst, part, active, slots, counts):
    """Count the parts of the neighbours of this share's nodes; return its edges between parts."""
    flat_slots, flat_counts = slots.reshape(-1), counts.reshape(-1)
    cut = 0
    for i in range(len(src)):
        if i + _AHEAD < len(src):
            u, v = np.int64(src[i + _AHEAD]), np.int64(dst[i + _AHEAD])
            prefetch(part, u)
            prefetch(part, v)
            if share_of(u, num_shares) == share:
                prefetch(flat_slots, u * SLOTS)
                prefetch(flat_counts, u * SLOTS)
            if share_of(v, num_shares) == share:
                prefetch(flat_slots, v * SLOTS)
                prefetch(flat_counts, v * SLOTS)
        u, v = src[i], dst[i]
        a, b = part[u], part[v]
        if share_of(u, num_shares) == share:
            cut += a != b
            if active[a]:
                count(slots[u], counts[u], b)
        if active[b] and share_of(v, num_shares) == share:
            count(slots[v], counts[v], a)
    return cut


@kernel
def _count_cut(share, num_shares, src, dst, part):
    """Return how many edges of this share's nodes, by their first end, run between parts."""
    cut = 0
    for i in range(len(src)):
        if i + _AHEAD < len(src):
            prefetch(part, np.int64(src[i + _AHEAD]))
            prefetch(part, np.int64(dst[i + _AHEAD]))
        cut += (part[src[i]] != part[dst[i]]) & (share_of(src[i], num_shares) == share)
    return cut


@kernel
def _choose_targets(part, slots, counts, node_weight, price, loss, exact, target, gain, moved):
    """Write the best part of every node that does not rest; its gain, or while that is not known its inner edges."""
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    for v in range(len(part)):
        target[v] = -1
        if moved[v]:
            continue
        best, most, inside = -1, -np.inf, np.float64(counts[v, 0])
        for k in range(1, SLOTS):
            if counts[v, k] > 0:
                b = slots[v, k]
                score = counts[v, k] - surcharge(v & every, np.int64(part[v]), np.int64(b), price, node_weight)
                if score > most or (score == most and b < best):
                    best, most = b, score
        if best >= 0:
            g = most - inside
            if not exact:
                target[v], gain[v] = best, inside
            elif g >= 0 or -g < loss * inside:
                target[v], gain[v] = best, g


@kernel
def _count_one(share, num_shares, src, dst, part, target, towards):
    for i in range(len(src)):
        if i + _AHEAD < len(src):
            for end in (src[i + _AHEAD], dst[i + _AHEAD]):
                prefetch(part, np.int64(end))
                prefetch(target, np.int64(end))
        u, v = src[i], dst[i]
        if target[u] == part[v] and share_of(u, num_shares) == share:
            towards[u] += 1
        if target[v] == part[u] and share_of(v, num_shares) == share:
            towards[v] += 1


@kernel
def _judge_targets(part, towards, node_weight, price, loss, target, gain):
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    for v in range(len(part)):
        if target[v] >= 0:
            inside = gain[v]
            g = towards[v] - surcharge(v & every, np.int64(part[v]), np.int64(target[v]), price, node_weight) - inside
            if g >= 0 or -g < loss * inside:
                gain[v] = g
            else:
                target[v] = -1


@kernel
def _compare(share, num_shares, src, dst, part, target, gain, difference):
    """Add up edges to the part in sight less those to the own one, as if all better candidates had moved."""
    for i in range(len(src)):
        if i + _AHEAD < len(src):
            for end in (src[i + _AHEAD], dst[i + _AHEAD]):
                prefetch(part, np.int64(end))
                prefetch(target, np.int64(end))
        u, v = src[i], dst[i]
        if target[u] < 0 and target[v] < 0:
            continue
        v_first = target[v] >= 0 and (target[u] < 0 or gain[v] > gain[u] or (gain[v] == gain[u] and v < u))
        if target[u] >= 0 and share_of(u, num_shares) == share:
            b = target[v] if v_first else part[v]
            difference[u] += np.int64(b == target[u]) - np.int64(b == part[u])
        if target[v] >= 0 and share_of(v, num_shares) == share:
            b = part[u] if v_first else target[u]
            difference[v] += np.int64(b == target[v]) - np.int64(b == part[v])


@kernel
def _mark_moves(part, difference, node_weight, price, target, moved):
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    for v in range(len(part)):
        moved[v] = False
        if target[v] >= 0:
            moved[v] = difference[v] >= surcharge(v & every, np.int64(part[v]), np.int64(target[v]), price, node_weight)


@kernel
def _choose_ways_out(part, slots, counts, node_weight, load, cap, over, strict, key, target, ratio):
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    conn, near = np.zeros(len(load), np.int64), np.empty(SLOTS, part.dtype)
    for v in range(len(part)):
        target[v] = -1
        own = part[v]
        if not over[own]:
            continue
        num_near = 0
        for k in range(SLOTS):
            if counts[v, k] > 0:
                near[num_near] = slots[v, k]
                num_near += 1
                conn[slots[v, k]] = counts[v, k]
        some = near[:num_near]
        best, best_ratio = best_way_out(v, v & every, own, some, conn, node_weight, load, cap, strict, key)
        if best >= 0:
            target[v], ratio[v] = best, best_ratio
        for i in range(num_near):
            conn[near[i]] = 0
