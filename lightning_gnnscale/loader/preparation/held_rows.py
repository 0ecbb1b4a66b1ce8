"""Rows of a graph in one owner's memory, and draws from them that do not depend on who holds what."""

from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np

from ...errors import GNNScaleError
from ...graph import CSC, id_dtype
from ...jit import kernel
from ...triton_kernels.sample_neighbors import Workspace, cpu


class HopRequest(NamedTuple):
    """Nodes whose neighbours are to be drawn: all that an owner must know.

    Attributes:
        nodes: (num,) int32 or int64 store ids.
        hop_key: uint64 as a Python int, of batch and hop: `fold_hop(key, hop)`.
        fanout: draws a node, -1 for all neighbours.
        replace: draw with replacement.
    """

    nodes: np.ndarray
    hop_key: int
    fanout: int
    replace: bool


class HeldRows:
    """CSC rows of some parts, and of nodes that every owner holds; may be read by several threads.

    Args:
        csc: of the whole graph in store order, maybe mapped from files; only what is held is read.
        part_offsets: (num_parts + 1,) first store id of each part, then num_nodes.
        parts: held ones.
        replicated: ids held beside them, for example `most_linked`'s.

    Attributes:
        num_bytes: of memory.

    Raises:
        ValueError: there is no such part.

    Cost: copies the rows: 8 bytes a row and those of the arcs; reads parts in ascending order, with sequential reads.
    """

    def __init__(
        self, csc: CSC, part_offsets: np.ndarray, parts: Sequence[int], replicated: np.ndarray | Sequence[int] = ()
    ):
        self._part_offsets = np.asarray(part_offsets, np.int64)
        num_parts = len(self._part_offsets) - 1
        parts = sorted({int(part) for part in parts})
        if parts and not 0 <= parts[0] <= parts[-1] < num_parts:
            raise ValueError(f"parts must be in [0, {num_parts}), got {parts[0]} to {parts[-1]}")
        self._first_row = np.full(num_parts, -1, np.int64)
        lengths, indices, num_rows = [], [], 0
        for part in parts:
            start, end = (int(offset) for offset in self._part_offsets[part : part + 2])
            self._first_row[part], num_rows = num_rows, num_rows + end - start
            bounds = np.asarray(csc.indptr[start : end + 1])
            lengths.append(np.diff(bounds))
            indices.append(np.asarray(csc.indices[bounds[0] : bounds[-1]]))
        beside = self._beside(replicated)
        self._replicated, self._first_replicated = beside.astype(id_dtype(csc.num_rows)), num_rows
        lengths.append(csc.indptr[beside + 1] - csc.indptr[beside])
        indices += [csc.indices[csc.indptr[node] : csc.indptr[node + 1]] for node in beside]
        self._indptr = np.concatenate([[0], *lengths]).cumsum()
        self._indices = np.concatenate([np.empty(0, csc.indices.dtype), *indices])
        self._spaces: SimpleQueue[Workspace] = SimpleQueue()

    @classmethod
    def of_files(cls, csc: CSC) -> "HeldRows":
        """Return all rows as they lie in their files, copying none: who has lost an owner draws from there."""
        held = cls(CSC(np.zeros(1, np.int64), csc.indices[:0]), np.array([0, 0]), ())
        held._part_offsets, held._first_row = np.array([0, csc.num_rows]), np.zeros(1, np.int64)
        held._indptr, held._indices = np.asarray(csc.indptr), np.asarray(csc.indices)
        return held

    def __reduce__(self):
        raise TypeError("rows are held by one process: send what they are made of")

    @property
    def num_bytes(self) -> int:
        arrays = (self._part_offsets, self._first_row, self._replicated, self._indptr, self._indices)
        return sum(array.nbytes for array in arrays)

    def find(self, nodes: np.ndarray) -> np.ndarray:
        """Return (num,) int64: the row of each node here, or -1."""
        rows = np.empty(len(nodes), np.int64)
        _find(nodes, self._part_offsets, self._first_row, self._replicated, self._first_replicated, rows)
        return rows

    def draw(self, request: HopRequest, rows: np.ndarray | None = None) -> np.ndarray:
        """Draw neighbours as sampling from the whole graph would.

        Args:
            request: of nodes that are held.
            rows: (num,) from `find`, where they are known.

        Returns:
            (num_drawn,) store ids, those of the first node first; of `csc.indices`' dtype, in memory of their own.

        Raises:
            GNNScaleError: a node is not held.
        """
        nodes, num = request.nodes, len(request.nodes)
        rows = self.find(nodes) if rows is None else rows
        if num and rows.min() < 0:
            raise GNNScaleError(f"node {nodes[rows.argmin()]} is asked of an owner that does not hold its row")
        try:
            space = self._spaces.get_nowait()
        except Empty:
            space = Workspace(0, self._indices.dtype)
        try:
            return self._draw(request, rows, space)
        finally:
            self._spaces.put(space)

    def _draw(self, request: HopRequest, rows: np.ndarray, space: Workspace) -> np.ndarray:
        num, fanout, replace = len(rows), request.fanout, request.replace
        start, degree, indptr = (space.reserve(name, num + 1) for name in ("row_start", "row_degree", "indptr"))
        indptr[0] = 0
        largest = cpu.count_hop(self._indptr, rows, 0, num, fanout, replace, start, degree, indptr)
        if len(space.taken) <= largest >> 6:
            space.taken = np.zeros((largest >> 6) + 1, np.uint64)
        total = int(indptr[num])
        arc, neighbors = space.reserve("arc", total), np.empty(total, self._indices.dtype)
        hop_key = np.uint64(request.hop_key)
        cpu.pick_hop(hop_key, request.nodes, 0, num, fanout, replace, start, degree, indptr, space.taken, arc)
        cpu.read_hop(self._indices, arc, 0, total, neighbors)
        return neighbors

    def _beside(self, replicated) -> np.ndarray:
        """Return the replicated nodes that no held part has, ascending."""
        nodes = np.unique(np.asarray(replicated, np.int64))
        if len(nodes) and not (nodes[0] >= 0 and nodes[-1] < self._part_offsets[-1]):
            raise ValueError(f"replicated must be ids in [0, {self._part_offsets[-1]}), got {nodes[0]} to {nodes[-1]}")
        return nodes[self._first_row[part_of(nodes, self._part_offsets)] < 0]


def part_of(nodes: np.ndarray, part_offsets: np.ndarray) -> np.ndarray:
    """Return (num,) int64 part ids of store ids."""
    return np.searchsorted(part_offsets, nodes, "right") - 1


def most_linked(indptr: np.ndarray, max_bytes: int, id_bytes: int = 4, row_bytes: int = 0) -> np.ndarray:
    """Return the nodes of highest in-degree whose rows fit a budget: what is worth holding everywhere.

    Args:
        indptr: (num_nodes + 1,) of the CSC.
        max_bytes: of all their rows, on each worker, >= 0.
        id_bytes: of an id in the CSC.
        row_bytes: held with each node, for example its features.

    Returns:
        Ids, ascending; of equal degrees the smaller id comes first. Nodes without neighbours are left out.

    Raises:
        ValueError: max_bytes is negative.
    """
    if max_bytes < 0:
        raise ValueError(f"replicate_bytes must be >= 0, got {max_bytes}")
    degree = np.diff(indptr)
    order = np.argsort(-degree, kind="stable")[: np.count_nonzero(degree)]
    total = np.cumsum(degree[order] * id_bytes + (8 + id_bytes + row_bytes))
    return np.sort(order[: np.searchsorted(total, max_bytes, "right")])


@kernel
def _find(nodes, part_offsets, first_row, replicated, first_replicated, rows):
    for i in range(len(nodes)):
        node, low, high = nodes[i], 0, len(first_row)
        while high - low > 1:
            middle = (low + high) >> 1
            if part_offsets[middle] <= node:
                low = middle
            else:
                high = middle
        rows[i] = -1
        if node < 0 or node >= part_offsets[-1]:
            continue
        if first_row[low] >= 0:
            rows[i] = first_row[low] + node - part_offsets[low]
            continue
        low, high = 0, len(replicated)
        while low < high:
            middle = (low + high) >> 1
            if replicated[middle] < node:
                low = middle + 1
            else:
                high = middle
        if low < len(replicated) and replicated[low] == node:
            rows[i] = first_replicated + low
