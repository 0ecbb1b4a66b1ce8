"""Hubs begin as one part where clusters tell nothing, and only there."""

import numpy as np
import pytest

from lightning_gnnscale.graph import build_csc
from lightning_gnnscale.partitioner import partition, streaming_multilevel
from lightning_gnnscale.partitioner.multilevel.clustering import cluster_limit, cluster_nodes
from lightning_gnnscale.partitioner.multilevel.hubs import hub_parts
from lightning_gnnscale.partitioner.multilevel.weighted_graph import ONE, RowThreads, WeightedGraph
from tests.partitioner.graphs import stream_of
from tests.partitioner.streamed_runs import cut_of

NUM_NODES = 2000


def edges_of(communities):
    """Return 20,000 edges with both ends by Pareto weights, four of five of them within a community."""
    rng = np.random.default_rng(0)
    upper = np.cumsum(rng.pareto(1.8, NUM_NODES) + 1)
    src, dst = np.searchsorted(upper / upper[-1], rng.random((2, 20_000)))
    size = NUM_NODES // communities
    near = rng.random(20_000) < (0.8 if communities > 1 else 0)
    dst = np.where(near, src // size * size + dst % size, dst)
    pairs = np.sort(np.stack([src, dst], axis=1), axis=1)
    return np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)


def rows_of(edges):
    both = np.concatenate([edges, edges[:, ::-1]])
    csc = build_csc(both[:, 0], both[:, 1], NUM_NODES)
    indices = np.asarray(csc.indices, np.int32)
    return WeightedGraph(np.asarray(csc.indptr, np.int64), indices, ONE, np.ones((1, 1), np.int32))


def parts_of(graph, cap, num_parts=4):
    label = cluster_nodes(graph, cluster_limit(graph, num_parts, 100.0), 1, RowThreads(1), passes=2)
    return hub_parts(graph, label, np.full((num_parts, 1), cap), 0, RowThreads(2))


def test_the_nodes_with_most_neighbours_are_one_part():
    graph = rows_of(edges_of(1))
    part, degree = parts_of(graph, 515), np.diff(graph.indptr)
    assert degree[part == 0].min() > np.sort(degree)[-501] - 1 >= degree[part != 0].max() - 1
    assert np.bincount(part, minlength=4).min() > 300


@pytest.mark.parametrize(("communities", "cap"), [(40, 515), (1, 100)])
def test_communities_and_hubs_that_fit_no_part_are_left_to_clusters(communities, cap):
    assert parts_of(rows_of(edges_of(communities)), cap) is None


def test_of_many_parts_none_is_of_hubs():
    """So few edges are between these that the part would be large for nothing."""
    graph = rows_of(edges_of(1))
    assert parts_of(graph, 255, 8) is not None
    assert parts_of(graph, 35, 64) is None


def test_hubs_lower_the_cut_where_the_graph_of_clusters_is_a_sample(monkeypatch):
    edges = edges_of(1)
    stream = stream_of(edges, NUM_NODES, layout="once")
    given = {"effort": "fast", "quotient_edges_per_node": 0, "evaluate": False}
    monkeypatch.setattr(streaming_multilevel, "MIN_QUOTIENT_EDGES", 1)
    one, three = (partition(stream, "streaming_multilevel", 4, num_threads=n, **given).part_id for n in (1, 3))
    assert np.array_equal(one, three)
    monkeypatch.setattr(streaming_multilevel, "hub_parts", lambda *_: None)
    without = partition(stream, "streaming_multilevel", 4, num_threads=1, **given).part_id
    assert cut_of(edges, one) < 0.97 * cut_of(edges, without)
