"""ByteGNN's blocks: small ones merge with the neighbours that they share most edges with, then fill the parts."""

import heapq
from typing import NamedTuple

import numpy as np

from ..graph import id_dtype
from ..jit import kernel


class BlockForest(NamedTuple):
    """Blocks as a union-find forest; the lowest of a merged block's numbers stands for it.

    Attributes:
        parent: (num_blocks,) int64; a root is its own parent.
        labelled: (num_blocks,) int64, nodes of a root with any mask.
        by_mask: (num_blocks, num_masks) int64, nodes of a root by mask.
        nodes: (num_blocks,) int64, nodes of a root.
    """

    parent: np.ndarray
    labelled: np.ndarray
    by_mask: np.ndarray
    nodes: np.ndarray


class BlockEdges(NamedTuple):
    """The quotient's entries as one linked list a block, so that two lists become one in constant time.

    Attributes:
        other: (num_entries,) ids, a block that the neighbour belongs to.
        weight: (num_entries,) int64, the edges shared with it.
        following: (num_entries,) int32 or int64, the next entry; -1 at the end.
        head, tail: (num_blocks,) int64, first and last entry of a root; -1 where there is none.
    """

    other: np.ndarray
    weight: np.ndarray
    following: np.ndarray
    head: np.ndarray
    tail: np.ndarray


def link_rows(indptr: np.ndarray, other: np.ndarray, weight: np.ndarray) -> BlockEdges:
    """Return the rows of a quotient graph as linked lists; its neighbours and weights are taken over."""
    starts, stops = indptr[:-1], indptr[1:]
    following = np.arange(1, len(other) + 1, dtype=id_dtype(len(other) + 1))
    following[stops[stops > starts] - 1] = -1
    head, tail = np.where(stops > starts, starts, -1), np.where(stops > starts, stops - 1, -1)
    return BlockEdges(other, weight, following, head, tail)


def merge_blocks(blocks: BlockForest, edges: BlockEdges, num_parts: int) -> None:
    """Merge blocks, those with the fewest labelled nodes first, while they stay small; both arguments are changed.

    A block joins the neighbour with which it shares most edges (ties: the lowest), of those with which it has at most
    1 / (8 * num_parts) of all labelled nodes; the merged block is ranked anew.
    """
    _merge(*blocks, *edges, num_parts)


def assign_blocks(
    blocks: BlockForest, edges: BlockEdges, num_parts: int, num_nodes: int, mask_weight: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """Assign the blocks to parts, starting with those that have the most nodes of one mask.

    Args:
        blocks, edges: The blocks after merging, and the edges between them.
        num_parts: Number of parts.
        num_nodes: Number of nodes in the graph.
        mask_weight: (num_masks,) float64, see `neighborhood_block`.
        sizes: (num_parts,) int64 zeros; filled in place with the number of nodes in each part.

    Returns:
        (num_blocks,) int32 part of each block, merged blocks included.
    """
    roots = np.flatnonzero(blocks.parent == np.arange(len(blocks.parent)))
    order = roots[np.argsort(-blocks.by_mask[roots].max(axis=1), kind="stable")]
    mean = blocks.by_mask[roots].sum(axis=0) / num_parts
    part = np.full(len(blocks.parent), -1, np.int32)
    _assign(order, *blocks, *edges, num_nodes, mask_weight, mean, sizes, part)
    return part


@kernel
def _find(parent, b):
    while parent[b] != b:
        parent[b] = parent[parent[b]]
        b = parent[b]
    return b


@kernel
def _shorten_list(b, parent, other, weight, following, head, tail, entry_of):
    """Leave one entry for every neighbouring root in b's list; `entry_of` holds -1 everywhere, before and after."""
    last, entry = -1, head[b]
    while entry >= 0:
        after = following[entry]
        root = _find(parent, other[entry])
        if root != b and entry_of[root] >= 0:
            weight[entry_of[root]] += weight[entry]
        elif root != b:
            other[entry], entry_of[root] = root, entry
            if last < 0:
                head[b] = entry
            else:
                following[last] = entry
            last = entry
        entry = after
    tail[b] = last
    if last < 0:
        head[b] = -1
        return
    following[last] = -1
    entry = head[b]
    while entry >= 0:
        entry_of[other[entry]] = -1
        entry = following[entry]


@kernel
def _join_lists(a, b, following, head, tail):
    """Append b's list to a's."""
    if head[b] < 0:
        return
    if head[a] < 0:
        head[a] = head[b]
    else:
        following[tail[a]] = head[b]
    tail[a] = tail[b]


@kernel
def _merge(parent, labelled, by_mask, nodes, other, weight, following, head, tail, num_parts):
    num_blocks, all_labelled = len(parent), labelled.sum()
    entry_of = np.full(num_blocks, -1, np.int64)
    waiting = [labelled[b] * num_blocks + b for b in range(num_blocks)]
    heapq.heapify(waiting)
    while len(waiting) > 0:
        rank = heapq.heappop(waiting)
        count, b = rank // num_blocks, rank % num_blocks
        if 2 * count * 8 * num_parts > all_labelled:
            break  # the others are no smaller: nothing fits any more
        if parent[b] != b or labelled[b] != count:
            continue  # it has merged since
        # The neighbour that shares most edges, of those with which the block stays small.
        _shorten_list(b, parent, other, weight, following, head, tail, entry_of)
        best, most = -1, np.int64(0)
        entry = head[b]
        while entry >= 0:
            root = other[entry]
            if (labelled[root] + count) * 8 * num_parts <= all_labelled and (
                weight[entry] > most or (weight[entry] == most and root < best)
            ):
                best, most = root, weight[entry]
            entry = following[entry]
        if best < 0:
            continue
        low, high = min(b, best), max(b, best)
        parent[high] = low
        labelled[low] += labelled[high]
        nodes[low] += nodes[high]
        for m in range(by_mask.shape[1]):
            by_mask[low, m] += by_mask[high, m]
        _join_lists(low, high, following, head, tail)
        heapq.heappush(waiting, labelled[low] * num_blocks + low)


@kernel
def _assign(
    order,
    parent,
    labelled,
    by_mask,
    nodes,
    other,
    weight,
    following,
    head,
    tail,
    num_nodes,
    mask_weight,
    mean,
    sizes,
    part,
):
    num_parts, num_masks = len(sizes), len(mean)
    load, cross = np.zeros((num_parts, num_masks), np.int64), np.zeros(num_parts, np.int64)
    for i in range(len(order)):
        b = order[i]
        cross[:] = 0
        entry = head[b]
        while entry >= 0:
            neighbor = part[_find(parent, other[entry])]
            if neighbor >= 0:
                cross[neighbor] += weight[entry]
            entry = following[entry]
        # The paper's score CE * BS: edges into the part over its size, times the room it has for labelled nodes.
        best, best_score = -1, 0.0
        for j in range(num_parts):
            room = 1.0
            for m in range(num_masks):
                if mean[m] > 0:
                    room -= mask_weight[m] * load[j, m] / mean[m]
            score = (cross[j] / max(sizes[j], 1) + 1 / num_nodes) * max(room, 0.0)
            if best < 0 or score > best_score or (score == best_score and sizes[j] < sizes[best]):
                best, best_score = j, score
        part[b] = best
        sizes[best] += nodes[b]
        for m in range(num_masks):
            load[best, m] += by_mask[b, m]
    for b in range(len(parent)):
        part[b] = part[_find(parent, b)]
