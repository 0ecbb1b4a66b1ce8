"""The order in which label propagation visits the rows of a block, and the work up to each."""

import numpy as np

from ...jit import kernel
from ...rng import mix64

NODE_WORK = 8  # what a node costs beside its entries
WINDOW = 1 << 14  # rows, a power of two


@kernel
def visiting_order(indptr, key, sample):
    """Return the rows in the order of their visits, and the work up to each: NODE_WORK and its sample of entries.

    Windows of rows, so that what is read lies together; within a window from low to high degree (its number of bits),
    and among equals by an affine permutation of the rows' numbers.
    """
    num_rows = len(indptr) - 1
    mask = np.uint64(WINDOW - 1)
    factor, shift = (mix64(key) & ~np.uint64(7)) | np.uint64(5), mix64(key ^ np.uint64(1))
    kind = np.empty(WINDOW, np.uint8)
    starts = np.empty(66, np.int64)
    order = np.empty(num_rows, np.int32)
    for first in range(0, num_rows, WINDOW):
        size = min(WINDOW, num_rows - first)
        starts[:] = 0
        for r in range(size):
            degree, bits = indptr[first + r + 1] - indptr[first + r], 0
            while degree:
                degree >>= 1
                bits += 1
            kind[r] = bits
            starts[bits + 1] += 1
        for bits in range(65):
            starts[bits + 1] += starts[bits]
        for i in range(WINDOW):
            r = np.int64((np.uint64(i) * factor + shift) & mask)
            if r < size:
                order[first + starts[kind[r]]] = first + r
                starts[kind[r]] += 1
    reach = np.empty(num_rows, np.int64)
    total = np.int64(0)
    for i in range(num_rows):
        total += NODE_WORK + min(sample, indptr[order[i] + 1] - indptr[order[i]])
        reach[i] = total
    return order, reach
