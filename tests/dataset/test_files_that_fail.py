"""Files that are damaged, cut short, gone or out of space while they are read or written: one line with their names."""

import errno
import os
import pickle
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.callbacks import PredictionWriter
from lightning_gnnscale.dataset import generate, load_files, load_npz
from lightning_gnnscale.edge_stream import open_edge_stream, write_edges
from lightning_gnnscale.edge_stream.relabel import NodeIds
from lightning_gnnscale.errors import EdgeStreamError, GNNScaleError

EDGES = np.random.default_rng(0).integers(0, 1000, (2, 30_000))


def told(error, path):
    line = str(error.value)
    assert "\n" not in line and str(path) in line, line
    return line


def flipped(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_in_a_page_of_written_edges_is_told(tmp_path):
    path = write_edges(open_edge_stream(EDGES), tmp_path / "e.parquet")
    assert all(
        np.array_equal(np.concatenate([getattr(chunk, end) for chunk in open_edge_stream(path).chunks()]), EDGES[i])
        for i, end in enumerate(("src", "dst"))
    )
    whole, silent = path.read_bytes(), 0
    for place in np.random.default_rng(1).integers(2000, len(whole) - 2000, 20):
        path.write_bytes(whole)
        flipped(path, place)
        try:
            pq.read_table(path)
            silent += 1
        except OSError:
            pass
        with pytest.raises(EdgeStreamError) as error:
            list(open_edge_stream(path).chunks())
        assert "damaged or cut short" in told(error, path)
    assert silent > 10  # without the checksums most would have gone unseen


def test_predictions_have_checksums(tmp_path):
    store = SimpleNamespace(num_nodes=5000, original_nid=np.arange(5000), user_ids=lambda nodes: nodes, schema=None)
    trainer = SimpleNamespace(
        datamodule=SimpleNamespace(store=store),
        global_rank=0,
        world_size=1,
        strategy=SimpleNamespace(barrier=lambda name: None),
    )
    nodes = np.arange(5000)
    result = {"nodes": nodes, "prediction": torch.from_numpy(nodes % 7)}
    PredictionWriter(tmp_path / "p.parquet").write_on_epoch_end(trainer, None, [result], None)
    assert pq.read_table(tmp_path / "p.parquet", page_checksum_verification=True)["prediction"].to_pylist() == list(
        nodes % 7
    )
    flipped(tmp_path / "p.parquet", 5000)
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(tmp_path / "p.parquet", page_checksum_verification=True)


def on_disk(folder, kind):
    path = folder / f"e.{kind}"
    if kind == "npy":
        np.save(path, EDGES)
        return path, {}
    if kind == "bin":
        EDGES.T.astype(np.int32).tofile(path)
        return path, {"dtype": "int32"}
    if kind == "parquet":
        pq.write_table(pa.table({"src": EDGES[0], "dst": EDGES[1]}), path, row_group_size=1000)
        return path, {}
    path.write_text("".join(f"{u},{v}\n" for u, v in EDGES.T))
    return path, {}


@pytest.mark.parametrize("kind", ["npy", "bin", "parquet", "csv"])
def test_edges_that_go_between_two_passes_are_told(tmp_path, kind):
    path, options = on_disk(tmp_path, kind)
    stream = open_edge_stream(path, chunk_edges=100, **options)
    stream.count()
    path.unlink()
    with pytest.raises(EdgeStreamError) as error:
        list(stream.chunks())
    assert "No such file" in told(error, path)
    path.mkdir()
    with pytest.raises(EdgeStreamError) as error:
        list(stream.chunks())
    assert "directory" in told(error, path)


@pytest.mark.parametrize("kind", ["npy", "bin"])
def test_edges_cut_short_in_the_middle_of_a_pass_are_told(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("lightning_gnnscale.edge_stream.array._SLICE_EDGES", 100)
    path, options = on_disk(tmp_path, kind)
    chunks = open_edge_stream(path, chunk_edges=100, **options).chunks()
    for _ in range(10):
        next(chunks)
    os.truncate(path, 20_000)
    with pytest.raises(EdgeStreamError) as error:
        list(chunks)
    assert "the file ends before its 30000 edges do" in told(error, path)


@pytest.mark.parametrize("what", ["features", "edge_features"])
def test_rows_cut_short_while_they_are_stored_end_in_one_line_and_no_signal(tmp_path, what):
    rows = np.ones((1000 if what == "features" else 30_000, 2000 if what == "features" else 60), np.float32)
    np.save(tmp_path / "rows.npy", rows)
    stream = open_edge_stream(EDGES, num_nodes=1000)
    made = gs.partition(stream, method="random", num_parts=2, evaluate=False)

    def cut(step, done, total):
        os.truncate(tmp_path / "rows.npy", 4096)

    with pytest.raises(ValueError) as error:
        gs.write_partition_store(
            tmp_path / "store", stream, made, labels=np.zeros(1000, int), progress=cut, **{what: tmp_path / "rows.npy"}
        )
    assert "cut short while it was read" in told(error, tmp_path / "rows.npy")


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("grem", "os.pwrite"),
        ("streaming_multilevel", "os.pwrite"),
        ("spring", "os.pwrite"),
        ("spring", "os.posix_fallocate"),
        ("spring", "tempfile.TemporaryFile"),
    ],
)
def test_full_scratch_disk_is_told_with_its_folder(tmp_path, monkeypatch, method, call):
    stream = open_edge_stream(EDGES, num_nodes=1000)
    options = {"block_edges": 1000} if method == "streaming_multilevel" else {}  # a graph of one block needs no disk
    monkeypatch.setattr(call, full)
    with pytest.raises(GNNScaleError) as error:
        gs.partition(stream, method=method, num_parts=2, scratch=tmp_path, deduplicate=True, **options)
    assert "No space left on device; make space, or give scratch=" in told(error, tmp_path)
    assert not list(tmp_path.iterdir())


def test_full_disks_are_told_with_the_file_that_is_written(tmp_path, monkeypatch):
    stream = open_edge_stream(EDGES, num_nodes=1000, chunk_edges=1000)
    made = gs.partition(stream, method="spring", num_parts=2, evaluate=False)
    monkeypatch.setattr("os.fsync", full)
    for name in ("e.bin", "e.npy", "e.csv", "e.parquet"):
        with pytest.raises(GNNScaleError) as error:
            write_edges(stream, tmp_path / name)
        assert "cannot be written: No space left on device" in told(error, tmp_path / name)
    with pytest.raises(GNNScaleError) as error:
        gs.partition(stream, method="spring", num_parts=2, checkpoint=tmp_path / "c.npz", checkpoint_every=1)
    assert "cannot be saved: No space left on device; make space, or give checkpoint=" in told(
        error, tmp_path / "c.npz"
    )
    with pytest.raises(GNNScaleError) as error:
        NodeIds.of(["a", "b"]).save(tmp_path / "ids.npy")
    told(error, tmp_path / "ids.npy")
    assert not list(tmp_path.iterdir())
    with pytest.raises(GNNScaleError) as error:
        made.save(tmp_path / "parts")
    told(error, tmp_path / "parts" / "part_id.npy")
    with pytest.raises(GNNScaleError) as error:
        generate(100, 1000, folder=str(tmp_path / "generated"), feature_dim=4)
    told(error, "edges.bin")


class Trap:
    def __reduce__(self):
        return (os._exit, (1,))


def test_nothing_is_ever_unpickled(tmp_path):
    np.save(tmp_path / "trap.npy", np.array([Trap(), Trap()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "trap.npz", edge_index=np.array([Trap()], dtype=object))
    (tmp_path / "plain.npy").write_bytes(pickle.dumps(Trap()))
    np.save(tmp_path / "e.npy", EDGES)
    for name in ("trap.npy", "plain.npy"):
        with pytest.raises(EdgeStreamError) as error:
            open_edge_stream(tmp_path / name)
        told(error, tmp_path / name)
        for key in ("features", "labels", "train_mask", "edge_weight", "nodes"):
            with pytest.raises(ValueError) as error:
                load_files(str(tmp_path / "e.npy"), relabel=key == "nodes", **{key: str(tmp_path / name)})
            told(error, tmp_path / name)
    with pytest.raises(ValueError) as error:
        load_npz(str(tmp_path / "trap.npz"))
    told(error, tmp_path / "trap.npz")


def test_the_checksums_of_an_archive_are_compared_whatever_its_headers_say(tmp_path):
    path = tmp_path / "graph.npz"
    np.savez(path, edge_index=EDGES, y=np.arange(1000) % 3)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"(1000,)", b"(0999,)", 1).replace(b"(1000,)", b"(0999,)", 1))
    if path.read_bytes() == data:
        pytest.fail("the header is written otherwise")
    with pytest.raises(ValueError) as error:
        load_npz(str(path))
    assert "damaged" in told(error, path)
