"""The skip by fingerprint opens no store of other data, and the remedy of every message about a damaged store works."""

import functools
import json
import os
import shutil
import threading

import numpy as np
import pytest
import scipy.sparse
from community_graph import small_dataset

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import CSRArrays, GraphDataset
from lightning_gnnscale.errors import GNNScaleError, PartitionStoreError
from lightning_gnnscale.partition_store import StoreSource, write_partition_store
from lightning_gnnscale.partition_store.manifest import FORMAT_VERSION
from lightning_gnnscale.partitioner import Partitioning
from tests.says import said
from tests.tiers import each_value

NUM_NODES = 400
ROWS = np.random.default_rng(0).random((NUM_NODES, 16), dtype=np.float32)
METHOD = "random"


@pytest.fixture(autouse=True)
def _no_disk_wait(monkeypatch):
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


def module(root, dataset, partitioner="random", num_parts=2, **options) -> gs.PartitionDataModule:
    return gs.PartitionDataModule(root=root, dataset=dataset, partitioner=partitioner, num_parts=num_parts, **options)


def with_features(dataset, features) -> GraphDataset:
    return GraphDataset("small", dataset.stream, features, dataset.labels, dataset.masks)


def original_rows(store) -> np.ndarray:
    rows = np.asarray(store.features.array)
    return rows[np.asarray(store.store_nid)]


def mapped(tmp_path, dtype=np.float32, shape=ROWS.shape, **options) -> np.memmap:
    path = tmp_path / "rows.bin"
    if not path.exists():
        ROWS.tofile(path)
    return np.memmap(path, dtype, "r", shape=shape, **options)


def columns(tmp_path):
    rows = mapped(tmp_path)
    return rows[:, :8], rows[:, 8:]


def dtypes(tmp_path):
    return mapped(tmp_path, np.int32), mapped(tmp_path, np.int16, (NUM_NODES, 32))


def offsets(tmp_path):
    half = (NUM_NODES, 8)
    return mapped(tmp_path, shape=half), mapped(tmp_path, shape=half, offset=NUM_NODES * 8 * 4)


def orders(tmp_path):
    return mapped(tmp_path), mapped(tmp_path, order="F")


def dtypes_in_memory(tmp_path):
    bits = ROWS[:, :8].copy().view(np.int32)
    return bits, bits.view(np.int16)


def shapes_in_memory(tmp_path):
    # The same bytes, read by rows and by columns.
    return ROWS, np.ascontiguousarray(ROWS.reshape(16, NUM_NODES).T)


@pytest.mark.parametrize("pair", [columns, dtypes, offsets, orders, dtypes_in_memory, shapes_in_memory])
def test_other_features_of_the_same_bytes_are_another_input(tmp_path, dataset, pair):
    first, second = pair(tmp_path)
    module(tmp_path / "s", with_features(dataset, first)).prepare_data()
    other = with_features(dataset, second)
    with pytest.raises(PartitionStoreError, match=said("input overwrite=True")):
        module(tmp_path / "s", other).prepare_data()
    again = module(tmp_path / "s", other, overwrite=True)
    again.prepare_data()
    assert np.array_equal(original_rows(again.store), second)
    stood = (tmp_path / "s" / "manifest.json").stat().st_mtime_ns
    module(tmp_path / "s", with_features(dataset, pair(tmp_path)[1])).prepare_data()
    assert (tmp_path / "s" / "manifest.json").stat().st_mtime_ns == stood


@pytest.mark.parametrize("kind", [scipy.sparse.csr_matrix, None])
def test_sparse_features_of_another_width_are_another_input(tmp_path, dataset, kind):
    sparse = scipy.sparse.random(NUM_NODES, 8, 0.3, "csr", np.float32, random_state=0)
    for width, refused in [(8, False), (8, False), (16, True)]:
        parts = sparse.indptr, sparse.indices, sparse.data
        features = CSRArrays(*parts, (NUM_NODES, width)) if kind is None else kind(parts[::-1], (NUM_NODES, width))
        dm = module(tmp_path / "s", with_features(dataset, features))
        if refused:
            with pytest.raises(PartitionStoreError, match="made from other input"):
                dm.prepare_data()
        else:
            dm.prepare_data()
            assert dm.num_features == 8


def test_a_file_is_not_read_for_its_fingerprint(tmp_path, dataset, monkeypatch):
    import lightning_gnnscale.partition_store.inputs as inputs

    np.save(tmp_path / "rows.npy", ROWS)
    plain = GraphDataset("bare", dataset.stream, np.load(tmp_path / "rows.npy", mmap_mode="r"))
    by_path = GraphDataset("bare", dataset.stream, tmp_path / "rows.npy")
    monkeypatch.setattr(inputs, "_content_hash", lambda array: pytest.fail("an array on disk was read"))
    assert module(tmp_path / "s", plain).store_source.fingerprint(2) == module(
        tmp_path / "s", by_path
    ).store_source.fingerprint(2)


class Rule:
    """A callable object."""

    def __init__(self, method, **held):
        self.method = method
        self.__dict__.update(held)

    def __call__(self, stream, num_parts, seed, masks, progress):
        return gs.partition(stream, self.method, num_parts=num_parts, seed=seed)

    def range(self, stream, num_parts, seed, masks, progress):
        return gs.partition(stream, "range", num_parts=num_parts, seed=seed)


def partition_rule(method, stream, num_parts, seed, masks, progress):
    return gs.partition(stream, method, num_parts=num_parts, seed=seed)


def other_rule(stream, num_parts, seed, masks, progress):
    return gs.partition(stream, "range", num_parts=num_parts, seed=seed)


def marked(text):
    def rule(stream, num_parts, **options):
        return gs.partition(stream, text, num_parts=num_parts)

    rule.fingerprint = text
    return rule


def finished(stream, method) -> Partitioning:
    return gs.partition(stream, method, num_parts=2)


PAIRS = {
    "functions": lambda: (partition_rule, other_rule),
    "texts": lambda: (marked("random"), marked("range")),
    "partial arguments": lambda: (
        functools.partial(partition_rule, "random"),
        functools.partial(partition_rule, "range"),
    ),
    "partial keywords": lambda: (
        functools.partial(gs.partition, method="random"),
        functools.partial(gs.partition, method="range"),
    ),
    "sets": lambda: (
        functools.partial(partition_rule, {"a", "b", "c"}),
        functools.partial(partition_rule, {"a", "b", "d"}),
    ),
    "arrays": lambda: (
        functools.partial(partition_rule, np.arange(9000)),
        functools.partial(partition_rule, np.arange(9000)[::-1]),
    ),
    "objects": lambda: (Rule("random"), Rule("range")),
    "nested objects": lambda: (Rule("random", inner=Rule("a")), Rule("random", inner=Rule("b"))),
    "functions held": lambda: (Rule("random", inner=partition_rule), Rule("random", inner=other_rule)),
    "methods": lambda: (Rule("random").range, Rule("random").__call__),
    "told by name": lambda: (
        Rule("random", lock=threading.Lock(), fingerprint="one"),
        Rule("random", lock=threading.Lock(), fingerprint="two"),
    ),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_callables_are_told_apart_and_found_again(tmp_path, dataset, pair):
    def fingerprints():
        return [module(tmp_path / "s", dataset, partitioner=given).store_source.fingerprint(2) for given in pair()]

    first, second = fingerprints()
    assert first != second
    assert fingerprints() == [first, second]


def test_another_function_does_not_open_the_store_of_the_first(tmp_path, dataset):
    first, second = PAIRS["texts"]()
    module(tmp_path / "s", dataset, partitioner=first).prepare_data()
    module(tmp_path / "s", dataset, partitioner=first).prepare_data()
    with pytest.raises(PartitionStoreError, match=said("input partitioner overwrite=True")):
        module(tmp_path / "s", dataset, partitioner=second).prepare_data()
    dm = module(tmp_path / "s", dataset, partitioner=second, overwrite=True)
    dm.prepare_data()
    assert dm.store.manifest["method"] == "range"


def test_a_callable_object_partitions(tmp_path, dataset):
    for _ in range(2):
        module(tmp_path / "s", dataset, partitioner=Rule("random")).prepare_data()
    with pytest.raises(PartitionStoreError, match="another partitioner"):
        module(tmp_path / "s", dataset, partitioner=Rule("range")).prepare_data()


def test_a_finished_partitioning_that_is_held_counts_by_its_parts(tmp_path, dataset):
    prints = [
        module(tmp_path / "s", dataset, partitioner=Rule(finished(dataset.stream, method))).store_source.fingerprint(2)
        for method in ("random", "random", "range")
    ]
    assert prints[0] == prints[1] != prints[2]


def holding_itself():
    rule = Rule("random")
    rule.method = rule
    return rule


UNTOLD = {
    "a lock": (lambda: Rule("random", lock=threading.Lock()), "lock"),
    "bytes": (lambda: Rule(b"random"), "bytes"),
    "a lambda": (lambda: lambda stream, num_parts, **options: None, "lambda"),
    "a function inside another": (lambda: functools.cache(lambda stream, num_parts: None), "lambda"),
    "itself": (holding_itself, "holds itself"),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_what_cannot_be_told_apart_is_refused_in_one_line(tmp_path, dataset, name):
    make, word = UNTOLD[name]
    with pytest.raises(ValueError, match=said(f"partitioner {word} fingerprint")) as error:
        module(tmp_path / "s", dataset, partitioner=make()).prepare_data()
    assert "\n" not in str(error.value)
    assert not (tmp_path / "s").exists()


def cut(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def other_version(root):
    manifest = json.loads((root / "manifest.json").read_text())
    (root / "manifest.json").write_text(json.dumps(manifest | {"format_version": 99}))


DAMAGES = {
    "cut file": (lambda root: cut(root / "features.npy"), "features.npy.*overwrite=True"),
    "missing file": (lambda root: (root / "csc_indices.npy").unlink(), "csc_indices.npy.*overwrite=True"),
    "other version": (other_version, "format 99.*overwrite=True"),
    "broken manifest": (lambda root: (root / "manifest.json").write_text("{"), "manifest.json.*overwrite=True"),
    "empty manifest": (lambda root: (root / "manifest.json").write_text(""), "manifest.json.*overwrite=True"),
    "bare manifest": (
        lambda root: (root / "manifest.json").write_text(json.dumps({"format_version": FORMAT_VERSION})),
        "manifest.json.*overwrite=True",
    ),
    "missing manifest": (lambda root: (root / "manifest.json").unlink(), "manifest.json.*overwrite=True"),
    "no source": (lambda root: ((root / "source.json").unlink(), cut(root / "labels.npy")), None),
    "flipped bit": (lambda root: flip(root / "features.npy"), None),
}


@each_value
@pytest.mark.parametrize("num_parts", [2, "auto"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_overwrite_is_the_remedy_that_the_message_says(tmp_path, dataset, damage, num_parts):
    change, message = damage
    root = tmp_path / "s"
    module(root, dataset).prepare_data()
    whole = {path.name: path.read_bytes() for path in root.iterdir()}
    change(root)
    damaged = {path.name: path.read_bytes() for path in root.iterdir()}
    options = {"planner": lambda **given: gs.plan(**{**given, "num_parts": 2})} if num_parts == "auto" else {}
    if message is not None:
        with pytest.raises(PartitionStoreError, match=message) as error:
            module(root, dataset, num_parts=num_parts, **options).prepare_data()
        assert "\n" not in str(error.value)
        assert {path.name: path.read_bytes() for path in root.iterdir()} == damaged, "lost without overwrite"
    dm = module(root, dataset, num_parts=num_parts, overwrite=True, **options)
    dm.prepare_data()
    dm.store.verify()
    assert {path.name: path.read_bytes() for path in root.iterdir()} == whole
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["s"]


def test_overwrite_keeps_what_the_first_of_several_ranks_wrote(tmp_path, dataset):
    root = tmp_path / "s"
    for _ in range(2):
        module(root, dataset, overwrite=True).prepare_data()
        stood = (root / "manifest.json").stat().st_ino
    module(root, dataset, overwrite=True).prepare_data()
    assert (root / "manifest.json").stat().st_ino == stood


def test_a_folder_that_is_no_store_is_refused_before_any_work(tmp_path, dataset):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.txt").write_text("mine")

    def never(stream, **options):
        raise AssertionError("partitioned")

    never.fingerprint = "never"
    for overwrite in (False, True):
        with pytest.raises(PartitionStoreError, match=said("partition store choose root")):
            module(tmp_path / "s", dataset, partitioner=never, overwrite=overwrite).prepare_data()
    assert (tmp_path / "s" / "thesis.txt").read_text() == "mine"
    os.remove(tmp_path / "s" / "thesis.txt")
    module(tmp_path / "s", dataset).prepare_data()


@each_value
@pytest.mark.parametrize("text", ["", "{", "[]", '{"partitioning": 3}', "\x00\x00"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_unreadable_record_counts_as_absent(tmp_path, dataset, text, overwrite):
    root, record = tmp_path / "s", tmp_path / "s.source.json"
    module(root, dataset).prepare_data()
    record.write_text(text)
    dm = module(root, dataset, num_parts="auto" if not overwrite else 2, overwrite=overwrite)
    assert dm.partitioning_facts == {}
    dm.prepare_data()
    assert dm.store.num_parts == dm.partitioning_facts["num_parts"] == 2
    assert json.loads(record.read_text())["fingerprint"] == dm.store_source.fingerprint(2)


@pytest.mark.parametrize("text", ["", None])
def test_a_store_that_nothing_tells_of_is_refused_with_what_to_do(tmp_path, dataset, text):
    root, record = tmp_path / "s", tmp_path / "s.source.json"
    module(root, dataset, partitioner=Rule("random")).prepare_data()
    record.unlink() if text is None else record.write_text(text)
    before = {path.name: path.read_bytes() for path in root.iterdir()}
    with pytest.raises(PartitionStoreError, match=said("s.source.json store= overwrite=True")) as error:
        module(root, dataset, partitioner=Rule("random")).prepare_data()
    assert "\n" not in str(error.value)
    assert {path.name: path.read_bytes() for path in root.iterdir()} == before
    module(root, dataset, partitioner=Rule("random"), overwrite=True).prepare_data()
    module(root, dataset, partitioner=Rule("random")).prepare_data()


def test_the_record_is_on_the_disk_before_it_has_its_name(tmp_path, dataset, monkeypatch):
    synced, replaced = [], []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))

    def replace_synced(src, dst):
        replaced.append(str(dst))
        assert str(src) in synced
        replace(src, dst)

    monkeypatch.setattr(os, "replace", replace_synced)
    module(tmp_path / "s", dataset).prepare_data()
    assert str(tmp_path / "s.source.json") in replaced
    assert not list(tmp_path.glob("*.tmp"))


def cut_parts(folder):
    cut(folder / "part_id.npy")


PARTS_DAMAGES = {
    "cut ids": lambda folder: cut(folder / "part_id.npy"),
    "empty ids": lambda folder: (folder / "part_id.npy").write_bytes(b""),
    "missing ids": lambda folder: (folder / "part_id.npy").unlink(),
    "ids out of range": lambda folder: np.save(folder / "part_id.npy", np.full(NUM_NODES, 9, np.int32)),
    "empty description": lambda folder: (folder / "partitioning.json").write_text(""),
    "cut description": lambda folder: cut(folder / "partitioning.json"),
    "no object": lambda folder: (folder / "partitioning.json").write_text("[]"),
    "bare description": lambda folder: (folder / "partitioning.json").write_text(
        json.dumps({"format_version": 1, "num_nodes": NUM_NODES})
    ),
    "other version": lambda folder: (folder / "partitioning.json").write_text('{"format_version": 9}'),
}


def killed_after_partitioning(root, dataset, monkeypatch):
    import lightning_gnnscale.partition_store.preparation as preparation

    def killed(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "write_partition_store", killed)
        with pytest.raises(KeyboardInterrupt):
            module(root, dataset).prepare_data()
    (folder,) = root.parent.glob("s.parts-*")
    return folder


@each_value
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("damage", [None, *PARTS_DAMAGES.values()], ids=["whole", *PARTS_DAMAGES])
def test_parts_of_a_killed_run_are_made_again_where_they_cannot_be_read(
    tmp_path, dataset, damage, overwrite, monkeypatch
):
    folder = killed_after_partitioning(tmp_path / "s", dataset, monkeypatch)
    if damage is not None:
        damage(folder)
    made = []
    partition = StoreSource._partition
    monkeypatch.setattr(StoreSource, "_partition", lambda self, num: (made.append(num), partition(self, num))[1])
    dm = module(tmp_path / "s", dataset, overwrite=overwrite)
    dm.prepare_data()
    assert made == ([] if damage is None else [2])
    dm.store.verify()
    assert not folder.exists()


def test_damaged_parts_let_no_other_store_go(tmp_path, dataset, monkeypatch):
    folder = killed_after_partitioning(tmp_path / "s", dataset, monkeypatch)
    cut(folder / "part_id.npy")
    shutil.move(folder, tmp_path / "kept")
    module(tmp_path / "s", small_dataset(seed=5)).prepare_data()
    shutil.move(tmp_path / "kept", folder)
    before = (tmp_path / "s" / "manifest.json").stat().st_ino
    with pytest.raises(GNNScaleError, match=said("input overwrite=True")):
        module(tmp_path / "s", dataset).prepare_data()
    assert (tmp_path / "s" / "manifest.json").stat().st_ino == before


def written_by_hand(root, dataset, method="random", **options):
    parts = gs.partition(dataset.stream, method, num_parts=3, seed=0, **options)
    tables = {"features": dataset.features, "labels": dataset.labels, "masks": dataset.masks}
    return write_partition_store(root, dataset.stream, parts, **tables)


@each_value
@pytest.mark.parametrize("partitioner", ["spring", functools.partial(gs.partition, method="spring")])
@pytest.mark.parametrize("num_parts", [3, "auto"])
def test_a_store_that_was_written_by_hand_is_found(tmp_path, dataset, num_parts, partitioner):
    root = tmp_path / "s"
    written_by_hand(root, dataset, "spring")
    before = (root / "manifest.json").stat().st_ino
    for _ in range(2):
        dm = module(root, dataset, partitioner, num_parts)
        dm.prepare_data()
        assert dm.store.num_parts == 3
        assert dm.partitioning_facts["method"] == "spring"
    assert (root / "manifest.json").stat().st_ino == before


@pytest.mark.parametrize(
    "options", [{"num_parts": 2}, {"partitioner": "range"}, {"seed": 1}, {"pack_halo": True}, {"dataset": None}]
)
def test_a_store_that_was_written_by_hand_from_other_input_is_refused(tmp_path, dataset, options):
    root = tmp_path / "s"
    written_by_hand(root, dataset)
    given = {"dataset": dataset, "num_parts": 3, "partitioner": "random", **options}
    given["dataset"] = given["dataset"] or small_dataset(seed=5)
    with pytest.raises(PartitionStoreError, match=said("input overwrite=True")):
        module(root, **given).prepare_data()


def test_a_damaged_store_that_was_written_by_hand_is_written_again(tmp_path, dataset):
    root = tmp_path / "s"
    written_by_hand(root, dataset)
    cut(root / "features.npy")
    with pytest.raises(PartitionStoreError, match=said("features.npy overwrite=True")):
        module(root, dataset, num_parts=3).prepare_data()
    dm = module(root, dataset, num_parts=3, overwrite=True)
    dm.prepare_data()
    dm.store.verify()


def test_a_partitioning_left_by_a_kill_is_removed(tmp_path):
    dm = gs.PartitionDataModule(root=tmp_path / "store", dataset=small_dataset(), num_parts=2)
    dm.prepare_data()
    left = tmp_path / f"store.parts-{dm.store_source.fingerprint(2)[:12]}"
    left.mkdir()  # killed after its record was written
    dm.prepare_data()
    assert not left.exists()
