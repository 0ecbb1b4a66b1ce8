"""Rows whose preferred neighbours come first, from which samples prefer them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...graph import CSC
from ...jit import kernel


class SplitRows(NamedTuple):
    """The rows of a CSC, neighbours in a set Q before the others; both groups keep their order.

    Attributes:
        indices: (num_edges,) as `csc.indices`, row v at its old place.
        num_inside: (num_rows,) int32, neighbours of each row that are in Q.
        position: (num_edges,) int32, where in its row each edge was; None where edge positions are not needed.
    """

    indices: np.ndarray
    num_inside: np.ndarray
    position: np.ndarray | None = None


def split_rows(csc: CSC, inside: np.ndarray, with_position: bool = False) -> SplitRows:
    """Split the rows of a graph in memory.

    Args:
        csc: the graph.
        inside: (num_nodes,) bool, the set Q.
        with_position: also keep where each edge was.

    Cost: two passes over the edges, about 5 ns each; 4 bytes an edge and a node, 4 bytes an edge more with positions.
    """
    indices = np.empty(csc.num_edges, csc.indices.dtype)
    position = np.empty(csc.num_edges if with_position else 0, np.int32)
    num_inside = np.empty(csc.num_rows, np.int32)
    split_range(csc.indptr, csc.indices, inside, 0, csc.num_rows, 0, indices, position, num_inside)
    return SplitRows(indices, num_inside, position if with_position else None)


@kernel
def split_range(indptr, indices, inside, begin, end, base, out_indices, out_position, out_inside):
    """Split the rows begin..end-1 of a CSC; edge e goes to e - base of the outputs, row v to v - begin.

    Args:
        out_indices, out_position, out_inside: filled; one of length 0 is left out.
    """
    for node in range(begin, end):
        first, last = indptr[node], indptr[node + 1]
        count = 0
        for edge in range(first, last):
            count += inside[indices[edge]]
        preferred = first - base
        other = preferred + count
        if len(out_inside):
            out_inside[node - begin] = count
        for edge in range(first, last):
            source = indices[edge]
            take = inside[source]
            to = preferred if take else other
            preferred += take
            other += not take
            if len(out_indices):
                out_indices[to] = source
            if len(out_position):
                out_position[to] = edge - first


def checked_split(split, scale, csc, num_hops, replace, return_e_id) -> Sequence[SplitRows] | None:
    """Return the split rows of each hop, or None where nothing is preferred; see `sample_neighbors`."""
    if not (math.isfinite(scale) and scale >= 1):
        raise ValueError(f"scale must be >= 1 and finite, got {scale}")
    if split is None or scale == 1:
        return None
    if replace:
        raise ValueError("a preference needs samples without replacement: use replace=False, or scale=1")
    if len(split) != num_hops:
        raise ValueError(f"split must have rows for each of {num_hops} hops, got {len(split)}")
    for rows in split:
        shapes = (len(rows.indices), len(rows.num_inside), rows.indices.dtype)
        if shapes != (csc.num_edges, csc.num_rows, csc.indices.dtype):
            raise ValueError(
                f"split rows are of {shapes[1]} rows and {shapes[0]} edges of {shapes[2]}, the graph has "
                f"{csc.num_rows} and {csc.num_edges} of {csc.indices.dtype}"
            )
        if return_e_id and rows.position is None:
            raise ValueError("return_e_id needs the positions of split rows: split them with_position=True")
    return split
