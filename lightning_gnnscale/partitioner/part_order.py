"""Numbers of parts: those that share most edges follow each other, so that a machine's range of parts is cut little."""

import numpy as np

from ..jit import kernel
from ..triton_kernels.intrinsics import prefetch
from .multilevel.weighted_graph import WeightedGraph

_SEEDS = 16  # parts from which a half is grown
_TRIED = 8  # parts of a half that are tried for a swap
_ENTRIES_AHEAD, _ONE = np.uint64(32), np.uint64(1)
MOST_PARTS = 2048  # that are ordered: the edges between them are a dense matrix


def order_parts(edges: np.ndarray) -> np.ndarray:
    """Return the order in which parts are numbered: by halves that share few edges, each half likewise.

    A run of processes or machines owns a range of parts (`rank_of_parts`). Where their number divides that of the
    parts by powers of two, the ranges are these halves.

    Args:
        edges: (num_parts, num_parts) numbers >= 0 of edges between parts, in either direction.

    Returns:
        (num_parts,) int64, the part that gets each number; beyond `MOST_PARTS` parts as they are.

    Cost: O(num_parts ** 2) memory, and time a few times that for each level of halves: 13 ms for 256 parts.
    Source: Kernighan and Lin, Bell System Technical Journal 1970: swaps of pairs, which keep the sizes of the halves.
    """
    num_parts = len(edges)
    if num_parts > MOST_PARTS:
        return np.arange(num_parts)
    joint = np.asarray(edges, np.float64)
    joint = joint + joint.T
    np.fill_diagonal(joint, 0)
    return np.concatenate(_halved(joint, np.arange(num_parts), _SEEDS if num_parts <= 512 else 2))


def numbered(graph: WeightedGraph, part: np.ndarray, num_parts: int) -> np.ndarray:
    """Return the parts of a graph in memory, numbered as `order_parts` says.

    Args:
        graph: The graph.
        part: (num_nodes,) integers in [0, num_parts).
        num_parts: Number of parts.

    Cost: one pass over the edges.
    """
    if not 2 < num_parts <= MOST_PARTS:
        return part
    edges = np.zeros((num_parts, num_parts), np.int64)
    _count_between(graph.indptr, graph.indices, graph.edge_weight, part, edges)
    number = np.empty(num_parts, part.dtype)
    number[order_parts(edges)] = np.arange(num_parts)
    return number[part]


@kernel
def _count_between(indptr, indices, edge_weight, part, edges):
    alike = len(edge_weight) == 1  # one weight for all edges
    last = np.uint64(len(indices))
    for node in range(np.uint64(len(indptr) - 1)):
        own = part[node]
        for edge in range(np.uint64(indptr[node]), np.uint64(indptr[node + _ONE])):
            if edge + _ENTRIES_AHEAD < last:
                prefetch(part, np.int64(indices[edge + _ENTRIES_AHEAD]))
            other = part[np.uint64(indices[edge])]
            if other != own:
                edges[own, other] += 1 if alike else edge_weight[edge]


def _halved(joint: np.ndarray, parts: np.ndarray, num_seeds: int) -> list[np.ndarray]:
    if len(parts) < 3:
        return [parts]
    inside = _bisect(joint[np.ix_(parts, parts)], len(parts) // 2, num_seeds)
    return _halved(joint, parts[inside], num_seeds) + _halved(joint, parts[~inside], num_seeds)


@kernel
def _bisect(joint, size, num_seeds):
    """Return (num,) bool: `size` of the parts that share few edges with the others."""
    best, fewest = np.zeros(len(joint), np.bool_), np.inf
    for seed in range(min(num_seeds, len(joint))):
        inside = _grown(joint, size, seed)
        _swap(joint, inside)
        cut = 0.0
        for i in range(len(joint)):
            for j in range(len(joint)):
                if inside[i] and not inside[j]:
                    cut += joint[i, j]
        if cut < fewest:  # the first of equal ones
            best, fewest = inside, cut
    return best


@kernel(inline="always")
def _grown(joint, size, seed):
    """Return a half that is grown from one part, always by the part that shares most with it, and least beyond."""
    num = len(joint)
    inside, score = np.zeros(num, np.bool_), np.empty(num, np.float64)
    for i in range(num):
        score[i] = 2 * joint[seed, i] - joint[i].sum()
    part = seed
    for _ in range(size - 1):
        inside[part] = True
        part, most = -1, -np.inf
        for i in range(num):
            if not inside[i] and score[i] > most:
                part, most = i, score[i]
        for i in range(num):
            score[i] += 2 * joint[part, i]
    inside[part] = True
    return inside


@kernel(inline="always")
def _swap(joint, inside):
    """Swap pairs of the two halves while fewer edges are cut."""
    num, total = len(joint), joint.sum()
    gain = np.empty(num, np.float64)  # of moving a part to the other half
    for i in range(num):
        gain[i] = 0.0
        for j in range(num):
            gain[i] += joint[i, j] if inside[i] != inside[j] else -joint[i, j]
    tried = np.empty(num, np.bool_)
    while True:
        best, first, second = 1e-9 * max(total, 1.0), -1, -1
        tried[:] = False
        for _ in range(_TRIED):  # parts of one half, most gain first
            part = -1
            for i in range(num):
                if inside[i] and not tried[i] and (part < 0 or gain[i] > gain[part]):
                    part = i
            if part < 0:
                break
            tried[part] = True
            for j in range(num):
                gained = gain[part] + gain[j] - 2 * joint[part, j]
                if not inside[j] and gained > best:
                    best, first, second = gained, part, j
        if first < 0:
            return
        for part in (first, second):
            for i in range(num):
                gain[i] += 2 * joint[part, i] if inside[i] == inside[part] else -2 * joint[part, i]
            inside[part], gain[part] = not inside[part], -gain[part]
