"""GREM's inner loop: the nodes of one chunk of edges are placed, or placed again, strictly one after the other."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..jit import kernel
from ..scratch import EdgeFile
from ..triton_kernels.intrinsics import prefetch
from . import phases

_AHEAD = 32  # neighbours, or edges
_ROWS_AHEAD = 24  # nodes
_SLOTS_AHEAD = 12  # edges; a slot in a row is asked for once the row's end has come
_RELIEF_ROUNDS = 40
_LEAST_RELIEF = 1e-12  # a share of a cap: less is rounding


class PlacementState(NamedTuple):
    """One pass over the edges as a value: saved after any chunk and given back, the pass goes on from there.

    Attributes:
        part: (num_nodes,) int32, -1 for a node that has none yet.
        counts: (num_nodes, num_parts) float32, running means of a node's neighbours by part; (0, num_parts) where
            parts are never refined.
        sizes: (num_parts,) int64, nodes by part; (num_parts, D) where D weights of a node are balanced, their sums.
        next_chunk: (1,) int64.
    """

    part: np.ndarray
    counts: np.ndarray
    sizes: np.ndarray
    next_chunk: np.ndarray

    @classmethod
    def empty(cls, num_nodes: int, caps: np.ndarray, refine: bool) -> "PlacementState":
        part = np.full(num_nodes, -1, np.int32)
        counts = np.zeros((num_nodes if refine else 0, len(caps)), np.float32)
        return cls(part, counts, np.zeros(caps.shape, np.int64), np.zeros(1, np.int64))


# (ends, neighbors, edges, number of edges) of a first chunk to the part of each node that has an edge in it.
SeedParts = Callable[[np.ndarray, np.ndarray, EdgeFile, int], np.ndarray]


def place_edges(
    edges: EdgeFile,
    caps: np.ndarray,
    chunk_edges: int,
    seed_parts: SeedParts,
    state: PlacementState,
    after_chunk,
    weight: np.ndarray | None = None,
) -> None:
    """Place every node, from the state's chunk to the end; the state is changed in place.

    Args:
        edges: in the order in which they are to be met; ids in [0, len(state.part)).
        caps: (num_parts,) int64, nodes a part may hold; together at least the nodes. With weights (num_parts, D): what
            it may weigh; kept wherever a part with space is found, and by moves at the end where it was not.
        chunk_edges: edges a chunk, >= 1; part of the method.
        seed_parts: called as seed_parts(ends, neighbors, edges, number of edges) with the first chunk, before anything
            else is placed; returns the part of each node that has an edge in it, by ascending node id.
        state: how far the pass has come.
        after_chunk: called with the number of edges done once a chunk.
        weight: (num_nodes, D) int32, what a node weighs in each dimension, more than 0 in one of them. None: its size.

    Cost: O(num_edges + num_chunks * num_nodes * num_parts * D) time at most; 8 bytes a node and 2 ids an edge of one
        chunk, besides the state and what `seed_parts` takes; at the end, where caps are passed, 24 bytes for each node
        of the parts that pass theirs.
    """
    ends = np.empty(len(state.part), np.int64)
    space = np.empty(2 * min(chunk_edges, edges.num_edges), edges.dtype)
    refine = len(state.counts) > 0
    while int(state.next_chunk[0]) * chunk_edges < edges.num_edges:
        start = int(state.next_chunk[0]) * chunk_edges
        stop = min(start + chunk_edges, edges.num_edges)
        with phases.phase("chunks"):
            neighbors = _read_rows(edges, start, stop, ends, space)
        if start == 0:
            with phases.phase("seed"):
                seed = seed_parts(ends, neighbors, edges, stop)
            _take_seed(ends, neighbors, seed, *state[:3], caps, weight)
        else:
            with phases.phase("placing"):
                _place_chunk(ends, neighbors, *state[:3], caps, weight, refine)
        state.next_chunk[0] += 1
        after_chunk(stop)
    _place_rest(state.part, state.sizes, caps, weight)
    if weight is not None:
        with phases.phase("placing"):
            _relieve(state, caps, weight)


def _read_rows(edges: EdgeFile, start: int, stop: int, ends: np.ndarray, space: np.ndarray) -> np.ndarray:
    """Sort the edges [start, stop) by node: row v is neighbors[ends[v - 1]:ends[v]], from 0 for node 0.

    They are read twice, so that they are never held together with their rows.

    Args:
        ends: (num_nodes,) int64, filled.
        space: ids, of which the neighbours, (2 * (stop - start),), fill and return the front.
    """
    neighbors = space[: 2 * (stop - start)]
    ends[:] = 0
    for pairs in edges.pieces(start, stop):
        _count_ends(pairs, ends)
    _starts_from_counts(ends)
    for pairs in edges.pieces(start, stop):
        _fill_rows(pairs, ends, neighbors)
    return neighbors


@kernel
def _count_ends(pairs, ends):
    for i in range(len(pairs)):
        if i + _AHEAD < len(pairs):
            prefetch(ends, np.int64(pairs[i + _AHEAD, 0]))
            prefetch(ends, np.int64(pairs[i + _AHEAD, 1]))
        ends[pairs[i, 0]] += 1
        ends[pairs[i, 1]] += 1


@kernel
def _starts_from_counts(ends):
    total = 0
    for v in range(len(ends)):
        count = ends[v]
        ends[v] = total
        total += count


@kernel
def _fill_rows(pairs, ends, neighbors):
    """Append each edge to both rows; what begins as a row's start has become its end when all edges are in."""
    for i in range(len(pairs)):
        if i + _AHEAD < len(pairs):
            prefetch(ends, np.int64(pairs[i + _AHEAD, 0]))
            prefetch(ends, np.int64(pairs[i + _AHEAD, 1]))
            prefetch(neighbors, ends[pairs[i + _SLOTS_AHEAD, 0]])
            prefetch(neighbors, ends[pairs[i + _SLOTS_AHEAD, 1]])
        u, v = pairs[i, 0], pairs[i, 1]
        neighbors[ends[u]] = v
        ends[u] += 1
        neighbors[ends[v]] = u
        ends[v] += 1


@kernel
def _tally(neighbors, start, stop, part, tally):
    """Count the row's neighbours by part; those without a part are left out."""
    tally[:] = 0
    for e in range(start, stop):
        if e + _AHEAD < len(neighbors):
            prefetch(part, np.int64(neighbors[e + _AHEAD]))
        q = part[neighbors[e]]
        if q >= 0:
            tally[q] += 1


@kernel
def _best_part(scores, sizes, caps, own):
    """Return the part with space of the best score: `own` if it is among them, then the relatively lightest one."""
    best = -1
    for b in range(len(scores)):
        if sizes[b] >= caps[b]:
            continue
        if best < 0 or scores[b] > scores[best]:
            best = b
        elif scores[b] < scores[best] or best == own:
            continue
        elif b == own or sizes[b] * caps[best] < sizes[best] * caps[b]:
            best = b
    return best


# Numba compiles one branch of `sizes.ndim` alone: where nodes alone are bounded `weight` is None, and costs nothing.
@kernel
def _add(sizes, weight, v, b, times):
    """Add a node's weights to a part, or take them away."""
    if sizes.ndim == 1:
        sizes[b] += times
    else:
        for d in range(sizes.shape[1]):
            sizes[b, d] += times * weight[v, d]


@kernel
def _excess(sizes, caps, weight, v, b):
    """Return by how much a part with this node in it passes its caps, as shares of them; 0: the node fits."""
    if sizes.ndim == 1:
        return max(0.0, (sizes[b] + 1 - caps[b]) / max(1, caps[b]))
    over = 0.0
    for d in range(sizes.shape[1]):
        if weight[v, d] > 0:
            over += max(0.0, (sizes[b, d] + weight[v, d] - caps[b, d]) / max(1, caps[b, d]))
    return over


@kernel
def _fullness(sizes, caps, weight, v, b):
    """Return how full a part is where the node weighs, in its fullest dimension."""
    fullest = 0.0
    for d in range(sizes.shape[1]):
        if weight[v, d] > 0:
            fullest = max(fullest, sizes[b, d] / max(1, caps[b, d]))
    return fullest


@kernel
def _choose(scores, sizes, caps, weight, v, own):
    """Return the best part with space in all dimensions, or the one that passes its caps least; see `_best_part`."""
    if sizes.ndim == 1:
        return _best_part(scores, sizes, caps, own)
    best, best_over = -1, 0.0
    for b in range(len(scores)):
        over = _excess(sizes, caps, weight, v, b)
        better = best < 0 or over < best_over
        if not better and over == best_over:
            better = scores[b] > scores[best]
            if scores[b] == scores[best] and best != own:
                filled = _fullness(sizes, caps, weight, v, b)
                better = b == own or filled < _fullness(sizes, caps, weight, v, best)
        if better:
            best, best_over = b, over
    return best


@kernel
def _place_chunk(ends, neighbors, part, counts, sizes, caps, weight, refine):
    """Place the nodes of one chunk by ascending id; with `refine` those that have a part are taken out first."""
    tally, scores = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.float32)
    half = np.float32(0.5)
    flat_counts = counts.reshape(-1)
    stop = np.int64(0)
    for v in range(len(ends)):
        start, stop = stop, ends[v]
        ahead = v + _ROWS_AHEAD
        if refine and ahead < len(ends):
            met = ends[ahead] != ends[ahead - 1]
            prefetch(flat_counts, len(sizes) * (ahead if met else v))
        own = part[v]
        if stop == start or (own >= 0 and not refine):
            continue
        _tally(neighbors, start, stop, part, tally)
        # Algorithm 2: a node with a part leaves it first, and this chunk's counts are averaged with its earlier ones.
        if own >= 0:
            if sizes.ndim == 1:
                sizes[own] -= 1
            else:
                _add(sizes, weight, v, own, -1)
            for b in range(len(sizes)):
                scores[b] = (counts[v, b] + np.float32(tally[b])) * half
        else:
            for b in range(len(sizes)):
                scores[b] = np.float32(tally[b])
        if sizes.ndim == 1:  # written out: by way of `_choose` this loop takes a fifth longer
            best = _best_part(scores, sizes, caps, own)
            sizes[best] += 1
        else:
            best = _choose(scores, sizes, caps, weight, v, own)
            _add(sizes, weight, v, best, 1)
        part[v] = best
        if refine:
            for b in range(len(sizes)):
                counts[v, b] = scores[b]


@kernel
def _take_seed(ends, neighbors, seed, part, counts, sizes, caps, weight):
    """Give the first chunk's nodes their seed parts while there is space, place the others, and count for all."""
    stop, rank = np.int64(0), 0
    for v in range(len(ends)):
        start, stop = stop, ends[v]
        if stop > start:
            b = seed[rank]
            rank += 1
            if _excess(sizes, caps, weight, v, b) == 0.0:
                part[v] = b
                _add(sizes, weight, v, b, 1)
    _place_chunk(ends, neighbors, part, counts, sizes, caps, weight, False)
    if len(counts) == 0:
        return
    tally = np.zeros(len(sizes), np.int64)
    stop = np.int64(0)
    for v in range(len(ends)):
        start, stop = stop, ends[v]
        if stop > start:
            _tally(neighbors, start, stop, part, tally)
            for b in range(len(sizes)):
                counts[v, b] = np.float32(tally[b])


@kernel
def _place_rest(part, sizes, caps, weight):
    """Give nodes that no edge has met to the relatively lightest part with space."""
    scores = np.zeros(len(sizes), np.float32)
    for v in range(len(part)):
        if part[v] < 0:
            best = _choose(scores, sizes, caps, weight, v, -1)
            part[v] = best
            _add(sizes, weight, v, best, 1)


def _relieve(state: PlacementState, caps: np.ndarray, weight: np.ndarray) -> None:
    """Move nodes out of parts that pass their caps, those first that lose least of their neighbours for it.

    A move must lower what all parts together pass their caps by, as shares of the caps. So a rare dimension may push
    a common one over, which then moves on. A dimension that no move lowers any more counts twice from then on.
    """
    penalty = np.ones(caps.shape[1])
    for _ in range(_RELIEF_ROUNDS):
        over = (state.sizes > caps).any(axis=0)
        if not over.any():
            return
        nodes = np.flatnonzero((state.sizes > caps).any(axis=1)[state.part])
        price = np.full(len(nodes), np.inf)
        _price_moves(nodes, *state[:3], caps, weight, penalty, price)
        order = np.argsort(price, kind="stable")[: np.count_nonzero(price < np.inf)]
        if not _move_nodes(nodes[order], *state[:3], caps, weight, penalty):
            penalty[over] *= 2


@kernel
def _relief(sizes, caps, weight, penalty, v, a, b):
    """Return by how much less all parts together pass their caps once a node has moved from part a to part b."""
    relief = 0.0
    for d in range(sizes.shape[1]):
        w = weight[v, d]
        if w > 0:
            less = max(0, sizes[a, d] - caps[a, d]) - max(0, sizes[a, d] - w - caps[a, d])
            more = max(0, sizes[b, d] + w - caps[b, d]) - max(0, sizes[b, d] - caps[b, d])
            relief += penalty[d] * (less / max(1, caps[a, d]) - more / max(1, caps[b, d]))
    return relief


@kernel
def _cheapest_move(sizes, caps, counts, weight, penalty, v, own):
    """Return the part to which a node moves at the least loss of neighbours per relief, and that price; -1: none."""
    best, best_price = -1, np.inf
    for b in range(len(sizes)):
        relief = _relief(sizes, caps, weight, penalty, v, own, b) if b != own else 0.0
        if relief <= _LEAST_RELIEF:
            continue
        loss = np.float64(counts[v, own] - counts[v, b]) if len(counts) > 0 else 0.0
        price = loss / relief if loss > 0 else loss * relief
        if price < best_price:
            best, best_price = b, price
    return best, best_price


@kernel
def _price_moves(nodes, part, counts, sizes, caps, weight, penalty, price):
    for i in range(len(nodes)):
        v = nodes[i]
        price[i] = _cheapest_move(sizes, caps, counts, weight, penalty, v, part[v])[1]


@kernel
def _move_nodes(nodes, part, counts, sizes, caps, weight, penalty):
    """Move the nodes, in this order, as far as it still relieves; return how many."""
    moved = 0
    for i in range(len(nodes)):
        v = nodes[i]
        best = _cheapest_move(sizes, caps, counts, weight, penalty, v, part[v])[0]
        if best >= 0:
            _add(sizes, weight, v, part[v], -1)
            part[v] = best
            _add(sizes, weight, v, best, 1)
            moved += 1
    return moved
