"""Whatever stands on disk, the store opens and verifies, or says in one line what is wrong and how to go on."""

import json
import os
import shutil
import socket
import threading
from contextlib import suppress

import numpy as np
import pytest

from lightning_gnnscale.errors import PartitionStoreError
from lightning_gnnscale.partition_store import (
    Columns,
    PartitionStore,
    WriteBudget,
    array_file,
    disk,
    input_fingerprint,
    write_partition_store,
)
from tests.partition_store.small_graphs import Given, all_bytes, random_graph, reseal, rewrite
from tests.says import said

GRAPH = random_graph(60, 200, 3, to_undirected=True)
FEATURES = np.random.default_rng(0).random((60, 4)).astype(np.float32)


def write(root, features=FEATURES, p=GRAPH.given, **options):
    return write_partition_store(root, GRAPH.stream(40), p, features=features, **options)


@pytest.fixture
def store(no_disk_wait, tmp_path):
    return write(tmp_path / "store", labels=np.arange(60), masks={"train": np.ones(60, bool)})


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_store(tmp_path):
    with pytest.raises(PartitionStoreError, match=said("partition store")) as error:
        PartitionStore.open(tmp_path / "nothing")
    assert str(tmp_path / "nothing") in one_line(error)
    with pytest.raises(PartitionStoreError, match=said("manifest.json folder")):
        PartitionStore.open(tmp_path)


def test_wrong_version(store):
    manifest = json.loads((store.root / "manifest.json").read_text())
    for version in (3, 99):
        (store.root / "manifest.json").write_text(json.dumps(manifest | {"format_version": version}))
        with pytest.raises(PartitionStoreError, match=said(f"{version} 5 overwrite=True")) as error:
            PartitionStore.open(store.root)
        one_line(error)
    for text in ("{", "[]", "null", json.dumps(manifest | {"num_arcs": manifest["num_arcs"] + 1})):
        (store.root / "manifest.json").write_text(text)
        with pytest.raises(PartitionStoreError, match=said("manifest.json overwrite=True")) as error:
            PartitionStore.open(store.root)
        one_line(error)


EDITS = [
    {"symmetric": False},
    {"feature_dim": 3},
    {"least_edge_weight": 0.5},
    {"masks": ["trein"]},
    {"num_nodes": 59},
    {"num_parts": 2},
    {"seed": 1},
]


@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_an_edit_of_the_manifest_does_not_open(store, edit):
    manifest = json.loads((store.root / "manifest.json").read_text())
    (store.root / "manifest.json").write_text(json.dumps(manifest | edit))
    with pytest.raises(PartitionStoreError, match=said("manifest.json overwrite=True")) as error:
        PartitionStore.open(store.root)
    one_line(error)


WRONG = [
    ({"num_nodes": -1}, "num_nodes is -1"),
    ({"num_nodes": 1.5}, "num_nodes is 1.5"),
    ({"num_arcs": True}, "num_arcs is True"),
    ({"num_parts": 0}, "num_parts is 0"),
    ({"symmetric": 1}, "symmetric is 1"),
    ({"masks": "train"}, "masks is train"),
    ({"masks": ["test"]}, "files: mask_test does not go with the rest"),
    ({"feature_dim": -4}, "feature_dim is -4"),
    ({"feature_dim": 5}, "files: features is <f4 of shape"),
    ({"least_edge_weight": 0.5}, "files: edge_weight does not go with the rest"),
    ({"num_edge_classes": -1}, "num_edge_classes is -1"),
    ({"num_nodes": 59}, "files: original_nid is <i4 of shape"),
    ({"num_parts": 4}, "files: part_offsets is <i8 of shape"),
    ({"files": {"csc_indptr": 3}}, "files is "),
    ({"files": None}, "files is None"),
    ({"files": {}}, "files: csc_indices does not go"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG, ids=str)
def test_fields_of_a_sealed_manifest_are_checked(store, edit, message):
    reseal(store.root, lambda manifest: manifest.update(edit))
    with pytest.raises(PartitionStoreError, match=said(f"manifest.json {message} overwrite=True")) as error:
        PartitionStore.open(store.root)
    one_line(error)
    for lost in ("files", "masks", "symmetric"):
        reseal(store.root, lambda manifest, lost=lost: manifest.pop(lost, None))
        with pytest.raises(PartitionStoreError, match="damaged"):
            PartitionStore.open(store.root)


def test_the_record_of_the_input_is_sealed_and_bound_to_its_store(store, tmp_path):
    path = store.root / "source.json"
    text = path.read_text()
    other = write(tmp_path / "other", features=FEATURES + 1)
    for damaged, message in (
        (text.replace("part_id_crc32", "part_id_crc33"), "damaged, or edited"),
        (text[:20], "damaged"),
        ((other.root / "source.json").read_text(), "belongs to another store"),
    ):
        path.write_text(damaged)
        with pytest.raises(PartitionStoreError, match=said(f"source.json {message} overwrite=True")) as error:
            PartitionStore.open(store.root)
        one_line(error)
    path.unlink()
    with pytest.raises(PartitionStoreError, match=said("source.json missing")):
        PartitionStore.open(store.root)


def every_file(store):
    return sorted(path.name for path in store.root.glob("*.npy"))


def test_truncated_or_missing_files_do_not_open(store, tmp_path):
    for name in every_file(store):
        copy = tmp_path / "copy"
        shutil.copytree(store.root, copy)
        with open(copy / name, "r+b") as file:
            file.truncate((copy / name).stat().st_size - 1)
        with pytest.raises(PartitionStoreError, match=said(f"{name} bytes")) as error:
            PartitionStore.open(copy)
        one_line(error)
        (copy / name).unlink()
        with pytest.raises(PartitionStoreError, match=said(f"{name} missing")):
            PartitionStore.open(copy)
        shutil.rmtree(copy)


def test_verify_names_the_file_with_a_flipped_bit(store, tmp_path):
    rng = np.random.default_rng(0)
    for name in every_file(store):
        copy = tmp_path / "copy"
        shutil.copytree(store.root, copy)
        size = (copy / name).stat().st_size
        for position in (int(rng.integers(0, 128)), int(rng.integers(128, size))):
            content = bytearray((store.root / name).read_bytes())
            content[position] ^= 1 << int(rng.integers(8))
            (copy / name).write_bytes(content)
            with pytest.raises(PartitionStoreError, match=f"{name}: (its .* damaged|does not rise)") as error:
                PartitionStore.open(copy).verify()
            one_line(error)
        shutil.rmtree(copy)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("part_offsets", lambda a: a.__setitem__(1, 61), "part_offsets.npy: does not rise"),
        ("original_nid", lambda a: a.__setitem__(0, a[1]), "original_nid.npy: is not the inverse"),
        ("original_nid", lambda a: a.__setitem__(0, 60), r"original_nid.npy: names what .* are in \[0, 60\)"),
        ("csc_indptr", lambda a: a.__setitem__(-1, 7), "csc_indptr.npy: does not rise"),
        ("csc_indices", lambda a: a.__setitem__(0, 60), r"csc_indices.npy: names what .* are in \[0, 60\)"),
        ("csc_indices", lambda a: a.sort(), "csc_indices.npy: part 0"),
        ("in_degree", lambda a: a.__iadd__(1), "in_degree.npy: part 0 has other degrees"),
        ("halo_offsets", lambda a: a.__setitem__(1, a[1] - 1), "csc_indices.npy: part 0 reads"),
        ("halo_nodes", lambda a: a.__setitem__(0, a[0] ^ 1), "halo_nodes.npy: part 0 reads other nodes"),
        ("halo_places", lambda a: a.__setitem__(0, a[1]), "halo_places.npy: rows of part 0 are packed twice"),
        ("halo_count", lambda a: a.__setitem__(0, a[0] + 1), "halo_count.npy: does not count the halos of each node"),
        (
            "halo_code",
            lambda a: a.__setitem__(0, a[0] + 1),
            "halo_code.npy: (the halo rows of part 0|part 0: halo rows)",
        ),
    ],
)
def test_verify_sees_a_broken_structure(store, name, change, message):
    if name in (
        "halo_nodes",
        "halo_places",
        "halo_count",
        "halo_code",
    ):  # of a store that packs halo rows and has edge weights
        store = write(store.root.with_name("more"), pack_halo=True, edge_weight=np.ones(200))
    rewrite(store, name, change)
    with pytest.raises(PartitionStoreError, match=message) as error:
        PartitionStore.open(store.root).verify()
    one_line(error)


def test_verify_sees_a_direction_that_is_missing(no_disk_wait, tmp_path):
    graph = random_graph(60, 200, 3)
    write_partition_store(tmp_path / "store", graph.stream(), graph.given).verify()
    for name in ("halo_code", "halo_code_offsets"):
        (tmp_path / "store" / f"{name}.npy").unlink()
        reseal(
            tmp_path / "store",
            lambda manifest, name=name: (manifest["files"].pop(name) and None) or manifest.update(symmetric=True),
        )
    with pytest.raises(PartitionStoreError, match=said("csc_indices.npy 0")):
        PartitionStore.open(tmp_path / "store").verify()


def test_the_store_of_the_same_input_is_opened(store):
    before = {path.name: path.stat().st_mtime_ns for path in store.root.iterdir()}
    again = write(store.root, labels=np.arange(60), masks={"train": np.ones(60, bool)})
    assert {path.name: path.stat().st_mtime_ns for path in again.root.iterdir()} == before
    assert again.fingerprint == store.fingerprint


def test_the_fingerprint_is_known_before_the_partitioning(store):
    arguments = {"method": "given", "num_parts": 3, "seed": 0, "options": {}}
    labels, masks = np.arange(60), {"train": np.ones(60, bool)}
    known = input_fingerprint(
        GRAPH.stream(), **arguments, columns=Columns(features=FEATURES, labels=labels, masks=masks)
    )
    assert known == store.fingerprint
    for change in ({"num_parts": 4}, {"seed": 1}, {"options": {"beta": 2}}, {"method": "spring"}):
        changed = input_fingerprint(
            GRAPH.stream(), **(arguments | change), columns=Columns(features=FEATURES, labels=labels, masks=masks)
        )
        assert changed != known
    assert (
        input_fingerprint(
            GRAPH.stream(), **arguments, columns=Columns(features=FEATURES + 1, labels=labels, masks=masks)
        )
        != known
    )


def test_labels_in_one_column_have_the_same_fingerprint(no_disk_wait, tmp_path):
    store = write(tmp_path / "store", labels=np.arange(60)[:, None])
    for labels in (np.arange(60)[:, None], np.arange(60)):
        assert (
            input_fingerprint(GRAPH.stream(), "given", 3, 0, {}, Columns(features=FEATURES, labels=labels))
            == store.fingerprint
        )


def test_input_that_must_change_leaves_nothing_behind(no_disk_wait, tmp_path):
    with pytest.raises(ValueError, match=said("features 59 0 nan")):
        write(tmp_path / "store", features=np.append(np.ones(59), np.nan)[:, None])
    write(tmp_path / "store", features=np.ones((60, 1))).verify()


def test_files_of_somebody_else_are_not_cleared(no_disk_wait, tmp_path):
    (tmp_path / "store.partial").mkdir()
    (tmp_path / "store.partial" / "notes").write_text("mine")
    with pytest.raises(PartitionStoreError, match=said("files writer")):
        write(tmp_path / "store", overwrite=True)
    assert (tmp_path / "store.partial" / "notes").read_text() == "mine"


def test_files_are_known_by_path_and_change(no_disk_wait, tmp_path):
    path = tmp_path / "features.npy"
    np.save(path, FEATURES)
    prints = [
        input_fingerprint(GRAPH.stream(), "given", 3, 0, {}, Columns(features=given))
        for given in (path, str(path), np.load(path, mmap_mode="r"), np.load(path, mmap_mode="r")[1:])
    ]
    assert prints[0] == prints[1] == prints[2] != prints[3]
    np.save(path, FEATURES + 1)
    assert input_fingerprint(GRAPH.stream(), "given", 3, 0, {}, Columns(features=path)) != prints[0]


def test_another_store_is_never_replaced_in_silence(store):
    before = all_bytes(store.root)
    with pytest.raises(PartitionStoreError, match=said("input overwrite=True")) as error:
        write(store.root, FEATURES + 1)
    one_line(error)
    other = Given(np.roll(GRAPH.given.part_id, 1), 3)
    with pytest.raises(PartitionStoreError, match="another input"):
        write(store.root, p=other, labels=np.arange(60), masks={"train": np.ones(60, bool)})
    assert all_bytes(store.root) == before
    new = write(store.root, FEATURES + 1, overwrite=True)
    assert np.array_equal(new.features.read(new.store_nid), FEATURES + 1)
    assert sorted(path.name for path in store.root.parent.iterdir()) == ["store", "store.lock", "store.verified.json"]


def test_the_old_store_stays_until_the_new_one_is_complete(store):
    before = all_bytes(store.root)

    def stop(what, done, total):
        if what == "listing halos":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(store.root, FEATURES + 1, overwrite=True, progress=stop)
    assert all_bytes(store.root) == before
    PartitionStore.open(store.root).verify()


def test_a_folder_that_is_no_store_is_left_alone(no_disk_wait, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(PartitionStoreError, match=said("exists partition store choose root")):
            write(tmp_path, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty").verify()


SMALL = WriteBudget(spill_edges=20, sort_edges=50, checkpoint_bytes=1)


def interrupted(root, budget=SMALL, **options):
    def stop(what, done, total):
        if what == "sorting rows":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(root, progress=stop, budget=budget, **options)


def test_a_half_written_store_says_how_to_go_on(no_disk_wait, tmp_path):
    interrupted(tmp_path / "store")
    with pytest.raises(PartitionStoreError, match=said("finished run command writes")) as error:
        PartitionStore.open(tmp_path / "store")
    one_line(error)
    with pytest.raises(PartitionStoreError, match=said("unfinished store overwrite=True")) as error:
        write(tmp_path / "store", FEATURES + 1)
    one_line(error)
    write(tmp_path / "store", FEATURES + 1, overwrite=True).verify()


def test_finished_steps_are_not_done_again(no_disk_wait, tmp_path):
    budget = WriteBudget(spill_edges=20, sort_edges=50, checkpoint_bytes=1)
    interrupted(tmp_path / "store")
    seen = []
    write(tmp_path / "store", budget=budget, progress=lambda what, done, total: seen.append(what))
    assert "bucketing edges" not in seen and "storing features" not in seen and "sorting rows" in seen


def test_buffers_fit_the_memory_that_is_free_and_stay_what_a_store_began_with(no_disk_wait, tmp_path, monkeypatch):
    root, seen, most = tmp_path / "store", [], WriteBudget()
    monkeypatch.setattr(disk, "free_memory_bytes", lambda: 130 << 20)
    interrupted(root, budget=None)
    begun = WriteBudget(most.spill_edges // 4, most.sort_edges // 4, most.block_bytes // 4)
    assert WriteBudget.fitting(60, tmp_path, {}) == begun
    monkeypatch.setattr(disk, "free_memory_bytes", lambda: 1 << 40)
    assert WriteBudget.fitting(60, tmp_path, {}) == most
    write(root, progress=lambda what, done, total: seen.append(what))
    assert seen and {"storing features", "bucketing edges"}.isdisjoint(seen)


@pytest.mark.parametrize("sparse", [False, True])
def test_an_interruption_at_any_block_leaves_no_trace(no_disk_wait, tmp_path, sparse):
    rows = (np.arange(0, 121, 2), np.arange(120) % 9, np.arange(120, dtype=np.float16), (60, 9))
    arrays = {"labels": np.arange(60), "masks": {"val": np.arange(60) % 3 == 0}, "edge_weight": np.arange(200) / 7}
    arrays |= {"features": rows if sparse else FEATURES, "pack_halo": True}
    budget = WriteBudget(spill_edges=60, sort_edges=150, block_bytes=400 if sparse else 330, checkpoint_bytes=1)
    calls = []
    whole = all_bytes(
        write(tmp_path / "whole", budget=budget, progress=lambda *call: calls.append(call), **arrays).root
    )
    assert len({what for what, _, _ in calls}) == 7 and len(calls) > 20
    for last in range(len(calls)):
        left = [*calls[: last + 1]]

        def stop(*call, left=left):
            assert left.pop(0) == call
            if not left:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / str(last), budget=budget, progress=stop, **arrays)
        after = []
        again = write(
            tmp_path / str(last), budget=budget, progress=lambda *call, after=after: after.append(call), **arrays
        )
        assert all_bytes(again.root) == whole
        assert len(after) <= len(calls) - last + 1  # at most two chunks, which make one spill, are read again


def test_damage_in_what_an_interrupted_writer_left_is_noticed(no_disk_wait, tmp_path):
    whole = write(tmp_path / "whole")
    interrupted(tmp_path / "store")
    path = max((tmp_path / "store.partial").glob("run_src_*.npy"), key=lambda run: run.stat().st_size)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    again = write(tmp_path / "store", budget=WriteBudget(spill_edges=20, sort_edges=50, checkpoint_bytes=1))
    assert all_bytes(again.root) == all_bytes(whole.root)


def test_a_kill_between_completion_and_renaming_is_mended(no_disk_wait, tmp_path):
    store = write(tmp_path / "store")
    expected = all_bytes(store.root)
    store.root.rename(tmp_path / "store.partial")
    assert all_bytes(write(store.root).root) == expected
    # The old store has stepped aside and the new one is not there yet.
    store.root.rename(tmp_path / "store.old")
    assert all_bytes(write(store.root).root) == expected
    assert not (tmp_path / "store.old").exists()


def test_a_full_disk_is_told_before_work(no_disk_wait, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(PartitionStoreError, match="needs about [1-9].* [KM]iB at its peak, 1000 B are free") as error:
        write(tmp_path / "store")
    one_line(error)


def test_a_second_writer_is_told_who_is_at_work(no_disk_wait, tmp_path):
    at_work, go_on = threading.Event(), threading.Event()

    def wait(what, done, total):
        at_work.set()
        assert go_on.wait(30)

    first = threading.Thread(target=write, args=(tmp_path / "store",), kwargs={"progress": wait})
    first.start()
    try:
        assert at_work.wait(30)
        who = f"process {os.getpid()} on {socket.gethostname()} is writing this store"
        with pytest.raises(PartitionStoreError, match=who) as error:
            write(tmp_path / "store")
        one_line(error)
    finally:
        go_on.set()
    write(tmp_path / "store", lock_timeout_s=30).verify()
    first.join()


def test_a_store_behind_a_link_is_replaced_where_it_lies(no_disk_wait, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "store")
    write(tmp_path / "link")
    other = write(tmp_path / "link", features=FEATURES + 1, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert set(os.listdir(tmp_path / "disk")) == {"store", "store.lock", "store.verified.json"}
    assert np.array_equal(other.features.read(other.store_nid), FEATURES + 1)


def test_an_edited_map_of_a_file_is_not_the_file(no_disk_wait, tmp_path):
    np.save(tmp_path / "x.npy", FEATURES)
    before = write(tmp_path / "s", features=np.load(tmp_path / "x.npy", mmap_mode="c")).fingerprint
    edited = np.load(tmp_path / "x.npy", mmap_mode="c")
    edited *= 2
    with pytest.raises(PartitionStoreError, match="another input"):
        write(tmp_path / "s", features=edited)
    assert PartitionStore.open(tmp_path / "s").fingerprint == before


def test_parts_of_ones_own_are_told_apart(no_disk_wait, tmp_path):
    part_id = GRAPH.given.part_id
    stores = [write(tmp_path / name, p=Given(ids, 3)) for name, ids in (("a", part_id), ("b", (part_id + 1) % 3))]
    assert stores[0].layout_fingerprint != stores[1].layout_fingerprint
    assert stores[0].layout_fingerprint == PartitionStore.open(tmp_path / "a").layout_fingerprint


def test_refused_features_hold_no_file_open(no_disk_wait, tmp_path):
    features = FEATURES.copy()
    features[50, 2] = np.nan
    with pytest.raises(ValueError, match="features"):
        write(tmp_path / "s", features=features)
    held = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            held.append(os.readlink(f"/proc/self/fd/{number}"))
    assert not [path for path in held if str(tmp_path) in path]


def test_a_map_for_reads_at_random_is_of_the_same_rows(tmp_path, monkeypatch):
    np.save(tmp_path / "rows.npy", np.arange(60).reshape(20, 3))
    rows = array_file.map_rows(tmp_path / "rows.npy", np.int64, (20, 3))
    monkeypatch.setattr(array_file, "free_memory_bytes", lambda: 2 * rows.nbytes)
    assert array_file.mapped_at_random(rows) is rows
    monkeypatch.setattr(array_file, "free_memory_bytes", lambda: 0)
    again, part = array_file.mapped_at_random(rows), array_file.mapped_at_random(rows[4:])
    assert again is not rows and array_file.file_place(again) == array_file.file_place(rows)
    assert np.array_equal(again, rows) and np.array_equal(part, rows[4:])
    assert array_file.mapped_at_random(np.ones(3)).base is None
