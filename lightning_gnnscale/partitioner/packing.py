"""Items given out in order, each to the part that is least filled at that moment."""

import numpy as np

from ..jit import kernel


def pack_in_order(sizes: np.ndarray, filled: np.ndarray) -> np.ndarray:
    """Give each item, in the order of the array, to the least filled part, the lowest of several.

    Args:
        sizes: (num_items,) int64, >= 0.
        filled: (num_parts,) int64, what the parts hold; added to in place.

    Returns:
        (num_items,) int32 part ids.

    Cost: O(num_parts + num_items) log num_parts time; 4 bytes an item.
    """
    part = np.empty(len(sizes), np.int32)
    heap = np.lexsort((np.arange(len(filled)), filled))  # sorted, hence a heap
    _pack(sizes, filled, heap, part)
    return part


@kernel
def _pack(sizes, filled, heap, part):
    for item in range(len(sizes)):
        part[item] = fill_least(filled, heap, sizes[item])


@kernel
def fill_least(filled, heap, size):
    """Add a size to the least filled part, the lowest of several, and return it.

    Args:
        filled: (num_parts,) int64, what the parts hold.
        heap: (num_parts,) the parts as a binary heap by (filled, part); kept as one.
        size: to add, >= 0.
    """
    chosen = heap[0]
    filled[chosen] += size
    slot = 0
    while True:
        child = 2 * slot + 1
        if child >= len(heap):
            break
        if child + 1 < len(heap) and _before(filled, heap[child + 1], heap[child]):
            child += 1
        if not _before(filled, heap[child], chosen):
            break
        heap[slot] = heap[child]
        slot = child
    heap[slot] = chosen
    return chosen


@kernel(inline="always")
def _before(filled, a, b):
    """Whether part a is filled less than part b, or as much and lower."""
    return filled[a] < filled[b] or (filled[a] == filled[b] and a < b)
