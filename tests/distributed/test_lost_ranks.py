"""A rank that is stopped, or ended by a signal: the run ends within the strategy's timeout, and in one line."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from own_process import OwnProcess, script

LIMIT_S = 4.0
SLACK_S = 10.0  # of a machine that others use too, and for the end of a script's interpreter with torch

SCRIPT = """
import os
import signal
import sys
import time
from pathlib import Path

import torch

torch.set_num_threads(1)
import lightning as L
from partition_stand_ins import Classifier, PartsData, make_trainer

import lightning_gnnscale as gs

moment, number, start_method = sys.argv[1], int(sys.argv[2]), sys.argv[3]


class Hit(L.Callback):
    def hit(self, trainer, here):
        if here == moment and trainer.current_epoch == 1 and trainer.global_rank == 1:
            Path("hit").write_text(f"{os.getpid()} {time.time()}")
            os.kill(os.getpid(), number)

    def on_train_batch_start(self, trainer, *rest):
        self.hit(trainer, "batch")

    def on_validation_batch_end(self, trainer, *rest):
        self.hit(trainer, "validation")

    def on_save_checkpoint(self, trainer, *rest):
        self.hit(trainer, "checkpoint")


if __name__ == "__main__":
    strategy = gs.GNNScaleStrategy(weights="model_averaging", timeout=TIMEOUT, start_method=start_method)
    callbacks = [Hit(), L.pytorch.callbacks.ModelCheckpoint("checkpoints", save_last=True)]
    trainer = make_trainer(".", strategy=strategy, devices=2, callbacks=callbacks)
    try:
        trainer.fit(Classifier(), datamodule=PartsData())
    except Exception as error:
        print(f"<<{type(error).__name__}: {error}>>", file=sys.stderr, flush=True)
        sys.exit(3)
""".replace("TIMEOUT", str(LIMIT_S))


def run(folder, moment, number, start_method, launcher=()):
    """Return what the ranks said, and the seconds from the signal to the end of the run."""
    (folder / "script.py").write_text(SCRIPT)
    words = ["script.py", moment, str(number), start_method]
    if start_method == "fork":  # no process of Python's own start
        done = OwnProcess(folder, script, *words).wait(180)
    else:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launcher, *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)
    ended = time.time()
    assert done.returncode not in (0, None), done.stderr[-2000:]
    pid, at = (folder / "hit").read_text().split()
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == "zombie"
    lines = re.findall(r"<<(.*?)>>", done.stderr, re.S)
    assert len(lines) == 1, done.stderr[-4000:]
    return lines[0], ended - float(at)


STOPPED = [("checkpoint", "fork"), ("batch", "popen")]
SLOW = [("batch", "fork"), ("validation", "fork"), ("batch", "spawn")]
STOPPED += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.sweep
@pytest.mark.parametrize(("moment", "start_method"), STOPPED)
def test_a_stopped_rank_ends_the_run_within_the_timeout(tmp_path, moment, start_method):
    line, seconds = run(tmp_path, moment, 19, start_method)
    assert seconds < LIMIT_S + 5 + SLACK_S
    pid = (tmp_path / "hit").read_text().split()[0]
    assert "another process of this run was lost or does not answer" in line
    assert f"rank 1 (process {pid}) was stopped by a signal, and is ended" in line
    assert "strategy.timeout" in line


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run_under_torchrun(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    line, seconds = run(tmp_path, "batch", 19, "popen", torchrun)
    assert seconds < LIMIT_S + 5 + SLACK_S
    assert "was stopped by a signal, and is ended" in line


CAUSES = {11: "SIGSEGV: a file of the store may be damaged", 7: "SIGBUS: a mapped file was shortened",
          9: "SIGKILL: memory was short", 15: "SIGTERM: somebody, or a scheduler, asked it to end"}  # fmt: skip


@pytest.mark.parametrize("number", [11, *(pytest.param(number, marks=pytest.mark.slow) for number in (7, 9, 15))])
def test_the_signal_that_ended_a_rank_is_told_with_its_likely_cause(tmp_path, number):
    line, seconds = run(tmp_path, "batch", number, "fork")
    assert seconds < 5 + SLACK_S
    pid = (tmp_path / "hit").read_text().split()[0]
    assert line.startswith(f"StrategyError: rank 1 (process {pid}) was ended by {CAUSES[number]}")
    assert "\n" not in line and "last checkpoint" in line
