"""Initial parts of a small graph, grown greedily."""

import numpy as np

from ...jit import kernel
from ...rng import below, combine, fold
from .weighted_graph import PART_DTYPE, WeightedGraph, total_weight


def empty_heap(num_nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the four arrays of a heap that any of num_nodes nodes may enter."""
    return (
        np.empty(num_nodes, np.int32),
        np.full(num_nodes, -1, np.int32),
        np.empty(num_nodes, np.float64),
        np.zeros(1, np.int64),
    )


@kernel
def heap_put(nodes, place, keys, size, v, key):
    """Add a node, or change its key."""
    i = np.int64(place[v])
    if i < 0:
        i = size[0]
        size[0] += 1
        keys[v] = key
        _rise(nodes, place, keys, i, v)
    elif key > keys[v]:
        keys[v] = key
        _rise(nodes, place, keys, i, v)
    elif key < keys[v]:
        keys[v] = key
        _sink(nodes, place, keys, size, i, v)


@kernel
def heap_take(nodes, place, keys, size):
    """Remove the node with the largest key and return it; the heap must not be empty."""
    top = nodes[0]
    place[top] = -1
    size[0] -= 1
    if size[0] > 0:
        _sink(nodes, place, keys, size, np.int64(0), nodes[size[0]])
    return top


@kernel
def heap_clear(nodes, place, size):
    """Remove all nodes."""
    for i in range(size[0]):
        place[nodes[i]] = -1
    size[0] = 0


@kernel
def _rise(nodes, place, keys, i, v):
    key = keys[v]
    while i > 0:
        parent = (i - 1) >> 1
        if keys[nodes[parent]] >= key:
            break
        nodes[i] = nodes[parent]
        place[nodes[i]] = i
        i = parent
    nodes[i] = v
    place[v] = i


@kernel
def _sink(nodes, place, keys, size, i, v):
    key = keys[v]
    while True:
        child = 2 * i + 1
        if child >= size[0]:
            break
        if child + 1 < size[0] and keys[nodes[child + 1]] > keys[nodes[child]]:
            child += 1
        if keys[nodes[child]] <= key:
            break
        nodes[i] = nodes[child]
        place[nodes[i]] = i
        i = child
    nodes[i] = v
    place[v] = i


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
