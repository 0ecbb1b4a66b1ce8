"""The cut that GREM's paper expects of fixed greedy streaming, as a line beside measured cuts."""

import warnings

from ..edge_stream import open_edge_stream
from ..partitioner import partition
from ..partitioner.graph_access.simple_graph import SimpleGraph, open_simple_graph
from ..partitioner.grem_expectation import expected_greedy_cut
from .partition_graphs import GraphFile


class GreedyExpectation:
    """Expected cuts on one graph. The reference is METIS' partition of the whole graph, made once per number of parts.

    Args:
        graph: The edge file.
        seed: Seed of METIS and of the draws.
    """

    def __init__(self, graph: GraphFile, seed: int):
        self.graph, self.seed = graph, seed
        self._simple: SimpleGraph | None = None
        self._references: dict = {}

    def cut(self, num_parts: int, options: dict) -> float:
        """Return the expected share of cut edges.

        Args:
            num_parts: number of parts.
            options: chunk_edges_share and others of `expected_greedy_cut`.

        Raises:
            GNNScaleError: METIS is not installed.
        """
        stream = open_edge_stream(
            self.graph.path, num_nodes=self.graph.num_nodes, layout=self.graph.layout, **self.graph.reader
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            if self._simple is None:
                self._simple = open_simple_graph(stream)[0]
            if num_parts not in self._references:
                found = partition(stream, "metis", num_parts, seed=self.seed, evaluate=False)
                self._references[num_parts] = found.part_id
        return expected_greedy_cut(
            stream, self._references[num_parts], num_parts, seed=self.seed, graph=self._simple, **options
        )
