"""Initial parts of a small graph, grown greedily."""

import numpy as np

from ...jit import kernel
from ...rng import below, combine, fold
from .heap import empty_heap, heap_clear, heap_put, heap_take
from .weighted_graph import PART_DTYPE, WeightedGraph, total_weight

_SALT = 0x47524F57  # keeps this use of the seed apart from all others


def grow_parts(graph: WeightedGraph, share: np.ndarray, seed: int) -> np.ndarray:
    """Grow one part after the other from a random node, always taking the node that raises the cut least.

    A part is full when the mean over dimensions of load / (share * total) reaches 1; the last part takes the rest.

    Args:
        graph: the graph.
        share: (num_parts,) float64, what each part should hold of all weight; sums to 1.
        seed: decides the starting nodes.

    Returns:
        (num_nodes,) int16 part ids.

    Source: greedy graph growing, Karypis and Kumar, SIAM J. Sci. Comput. 20(1), 1998; vectors of weights are ours.
    """
    part = np.full(graph.num_nodes, len(share) - 1, PART_DTYPE)
    total = np.maximum(total_weight(graph), 1).astype(np.float64)
    _grow(*graph, total, share, np.uint64(fold(seed, _SALT)), part, *empty_heap(graph.num_nodes))
    return part


@kernel
def _grow(indptr, indices, edge_weight, node_weight, total, share, key, part, heap, place, keys, size):
    each = np.int64(-1) if len(edge_weight) == len(indices) else np.int64(0)
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    num_nodes, num_dims = len(part), node_weight.shape[1]
    last = len(share) - 1
    order = np.empty(num_nodes, np.int32)  # a random order to start from
    for v in range(num_nodes):
        order[v] = v
    for v in range(num_nodes - 1, 0, -1):
        other = below(combine(key, v), v + 1)
        order[v], order[other] = order[other], order[v]
    next_start = 0
    for p in range(last):
        heap_clear(heap, place, size)
        filled = 0.0
        while filled < 1.0:
            if size[0] == 0:
                while next_start < num_nodes and part[order[next_start]] != last:
                    next_start += 1
                if next_start == num_nodes:
                    return
                v = order[next_start]
            else:
                v = heap_take(heap, place, keys, size)
            weight = 0.0
            for d in range(num_dims):
                weight += node_weight[v & every, d] / (total[d] * share[p])
            weight /= num_dims
            if filled > 0.0 and filled + weight > 1.0 + weight / 2:
                break
            filled += weight
            part[v] = p
            for e in range(indptr[v], indptr[v + 1]):
                u = indices[e]
                if part[u] != last:
                    continue
                w = np.float64(edge_weight[e & each])
                if place[u] >= 0:
                    heap_put(heap, place, keys, size, u, keys[u] + 2.0 * w)
                else:
                    degree = 0.0
                    for f in range(indptr[u], indptr[u + 1]):
                        degree += edge_weight[f & each]
                    heap_put(heap, place, keys, size, u, 2.0 * w - degree)
