"""Refinement of a graph on disk in one pass a round: batch by batch, nodes move where they gain more than a price."""

from itertools import pairwise

import numpy as np

from ...jit import kernel
from ...triton_kernels.intrinsics import prefetch
from .row_form import has_space
from .weighted_graph import PART_DTYPE, BlockGraph, RowThreads, total_weight

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
        for start, stop in pairwise(bounds.tolist()):
            over, share = load / cap - 1.0, (block.indptr[stop] - block.indptr[start]) / max(1, graph.total_edge_weight)
            lasting[:] = np.maximum(0.0, lasting + LASTING * share * per_load * over)
            price[:] = lasting + pressure * per_load * np.maximum(0.0, over)
            state = (start, *block[:3], graph.node_weight, part, load, cap, most, price, target)
            threads.run(_choose_parts, block.indptr[start : stop + 1], *state)
            gained += _move(stop - start, *state)
    return gained


@kernel
def _choose_parts(start, stop, offset, first_node, indptr, indices, node_weight, part, load, cap, limit, price, target):
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
        own, low = part[v], np.uint64(indptr[row])
        degree = np.uint64(indptr[row + _STEP]) - low
        inside = np.int64(0)
        for k in range(degree):
            if low + k + _ENTRIES_AHEAD < last:
                prefetch(part, np.int64(indices[low + k + _ENTRIES_AHEAD]))
            p = part[np.uint64(indices[low + k])]
            near[k] = p
            inside += np.int64(p == own)
        at = np.int64(v) & every
        best, score = own, np.float64(inside) - _rent(at, np.int64(own), price, node_weight)
        # Prices are not negative: no part has more than all neighbours outside.
        if np.float64(np.int64(degree) - inside) <= score:
            target[i] = -1
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


@kernel
def _rent(v, part, price, node_weight):
    """Return what a node pays in a part; `v` is its row in `node_weight`."""
    total = 0.0
    for d in range(node_weight.shape[1]):
        total += price[part, d] * node_weight[v, d]
    return total


@kernel
def _move(num_rows, offset, first_node, indptr, indices, node_weight, part, load, cap, limit, price, target):
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
            part[v] = other
            gained += gain
    return gained
