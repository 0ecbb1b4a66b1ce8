"""A binary heap of nodes by key, largest first, whose keys can be changed: for compiled loops.

Four arrays make one heap: `nodes` (capacity,) int32, `place` (num_nodes,) int32 (-1: not in the heap), `keys`
(num_nodes,) float64 and `size` (1,) int64. Other files compile these functions in: `jit.py` lists this file.
"""

import numpy as np

from ...jit import kernel


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
