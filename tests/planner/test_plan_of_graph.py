"""The plan of a DataModule counts what the store of its graph will have: edges, and bytes of features."""

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import CSRArrays, GraphDataset
from lightning_gnnscale.partitioner.graph_access.layout import lists_both_ways, scan
from lightning_gnnscale.partitioner.registry import partition_bytes

NUM_NODES = 30
RING = np.stack([np.arange(NUM_NODES), (np.arange(NUM_NODES) + 1) % NUM_NODES])
BOTH_WAYS = np.concatenate([RING, RING[::-1]], axis=1)
SOME_BACK = np.concatenate([RING, RING[::-1, :5]], axis=1)
LOOPS = np.stack([np.arange(4), np.arange(4)])


def sparse_rows() -> CSRArrays:
    generator = np.random.default_rng(0)
    x = (generator.random((NUM_NODES, 50)) < 0.1) * generator.random((NUM_NODES, 50))
    indptr = np.concatenate([[0], np.cumsum((x != 0).sum(axis=1))])
    return CSRArrays(indptr, np.nonzero(x)[1].astype(np.int32), x[x != 0].astype(np.float32), x.shape)


def datamodule(folder, edges, layout="auto", features=None, num_parts=2, **options):
    stream = gs.open_edge_stream(edges, num_nodes=NUM_NODES, layout=layout, to_undirected=True, **options)
    dataset = GraphDataset("ring", stream, np.ones((NUM_NODES, 3), np.float32) if features is None else features)
    return gs.PartitionDataModule(root=folder / "store", dataset=dataset, partitioner="random", num_parts=num_parts)


@pytest.mark.parametrize(
    ("edges", "layout", "planned", "note"),
    [
        (RING, "auto", 60, "at most: reverses added"),
        (RING, "once", 60, "reverses added"),
        (BOTH_WAYS, "auto", 60, "both directions"),
        (BOTH_WAYS, "both_ways", 60, "both directions"),
        (SOME_BACK, "auto", 70, "at most"),
        (SOME_BACK, "directed", 70, "at most"),
    ],
)
def test_reverses_are_counted_once(tmp_path, edges, layout, planned, note):
    dm = datamodule(tmp_path, edges, layout)
    plan = dm.make_plan()
    assert plan.num_edges == planned
    assert f"{planned} ({note}" in plan.explain()
    dm.prepare_data()
    assert dm.store.num_edges == 60
    after = datamodule(tmp_path, edges, layout).make_plan()
    assert after.num_edges == 60  # the store that exists knows


@pytest.mark.parametrize("num_parts", [2, "auto"])
def test_edges_are_not_read_where_the_store_stands(tmp_path, monkeypatch, num_parts):
    datamodule(tmp_path, BOTH_WAYS).prepare_data()
    dm = datamodule(tmp_path, BOTH_WAYS, num_parts=num_parts)
    monkeypatch.setattr(type(dm.dataset.stream), "chunks", lambda self, start_chunk=0: pytest.fail("edges are read"))
    assert dm.make_plan().num_edges == 60


@pytest.mark.parametrize("edges", [RING, BOTH_WAYS, SOME_BACK, LOOPS, np.concatenate([BOTH_WAYS, LOOPS], axis=1)])
def test_one_pass_finds_what_partitioners_find(edges):
    stream = gs.open_edge_stream(edges, num_nodes=NUM_NODES, chunk_edges=7)
    assert lists_both_ways(stream) == (scan(stream)[0].layout == "both_ways")


def test_sparse_features_have_bytes(tmp_path):
    features = sparse_rows()
    dm = datamodule(tmp_path, RING, features=features)
    planned = dm.make_plan()
    dm.prepare_data()
    stored = gs.PartitionDataModule(store=tmp_path / "store").make_plan()
    on_disk = sum(np.load(path, mmap_mode="r").nbytes for path in (tmp_path / "store").glob("features_*.npy"))
    assert on_disk == 8 * (NUM_NODES + 1) + 8 * len(features.data)
    assert stored.feature_bytes == planned.feature_bytes == on_disk
    assert stored.device_peak_bytes == planned.device_peak_bytes


def test_weights_and_features_of_edges_are_counted(tmp_path):
    num_edges = RING.shape[1]
    stream = gs.open_edge_stream(RING, num_nodes=NUM_NODES, layout="once", to_undirected=True)
    np.save(tmp_path / "edge_features.npy", np.ones((num_edges, 5), np.float16))
    edges = {"edge_weight": np.ones(num_edges), "edge_features": str(tmp_path / "edge_features.npy")}
    dataset = GraphDataset("ring", stream, np.ones((NUM_NODES, 3), np.float32), **edges)
    dm = gs.PartitionDataModule(root=tmp_path / "store", dataset=dataset, partitioner="random", num_parts=2)
    planned = dm.make_plan()
    dm.prepare_data()
    on_disk = dm.store.edge_weight.nbytes + dm.store.edge_features.nbytes
    assert on_disk == 2 * num_edges * (4 + 5 * 2)
    stored = gs.PartitionDataModule(store=tmp_path / "store").make_plan()
    assert planned.edge_data_bytes == stored.edge_data_bytes == on_disk
    assert planned.total_bytes == planned.csc_bytes + planned.feature_bytes + on_disk
    assert "S = CSC + features + edge data" in planned.explain()
    without = datamodule(tmp_path / "other", RING, "once").make_plan()
    assert planned.device_peak_bytes > without.device_peak_bytes
    assert "edge data" not in without.explain()


def test_dense_features_of_a_store_are_planned_as_they_are_stored(tmp_path):
    dm = datamodule(tmp_path, RING, features=np.ones((NUM_NODES, 64), np.float16))
    planned = dm.make_plan()
    dm.prepare_data()
    stored = gs.PartitionDataModule(store=tmp_path / "store").make_plan()
    assert stored.feature_bytes == planned.feature_bytes == 2 * 64 * NUM_NODES
    assert stored.device_peak_bytes == planned.device_peak_bytes


@pytest.mark.parametrize("features", [None, sparse_rows()])
def test_figures_of_the_parts_count_feature_rows(tmp_path, features):
    dm = datamodule(tmp_path, RING, features=features)
    dm.prepare_data()
    quality = dm.partitioning_facts["quality"]
    row = dm.store.features.nbytes / NUM_NODES
    assert quality["feature_bytes"] == row > 0
    needed = np.add(quality["nodes_per_part"], quality["halo_per_part"])
    rest = 8 * (needed + 1) + 4 * 2 * np.asarray(quality["edges_per_part"])
    assert quality["bytes_per_part"] == np.ceil(needed * row + rest).astype(int).tolist()


def test_a_store_is_planned_for_the_default_batches(tmp_path):
    batches = {"batch_size": 512, "fanouts": (25, 10), "prefetch_batches": 3, "device_batches": 3, "mixed_parts": 4}
    batches["placed_rows"] = "auto"
    graph = gs.SyntheticGraph(400, 1600, num_communities=4, seed=0)
    dm = gs.PartitionDataModule(root=tmp_path / "s", stream=graph.stream(), features=graph.features(8), num_parts=2)
    assert dm._batch_shape() == batches
    assert dm.store_source.make_plan(2, **batches) == dm.make_plan(2)


def test_another_gib_holds_a_larger_graph_of_clusters(tmp_path):
    """Of a graph of 40,000,000 nodes; 2 edges a node are the most that `effort=default` takes."""
    dm = gs.PartitionDataModule(
        root=tmp_path / "store", dataset=datamodule(tmp_path, RING).dataset, partitioner="streaming_multilevel"
    )
    source, counts = dm.store_source, {"num_nodes": 40_000_000, "num_edges": 800_000_000, "num_parts": 64}

    def found(host: int, **options):
        needed = partition_bytes("streaming_multilevel", 40_000_000, 400_000_000, 64, options)
        fixed = {"feature_bytes": 0, "host_memory_bytes": host, "device_memory_bytes": None}
        plan = gs.plan(**counts, **fixed, partition_bytes=lambda _: needed)
        return plan.host_peak_bytes["partition"], source.quotient_by_memory(plan, 1 << 30)

    assert found(64 << 30)[1] is None
    now, more, best = found(4 << 30)[1]
    assert 0 < now < more < best == 2
    assert found(4 << 30, quotient_edges_per_node=now)[0] <= 4 << 30 < found(4 << 30, quotient_edges_per_node=more)[0]
