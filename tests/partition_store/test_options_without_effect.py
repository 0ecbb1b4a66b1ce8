"""Options that say where, how fast or how visibly a partitioner works are no part of a store's identity."""

from functools import partial

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.errors import PartitionStoreError
from lightning_gnnscale.partition_store import StoreSource
from lightning_gnnscale.partition_store.manifest import read_source
from lightning_gnnscale.partitioner import registry
from tests.says import said

EDGES = np.random.default_rng(0).integers(0, 300, (2, 2000))


def stores_of(folder, method, options, num_parts=3):
    """Prepare `folder`/store once with each of some options; return its fingerprints and inode numbers."""
    dataset = GraphDataset("small", gs.open_edge_stream(EDGES, num_nodes=300))
    found = []
    for given in options:
        partitioner = partial(gs.partition, method=method, **given)
        store = StoreSource(dataset, folder / "store", partitioner=partitioner, num_parts=num_parts).prepare(num_parts)
        found.append((store.fingerprint, store.root.stat().st_ino))
    return found


@pytest.mark.parametrize("method", ["spring", "grem", "hdrf", "two_phase", "ldg", "metis", "range", "mixed"])
def test_another_scratch_folder_is_the_same_store(tmp_path, method):
    if method == "metis":
        pytest.importorskip("pymetis", reason="the extra [metis] is not installed")
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    found = stores_of(tmp_path, method, [{"scratch": str(folder)} for folder in folders] + [{}, {"scratch": "auto"}])
    assert len(set(found)) == 1
    own = partial(gs.partition, method=method, scratch=str(folders[1]))
    made = own(gs.open_edge_stream(EDGES, num_nodes=300), num_parts=3)
    assert str(folders[1]) not in repr(made.options)


def test_threads_checkpoints_and_progress_are_no_part_of_it(tmp_path):
    options = [
        {"num_threads": 1},
        {"num_threads": 2, "checkpoint": tmp_path / "a.npz", "checkpoint_every": 3},
        {"progress": print, "evaluate": False},
        {},
    ]
    assert len(set(stores_of(tmp_path, "streaming_multilevel", options))) == 1


@pytest.mark.parametrize("method", ["spring", "mixed"])
def test_no_scratch_disk_at_all_is_another_store(tmp_path, method):
    with pytest.raises(PartitionStoreError, match=said("store input partitioner")):
        stores_of(tmp_path, method, [{}, {"scratch": None}])


def test_a_store_without_its_record_is_known_whatever_scratch_it_was_made_with(tmp_path):
    (tmp_path / "a").mkdir()
    dataset = GraphDataset("small", gs.open_edge_stream(EDGES, num_nodes=300))
    made = gs.partition(dataset.stream, method="spring", num_parts=3, scratch=str(tmp_path / "a"))
    gs.write_partition_store(tmp_path / "store", dataset.stream, made)
    before = read_source(tmp_path / "store")["fingerprint"]
    assert StoreSource(dataset, tmp_path / "store", partitioner="spring").prepare(3).fingerprint == before


def test_a_partitioner_of_ones_own_keeps_to_the_names(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_PARTITIONERS", dict(registry._PARTITIONERS))

    @gs.register_partitioner("own_scratch")
    def own(stream, num_parts, *, seed=0, masks=None, balance=None, progress=None, scratch=None, num_threads=1, x=1):
        return np.arange(stream.num_nodes) % num_parts

    folder = [{"scratch": str(tmp_path)}, {"scratch": "auto", "num_threads": 4}, {"scratch": "/tmp"}]
    assert len(set(stores_of(tmp_path, "own_scratch", folder))) == 1
    for other in ({}, {"scratch": None}, {"scratch": "auto", "x": 2}):
        with pytest.raises(PartitionStoreError, match=said("input partitioner")):
            stores_of(tmp_path, "own_scratch", [other])
