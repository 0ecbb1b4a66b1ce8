"""Training that is killed at random moments: what stands under a checkpoint's name is whole, and goes on to the end."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from cli.tiny_graph import TINY, write_tiny_graph

import lightning_gnnscale.cli.train  # noqa: F401 (a forked process finds it imported)
from lightning_gnnscale.cli.main import main
from lightning_gnnscale.model.checkpoint_file import read_checkpoint

pytestmark = pytest.mark.sweep

EPOCHS = 8


def start(folder: str, *words: str) -> int:
    """Train in a process of its own, and return its id: all modules are loaded already."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.setsid()
            sync = os.fsync
            os.fsync = lambda fd: (time.sleep(0.02), sync(fd))  # a slow disk: kills fall into writing
            with open(os.devnull, "w") as quiet:
                os.dup2(quiet.fileno(), 1)
            main(["train", *TINY, f"trainer.max_epochs={EPOCHS}", "test=false", f"hydra.run.dir={folder}", *words])
            code = 0
        finally:
            os._exit(code)
    return process


def finish(folder: str, *words: str) -> None:
    """Train to the end."""
    _, status = os.waitpid(start(folder, *words), 0)
    assert status == 0


def first_write(folder: str) -> float:
    """Wait until a run begins to write its first checkpoint; return the time."""
    limit = time.monotonic() + 120
    while not any(Path(folder, "checkpoints").glob("*")):
        assert time.monotonic() < limit, "no checkpoint in time"
        time.sleep(0.001)
    return time.time()


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_killed_run_goes_on_to_the_weights_of_an_undisturbed_one(tmp_path, monkeypatch, kills):
    monkeypatch.chdir(tmp_path)
    write_tiny_graph()
    finish("first")  # makes the store
    process = start("whole")
    began = first_write("whole")
    os.waitpid(process, 0)
    seconds = os.stat("whole/checkpoints/last.ckpt").st_mtime - began
    expected = read_checkpoint("whole/checkpoints/last.ckpt")
    assert expected["epoch"] == EPOCHS - 1
    moments = random.Random(0)
    counts = {"resumed": 0, "begun again": 0, "had ended": 0, "left unfinished files": 0, "checkpoints opened": 0}
    for trial in range(kills):
        process = start(f"run{trial}")
        first_write(f"run{trial}")
        time.sleep(seconds * moments.random())
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        folder = Path(f"run{trial}/checkpoints")
        counts["left unfinished files"] += len(list(folder.glob(".*.tmp")))
        for path in folder.glob("*.ckpt"):
            assert "state_dict" in read_checkpoint(path)
            counts["checkpoints opened"] += 1
        last = folder / "last.ckpt"
        if not last.is_file():
            counts["begun again"] += 1
            finish(f"run{trial}")
        elif read_checkpoint(last)["epoch"] < EPOCHS - 1:
            counts["resumed"] += 1
            finish(f"run{trial}", f"resume={last}")
        else:
            counts["had ended"] += 1
            continue
        assert not list(folder.glob(".*.tmp"))
        found = read_checkpoint(last)
        assert found["epoch"] == EPOCHS - 1
        assert all((found["state_dict"][name] == value).all() for name, value in expected["state_dict"].items())
    print(counts)
    assert counts["resumed"] > 0
