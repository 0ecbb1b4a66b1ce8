"""A trainer whose first process is killed or interrupted: none of its others stays."""

import getpass
import os
import signal
import time

import psutil
import pytest
from own_process import OwnProcess, gnnscale, typed

COMPILED = {f"torchinductor_{getpass.getuser()}"}  # torch's cache stays
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
        process = OwnProcess(tmp_path, typed, *words, interrupt=handler)
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


@pytest.mark.sweep
def test_no_other_machine_is_listened_to_and_what_a_kill_leaves_goes_with_the_next_run(trainer, tmp_path, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    process, others = trainer(signal.SIG_DFL)
    both = [psutil.Process(process.pid), *others]
    listened = {
        address.laddr.ip
        for one in both
        for address in one.net_connections("inet")
        if address.status == psutil.CONN_LISTEN
    }
    assert listened == {"127.0.0.1"}
    runs = temporary / f"gnnscale-{os.getuid()}"
    assert len(list(runs.glob("run-*.lock"))) == 1
    assert {path.name for path in temporary.iterdir()} <= {runs.name, *COMPILED}
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    _wait(lambda: not any(_runs(other) for other in others), "their end")
    assert [path for path in runs.iterdir() if path.is_dir()] and not list(runs.rglob("*.py"))
    plan = ["plan", "planner.num_nodes=10", "planner.num_edges=10", "planner.feature_bytes=10"]
    assert gnnscale(tmp_path, *plan, f"hydra.run.dir={tmp_path}/plan").returncode == 0
    assert list(runs.iterdir()) == []
    assert {path.name for path in temporary.iterdir()} <= {runs.name, *COMPILED}


def test_sigterm_of_the_first_process_ends_them_all_in_one_line(trainer):
    process, others = trainer(signal.SIG_DFL)
    os.kill(process.pid, signal.SIGTERM)
    ended = process.wait(60)
    assert ended.returncode == 143
    message = ended.stderr
    assert message.startswith("gnnscale: ended by SIGTERM; go on with resume=") and message.count("\n") == 1
    assert not any(_runs(other) for other in others)


@pytest.mark.sweep
def test_no_process_outlives_the_first_one(trainer):
    """Started as in a shell's background, where SIGINT is ignored."""
    process, others = trainer(signal.SIG_IGN)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    _wait(lambda: not any(_runs(other) for other in others), "their end")


@pytest.mark.sweep
def test_an_interrupt_of_the_first_process_alone_ends_them_all(trainer):
    process, others = trainer(signal.SIG_DFL)
    os.kill(process.pid, signal.SIGINT)
    ended = process.wait(60)
    assert ended.returncode == 130
    assert "interrupted; go on with resume=" in ended.stderr
    assert not any(_runs(other) for other in others)


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != "zombie"


def _wait(done, what: str) -> None:
    limit = time.monotonic() + 120
    while not done():
        assert time.monotonic() < limit, f"no {what} in time"
        time.sleep(0.1)
