"""The graph behind a stream as the flagship reads it: in rows on scratch disk, or in edges, pass after pass."""

import numpy as np

from ...graph import id_dtype
from .. import phases
from ..multilevel.edge_graph import EdgeGraph, rows_of
from ..multilevel.weighted_graph import ONE, BlockGraph, WeightedGraph
from .external_csc import open_external_csc
from .layout import ScanState
from .simple_graph import graph_facts, open_simple_graph, reopen_simple_graph

DEGREES = "degrees"  # the phase of a checkpoint


class StreamedRows:
    """The graph in rows, on scratch disk.

    Args:
        stream, scratch, block_edges, deduplicate, progress: see `open_external_csc`.
        saved: a Checkpoint, which the first pass saves itself to.
        phase, arrays: what it held.

    Attributes:
        degree: (num_nodes,) entries a row.
        one_block: whether the whole graph fits a block.
        facts: arrays by name that must be saved with every later phase.
    """

    facts: dict[str, np.ndarray] = {}  # noqa: RUF012 (the rows are made again)

    def __init__(self, stream, scratch, block_edges, deduplicate, progress, saved, phase: str, arrays: dict):
        again = phase not in ("", DEGREES)
        state = ScanState(*(arrays[name] for name in ScanState._fields)) if phase == DEGREES else None
        after_chunk = None if again else lambda state: saved.after_chunk(DEGREES, state._asdict())
        self._csc = open_external_csc(stream, scratch, block_edges, deduplicate, progress, state, after_chunk)
        self.degree = self._csc.degree
        self.one_block = self._csc.num_blocks <= 1

    def in_memory(self, node_weight: np.ndarray) -> WeightedGraph:
        """Return the whole graph; its arrays are valid until the next read."""
        for block in self._csc.blocks():
            return WeightedGraph(block.indptr, block.indices, ONE, node_weight)
        return WeightedGraph(np.zeros(len(self.degree) + 1, np.int64), np.empty(0, np.int32), ONE, node_weight)

    def streamed(self, node_weight: np.ndarray) -> BlockGraph:
        return BlockGraph(self._csc, node_weight)

    def keep_degree(self, degree: np.ndarray | None) -> None:
        """The degrees are a part of the rows: nothing changes."""

    def close(self) -> None:
        self._csc.close()


class StreamedEdges:
    """The graph in edges, read from the stream again and again; arguments and attributes are those of `StreamedRows`.

    Cost: one pass, and an id a node for the degrees.
    """

    def __init__(self, stream, block_edges, deduplicate, progress, saved, phase: str, arrays: dict):
        with phases.phase("degrees"):
            if phase not in ("", DEGREES):
                self._simple = reopen_simple_graph(stream, arrays, None, progress)
                ids = id_dtype(stream.num_nodes)
                self.degree = arrays["degree"] if "degree" in arrays else np.zeros(stream.num_nodes, ids)
            else:
                state = ScanState(*(arrays[name] for name in ScanState._fields)) if phase else None

                def after_chunk(state: ScanState) -> None:
                    saved.after_chunk(DEGREES, state._asdict())

                self._simple, self.degree = open_simple_graph(stream, state, deduplicate, None, progress, after_chunk)
        self._progress = progress
        self.one_block = max(len(self.degree), 2 * self._simple.num_edges) <= block_edges

    @property
    def facts(self) -> dict[str, np.ndarray]:
        facts = graph_facts(self._simple)
        return facts if self.degree is None else {**facts, "degree": self.degree}

    def in_memory(self, node_weight: np.ndarray) -> WeightedGraph:
        return rows_of(self.streamed(node_weight), self.degree)

    def streamed(self, node_weight: np.ndarray) -> EdgeGraph:
        return EdgeGraph(self._simple, node_weight, self._progress)

    def keep_degree(self, degree: np.ndarray | None) -> None:
        """Free the degrees, and put what a resumed run will need of them in their place."""
        self.degree = degree

    def close(self) -> None:
        """Nothing is open between two passes."""
