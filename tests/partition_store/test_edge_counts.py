"""How good a partition is, counted by the writer of its store on the way: the figures of a pass over the stream."""

import importlib
import json
from dataclasses import asdict

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.partition_store.halo_rows import halo_and_edges, halo_of_rows
from lightning_gnnscale.partitioner.quality import quality_of_counts

NUM_NODES, NUM_PARTS = 210, 5


def listed(form):
    edges = np.random.default_rng(3).integers(0, NUM_NODES - 10, (2, 900))  # loops, repeats, and nodes without an edge
    return np.concatenate([edges, edges[::-1]], axis=1) if form == "both ways" else edges


def stored(tmp_path, form, **arrays):
    stream = gs.open_edge_stream(listed(form), num_nodes=NUM_NODES, to_undirected=form == "undirected")
    made = gs.partition(stream, "spring", num_parts=NUM_PARTS, masks=masks(), deduplicate=True)
    return gs.write_partition_store(tmp_path / "store", stream, made, **arrays), made


def masks():
    return {"train": np.arange(NUM_NODES) % 3 == 0, "val": np.zeros(NUM_NODES, bool)}


def counted(store, made):
    halo = store.part_rows - np.diff(store.part_offsets)
    counts = store.manifest["edge_counts"]
    return quality_of_counts(
        **counts, part_offsets=store.part_offsets, halo_per_part=halo, part_id=made.part_id, masks=masks()
    )


@pytest.mark.parametrize("form", ["undirected", "both ways"])
def test_counts_give_the_figures_of_a_pass(tmp_path, form):
    store, made = stored(tmp_path, form)
    assert asdict(counted(store, made)) == asdict(made.quality)


def test_edges_with_times_stand_several_times_and_count_once(tmp_path):
    store, made = stored(tmp_path, "undirected", edge_time=np.arange(900))
    assert store.num_edges > 2 * made.quality.num_edges
    assert asdict(counted(store, made)) == asdict(made.quality)


def test_edges_in_one_direction_are_not_counted(tmp_path):
    store, _ = stored(tmp_path, "directed")
    assert "edge_counts" not in store.manifest


def test_blocks_of_any_size_count_the_same(tmp_path):
    store, _ = stored(tmp_path, "undirected")
    core = store.part_offsets[1:3].tolist()
    found = [halo_and_edges(store.csc, *core, block) for block in (1, 7, 1 << 20)]
    assert len({counts for _, counts in found}) == 1
    expected = halo_of_rows(store.csc, *core).nodes
    assert all(np.array_equal(halo.nodes, expected) for halo, _ in found)


def test_a_datamodule_makes_no_pass_for_its_figures(tmp_path, monkeypatch):
    module = importlib.import_module("lightning_gnnscale.partitioner.partition")  # the package has a function so named
    monkeypatch.setattr(module, "evaluate_partitioning", None)  # a call would fail
    stream = gs.open_edge_stream(listed("undirected"), num_nodes=NUM_NODES, to_undirected=True)
    features = np.zeros((NUM_NODES, 4), np.float32)
    root = tmp_path / "store"
    dm = gs.PartitionDataModule(
        root=root, stream=stream, features=features, masks=masks(), labels=np.zeros(NUM_NODES, np.int64),
        num_parts=NUM_PARTS, partitioner="spring",
    )  # fmt: skip
    dm.prepare_data()
    facts = json.loads((tmp_path / "store.source.json").read_text())["partitioning"]["quality"]
    assert facts["nodes_per_part"] == np.diff(gs.PartitionStore.open(root).part_offsets).tolist()
    assert 0 < facts["edge_cut_ratio"] < 1 and facts["feature_bytes"] == 16 and facts["train_balance"] >= 1


def test_a_manifest_with_other_counts_is_damaged(tmp_path):
    store, _ = stored(tmp_path, "undirected")
    counts = store.manifest["edge_counts"]
    for wrong in ({**counts, "cut": [1]}, [1], {**counts, "cut": [-1] * NUM_PARTS}, {"inside": counts["inside"]}):
        said = gs.partition_store.manifest.wrong_field({**store.manifest, "edge_counts": wrong})
        assert "edge_counts" in said
