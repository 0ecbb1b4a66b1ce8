"""Read a whole store and compare it with what its manifest and its structure say."""

import numpy as np

from ..errors import PartitionStoreError
from ..jit import kernel
from .halo import halo_of_range
from .manifest import REMEDY, check_file, read_manifest

_BLOCK_ARCS = 1 << 23


def verify_store(store) -> None:
    """Check a PartitionStore; see its `verify`."""
    for name, entry in read_manifest(store.root)["files"].items():
        check_file(store.root, name, entry)
    _check_ids(store)
    _check_rows(store)
    mark = np.zeros(store.num_nodes, np.bool_)
    for part in range(store.num_parts):
        _check_halo(store, part, mark)


def _check_ids(store) -> None:
    offsets = store.part_offsets
    if offsets[0] != 0 or offsets[-1] != store.num_nodes or (np.diff(offsets) < 0).any():
        raise _broken(store, "part_offsets", "does not rise from 0 to num_nodes")
    for begin in range(0, store.num_nodes, _BLOCK_ARCS):
        nodes = np.arange(begin, min(begin + _BLOCK_ARCS, store.num_nodes))
        original = store.original_nid[nodes]
        outside = len(original) and (original.min() < 0 or original.max() >= store.num_nodes)
        if outside or (store.store_nid[original] != nodes).any():
            raise _broken(store, "original_nid", "is not the inverse of store_nid")


def _check_rows(store) -> None:
    indptr, indices = store.csc
    if indptr[0] != 0 or indptr[-1] != store.num_arcs or not _rises(indptr):
        raise _broken(store, "csc_indptr", "does not rise from 0 to num_arcs")
    if not _rows_ascend(indptr, indices, store.num_nodes):
        raise _broken(store, "csc_indices", "a row is out of order or names a node that does not exist")


def _check_halo(store, part: int, mark: np.ndarray) -> None:
    begin, end = store.part_offsets[part : part + 2]
    expected = halo_of_range(store.csc, begin, end, mark, _BLOCK_ARCS)
    mark[expected] = False
    if not np.array_equal(expected, store.halo(part)):
        raise _broken(store, "halo_nodes", f"part {part} reads other nodes")
    graph = store.load_part(part)
    if not np.array_equal(graph.degree, store.csc.indptr[graph.nodes + 1] - store.csc.indptr[graph.nodes]):
        raise _broken(store, "halo_degree", f"part {part} has other degrees")
    core = store.csc.indptr, store.csc.indices
    if not _same_restricted_rows(*core, begin, end, expected, graph.csc.indptr[graph.num_core :], graph.csc.indices):
        raise _broken(store, "halo_indices", f"part {part}: halo rows are not those of the graph")


def _broken(store, name: str, what: str) -> PartitionStoreError:
    return PartitionStoreError(f"{store.root / f'{name}.npy'}: {what}; {REMEDY}")


@kernel
def _rises(values):
    last = values[0]
    for value in values:
        if value < last:
            return False
        last = value
    return True


@kernel
def _rows_ascend(indptr, indices, num_nodes):
    for row in range(len(indptr) - 1):
        for i in range(indptr[row], indptr[row + 1]):
            if indices[i] < 0 or indices[i] >= num_nodes:
                return False
            if i > indptr[row] and indices[i] < indices[i - 1]:
                return False
    return True


@kernel
def _same_restricted_rows(indptr, indices, begin, end, halo, halo_indptr, local_indices):
    """Return whether each halo row is its row of the whole graph, cut to [begin, end)."""
    for row in range(len(halo)):
        place = halo_indptr[row]
        for i in range(indptr[halo[row]], indptr[halo[row] + 1]):
            if begin <= indices[i] < end:
                if place == halo_indptr[row + 1] or local_indices[place] != indices[i] - begin:
                    return False
                place += 1
        if place != halo_indptr[row + 1]:
            return False
    return True
