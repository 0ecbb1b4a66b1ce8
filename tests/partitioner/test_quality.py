"""Every figure beside networkx and plain sums; what a part loads beside the store's own arrays; memory."""

import tracemalloc

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partition_store import PartitionStore, write_partition_store
from lightning_gnnscale.partitioner import Partitioning, evaluate_partitioning
from lightning_gnnscale.partitioner.graph_access.simple_graph import open_simple_graph
from tests.partitioner.graphs import ODD, listed, simple_graphs, stream_of
from tests.says import said

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def simple_graph(num_nodes, edges):
    graph = nx.Graph(e for e in edges if e[0] != e[1])
    graph.add_nodes_from(range(num_nodes))
    return graph


def within(graph, nodes, hops):
    reached = set()
    for v in nodes:
        reached |= set(nx.single_source_shortest_path_length(graph, v, cutoff=hops))
    return reached


def expected_bytes_and_components(num_nodes, edges, part_id, part, hops, feature_bytes):
    graph = simple_graph(num_nodes, edges)
    core = [v for v in range(num_nodes) if part_id[v] == part]
    near = within(graph, core, hops - 1) if hops else set()
    directed_edges = 0
    for u, v in graph.edges:
        directed_edges += 2 * (u in near or v in near or (hops == 0 and part_id[u] == part_id[v] == part))
    local = len(within(graph, core, hops))
    size = local * feature_bytes + 8 * (local + 1) + 4 * directed_edges
    return size, nx.number_connected_components(graph.subgraph(core))


def expected_quality(num_nodes, edges, part_id, num_parts, hops):
    """The same figures from networkx and plain sums."""
    graph = simple_graph(num_nodes, edges)
    core = [{v for v in range(num_nodes) if part_id[v] == p} for p in range(num_parts)]
    needed = [within(graph, nodes, hops) for nodes in core]
    held = [sum(u in nodes or v in nodes for u, v in graph.edges) for nodes in core]
    volume = [sum(graph.degree(v) for v in nodes) for nodes in core]
    cut = sum(part_id[u] != part_id[v] for u, v in graph.edges)
    return graph.number_of_edges(), cut, [len(c) for c in core], [len(n) for n in needed], held, volume


def check(num_nodes, edges, directed_edges, part_id, num_parts, hops, **options):
    q = evaluate_partitioning(
        stream_of(directed_edges, num_nodes, **options), part_id, num_parts, hops, feature_bytes=12
    )
    num_edges, cut, core, needed, held, volume = expected_quality(num_nodes, edges, part_id, num_parts, hops)
    assert (q.num_edges, q.cut_edges) == (num_edges, cut)
    assert q.edge_cut_ratio == (cut / num_edges if num_edges else 0.0)
    assert q.nodes_per_part == core
    assert q.halo_per_part == [n - c for n, c in zip(needed, core, strict=True)]
    assert q.replication_factor == sum(needed) / num_nodes
    assert q.edges_per_part == held
    assert q.volume_per_part == volume
    assert q.node_balance == max(core) * num_parts / num_nodes
    for found, loads in ((q.edge_balance, held), (q.volume_balance, volume)):
        assert found == (max(loads) * num_parts / sum(loads) if sum(loads) else 1.0)
    for part in range(num_parts):
        expected = expected_bytes_and_components(num_nodes, edges, part_id, part, hops, 12)
        assert (q.bytes_per_part[part], q.components_per_part[part]) == expected


@given(
    graph=simple_graphs(),
    layout=st.sampled_from(["once", "both_ways", "directed"]),
    num_parts=st.sampled_from([1, 2, 3, 8, 9, 17]),
    hops=st.integers(0, 3),
    chunk=st.integers(1, 40),
    seed=st.integers(0, 100),
)
def test_equals_networkx_in_every_layout(graph, layout, num_parts, hops, chunk, seed):
    num_nodes, edges = graph
    part_id = np.random.default_rng(seed).integers(0, num_parts, num_nodes).astype(np.int32)
    directed_edges = listed(edges, layout)
    check(num_nodes, edges, directed_edges, part_id, num_parts, hops, layout=layout, chunk_edges=chunk)


@pytest.mark.parametrize("name", ODD)
def test_odd_graphs_equal_networkx(name):
    num_nodes, edges = ODD[name]
    part_id = np.arange(num_nodes, dtype=np.int32) % 3
    check(num_nodes, edges, edges, part_id, 3, 1)


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_bytes_are_those_that_a_store_loads(tmp_path, hops):
    rng = np.random.default_rng(0)
    num_nodes, num_parts = 60, 3
    edges = sorted({(int(min(e)), int(max(e))) for e in rng.integers(0, num_nodes, (90, 2)) if e[0] != e[1]})
    part_id = rng.integers(0, num_parts, num_nodes).astype(np.int32)
    features = rng.random((num_nodes, 5), np.float32)
    stream = stream_of(edges, num_nodes, layout="once", to_undirected=True)
    q = evaluate_partitioning(stream, part_id, num_parts, hops, feature_bytes=features[0].nbytes)
    write_partition_store(
        tmp_path / "store", stream, Partitioning(part_id, num_parts, "given", {}, 0), features=features
    )
    store = PartitionStore.open(tmp_path / "store")
    for part in range(num_parts):
        graph = store.load_part(part, hops)
        loaded = store.load_features(graph).nbytes + graph.csc.indptr.nbytes + graph.csc.indices.nbytes
        assert q.bytes_per_part[part] == loaded
        assert q.halo_per_part[part] == graph.num_halo


@pytest.mark.parametrize("before", [0, 12, 2.5])
def test_feature_rows_of_another_size_count_as_if_measured_with(before):
    stream, part_id = stream_of([(0, 1), (1, 2), (2, 3), (3, 4)], 5), np.array([0, 0, 0, 1, 1], np.int32)
    measured = [evaluate_partitioning(stream, part_id, 2, feature_bytes=size) for size in (before, 3.7)]
    assert measured[0].with_feature_bytes(3.7) == measured[1]


def test_memory_is_two_bits_a_part_and_16_bytes_a_node():
    num_nodes, num_parts = 150_000, 60
    rng = np.random.default_rng(0)
    stream = stream_of(rng.integers(0, num_nodes, (1000, 2)), num_nodes, layout="directed")
    graph = open_simple_graph(stream)[0]
    masks = {name: rng.random(num_nodes) < 0.5 for name in ("train", "val", "test")}
    part_id = rng.integers(0, num_parts, num_nodes).astype(np.int32)
    evaluate_partitioning(stream, part_id, num_parts, 2, masks, graph=graph)  # compiles
    tracemalloc.start()
    evaluate_partitioning(stream, part_id, num_parts, 2, masks, graph=graph)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    edges_and_counts = 1 << 18
    assert 2 * 8 * num_nodes < peak_bytes < num_nodes * (2 * 8 + 16) + edges_and_counts


def test_every_mask_has_a_balance():
    stream = stream_of([(0, 1), (2, 3)], 4)
    part_id = np.array([0, 0, 0, 1], np.int32)
    masks = {"val": np.array([True, True, False, True]), "mine": np.zeros(4, bool), "test": None}
    q = evaluate_partitioning(stream, part_id, 2, masks=masks)
    assert q.mask_per_part == {"val": [2, 1], "mine": [0, 0]}
    assert q.mask_balance == {"val": 4 / 3, "mine": None}
    assert (q.train_balance, q.train_per_part) == (None, None)


def test_train_balance():
    stream = stream_of([(0, 1), (2, 3)], 4)
    part_id = np.array([0, 0, 0, 1], np.int32)
    q = evaluate_partitioning(stream, part_id, 2, masks={"train": np.array([True, True, False, True])})
    assert (q.train_per_part, q.train_balance) == ([2, 1], 4 / 3)
    assert evaluate_partitioning(stream, part_id, 2).train_balance is None
    none = evaluate_partitioning(stream, part_id, 2, masks={"train": np.zeros(4, bool)})
    assert (none.train_balance, none.train_per_part) == (None, [0, 0])


@pytest.mark.parametrize(
    ("part_id", "num_parts", "hops", "message"),
    [
        (np.zeros(3, np.int32), 2, 1, "part_id (4,) (3,)"),
        (np.zeros(4), 2, 1, "part_id"),
        (np.array([0, 1, 2, 0]), 2, 1, "part_id [0, 2) 0 2"),
        (np.array([0, -1, 0, 0]), 2, 1, "-1 0"),
        (np.zeros(4, np.int32), 0, 1, "num_parts >= 1"),
        (np.zeros(4, np.int32), 1, -1, "halo_hops >= 0"),
    ],
)
def test_values_that_do_not_fit_are_errors(part_id, num_parts, hops, message):
    with pytest.raises(ValueError, match=said(message)):
        evaluate_partitioning(stream_of([(0, 1), (2, 3)], 4), part_id, num_parts, hops)


def test_feature_bytes_that_make_no_sense_are_an_error():
    with pytest.raises(ValueError, match=said("feature_bytes >= 0 -4")):
        evaluate_partitioning(stream_of([(0, 1)], 4), np.zeros(4, np.int32), 1, feature_bytes=-4)


def test_a_mask_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=said("masks['train'] (4,)")):
        evaluate_partitioning(stream_of([(0, 1)], 4), np.zeros(4, np.int32), 1, masks={"train": np.ones(3, bool)})
