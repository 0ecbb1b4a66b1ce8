"""Parts for nodes that come to a partitioned graph: by their neighbours, within the balances that the parts have."""

import heapq
from typing import NamedTuple

import numpy as np

from ..jit import kernel

MOST_SWEEPS = 10  # of local moves; they end sooner where none helps
SLACK = 0.05  # above the mean that a part may always be, whatever the balance was


class Loads(NamedTuple):
    """What parts hold, and may hold, of each balanced quantity: nodes, edges, nodes of each mask.

    Attributes:
        held: (num_quantities, num_parts) float64, changed in place as nodes are placed.
        most: (num_quantities,) float64, the most that a part may hold.
        weight: (num_new, num_quantities) float64 of each new node.
    """

    held: np.ndarray
    most: np.ndarray
    weight: np.ndarray

    @classmethod
    def of(cls, before: np.ndarray, left: np.ndarray, weight: np.ndarray, slack: float = SLACK) -> "Loads":
        """Return loads whose bounds are the balance that was there, or 1 + slack where it was better.

        Args:
            before: (num_quantities, num_parts) that the parts held when they were made.
            left: The same without what is removed.
            weight: (num_new, num_quantities).
            slack: Share of the mean.
        """
        held = left.astype(np.float64)
        mean = before.mean(axis=1)
        balance = np.divide(before.max(axis=1), mean, out=np.ones(len(before)), where=mean > 0)
        mean_after = (held.sum(axis=1) + weight.sum(axis=0)) / held.shape[1]
        return cls(held, np.maximum(balance, 1 + slack) * mean_after, weight)


def place_nodes(indptr: np.ndarray, neighbours: np.ndarray, part_of_old: np.ndarray, loads: Loads) -> np.ndarray:
    """Choose the part of each new node; old nodes stay.

    A node goes to the part that most of its placed neighbours are in, of those that have space for it; equal ones go by
    the nodes that they hold. The node with most placed neighbours is next. Then new nodes move, one by one, to parts
    that more of their neighbours are in, until none moves or `MOST_SWEEPS` sweeps are over.

    Args:
        indptr, neighbours: CSR of the new nodes: numbers of old nodes, and len(part_of_old) + i of new node i. A
            neighbour counts as often as it is listed.
        part_of_old: (num_old,) int32 parts.
        loads: What parts hold; changed in place.

    Returns:
        (num_new,) int32 parts.

    Cost: O(num_neighbours log num_neighbours + sweeps * num_new * num_parts).
    Source: the streamed assignment of Stanton and Kliot, Streaming Graph Partitioning for Large Distributed Graphs, KDD
        2012 (greedy with a bound on the load). Differs: several bounds, an order by placed neighbours, local moves.
    """
    num_new = len(indptr) - 1
    part = np.full(num_new, -1, np.int32)
    if num_new:
        _stream(indptr, neighbours, part_of_old, part, *loads)
        for _ in range(MOST_SWEEPS):
            if not _sweep(indptr, neighbours, part_of_old, part, *loads):
                break
    return part


@kernel
def _best_part(node, indptr, neighbours, part_of_old, part, held, most, weight, counts):
    """Return the part for a node that no load counts; counts: (num_parts,) scratch, filled with its neighbours."""
    counts[:] = 0
    num_old = len(part_of_old)
    for i in range(indptr[node], indptr[node + 1]):
        other = neighbours[i]
        at = part_of_old[other] if other < num_old else part[other - num_old]
        if at >= 0 and other - num_old != node:
            counts[at] += 1
    best, lightest, least = -1, 0, np.inf
    for p in range(len(counts)):
        excess, fits = 0.0, True
        for q in range(len(most)):
            after = held[q, p] + weight[node, q]
            if weight[node, q] > 0 and after > most[q]:
                fits = False
            excess = max(excess, after / max(most[q], 1e-300) if weight[node, q] > 0 else 0.0)
        if excess < least:
            lightest, least = p, excess
        if fits and (
            best < 0 or counts[p] > counts[best] or (counts[p] == counts[best] and held[0, p] < held[0, best])
        ):
            best = p
    return best if best >= 0 else lightest


@kernel
def _add(node, at, sign, held, weight):
    for q in range(held.shape[0]):
        held[q, at] += sign * weight[node, q]


@kernel
def _stream(indptr, neighbours, part_of_old, part, held, most, weight):
    num_old, counts = len(part_of_old), np.zeros(held.shape[1], np.int64)
    placed = np.zeros(len(part), np.int64)
    for node in range(len(part)):
        for i in range(indptr[node], indptr[node + 1]):
            placed[node] += neighbours[i] < num_old
    queue = [(-placed[0], 0)]
    for node in range(1, len(part)):
        heapq.heappush(queue, (-placed[node], node))
    while len(queue):
        known, node = heapq.heappop(queue)
        if part[node] >= 0 or -known != placed[node]:
            continue
        at = _best_part(node, indptr, neighbours, part_of_old, part, held, most, weight, counts)
        part[node] = at
        _add(node, at, 1.0, held, weight)
        for i in range(indptr[node], indptr[node + 1]):
            other = neighbours[i] - num_old
            if other >= 0 and part[other] < 0:
                placed[other] += 1
                heapq.heappush(queue, (-placed[other], other))


@kernel
def _sweep(indptr, neighbours, part_of_old, part, held, most, weight):
    """Move each node once where that joins it to more neighbours; return how many moved."""
    counts, moved = np.zeros(held.shape[1], np.int64), 0
    for node in range(len(part)):
        own = part[node]
        _add(node, own, -1.0, held, weight)
        at = _best_part(node, indptr, neighbours, part_of_old, part, held, most, weight, counts)
        if counts[at] <= counts[own]:
            at = own
        _add(node, at, 1.0, held, weight)
        part[node] = at
        moved += at != own
    return moved
