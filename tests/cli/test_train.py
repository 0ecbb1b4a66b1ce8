"""`gnnscale train` as a user types it: what it prints, what it leaves behind, and what the next run finds."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

SMALL = [
    "recipe=demo",
    "dataset.num_nodes=2000",
    "dataset.num_edges=12000",
    "dataset.num_communities=40",
    "dataset.feature_dim=16",
    "model.backbone.hidden_channels=32",
    "num_parts=3",
    "datamodule.batch_size=128",
]


def gnnscale(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "lightning_gnnscale.cli", "train", *words]
    # A terminal of its own width, so that tables are not cut.
    environment = os.environ | {"COLUMNS": "160"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    result = gnnscale(folder, *SMALL, "trainer.max_epochs=3", "predict=true", "hydra.run.dir=run")
    assert result.returncode == 0, result.stderr
    return folder, result


def test_it_prints_the_closing_table_and_no_chatter(first_run):
    _, result = first_run
    for word in (
        "partition_store",
        "peak memory",
        "predicted",
        "edge cut ratio",
        "replication factor",
        "test_acc",
        "store",
    ):
        assert word in result.stdout
    for chatter in ("Tip", "GPU available", "Warning", "Traceback"):
        assert chatter not in result.stdout + result.stderr, result.stderr


def test_it_leaves_a_whole_run_folder(first_run):
    folder, _ = first_run
    run = folder / "run"
    summary = json.loads((run / "summary.json").read_text())
    stages = {row["stage"]: row for row in summary["stages"]}
    assert {"load", "partition", "partition_store", "train", "evaluate", "predict"} <= set(stages)
    assert all(row["peak_bytes"] > 0 for row in stages.values())
    assert stages["train"]["predicted_bytes"] > 0
    assert summary["facts"]["epochs"] == 3
    assert float(summary["facts"]["test_acc"]) > 0.1
    with open(run / "metrics" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len([row for row in rows if row.get("val_acc")]) == 3
    assert len([row for row in rows if row.get("train_loss")]) == 3
    assert (run / "config.yaml").is_file()
    assert list((run / "checkpoints").glob("*.ckpt"))
    assert pq.read_table(run / "predictions.parquet")["node"].to_pylist() == list(range(2000))


def test_the_next_run_finds_the_store_and_goes_on_from_a_checkpoint(first_run):
    folder, _ = first_run
    words = ["trainer.max_epochs=4", "resume=run/checkpoints/last.ckpt", "test=false", "hydra.run.dir=again"]
    result = gnnscale(folder, *SMALL, *words)
    assert result.returncode == 0, result.stderr
    summary = json.loads((folder / "again" / "summary.json").read_text())
    assert {row["stage"] for row in summary["stages"]} == {"load", "train"}
    with open(folder / "again" / "metrics" / "metrics.csv", newline="") as file:
        epochs = {row["epoch"] for row in csv.DictReader(file)}
    assert epochs == {"3"}
    assert len(list((folder / "stores").glob("synthetic-*.source.json"))) == 1


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["sampler.fanouts=[5,5,5]"], ["sampler.fanouts has 3 hops", "num_layers is 2"]),
        (["num_parts=1"], ["2", "part", "devices"]),
        (["resume=none.ckpt"], ["none.ckpt"]),
        (["trainer.max_steps=10"], ["max_steps", "max_epochs"]),
    ],
)
def test_what_does_not_fit_is_one_line(first_run, words, parts):
    folder, _ = first_run
    result = gnnscale(folder, *SMALL, "trainer.max_epochs=1", *words)
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.startswith("gnnscale: ")]
    assert len(lines) == 1, result.stderr
    for part in parts:
        assert part in lines[0]
    assert "Traceback" not in result.stderr
