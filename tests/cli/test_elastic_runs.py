"""`elastic=true` end to end: torchrun, a process or a machine that is killed, and the weights of an undisturbed run."""

import os
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch
from own_process import gnnscale

RECIPE = """
defaults: [/train, _self_]
name: small
elastic: true
save_steps: 2
test: false
num_parts: 4
dataset: {num_nodes: 2000, num_edges: 12000, num_communities: 40, feature_dim: 16}
trainer: {max_epochs: 6, enable_progress_bar: false}
datamodule: {batch_size: 64}
model: {backbone: {hidden_channels: 32}}
sampler: {fanouts: [10, 5]}
strategy: {logical_ranks: 4}
"""
LIMIT_S = 900


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a recipe, and the run of one process that nobody has disturbed."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "small.yaml").write_text(RECIPE)
    done = gnnscale(folder, "train", "recipe=small.yaml", "elastic=false", "trainer.devices=1", "hydra.run.dir=whole")
    assert done.returncode == 0, done.stderr
    return folder


def free_port():
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        return there.getsockname()[1]


def start(work, name, nodes, processes, port):
    """Start torchrun with the processes of one machine."""
    words = [f"--nnodes={nodes}", f"--nproc-per-node={processes}", "--max-restarts=3", "--rdzv-backend=c10d"]
    words += [f"--rdzv-endpoint=localhost:{port}", f"--rdzv-id={name}", "--no-python"]
    words += ["--rdzv-conf=last_call_timeout=5,keep_alive_interval=1"]
    train = [sys.executable, "-m", "lightning_gnnscale.cli", "train", "recipe=small.yaml"]
    with open(work / f"{name}.log", "a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, *train], cwd=work, stdout=log,
            stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def weights(run):
    last = max(run.glob("checkpoints/last*.ckpt"), key=lambda path: path.stat().st_mtime)
    return torch.load(last, weights_only=True)["state_dict"]


def disturb(work, name, agents, kill):
    """Kill once a checkpoint within an epoch is there; the first of the agents ends with the weights of one process."""
    run = work / "runs" / "small" / f"torchrun-{name}"
    deadline = time.monotonic() + LIMIT_S
    try:
        while not (run / "checkpoints" / "last-within.ckpt").exists():
            assert all(agent.poll() is None for agent in agents), (work / f"{name}.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        kill()
        assert agents[0].wait(LIMIT_S) == 0, (work / f"{name}.log").read_text()[-4000:]
    finally:
        for agent in agents:
            end(agent)
    expected, found = weights(work / "whole"), weights(run)
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    assert (work / f"{name}.log").read_text().count("trains on the CPU") == 2, "it was not started again"


def end(agent):
    """Kill a torchrun with all that it has started, as a machine that is lost."""
    if agent.poll() is None:
        for process in [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]:
            process.kill()
        agent.wait()


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_process_that_is_killed_is_started_again_within_the_epoch(work):
    agent = start(work, "killed", 1, 3, free_port())
    disturb(work, "killed", [agent], lambda: psutil.Process(agent.pid).children()[1].kill())


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_machine_that_is_lost_leaves_the_others_to_go_on(work):
    port = free_port()
    agents = [start(work, "lost", "1:2", 1, port)]
    time.sleep(3)  # the first one has the rendezvous
    agents.append(start(work, "lost", "1:2", 1, port))
    disturb(work, "lost", agents, lambda: end(agents[1]))
