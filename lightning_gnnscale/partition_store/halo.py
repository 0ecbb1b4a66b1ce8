"""Halo lists: what each part reads beyond itself, stored beside it so that a part loads with sequential reads."""

import numpy as np

from ..graph import CSC, id_dtype
from ..jit import kernel
from .array_file import HEADER_BYTES, ArrayFile, map_rows
from .disk import WriteBudget
from .features import CSRFeatures, DenseFeatures, row_lengths
from .inputs import StoreInputs
from .journal import Journal, file_states
from .node_tables import Progress
from .rows import map_cross

STEP = "halo"
PACK_STEP = "halo_features"


class _HaloWriter:
    """Appends the halo of one part after another."""

    def __init__(self, journal: Journal, inputs: StoreInputs, csc: CSC, part_offsets: np.ndarray):
        self.journal, self.csc, self.part_offsets = journal, csc, part_offsets
        self.part = journal.state(STEP).get("part", 0)
        self.offsets = journal.open_file(STEP, "halo_offsets.npy", np.int64)
        self.nodes = journal.open_file(STEP, "halo_nodes.npy", id_dtype(inputs.num_nodes))
        self.degree = journal.open_file(STEP, "halo_degree.npy", degree_dtype(csc.num_arcs))
        self.indptr = journal.open_file(STEP, "halo_indptr.npy", np.int64)
        self.columns = [journal.open_file(STEP, "halo_indices.npy", np.int32)]
        if inputs.carries_edge_ids:
            self.columns.append(journal.open_file(STEP, "halo_arc.npy", np.int64))
        if self.part == 0:
            self.offsets.append(np.zeros(1, np.int64))
            self.indptr.append(np.zeros(1, np.int64))
        self.cross_index, self.cross = map_cross(journal, inputs)
        self.mark = np.zeros(inputs.num_nodes, np.bool_)

    def write_part(self, part: int, block_arcs: int) -> int:
        """Append the halo nodes of a part, their degrees, and their rows restricted to the part's core."""
        nodes = halo_of_range(self.csc, *self.part_offsets[part : part + 2], self.mark, block_arcs)
        counts = np.zeros(len(nodes) + 1, np.int64)
        pointer = 0
        before = self.indptr_end
        for begin, end in self.cross_index[:, part : part + 2].tolist():
            if end > begin:
                pointer = self._write_rows(slice(begin, end), nodes, pointer, counts)
        self.mark[nodes] = False
        self.nodes.append(nodes)
        self.degree.append(self.csc.indptr[nodes + 1] - self.csc.indptr[nodes])
        self.indptr.append(before + np.cumsum(counts[1:]))
        self.offsets.append(np.array([self.nodes.num_rows], np.int64))
        return len(nodes) * (self.nodes.row_bytes + 12) + int(counts.sum()) * 4

    @property
    def indptr_end(self) -> int:
        return self.columns[0].num_rows

    def _write_rows(self, arcs: slice, nodes: np.ndarray, pointer: int, counts: np.ndarray) -> int:
        keep, pointer = _match(self.cross[0][arcs], self.mark, nodes, pointer, counts)
        for file, column in zip(self.columns, self.cross[1:], strict=True):
            file.append(column[arcs][keep])
        return pointer

    @property
    def files(self) -> list[ArrayFile]:
        return [self.offsets, self.nodes, self.degree, self.indptr, *self.columns]

    def finish(self) -> None:
        self.journal.finish(STEP, *self.files)

    def release(self) -> None:
        for file in self.files:
            file.release()


def degree_dtype(num_arcs: int) -> np.dtype:
    """Return the dtype of stored degrees."""
    return np.dtype(np.int32 if num_arcs <= np.iinfo(np.int32).max else np.int64)


def write_halo(
    journal: Journal,
    inputs: StoreInputs,
    csc: CSC,
    part_offsets: np.ndarray,
    budget: WriteBudget,
    progress: Progress,
) -> None:
    """Write, part by part, the one-hop halo: in-neighbours of the core outside it, and their rows within the core.

    Cost: one read of the CSC and of the cross arcs; O(num_parts * num_nodes) byte tests; one byte a node of memory.
    """
    if journal.is_done(STEP):
        return
    writer = _HaloWriter(journal, inputs, csc, part_offsets)
    try:
        for part in range(writer.part, inputs.num_parts):
            written = writer.write_part(part, budget.sort_arcs)
            if journal.due(written):
                journal.write(STEP, part=part + 1, files=file_states(*writer.files))
            progress("listing halos", part + 1, inputs.num_parts)
        writer.finish()
    finally:
        writer.release()


def pack_halo_features(
    journal: Journal,
    features: DenseFeatures | CSRFeatures,
    halo_nodes: np.ndarray,
    block_bytes: int,
    progress: Progress,
) -> None:
    """Copy the feature rows of all halo lists, in their order, into files of their own."""
    if journal.is_done(PACK_STEP):
        return
    if features.is_sparse:
        row_bytes = max(1, (features.data.nbytes + features.indices.nbytes) // max(1, features.num_rows))
        names = [("halo_features_indices.npy", np.dtype(np.int32), ()), ("halo_features_data.npy", features.dtype, ())]
        pointers = ArrayFile(journal.folder / "halo_features_indptr.npy", np.int64)
        indptr = np.zeros(len(halo_nodes) + 1, np.int64)
        row_lengths(features.indptr, halo_nodes, indptr)
        pointers.append(indptr)
        made = [pointers]
    else:
        made, features = [], features.raw
        row_bytes = max(1, features.dim * features.dtype.itemsize)
        names = [("halo_features.npy", features.dtype, (features.dim,))]
    files = [journal.open_file(PACK_STEP, *name) for name in names]
    step = max(1, block_bytes // row_bytes)
    for begin in range(journal.state(PACK_STEP).get("rows", 0), len(halo_nodes), step):
        end = min(begin + step, len(halo_nodes))
        rows = features.gather(halo_nodes[begin:end])
        for file, block in zip(files, (rows.indices, rows.data) if features.is_sparse else (rows,), strict=True):
            file.append(block)
        if journal.due((end - begin) * row_bytes):
            journal.write(PACK_STEP, rows=end, files=file_states(*files))
        progress("packing halo features", end, len(halo_nodes))
    journal.finish(PACK_STEP, *made, *files)


def halo_of_range(csc: CSC, begin: int, end: int, mark: np.ndarray, block_arcs: int) -> np.ndarray:
    """Return the sources of arcs into rows [begin, end) that lie outside it, ascending.

    Args:
        mark: (num_nodes,) bool, all False; the nodes returned are left True.
        block_arcs: how many arcs are looked at between two steps, so that a memory map is read in pieces.
    """
    first, last = int(csc.indptr[begin]), int(csc.indptr[end])
    for position in range(first, last, block_arcs):
        _mark_outside(csc.indices[position : min(position + block_arcs, last)], begin, end, mark)
    return np.flatnonzero(mark).astype(csc.indices.dtype)


def map_halo_nodes(journal: Journal, inputs: StoreInputs) -> np.ndarray:
    """Map the finished halo lists, one behind the other."""
    path = journal.folder / "halo_nodes.npy"
    dtype = id_dtype(inputs.num_nodes)
    num_halo = (path.stat().st_size - HEADER_BYTES) // dtype.itemsize
    return map_rows(path, dtype, (num_halo,))


@kernel
def _mark_outside(indices, begin, end, mark):
    for i in range(len(indices)):
        node = indices[i]
        if node < begin or node >= end:
            mark[node] = True


@kernel
def _match(cross_node, mark, nodes, pointer, counts):
    """Keep the cross arcs whose target is in the halo, and count them by halo row; both lists ascend."""
    keep = np.zeros(len(cross_node), np.bool_)
    for i in range(len(cross_node)):
        if mark[cross_node[i]]:
            while nodes[pointer] != cross_node[i]:
                pointer += 1
            counts[pointer + 1] += 1
            keep[i] = True
    return keep, pointer
