"""2PS-L: nodes are clustered from one pass, and every edge goes to the part of one of its two clusters."""

from typing import NamedTuple

import numpy as np

from ..errors import check_number
from ..jit import kernel
from ..rng import below, combine, fold
from ..triton_kernels.intrinsics import prefetch
from . import phases
from .constraints import pack_in_order
from .graph_input import GraphInput, graph_partitioner
from .vertex_cut import EdgePass, place_edges

_SALT = 0x3250534C  # separates this use of the seed from all others
_ROWS_AHEAD, _VOLUMES_AHEAD = 24, 12  # edges; a cluster's volume is asked for once its node's row has come

# Columns of TwoPhaseState.nodes; clusters are named while they form, and known by volume and part from then on.
_CLUSTER, _DEGREE, _PART, _SETS = range(4)
_VOLUME = _CLUSTER
_ONE = np.uint64(1)


class TwoPhaseState(NamedTuple):
    """How far a pass has come.

    Attributes:
        nodes: (num_nodes, 3 + num_words) uint32, or uint64 where ids or volumes are too large: the cluster of a node,
            named by the node that founded it, and once clusters are packed its volume; the degree; the part of the
            cluster; the replica set, part 0 in the lowest bit of the first word. One row is one cache access.
        volume: (num_nodes,) like `nodes`, sum of degrees by cluster name; (0,) once clusters are packed.
        load: (num_parts,) int64, edges placed.
        bounds: (2,) int64: the volume that a cluster may reach by a move, and the edges that a part may hold.
    """

    nodes: np.ndarray
    volume: np.ndarray
    load: np.ndarray
    bounds: np.ndarray

    @classmethod
    def start(cls, degree: np.ndarray, num_parts: int, max_volume: int, capacity: int) -> "TwoPhaseState":
        """Put every node into a cluster of its own; `degree` becomes the volumes where it is wide enough."""
        word = np.dtype(np.uint64 if degree.itemsize > 4 or max_volume > np.iinfo(np.uint32).max else np.uint32)
        num_words = -(-num_parts // (8 * word.itemsize))
        nodes = np.zeros((len(degree), _SETS + num_words), word)
        nodes[:, _CLUSTER] = np.arange(len(degree), dtype=word)
        nodes[:, _DEGREE] = degree
        volume = degree.astype(word, copy=False) if degree.itemsize < word.itemsize else degree.view(word)
        return cls(nodes, volume, np.zeros(num_parts, np.int64), np.array([max_volume, capacity], np.int64))


@graph_partitioner("two_phase")
def two_phase(
    graph: GraphInput,
    num_parts: int,
    *,
    max_volume: float | None = None,
    alpha: float = 1.05,
    masters: str = "majority",
) -> np.ndarray:
    """Place each edge in the part of one of its two clusters, and give each node a master among its parts.

    Clustering: each edge lets the end whose cluster has less volume without it move to the other end's cluster, if
    that one stays within `max_volume`. Clusters go to parts by descending volume, each to the part with the least.
    Edges whose clusters lie in one part are placed there in one pass; each of the others, in a further pass, in that
    one of its two clusters' parts that scores higher, with A(v) the parts that hold an edge of v so far:

        score(part) = g(u) + g(v) + s(u) + s(v)
        g(u) = 1 + (1 - degree(u) / (degree(u) + degree(v))) if part in A(u) else 0
        s(u) = volume(cluster of u) / (volume(cluster of u) + volume(cluster of v)) if that cluster lies in part else 0

    No part holds more than alpha * num_edges / num_parts edges: where there is no space in a cluster's part the edge
    goes to the part that its end with the higher degree hashes to, and if that is full to the least loaded one.

    Args:
        graph: the graph, without `balance`: this method balances edges, see `alpha`. Its seed is that of the hash, and
            of masters="random".
        max_volume: Largest sum of degrees that a cluster may reach by a move, >= 0. None: 2 * num_edges / num_parts.
        alpha: Largest allowed load over the mean, >= 1; at least the mean rounded up is allowed.
        masters: "majority": the part with most of a node's edges, the lowest one on a tie; "last": the part of the edge
            that was placed last, edges inside a part coming before all others; "random": one of its parts, by a hash of
            (seed, node).

    Returns:
        (num_nodes,) int32 part ids. Nodes without an edge go to the parts with the fewest nodes.

    Cost: four passes; time does not grow with num_parts. Memory a node: 12 + 4 * ceil(num_parts / 32) bytes (ids in
        int32), and the masters': 4 bytes; for "majority" num_parts bytes with up to 16 parts, 4 + min(degree,
        num_parts) with more. Before edges are placed there are 8 bytes a node and 28 a cluster instead of the masters'.
    Source: Mayer et al., Out-of-Core Edge Partitioning at Linear Run-Time, ICDE 2022, Algorithms 1 and 2, one
        clustering pass. Settled: u moves where both ends' clusters have equal volume without them; ties of volume go
        to the lowest founder, of scores and loads to the lowest part, of degrees to the lowest id.
    """
    check_number("partitioner.alpha", alpha, at_least=1)
    if max_volume is not None:
        check_number("partitioner.max_volume", max_volume, at_least=0)
    key = np.uint64(fold(graph.seed, _SALT))

    def start(degree) -> TwoPhaseState:
        num_edges = graph.simple.num_edges
        volume = 2 * num_edges / num_parts if max_volume is None else max_volume
        capacity = max(int(alpha * num_edges / num_parts), -(-num_edges // num_parts))
        # Volumes are whole, and none passes the sum of all degrees.
        return TwoPhaseState.start(degree, num_parts, int(min(volume, 2 * num_edges)), capacity)

    def cluster(src, dst, state: TwoPhaseState, part) -> int:
        _cluster(src, dst, state.nodes, state.volume, state.bounds[0])
        return 0

    def place_inside(src, dst, state: TwoPhaseState, part) -> int:
        return _place_inside(src, dst, state.nodes, state.load, state.bounds[1], key, part)

    def place_between(src, dst, state: TwoPhaseState, part) -> int:
        return _place_between(src, dst, state.nodes, state.load, state.bounds[1], key, part)

    passes = (
        EdgePass("clustering", cluster),
        EdgePass("prepartitioning", place_inside, begin=_pack_clusters),
        EdgePass("placing", place_between),
    )
    return place_edges(graph, num_parts, masters, TwoPhaseState, start, passes)


def _pack_clusters(state: TwoPhaseState) -> TwoPhaseState:
    """Give clusters to parts; from here on a node's row holds its cluster's part and volume."""
    names = np.flatnonzero(state.volume)
    volume = state.volume[names].astype(np.int64)
    order = np.argsort(-volume, kind="stable")
    part_of_cluster = np.zeros(len(state.nodes), np.int32)
    part_of_cluster[names[order]] = pack_in_order(volume[order], np.zeros(len(state.load), np.int64))
    _describe_clusters(state.nodes, state.volume, part_of_cluster)
    phases.note(clusters=len(names), largest_cluster_volume=int(volume.max(initial=0)))
    return state._replace(volume=state.volume[:0].copy())


@kernel
def _cluster(src, dst, nodes, volume, max_volume):
    """Let one end of each edge move to the cluster of the other."""
    length, width, rows = len(src), nodes.shape[1], nodes.reshape(-1)
    for i in range(length):
        if i + _ROWS_AHEAD < length:
            prefetch(rows, width * np.int64(src[i + _ROWS_AHEAD]))
            prefetch(rows, width * np.int64(dst[i + _ROWS_AHEAD]))
            prefetch(volume, np.int64(nodes[src[i + _VOLUMES_AHEAD], _CLUSTER]))
            prefetch(volume, np.int64(nodes[dst[i + _VOLUMES_AHEAD], _CLUSTER]))
        u, v = src[i], dst[i]
        cluster_u, cluster_v = nodes[u, _CLUSTER], nodes[v, _CLUSTER]
        if cluster_u == cluster_v:
            continue
        degree_u, degree_v = np.int64(nodes[u, _DEGREE]), np.int64(nodes[v, _DEGREE])
        volume_u, volume_v = np.int64(volume[cluster_u]), np.int64(volume[cluster_v])
        if volume_u - degree_u <= volume_v - degree_v:
            if volume_v + degree_u <= max_volume:
                volume[cluster_u], volume[cluster_v] = volume_u - degree_u, volume_v + degree_u
                nodes[u, _CLUSTER] = cluster_v
        elif volume_u + degree_v <= max_volume:
            volume[cluster_u], volume[cluster_v] = volume_u + degree_v, volume_v - degree_v
            nodes[v, _CLUSTER] = cluster_u


@kernel
def _describe_clusters(nodes, volume, part_of_cluster):
    for v in range(len(nodes)):
        cluster = nodes[v, _CLUSTER]
        nodes[v, _VOLUME], nodes[v, _PART] = volume[cluster], part_of_cluster[cluster]


@kernel
def _place_inside(src, dst, nodes, load, capacity, key, part):
    """Place the edges whose clusters lie in one part; they move to the front of src and dst. Return how many."""
    length, width, rows, placed = len(src), nodes.shape[1], nodes.reshape(-1), 0
    for i in range(length):
        if i + _ROWS_AHEAD < length:
            prefetch(rows, width * np.int64(src[i + _ROWS_AHEAD]))
            prefetch(rows, width * np.int64(dst[i + _ROWS_AHEAD]))
        u, v = src[i], dst[i]
        chosen = np.int64(nodes[u, _PART])
        if chosen == np.int64(nodes[v, _PART]):
            if load[chosen] >= capacity:
                chosen = _elsewhere(u, v, nodes, load, capacity, key)
            _hold(nodes, u, v, chosen)
            load[chosen] += 1
            src[placed], dst[placed], part[placed] = u, v, chosen
            placed += 1
    return placed


@kernel(error_model="numpy")  # degrees are 0 where the stream has changed; the end of the pass reports that
def _place_between(src, dst, nodes, load, capacity, key, part):
    """Place the edges whose clusters lie in two parts; they move to the front of src and dst. Return how many."""
    length, width, rows, placed = len(src), nodes.shape[1], nodes.reshape(-1), 0
    for i in range(length):
        if i + _ROWS_AHEAD < length:
            prefetch(rows, width * np.int64(src[i + _ROWS_AHEAD]))
            prefetch(rows, width * np.int64(dst[i + _ROWS_AHEAD]))
        u, v = src[i], dst[i]
        part_u, part_v = np.int64(nodes[u, _PART]), np.int64(nodes[v, _PART])
        if part_u == part_v:
            continue
        if load[part_u] < capacity and load[part_v] < capacity:
            chosen = _better_of_two(u, v, part_u, part_v, nodes)
        elif load[part_u] < capacity:
            chosen = part_u
        elif load[part_v] < capacity:
            chosen = part_v
        else:
            chosen = _elsewhere(u, v, nodes, load, capacity, key)
        _hold(nodes, u, v, chosen)
        load[chosen] += 1
        src[placed], dst[placed], part[placed] = u, v, chosen
        placed += 1
    return placed


@kernel(inline="always")
def _better_of_two(u, v, part_u, part_v, nodes):
    """Return that part of the two ends' clusters that scores higher, the lower of two that score the same."""
    degree_u, degree_v = np.int64(nodes[u, _DEGREE]), np.int64(nodes[v, _DEGREE])
    volume_u, volume_v = np.int64(nodes[u, _VOLUME]), np.int64(nodes[v, _VOLUME])
    gain_u = 1.0 + (1.0 - degree_u / (degree_u + degree_v))
    gain_v = 1.0 + (1.0 - degree_v / (degree_u + degree_v))
    score_u = _holds(nodes, u, part_u) * gain_u + _holds(nodes, v, part_u) * gain_v + volume_u / (volume_u + volume_v)
    score_v = _holds(nodes, u, part_v) * gain_u + _holds(nodes, v, part_v) * gain_v + volume_v / (volume_u + volume_v)
    take_u = (score_u > score_v) | ((score_u == score_v) & (part_u < part_v))
    return part_v + take_u * (part_u - part_v)  # no branch: it would be guessed wrongly every other time


@kernel(inline="always")
def _elsewhere(u, v, nodes, load, capacity, key):
    """Return the part that the end with the higher degree hashes to, or where that is full the least loaded one."""
    degree_u, degree_v = nodes[u, _DEGREE], nodes[v, _DEGREE]
    hashed = u if degree_u > degree_v or (degree_u == degree_v and u < v) else v
    chosen = below(combine(key, hashed), len(load))
    return chosen if load[chosen] < capacity else np.int64(np.argmin(load))


@kernel(inline="always")
def _holds(nodes, v, part):
    shift = 4 + nodes.itemsize // 4  # a word has 32 or 64 bits
    return np.float64((np.uint64(nodes[v, _SETS + (part >> shift)]) >> np.uint64(part & ((1 << shift) - 1))) & _ONE)


@kernel(inline="always")
def _hold(nodes, u, v, part):
    shift = 4 + nodes.itemsize // 4
    column, bit = _SETS + (part >> shift), _ONE << np.uint64(part & ((1 << shift) - 1))
    nodes[u, column] = np.uint64(nodes[u, column]) | bit
    nodes[v, column] = np.uint64(nodes[v, column]) | bit
