"""Refinement of a graph on disk in one pass a round: batch by batch, nodes move where they gain more than a price."""

from itertools import pairwise

import numpy as np

from ...jit import kernel
from ...triton_kernels.intrinsics import prefetch
from .row_form import has_space
from .weighted_graph import MIN_ENTRIES, PART_DTYPE, BlockGraph, RowThreads, total_weight

BATCHES = 32  # a block; a fixed part of the method, whatever the threads
# Pressure and slack of the last sweeps: parts that may grow for a while let more nodes find their place.
SWEEPS = ((4.0, 1.2), (8.0, 1.1), (16.0, 1.0))
LASTING = 2.0  # of the mean degree: by how much a sweep raises the lasting price of a part that weighs twice its cap
_ENTRIES_AHEAD, _STEP = np.uint64(32), np.uint64(1)


def sweep(
    graph: BlockGraph,
    part: np.ndarray,
    load: np.ndarray,
    cap: np.ndarray,
    lasting: np.ndarray,
    pressure: float,
    slack: float,
    threads: RowThreads,
    backwards: bool,
    border: np.ndarray,
) -> int:
    """Read the graph once, and let each node go to the part that it shares most edges with, less a price.

    All nodes of a batch choose from the same state; then those that would gain are looked at one after the other, and
    move if they gain still. A part that is over its cap has a price, by which nodes stay out of it or leave it at a
    small loss. A part of the price lasts: it rises while the part is over its cap and falls while it is not, so that a
    part that all would like to enter, that of the hubs, exchanges its nodes for better ones.

    Args:
        graph: the graph; its edges weigh one each.
        part: (num_nodes,) int16; changed in place.
        load: (num_parts, D) int64, weight of each part; kept up to date.
        cap: (num_parts, D) int64.
        lasting: (num_parts, D) float64, the lasting part of the prices; kept up to date.
        pressure: of the mean degree: what a part that weighs twice its cap costs more than one within it.
        slack: of the cap, >= 1: up to there parts are entered.
        threads: threads that choose; their number does not change the result.
        backwards: from the last block on.
        border: (num_nodes,) bool, true at least of all nodes that have a neighbour in another part; rows of others are
            passed over. Changed in place: nodes that moved and their neighbours are put on it, others are taken off.

    Returns:
        By how much the cut fell; negative where balance cost more.

    Cost: O(num_nodes + num_entries) time; two bytes a node of a batch.
    Source: size-constrained label propagation, as in Meyerhenke, Sanders and Schulz, SEA 2014; batches and prices are
        ours.
    """
    gained = 0
    per_load = graph.total_edge_weight / np.maximum(1, total_weight(graph))
    price, most = np.empty(load.shape), (cap * slack).astype(np.int64)
    for block in graph.blocks(backwards):
        bounds = np.searchsorted(block.indptr, np.linspace(0, len(block.indices), BATCHES + 1).astype(np.int64))
        bounds = np.unique(np.append(bounds, len(block.indptr) - 1))
        target = np.empty(int(np.diff(bounds).max(initial=0)), PART_DTYPE)
        state = (*block[:3], graph.node_weight, part, load, cap, most, price, target, border)
        prices = (lasting, per_load, pressure, float(max(1, graph.total_edge_weight)))
        if threads.num_threads == 1 or len(block.indices) < BATCHES * MIN_ENTRIES:
            gained += _take_batches(bounds, *prices, *state)
            continue
        for start, stop in pairwise(bounds.tolist()):
            _set_prices(int(block.indptr[stop] - block.indptr[start]), load, cap, *prices, price)
            threads.run(_choose_parts, block.indptr[start : stop + 1], start, *state)
            gained += _move(stop - start, start, *state)
    return gained


@kernel
def _take_batches(
    bounds,
    lasting,
    per_load,
    pressure,
    total,
    first_node,
    indptr,
    indices,
    node_weight,
    part,
    load,
    cap,
    limit,
    price,
    target,
    border,
):
    """Let the nodes of one batch after the other choose and move, by one thread; return the gain."""
    gained = np.int64(0)
    for b in range(len(bounds) - 1):
        start, num_rows = bounds[b], bounds[b + 1] - bounds[b]
        _set_prices(indptr[bounds[b + 1]] - indptr[start], load, cap, lasting, per_load, pressure, total, price)
        state = (start, first_node, indptr, indices, node_weight, part, load, cap, limit, price, target, border)
        _choose_parts(np.int64(0), num_rows, *state)
        gained += _move(num_rows, *state)
    return gained


@kernel
def _set_prices(num_entries, load, cap, lasting, per_load, pressure, total, price):
    """Raise or lower the lasting prices for a batch of so many of all entries, and write the prices."""
    share = num_entries / total
    for p in range(len(load)):
        for d in range(load.shape[1]):
            over = load[p, d] / max(1, cap[p, d]) - 1.0
            lasting[p, d] = max(0.0, lasting[p, d] + LASTING * share * per_load[d] * over)
            price[p, d] = lasting[p, d] + pressure * per_load[d] * max(0.0, over)


@kernel
def _choose_parts(
    start, stop, offset, first_node, indptr, indices, node_weight, part, load, cap, limit, price, target, border
):
    """Write to target[start:stop] where rows from offset + start on would go; -1: they stay."""
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    longest = np.int64(0)
    for row in range(offset + start, offset + stop):
        longest = max(longest, indptr[row + 1] - indptr[row])
    near, conn = np.empty(longest, part.dtype), np.zeros(len(load), np.int64)
    last = np.uint64(indptr[offset + stop])
    # Unsigned indices: numba tests every signed one for a negative.
    for i in range(start, stop):
        row = np.uint64(offset + i)
        v = np.uint64(first_node) + row
        target[i] = -1
        if not border[v]:
            continue
        own, low = part[v], np.uint64(indptr[row])
        degree = np.uint64(indptr[row + _STEP]) - low
        inside = np.int64(0)
        for k in range(degree):
            if low + k + _ENTRIES_AHEAD < last:
                prefetch(part, np.int64(indices[low + k + _ENTRIES_AHEAD]))
            p = part[np.uint64(indices[low + k])]
            near[k] = p
            inside += np.int64(p == own)
        border[v] = inside < np.int64(degree)
        at = np.int64(v) & every
        best, score = own, np.float64(inside) - _rent(at, np.int64(own), price, node_weight)
        # Prices are not negative: no part has more than all neighbours outside.
        if np.float64(np.int64(degree) - inside) <= score:
            continue
        for k in range(degree):
            conn[np.uint64(near[k])] += 1
        for k in range(degree):
            p = near[k]
            c = np.float64(conn[np.uint64(p)])
            if c > score:
                c -= _rent(at, np.int64(p), price, node_weight)
                if c > score and has_space(at, np.int64(p), load, limit, node_weight):
                    best, score = p, c
        target[i] = best if best != own else -1
        for k in range(degree):
            conn[np.uint64(near[k])] = 0


@kernel(inline="always")
def _rent(v, part, price, node_weight):
    """Return what a node pays in a part; `v` is its row in `node_weight`."""
    total = 0.0
    for d in range(node_weight.shape[1]):
        total += price[part, d] * node_weight[v, d]
    return total


@kernel
def _move(num_rows, offset, first_node, indptr, indices, node_weight, part, load, cap, limit, price, target, border):
    """Move rows from offset on where they want to go, one after the other, if they gain still; return the gain."""
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    gained = np.int64(0)
    for i in range(num_rows):
        row, other = offset + i, target[i]
        v = first_node + row
        own, gain, at = part[v], np.int64(0), v & every
        if other < 0 or not has_space(at, other, load, limit, node_weight):
            continue
        for e in range(indptr[row], indptr[row + 1]):
            p = part[indices[e]]
            gain += np.int64(p == other) - np.int64(p == own)
        if gain > _rent(at, other, price, node_weight) - _rent(at, own, price, node_weight):
            for d in range(node_weight.shape[1]):
                load[own, d] -= node_weight[v & every, d]
                load[other, d] += node_weight[v & every, d]
            part[v], border[v] = other, True
            for e in range(indptr[row], indptr[row + 1]):
                border[indices[e]] = True
            gained += gain
    return gained
