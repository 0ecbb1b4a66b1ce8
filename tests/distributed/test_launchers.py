"""The ways in which users start a run: torchrun, Lightning's own launchers, LightningCLI."""

import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import numpy as np
import psutil
import pytest
import torch
from lightning.fabric.utilities import imports
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.trainer.connectors import accelerator_connector
from partition_stand_ins import Classifier, PartsData, make_trainer, train
from processes import CONTEXT, launch

import lightning_gnnscale as gs
from lightning_gnnscale.strategy import GradientAveraging, ModelAveraging
from tests.tiers import first

EVEN = (8, 8, 4, 4)  # as many batches on each of two ranks
SCRIPT = """
import sys
import torch

torch.set_num_threads(1)
from partition_stand_ins import Classifier, PartsData, make_trainer

model = Classifier()
trainer = make_trainer(".", strategy="gnnscale", devices=2)
trainer.fit(model, datamodule=PartsData((8, 8, 4, 4)))
if trainer.is_global_zero:
    torch.save((model.state_dict(), trainer.world_size), sys.argv[1])
"""


@pytest.mark.sweep  # `launch` gives every test of this folder the environment that torchrun gives
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
    expected = launch(2, train, tmp_path / "expected", GradientAveraging(), None, PartsData(EVEN))[0]
    assert all(torch.equal(state[name], expected[name]) for name in expected)


TRAINERS = """
from partition_stand_ins import Classifier, PartsData, make_trainer

for devices in {devices}:
    make_trainer(".", strategy="gnnscale", devices=devices).fit(Classifier(), datamodule=PartsData((8, 8, 4, 4)))
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ((1, 2), "this Trainer has 2 processes and a group of 1 exists"),
        ((2, 1), "this Trainer has 1 processes and a group of 2 exists"),
    ],
)
def test_trainers_of_a_script_have_as_many_processes(tmp_path, devices, message):
    (tmp_path / "script.py").write_text(TRAINERS.format(devices=devices))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert message in done.stderr, done.stderr[-4000:]


class Listening(L.Callback):
    """Notes the addresses that this rank listens at."""

    def on_train_end(self, trainer, module):
        found = psutil.Process().net_connections(kind="inet")
        told = sorted({one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN})
        Path(trainer.default_root_dir, f"listening-{trainer.global_rank}").write_text(" ".join(told))
        use_threads()


def use_threads():
    torch.set_num_threads(2)
    torch.ones(1000, 1000).exp().sum()


def fork_two(folder):
    use_threads()  # of which a forked process has none
    torch.set_num_threads(1)
    model = Classifier()
    trainer = make_trainer(folder, strategy="gnnscale_fork", devices=2, callbacks=[Listening()])
    trainer.fit(model, datamodule=PartsData(EVEN))
    # Back in the process that forked: it has the weights, and no process group.
    trainer.save_checkpoint(folder / "after.ckpt")
    torch.save(model.state_dict(), folder / "state.pt")


def test_fork(tmp_path):
    process = CONTEXT.Process(target=fork_two, args=(tmp_path,))
    process.start()
    process.join(60)
    process.kill()
    told = [(tmp_path / f"listening-{rank}").read_text() for rank in (0, 1)]
    assert told == ["127.0.0.1", "127.0.0.1"]  # see SECURITY.md
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    expected = launch(2, train, tmp_path / "expected", GradientAveraging(), None, PartsData(EVEN))[0]
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert all(torch.equal(saved["state_dict"][name], expected[name]) for name in expected)


def in_a_notebook(folder):
    imports._IS_INTERACTIVE = accelerator_connector._IS_INTERACTIVE = True
    for devices in (1, 2):
        model = Classifier()
        trainer = make_trainer(folder, strategy="gnnscale", devices=devices)
        trainer.fit(model, datamodule=PartsData(EVEN))
        torch.save(model.state_dict(), folder / f"state-{devices}.pt")


def test_a_notebook_needs_no_strategy_of_its_own(tmp_path):
    process = CONTEXT.Process(target=in_a_notebook, args=(tmp_path,))
    process.start()
    process.join(60)
    process.kill()
    for devices in (1, 2):
        state = torch.load(tmp_path / f"state-{devices}.pt", weights_only=True)
        folder = tmp_path / f"expected-{devices}"
        expected = launch(devices, train, folder, GradientAveraging(), None, PartsData(EVEN))[0]
        assert all(torch.equal(state[name], expected[name]) for name in expected)


QUIET = (
    "--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false",
    "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false",
)  # fmt: skip


def run_cli(folder):
    from lightning.pytorch.cli import LightningCLI

    arguments = [
        "fit",
        "--trainer.strategy=lightning_gnnscale.strategy.GNNScaleStrategy",
        "--trainer.strategy.weights=lightning_gnnscale.strategy.ModelAveraging",
        "--trainer.strategy.weights.every_n_epochs=2",
        *QUIET,
        f"--trainer.default_root_dir={folder}",
    ]
    cli = LightningCLI(Classifier, PartsData, args=arguments, save_config_callback=None, seed_everything_default=0)
    weights = cli.trainer.strategy.weights
    return type(weights) is ModelAveraging, weights.every_n_epochs, cli.trainer.current_epoch


def test_lightning_cli_builds_the_strategy_from_a_class_path(tmp_path):
    assert launch(1, run_cli, tmp_path)[0] == (True, 2, 2)


def write_store(root):
    stream = gs.SyntheticGraph(60, 300, num_communities=3, seed=0).stream(to_undirected=True)
    labels = np.arange(60) % 3
    rows = {"features": np.random.default_rng(0).random((60, 4), np.float32), "labels": labels}
    masks = {"train": np.ones(60, bool), "val": np.ones(60, bool)}
    gs.write_partition_store(root, stream, gs.partition(stream, "random", num_parts=2), masks=masks, **rows)


def run_cli_of_the_package(folder, sampler, scheduler):
    from lightning.pytorch.cli import LightningCLI

    write_store(f"{folder}/graph")
    backbone = {"in_channels": 4, "hidden_channels": 8, "out_channels": 3, "num_layers": 2}
    arguments = [
        "fit",
        f"--data.store={folder}/graph",
        *sampler,
        "--data.batch_size=20",
        "--model.backbone=lightning_gnnscale.model.GraphSAGE",
        *(f"--model.backbone.{name}={value}" for name, value in backbone.items()),
        "--model.optimizer=torch.optim.SGD",
        "--model.optimizer.lr=0.5",
        *scheduler,
        *QUIET,
        f"--trainer.default_root_dir={folder}",
    ]
    options = {"save_config_callback": None, "seed_everything_default": 0}
    cli = LightningCLI(gs.NodeClassifier, gs.PartitionDataModule, args=arguments, **options)
    return repr(cli.datamodule.sampler), cli.trainer.optimizers[0].param_groups[0]["lr"], cli.trainer.current_epoch


STEP = ["--model.scheduler=torch.optim.lr_scheduler.StepLR", "--model.scheduler.step_size=1"]
PLATEAU = ["--model.scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau", "--model.scheduler.patience=5"]
FANOUTS = ["--data.sampler=lightning_gnnscale.NeighborSampler", "--data.sampler.fanouts=[4,3]"]
LAYERWISE = ["--data.sampler=lightning_gnnscale.LayerwiseSampler", "--data.sampler.nodes_per_layer=[9,8]"]


@first(1)
@pytest.mark.parametrize(
    ("sampler", "scheduler", "expected", "lr"),
    [
        (FANOUTS, [*STEP, "--model.scheduler.gamma=0.5"], gs.NeighborSampler([4, 3]), 0.125),
        (LAYERWISE, PLATEAU, gs.LayerwiseSampler([9, 8]), 0.5),
    ],
)
def test_lightning_cli_takes_sampler_and_scheduler_by_class_path(tmp_path, sampler, scheduler, expected, lr):
    assert launch(1, run_cli_of_the_package, tmp_path, sampler, scheduler)[0] == (repr(expected), lr, 2)


@first(1)
@pytest.mark.parametrize(
    ("arguments", "sampler"),
    [
        (["SaintSampler", "kind=node", "budget=50"], gs.SaintSampler("node", budget=50)),
        (["ClusterSampler", "num_clusters=7"], gs.ClusterSampler(7)),
        (
            ["LinkSampler", "sampler=lightning_gnnscale.NeighborSampler", "sampler.fanouts=[3]", "num_negatives=2"],
            gs.LinkSampler(gs.NeighborSampler([3]), num_negatives=2),
        ),
    ],
)
def test_every_sampler_parses_on_the_command_line(arguments, sampler):
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_class_arguments(gs.PartitionDataModule, "data", sub_configs=True)
    name, *settings = arguments
    given = [f"--data.sampler=lightning_gnnscale.{name}", *(f"--data.sampler.{setting}" for setting in settings)]
    built = parser.parse_args(["--data.store=anywhere", *given])
    assert parser.instantiate_classes(built).data.sampler == sampler


FORKSERVER = """
import sys
import torch

from lightning_gnnscale.strategy import GNNScaleStrategy
from partition_stand_ins import Classifier, PartsData, make_trainer

if __name__ == "__main__":
    torch.set_num_threads(1)
    model = Classifier()
    trainer = make_trainer(".", strategy=GNNScaleStrategy(start_method="forkserver"), devices=2)
    trainer.fit(model, datamodule=PartsData((8, 8, 4, 4)))
    torch.save(model.state_dict(), sys.argv[1])
"""


@pytest.mark.sweep
def test_processes_of_a_forkserver_have_weights_of_their_own(tmp_path):
    (tmp_path / "script.py").write_text(FORKSERVER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py", "state.pt"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    expected = launch(2, train, tmp_path / "expected", GradientAveraging(), None, PartsData(EVEN))[0]
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def fit_after_a_search(folder):
    finder = LearningRateFinder(num_training_steps=1, update_attr=False)  # stops within the first part's visit
    return train(folder), train(folder, callbacks=[finder])


@pytest.mark.sweep
def test_a_search_for_a_learning_rate_leaves_no_trace(tmp_path):
    plain, searched = launch(1, fit_after_a_search, tmp_path)[0]
    assert all(torch.equal(plain[name], searched[name]) for name in plain)
