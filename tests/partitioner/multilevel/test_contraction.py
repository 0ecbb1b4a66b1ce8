import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner.graph_access.external_csc import open_external_csc
from lightning_gnnscale.partitioner.multilevel import pair_table, quotient, weighted_graph
from lightning_gnnscale.partitioner.multilevel.pair_table import PairTable
from lightning_gnnscale.partitioner.multilevel.quotient import build_quotient, contract, number_clusters
from lightning_gnnscale.partitioner.multilevel.weighted_graph import BlockGraph, RowThreads, total_weight
from tests.partitioner.graphs import simple_graphs, stream_of
from tests.partitioner.multilevel.graphs import dense, node_weights, weighted_graphs
from tests.partitioner.multilevel.graphs import weighted_graph as graph_of


def check(coarse, coarse_of, matrix, weight, label):
    """The coarse graph is what dense matrices give, its nodes in the order of their clusters' lowest nodes."""
    first_seen = list(dict.fromkeys(label))
    assert coarse_of.tolist() == [first_seen.index(c) for c in label]
    member = np.zeros((len(label), len(first_seen)), np.int64)
    member[np.arange(len(label)), coarse_of] = 1
    expected = member.T @ matrix @ member
    np.fill_diagonal(expected, 0)
    assert np.array_equal(dense(coarse), expected)
    assert np.array_equal(node_weights(coarse), member.T @ weight)
    assert len(coarse.indices) == np.count_nonzero(expected)  # no neighbour is listed twice, nor a node by itself
    assert coarse.total_edge_weight == expected.sum()
    assert np.array_equal(total_weight(coarse), weight.sum(axis=0))


def labels(num_nodes):
    return st.lists(st.integers(0, num_nodes - 1), min_size=num_nodes, max_size=num_nodes)


@given(graph=weighted_graphs(), data=st.data())
def test_contraction_equals_dense_matrices(graph, data):
    label = data.draw(labels(graph.num_nodes))
    coarse, coarse_of = contract(graph, np.array(label, np.int32))
    check(coarse, coarse_of, dense(graph), node_weights(graph), label)
    listed = [[] for _ in range(coarse.num_nodes)]
    for v in range(graph.num_nodes):
        for u in graph.indices[graph.indptr[v] : graph.indptr[v + 1]]:
            if coarse_of[u] != coarse_of[v] and coarse_of[u] not in listed[coarse_of[v]]:
                listed[coarse_of[v]].append(coarse_of[u])
    assert coarse.indices.tolist() == [c for row in listed for c in row]


def test_a_sample_of_long_rows_weighs_about_what_they_do():
    pairs = [(u, v) for u in range(60) for v in range(u)]
    graph, label = graph_of(60, pairs), np.arange(60, dtype=np.int32) // 20
    exact, sampled = (contract(graph, label, sample=sample)[0] for sample in (None, 7))
    assert np.array_equal(dense(exact), dense(contract(graph, label, sample=59)[0]))
    assert np.array_equal(sampled.indptr, exact.indptr)
    step = 9  # of 59 entries at most 7 are read: less than one of them is amiss for each of a cluster's 20 rows
    assert abs(sampled.edge_weight - exact.edge_weight).max() < 20 * step


@given(graph=simple_graphs(max_nodes=16), data=st.data())
def test_the_quotient_of_blocks_equals_dense_matrices(graph, data):
    num_nodes, edges = graph
    label = data.draw(labels(num_nodes))
    max_edges = data.draw(st.integers(0, 20))
    matrix = np.zeros((num_nodes, num_nodes), np.int64)
    for u, v in edges:
        matrix[u, v] = matrix[v, u] = 1
    vector = st.lists(st.integers(0, 6), min_size=2, max_size=2)
    weight = data.draw(st.none() | st.lists(vector, min_size=num_nodes, max_size=num_nodes))
    weight = np.ones((1, 1), np.int32) if weight is None else np.array(weight, np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_table, "FIRST_BITS", data.draw(st.integers(1, 3)))
        patch.setattr(quotient, "STEP_ENTRIES", data.draw(st.sampled_from([1, 7, 1 << 10])))
        patch.setattr(weighted_graph, "MIN_ENTRIES", 2)
        threads = RowThreads(data.draw(st.integers(1, 2)))
        stream = stream_of(edges, num_nodes, layout="once")
        with open_external_csc(stream, block_edges=data.draw(st.sampled_from([1, 9, 1 << 20]))) as csc:
            blocks = BlockGraph(csc, weight)
            coarse_of, num_coarse = number_clusters(np.array(label, np.int32))
            coarse = build_quotient(blocks, coarse_of, num_coarse, len(edges), None, 0, threads)
            bounded = build_quotient(blocks, coarse_of.copy(), num_coarse, max_edges, None, 0, threads)
            joined_of = coarse_of.copy()
            largest = np.array(data.draw(st.sampled_from([[100, 100], [4, 4], [0, 0]])))[: weight.shape[1]]
            joined = build_quotient(blocks, joined_of, num_coarse, max_edges, largest, 0, threads)
        threads.close()
    every_weight = np.broadcast_to(weight, (num_nodes, weight.shape[1])).astype(np.int64)
    check(coarse, coarse_of, matrix, every_weight, label)
    rows = np.split(coarse.indices, coarse.indptr[1:-1])
    assert all((np.diff(row) > 0).all() for row in rows)  # neighbours ascend
    assert (bounded is None) == (len(coarse.indices) // 2 > max_edges)
    if bounded is not None:
        assert all(np.array_equal(one, other) for one, other in zip(bounded, coarse, strict=True))
        assert np.array_equal(joined_of, coarse_of)
    check(joined, joined_of, matrix, every_weight, joined_of.tolist())
    assert len(set(zip(coarse_of.tolist(), joined_of.tolist(), strict=True))) == num_coarse  # none is taken apart
    before, after = coarse.node_weight, joined.node_weight
    assert (after <= np.maximum(largest, before.max(axis=0))).all()
    # Of all nodes together: nothing keeps clusters apart, but that none joins one that weighs nothing.
    if largest[0] == 100 and before.any(axis=1).all():
        assert len(joined.indices) // 2 <= max_edges


def test_weights_of_many_equal_pairs_are_added_up(monkeypatch):
    monkeypatch.setattr(pair_table, "FIRST_BITS", 1)
    monkeypatch.setattr(quotient, "STEP_ENTRIES", 100)
    rng = np.random.default_rng(2)
    pairs = np.unique(np.sort(rng.integers(0, 300, (4_000, 2)), axis=1), axis=0)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    matrix = np.zeros((300, 300), np.int64)
    matrix[pairs[:, 0], pairs[:, 1]] = matrix[pairs[:, 1], pairs[:, 0]] = 1
    label = rng.integers(0, 40, 300).astype(np.int32)
    threads = RowThreads(2)
    with open_external_csc(stream_of(pairs, 300, layout="once"), block_edges=1_000) as csc:
        coarse_of, num_coarse = number_clusters(label)
        blocks = BlockGraph(csc, np.ones((1, 1), np.int32))
        coarse = build_quotient(blocks, coarse_of, num_coarse, len(pairs), None, 0, threads)
    threads.close()
    check(coarse, coarse_of, matrix, np.ones((300, 1), np.int64), label.tolist())
    assert len(coarse.indices) > 1_000


def test_where_edges_are_many_a_sample_of_them_keeps_the_clusters_apart(monkeypatch):
    monkeypatch.setattr(quotient, "STEP_ENTRIES", 500)
    rng = np.random.default_rng(3)
    edges = rng.integers(0, 2_000, (40_000, 2))
    close = rng.random(len(edges)) < 0.5  # half of the edges lead to the next cluster of 100 nodes
    edges[close, 1] = (edges[close, 0] + 100) % 2_000
    pairs = np.unique(np.sort(edges[edges[:, 0] != edges[:, 1]], axis=1), axis=0)
    label = (np.arange(2_000) // 100).astype(np.int32)
    label[::50] = np.arange(0, 2_000, 50)  # and 40 clusters of one node
    coarse_of, num_coarse = number_clusters(label)
    sampled = []
    with open_external_csc(stream_of(pairs, 2_000, layout="once"), block_edges=10_000) as csc:
        blocks = BlockGraph(csc, np.ones((1, 1), np.int32))
        whole = build_quotient(blocks, coarse_of, num_coarse, len(pairs), None, 0, RowThreads(1))
        max_edges = len(whole.indices) // 4
        assert build_quotient(blocks, coarse_of, num_coarse, max_edges, None, 0, RowThreads(1), enough=1e9) is None
        for num_threads in (1, 2):
            threads = RowThreads(num_threads)
            sampled.append(build_quotient(blocks, coarse_of, num_coarse, max_edges, None, 0, threads, enough=1))
            threads.close()
    assert all(np.array_equal(one, other) for one, other in zip(*sampled, strict=True))
    few = sampled[0]
    assert few.num_nodes == whole.num_nodes and len(few.indices) // 2 <= max_edges
    assert np.array_equal(few.node_weight, whole.node_weight)
    assert few.total_edge_weight < 0.6 * whole.total_edge_weight
    heavy = dense(whole) > 200
    share = dense(few)[heavy] / dense(whole)[heavy]
    assert share.std() < 0.15 * share.mean()  # what is heavy stays so: 200 units of a sample spread by 7% to 10%


def test_thinning_keeps_about_half_of_each_weight():
    table = PairTable(10)
    table.add(np.repeat(np.arange(1, 1_001), 65), [(0, 65_000)])
    weights = []
    for key in (1, 2):
        thinned = PairTable(10, None, (table.keys.copy(), table.weights.copy()))
        thinned.thin(key)
        there = thinned.keys > 0
        assert thinned.size == there.sum() == 1_000
        weights.append(thinned.weights[there][np.argsort(thinned.keys[there])])
        assert abs(weights[-1].mean() - 32.5) < 5 * np.sqrt(65 / 4 / 1_000)
        assert abs(weights[-1].var() - 65 / 4) < 5 * (65 / 4) * np.sqrt(2 / 1_000)
    assert abs(np.corrcoef(weights)[0, 1]) < 5 / np.sqrt(1_000)
    lone = PairTable(10)
    lone.add(np.arange(1, 1_001), [(0, 1_000)])
    lone.thin(7)
    assert abs(lone.size - 500) < 5 * np.sqrt(250)
    lone.add(np.arange(1, 1_001), [(0, 1_000)])  # what is left is found again
    assert lone.size == 1_000 and lone.weights.sum() == 1_000 + (lone.weights == 2).sum()
