"""Index files of preferred neighbours: bits, names, damage, kills, two writers at once, and what cannot be written."""

import errno
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from lightning_gnnscale.errors import PartitionStoreError
from lightning_gnnscale.graph import CSC, build_csc
from lightning_gnnscale.sampler import locality_index
from lightning_gnnscale.sampler.locality_index import stored_split_rows
from lightning_gnnscale.triton_kernels.sample_neighbors import split_rows
from tests.says import said


def random_csc(num_nodes=200, num_edges=5000, seed=0) -> CSC:
    rng = np.random.default_rng(seed)
    return build_csc(rng.integers(0, num_nodes, num_edges) // 2, rng.integers(0, num_nodes, num_edges), num_nodes)


CSC_200 = random_csc()
NODES = np.arange(0, 200, 7)


def assert_right(split, csc=CSC_200, nodes=NODES):
    inside = np.zeros(csc.num_rows, bool)
    inside[nodes] = True
    for mine, plain in zip(split, split_rows(csc, inside, split.position is not None), strict=True):
        np.testing.assert_array_equal(mine, plain)


@pytest.mark.parametrize("block_edges", [1, 7, 100, 1 << 22])
def test_files_hold_what_memory_would(tmp_path, monkeypatch, block_edges):
    monkeypatch.setattr(locality_index, "_BLOCK_EDGES", block_edges)
    split = stored_split_rows(CSC_200, NODES, tmp_path, "abc", with_position=True)
    assert_right(split)
    assert not split.indices.flags.writeable  # a read-only map
    assert sorted(path.name.split(".", 1)[1] for path in tmp_path.iterdir() if path.suffix == ".npy") == [
        "indices.npy", "num_inside.npy", "position.npy",
    ]  # fmt: skip


def test_rows_of_memory_maps_and_of_wide_ids(tmp_path):
    wide = CSC(CSC_200.indptr, CSC_200.indices.astype(np.int64))
    for name, array in wide._asdict().items():
        np.save(tmp_path / name, array)
    mapped = CSC(*(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in wide._fields))
    split = stored_split_rows(mapped, NODES, tmp_path / "index", "abc")
    assert split.indices.dtype == np.int64 and split.position is None
    assert_right(split, wide)


def test_a_file_for_each_graph_and_set_and_no_more(tmp_path):
    def count():
        return len(list(tmp_path.glob("*.indices.npy")))

    for nodes, fingerprint, expected in [
        (NODES, "abc", 1), (NODES, "abc", 1), (NODES, "xyz", 2), (NODES[:-1], "abc", 3), (NODES, "", 4), (NODES, "", 4),
    ]:  # fmt: skip
        assert_right(stored_split_rows(CSC_200, nodes, tmp_path, fingerprint), nodes=nodes)
        assert count() == expected
    assert_right(stored_split_rows(random_csc(seed=1), NODES, tmp_path, ""), random_csc(seed=1))
    assert count() == 5  # without a fingerprint the graph itself decides


def test_files_that_stand_are_not_written_again(tmp_path, monkeypatch):
    stored_split_rows(CSC_200, NODES, tmp_path, "abc")
    monkeypatch.setattr(locality_index, "split_range", None)
    assert_right(stored_split_rows(CSC_200, NODES, tmp_path, "abc"))


@pytest.mark.parametrize("damage", ["short", "header", "gone", "partial"])
def test_what_is_not_whole_is_written_again(tmp_path, damage):
    stored_split_rows(CSC_200, NODES, tmp_path, "abc")
    path = next(tmp_path.glob("*.indices.npy"))
    if damage == "short":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "header":
        path.write_bytes(b"\0" * 128 + path.read_bytes()[128:])
    else:
        path.unlink()
    if damage == "partial":
        path.with_suffix(".partial").write_bytes(b"\1" * 10**6)
    assert_right(stored_split_rows(CSC_200, NODES, tmp_path, "abc", with_position=True))
    assert not list(tmp_path.glob("*.partial"))


def write_slowly(folder, pause_s, started):
    """Write in a child, pausing after each block."""
    compiled = locality_index.split_range

    def paused(*args):
        compiled(*args)
        started.set()
        time.sleep(pause_s)

    locality_index.split_range, locality_index._BLOCK_EDGES = paused, 100
    assert_right(stored_split_rows(CSC_200, NODES, folder, "abc"))


PROCESSES = multiprocessing.get_context("fork")


def test_a_killed_writer_leaves_nothing_in_the_way(tmp_path):
    started = PROCESSES.Event()
    child = PROCESSES.Process(target=write_slowly, args=(tmp_path, 60, started))
    child.start()
    assert started.wait(60)
    os.kill(child.pid, signal.SIGKILL)
    child.join(60)
    assert list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.npy"))
    assert_right(stored_split_rows(CSC_200, NODES, tmp_path, "abc"))
    assert not list(tmp_path.glob("*.partial"))


def test_two_writers_wait_for_each_other(tmp_path, monkeypatch):
    started = PROCESSES.Event()
    child = PROCESSES.Process(target=write_slowly, args=(tmp_path, 0.02, started))
    child.start()
    assert started.wait(60)
    monkeypatch.setattr(locality_index, "split_range", None)  # this process only reads: the other one writes it all
    assert_right(stored_split_rows(CSC_200, NODES, tmp_path, "abc"))
    child.join(60)
    assert child.exitcode == 0


def test_a_full_disk_is_left_as_it_was(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(locality_index.ArrayFile, "append", full)
    with pytest.raises(PartitionStoreError, match=said("space device space")):
        stored_split_rows(CSC_200, NODES, tmp_path, "abc")
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(PartitionStoreError, match=said("LocalityBias folder=")):
        stored_split_rows(CSC_200, NODES, tmp_path / "file", "abc")
