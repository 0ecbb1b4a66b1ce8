"""A damaged store does not train: its checksums are compared once a machine, and what is followed before it is."""

import json
import logging
import re
import shutil

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule import FullGraphDataModule
from lightning_gnnscale.errors import PartitionStoreError
from lightning_gnnscale.partition_store import PartitionStore, WholeGraph, manifest, verify
from tests.says import said


@pytest.fixture
def root(store_root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return shutil.copytree(store_root, tmp_path / "store")


@pytest.fixture
def read(monkeypatch):
    """Names of files whose checksum is compared."""
    names = []
    plain = manifest.check_file
    monkeypatch.setattr(verify, "check_file", lambda root, name, entry: (names.append(name), plain(root, name, entry)))
    return names


def flip(path, position=-3):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


MODULES = (gs.PartitionDataModule, FullGraphDataModule)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", ["features", "labels", "mask_train", "in_degree", "original_nid"])
def test_a_damaged_store_is_refused_before_training(root, kind, name):
    flip(root / f"{name}.npy")
    with pytest.raises(PartitionStoreError, match=said(f"{name} overwrite=True")) as error:
        kind(root).prepare_data()
    assert "\n" not in str(error.value)
    module = kind(root)
    module.verify = False
    module.prepare_data()


def test_a_store_is_compared_once(root, read, caplog):
    with caplog.at_level(logging.INFO):
        gs.PartitionDataModule(root).prepare_data()
    assert re.search(r"checksums of [1-9]\S* \w*B compared in", caplog.text) and "\n" not in caplog.text.strip()
    files = sorted(PartitionStore.open(root).manifest["files"])
    assert sorted(read) == files
    read.clear()
    for _ in range(2):
        gs.PartitionDataModule(root).prepare_data()
        WholeGraph.of_store(PartitionStore.open(root), 0)
    assert read == []
    (root / "labels.npy").write_bytes((root / "labels.npy").read_bytes())  # written again
    gs.PartitionDataModule(root).prepare_data()
    assert read == ["labels"]
    read.clear()
    copy = shutil.copytree(root, root.with_name("copy"))
    gs.PartitionDataModule(copy).prepare_data()
    assert sorted(read) == files


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": {}, "manifest": ""}'])
def test_a_damaged_note_counts_for_nothing(root, read, text):
    gs.PartitionDataModule(root).prepare_data()
    note = root.with_name("store.verified.json")
    for damaged in (text, json.dumps(json.loads(note.read_text()) | {"manifest": "0"})):
        read.clear()
        note.write_text(damaged)
        gs.PartitionDataModule(root).prepare_data()
        assert "features" in read


def test_a_disk_that_cannot_be_written_to(root, read, tmp_path):
    root.with_name("store.verified.json").mkdir()  # no note can get this name
    gs.PartitionDataModule(root).prepare_data()
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1
    read.clear()
    gs.PartitionDataModule(root).prepare_data()
    assert read == []
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("")
    store = PartitionStore.open(root)
    assert verify.compare_once(store) > 0 and verify.compare_once(store) == 0


@pytest.mark.parametrize("name", ["csc_indptr", "csc_indices"])
@pytest.mark.parametrize(
    "use",
    [
        lambda store: WholeGraph.of_store(store, 0),
        lambda store: gs.access_probability(store, np.arange(4), num_layers=2, fanouts=[2, 2], batch_size=4),
        lambda store: store.load_part(0, hops=2),
    ],
    ids=["whole graph", "access probability", "two hops"],
)
def test_a_damaged_graph_is_told_before_it_is_followed(root, name, use):
    array = np.load(root / f"{name}.npy", mmap_mode="r+")
    array[len(array) // 2] = np.iinfo(array.dtype).max
    array.flush()
    with pytest.raises(PartitionStoreError, match=said(f"{name} overwrite=True")):
        use(PartitionStore.open(root))


def test_an_older_store_says_what_to_do(dataset, root):
    for name in ("manifest", "source"):
        content = json.loads((root / f"{name}.json").read_text())
        content.pop("seal")
        content.pop("manifest", None)
        content |= {"format_version": 3} if name == "manifest" else {}
        (root / f"{name}.json").write_text(json.dumps(content))
    module = gs.PartitionDataModule(root=root, dataset=dataset, partitioner="random", num_parts=2)
    with pytest.raises(
        PartitionStoreError,
        match=said("store 3 5"),
    ):
        module.prepare_data()
    gs.PartitionDataModule(root=root, dataset=dataset, partitioner="random", num_parts=2, overwrite=True).prepare_data()
    PartitionStore.open(root).verify()
