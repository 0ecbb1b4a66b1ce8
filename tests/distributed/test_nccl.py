"""Two GPUs under NCCL, from the command line: every policy trains as two processes of the CPU do, to rounding."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORDS = {
    "gradients": ["recipe=demo"],
    "gradients, logical ranks": ["recipe=demo", "strategy.logical_ranks=4"],
    "models": ["recipe=demo", "strategy/weights=model_averaging"],
    "late gradients": ["recipe=cagnet", "strategy/weights=bounded_gradient_staleness"],
    "blocks": ["recipe=cagnet"],
    "halos": ["recipe=cagnet", "strategy/exchange=halo"],
    "4 bits": ["recipe=quantised_deltas"],
    "skipped": ["recipe=sancus"],
}
SMALL = ["dataset=synthetic", "dataset.num_nodes=2000", "dataset.num_edges=12000", "dataset.feature_dim=16"]
SMALL += [
    "dataset.num_communities=8",
    "dataset.num_classes=8",
    "trainer.max_epochs=10",
    "num_parts=2",
    "trainer.precision=32-true",
]


def accuracy(folder: Path, words: list[str], accelerator: str) -> float:
    """Train by two processes; return the test accuracy."""
    run = folder / accelerator
    told = [f"hydra.run.dir={run}", f"paths.stores={folder}/stores", f"paths.generated={folder}/generated"]
    told += [f"trainer.accelerator={accelerator}", "trainer.devices=2", "matmul_precision=highest"]
    command = [sys.executable, "-m", "lightning_gnnscale.cli", "train", *words, *SMALL, *told]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((run / "summary.json").read_text())["metrics"]["test_acc"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", list(WORDS))
def test_two_gpus_train_as_two_processes_of_the_cpu(tmp_path, name):
    there, here = (accuracy(tmp_path, WORDS[name], accelerator) for accelerator in ("gpu", "cpu"))
    assert abs(there - here) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", list(WORDS))
def test_every_policy_trains_by_these_words(tmp_path, name):
    assert accuracy(tmp_path, WORDS[name], "cpu") > 0.3
