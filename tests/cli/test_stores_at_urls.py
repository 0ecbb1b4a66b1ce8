"""`gnnscale partition output=s3://...`, `gnnscale train store=s3://...`: machines that share no folder."""

import csv
import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.refusals import refused
from cli.tiny_graph import TINY, write_tiny_graph

from lightning_gnnscale.cli.main import main
from tests.s3_server import SECRET

MAKING = [word for word in TINY if word.startswith(("dataset", "partitioner", "num_parts"))]
TRAINING = [word for word in TINY if word not in MAKING] + ["trainer.max_epochs=2"]
STORE = "s3://graphs/ring"


@pytest.fixture
def folder(tmp_path, monkeypatch, s3):
    monkeypatch.chdir(tmp_path)
    write_tiny_graph()
    return tmp_path


def results(run: str):
    """The weights of a run's last checkpoint, and its metrics but for times."""
    last = max(Path(run).glob("checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime)
    weights = torch.load(last, weights_only=False)["state_dict"]
    with open(f"{run}/metrics/metrics.csv", newline="") as file:
        rows = [
            {key: value for key, value in row.items() if "loss" in key or "acc" in key} for row in csv.DictReader(file)
        ]
    return weights, rows


@pytest.mark.sweep
def test_partition_then_train(folder, s3, capfd):
    for name in ("edges.npy", "x.npy"):
        s3.files.put_file(name, f"graphs/in/{name}")
    there = [word.replace("=edges.npy", "=s3://graphs/in/edges.npy").replace("=x.npy", "=s3://graphs/in/x.npy")
             for word in MAKING]  # fmt: skip
    main(["partition", *there, f"output={STORE}", "hydra.run.dir=made"])
    assert s3.bytes_given("in/edges.npy") == Path("edges.npy").stat().st_size
    assert s3.bytes_given("in/x.npy") == Path("x.npy").stat().st_size
    local = next(path for path in Path("stores").iterdir() if path.is_dir())
    main(["train", f"store={local}", *TRAINING, "hydra.run.dir=local"])
    s3.reset()
    main(["train", f"store={STORE}", *TRAINING, "hydra.run.dir=remote"])
    data = sum(path.stat().st_size - 128 for path in local.glob("*.npy"))
    asked = s3.bytes_given()
    assert 0 < asked <= data
    main(["train", f"store={STORE}", *TRAINING, "hydra.run.dir=again"])
    assert s3.bytes_given() == asked
    (weights, metrics), *others = (results(run) for run in ("local", "remote", "again"))
    for other, rows in others:
        assert all(torch.equal(weights[name], other[name]) for name in weights) and metrics == rows
    told = "".join(capfd.readouterr())
    assert STORE in told and SECRET not in told
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "config.yaml" for path in written)
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    main(["verify", STORE])
    assert "all as written" in capfd.readouterr().out


def test_what_a_recipe_says_of_making_a_store_is_not_read_where_one_stands(folder):
    main(["partition", *MAKING, "output=made"])
    (folder / "own.yaml").write_text(
        "defaults: [train, _self_]\nnum_parts: 3\nfeature_storage: int8\npack_halo: true\noverwrite: true\n"
    )
    before = {path: path.stat().st_mtime_ns for path in Path("made").iterdir()}
    main(["train", "recipe=./own.yaml", "store=made", *TRAINING, "hydra.run.dir=by_recipe"])
    main(["train", "store=made", *TRAINING, "hydra.run.dir=plain"])
    (weights, metrics), (other, rows) = results("by_recipe"), results("plain")
    assert all(torch.equal(weights[name], other[name]) for name in weights) and metrics == rows
    assert before == {path: path.stat().st_mtime_ns for path in Path("made").iterdir()}


@pytest.mark.slow  # two started ranks; what they share is tested with bare processes in tests/partition_store
def test_two_ranks_of_a_machine_fetch_once(folder, s3):
    main(["partition", *MAKING, f"output={STORE}"])
    s3.reset()
    main(["train", f"store={STORE}", *TRAINING, "trainer.devices=2", "trainer.max_epochs=1"])
    local = next(path for path in Path("stores").iterdir() if path.is_dir())
    assert s3.bytes_given() <= sum(path.stat().st_size - 128 for path in local.glob("*.npy"))


@pytest.mark.slow  # two launchers with an interpreter each
def test_two_machines_that_share_no_folder_train(folder, s3):
    main(["partition", *MAKING[:-1], "num_parts=4", f"output={STORE}"])
    s3.reset()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for machine in range(2):
        own = folder / f"machine{machine}"
        (own / "tmp").mkdir(parents=True)
        environment = os.environ | {
            "GNNSCALE_FETCHED": str(own / "fetched"),
            "TMPDIR": str(own / "tmp"),
            "HOME": str(own),
        }
        launch = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={machine}", "--master-addr=127.0.0.1"]
        launch += [f"--master-port={port}", "--no-python", sys.executable, "-m", "lightning_gnnscale.cli"]
        words = ["train", f"store={STORE}", *TRAINING, "trainer.num_nodes=2", "predict=true"]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, *words]
        started.append(subprocess.Popen(command, cwd=own, env=environment))
    assert [one.wait(timeout=280) for one in started] == [0, 0]
    asked = Counter((key, span) for key, _, span in s3.given if key.endswith(".npy"))
    assert asked and max(asked.values()) <= 2  # once a machine
    made = [path for path in folder.glob("machine*/runs/*/*/*") if path.name in ("summary.json", "predictions.parquet")]
    assert sorted(path.name for path in made) == ["predictions.parquet", "summary.json"]
    assert "test_acc" in json.loads(next(path for path in made if path.suffix == ".json").read_text())["facts"]


@pytest.mark.sweep
def test_text_and_parquet_at_urls_make_the_store_of_local_ones(folder, s3):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from lightning_gnnscale.edge_stream import open_edge_stream

    src, dst = np.load("edges.npy")
    np.savetxt("edges.csv", np.stack([src, dst], 1), "%d", delimiter=",")
    pq.write_table(pa.table({"src": src, "dst": dst}), "a.parquet")
    s3.files.put_file("edges.csv", "graphs/in/edges.csv")
    s3.files.put_file("a.parquet", "graphs/in/rows/a.parquet")
    for name, url in {
        "edges.csv": "s3://graphs/in/edges.csv",
        "a.parquet": "s3://graphs/in/rows/a.parquet",
        "./a.parquet": "s3://graphs/in/rows",
        "../" + folder.name + "/a.parquet": "s3://graphs/in/rows/*.parquet",
    }.items():
        there, here = (list(open_edge_stream(path, num_nodes=40).chunks()) for path in (url, name))
        assert all(
            np.array_equal(a.src, b.src) and np.array_equal(a.dst, b.dst) for a, b in zip(there, here, strict=True)
        )


REFUSED = [
    (["train", f"store={STORE}", "storage_options.secret=hushhush"], r"storage_options\.secret holds a credential"),
    (["train", f"store={STORE}", "storage_options={key: hushhush}"], r"storage_options\.key holds a credential"),
    (["train", "store=https://host/store?sig=hushhush"], r"store: a URL holds a query or a password"),
    (["partition", "output=ftp://me:hushhush@host/store"], r"output: a URL holds a query or a password"),
    (["train", f"store={STORE}", "num_parts=3"], r"num_parts=3 has no effect, store=s3://graphs/ring exists"),
    (["train", f"store={STORE}", "dataset=files"], r"dataset=files has no effect, store=s3://graphs/ring exists"),
    (["train", *TINY, f"output={STORE}"], r"gnnscale partition output=s3://graphs/ring, and then gnnscale train"),
    (["train", "store=.", "store_cache_bytes=1GiB"], r"store_cache_bytes goes with a store at a URL"),
    (["train", f"store={STORE}", "store_cache_bytes=much"], r"store_cache_bytes must be bytes or a size"),
    (["train", f"store={STORE}", "storage_timeout_s=0"], r"storage_timeout_s must be a number of seconds > 0"),
    (["train", f"store={STORE}"], r"s3://graphs/ring: no store is published here .*gnnscale partition output="),
    (["train", "store=none://graphs/ring"], r"none://graphs/ring: cannot be opened"),
]


@pytest.mark.parametrize(("words", "line"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_refusals_are_one_line(folder, capsys, words, line):
    told = refused(capsys, *words)
    assert re.search(line, told) and "hushhush" not in told, told
    assert not [path for path in folder.rglob("*") if path.is_file() and b"hushhush" in path.read_bytes()]


def test_a_recipe_with_a_credential_is_refused_before_it_is_copied(folder, capsys):
    recipes = folder / "mine"
    recipes.mkdir()
    text = "defaults:\n  - train\n  - _self_\nstorage_options:\n  client_kwargs: {aws_secret_access_key: hushhush}\n"
    (recipes / "own.yaml").write_text(text)
    told = refused(capsys, "train", "recipe=mine/own.yaml", f"store={STORE}")
    assert "aws_secret_access_key holds a credential" in told
    assert [path for path in folder.rglob("*") if path.is_file() and b"hushhush" in path.read_bytes()] == [
        recipes / "own.yaml"
    ]


def test_a_store_of_other_input_is_refused(folder, capsys):
    main(["partition", *MAKING, f"output={STORE}"])
    np.save("y.npy", np.arange(40) % 3)
    assert "s3://graphs/ring: a store of another input" in refused(capsys, "partition", *MAKING, f"output={STORE}")
    main(["partition", *MAKING, f"output={STORE}", "overwrite=true"])
