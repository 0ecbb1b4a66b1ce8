"""What a run leaves in the environment: nothing, so that what is started after it is a run of its own."""

import os

import lightning as L
import pytest
import torch
import torch.distributed as dist

import lightning_gnnscale as gs
from lightning_gnnscale.strategy.launcher import RANK_VARIABLES


class Linear(L.LightningModule):
    def __init__(self, fails: bool = False):
        super().__init__()
        self.layer, self.fails = torch.nn.Linear(3, 2), fails
        self.seen = {}

    def training_step(self, batch, batch_idx):
        self.seen = dict(os.environ)
        if self.fails:
            raise RuntimeError("of the user")
        return self.layer(torch.ones(1, 3)).sum()

    test_step = predict_step = training_step

    def train_dataloader(self):
        return [0, 1]

    test_dataloader = predict_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(folder, strategy):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    return L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, default_root_dir=folder, enable_checkpointing=False, **quiet
    )


@pytest.fixture(autouse=True)
def alone():
    stood = dist.is_initialized()
    yield
    if dist.is_initialized() and not stood:
        dist.destroy_process_group()


@pytest.fixture
def unset(monkeypatch):
    for name in (*RANK_VARIABLES, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("run", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_one_process_leaves_the_environment_as_it_was(tmp_path, run, fails):
    before, model = dict(os.environ), Linear(fails)
    model.validation_step, model.val_dataloader = model.training_step, model.train_dataloader
    for _ in range(2):  # a second run in the same process
        if fails:
            with pytest.raises(RuntimeError, match="of the user"):
                getattr(trainer(tmp_path, "gnnscale"), run)(model)
        else:
            getattr(trainer(tmp_path, "gnnscale"), run)(model)
        assert model.seen and dict(os.environ) == before


def test_what_the_user_has_set_stays(tmp_path, monkeypatch):
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    trainer(tmp_path, gs.GNNScaleStrategy()).fit(Linear())
    assert dict(os.environ) == before


@pytest.mark.usefixtures("unset")
def test_a_launcher_of_processes_leaves_it_too(monkeypatch, tmp_path):
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    def start(self, *args, **kwargs):
        os.environ["MASTER_PORT"] = "1"
        raise RuntimeError("no process")

    monkeypatch.setattr(_MultiProcessingLauncher, "launch", start)
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="no process"):
        trainer(tmp_path, "gnnscale_spawn").fit(Linear())
    assert dict(os.environ) == before
