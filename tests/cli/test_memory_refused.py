"""Memory that a run does not have is one line before work starts; parts that do not fit are made again or refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from cli.refusals import refused
from cli.tiny_graph import TINY, write_tiny_graph

from lightning_gnnscale import memory
from lightning_gnnscale.cli import train
from lightning_gnnscale.cli.main import main

AUTO = ["trainer.max_epochs=1", "test=false", "num_parts=auto", "model.backbone.hidden_channels=4"]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny_graph()
    return tmp_path


@pytest.mark.parametrize("num_parts", ["auto", 2])
def test_a_cap_below_what_a_run_needs_is_one_line_before_work(tiny, monkeypatch, capsys, num_parts):
    monkeypatch.setattr(memory, "_cgroup_limits", lambda: [(300 << 20, 0)])
    monkeypatch.setattr(train, "process_bytes", lambda: 400 << 20)  # this one holds what earlier tests left
    line = refused(capsys, "train", *TINY, f"num_parts={num_parts}")
    assert "the run does not fit memory even without halos" in line
    assert "of 300 MiB" in line
    assert "GiB short" not in line, "the number of parts that comes nearest is told of"
    assert "MiB of memory for the host" in line
    assert not list(Path("stores").glob("*/manifest.json"))


def test_a_device_that_training_exceeds_is_told_what_would_fit(tiny, capsys):
    line = refused(capsys, "train", *TINY, "num_parts=auto", "planner.device_memory_bytes=10MiB")
    assert "training on one device" in line
    assert "planner.device_memory_bytes=" in line


@pytest.mark.sweep
def test_what_is_said_to_fit_fits(tiny, capsys):
    line = refused(capsys, "partition", *TINY[:4], "planner.device_memory_bytes=10MiB")
    memory_words = line.split("planner.device_memory_bytes=")[1].split(" ")[0]
    main(["partition", *TINY[:4], f"planner.device_memory_bytes={memory_words}"])


@pytest.mark.sweep
def test_parts_that_were_given_and_do_not_fit_end_after_partitioning(tiny, capsys):
    np.save("x.npy", np.ones((40, 5_000), np.float32))  # 0.8 MB
    words = [*TINY[:4], "partitioner=random", "planner.device_memory_bytes=2GiB"]
    space = "planner.compute_bytes=2146833648"  # 0.65 MB for parts; two of a ring's parts have 20 nodes and a halo
    line = refused(capsys, "partition", *words, space, "num_parts=2")
    assert "with the halos that were counted" in line
    assert "num_parts=auto" in line
    main(["partition", *words, space, "num_parts=auto", "hydra.run.dir=run"])
    plan = json.loads(Path("run/run.json").read_text())["plan"]
    assert plan["num_parts"] > 2
    assert plan["chosen_by"] == "halo"


def test_a_plan_says_what_was_found(tiny, monkeypatch, capsys):
    monkeypatch.setattr(memory, "_cgroup_limits", lambda: [(3 << 30, 0)])
    main(["plan", "planner.num_nodes=1000", "planner.num_edges=5000", "planner.feature_bytes=1MiB"])
    out = capsys.readouterr().out
    assert "3.00 GiB (found)" in out
    assert "host peak, evaluate" in out
