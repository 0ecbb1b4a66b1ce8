"""Stores that hold the same bytes take the disk once, and stay whole by themselves."""

import shutil

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.partition_store import PartitionStore, shared_files
from lightning_gnnscale.partition_store.shared_files import share_files
from tests.partition_store.small_graphs import random_graph


@pytest.fixture
def pair(tmp_path):
    graph = random_graph(3000, 6000, 2)
    features = np.random.default_rng(0).normal(size=(3000, 16)).astype(np.float32)
    roots = [tmp_path / name for name in ("one", "two")]
    for number, root in enumerate(roots):
        labels = np.full(3000, number)
        gs.write_partition_store(root, graph.stream(), graph.given, features=features, labels=labels)
    return roots


def inode(root, name):
    return (root / f"{name}.npy").stat().st_ino


def test_equal_files_are_shared_and_checksums_hold(pair):
    one, two = pair
    before = {path.name: path.read_bytes() for path in two.iterdir()}
    freed = share_files(two, pair)
    assert freed >= 3000 * 16 * 4 and inode(one, "features") == inode(two, "features")
    assert {path.name: path.read_bytes() for path in two.iterdir()} == before
    assert share_files(two, pair) == 0
    shutil.rmtree(one)
    store = PartitionStore.open(two)
    store.verify()
    assert store.labels[0] == 1


def test_what_differs_or_is_small_stays_apart(pair, monkeypatch):
    one, two = pair
    content = bytearray((one / "features.npy").read_bytes())
    content[-1] ^= 1  # damaged: its manifest says the same of it
    (one / "features.npy").write_bytes(content)
    share_files(two, [one, one.parent / "no such store"])
    assert inode(one, "features") != inode(two, "features")
    assert inode(one, "labels") != inode(two, "labels") and inode(one, "part_offsets") != inode(two, "part_offsets")
    PartitionStore.open(two).verify()


def test_a_disk_without_links_keeps_the_copies(pair, monkeypatch):
    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr(shared_files.os, "link", refuse)
    assert share_files(pair[1], pair) == 0
    assert sorted(path.name for path in pair[0].iterdir()) == sorted(path.name for path in pair[1].iterdir())


def test_variants_of_one_graph_share_as_they_are_made(tmp_path, pair):
    graph = random_graph(3000, 6000, 2)
    features = np.ones((3000, 16), np.float32)
    roots = []
    for pack_halo in (False, True):
        dm = gs.PartitionDataModule(
            root=tmp_path / f"packed-{pack_halo}", stream=graph.stream(), features=features, labels=np.zeros(3000, int),
            masks={"train": np.ones(3000, bool)}, partitioner="random", num_parts=2, pack_halo=pack_halo,
        )  # fmt: skip
        dm.prepare_data()
        roots.append(tmp_path / f"packed-{pack_halo}")
    assert inode(roots[0], "features") == inode(roots[1], "features")
    for root in roots:
        PartitionStore.open(root).verify()
