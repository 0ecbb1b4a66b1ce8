"""SPRING: clusters grown from one pass over the edges, merged towards their richest neighbours, packed into parts."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..errors import check_number
from ..jit import kernel
from ..triton_kernels.intrinsics import prefetch
from . import phases
from .constraints import fill_least, judge, node_weights, pack_several, part_loads, resolve_constraints
from .graph_input import GraphInput, graph_partitioner

_CLUSTERING = "clustering"  # a phase, also of a checkpoint

# Columns of SpringState.nodes.
CLUSTER, DEGREE, RICHEST, RICHEST_DEGREE = range(4)

_ROWS_AHEAD, _VOLUMES_AHEAD = 24, 12  # edges; a cluster's volume is asked for once its node's row has come


class SpringState(NamedTuple):
    """The clustering pass as a value: saved after any chunk and given back, the pass goes on from there.

    Attributes:
        nodes: (num_nodes, 4) `id_dtype(num_nodes)`: the cluster of a node, named by the node that founded it; its
            degree; its richest neighbour so far (-1: none) and that one's degree. One row is one cache access.
        volume: (num_nodes,) int32 or int64, sum of degrees by cluster name.
    """

    nodes: np.ndarray
    volume: np.ndarray

    @classmethod
    def start(cls, degree: np.ndarray, max_volume: int) -> "SpringState":
        """Put every node into a cluster of its own; `degree` becomes the volumes where its dtype is wide enough."""
        nodes = np.empty((len(degree), 4), degree.dtype)
        # A move starts from two clusters within the bound, so no volume passes twice the bound or the top degree.
        wide = 2 * max_volume > np.iinfo(degree.dtype).max
        volume = degree.astype(np.int64) if wide else degree
        _found_clusters(degree, nodes)
        return cls(nodes, volume)


@graph_partitioner("spring", memory=lambda num_nodes, *_: 24 * num_nodes)
def spring(
    graph: GraphInput,
    num_parts: int,
    *,
    tau_vol: float | None = None,
    tau_factor: float = 0.1,
    beta: float = 1.05,
) -> np.ndarray:
    """Partition by streaming clustering, merging and packing; deterministic, so the seed has no effect.

    Args:
        graph: the graph; its masks are those that are balanced.
        graph.balance: {"nodes": 1.05, "train": 1.05}, any of them: the largest part over the mean. Clusters are then
            packed by all of them at once, the heaviest first, and what is not met is reported: SPRING's only bound
            while it merges is `beta`. None: by their nodes.
        tau_vol: volume (sum of degrees) up to which a cluster takes part in moves, >= 0; tested before the move. None:
            tau_factor * 2 * num_edges / num_parts.
        tau_factor: dimensionless, >= 0.
        beta: a merged cluster has at most beta * num_nodes / num_parts nodes, >= 1.

    Returns:
        (num_nodes,) int32 part ids. Nodes without an edge go to the least filled parts.

    Cost: O(num_nodes log num_nodes + num_edges) time in two passes; 24 bytes a node (ids in int32).
    Source: Huang et al., SDT-GNN, Algorithm 1 (also CATGNN). Differs: ties are settled by the lowest id; a node that
        never meets an edge is placed as well.
    """
    check_number("partitioner.tau_factor", tau_factor, at_least=0)
    check_number("partitioner.beta", beta, at_least=1)
    if tau_vol is not None:
        check_number("partitioner.tau_vol", tau_vol, at_least=0)
    state = _clusters(graph, lambda edges: tau_factor * 2 * edges / num_parts if tau_vol is None else tau_vol)
    if not graph.balance:
        return merge_and_assign(*state, num_parts, beta)
    degree = state.nodes[:, DEGREE].copy()
    constraints = resolve_constraints(graph.balance, graph.masks, degree, num_parts)
    cluster = merge_and_assign(*state, num_parts, beta, packs=False)
    with phases.phase("assignment"):
        weight = np.zeros((int(cluster.max()) + 1, len(constraints.names)), np.int64)
        np.add.at(weight, cluster, node_weights(constraints, degree, np.int64))
        part_id = pack_several(weight, num_parts)[cluster]
    judge(constraints, part_loads(constraints, degree, part_id, num_parts))
    return part_id


def _clusters(graph: GraphInput, volume_bound: Callable[[int], float]) -> SpringState:
    """Return the clusters after one pass over the edges; `volume_bound` is called with their number."""
    degree, left = graph.open_simple(), graph.left_in(_CLUSTERING)
    num_edges = graph.simple.num_edges
    max_volume = int(min(volume_bound(num_edges), 2 * num_edges))  # volumes are whole; none passes the sum of degrees
    state = SpringState(**left) if left else SpringState.start(degree, max_volume)
    del degree, left
    with phases.phase(_CLUSTERING):
        graph.run_pass(_CLUSTERING, lambda src, dst: _cluster_block(src, dst, *state, max_volume), state._asdict)
    return state


@kernel
def _found_clusters(degree, nodes):
    for v in range(len(degree)):
        nodes[v, CLUSTER], nodes[v, DEGREE] = v, degree[v]
        nodes[v, RICHEST], nodes[v, RICHEST_DEGREE] = -1, 0


@kernel
def _cluster_block(src, dst, nodes, volume, max_volume):
    """Let the ends of each edge move together, and remember each end's richest neighbour."""
    length, rows = len(src), nodes.reshape(-1)
    for i in range(length):
        if i + _ROWS_AHEAD < length:
            prefetch(rows, 4 * np.int64(src[i + _ROWS_AHEAD]))
            prefetch(rows, 4 * np.int64(dst[i + _ROWS_AHEAD]))
            prefetch(volume, nodes[src[i + _VOLUMES_AHEAD], CLUSTER])
            prefetch(volume, nodes[dst[i + _VOLUMES_AHEAD], CLUSTER])
        u, v = src[i], dst[i]
        cluster_u, cluster_v = nodes[u, CLUSTER], nodes[v, CLUSTER]
        degree_u, degree_v = nodes[u, DEGREE], nodes[v, DEGREE]
        # Algorithm 1, clustering: while neither cluster is full, the end in the one with less volume moves over.
        if cluster_u != cluster_v:
            volume_u, volume_v = volume[cluster_u], volume[cluster_v]
            if volume_u <= max_volume and volume_v <= max_volume:
                if volume_u <= volume_v:
                    volume[cluster_u], volume[cluster_v] = volume_u - degree_u, volume_v + degree_u
                    nodes[u, CLUSTER] = cluster_v
                else:
                    volume[cluster_u], volume[cluster_v] = volume_u + degree_v, volume_v - degree_v
                    nodes[v, CLUSTER] = cluster_u
        # The richest neighbour of each end, by which clusters merge later; of several the first one seen stays.
        if degree_v > nodes[u, RICHEST_DEGREE]:
            nodes[u, RICHEST], nodes[u, RICHEST_DEGREE] = v, degree_v
        if degree_u > nodes[v, RICHEST_DEGREE]:
            nodes[v, RICHEST], nodes[v, RICHEST_DEGREE] = u, degree_u


# Columns of the node rows from here on: of any node, its parent in the union-find forest, or minus the size of the
# cluster for the root; of a root, the node whose richest neighbour has the largest degree (-1: no edge at all).
_PARENT, _BEST, _RICHEST, _RICHEST_DEGREE = range(4)


def merge_and_assign(
    nodes: np.ndarray, volume: np.ndarray, num_parts: int, beta: float, packs: bool = True
) -> np.ndarray:
    """Merge clusters, smallest first, and give them to parts, largest first.

    Args:
        nodes, volume: a finished clustering pass; destroyed, as the memory of `volume` holds the heap.
        beta: a merged cluster has at most beta * num_nodes / num_parts nodes.
        packs: False returns the (num_nodes,) int32 number of each node's cluster instead of its part.

    Cost: O(num_nodes log num_nodes) time; with the arguments 24 bytes a node (int32 ids).
    Source: Huang et al., SDT-GNN, Algorithm 1, merging and assignment. A cluster that has grown is ranked again.
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
    if not packs:
        _name_roots(nodes, heap)
        return np.unique(heap, return_inverse=True)[1].astype(np.int32)
    with phases.phase("assignment"):
        num_roots = _list_roots(nodes, heap, place)
        filled, parts = np.zeros(num_parts, np.int64), np.arange(num_parts)
        largest, oversized = _assign_clusters(nodes, heap, place, num_roots, filled, parts, limit)
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
    """Return the root of v's cluster, and hang the nodes on the way directly under it; v: int64."""
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


@kernel(inline="always")
def _before(nodes, sign, a, b):
    """Whether root a comes out of the heap before b: by size, ascending for sign 1, then by name."""
    size_a, size_b = -sign * nodes[a, _PARENT], -sign * nodes[b, _PARENT]
    return size_a < size_b or (size_a == size_b and a < b)


@kernel
def _sift_down(nodes, heap, place, length, sign, slot):
    """Let the root in a slot sink to its place; callers give int64 throughout, so that this is compiled once."""
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


@kernel(inline="always")
def _sift_up(nodes, heap, place, sign, slot):
    root = heap[slot]
    while slot > 0 and _before(nodes, sign, root, heap[(slot - 1) // 2]):
        heap[slot] = heap[(slot - 1) // 2]
        place[heap[slot]] = slot
        slot = (slot - 1) // 2
    heap[slot] = root
    place[root] = slot


@kernel(inline="always")
def _heapify(nodes, heap, place, length, sign):
    for slot in range(length // 2 - 1, -1, -1):
        _sift_down(nodes, heap, place, length, sign, slot)


@kernel(inline="always")
def _pop(nodes, heap, place, length, sign):
    top = heap[0]
    place[top] = -1
    if length > 1:
        heap[0] = heap[length - 1]
        place[heap[0]] = 0
        _sift_down(nodes, heap, place, length - 1, sign, np.int64(0))
    return top


@kernel
def _merge_clusters(nodes, heap, place, length, limit):
    """Let each cluster, smallest first, join the cluster of its best node's richest neighbour where it fits."""
    ascending, merges = np.int64(1), 0
    _heapify(nodes, heap, place, length, ascending)
    while length > 0:
        cluster = _pop(nodes, heap, place, length, ascending)
        length -= 1
        # Algorithm 1, merging: the cluster's representative is the node whose richest neighbour has most edges; the
        # cluster joins that neighbour's, where the two together stay within the bound.
        best = nodes[cluster, _BEST]
        target = _find(nodes, np.int64(nodes[best, _RICHEST]))
        if target == cluster or -nodes[target, _PARENT] - nodes[cluster, _PARENT] > limit:
            continue
        nodes[target, _PARENT] += nodes[cluster, _PARENT]
        nodes[cluster, _PARENT] = target
        rival = nodes[target, _BEST]
        degree, rival_degree = nodes[best, _RICHEST_DEGREE], nodes[rival, _RICHEST_DEGREE]
        if degree > rival_degree or (degree == rival_degree and best < rival):
            nodes[target, _BEST] = best
        merges += 1
        if place[target] < 0:  # it had its turn; it is larger now and gets another one
            heap[length] = target
            length += 1
            _sift_up(nodes, heap, place, ascending, length - 1)
        else:
            _sift_down(nodes, heap, place, length, ascending, np.int64(place[target]))
    return merges


@kernel
def _name_roots(nodes, out):
    """Write the root of each node's cluster; a node without edges is its own."""
    for v in range(len(nodes)):
        out[v] = _find(nodes, v)


@kernel
def _assign_clusters(nodes, heap, place, length, filled, parts, limit):
    """Fill the parts: clusters by descending size, then nodes without edges; write part ids over the heap.

    `filled` and `parts` are (num_parts,) zeros and the numbers of the parts, a heap by what they hold. Returns the size
    of the largest cluster, and the number of clusters above the limit.
    """
    descending, largest, oversized = np.int64(-1), 0, 0
    # Algorithm 1, assignment: clusters by descending size, each to the least filled part; then isolated nodes.
    _heapify(nodes, heap, place, length, descending)
    while length > 0:
        cluster = _pop(nodes, heap, place, length, descending)
        length -= 1
        size = np.int64(-nodes[cluster, _PARENT])
        largest = max(largest, size)
        oversized += size > limit
        nodes[cluster, _BEST] = fill_least(filled, parts, size)
    for v in range(len(nodes)):
        if nodes[v, _PARENT] < 0 and nodes[v, _BEST] < 0:
            heap[v] = fill_least(filled, parts, np.int64(1))
        else:
            heap[v] = nodes[_find(nodes, v), _BEST]
    return largest, oversized
