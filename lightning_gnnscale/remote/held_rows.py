"""Rows of a graph in one owner's memory, and draws from them that do not depend on who holds what."""

from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np

from ..errors import GNNScaleError
from ..graph import CSC
from ..triton_kernels.sample_neighbors import Workspace, cpu
from .held_nodes import HeldNodes


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
    """CSC rows of some parts and of the nodes that every owner holds; may be read by several threads.

    Args:
        csc: CSC of the whole graph in store order, possibly mapped from files; only the held rows are read.
        part_offsets, parts, replicated: See `HeldNodes`.

    Attributes:
        nodes: The held nodes.
        num_bytes: Memory that the rows take, bytes.

    Raises:
        ValueError: there is no such part or node.

    Cost: copies the rows: 8 bytes a row, and its arcs. Parts are read in ascending order, sequentially.
    """

    def __init__(
        self, csc: CSC, part_offsets: np.ndarray, parts: Sequence[int], replicated: np.ndarray | Sequence[int] = ()
    ):
        self.nodes = HeldNodes(part_offsets, parts, replicated)
        bounds = [np.asarray(csc.indptr[first : end + 1]) for first, end in self.nodes.ranges]
        bounds += [csc.indptr[node : node + 2] for node in self.nodes.beside]
        self._indptr = np.concatenate([[0], *(np.diff(own) for own in bounds)]).cumsum()
        indices = [np.empty(0, csc.indices.dtype), *(csc.indices[own[0] : own[-1]] for own in bounds)]
        self._indices = np.concatenate(indices)
        self._spaces: SimpleQueue[Workspace] = SimpleQueue()

    @classmethod
    def of_files(cls, csc: CSC) -> "HeldRows":
        """Return all rows as they lie in their files, copying none: who has lost an owner draws from there."""
        held = cls(CSC(csc.indptr[:1], csc.indices[:0]), np.array([0, 0]), ())
        held.nodes = HeldNodes(np.array([0, csc.num_rows]), [0])
        held._indptr, held._indices = np.asarray(csc.indptr), np.asarray(csc.indices)
        return held

    def __reduce__(self):
        raise TypeError("rows are held by one process: send what they are made of")

    @property
    def num_bytes(self) -> int:
        return self.nodes.num_bytes + self._indptr.nbytes + self._indices.nbytes

    def draw(self, request: HopRequest, rows: np.ndarray | None = None) -> np.ndarray:
        """Draw the same neighbours that sampling from the whole graph would draw.

        Args:
            request: Request for neighbours of nodes that this worker holds.
            rows: (num,) row numbers from `nodes.find`, if they are known already.

        Returns:
            (num_drawn,) store ids, those of the first node first, with the dtype of `csc.indices`, in newly allocated
            memory.

        Raises:
            GNNScaleError: a node is not held.
        """
        nodes, num = request.nodes, len(request.nodes)
        rows = self.nodes.find(nodes) if rows is None else rows
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
