"""A trainer whose first process is killed or interrupted: none of its others stays."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

TRAIN = [
    "train", "dataset.num_nodes=2000", "dataset.num_edges=8000", "num_parts=2", "trainer.devices=2",
    "trainer.max_epochs=100000", "callbacks=default",
]  # fmt: skip


@pytest.fixture
def trainer(tmp_path):
    """Return a function that starts `gnnscale train` on two processes, waits for its first checkpoint, and returns
    the process and those under it."""
    started = []

    def start(handler):
        run = tmp_path / "run"
        words = [*TRAIN, f"hydra.run.dir={run}", f"paths.stores={tmp_path}/stores"]
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_gnnscale.cli", *words],
            preexec_fn=lambda: signal.signal(signal.SIGINT, handler), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(psutil.Process(process.pid))
        _wait(lambda: any((run / "checkpoints").glob("last.ckpt")), "a checkpoint")
        others = started[0].children(recursive=True)
        started.extend(others)
        assert len(others) >= 2
        return process, others

    yield start
    for process in started:
        if process.is_running():
            process.kill()


def test_no_process_outlives_the_first_one(trainer):
    """Started as in a shell's background, where SIGINT is ignored."""
    process, others = trainer(signal.SIG_IGN)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    _wait(lambda: not any(_runs(other) for other in others), "their end")


def test_an_interrupt_of_the_first_process_alone_ends_them_all(trainer):
    process, others = trainer(signal.SIG_DFL)
    os.kill(process.pid, signal.SIGINT)
    message = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "interrupted; go on with resume=" in message
    assert not any(_runs(other) for other in others)


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != "zombie"


def _wait(done, what: str) -> None:
    limit = time.monotonic() + 120
    while not done():
        assert time.monotonic() < limit, f"no {what} in time"
        time.sleep(0.1)
