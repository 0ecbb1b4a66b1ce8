"""Where evaluation's tables lie: space is set aside, what killed runs left goes, a finished store is only read."""

import errno
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Listener, arbitrary_address
from pathlib import Path

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale import scratch
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.scratch import Scratch, keep_sockets, open_scratch
from tests.says import said

CONTEXT = multiprocessing.get_context("forkserver")


def make_and_wait(parent, name, made):
    own = Scratch(parent, name)
    own.make_table("layer", 100, 4)
    made.set()
    time.sleep(600)


def hold(parent, name):
    made = CONTEXT.Event()
    process = CONTEXT.Process(target=make_and_wait, args=(parent, name, made), daemon=True)
    process.start()
    assert made.wait(60)
    return process


def test_what_a_killed_run_left_is_removed_and_a_living_run_is_not(tmp_path):
    killed, living = hold(tmp_path, "run-killed"), hold(tmp_path, "run-living")
    try:
        killed.kill()
        killed.join()
        assert (tmp_path / "run-killed" / "layer.npy").is_file()
        own = Scratch(tmp_path, "run-own")
        own.make_table("layer", 10, 2)
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["run-living", "run-own"]
        own.close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run-living", "run-living.lock"]
    finally:
        living.kill()
        living.join()


def listen(folder, made, seconds):
    tempfile.tempdir = str(folder)
    multiprocessing.current_process()._config.pop("tempdir", None)  # of whoever started this process
    keep_sockets()
    with Listener(arbitrary_address("AF_UNIX")):
        made.set()
        time.sleep(seconds)


@pytest.fixture
def short_path():
    """A folder whose sockets have paths of less than 108 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_sockets_lie_where_their_paths_are_not_too_long(short_path):
    folder = short_path / ("x" * 56)
    folder.mkdir()
    made = CONTEXT.Event()
    process = CONTEXT.Process(target=listen, args=(folder, made, 0))
    process.start()
    assert made.wait(60)
    process.join(60)
    assert process.exitcode == 0 and list(folder.glob("*/run-*")) == []


def test_sockets_of_a_killed_run_are_removed_by_the_next(short_path):
    tmp_path = short_path

    def start(seconds):
        made = CONTEXT.Event()
        process = CONTEXT.Process(target=listen, args=(tmp_path, made, seconds))
        process.start()
        assert made.wait(60)
        return process

    process = start(600)
    process.kill()
    process.join()
    assert [path.name for path in tmp_path.iterdir()] == [f"gnnscale-{os.getuid()}"]  # no pymp-*
    left = list(tmp_path.glob("*/run-*/listener-*"))
    assert len(left) == 1
    process = start(0)
    process.join(60)
    assert process.exitcode == 0 and list(tmp_path.glob("*/*")) == []


def test_a_table_takes_its_bytes_before_it_is_written(tmp_path):
    own = Scratch(tmp_path, "run-own")
    own.make_table("layer", 1000, 64)
    file = own.path("layer")
    assert file.stat().st_blocks * 512 >= 4 * 1000 * 64
    assert np.load(file).shape == (1000, 64)
    own.close()


def test_a_table_that_takes_the_place_of_another_has_its_room_first(tmp_path, monkeypatch):
    own = Scratch(tmp_path, "run-own")
    own.make_table("layer", 1000, 64)
    mapped = np.load(own.path("layer"), mmap_mode="r+")
    mapped[:] = 7
    files, set_aside = [], scratch._set_aside

    def counted(path):
        files.append([file.name for file in own.folder.iterdir()])
        set_aside(path)

    monkeypatch.setattr(scratch, "_set_aside", counted)
    own.make_table("layer", 1000, 64)
    assert files == [["layer.npy"]]
    assert not np.load(own.path("layer")).any() and (mapped == 7).all()
    own.close()


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path, monkeypatch):
    def full(descriptor, start, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    own = Scratch(tmp_path, "run-own")
    own.make_table("layer", 10, 2)
    monkeypatch.setattr(scratch.os, "posix_fallocate", full)
    with pytest.raises(GNNScaleError, match=said("layer.npy 80 scratch=")):
        own.make_table("layer", 10, 2)
    assert list(own.folder.iterdir()) == []
    own.close()


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(GNNScaleError, match=said("directory EvaluationOptions(scratch=")):
        open_scratch(tmp_path / "store", tmp_path / "file" / "below", None).make_table("layer", 10, 2)


def test_a_finished_store_is_prepared_without_a_write_beside_it(tmp_path, dataset):
    part_cache = tmp_path / "shelf"
    options = {"dataset": dataset, "root": part_cache / "s", "partitioner": "random", "num_parts": 2}
    gs.PartitionDataModule(**options).prepare_data()

    def stamps():
        return {path: path.stat().st_mtime_ns for path in [part_cache, *part_cache.rglob("*")]}

    before = stamps()
    time.sleep(0.01)
    dm = gs.PartitionDataModule(**options, evaluation=gs.EvaluationOptions(scratch=tmp_path / "elsewhere"))
    dm.prepare_data()
    dm.setup()
    dm.val_dataloader().evaluation.source.table("layer", 3)
    assert stamps() == before
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == [".s.scratch"]
    dm.teardown("fit")
    assert not list((tmp_path / "elsewhere" / ".s.scratch").iterdir())
