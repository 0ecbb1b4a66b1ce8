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

    Cost: O(num_parts ** 2) memory, and time a few times that for each level of halves: 0.2 s for 256 parts.
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


def _bisect(joint: np.ndarray, size: int, num_seeds: int) -> np.ndarray:
    """Return (num,) bool: `size` of the parts that share few edges with the others."""
    found = [_swapped(joint, _grown(joint, size, seed)) for seed in range(min(num_seeds, len(joint)))]
    return min(found, key=lambda inside: joint[inside][:, ~inside].sum())  # the first of equal ones


def _grown(joint: np.ndarray, size: int, seed: int) -> np.ndarray:
    inside, near, all_edges = np.zeros(len(joint), bool), joint[seed].copy(), joint.sum(1)
    inside[seed] = True
    for _ in range(size - 1):
        part = np.argmax(np.where(inside, -np.inf, 2 * near - all_edges))
        inside[part] = True
        near += joint[part]
    return inside


def _swapped(joint: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Swap pairs while fewer edges are cut."""
    near = joint[:, inside].sum(1)
    gain = np.where(inside, 1, -1) * (joint.sum(1) - 2 * near)  # of moving a part to the other half
    while (pair := _best_pair(joint, inside, gain)) is not None:
        for part in pair:
            change = 2 * joint[part] * np.where(inside == inside[part], 1, -1)
            gain += change
            inside[part] = ~inside[part]
            gain[part] = np.where(inside[part], 1, -1) * (joint[part].sum() - 2 * joint[part, inside].sum())
    return inside


def _best_pair(joint: np.ndarray, inside: np.ndarray, gain: np.ndarray) -> tuple[int, int] | None:
    mine, others = np.flatnonzero(inside), np.flatnonzero(~inside)
    best, pair = 1e-9 * max(joint.sum(), 1), None
    for part in mine[np.argsort(-gain[mine], kind="stable")[:_TRIED]]:
        gained = gain[part] + gain[others] - 2 * joint[part, others]
        at = int(np.argmax(gained))
        if gained[at] > best:
            best, pair = gained[at], (int(part), int(others[at]))
    return pair
