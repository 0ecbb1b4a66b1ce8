"""The graph vocabulary that every stage shares: id dtypes, compressed columns, mask names."""

from typing import NamedTuple

import numpy as np

from .jit import kernel

MASK_NAMES = ("train", "val", "test")


class CSC(NamedTuple):
    """In-neighbours by destination: row v of the CSC lists the sources of the arcs into v.

    Attributes:
        indptr: (num_rows + 1,) int64, row v is indices[indptr[v]:indptr[v + 1]].
        indices: (num_arcs,) int32 or int64, source ids, ascending within a row.
    """

    indptr: np.ndarray
    indices: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_arcs(self) -> int:
        return len(self.indices)

    @property
    def in_degree(self) -> np.ndarray:
        """(num_rows,) int64."""
        return np.diff(self.indptr)


def id_dtype(num_nodes: int) -> np.dtype:
    """Return int32 where ids below num_nodes fit it, else int64."""
    return np.dtype(np.int32 if num_nodes <= np.iinfo(np.int32).max else np.int64)


def build_csc(src: np.ndarray, dst: np.ndarray, num_nodes: int) -> CSC:
    """Sort arcs by destination, then by source; repeats are kept.

    Args:
        src, dst: (num_arcs,) integers in [0, num_nodes).
        num_nodes: number of rows.

    Returns:
        CSC with indices of `id_dtype(num_nodes)`.

    Cost: O(num_nodes + num_arcs) time (two counting sorts); a second copy of the arcs while it runs.
    """
    dtype = id_dtype(num_nodes)
    by_src_indptr, by_src_dst = _count_sort(src, np.ascontiguousarray(dst).astype(dtype, copy=False), num_nodes)
    src_sorted = np.repeat(np.arange(num_nodes, dtype=dtype), np.diff(by_src_indptr))
    indptr, indices = _count_sort(by_src_dst, src_sorted, num_nodes)
    return CSC(indptr, indices)


@kernel
def _count_sort(keys, values, num_keys):
    """Sort values by their integer key, stably; return the (num_keys + 1,) offsets and the sorted values."""
    offsets = np.zeros(num_keys + 1, np.int64)
    for i in range(len(keys)):
        offsets[keys[i] + 1] += 1
    for k in range(num_keys):
        offsets[k + 1] += offsets[k]
    cursor = offsets[:-1].copy()
    out = np.empty_like(values)
    for i in range(len(keys)):
        out[cursor[keys[i]]] = values[i]
        cursor[keys[i]] += 1
    return offsets, out
