"""SPRING's second half: clusters merge towards their richest neighbours, then fill the parts.

Everything works inside the arrays of the clustering pass. A cluster is named by its lowest node; that node's row is
the cluster's row, and the columns change their meaning as the pass's own values are no longer needed.
"""

import numpy as np

from ..jit import kernel
from . import phases

# Columns of the node rows from here on: of any node, its parent in the union-find forest, or minus the size of the
# cluster for the root; of a root, the node whose richest neighbour has the largest degree (-1: no edge at all).
_PARENT, _BEST, _RICHEST, _RICHEST_DEGREE = range(4)


def merge_and_assign(nodes: np.ndarray, volume: np.ndarray, num_parts: int, beta: float) -> np.ndarray:
    """Merge clusters, smallest first, and give them to parts, largest first.

    Args:
        nodes: (num_nodes, 4), rows of a finished clustering pass; destroyed.
        volume: (num_nodes,), destroyed: its memory holds the heap.
        num_parts: in [1, num_nodes].
        beta: a merged cluster has at most beta * num_nodes / num_parts nodes.

    Returns:
        (num_nodes,) int32 part ids.

    Cost: O(num_nodes log num_nodes) time; with the arguments 24 bytes a node (int32 ids).
    Source: Huang et al., SDT-GNN, Algorithm 1, merging and assignment. A cluster that has grown is ranked anew.
    """
    num_nodes = len(nodes)
    if volume.dtype == nodes.dtype:
        heap, place = volume, np.empty(num_nodes, nodes.dtype)
    else:
        halves = volume.view(nodes.dtype)
        heap, place = halves[:num_nodes], halves[num_nodes:]
    limit = int(beta * num_nodes / num_parts)
    with phases.phase("merging"):
        _name_clusters(nodes, heap)
        num_clusters = _list_roots(nodes, heap, place)
        num_merges = _merge_clusters(nodes, heap, place, num_clusters, limit)
    with phases.phase("assignment"):
        num_roots = _list_roots(nodes, heap, place)
        largest, oversized = _assign_clusters(nodes, heap, place, num_roots, np.zeros(num_parts, np.int64), limit)
        part_id = heap.astype(np.int32, copy=volume.dtype != nodes.dtype)
    phases.note(clusters=num_clusters, merges=num_merges, largest_cluster=largest, oversized_clusters=oversized)
    if oversized:
        phases.warn(
            f"SPRING: {oversized} clusters have more nodes than a part should (the largest {largest}, the bound "
            f"{limit}), so the parts are unbalanced; a smaller tau_vol or tau_factor makes smaller clusters"
        )
    return part_id


@kernel
def _name_clusters(nodes, lowest):
    """Turn the clusters' founders into forests of depth one whose roots are the lowest nodes; find the best node."""
    lowest[:] = -1
    for v in range(len(nodes)):
        founder, degree = nodes[v, 0], nodes[v, 1]
        if degree == 0:
            nodes[v, _PARENT], nodes[v, _BEST] = -1, -1
            continue
        if lowest[founder] < 0:
            lowest[founder] = v
            nodes[v, _PARENT], nodes[v, _BEST] = -1, v
            continue
        root = lowest[founder]
        nodes[v, _PARENT] = root
        nodes[root, _PARENT] -= 1
        if nodes[v, _RICHEST_DEGREE] > nodes[nodes[root, _BEST], _RICHEST_DEGREE]:
            nodes[root, _BEST] = v


@kernel
def _list_roots(nodes, heap, place):
    """Write the roots that have edges to the front of the heap, ascending; return how many."""
    count = 0
    for v in range(len(nodes)):
        if nodes[v, _PARENT] < 0 and nodes[v, _BEST] >= 0:
            heap[count], place[v] = v, count
            count += 1
    return count


@kernel
def _find(nodes, v):
    """Return the root of v's cluster, and hang the nodes on the way directly under it."""
    root = v
    while nodes[root, _PARENT] >= 0:
        root = nodes[root, _PARENT]
    while nodes[v, _PARENT] >= 0:
        above = nodes[v, _PARENT]
        nodes[v, _PARENT] = root
        v = above
        if v == root:
            break
    return root


@kernel
def _before(nodes, sign, a, b):
    """Whether root a comes out of the heap before b: by size, ascending for sign 1, then by name."""
    size_a, size_b = -sign * nodes[a, _PARENT], -sign * nodes[b, _PARENT]
    return size_a < size_b or (size_a == size_b and a < b)


@kernel
def _sift_down(nodes, heap, place, length, sign, slot):
    root = heap[slot]
    while True:
        child = 2 * slot + 1
        if child >= length:
            break
        if child + 1 < length and _before(nodes, sign, heap[child + 1], heap[child]):
            child += 1
        if not _before(nodes, sign, heap[child], root):
            break
        heap[slot] = heap[child]
        place[heap[slot]] = slot
        slot = child
    heap[slot] = root
    place[root] = slot


@kernel
def _sift_up(nodes, heap, place, sign, slot):
    root = heap[slot]
    while slot > 0 and _before(nodes, sign, root, heap[(slot - 1) // 2]):
        heap[slot] = heap[(slot - 1) // 2]
        place[heap[slot]] = slot
        slot = (slot - 1) // 2
    heap[slot] = root
    place[root] = slot


@kernel
def _heapify(nodes, heap, place, length, sign):
    for slot in range(length // 2 - 1, -1, -1):
        _sift_down(nodes, heap, place, length, sign, slot)


@kernel
def _pop(nodes, heap, place, length, sign):
    top = heap[0]
    place[top] = -1
    if length > 1:
        heap[0] = heap[length - 1]
        place[heap[0]] = 0
        _sift_down(nodes, heap, place, length - 1, sign, 0)
    return top


@kernel
def _merge_clusters(nodes, heap, place, length, limit):
    """Let each cluster, smallest first, join the cluster of its best node's richest neighbour where it fits."""
    _heapify(nodes, heap, place, length, 1)
    merges = 0
    while length > 0:
        cluster = _pop(nodes, heap, place, length, 1)
        length -= 1
        best = nodes[cluster, _BEST]
        target = _find(nodes, nodes[best, _RICHEST])
        if target == cluster or -nodes[target, _PARENT] - nodes[cluster, _PARENT] > limit:
            continue
        nodes[target, _PARENT] += nodes[cluster, _PARENT]
        nodes[cluster, _PARENT] = target
        rival = nodes[target, _BEST]
        degree, rival_degree = nodes[best, _RICHEST_DEGREE], nodes[rival, _RICHEST_DEGREE]
        if degree > rival_degree or (degree == rival_degree and best < rival):
            nodes[target, _BEST] = best
        merges += 1
        if place[target] < 0:  # it had its turn; larger now, it has another one
            heap[length] = target
            length += 1
            _sift_up(nodes, heap, place, 1, length - 1)
        else:
            _sift_down(nodes, heap, place, length, 1, place[target])
    return merges


@kernel
def _assign_clusters(nodes, heap, place, length, filled, limit):
    """Fill the parts: clusters by descending size, then nodes without edges; write part ids over the heap.

    Returns:
        The size of the largest cluster, and the number of clusters above the limit.
    """
    parts = np.arange(len(filled))
    largest, oversized = 0, 0
    _heapify(nodes, heap, place, length, -1)
    while length > 0:
        cluster = _pop(nodes, heap, place, length, -1)
        length -= 1
        size = np.int64(-nodes[cluster, _PARENT])
        largest = max(largest, size)
        oversized += size > limit
        nodes[cluster, _BEST] = _fill_least(filled, parts, size)
    for v in range(len(nodes)):
        if nodes[v, _PARENT] < 0 and nodes[v, _BEST] < 0:
            heap[v] = _fill_least(filled, parts, 1)
        else:
            heap[v] = nodes[_find(nodes, v), _BEST]
    return largest, oversized


@kernel
def _fill_least(filled, parts, size):
    """Add size to the least filled part, the lowest of several; `parts` is a heap by (filled, part)."""
    chosen = parts[0]
    filled[chosen] += size
    slot = 0
    while True:
        child = 2 * slot + 1
        if child >= len(parts):
            break
        left = parts[child]
        if child + 1 < len(parts):
            right = parts[child + 1]
            if filled[right] < filled[left] or (filled[right] == filled[left] and right < left):
                child, left = child + 1, right
        if filled[left] > filled[chosen] or (filled[left] == filled[chosen] and left > chosen):
            break
        parts[slot] = left
        slot = child
    parts[slot] = chosen
    return chosen
