"""Self-loops that count once, as in GCN: PyG's `add_remaining_self_loops` as one number per node."""

from collections.abc import Callable

import numpy as np

from ..jit import kernel


def self_weights(
    first_row: int, indptr: np.ndarray, indices: np.ndarray, weights_of: Callable[[np.ndarray], np.ndarray] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes of some rows that have self-loops, and the weight of the one that GCN adds to each.

    That is the weight of the node's last self-loop, less the sum over all of them: the node's self-loops and the added
    one then weigh as much as the last one alone. Nodes without self-loops get one of weight 1.

    Args:
        first_row: Id of the node of the first row.
        indptr: (num_rows + 1,) integers, from 0.
        indices: (num_edges,) sources, ascending within a row; of equal ones the last that was listed comes last.
        weights_of: Returns the (num,) weights of edges at some positions; None: edges have weight 1.

    Returns:
        (num_looped,) int64 ids, ascending, and (num_looped,) float32.

    Cost: a binary search in each row.
    """
    places = _loop_places(first_row, indptr, indices)
    if not len(places):
        return np.empty(0, np.int64), np.empty(0, np.float32)
    weight = np.ones(len(places)) if weights_of is None else np.asarray(weights_of(places), np.float64)
    nodes, first = np.unique(np.asarray(indices[places], np.int64), return_index=True)
    last = np.append(first[1:], len(places)) - 1
    return nodes, (weight[last] - np.add.reduceat(weight, first)).astype(np.float32)


def spread(nodes: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return (num,) float32: the values of some of `nodes`, which ascend, and 1 of those that are not there."""
    place = np.minimum(np.searchsorted(nodes, wanted), len(nodes) - 1)
    return np.where(nodes[place] == wanted, values[place], np.float32(1))


@kernel
def _loop_places(first_row, indptr, indices):
    """Return the positions of the edges whose source is their row, ascending."""
    first = np.empty(len(indptr) - 1, np.int64)
    total = 0
    for row in range(len(indptr) - 1):
        low, high, node = indptr[row], indptr[row + 1], first_row + row
        while low < high:
            middle = (low + high) // 2
            if indices[middle] < node:
                low = middle + 1
            else:
                high = middle
        first[row] = low
        while low < indptr[row + 1] and indices[low] == node:
            low += 1
            total += 1
    places = np.empty(total, np.int64)
    count = 0
    for row in range(len(first)):
        place = first[row]
        while place < indptr[row + 1] and indices[place] == first_row + row:
            places[count] = place
            count += 1
            place += 1
    return places
