"""Weighted graphs in memory that the tests of the multilevel method share."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from lightning_gnnscale.partitioner.multilevel import WeightedGraph
from lightning_gnnscale.partitioner.multilevel.weighted_graph import ONE, WeightedRows


def weighted_graph(num_nodes, edges, node_weight=None, order=None):
    """Build a WeightedGraph.

    Args:
        edges: {(u, v): weight} with u != v, each undirected edge once; or (u, v) pairs: all weigh one.
        node_weight: (num_nodes, D); None: all nodes weigh one.
        order: a random.Random that shuffles every row; None: in the order of the edges.
    """
    rows = [[] for _ in range(num_nodes)]
    weights = edges if isinstance(edges, dict) else dict.fromkeys(map(tuple, edges), 1)
    for (u, v), w in weights.items():
        rows[u].append((v, w))
        rows[v].append((u, w))
    if order is not None:
        for row in rows:
            order.shuffle(row)
    indptr = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    entries = np.array([entry for row in rows for entry in row], np.int32).reshape(-1, 2)
    edge_weight = np.ascontiguousarray(entries[:, 1]) if isinstance(edges, dict) else ONE
    if node_weight is None:
        node_weight = np.ones((1, 1), np.int32)
    return WeightedGraph(indptr, np.ascontiguousarray(entries[:, 0]), edge_weight, np.asarray(node_weight, np.int32))


@st.composite
def weighted_graphs(draw, max_nodes=16, min_nodes=1, max_dims=3, min_node_weight=0):
    """A WeightedGraph whose edges all weigh one, or from 1 to 5, and whose nodes have vectors of weights."""
    num_nodes = draw(st.integers(min_nodes, max_nodes))
    pairs = [(u, v) for u in range(num_nodes) for v in range(u)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=60)) if pairs else []
    if edges and draw(st.booleans()):
        edges = {edge: draw(st.integers(1, 5)) for edge in edges}
    num_dims = draw(st.integers(0, max_dims))
    node_weight = None
    if num_dims:
        vector = st.lists(st.integers(min_node_weight, 6), min_size=num_dims, max_size=num_dims)
        node_weight = draw(st.lists(vector, min_size=num_nodes, max_size=num_nodes))
    return weighted_graph(num_nodes, edges, node_weight, draw(st.randoms(use_true_random=True)))


class CutGraph(NamedTuple):
    """A WeightedGraph that is read in several blocks, the first row of each in `starts`."""

    whole: WeightedGraph
    starts: list[int]

    def __getattr__(self, name):
        return getattr(self.whole, name)

    def blocks(self):
        indptr, indices, edge_weight = self.whole[:3]
        for first, last in zip(self.starts, [*self.starts[1:], self.whole.num_nodes], strict=True):
            entries = slice(indptr[first], indptr[last])
            weight = edge_weight if len(edge_weight) == 1 else edge_weight[entries]
            yield WeightedRows(first, indptr[first : last + 1] - indptr[first], indices[entries], weight)


@st.composite
def cut_graphs(draw, **options):
    """A CutGraph of any number of blocks."""
    graph = draw(weighted_graphs(**options))
    inner = st.lists(st.integers(1, graph.num_nodes - 1), unique=True) if graph.num_nodes > 1 else st.just([])
    return CutGraph(graph, [0, *sorted(draw(inner))])


def dense(graph):
    """(num_nodes, num_nodes) int64: the weight of every entry."""
    matrix = np.zeros((graph.num_nodes, graph.num_nodes), np.int64)
    rows = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    np.add.at(matrix, (rows, graph.indices), np.broadcast_to(graph.edge_weight, len(rows)))
    return matrix


def node_weights(graph):
    """(num_nodes, D) int64."""
    return np.broadcast_to(graph.node_weight, (graph.num_nodes, graph.node_weight.shape[1])).astype(np.int64)


def loads_of(graph, part, num_parts):
    loads = np.zeros((num_parts, graph.node_weight.shape[1]), np.int64)
    np.add.at(loads, part, node_weights(graph))
    return loads


def cut_of(graph, part):
    return int(dense(graph)[part[:, None] != part[None, :]].sum()) // 2
