"""A store behind a URL: published manifest last, fetched in slices, each byte once; faults are one line each."""

import json
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest

from lightning_gnnscale import object_store
from lightning_gnnscale.errors import ObjectStoreError, PartitionStoreError
from lightning_gnnscale.object_store import ObjectStore, local_copy
from lightning_gnnscale.partition_store import PartitionStore, publish, published, write_partition_store
from tests.partition_store.small_graphs import random_graph
from tests.s3_server import SECRET
from tests.says import said

NODES, PARTS, BLOCK = 300, 4, 4096


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch, tmp_path, no_disk_wait):
    monkeypatch.setattr(published, "BLOCK_BYTES", BLOCK)
    monkeypatch.setenv("GNNSCALE_FETCHED", str(tmp_path / "fetched"))


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between tries, which pass at once: of the time that a try is given, a busy machine takes nothing."""
    passed = []
    clock = SimpleNamespace(monotonic=lambda: sum(passed), sleep=passed.append)
    monkeypatch.setattr(object_store, "time", clock)
    return passed


@pytest.fixture(params=["packed", "loose", "codes", "bfloat16", "weighted", "sparse"])
def kind(request):
    return request.param


def store_of(root, kind="packed", seed=0):
    """A small store; `packed` has its halo rows beside the parts."""
    graph = random_graph(NODES, 2500, PARTS, seed, to_undirected=kind == "codes")
    rng = np.random.default_rng(seed)
    x = rng.random((NODES, 40)).astype(np.float32)
    options = {"features": x, "labels": np.arange(NODES) % 3, "pack_halo": kind != "loose"}
    if kind == "codes":
        options["feature_storage"] = "int8"
    elif kind == "bfloat16":
        options["feature_storage"] = kind
    elif kind == "weighted":
        options["edge_weight"] = rng.random(2500).astype(np.float32)
    elif kind == "sparse":
        from scipy.sparse import csr_array

        options["features"] = csr_array(np.where(x > 0.8, x, 0))
    return write_partition_store(root, graph.stream(), graph.given, **options)


@pytest.fixture
def url():
    """A folder of fsspec's memory, empty."""
    memory = fsspec.filesystem("memory")
    if memory.exists("/stores"):
        memory.rm("/stores", recursive=True)
    return "memory://stores/one"


def same(left, right, part):
    """Whether two stores give one part and its rows bit for bit."""
    one, other = left.load_part(part), right.load_part(part)
    arrays = [(a.nodes, *a.csc, a.degree, a.edge_id) for a in (one, other)]
    rows = [store.load_features(graph) for store, graph in ((left, one), (right, other))]
    if left.features.is_sparse:
        rows = [row.dense() for row in rows]
    return all(np.array_equal(*pair) for pair in zip(*arrays, strict=True)) and np.array_equal(*rows)


def test_a_fetched_store_gives_what_was_published(tmp_path, url, kind):
    store = store_of(tmp_path / "store", kind)
    publish(store.root, url)
    fetched = PartitionStore.open(url)
    assert all(same(store, fetched, part) for part in range(PARTS))
    for name in store.manifest["files"]:
        fetched.fetched.whole(name)
        assert (fetched.root / f"{name}.npy").read_bytes() == (store.root / f"{name}.npy").read_bytes()
    fetched.verify()


def test_a_part_brings_its_own_slices_alone(tmp_path, url):
    store = store_of(tmp_path / "store")
    publish(store.root, url)
    fetched = PartitionStore.open(url)
    assert same(store, fetched, 2)
    begin, end = store.part_offsets[2:4].tolist()
    mapped, whole = fetched.features.mapped, np.load(store.root / "features.npy")
    assert np.array_equal(mapped[begin:end], whole[begin:end])
    assert not mapped[: begin - BLOCK // 160 - 1].any() and not mapped[end + BLOCK // 160 + 1 :].any()


def test_rows_of_anywhere_are_fetched_as_they_are_gathered(tmp_path, url):
    store = store_of(tmp_path / "store", "loose")
    publish(store.root, url)
    fetched, few = PartitionStore.open(url), np.array([299, 3, 150, 3])
    assert np.array_equal(fetched.features.read(few), store.features.read(few))
    assert not fetched.features.mapped[60:80].any()
    assert np.array_equal(fetched.features.array, store.features.array)
    assert np.array_equal(fetched.csc.indices, store.csc.indices)


def test_a_fetched_folder_opened_as_a_folder_shows_no_holes(tmp_path, url):
    store = store_of(tmp_path / "store")
    publish(store.root, url)
    again = PartitionStore.open(PartitionStore.open(url).root)
    assert all(same(store, again, part) for part in range(PARTS))


@pytest.mark.parametrize("files_before", [0, 1, 5])
def test_a_cut_publishing_goes_on(tmp_path, url, monkeypatch, files_before):
    store = store_of(tmp_path / "store")
    sent, cut = [], [True]
    upload = ObjectStore.upload

    def counted(self, name, *given):
        if cut[0] and len(sent) == files_before:
            raise KeyboardInterrupt
        sent.append(name)
        upload(self, name, *given)

    monkeypatch.setattr(ObjectStore, "upload", counted)
    with pytest.raises(KeyboardInterrupt):
        publish(store.root, url)
    with pytest.raises(PartitionStoreError, match="no store is published here"):
        PartitionStore.open(url)
    cut[0] = False
    publish(store.root, url)
    assert sorted(sent) == sorted(f"{name}.npy" for name in store.manifest["files"])  # each once
    assert same(store, PartitionStore.open(url), 1)
    publish(store.root, url)
    assert len(sent) == len(store.manifest["files"])


def test_another_store_is_refused_and_replaced_only_when_asked(tmp_path, url):
    one, other = store_of(tmp_path / "one"), store_of(tmp_path / "other", "loose", seed=1)
    publish(one.root, url)
    with pytest.raises(PartitionStoreError, match=said("memory://stores/one overwrite=True")):
        publish(other.root, url)
    assert same(one, PartitionStore.open(url), 0)
    publish(other.root, url, overwrite=True)
    assert same(other, PartitionStore.open(url), 0)
    assert not fsspec.filesystem("memory").exists("/stores/one/halo_features.npy")


def test_a_damaged_local_store_is_not_published(tmp_path, url):
    store = store_of(tmp_path / "store")
    with open(store.root / "features.npy", "r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff")
    with pytest.raises(PartitionStoreError, match=said("features.npy content damaged")):
        publish(store.root, url)
    with pytest.raises(PartitionStoreError, match="no store is published here"):
        PartitionStore.open(url)


def test_a_damaged_object_is_told_in_one_line(tmp_path, url):
    store, memory = store_of(tmp_path / "store"), fsspec.filesystem("memory")
    publish(store.root, url)
    data = bytearray(memory.cat_file("/stores/one/features.npy"))
    data[-200] ^= 1  # in the last block
    memory.pipe_file("/stores/one/features.npy", bytes(data))
    fetched = PartitionStore.open(url)
    assert same(store, fetched, 0)
    with pytest.raises(PartitionStoreError, match=said("one/features.npy published byte")) as caught:
        fetched.load_features(fetched.load_part(PARTS - 1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("left", [0, 128, 9_000])
def test_a_file_that_is_cut_off_is_not_waited_for(tmp_path, url, left, monkeypatch):
    monkeypatch.setattr(object_store.time, "sleep", lambda seconds: pytest.fail("tried again"))
    store, memory = store_of(tmp_path / "store"), fsspec.filesystem("memory")
    publish(store.root, url)
    path = "/stores/one/features.npy"
    memory.pipe_file(path, memory.cat_file(path)[:left])
    fetched = PartitionStore.open(url)
    with pytest.raises(ObjectStoreError, match=said(f"one/features.npy {left} bytes expected publish again")):
        fetched.load_features(fetched.load_part(PARTS - 1))


@pytest.mark.parametrize("damage", ["cut", "other", "gone"])
def test_checksums_that_do_not_fit_the_manifest_are_refused(tmp_path, url, damage):
    store, memory = store_of(tmp_path / "store"), fsspec.filesystem("memory")
    publish(store.root, url)
    path = "/stores/one/csc_indices.npy.json"
    if damage == "gone":
        memory.rm_file(path)
    elif damage == "cut":
        memory.pipe_file(path, memory.cat_file(path)[:-20])
    else:
        memory.pipe_file(path, memory.cat_file("/stores/one/csc_indptr.npy.json"))
    with pytest.raises(PartitionStoreError, match=said("csc_indices.npy checksums")):
        PartitionStore.open(url).load_part(0)


def test_a_damaged_manifest_is_told_with_the_url(tmp_path, url):
    publish(store_of(tmp_path / "store").root, url)
    fsspec.filesystem("memory").pipe_file("/stores/one/manifest.json", b"{}")
    with pytest.raises(PartitionStoreError, match=said("memory://stores/one/manifest.json damaged")):
        PartitionStore.open(url)


class TestCap:
    """Of the disk that a fetched store takes."""

    def test_parts_make_room_for_others(self, tmp_path, url, caplog):
        store = store_of(tmp_path / "store")
        publish(store.root, url)
        cap = 170_000
        total = sum(entry["bytes"] for entry in store.manifest["files"].values())
        assert total > cap
        with caplog.at_level("INFO"):
            fetched = PartitionStore.open(url, cache_bytes=cap)
        assert "parts that make space for others are fetched again" in caplog.text
        taken = []
        for part in [0, 1, 2, 3, 0, 1, 2, 3]:
            assert same(store, fetched, part)
            taken.append(sum(path.stat().st_blocks * 512 for path in fetched.root.glob("*.npy")))
        slack = (2 * 4096 + 4096) * len(store.manifest["files"])  # pages at the ends of what is there
        assert max(taken) <= cap + slack
        ids = np.random.default_rng(0).integers(0, NODES, 500)
        assert np.array_equal(fetched.features.read(ids), store.features.read(ids))
        table, order = fetched.part_features.of_part(1).load(np.sort(fetched.load_part(1).nodes))
        rows = store.features.array[np.sort(store.load_part(1).nodes)]
        assert np.array_equal(table.array[order], rows)

    def test_below_one_part_it_is_refused(self, tmp_path, url):
        publish(store_of(tmp_path / "store").root, url)
        for cap in (5_000, 60_000):
            with pytest.raises(PartitionStoreError, match=said(f"store_cache_bytes={cap} too small")):
                PartitionStore.open(url, cache_bytes=cap)

    def test_what_must_be_whole_is_told(self, tmp_path, url):
        publish(store_of(tmp_path / "store").root, url)
        fetched = PartitionStore.open(url, cache_bytes=120_000)
        with pytest.raises(PartitionStoreError, match=said("store_cache_bytes=120000 too small")):
            fetched.verify()

    def test_a_size_in_words(self, tmp_path, url):
        publish(store_of(tmp_path / "store").root, url)
        assert PartitionStore.open(url, cache_bytes="1MiB").fetched.cap_bytes == 1 << 20
        with pytest.raises(ValueError, match=said("store_cache_bytes")):
            PartitionStore.open(url, cache_bytes="much")


def _fetch_parts(url, parts):
    published.BLOCK_BYTES = BLOCK
    store = PartitionStore.open(url)
    for part in parts:
        store.fetch_part(part)


class TestOnS3:
    """Against a real S3 server, which counts."""

    def test_each_byte_comes_once_a_machine(self, tmp_path, s3):
        store = store_of(tmp_path / "store")
        publish(store.root, "s3://graphs/store")
        s3.reset()
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=_fetch_parts, args=("s3://graphs/store", [0, 1, 2, 3])) for _ in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
            assert rank.exitcode == 0
        fetched = PartitionStore.open("s3://graphs/store")
        assert all(same(store, fetched, part) for part in range(PARTS))
        data = sum(entry["bytes"] - 128 for entry in store.manifest["files"].values())
        assert s3.bytes_given() == data

    def test_killed_at_any_block_it_goes_on(self, tmp_path, s3):
        store = store_of(tmp_path / "store")
        publish(store.root, "s3://graphs/store")
        PartitionStore.open("s3://graphs/store")
        context = multiprocessing.get_context("spawn")
        for number in (0, 2):
            s3.reset()
            seen = []

            def hang(method, key, number=number, seen=seen):
                if method == "GET" and key.endswith("features.npy"):
                    seen.append(key)
                    if len(seen) > number:
                        time.sleep(3)
                return None

            s3.fault = hang
            rank = context.Process(target=_fetch_parts, args=("s3://graphs/store", [number]))
            rank.start()
            while len(seen) <= number:
                time.sleep(0.01)
            os.kill(rank.pid, signal.SIGKILL)
            rank.join()
        s3.reset()
        fetched = PartitionStore.open("s3://graphs/store")
        assert all(same(store, fetched, part) for part in range(PARTS))
        fetched.verify()

    def test_blocks_that_a_killed_process_wrote_are_compared_with_their_checksums(self, tmp_path, s3):
        store = store_of(tmp_path / "store")
        publish(store.root, "s3://graphs/store")
        first = PartitionStore.open("s3://graphs/store").fetched
        name, blocks = first.slice_of("features", 0, NODES)
        with first.held((name, blocks)):
            whole = (first.root / f"{name}.npy").read_bytes()
        first._used[first._first[name] + blocks[:3]] = published._WRITTEN
        with open(first.root / f"{name}.npy", "r+b") as file:
            file.seek(128 + BLOCK)
            file.write(bytes(BLOCK))  # never reached the disk
        again = PartitionStore.open("s3://graphs/store").fetched
        s3.reset()
        with again.held((name, blocks)):
            assert (again.root / f"{name}.npy").read_bytes() == whole
        assert s3.bytes_given() == BLOCK

    def test_a_block_that_was_settled_is_not_fetched_again(self, tmp_path, s3, monkeypatch, pauses):
        monkeypatch.setattr(published, "_RUN_BLOCKS", 1)
        monkeypatch.setattr(object_store, "_REQUESTS_UNDER_WAY", 1)  # requests succeed in order
        store = store_of(tmp_path / "store")
        publish(store.root, "s3://graphs/store")
        fetched = PartitionStore.open("s3://graphs/store", timeout_s=10)
        s3.reset()
        name, blocks = fetched.fetched.slice_of("features", 0, NODES)

        def cut(method, key):
            return 500 if key.endswith("features.npy") and s3.bytes_given() >= 3 * BLOCK else None

        s3.fault = cut
        with pytest.raises(ObjectStoreError, match=said("features.npy storage_timeout_s=10")):
            fetched.fetched.whole("features")
        kept = np.flatnonzero(fetched.fetched._used[fetched.fetched._first[name] + blocks] > 0).tolist()
        assert 3 <= len(kept) < len(blocks)
        s3.reset()
        fetched.fetched.whole("features")
        asked = {span for key, _, span in s3.given if key.endswith("features.npy")}
        assert not asked & {f"bytes={128 + i * BLOCK}-{127 + (i + 1) * BLOCK}" for i in kept}
        assert len(asked) == len(blocks) - len(kept)
        assert same(store, fetched, 0)

    def test_an_object_that_is_cut_off_is_not_waited_for(self, s3):
        store = ObjectStore("s3://graphs/cut", timeout_s=20)
        store.write("one", bytes(100))
        for begin in (50, 100, 150):
            s3.reset()
            with pytest.raises(ObjectStoreError, match=said("cut/one 100 bytes 200 expected")):
                store.read("one", begin, 200)
            assert len(s3.given) <= 1

    def test_an_upload_of_many_parts(self, s3, monkeypatch):
        monkeypatch.setattr(object_store, "_LEAST_PART_BYTES", 5 << 20)
        data = np.random.default_rng(0).bytes(12 << 20)
        store = ObjectStore("s3://graphs/large")
        store.upload("a.npy", len(data), lambda: (data[i : i + (1 << 20)] for i in range(0, len(data), 1 << 20)))
        assert store.facts("a.npy")["size"] == len(data)
        assert b"".join(store.stream("a.npy", [(0, 7 << 20), (7 << 20, 12 << 20)])) == data

    def test_errors_pass_where_they_are_few(self, tmp_path, s3):
        left = [3]

        def flaky(method, key):
            left[0] -= 1
            return 503 if left[0] >= 0 else None

        store = store_of(tmp_path / "store")
        s3.fault = flaky
        publish(store.root, "s3://graphs/store")
        left[0] = 3
        assert same(store, PartitionStore.open("s3://graphs/store"), 0)

    def test_a_refusal_is_told_at_once(self, tmp_path, s3):
        publish(store_of(tmp_path / "store").root, "s3://graphs/store")
        s3.fault = lambda method, key: 403
        began = time.monotonic()
        with pytest.raises(ObjectStoreError, match=said("s3://graphs/store/manifest.json AWS_PROFILE")):
            PartitionStore.open("s3://graphs/store")
        assert time.monotonic() - began < 20

    def test_a_bucket_that_is_not_there(self, tmp_path, s3):
        with pytest.raises(ObjectStoreError, match=said("s3://nowhere/store/ .npy")):
            publish(store_of(tmp_path / "store").root, "s3://nowhere/store")

    def test_an_unreachable_store(self, s3, monkeypatch, pauses):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(ObjectStoreError, match=said("manifest.json")) as caught:
            PartitionStore.open("s3://graphs/store", storage_options={"skip_instance_cache": True}, timeout_s=10)
        assert SECRET not in str(caught.value) and "\n" not in str(caught.value)

    def test_credentials_stay_out_of_files(self, tmp_path, s3, caplog, capfd):
        store = store_of(tmp_path / "store")
        with caplog.at_level("INFO"):
            publish(store.root, "s3://graphs/store")
            fetched = PartitionStore.open("s3://graphs/store")
            assert same(store, fetched, 0)
        told = caplog.text + "".join(capfd.readouterr())
        written = [path.read_bytes() for path in (tmp_path / "fetched").rglob("*") if path.is_file()]
        written += [s3.files.cat_file(path) for path in s3.files.find("graphs")]
        assert written and not any(SECRET.encode() in data for data in written)
        assert SECRET not in told


class _Failing:
    """A file system in front of fsspec's memory that fails as it is reported."""

    def __init__(self, error=None, hang_s=0.0):
        self.memory, self.error, self.hang_s, self.calls = fsspec.filesystem("memory"), error, hang_s, 0

    def __getattr__(self, name):
        found = getattr(self.memory, name)
        if name not in ("cat_file", "open", "pipe_file"):
            return found

        def call(*args, **kwargs):
            self.calls += 1
            time.sleep(self.hang_s)
            if self.error is not None:
                raise self.error
            return found(*args, **kwargs)

        return call


def test_a_store_that_does_not_answer_is_left_within_the_bound(url, monkeypatch):
    monkeypatch.setattr(object_store, "_open_system", lambda *given: _Failing(hang_s=5))
    began = time.monotonic()
    with pytest.raises(ObjectStoreError, match=said("1 tries (no answer) storage_timeout_s=")):
        ObjectStore(url, timeout_s=0.5).read("a.npy", 0, 10)
    assert time.monotonic() - began < 4


def test_tries_end_within_the_bound(url, monkeypatch, pauses):
    system = _Failing(OSError("Connection reset by peer"))
    monkeypatch.setattr(object_store, "_open_system", lambda *given: system)
    with pytest.raises(ObjectStoreError, match=said("Connection reset peer")):
        ObjectStore(url, timeout_s=1).read("a.npy", 0, 10)
    assert system.calls == 4 and pauses == pytest.approx([0.1, 0.2, 0.4])


def test_a_full_store_is_told_at_once(tmp_path, url, monkeypatch):
    store = store_of(tmp_path / "store")
    system = _Failing(OSError(28, "No space left on device"))
    monkeypatch.setattr(object_store, "_open_system", lambda *given: system)
    system.memory.pipe_file  # noqa: B018
    system.cat_file = system.memory.cat_file
    with pytest.raises(ObjectStoreError, match=said("space space")):
        publish(store.root, url)


def test_a_full_disk_here_is_told(tmp_path, url, monkeypatch):
    publish(store_of(tmp_path / "store").root, url)
    fetched = PartitionStore.open(url)

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(published.os, "pwrite", full)
    with pytest.raises(PartitionStoreError, match=said("space device GNNSCALE_FETCHED")):
        fetched.load_part(0)


def test_what_an_error_quotes_holds_no_credential(url, monkeypatch, pauses):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "FwoGZXIvYXdzEXAMPLE")
    error = OSError("GET http://host/a?X-Amz-Signature=abc123 failed for FwoGZXIvYXdzEXAMPLE")
    monkeypatch.setattr(object_store, "_open_system", lambda *given: _Failing(error))
    with pytest.raises(ObjectStoreError) as caught:
        ObjectStore(url).read("a.npy", 0, 10)
    assert "GET http://host/a failed for ***" in str(caught.value)
    assert "abc123" not in str(caught.value) and "FwoG" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "options",
    [{"secret": "x"}, {"key": "x"}, {"client_kwargs": {"aws_secret_access_key": "x"}}, {"token": "x"},
     {"endpoint_url": "http://me:hidden@host"}, {"sas_token": "x"}],
)  # fmt: skip
def test_credentials_among_the_options_are_refused(options):
    with pytest.raises(ValueError, match=said("credential stored")) as caught:
        ObjectStore("memory://a", options)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("url", ["https://host/store?sig=hidden", "ftp://me:hidden@host/store"])
def test_credentials_in_the_url_are_refused(url):
    with pytest.raises(ValueError, match=said("query password")) as caught:
        PartitionStore.open(url)
    assert "hidden" not in str(caught.value)


def test_a_package_that_is_missing_is_named(monkeypatch):
    def missing(*given, **options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(ObjectStoreError, match=said("s3:// 'lightning-gnnscale[cloud]'")):
        ObjectStore("s3://graphs/store")


def test_a_store_that_was_replaced_is_refused_by_another_machine(tmp_path, url, monkeypatch):
    import pickle

    publish(store_of(tmp_path / "one").root, url)
    sent = pickle.dumps(PartitionStore.open(url))
    publish(store_of(tmp_path / "other", "loose", seed=1).root, url, overwrite=True)
    assert pickle.loads(sent).num_parts == PARTS  # on this machine the first one stands
    monkeypatch.setenv("GNNSCALE_FETCHED", str(tmp_path / "elsewhere"))
    (tmp_path / "fetched").rename(tmp_path / "moved")
    with pytest.raises(PartitionStoreError, match=said("fingerprint trainer's")):
        pickle.loads(sent)


def test_another_machine_fetches_what_it_is_sent(tmp_path, url, monkeypatch):
    import pickle

    store = store_of(tmp_path / "store")
    publish(store.root, url)
    fetched = PartitionStore.open(url)
    sent = pickle.dumps((fetched, fetched.features))
    monkeypatch.setenv("GNNSCALE_FETCHED", str(tmp_path / "elsewhere"))
    (tmp_path / "fetched").rename(tmp_path / "moved")
    there, rows = pickle.loads(sent)
    assert same(store, there, 2)
    assert np.array_equal(rows.read(np.arange(20)), store.features.read(np.arange(20)))


class TestLocalCopy:
    """Of files that are read in several passes."""

    def test_it_comes_once_and_in_chunks(self, s3, monkeypatch):
        monkeypatch.setattr(object_store, "REQUEST_BYTES", 1000)
        data = np.random.default_rng(0).bytes(4321)
        s3.files.pipe_file("graphs/x.bin", data)
        path = local_copy("s3://graphs/x.bin")
        assert path.read_bytes() == data and path.name == "x.bin"
        assert local_copy("s3://graphs/x.bin") == path
        assert s3.bytes_given("x.bin") == len(data)
        s3.files.pipe_file("graphs/x.bin", data[::-1])
        assert local_copy("s3://graphs/x.bin").read_bytes() == data[::-1]

    def test_a_cut_copy_goes_on(self, s3, monkeypatch, pauses):
        monkeypatch.setattr(object_store, "REQUEST_BYTES", 1000)
        monkeypatch.setattr(object_store, "_REQUESTS_UNDER_WAY", 1)  # requests succeed in order
        data = np.random.default_rng(0).bytes(4321)
        s3.files.pipe_file("graphs/x.bin", data)
        s3.fault = lambda method, key: 500 if s3.bytes_given("x.bin") >= 2000 and method == "GET" else None
        with pytest.raises(ObjectStoreError, match=said("x.bin")):
            local_copy("s3://graphs/x.bin", timeout_s=10)
        given = s3.bytes_given("x.bin")
        s3.fault = None
        assert local_copy("s3://graphs/x.bin").read_bytes() == data
        # A request that a busy machine answered too late for the client may have been made twice.
        assert s3.bytes_given("x.bin") <= len(data) + max(0, given - 2000) + 1000

    def test_what_is_not_there_is_told(self, s3):
        with pytest.raises(ObjectStoreError, match=said("s3://graphs/none.csv object")):
            local_copy("s3://graphs/none.csv")

    def test_a_record_of_the_folder_holds_the_url(self, tmp_path, url):
        publish(store_of(tmp_path / "store").root, url)
        known = json.loads((PartitionStore.open(url).root / "fetched.json").read_text())
        assert known["url"] == url


@pytest.mark.parametrize("url", ["reference://x", "DASK://x", "zip://x", "filecache://x", "s3://a/b::reference://x"])
def test_systems_that_run_code_or_open_others_are_refused(url):
    with pytest.raises(ValueError, match=said("URLs s3://")):
        ObjectStore(url, {"fo": "x.json"})


@pytest.mark.parametrize(
    ("name", "value"),
    [("url", "/etc"), ("storage_options", []), ("timeout_s", True), ("cap_bytes", -5), ("block_bytes", 2.5)],
)
def test_what_a_fetched_store_remembers_is_checked(tmp_path, name, value):
    good = {"url": "s3://a/b", "storage_options": {}, "timeout_s": 60, "cap_bytes": None, "block_bytes": 1 << 20}
    for content in (good | {name: value}, [good], {key: entry for key, entry in good.items() if key != name}):
        if content == {key: entry for key, entry in good.items() if key != "cap_bytes"}:
            continue  # no cap
        (tmp_path / published.FETCHED).write_text(json.dumps(content))
        with pytest.raises(PartitionStoreError, match=said("damaged remove folder")):
            published._read_fetched(tmp_path)
    (tmp_path / published.FETCHED).write_text(json.dumps(good))
    assert published._read_fetched(tmp_path) == good
