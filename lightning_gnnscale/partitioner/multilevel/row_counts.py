"""What the quality of a partition is made of, counted over rows: a row holds all that a node's halos depend on."""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...graph import id_dtype
from ...jit import kernel
from ...triton_kernels.intrinsics import prefetch
from .weighted_graph import BlockGraph, RowThreads, WeightedGraph

MAX_FORESTS = 4  # of trees of nodes that are connected; each is a thread's
_ENTRIES_AHEAD, _STEP = np.uint64(32), np.uint64(1)


class PartCounts(NamedTuple):
    """Counts by part, (num_parts,) int64 each; see `quality_of_counts`."""

    inside: np.ndarray
    cut: np.ndarray
    halo_per_part: np.ndarray
    components: np.ndarray


def count_parts(
    graph: BlockGraph | WeightedGraph, part: np.ndarray, num_parts: int, threads: RowThreads, backwards: bool
) -> PartCounts:
    """Read the graph once, and count its edges, halo nodes and components by part.

    Args:
        graph: the graph; its edges weigh one each.
        part: (num_nodes,) int16.
        num_parts: number of parts.
        threads: threads that count; their number does not change the result.
        backwards: from the last block on.

    Cost: O(num_nodes + num_entries) time; an id a node for each of up to MAX_FORESTS threads.
    """
    forests = min(MAX_FORESTS, threads.num_threads)
    counts = np.zeros((3, num_parts), np.int64)
    parent = np.empty((forests, graph.num_nodes), id_dtype(graph.num_nodes))
    parent[:] = np.arange(graph.num_nodes)
    for block in graph.blocks(backwards):
        first, indptr, indices = block[:3]
        bounds = np.searchsorted(indptr, np.linspace(0, len(indices), forests + 1).astype(np.int64)).tolist()
        bounds[-1] = len(indptr) - 1
        tasks = [
            partial(_count_rows, *ends, first, indptr, indices, part, num_parts, tree)
            for ends, tree in zip(pairwise(bounds), parent, strict=True)
        ]
        counts += sum(threads.map(lambda task: task(), tasks))
    components = np.zeros(num_parts, np.int64)
    _count_roots(parent, part, components)
    return PartCounts(counts[0] // 2, counts[1], counts[2], components)


@kernel
def _count_rows(start, stop, first_node, indptr, indices, part, num_parts, parent):
    """Return (3, num_parts): entries inside each part, entries across, foreign nodes with a neighbour in it.

    Each node is put into one tree with its neighbours of higher ids in its part; the lowest node is the root.
    """
    counts, seen = np.zeros((3, num_parts), np.int64), np.empty(num_parts, np.int64)
    seen[:] = -1
    last = np.uint64(indptr[stop])
    for row in range(np.uint64(start), np.uint64(stop)):
        v = np.uint64(first_node) + row
        own, low, high = np.uint64(part[v]), np.uint64(indptr[row]), np.uint64(indptr[row + _STEP])
        seen[own] = v
        inside, root = np.int64(0), _root_of(v, parent)
        for e in range(low, high):
            if e + _ENTRIES_AHEAD < last:
                prefetch(part, np.int64(indices[e + _ENTRIES_AHEAD]))
                prefetch(parent, np.int64(indices[e + _ENTRIES_AHEAD]))
            u = np.uint64(indices[e])
            p = np.uint64(part[u])
            inside += np.int64(p == own)
            counts[2, p] += np.int64(seen[p] != np.int64(v))
            seen[p] = v
            if u > v and p == own and np.uint64(parent[u]) != root:
                root = _joined(root, u, parent)
        counts[0, own] += inside
        counts[1, own] += np.int64(high - low) - inside
    return counts


@kernel(inline="always")
def _joined(root, u, parent):
    """Put two trees together, that of a root and that of a node; return the root of both."""
    other = _root_of(u, parent)
    if other < root:
        parent[root] = other
        return other
    parent[other] = root
    return root


@kernel(inline="always")
def _root_of(v, parent):
    """Return the root of a node's tree; paths are halved on the way."""
    while np.uint64(parent[v]) != v:
        parent[v] = parent[np.uint64(parent[v])]
        v = np.uint64(parent[v])
    return v


@kernel
def _count_roots(forests, part, components):
    """Put the trees of all forests together in the first one, and count the roots by part."""
    parent = forests[0]
    for forest in forests[1:]:
        for v in range(np.uint64(len(part))):
            if np.uint64(forest[v]) != v:
                _joined(_root_of(v, parent), np.uint64(forest[v]), parent)
    for v in range(len(part)):
        components[part[v]] += parent[v] == v
