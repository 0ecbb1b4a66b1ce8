import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner import partition
from lightning_gnnscale.partitioner.multilevel import low_degrees
from lightning_gnnscale.partitioner.multilevel.low_degrees import join_low_degrees, parts_along
from lightning_gnnscale.partitioner.multilevel.weighted_graph import ONE, WeightedGraph
from tests.partitioner.graphs import stream_of
from tests.partitioner.multilevel.graphs import node_weights, weighted_graphs
from tests.partitioner.streamed_runs import cut_of


def is_connected(nodes, graph):
    nodes = set(nodes)
    todo, seen = [min(nodes)], {min(nodes)}
    while todo:
        v = todo.pop()
        near = nodes.intersection(graph.indices[graph.indptr[v] : graph.indptr[v + 1]].tolist()) - seen
        seen |= near
        todo += near
    return seen == nodes


@given(graph=weighted_graphs(), data=st.data())
def test_clusters_are_connected_within_their_group_and_the_limit(graph, data):
    group = np.array(data.draw(st.lists(st.integers(0, 1), min_size=graph.num_nodes, max_size=graph.num_nodes)))
    group = data.draw(st.sampled_from([None, group.astype(np.int16)]))
    weight = node_weights(graph)
    limit = np.full(weight.shape[1], data.draw(st.sampled_from([2, 5, 1000])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_degrees, "MAX_MEAN_DEGREE", 1e9)
        patch.setattr(low_degrees, "MAX_LEFT", 1.0)
        label = join_low_degrees(graph, limit, group)
    for c in set(label.tolist()):
        members = np.flatnonzero(label == c)
        assert c in members and is_connected(members.tolist(), graph)
        assert len(members) == 1 or (weight[members].sum(axis=0) <= limit).all()
        assert group is None or len(set(group[members].tolist())) == 1
    is_tree = len(graph.indices) == 2 * (graph.num_nodes - 1) and is_connected(range(graph.num_nodes), graph)
    if is_tree and limit[0] == 1000 and group is None:
        assert len(set(label.tolist())) == 1


def path(num_nodes):
    return np.stack([np.arange(num_nodes - 1), np.arange(1, num_nodes)], 1)


def cycle(num_nodes):
    return np.stack([np.arange(num_nodes), (np.arange(num_nodes) + 1) % num_nodes], 1)


def binary_tree(num_nodes):
    return np.stack([(np.arange(1, num_nodes) - 1) // 2, np.arange(1, num_nodes)], 1)


def caterpillar(num_nodes):
    """A path whose nodes have three leaves each."""
    inner = num_nodes // 4
    return np.concatenate(
        [path(inner), np.stack([np.arange(inner, num_nodes) % inner, np.arange(inner, num_nodes)], 1)]
    )


@pytest.mark.parametrize(
    ("edges", "num_parts", "most"),
    [(path(30_000), 8, 7), (cycle(20_000), 8, 8), (binary_tree(2**14 - 1), 32, 44), (caterpillar(20_000), 16, 15)],
    ids=["path", "cycle", "binary tree", "caterpillar"],
)
@pytest.mark.parametrize("effort", ["fast", "default"])
def test_paths_and_trees_are_cut_hardly_more_often_than_they_must_be(edges, num_parts, most, effort):
    num_nodes = int(edges.max()) + 1
    rng = np.random.default_rng(0)
    edges = rng.permutation(num_nodes)[edges][rng.permutation(len(edges))]
    found = partition(
        stream_of(edges, num_nodes, layout="once"), "streaming_multilevel", num_parts, effort=effort, evaluate=False
    )
    assert cut_of(edges, found.part_id) <= most
    assert found.notes["balance_violations"] == {}


@pytest.mark.filterwarnings("ignore:balance of")
def test_a_path_on_disk_is_cut_hardly_more_often_than_in_memory():
    edges = np.random.default_rng(1).permutation(6_000)[path(6_000)]
    stream = stream_of(edges, 6_000, layout="once")
    found = partition(stream, "streaming_multilevel", 8, block_edges=2_000, evaluate=False)
    assert cut_of(edges, found.part_id) <= 14


def test_graphs_of_more_neighbours_are_left_to_label_propagation():
    ring = np.arange(100)
    indices = np.stack([(ring + step) % 100 for step in (-2, -1, 1, 2)], 1).ravel().astype(np.int32)
    graph = WeightedGraph(np.arange(0, 401, 4), indices, ONE, np.ones((1, 1), np.int32))
    assert join_low_degrees(graph, np.array([10]), None) is None
    assert parts_along(graph, np.full(4, 0.25)) is None
