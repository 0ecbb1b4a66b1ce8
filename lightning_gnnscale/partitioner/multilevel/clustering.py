"""Size-constrained label propagation: the clusters that a level is contracted by."""

from itertools import pairwise

import numpy as np

from ...jit import kernel
from ...rng import fold, mix64
from ...triton_kernels.intrinsics import prefetch
from .cluster_choice import choose_clusters
from .weighted_graph import PART_DTYPE, BlockGraph, RowThreads, WeightedGraph, add_weights, total_weight

NODE_WORK = 8  # what a node costs besides its entries
WINDOW = 1 << 14  # rows, a power of two
# Work of a batch, as `visiting_order` counts it: a fixed part of the method, whatever the threads.
MAX_BATCH_WORK = 1 << 18
MIN_BATCH_WORK = 1 << 8
MIN_SHARED_WORK = 1 << 14  # a smaller batch is not divided among threads
# A pass over a small graph, or over a block on disk, is cut into this many batches.
BATCHES, STREAMED_BATCHES = 128, 32
# Neighbours that a node looks at in its first pass, on disk, in memory: powers of two from 8 on, as tables rely on.
FIRST_SAMPLE, STREAMED_SAMPLE, SAMPLE = 32, 64, 256

_SALT = 0x434C5553  # separates this use of the seed from all others
_MOVES_AHEAD = 16


@kernel
def _order_visits(start, stop, indptr, key, sample, order, reach):
    """Write the rows of windows [start, stop) in the order of their visits, and the work from there up to each.

    Windows of rows, so that what is read lies together; within a window from low to high degree (its number of bits),
    and among equals by an affine permutation of the rows' numbers. The work: NODE_WORK and its sample of entries.

    Args:
        order, reach: (num_rows,) int32 and int64, written in place.

    Returns:
        The range of rows, and their work.
    """
    num_rows = len(indptr) - 1
    begin, end = start * WINDOW, min(stop * WINDOW, num_rows)
    mask = np.uint64(WINDOW - 1)
    factor, shift = (mix64(key) & ~np.uint64(7)) | np.uint64(5), mix64(key ^ np.uint64(1))
    kind = np.empty(WINDOW, np.uint8)
    starts = np.empty(66, np.int64)
    for first in range(begin, end, WINDOW):
        size = min(WINDOW, num_rows - first)
        starts[:] = 0
        for r in range(size):
            degree, bits = indptr[first + r + 1] - indptr[first + r], 0
            while degree:
                degree >>= 1
                bits += 1
            kind[r] = bits
            starts[bits + 1] += 1
        for bits in range(65):
            starts[bits + 1] += starts[bits]
        for i in range(WINDOW):
            r = np.int64((np.uint64(i) * factor + shift) & mask)
            if r < size:
                order[first + starts[kind[r]]] = first + r
                starts[kind[r]] += 1
    total = np.int64(0)
    for i in range(begin, end):
        total += NODE_WORK + min(sample, indptr[order[i] + 1] - indptr[order[i]])
        reach[i] = total
    return begin, end, total


def visiting_order(indptr, key, sample, threads: RowThreads) -> tuple[np.ndarray, np.ndarray]:
    """Return (num_rows,) int32 the rows in the order of their visits, and (num_rows + 1,) the work before each."""
    num_rows = len(indptr) - 1
    order, reach = np.empty(num_rows, np.int32), np.zeros(num_rows + 1, np.int64)
    starts = indptr[:-1:WINDOW]
    ranges = threads.run(_order_visits, np.append(starts, indptr[-1:]), indptr, key, sample, order, reach[1:])
    total = 0
    for begin, end, work in ranges:
        reach[begin + 1 : end + 1] += total
        total += work
    return order, reach


def cluster_nodes(
    graph: WeightedGraph | BlockGraph,
    limit: np.ndarray,
    seed: int,
    threads: RowThreads,
    group: np.ndarray | None = None,
    passes: int = 3,
    label: np.ndarray | None = None,
    after_pass=None,
    sample: int | None = None,
) -> np.ndarray:
    """Cluster nodes so that edges inside clusters weigh much and no cluster weighs more than a limit.

    Nodes are visited window by window, within a window from low to high degree, batch by batch: all nodes of a batch
    choose the cluster that they share most edge weight with, of those that have space, from the same state; then they
    move one after the other, where there is still space. Of a long row a sample is read. Up to 64 neighbours at edges
    of one weight are counted exactly; others are added up in a small table. Of two clusters that meet in a slot only
    one counts: the heavier, or the first where all edges weigh the same. Nodes that are still alone at the end join
    others that would have gone to the same cluster (two-hop clustering).

    Args:
        graph: the graph.
        limit: (D,) int64, weight up to which a cluster grows, below 2**31.
        seed: decides order and ties.
        threads: threads that choose; their number does not change the result.
        group: (num_nodes,) int16; nodes of different groups never share a cluster. None: one group.
        passes: rounds of label propagation, >= 1; ends early when under 1% of the nodes move.
        label: (num_nodes,) int32 or int64, clusters to go on from; changed in place. None: every node alone.
        after_pass: called with (label, passes done) after a pass.
        sample: neighbours that a node looks at, a power of two in [8, 128], in later passes twice as many. None: up to
            256, fewer on disk and in the first pass.

    Returns:
        (num_nodes,) labels, each the id of a node.

    Cost: O(passes * num_entries) time; 8 + 4 D bytes a node besides the labels (with int32 ids).
    Source: Meyerhenke, Sanders and Schulz, SEA 2014; two-hop clustering as in Gottesbüren et al., KaMinPar, ESA 2021.
    """
    num_nodes = graph.num_nodes
    ids = np.int32 if num_nodes <= np.iinfo(np.int32).max else np.int64
    fresh = label is None
    in_memory = isinstance(graph, WeightedGraph)
    later, batches = (SAMPLE, BATCHES) if in_memory else (STREAMED_SAMPLE, STREAMED_BATCHES)
    first, later = (FIRST_SAMPLE, later) if sample is None else (sample, 2 * sample)
    label = np.arange(num_nodes, dtype=ids) if fresh else label
    weight = np.zeros((num_nodes, graph.node_weight.shape[1]), np.int32)
    add_weights(label, graph.node_weight, weight)
    group = np.zeros(1, PART_DTYPE) if group is None else group
    favourite = label.copy()
    limit = np.minimum(limit, np.iinfo(np.int32).max)
    for i in range(passes):
        key, moved = np.uint64(fold(seed, _SALT, i)), 0
        looked_at = first if fresh and i == 0 else later
        for block in graph.blocks():
            state = (block, graph.node_weight, limit, group, label, weight, favourite, key, looked_at)
            moved += _propagate(*state, batches, threads)
        if after_pass is not None:
            after_pass(label, i + 1)
        if moved * 100 < num_nodes:
            break
    # Two-hop clustering: without it hubs, whose clusters are full, would leave most of their leaves alone.
    join_two_hops(graph.node_weight, limit, group, label, weight, favourite)
    return label


def cluster_limit(graph: WeightedGraph | BlockGraph, num_parts: int, per_part: float) -> np.ndarray:
    """Return (D,) int64: what a cluster may weigh so that a part is made of at least `per_part` full clusters."""
    return np.maximum(2, (total_weight(graph) / (per_part * num_parts)).astype(np.int64))


def _propagate(
    block, node_weight, limit, group, label, weight, favourite, key, sample, batches: int, threads: RowThreads
) -> int:
    order, reach = visiting_order(block.indptr, key, sample, threads)
    work = int(reach[-1])
    batch_work = int(np.clip(work // batches, MIN_BATCH_WORK, MAX_BATCH_WORK))
    bounds = np.searchsorted(reach[1:], np.arange(0, work + batch_work, batch_work))
    bounds = np.unique(np.append(bounds, len(order)))
    choice = np.empty((2, int(np.diff(bounds).max(initial=0))), label.dtype)
    state = (*block, node_weight, limit, group, label, weight, key, sample)
    if threads.num_threads == 1 or batch_work < MIN_SHARED_WORK:
        return _take_batches(bounds, order, choice, favourite, *state)
    moved = 0
    for start, stop in pairwise(bounds.tolist()):
        batch = order[start:stop]
        threads.run(choose_clusters, reach[start : stop + 1], batch, choice, *state)
        moved += _join(batch, choice, node_weight, limit, label, weight, favourite, block.first_node)
    return moved


@kernel
def _take_batches(
    bounds,
    order,
    choice,
    favourite,
    first_node,
    indptr,
    indices,
    edge_weight,
    node_weight,
    limit,
    group,
    label,
    weight,
    key,
    sample,
):
    """Let the nodes of one batch after the other choose and move, by one thread; return how many moved."""
    moved = 0
    for b in range(len(bounds) - 1):
        batch = order[bounds[b] : bounds[b + 1]]
        rows = (first_node, indptr, indices, edge_weight)
        state = (node_weight, limit, group, label, weight, key, sample)
        choose_clusters(np.int64(0), len(batch), batch, choice, *rows, *state)
        moved += _join(batch, choice, node_weight, limit, label, weight, favourite, first_node)
    return moved


@kernel
def _join(batch, choice, node_weight, limit, label, weight, favourite, first_node):
    """Move the nodes of a batch, one after the other, where there is still space; return how many moved."""
    every = ~np.uint64(0) if len(node_weight) == len(label) else np.uint64(0)
    flat_weight = weight.reshape(-1)
    moved = 0
    for i in range(len(batch)):
        if i + _MOVES_AHEAD < len(batch):
            prefetch(label, first_node + np.int64(batch[i + _MOVES_AHEAD]))
            prefetch(favourite, first_node + np.int64(batch[i + _MOVES_AHEAD]))
            prefetch(flat_weight, np.int64(choice[0, i + _MOVES_AHEAD]) * node_weight.shape[1])
        v = np.uint64(first_node) + np.uint64(batch[i])  # unsigned: numba tests every signed index for a negative
        own, target = np.uint64(label[v]), np.uint64(choice[0, i])
        favourite[v] = choice[1, i]
        if own == target:
            continue
        fits, alive = True, False
        for d in range(node_weight.shape[1]):
            fits = fits and np.int64(weight[target, d]) + node_weight[v & every, d] <= limit[d]
            alive = alive or weight[target, d] > 0
        if fits and alive:  # a cluster that all have left in this batch has perhaps gone to this one
            for d in range(node_weight.shape[1]):
                weight[own, d] -= node_weight[v & every, d]
                weight[target, d] += node_weight[v & every, d]
            label[v] = target
            moved += 1
    return moved


@kernel
def join_two_hops(node_weight, limit, group, label, weight, favourite):
    """Let nodes that stayed alone join one another where they like the same cluster; `favourite` is used up.

    A node without neighbours likes itself; all of those count as liking one cluster.
    """
    num_nodes, num_dims = len(label), node_weight.shape[1]
    every = np.int64(-1) if len(node_weight) == num_nodes else np.int64(0)
    by_group = np.int64(-1) if len(group) == num_nodes else np.int64(0)
    shared = np.zeros(num_nodes, np.bool_)
    for v in range(num_nodes):
        if label[v] != v:
            shared[v] = shared[label[v]] = True
    waiting, lonely = np.empty(num_nodes, label.dtype), np.empty(256, label.dtype)
    waiting[:] = -1
    lonely[:] = -1
    for v in range(num_nodes):
        if shared[v]:
            continue
        g, liked = group[v & by_group], favourite[v]
        other = lonely[g & 255] if liked == v else waiting[liked]
        if other >= 0 and group[other & by_group] == g:
            fits = True
            for d in range(num_dims):
                fits = fits and np.int64(weight[other, d]) + node_weight[v & every, d] <= limit[d]
            if fits:
                for d in range(num_dims):
                    weight[other, d] += node_weight[v & every, d]
                label[v] = other
                continue
        if liked == v:
            lonely[g & 255] = v
        else:
            waiting[liked] = v
