"""Rows with the neighbours in a set first: what drawing with a preference for the set reads."""

from typing import NamedTuple

import numpy as np

from ...graph import CSC
from ...jit import kernel


class SplitRows(NamedTuple):
    """The rows of a CSC, the neighbours in a set Q before the others; both groups keep their order.

    Attributes:
        indices: (num_arcs,) as `csc.indices`, row v at its old place.
        num_inside: (num_rows,) int32, neighbours of each row that are in Q.
        position: (num_arcs,) int32, where in its row each arc stood; None where nobody asks for arc positions.
    """

    indices: np.ndarray
    num_inside: np.ndarray
    position: np.ndarray | None = None


def split_rows(csc: CSC, inside: np.ndarray, with_position: bool = False) -> SplitRows:
    """Split the rows of a graph in memory.

    Args:
        csc: the graph.
        inside: (num_nodes,) bool, the set Q.
        with_position: also keep where each arc stood.

    Cost: two passes over the arcs, about 5 ns each; 4 bytes an arc and a node, 4 bytes an arc more with positions.
    """
    indices = np.empty(csc.num_arcs, csc.indices.dtype)
    position = np.empty(csc.num_arcs if with_position else 0, np.int32)
    num_inside = np.empty(csc.num_rows, np.int32)
    split_range(csc.indptr, csc.indices, inside, 0, csc.num_rows, 0, indices, position, num_inside)
    return SplitRows(indices, num_inside, position if with_position else None)


@kernel
def split_range(indptr, indices, inside, begin, end, base, out_indices, out_position, out_inside):
    """Split the rows begin..end-1 of a CSC; arc e goes to e - base of the outputs, row v to v - begin.

    Args:
        out_indices, out_position, out_inside: filled; one of length 0 is left out.
    """
    for node in range(begin, end):
        first, last = indptr[node], indptr[node + 1]
        count = 0
        for arc in range(first, last):
            count += inside[indices[arc]]
        preferred = first - base
        other = preferred + count
        if len(out_inside):
            out_inside[node - begin] = count
        for arc in range(first, last):
            source = indices[arc]
            take = inside[source]
            to = preferred if take else other
            preferred += take
            other += not take
            if len(out_indices):
                out_indices[to] = source
            if len(out_position):
                out_position[to] = arc - first
