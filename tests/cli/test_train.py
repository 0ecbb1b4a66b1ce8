"""`gnnscale train` as a user types it: what it prints, what it leaves behind, and what the next run finds."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from cli.refusals import refused
from own_process import gnnscale

from lightning_gnnscale.cli.main import main
from lightning_gnnscale.events import last_run, read_log

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


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The folder and the output of a run that Python itself started."""
    folder = tmp_path_factory.mktemp("work")
    words = ["train", *SMALL, "trainer.max_epochs=3", "predict=true", "hydra.run.dir=run"]
    # A terminal of its own width, so that tables are not cut.
    environment = os.environ | {"COLUMNS": "160"}
    result = subprocess.run(
        [sys.executable, "-m", "lightning_gnnscale.cli", *words], cwd=folder, env=environment, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
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
    page = (run / "report.html").read_text()
    assert f">{summary['metrics']['test_acc']:.4f}<" in page
    for words in (
        "GraphSAGE, 2 layers of 32 on synthetic (2,000 nodes",
        "in 3 parts",
        "2 processes",
        "Labels of each part",
    ):
        assert words in page


def test_it_records_what_each_process_did_and_names_the_report_last(first_run):
    folder, result = first_run
    log = last_run(read_log(folder / "run" / "events.jsonl"))
    times = {(event["epoch"], event["rank"]): event for event in log if event["event"] == "epoch_times"}
    assert set(times) == {(epoch, rank) for epoch in range(3) for rank in range(2)}
    for event in times.values():
        assert {"wait", "forward", "backward", "average", "ranks", "validation", "save"} <= set(event["training"])
        assert {"sample", "read"} <= set(event["beside"])
    lanes = {(event["epoch"], event["rank"], event["lane"]) for event in log if event["event"] == "timeline"}
    assert lanes == {(epoch, rank, lane) for epoch in (0, 2) for rank in range(2) for lane in ("training", "beside")}
    (parts,) = (event for event in log if event["event"] == "parts")
    assert sum(parts["nodes"]) == 2000 and parts["edges_share"] == 1.0
    assert result.stdout.rstrip().endswith("run/report.html")


@pytest.mark.sweep
def test_the_next_run_finds_the_store_and_goes_on_from_a_checkpoint(first_run):
    folder, _ = first_run
    words = ["trainer.max_epochs=4", "resume=run/checkpoints/last.ckpt", "test=false", "hydra.run.dir=again"]
    result = gnnscale(folder, "train", *SMALL, *words)
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
        (["sampler.fanouts=[5,5,5]"], ["sampler.fanouts makes 3 hops", "num_layers is 2"]),
        (
            ["num_parts=1", "strategy/weights=model_averaging"],
            ["trainer.devices=2 is more than the 1 parts", "num_parts=2"],
        ),
        (["resume=none.ckpt"], ["none.ckpt"]),
        (["trainer.max_steps=10", "strategy/weights=model_averaging"], ["max_steps", "max_epochs"]),
        (["strategy.start_method=popen"], ["strategy.start_method must be one of fork, spawn", "'popen'"]),
        (["test=perhaps"], ["test must be true or false, got 'perhaps'"]),
        (
            ["sampler.fanouts=abc"],
            ["sampler.fanouts must be a list like [1,2]", "'abc'"],
        ),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, monkeypatch, capsys, words, parts):
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, "train", *SMALL, "trainer.max_epochs=1", *words)
    assert line.startswith("gnnscale: ")
    for part in parts:
        assert part in line


@pytest.mark.sweep
def test_parts_are_chosen_by_the_plan_and_the_store_is_found_again(first_run):
    folder, _ = first_run
    words = [word for word in SMALL if not word.startswith(("num_parts", "recipe"))]
    for _ in range(2):
        result = gnnscale(folder, "train", *words, "trainer.max_epochs=1", "test=false", "hydra.run.dir=auto")
        assert result.returncode == 0, result.stderr
    summary = json.loads((folder / "auto" / "summary.json").read_text())
    assert summary["facts"]["parts"] == "2 (streaming_multilevel)"
    assert {row["stage"] for row in summary["stages"]} >= {"load", "train"}
    assert len(list((folder / "stores").glob("synthetic-streaming_multilevel-p2-*.source.json"))) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("evaluate", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_a_sweep_trains_on_one_process_and_then_on_two(first_run, evaluate):
    """The second run's processes are spawned: each imports everything, for evaluation once more (`slow`)."""
    folder, _ = first_run
    sweep = f"sweep-{evaluate}"
    words = ["trainer.max_epochs=1", "trainer.devices=1,2", f"test={evaluate}", f"hydra.sweep.dir={sweep}"]
    result = gnnscale(folder, "train", *SMALL, *words, "--multirun")
    assert result.returncode == 0, result.stderr
    summaries = [json.loads((folder / sweep / job / "summary.json").read_text()) for job in ("0", "1")]
    stages = {"train", "evaluate"} if evaluate == "true" else {"train"}
    assert all({row["stage"] for row in summary["stages"]} >= stages for summary in summaries)


@pytest.mark.sweep
def test_two_ranks_of_torchrun_share_a_run_folder(first_run):
    folder, _ = first_run
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    words = ["trainer.max_epochs=1", "predict=true", "trainer.enable_progress_bar=false"]
    gnnscale_train = [sys.executable, "-m", "lightning_gnnscale.cli", "train"]
    result = subprocess.run(
        [*command, *gnnscale_train, *SMALL, *words], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr[-3000:]
    runs = list((folder / "runs" / "demo").glob("torchrun-*"))
    assert len(runs) == 1
    assert pq.read_table(runs[0] / "predictions.parquet")["node"].to_pylist() == list(range(2000))
    assert result.stdout.count("run folder") == 1


def test_what_a_data_set_lacks_is_said_before_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "edges.npy", np.array([[0, 1, 2, 3], [1, 2, 3, 0]]))
    np.save(tmp_path / "x.npy", np.ones((4, 3), np.float32))
    np.save(tmp_path / "y.npy", np.array([0, 1, 0, 1]))
    np.save(tmp_path / "train.npy", np.array([0, 1]))
    edges, x, y = ("dataset.edges=edges.npy", "dataset.features=x.npy", "dataset.labels=y.npy")
    for words, part in [
        ([edges], f"dataset.features: {tmp_path.name} has none"),
        ([edges, x], f"dataset.labels: {tmp_path.name} has none"),
        (
            [edges, x, y, "dataset.train_mask=train.npy"],
            "dataset.val_mask: a callback that monitors val_* needs val nodes",
        ),
    ]:
        assert part in refused(capsys, "train", "dataset=files", "num_parts=2", *words)
    assert not (tmp_path / "stores").exists()


@pytest.mark.parametrize("command", ["plan", "partition"])
def test_recipes_serve_the_other_commands(first_run, monkeypatch, capsys, command):
    folder, _ = first_run
    monkeypatch.chdir(folder)
    main([command, *SMALL])
    assert "2,000" in capsys.readouterr().out
