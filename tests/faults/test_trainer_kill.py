"""A trainer whose first process is killed: none of its others stays."""

import os
import signal
import subprocess
import sys
import time

import psutil

TRAIN = [
    "train", "dataset.num_nodes=2000", "dataset.num_edges=8000", "num_parts=2", "trainer.devices=2",
    "trainer.max_epochs=100000", "callbacks=default",
]  # fmt: skip


def test_no_process_outlives_the_first_one(tmp_path):
    """Started as in a shell's background, where SIGINT is ignored."""
    run = tmp_path / "run"
    words = [*TRAIN, f"hydra.run.dir={run}", f"paths.stores={tmp_path}/stores"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_gnnscale.cli", *words],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    others = []
    try:
        _wait(lambda: any((run / "checkpoints").glob("last.ckpt")), "a checkpoint")
        others = psutil.Process(process.pid).children(recursive=True)
        assert len(others) >= 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        _wait(lambda: not any(other.is_running() and other.status() != "zombie" for other in others), "their end")
    finally:
        process.kill()
        for other in others:
            if other.is_running():
                other.kill()


def _wait(done, what: str) -> None:
    limit = time.monotonic() + 120
    while not done():
        assert time.monotonic() < limit, f"no {what} in time"
        time.sleep(0.1)
