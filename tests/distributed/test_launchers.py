"""The ways in which users start a run: torchrun, Lightning's own launchers, LightningCLI."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from partition_stand_ins import Classifier, PartsData, make_trainer, train
from processes import CONTEXT, launch

from lightning_gnnscale.strategy import ModelAveraging

SCRIPT = """
import sys
import torch

torch.set_num_threads(1)
from partition_stand_ins import Classifier, PartsData, make_trainer

model = Classifier()
trainer = make_trainer(".", strategy="gnnscale", devices=2)
trainer.fit(model, datamodule=PartsData())
if trainer.is_global_zero:
    torch.save((model.state_dict(), trainer.world_size), sys.argv[1])
"""


def test_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "script.py", "state.pt"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    state, world_size = torch.load(tmp_path / "state.pt", weights_only=True)
    assert world_size == 2
    expected = launch(2, train, tmp_path / "expected")[0]
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def fork_two(folder):
    torch.set_num_threads(1)
    model = Classifier()
    trainer = make_trainer(folder, strategy="gnnscale_fork", devices=2)
    trainer.fit(model, datamodule=PartsData())
    # Back in the process that forked: it has the weights, and no process group.
    trainer.save_checkpoint(folder / "after.ckpt")
    torch.save(model.state_dict(), folder / "state.pt")


def test_fork(tmp_path):
    process = CONTEXT.Process(target=fork_two, args=(tmp_path,))
    process.start()
    process.join(60)
    process.kill()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    expected = launch(2, train, tmp_path / "expected")[0]
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert all(torch.equal(saved["state_dict"][name], expected[name]) for name in expected)


def run_cli(folder):
    from lightning.pytorch.cli import LightningCLI

    arguments = [
        "fit",
        "--trainer.strategy=lightning_gnnscale.strategy.GNNScaleStrategy",
        "--trainer.strategy.weights=lightning_gnnscale.strategy.ModelAveraging",
        "--trainer.strategy.weights.every_n_epochs=2",
        "--trainer.max_epochs=2",
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
        f"--trainer.default_root_dir={folder}",
    ]
    cli = LightningCLI(Classifier, PartsData, args=arguments, save_config_callback=None, seed_everything_default=0)
    weights = cli.trainer.strategy.weights
    return type(weights) is ModelAveraging, weights.every_n_epochs, cli.trainer.current_epoch


def test_lightning_cli_builds_the_strategy_from_a_class_path(tmp_path):
    assert launch(1, run_cli, tmp_path)[0] == (True, 2, 2)
