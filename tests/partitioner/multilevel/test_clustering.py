import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.jit import kernel
from lightning_gnnscale.partitioner.multilevel import cluster_choice, clustering
from lightning_gnnscale.partitioner.multilevel import weighted_graph as threads_module
from lightning_gnnscale.partitioner.multilevel.clustering import cluster_limit, cluster_nodes
from lightning_gnnscale.partitioner.multilevel.clustering import visiting_order as compiled_order
from lightning_gnnscale.partitioner.multilevel.weighted_graph import RowThreads
from lightning_gnnscale.triton_kernels.intrinsics import EQUAL_ITEMS, equal_items
from tests.oracles.label_propagation import label_propagation, visiting_order
from tests.partitioner.multilevel.graphs import cut_graphs, dense, node_weights, weighted_graph, weighted_graphs

BATCH, FIRST_SAMPLE, SAMPLE = 40, 8, 16


def rows_of(graph):
    weight = np.broadcast_to(graph.edge_weight, len(graph.indices)).tolist()
    entries = list(zip(graph.indices.tolist(), weight, strict=True))
    return [entries[a:b] for a, b in zip(graph.indptr[:-1], graph.indptr[1:], strict=True)]


@given(graph=cut_graphs(max_nodes=20), data=st.data())
def test_equals_the_oracle(graph, data):
    num_nodes, num_dims = graph.num_nodes, graph.node_weight.shape[1]
    limit = np.array(data.draw(st.lists(st.integers(0, 25), min_size=num_dims, max_size=num_dims)))
    nodes = st.lists(st.integers(0, num_nodes - 1), min_size=num_nodes, max_size=num_nodes)
    group = data.draw(st.none() | st.lists(st.integers(0, 2), min_size=num_nodes, max_size=num_nodes))
    label = data.draw(st.none() | nodes) if group is None else None
    seed, passes = data.draw(st.integers(0, 100)), data.draw(st.integers(1, 3))
    weight, samples = node_weights(graph).tolist(), (FIRST_SAMPLE, SAMPLE)
    expected = label_propagation(
        rows_of(graph), graph.starts, weight, limit, seed, passes, BATCH, samples, label, group
    )
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clustering, "MIN_BATCH_WORK", BATCH)
        patch.setattr(clustering, "FIRST_SAMPLE", FIRST_SAMPLE)
        patch.setattr(clustering, "SAMPLE", SAMPLE)
        patch.setattr(clustering, "MIN_SHARED_WORK", 1)
        patch.setattr(threads_module, "MIN_ENTRIES", 2)
        threads = RowThreads(data.draw(st.integers(1, 2)))
        found = cluster_nodes(
            graph,
            limit,
            seed,
            threads,
            None if group is None else np.array(group, np.int16),
            passes,
            None if label is None else np.array(label, np.int32),
            lambda label, done: calls.append((label.copy(), done)),
        )
        threads.close()
    assert found.tolist() == expected
    assert [done for _, done in calls] == list(range(1, len(calls) + 1))


@given(graph=weighted_graphs(max_nodes=24), data=st.data())
def test_limits_are_kept_and_groups_respected(graph, data):
    num_nodes, num_dims = graph.num_nodes, graph.node_weight.shape[1]
    limit = np.array(data.draw(st.lists(st.integers(0, 25), min_size=num_dims, max_size=num_dims)))
    group = np.array(data.draw(st.lists(st.integers(0, 2), min_size=num_nodes, max_size=num_nodes)), np.int16)
    label = cluster_nodes(graph, limit, data.draw(st.integers(0, 9)), RowThreads(1), group)
    assert label.min() >= 0
    assert label.max() < num_nodes
    assert np.array_equal(group[label], group)
    weight = node_weights(graph)
    for c in np.unique(label):
        members = label == c
        assert members.sum() == 1 or (weight[members].sum(axis=0) <= limit).all()


def test_going_on_never_lets_a_cluster_grow_beyond_its_limit():
    rng = np.random.default_rng(0)
    edges = {tuple(sorted(pair)) for pair in rng.integers(0, 200, (900, 2)).tolist() if pair[0] != pair[1]}
    graph = weighted_graph(200, edges, rng.integers(1, 5, (200, 2)))
    label = (np.arange(200) // 20 * 20).astype(np.int32)
    before = np.zeros((200, 2), np.int64)
    np.add.at(before, label, node_weights(graph))
    limit = np.array([40, 30])
    label = cluster_nodes(graph, limit, 3, RowThreads(1), label=label)
    after = np.zeros((200, 2), np.int64)
    np.add.at(after, label, node_weights(graph))
    assert (after <= np.maximum(before, limit)).all()


def test_cliques_become_clusters():
    edges = [(10 * c + u, 10 * c + v) for c in range(20) for u in range(10) for v in range(u)]
    edges += [(10 * c, (10 * c + 15) % 200) for c in range(20)]
    label = cluster_nodes(weighted_graph(200, edges), np.array([10]), 0, RowThreads(1))
    for c in range(20):
        assert len(set(label[10 * c : 10 * c + 10])) == 1
    assert len(set(label)) == 20


def test_nodes_without_edges_and_leaves_of_a_hub_join_one_another():
    graph = weighted_graph(41, [(0, v) for v in range(1, 21)])
    label = cluster_nodes(graph, np.array([5]), 0, RowThreads(1))
    sizes = np.bincount(label, minlength=41)
    assert sizes.max() == 5
    assert (sizes > 0).sum() <= 10  # 41 nodes in clusters of 5, one in each kind perhaps smaller
    assert set(label[21:]).isdisjoint(label[:21])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_order_of_several_windows_equals_the_oracle(monkeypatch, num_threads):
    monkeypatch.setattr(threads_module, "MIN_ENTRIES", 2)
    rng = np.random.default_rng(1)
    degrees = np.minimum(rng.zipf(1.6, 40_000) - 1, 5_000)
    indptr = np.append(0, np.cumsum(degrees))
    threads = RowThreads(num_threads)
    order, reach = compiled_order(indptr, np.uint64(77), 32, threads)
    threads.close()
    assert order.tolist() == visiting_order(degrees.tolist(), 77)
    assert np.array_equal(reach[1:], np.cumsum(8 + np.minimum(32, degrees[order])))


def test_the_limit_makes_parts_of_full_clusters():
    graph = weighted_graph(100, [(0, 1)], np.array([[3, 1]]))
    assert cluster_limit(graph, 4, 5.0).tolist() == [15, 5]
    assert cluster_limit(graph, 50, 5.0).tolist() == [2, 2]


def test_ratings_follow_edge_weights_not_counts():
    edges = {(0, 1): 5, (0, 2): 1, (0, 3): 1, (2, 3): 9}
    graph = weighted_graph(4, edges)
    assert dense(graph)[0].tolist() == [0, 5, 1, 1]
    label = cluster_nodes(graph, np.array([2]), 0, RowThreads(1))
    assert label[0] == label[1] != label[2] == label[3]


@kernel
def _equal(near, index, value):
    return equal_items(near, index, value)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_label_that_comes_most_often_is_counted_exactly(dtype):
    rng, key = np.random.default_rng(0), np.uint64(0x9E3779B97F4A7C15)
    for num in range(2 * EQUAL_ITEMS + 1):
        first, own = int(rng.integers(5)), dtype(rng.integers(8))
        near = rng.integers(0, 8, first + num + 2 * EQUAL_ITEMS).astype(dtype)  # what stands behind does not count
        mask = sum(1 << i for i in range(EQUAL_ITEMS) if near[first + i] == own)
        assert _equal(near, first, own) == mask
        counts = np.bincount(near[first : first + num], minlength=8)
        others = [(int(counts[c]), (c * int(key)) % 2**64, c) for c in range(8) if c != own and counts[c]]
        most, _, liked = max(others, default=(0, 0, own))
        assert cluster_choice._compare(own, key, near, first, first + num) == (liked, most, counts[own])


def test_groups_that_share_a_place_in_the_table_of_lonely_nodes_stay_apart():
    group = np.array([0, 256, 512, 512, 256, 0, 0], np.int16)
    label = cluster_nodes(weighted_graph(7, []), np.array([5]), 0, RowThreads(1), group)
    assert np.array_equal(group[label], group)
    assert label[3] == label[2]
    assert label[6] == label[5]
