"""Graphs as the multilevel method reads them: blocks of rows, weights on edges, vectors of weights on nodes."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

PART_DTYPE = np.dtype(np.int16)  # of part ids while they are worked on: small arrays stay in the processor's cache
MAX_PARTS = int(np.iinfo(PART_DTYPE).max)
ONE = np.ones(1, np.int32)  # every edge weighs one


class WeightedRows(NamedTuple):
    """Consecutive rows of a symmetric graph.

    Attributes:
        first_node: the node of row 0.
        indptr: (num_rows + 1,) int64, from 0.
        indices: (num_entries,) int32 or int64, neighbours; every edge stands in both rows, self-loops in none.
        edge_weight: (num_entries,) int32 or int64; or (1,): every entry weighs that.
    """

    first_node: int
    indptr: np.ndarray
    indices: np.ndarray
    edge_weight: np.ndarray


class WeightedGraph(NamedTuple):
    """A graph in memory: one block.

    Attributes:
        indptr, indices, edge_weight: see `WeightedRows`.
        node_weight: (num_nodes, D) int32; or (1, D): every node weighs that.
    """

    indptr: np.ndarray
    indices: np.ndarray
    edge_weight: np.ndarray
    node_weight: np.ndarray

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def total_edge_weight(self) -> int:
        """The weight of all entries: twice that of the edges."""
        times = len(self.indices) if len(self.edge_weight) == 1 else 1
        return int(self.edge_weight.sum(dtype=np.int64)) * times

    def blocks(self) -> Iterator[WeightedRows]:
        yield WeightedRows(0, self.indptr, self.indices, self.edge_weight)


class BlockGraph(NamedTuple):
    """A graph on disk, read block by block, in order, as often as asked.

    Attributes:
        csc: an ExternalCSC.
        node_weight: as in `WeightedGraph`.
    """

    csc: object
    node_weight: np.ndarray

    @property
    def num_nodes(self) -> int:
        return self.csc.num_nodes

    @property
    def total_edge_weight(self) -> int:
        """The weight of all entries: twice that of the edges."""
        return 2 * self.csc.num_edges

    def blocks(self) -> Iterator[WeightedRows]:
        for block in self.csc.blocks():
            yield WeightedRows(block.first_node, block.indptr, block.indices, ONE)


def total_weight(graph: WeightedGraph | BlockGraph) -> np.ndarray:
    """Return (D,) int64: the weight of all nodes."""
    times = graph.num_nodes if len(graph.node_weight) == 1 else 1
    return graph.node_weight.sum(axis=0, dtype=np.int64) * times
