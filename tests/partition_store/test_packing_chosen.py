"""`pack_halo="auto"`: halo rows are packed where memory does not hold the features and it is worth it."""

import logging

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale import events
from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.errors import PartitionStoreError
from lightning_gnnscale.partition_store import StoreSource, store_source
from tests.says import said

# 400 nodes in a ring, each joined to the next two: parts that are runs of it have halos of four nodes.
NODES = np.arange(400)
EDGES = np.stack([np.tile(NODES, 2), np.concatenate([(NODES + 1) % 400, (NODES + 2) % 400])])
FEATURES = np.random.default_rng(0).random((400, 8), np.float32)  # 12,800 bytes


def stored(folder, monkeypatch, free_bytes, features=FEATURES, edges=EDGES, **options):
    monkeypatch.setattr(store_source, "free_memory_bytes", lambda: free_bytes)
    stream = gs.open_edge_stream(edges, num_nodes=len(features), to_undirected=True)
    dataset = GraphDataset("ring", stream, features=features)
    made = StoreSource(dataset, folder / "store", partitioner="range", num_parts=4, **options)
    return made.prepare(4)


def packs(store) -> bool:
    return store.manifest["pack_halo"]


def test_memory_that_holds_the_features_twice_needs_no_packing(tmp_path, monkeypatch):
    assert not packs(stored(tmp_path, monkeypatch, 25_600))


def test_features_beyond_memory_are_packed_and_it_is_said(tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        store = stored(tmp_path, monkeypatch, 25_599)
    assert packs(store)
    told = [record.message for record in caplog.records if "halo rows" in record.message]
    assert told == [
        f"{tmp_path / 'store'}: halo rows are packed: a part is then read in two runs of the disk "
        "(features 12.5 KiB, memory 25.0 KiB, halos 512 B)"
    ]
    assert [event["packs"] for event in events.recent() if event["event"] == "pack_halo"][-1] is True
    store.verify()


def test_rows_that_a_sweep_reads_hardly_more_often_stay_at_their_owners(tmp_path, monkeypatch):
    """Parts with their rows would leave no memory; a sweep holds the rows of batches alone."""
    wide = np.random.default_rng(0).random((400, 1000), np.float32)  # 1,600,000 bytes
    for free, packed in ((3_000_000, False), (200_000, True)):
        assert packs(stored(tmp_path / str(free), monkeypatch, free, features=wide)) == packed


def test_features_of_node_types_are_packed_too(tmp_path, monkeypatch):
    node_types = {"even": {"features": FEATURES[:200]}, "odd": {"features": FEATURES[200:, :3]}}
    ring = np.stack([NODES[:200], NODES[:200]])
    edges = {("even", "to", "odd"): ring, ("odd", "to", "even"): np.stack([ring[0], (ring[0] + 1) % 200])}
    monkeypatch.setattr(store_source, "free_memory_bytes", lambda: 1000)
    dataset = gs.hetero_graph(node_types, edges, name="rings")
    store = StoreSource(dataset, tmp_path / "store", partitioner="range", num_parts=4).prepare(4)
    assert packs(store) and store.part_features.is_packed
    store.verify()


def test_halos_as_large_as_the_graph_stay_at_their_owners(tmp_path, monkeypatch):
    edges = np.random.default_rng(1).integers(0, 400, (2, 4000))
    assert not packs(stored(tmp_path, monkeypatch, 1000, edges=edges))


def test_rows_of_whole_pages_stay_at_their_owners(tmp_path, monkeypatch):
    assert not packs(stored(tmp_path, monkeypatch, 1000, features=np.ones((400, 1024), np.float32)))


def test_a_store_that_stands_is_taken_either_way(tmp_path, monkeypatch):
    store = stored(tmp_path, monkeypatch, 1000)
    inode = store.root.stat().st_ino
    for free in (1000, 1 << 40):
        again = stored(tmp_path, monkeypatch, free)
        assert packs(again) and again.root.stat().st_ino == inode
    explicit = tmp_path / "explicit"
    inode = stored(explicit, monkeypatch, 1 << 40, pack_halo=True).root.stat().st_ino
    assert stored(explicit, monkeypatch, 1 << 40).root.stat().st_ino == inode
    assert stored(explicit, monkeypatch, 1 << 40, pack_halo=True).root.stat().st_ino == inode
    plain = tmp_path / "plain"
    stored(plain, monkeypatch, 1 << 40)
    with pytest.raises(PartitionStoreError, match="overwrite=True"):
        stored(plain, monkeypatch, 1 << 40, pack_halo=True)


@pytest.mark.parametrize("free_bytes", [1000, 1 << 40])
def test_an_interrupted_store_goes_on_as_it_was_begun(tmp_path, monkeypatch, free_bytes):
    def stop(what, done, total):
        if what == "listing halos":
            raise KeyboardInterrupt

    whole = stored(tmp_path / "whole", monkeypatch, free_bytes)
    with pytest.raises(KeyboardInterrupt):
        stored(tmp_path / "cut", monkeypatch, free_bytes, progress=stop)
    other = {1000: 1 << 40, 1 << 40: 1000}[free_bytes]
    store = stored(tmp_path / "cut", monkeypatch, other)
    assert packs(store) == packs(whole) == (free_bytes == 1000)
    assert (store.root / "manifest.json").read_bytes() == (whole.root / "manifest.json").read_bytes()


def test_other_words_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=said("pack_halo true false auto 'yes'")):
        stored(tmp_path, monkeypatch, 1000, pack_halo="yes")
