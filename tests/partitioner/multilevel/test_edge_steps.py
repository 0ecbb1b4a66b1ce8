import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner.graph_access.external_csc import open_external_csc
from lightning_gnnscale.partitioner.graph_access.simple_graph import open_simple_graph
from lightning_gnnscale.partitioner.multilevel import edge_form, pair_table, quotient, refinement, weighted_graph
from lightning_gnnscale.partitioner.multilevel.edge_form import EdgeClusters, EdgeSteps
from lightning_gnnscale.partitioner.multilevel.quotient import build_quotient, number_clusters
from lightning_gnnscale.partitioner.multilevel.refinement import JetSpace, refine
from lightning_gnnscale.partitioner.multilevel.weighted_graph import BlockGraph, EdgeGraph, RowThreads, rows_of
from tests.oracles import edge_counters
from tests.oracles.jet import afterburner
from tests.partitioner.graphs import simple_graphs, stream_of
from tests.partitioner.multilevel.graphs import loads_of

NO_WEIGHTS = np.ones((1, 1), np.int32)


def edge_graph(num_nodes, edges, node_weight=NO_WEIGHTS, chunk_edges=7):
    """(EdgeGraph, degrees) of edges that are each listed once."""
    stream = stream_of(edges, num_nodes, layout="once", chunk_edges=chunk_edges)
    simple, degree = open_simple_graph(stream, scratch=None)
    return EdgeGraph(simple, np.asarray(node_weight, np.int32)), degree


def rows_in_python(num_nodes, edges):
    rows = [[] for _ in range(num_nodes)]
    for u, v in edges:
        rows[u].append((v, 1))
        rows[v].append((u, 1))
    return rows


def weights(sample, num_nodes):
    if sample(st.booleans()):
        return NO_WEIGHTS
    num_dims = sample(st.integers(1, 3))
    vector = st.lists(st.integers(0, 4), min_size=num_dims, max_size=num_dims)
    return np.array(sample(st.lists(vector, min_size=num_nodes, max_size=num_nodes)), np.int32)


def parts(sample, num_nodes, num_parts):
    return np.array(sample(st.lists(st.integers(0, num_parts - 1), min_size=num_nodes, max_size=num_nodes)), np.int16)


@pytest.fixture(autouse=True)
def small_shares(monkeypatch):
    monkeypatch.setattr(weighted_graph, "MIN_ENTRIES", 1)


def hub_and_crowd(seed, num_nodes=150):
    """Some nodes have neighbours in far more parts and clusters than there are counters."""
    rng = np.random.default_rng(seed)
    pairs = np.unique(np.sort(rng.integers(0, num_nodes, (500, 2)) // [1, 1 + 9 * (seed % 2)], axis=1), axis=0)
    return rng.permutation(pairs[pairs[:, 0] != pairs[:, 1]]).tolist()


@given(graph=simple_graphs(), data=st.data())
def test_up_to_8_parts_refinement_over_edges_is_that_over_rows(graph, data):
    num_nodes, edges = graph
    node_weight = weights(data.draw, num_nodes)
    num_parts = data.draw(st.integers(1, 8))
    start = parts(data.draw, num_nodes, num_parts)
    stream, degree = edge_graph(num_nodes, edges, node_weight, data.draw(st.integers(1, 40)))
    rows = rows_of(stream, degree)
    load = loads_of(rows, start, num_parts)
    cap = np.maximum(1, -(-load.sum(axis=0) // num_parts) + data.draw(st.integers(0, 4))) + 0 * load
    seed, loss = data.draw(st.integers(0, 5)), data.draw(st.sampled_from([0.0, 0.25, 0.75]))
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refinement, "FEW_LOOSE_ROUNDS", refinement.LOOSE_ROUNDS)
        patch.setattr(refinement, "STALLED", np.inf)
        patch.setattr(refinement, "INNER", 1.0)
        for read, num_threads in ((rows, 1), (stream, 1), (stream, 3)):
            threads = RowThreads(num_threads)
            part, kept = start.copy(), load.copy()
            told = refine(read, part, kept, cap, seed, threads, JetSpace.empty(num_nodes), loss, 3, 6)
            threads.close()
            results.append((part.tolist(), kept.tolist(), told))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_round_with_many_parts_equals_the_oracle(seed, num_threads):
    num_nodes, num_parts = 150, 40
    edges = hub_and_crowd(seed)
    part = np.random.default_rng(seed).integers(0, num_parts, num_nodes).astype(np.int16)
    resting = set(range(0, num_nodes, 11))
    moved = np.array([v in resting for v in range(num_nodes)])
    target, gain, price = np.empty(num_nodes, np.int16), np.empty(num_nodes), np.zeros((num_parts, 1))
    threads = RowThreads(num_threads)
    steps = EdgeSteps(edge_graph(num_nodes, edges)[0], threads)
    assert steps.select(part, price, 0.5, target, gain, moved) == sum(part[u] != part[v] for u, v in edges)
    found = {v: (int(target[v]), int(gain[v])) for v in np.flatnonzero(target >= 0).tolist()}
    assert found == edge_counters.candidates(edges, part.tolist(), resting, 0.5)
    steps.reconsider(part, price, target, gain, moved)
    threads.close()
    assert set(np.flatnonzero(moved).tolist()) == afterburner(rows_in_python(num_nodes, edges), part.tolist(), found)
    assert 10 < moved.sum() < len(found)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_with_many_parts_a_round_that_goes_on_from_saved_arrays_ends_the_same(num_threads):
    num_nodes, num_parts = 150, 12
    graph, degree = edge_graph(num_nodes, hub_and_crowd(3))
    start = np.random.default_rng(1).integers(0, num_parts, num_nodes).astype(np.int16)
    cap, threads, states = np.full((num_parts, 1), 14), RowThreads(num_threads), []

    def run(saved=None):
        part = start.copy()
        load = loads_of(rows_of(graph, degree), part, num_parts)
        space = JetSpace.empty(num_nodes)
        keep = None if saved else lambda state: states.append({name: array.copy() for name, array in state.items()})
        told = refine(graph, part, load, cap, 0, threads, space, 0.25, 5, 5, keep, saved)
        return part.tolist(), load.tolist(), told

    expected = run()
    assert expected[2][1]
    assert len(states) == 5
    for state in states:
        assert run(state) == expected
    threads.close()


@given(graph=simple_graphs(), data=st.data())
def test_clusters_equal_the_oracle(graph, data):
    num_nodes, edges = graph
    node_weight = weights(data.draw, num_nodes)
    num_dims = node_weight.shape[1]
    limit = np.array(data.draw(st.lists(st.integers(1, 12), min_size=num_dims, max_size=num_dims)), np.int64)
    check_clusters(num_nodes, edges, node_weight, limit, data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3)))


@pytest.mark.parametrize("limit", [5, 40])
def test_clusters_of_nodes_with_many_neighbours_equal_the_oracle(limit):
    for seed in (0, 1):
        check_clusters(150, hub_and_crowd(seed), NO_WEIGHTS, np.array([limit]), seed, 2)


def check_clusters(num_nodes, edges, node_weight, limit, seed, num_threads):
    threads = RowThreads(num_threads)
    clusters = EdgeClusters(edge_graph(num_nodes, edges, node_weight)[0], seed, threads)
    every = np.broadcast_to(node_weight, (num_nodes, node_weight.shape[1])).tolist()
    expected = edge_counters.Clusters(every, limit.tolist())
    clusters.step(0, limit)
    expected.begin(edges, edge_counters.cluster_key(seed, 0))
    assert clusters.label.tolist() == expected.label
    clusters.step(1, limit)
    expected.propagate(edges, edge_counters.cluster_key(seed, 1), 0)
    assert clusters.label.tolist() == expected.label
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edge_form, "join_two_hops", lambda *_: None)
        clusters.step(2, limit)
    expected.propagate(edges, edge_counters.cluster_key(seed, 2), 1)
    assert clusters.label.tolist() == expected.label
    assert clusters.arrays()["favourite"].tolist() == expected.favourite
    clusters.step(3, limit)
    clusters.step(4, limit)
    threads.close()
    load = np.zeros((num_nodes, len(limit)), np.int64)
    np.add.at(load, clusters.label, np.broadcast_to(node_weight, (num_nodes, len(limit))))
    heaviest = np.broadcast_to(node_weight, load.shape).max(axis=0)
    assert (load <= np.maximum(limit, heaviest)).all()


@given(graph=simple_graphs(), data=st.data())
def test_the_quotient_of_edges_is_that_of_rows(graph, data):
    num_nodes, edges = graph
    label = np.array(data.draw(st.lists(st.integers(0, num_nodes - 1), min_size=num_nodes, max_size=num_nodes)))
    node_weight = weights(data.draw, num_nodes)
    max_edges = data.draw(st.sampled_from([3, 60]))
    threads = RowThreads(data.draw(st.integers(1, 2)))
    stream = stream_of(edges, num_nodes, layout="once")
    with pytest.MonkeyPatch.context() as patch, open_external_csc(stream) as csc:
        patch.setattr(pair_table, "FIRST_BITS", 2)
        patch.setattr(quotient, "STEP_ENTRIES", data.draw(st.sampled_from([1, 5, 1 << 10])))
        number, num_coarse = number_clusters(label.astype(np.int32))
        same, bound = number.copy(), (num_coarse, max_edges, None, 0, threads)
        of_rows = build_quotient(BlockGraph(csc, node_weight), number, *bound)
        chunks = edge_graph(num_nodes, edges, node_weight, data.draw(st.integers(1, 30)))[0]
        of_edges = build_quotient(chunks, same, *bound)
        largest = np.full(node_weight.shape[1], 100)
        joined = []  # however the edges come in chunks
        for chunk_edges in (1, 7, 1000):
            chunks = edge_graph(num_nodes, edges, node_weight, chunk_edges)[0]
            joined.append([joined_of := same.copy()])
            joined[-1] += build_quotient(chunks, joined_of, num_coarse, max_edges, largest, 0, threads)
    threads.close()
    for other in joined[1:]:
        assert all(np.array_equal(one, another) for one, another in zip(joined[0], other, strict=True))
    assert (of_rows is None) == (of_edges is None)
    if of_rows is not None:
        assert all(np.array_equal(one, other) for one, other in zip(of_rows, of_edges, strict=True))
