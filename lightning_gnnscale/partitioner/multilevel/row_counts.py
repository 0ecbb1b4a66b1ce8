"""What the quality of a partition is made of, counted over rows: a row holds all that a node's halos depend on."""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...graph import id_dtype
from ...jit import kernel
from ...triton_kernels.intrinsics import prefetch
from .weighted_graph import BlockGraph, RowThreads

_RANGES = 2  # of a block's rows, beside the union of components
_ENTRIES_AHEAD, _STEP = np.uint64(32), np.uint64(1)


class PartCounts(NamedTuple):
    """Counts by part, (num_parts,) int64 each; see `quality_of_counts`."""

    inside: np.ndarray
    cut: np.ndarray
    halo_per_part: np.ndarray
    components: np.ndarray


def count_parts(
    graph: BlockGraph, part: np.ndarray, num_parts: int, threads: RowThreads, backwards: bool
) -> PartCounts:
    """Read the graph once, and count its edges, halo nodes and components by part.

    Args:
        graph: the graph; its edges weigh one each.
        part: (num_nodes,) int16.
        num_parts: number of parts.
        threads: threads that count; their number does not change the result.
        backwards: from the last block on.

    Cost: O(num_nodes + num_entries) time; an id a node.
    """
    counts = np.zeros((3, num_parts), np.int64)
    parent = np.arange(graph.num_nodes, dtype=id_dtype(graph.num_nodes))
    for block in graph.blocks(backwards):
        first, indptr, indices = block[:3]
        bounds = np.searchsorted(indptr, np.linspace(0, len(indices), _RANGES + 1).astype(np.int64)).tolist()
        bounds[-1] = len(indptr) - 1
        rows = (first, indptr, indices, part)
        tasks = [partial(_join_rows, *rows, parent)]
        tasks += [partial(_count_rows, *ends, *rows, num_parts) for ends in pairwise(bounds)]
        counts += sum(threads.map(lambda task: task(), tasks)[1:])
    components = np.zeros(num_parts, np.int64)
    _count_roots(parent, part, components)
    return PartCounts(counts[0] // 2, counts[1], counts[2], components)


@kernel
def _count_rows(start, stop, first_node, indptr, indices, part, num_parts):
    """Return (3, num_parts): entries inside each part, entries across, foreign nodes with a neighbour in it."""
    counts, seen = np.zeros((3, num_parts), np.int64), np.empty(num_parts, np.int64)
    seen[:] = -1
    last = np.uint64(indptr[stop])
    for row in range(np.uint64(start), np.uint64(stop)):
        v = np.uint64(first_node) + row
        own, low, high = np.uint64(part[v]), np.uint64(indptr[row]), np.uint64(indptr[row + _STEP])
        seen[own] = v
        inside = np.int64(0)
        for e in range(low, high):
            if e + _ENTRIES_AHEAD < last:
                prefetch(part, np.int64(indices[e + _ENTRIES_AHEAD]))
            p = np.uint64(part[np.uint64(indices[e])])
            inside += np.int64(p == own)
            counts[2, p] += np.int64(seen[p] != np.int64(v))
            seen[p] = v
        counts[0, own] += inside
        counts[1, own] += np.int64(high - low) - inside
    return counts


@kernel
def _join_rows(first_node, indptr, indices, part, parent):
    """Put each node into one tree with its neighbours of higher ids in its part; the lowest node is the root."""
    last = np.uint64(len(indices))
    for row in range(np.uint64(len(indptr) - 1)):
        v = np.uint64(first_node) + row
        own, root = part[v], _root_of(v, parent)
        for e in range(np.uint64(indptr[row]), np.uint64(indptr[row + _STEP])):
            if e + _ENTRIES_AHEAD < last:
                prefetch(part, np.int64(indices[e + _ENTRIES_AHEAD]))
                prefetch(parent, np.int64(indices[e + _ENTRIES_AHEAD]))
            u = np.uint64(indices[e])
            if u < v or part[u] != own or np.uint64(parent[u]) == root:
                continue
            other = _root_of(u, parent)
            if other < root:
                parent[root] = other
                root = other
            elif root < other:
                parent[other] = root


@kernel(inline="always")
def _root_of(v, parent):
    """Return the root of a node's tree; paths are halved on the way."""
    while np.uint64(parent[v]) != v:
        parent[v] = parent[np.uint64(parent[v])]
        v = np.uint64(parent[v])
    return v


@kernel
def _count_roots(parent, part, components):
    for v in range(len(parent)):
        components[part[v]] += parent[v] == v
