"""What an interrupted writer left, damaged in any way: a resume trusts nothing that its journal does not vouch for."""

import errno
import json
import os
import shutil

import numpy as np
import pytest

from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.errors import GNNScaleError, PartitionStoreError
from lightning_gnnscale.partition_store import PartitionStore, WriteBudget, write_partition_store
from lightning_gnnscale.partitioner import Partitioning, partition
from tests.partition_store.small_graphs import all_bytes, random_graph
from tests.says import said
from tests.tiers import first

GRAPH = random_graph(60, 200, 3, to_undirected=True)
SPARSE = (np.arange(0, 121, 2), np.arange(120) % 9, np.arange(120, dtype=np.float16), (60, 9))
ARRAYS = {
    "labels": np.arange(60),
    "masks": {"train": np.arange(60) % 3 == 0},
    "edge_weight": np.arange(200) / 7,
    "pack_halo": True,
}
FEATURES = {
    "dense": np.random.default_rng(0).random((60, 4)).astype(np.float32),
    "sparse": SPARSE,
}
BUDGET = WriteBudget(spill_edges=60, sort_edges=150, block_bytes=400, checkpoint_bytes=1)
STAGES = ("storing labels", "storing features", "bucketing edges", "sorting rows", "listing halos", "packing")


def write(root, kind="dense", progress=None, **options):
    arrays = {**ARRAYS, "features": FEATURES[kind], "budget": BUDGET, **options}
    return write_partition_store(root, GRAPH.stream(40), GRAPH.given, progress=progress, **arrays)


def interrupt(root, stage, kind="dense", calls=1):
    """Write until the given call of progress of a stage."""
    seen = []

    def stop(what, done, total):
        seen.append(what)
        if sum(name.startswith(stage) for name in seen) == calls:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(root, kind, progress=stop)
    return root.with_name(root.name + ".partial")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return {kind: all_bytes(write(tmp_path_factory.mktemp(kind) / "store", kind).root) for kind in FEATURES}


def damages(path, rng):
    """Yield a name and what does it to a file."""
    content = path.read_bytes()
    position = int(rng.integers(len(content)))
    flipped = bytearray(content)
    flipped[position] ^= 1 << int(rng.integers(8))
    yield "deleted", path.unlink
    yield "zeroed", lambda: path.write_bytes(bytes(len(content)))
    yield "flipped", lambda: path.write_bytes(flipped)
    yield "shortened", lambda: path.write_bytes(content[:-1])
    yield "header only", lambda: path.write_bytes(content[:128])
    yield "extended", lambda: path.write_bytes(content + bytes(8))


def damage_and_write_again(tmp_path, whole, stage, kind, chosen):
    """Damage each file that a writer left in each way for which `chosen(number of the file, of the way)` holds."""
    rng = np.random.default_rng(len(stage))
    left = interrupt(tmp_path / "store", stage, kind, calls=2 if stage in ("storing features", "sorting rows") else 1)
    saved = tmp_path / "saved"
    shutil.copytree(left, saved)
    names = sorted(path.name for path in saved.iterdir() if path.suffix == ".npy")
    for file, name in enumerate(["journal.jsonl", *names]):
        for way, (what, damage) in enumerate(damages(left / name, rng)):
            if not chosen(file, way):
                continue
            damage()
            store = write(tmp_path / "store", kind)
            assert all_bytes(store.root) == whole[kind], (name, what)
            shutil.rmtree(store.root)
            shutil.copytree(saved, left)


@pytest.mark.parametrize(
    "stage",
    [stage if stage == "storing features" else pytest.param(stage, marks=pytest.mark.sweep) for stage in STAGES],
)
@pytest.mark.parametrize("kind", ["dense", pytest.param("sparse", marks=pytest.mark.sweep)])
def test_damage_of_any_file_is_made_good(no_disk_wait, tmp_path, whole, stage, kind):
    """Each file is damaged in two of six ways, the next stage's in two others; the `slow` sweep takes all of them."""
    turn = STAGES.index(stage) + list(FEATURES).index(kind)
    damage_and_write_again(tmp_path, whole, stage, kind, lambda file, way: (file + way + turn) % 3 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", FEATURES)
def test_every_damage_of_any_file_is_made_good(no_disk_wait, tmp_path, whole, stage, kind):
    damage_and_write_again(tmp_path, whole, stage, kind, lambda file, way: True)


def test_labels_lost_after_their_step_come_back(no_disk_wait, tmp_path, whole):
    left = interrupt(tmp_path / "store", "bucketing edges")
    (left / "labels.npy").unlink()
    seen = []
    store = write(tmp_path / "store", progress=lambda what, done, total: seen.append(what))
    assert np.array_equal(store.labels, np.arange(60)[store.original_nid])
    assert "storing labels" in seen and "storing features" not in seen  # what is not damaged is kept
    assert all_bytes(store.root) == whole["dense"]


def test_foreign_files_go_and_a_foreign_folder_is_told(no_disk_wait, tmp_path, whole):
    left = interrupt(tmp_path / "store", "sorting rows")
    np.save(left / "zzz.npy", np.arange(3))
    (left / "mask_more.npy").write_bytes(b"x")
    assert all_bytes(write(tmp_path / "store").root) == whole["dense"]
    left = interrupt(tmp_path / "other", "sorting rows")
    (left / "mine").mkdir()
    with pytest.raises(PartitionStoreError, match=said("mine folder writer move")):
        write(tmp_path / "other")
    (left / "mine").rmdir()
    assert all_bytes(write(tmp_path / "other").root) == whole["dense"]


@pytest.mark.sweep
def test_a_damaged_line_ends_what_is_trusted(no_disk_wait, tmp_path, whole):
    left = interrupt(tmp_path / "store", "listing halos")
    saved = (left / "journal.jsonl").read_bytes()
    folder = tmp_path / "saved"
    shutil.copytree(left, folder)
    rng = np.random.default_rng(0)
    for position in rng.integers(0, len(saved), 12).tolist():
        text = bytearray(saved)
        text[position] ^= 1 << int(rng.integers(8))
        (left / "journal.jsonl").write_bytes(text)
        store = write(tmp_path / "store")
        assert all_bytes(store.root) == whole["dense"], position
        shutil.rmtree(store.root)
        shutil.copytree(folder, left)


def test_damage_between_a_step_and_the_manifest_is_found(no_disk_wait, tmp_path, whole):
    done = []

    def damage(what, *_):
        path = tmp_path / "store.partial" / "labels.npy"
        if what == "listing halos" and not done:
            done.append(what)
            path.write_bytes(bytes(path.stat().st_size))

    with pytest.warns(UserWarning, match=said("labels.npy header damaged")):
        store = write(tmp_path / "store", progress=damage)
    assert all_bytes(store.root) == whole["dense"]

    def damage_always(what, *_):
        path = tmp_path / "again.partial" / "features.npy"
        if what.startswith("packing"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")

    with (
        pytest.warns(UserWarning, match="made again"),
        pytest.raises(PartitionStoreError, match=said("features.npy content time")),
    ):
        write(tmp_path / "again", progress=damage_always)
    assert not (tmp_path / "again").exists()


def test_a_finished_folder_is_checked_before_it_gets_its_name(no_disk_wait, tmp_path, whole):
    for name in ("csc_indices.npy", "manifest.json", "source.json", "labels.npy"):
        store = write(tmp_path / "store")
        left = tmp_path / "store.partial"
        store.root.rename(left)
        content = bytearray((left / name).read_bytes())
        content[-20] ^= 1
        (left / name).write_bytes(content)
        store = write(tmp_path / "store")
        assert all_bytes(store.root) == whole["dense"], name
        shutil.rmtree(store.root)


def change(path):
    """Overwrite a file with other values of the same size."""
    values = np.load(path)
    os.utime(path, ns=(1, 1))
    np.save(path, values[::-1].copy() if values.ndim == 1 else np.roll(values, 1))


@first(2)
@pytest.mark.parametrize("name", ["edges", "features", "labels", "edge_weight"])
def test_input_that_changes_meanwhile_is_refused(no_disk_wait, tmp_path, name):
    given = {"features": FEATURES["dense"], "labels": np.arange(60), "edge_weight": np.arange(200) / 7}
    for kind, array in given.items():
        np.save(tmp_path / f"{kind}.npy", array)
    np.save(tmp_path / "edges.npy", np.array(GRAPH.edges).T.copy())
    arrays = {kind: tmp_path / f"{kind}.npy" for kind in given}
    arrays["labels"] = np.load(arrays["labels"], mmap_mode="r")
    for stage in ("storing labels", "bucketing edges", "listing halos"):
        done = []

        def overwrite(what, *_, stage=stage, done=done):
            if what == stage and not done:
                done.append(what)
                change(tmp_path / f"{name}.npy")

        stream = open_edge_stream(tmp_path / "edges.npy", num_nodes=60, to_undirected=True)
        message = rf"{name} \(.*{name}.npy\) changed while the store was written: run the same command again; nothing"
        with pytest.raises(PartitionStoreError, match=message) as error:
            write_partition_store(tmp_path / "store", stream, GRAPH.given, progress=overwrite, **arrays)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "store").exists() and not (tmp_path / "store.partial").exists()
    stream = open_edge_stream(tmp_path / "edges.npy", num_nodes=60, to_undirected=True)
    write_partition_store(tmp_path / "store", stream, GRAPH.given, **arrays).verify()


def test_a_partitioning_of_edges_that_changed_since_is_refused(no_disk_wait, tmp_path):
    np.save(tmp_path / "edges.npy", np.array(GRAPH.edges).T.copy())
    p = partition(open_edge_stream(tmp_path / "edges.npy", num_nodes=60), method="random", num_parts=3)
    p.save(tmp_path / "parts")
    change(tmp_path / "edges.npy")
    stream = open_edge_stream(tmp_path / "edges.npy", num_nodes=60)
    for made in (p, Partitioning.load(tmp_path / "parts")):
        with pytest.raises(PartitionStoreError, match=said("edges changed partitioned")):
            write_partition_store(tmp_path / "store", stream, made)
    again = partition(stream, method="random", num_parts=3)
    write_partition_store(tmp_path / "store", stream, again).verify()


def test_a_damaged_partitioning_is_told(tmp_path):
    p = partition(GRAPH.stream(), method="random", num_parts=3)
    for damage, message in (
        (lambda folder: flip(folder / "part_id.npy"), "part_id.npy was damaged"),
        (lambda folder: (folder / "partitioning.json").write_text("[]"), "no partitioning can be read"),
        (lambda folder: (folder / "partitioning.json").write_text("{"), "no partitioning can be read"),
    ):
        p.save(tmp_path / "parts")
        damage(tmp_path / "parts")
        with pytest.raises(GNNScaleError, match=said(f"{message} partition")) as error:
            Partitioning.load(tmp_path / "parts")
        assert "\n" not in str(error.value)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)


@first(2)
@pytest.mark.parametrize("call", ["pwrite", "write", "fsync", "fdatasync"])
def test_a_disk_that_fills_up_is_told_with_its_path(tmp_path, monkeypatch, call):
    plain, calls = getattr(os, call), []

    def full(*arguments):
        calls.append(call)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(*arguments)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(PartitionStoreError, match=said("store.partial space device")) as error:
        write(tmp_path / "store")
    assert "\n" not in str(error.value)
    monkeypatch.setattr(os, call, plain)
    write(tmp_path / "store").verify()


def test_a_full_disk_is_told_of_a_partitioning_and_its_checkpoint(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    p = partition(GRAPH.stream(), method="random", num_parts=3)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(GNNScaleError, match=said("parts space device")):
        p.save(tmp_path / "parts")
    with pytest.raises(GNNScaleError, match=said("state.npz saved space")):
        partition(GRAPH.stream(20), method="ldg", num_parts=3, checkpoint=tmp_path / "state.npz", checkpoint_every=1)


def test_old_partial_folders_are_begun_again(no_disk_wait, tmp_path, whole):
    left = interrupt(tmp_path / "store", "sorting rows")
    lines = [json.loads(line) for line in (left / "journal.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seal")
    (left / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert all_bytes(write(tmp_path / "store").root) == whole["dense"]
    PartitionStore.open(tmp_path / "store").verify()
