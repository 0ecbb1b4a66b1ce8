import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner.multilevel import Effort, cycle, neighbour_joins, partition_in_memory
from lightning_gnnscale.partitioner.multilevel.neighbour_joins import GROWTH, join_neighbours
from tests.partitioner.multilevel.graphs import node_weights, weighted_graph, weighted_graphs


def grid(side):
    node = np.arange(side * side).reshape(side, side)
    pairs = [*zip(node[:, :-1].ravel(), node[:, 1:].ravel(), strict=True)]
    return weighted_graph(side * side, [*pairs, *zip(node[:-1].ravel(), node[1:].ravel(), strict=True)])


@given(graph=weighted_graphs(max_nodes=24), limit=st.integers(1, 20), seed=st.integers(0, 9))
def test_clusters_keep_their_limit(graph, limit, seed):
    limits = np.full(graph.node_weight.shape[1], limit, np.int64)
    label = join_neighbours(graph, limits, seed)
    if len(graph.indices) > neighbour_joins.FEW_NEIGHBOURS * graph.num_nodes:
        assert label is None
        return
    weight = node_weights(graph)
    for cluster in set(label.tolist()):
        members = np.flatnonzero(label == cluster)
        assert cluster in members
        assert len(members) == 1 or (weight[members].sum(axis=0) <= limits).all()


def test_a_grid_shrinks_to_pieces_of_neighbours():
    graph = grid(40)
    label = join_neighbours(graph, np.array([1000]), 3)
    sizes = np.bincount(label)
    assert sizes.max() <= GROWTH
    assert np.count_nonzero(sizes) < graph.num_nodes / 2
    for v in np.flatnonzero(sizes[label] > 1):  # nobody is in a cluster without one of its neighbours
        assert label[v] in label[graph.indices[graph.indptr[v] : graph.indptr[v + 1]]]


def test_leaves_of_a_full_hub_join_each_other():
    graph = weighted_graph(200, [(0, leaf) for leaf in range(1, 200)])
    assert len(set(join_neighbours(graph, np.array([1000]), 0).tolist())) < 60


@pytest.mark.parametrize("joins", [False, True])
def test_a_border_that_is_known_changes_no_part(monkeypatch, joins):
    graph, cap, effort = grid(60), np.full((4, 1), 927), Effort(stop=10, joins=joins)
    part = partition_in_memory(graph, cap, 1, effort=effort)
    assert np.bincount(part).max() <= 927
    monkeypatch.setattr(cycle, "_carried_border", lambda *_: None)
    assert np.array_equal(partition_in_memory(graph, cap, 1, effort=effort), part)
