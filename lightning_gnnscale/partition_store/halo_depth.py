"""Parts with another halo than the stored one: none, or two and more hops, made from the full CSC at load."""

import numpy as np

from ..graph import CSC
from ..jit import kernel
from ..rng import combine

_FAR = 255


def distances(csc: CSC, begin: int, end: int, hops: int) -> np.ndarray:
    """Return (num_nodes,) uint8: steps along edges from a node into rows [begin, end), 255 beyond `hops`.

    Cost: O(hops * num_nodes) plus the rows of all nodes nearer than `hops`.
    """
    distance = np.full(csc.num_rows, _FAR, np.uint8)
    distance[begin:end] = 0
    frontier = np.arange(begin, end)
    for step in range(1, hops + 1):
        _mark_sources(csc.indptr, csc.indices, frontier, distance, step)
        frontier = np.flatnonzero(distance == step)
    return distance


def rows_within(csc: CSC, nodes: np.ndarray, num_core: int, distance: np.ndarray, hops: int):
    """Return the rows of `nodes` in local ids, those at distance `hops` cut to sources nearer than that.

    Args:
        nodes: (num_local,) store ids, core first, then the halo ascending.
        distance: as `distances` gives them.

    Returns:
        CSC over local ids, indices int32, ascending in a row; (num_edges,) int64 positions in `csc`.
    """
    local_id = np.full(csc.num_rows, -1, np.int32)
    local_id[nodes] = np.arange(len(nodes), dtype=np.int32)
    indptr = np.zeros(len(nodes) + 1, np.int64)
    _count_within(csc.indptr, csc.indices, nodes, distance, hops, indptr)
    indices = np.empty(indptr[-1], np.int32)
    edge_id = np.empty(indptr[-1], np.int64)
    _fill_within(csc.indptr, csc.indices, nodes, num_core, local_id, distance, hops, indptr, indices, edge_id)
    return CSC(indptr, indices), edge_id


def assigned_edges(csc: CSC, num_core: int, original: np.ndarray, seed: int) -> np.ndarray:
    """Return (num_edges,) bool: the edges a part keeps when each cross edge is given to one of its two parts.

    The owner of {u, v} is the part of min(u, v) or of max(u, v), by one bit of hash(seed, min, max) over original
    ids: both parts agree, both directions go together.

    Args:
        csc: the part with one hop, local ids.
        original: (num_local,) original ids.
    """
    return _assigned(csc.indptr, csc.indices, num_core, original, np.uint64(seed & 0xFFFFFFFFFFFFFFFF))


def keep_edges(csc: CSC, num_core: int, keep: np.ndarray):
    """Drop edges, and the halo nodes that no longer feed a core node.

    Returns:
        (num_halo,) bool of the halo nodes that stay, the new CSC, (num_edges,) positions of its edges in the old one.
    """
    num_local = csc.num_rows
    local_id = np.full(num_local, -1, np.int32)
    local_id[:num_core] = np.arange(num_core, dtype=np.int32)
    used = np.zeros(num_local, np.bool_)
    core_edges = slice(0, int(csc.indptr[num_core]))
    used[csc.indices[core_edges][keep[core_edges]]] = True
    used[:num_core] = True
    local_id[used] = np.arange(int(used.sum()), dtype=np.int32)
    rows = np.repeat(np.arange(num_local), np.diff(csc.indptr))
    positions = np.flatnonzero(keep & used[rows])
    counts = np.bincount(local_id[rows[positions]], minlength=int(used.sum()))
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    return used[num_core:], CSC(indptr, local_id[csc.indices[positions]]), positions


@kernel
def _mark_sources(indptr, indices, frontier, distance, step):
    for node in frontier:
        for i in range(indptr[node], indptr[node + 1]):
            if distance[indices[i]] > step:
                distance[indices[i]] = step


@kernel
def _count_within(indptr, indices, nodes, distance, hops, out):
    for row in range(len(nodes)):
        node = nodes[row]
        count = indptr[node + 1] - indptr[node]
        if distance[node] == hops:
            count = 0
            for i in range(indptr[node], indptr[node + 1]):
                count += distance[indices[i]] < hops
        out[row + 1] = out[row] + count


@kernel
def _fill_within(indptr, indices, nodes, num_core, local_id, distance, hops, out_indptr, out, edge_id):
    for row in range(len(nodes)):
        node = nodes[row]
        place = out_indptr[row]
        for halo in range(2):  # core sources first: then local ids ascend
            for i in range(indptr[node], indptr[node + 1]):
                source = indices[i]
                if distance[node] == hops and distance[source] >= hops:
                    continue
                if (local_id[source] >= num_core) == (halo == 1):
                    out[place] = local_id[source]
                    edge_id[place] = i
                    place += 1


@kernel
def _assigned(indptr, indices, num_core, original, seed):
    keep = np.ones(len(indices), np.bool_)
    for row in range(len(indptr) - 1):
        for i in range(indptr[row], indptr[row + 1]):
            source = indices[i]
            if (row < num_core) == (source < num_core):
                continue
            core = original[row] if row < num_core else original[source]
            other = original[source] if row < num_core else original[row]
            bits = combine(combine(seed, min(core, other)), max(core, other))
            keep[i] = (core < other) == (bits & np.uint64(1) == np.uint64(0))
    return keep
