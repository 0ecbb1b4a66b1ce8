"""The steps of refinement over edges in any order: counters for every node take the place of its row.

A node counts the parts of its neighbours in SLOTS counters; the first counts its own part, and exactly. Up to SLOTS
parts all counts are exact. With more, those of other parts may be too low: to look for candidates one more pass counts
exactly what connects a node to the part in sight; rebalancing takes them as they are.
"""

import numpy as np

from ...graph import id_dtype
from ...jit import kernel
from ...triton_kernels.intrinsics import prefetch
from ..row_threads import RowThreads
from .counters import SLOTS, count
from .edge_graph import EdgeGraph, share_of
from .potential import best_way_out, surcharge
from .weighted_graph import PART_DTYPE

_AHEAD = 24  # edges


class EdgeSteps:
    """What refinement and rebalancing read from a graph in edges; see `RowSteps` for what the methods do.

    Up to SLOTS parts the results are those of `RowSteps`, bit for bit.

    Args:
        graph: the graph.
        threads: their number does not change what is found.

    Cost: `select` takes one pass, or two with more than SLOTS parts, `find_ways_out` one, both with 48 bytes a node
        (with int32 ids); `reconsider` takes one pass and 4 bytes a node.
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
        _clear(part, slots)
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
def _clear(part, slots):
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
                score = counts[v, k] - surcharge(v & every, part[v], b, price, node_weight)
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
            g = towards[v] - surcharge(v & every, part[v], target[v], price, node_weight) - inside
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
            moved[v] = difference[v] >= surcharge(v & every, part[v], target[v], price, node_weight)


@kernel
def _choose_ways_out(part, slots, counts, node_weight, load, cap, over, strict, key, target, ratio):
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    conn = np.zeros(len(load), np.int64)
    for v in range(len(part)):
        target[v] = -1
        own = part[v]
        if not over[own]:
            continue
        for k in range(SLOTS):
            if counts[v, k] > 0:
                conn[slots[v, k]] = counts[v, k]
        best, best_ratio = best_way_out(v, v & every, own, conn, node_weight, load, cap, strict, key)
        if best >= 0:
            target[v], ratio[v] = best, best_ratio
        for k in range(SLOTS):
            if counts[v, k] > 0:
                conn[slots[v, k]] = 0
