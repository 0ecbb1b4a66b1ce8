"""The controller in a real Trainer with a DataModule that only says what loading costs."""

import csv
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.callbacks import LocalityController
from lightning_gnnscale.errors import StrategyError
from tests.says import said


class FakeData(L.LightningDataModule):
    """Loading shares by epoch, the last one repeated; remembers every scale it is given."""

    def __init__(self, shares, sampler=None):
        super().__init__()
        self.sampler = sampler or SimpleNamespace(locality=object())
        self.shares, self.scales, self.scale_in_epoch = shares, [], []

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 2))

    def loading_share(self):
        self.scale_in_epoch.append(self.scales[-1])
        return self.shares[min(self.trainer.current_epoch, len(self.shares) - 1)]

    def set_locality_scale(self, scale):
        self.scales.append(scale)


class Quiet(BoringModel):
    """A boring model without evaluation."""

    validation_step = test_step = val_dataloader = test_dataloader = None


def fit(callback, data, tmp_path, epochs, ckpt_path=None, logger=False):
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=[callback], logger=logger, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, log_every_n_steps=1, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Quiet(), data, ckpt_path=ckpt_path)
    return trainer


def test_doubles_goes_back_and_stays(tmp_path):
    data, callback = FakeData([0.5, 0.5, 0.1, 0.18, 0.9]), LocalityController()
    logger = CSVLogger(tmp_path)
    fit(callback, data, tmp_path, 6, logger=logger)
    assert data.scale_in_epoch == [1, 2, 4, 3, 3, 3]
    assert data.scales == [1, 2, 4, 3, 3, 3, 3]
    assert callback.state.fixed
    with open(logger.experiment.metrics_file_path) as file:
        rows = [row for row in csv.DictReader(file) if row["locality_scale"]]
    assert [float(row["locality_scale"]) for row in rows] == [1, 2, 4, 3, 3, 3]
    assert [round(float(row["loading_share"]), 6) for row in rows] == [0.5, 0.5, 0.1, 0.18, 0.9, 0.9]


def test_a_resumed_run_goes_on_where_it_was(tmp_path):
    whole = FakeData([0.5, 0.5, 0.1, 0.5])
    fit(LocalityController(), whole, tmp_path, 4)
    first, path = FakeData([0.5, 0.5, 0.1, 0.5]), tmp_path / "half.ckpt"
    fit(LocalityController(), first, tmp_path, 2).save_checkpoint(path)
    second = FakeData([0.5, 0.5, 0.1, 0.5])
    fit(LocalityController(), second, tmp_path, 4, ckpt_path=path)
    assert first.scale_in_epoch + second.scale_in_epoch == whole.scale_in_epoch == [1, 2, 4, 3]


def test_all_ranks_take_the_mean_of_their_shares():
    """Rank 0 saw 0.1 and rank 1 0.5: the mean 0.3 doubles the scale on both."""
    for own in (0.1, 0.5):
        data, callback, logged = FakeData([own]), LocalityController(), {}
        reduced = []

        def reduce(share, reduce_op, reduced=reduced):
            reduced.append((float(share), reduce_op))
            return torch.tensor(0.3)

        trainer = SimpleNamespace(datamodule=data, strategy=SimpleNamespace(reduce=reduce))
        data.trainer = SimpleNamespace(current_epoch=0)
        module = SimpleNamespace(device="cpu", log_dict=lambda values, logged=logged, **_: logged.update(values))
        callback.on_fit_start(trainer, module)
        callback.on_train_epoch_end(trainer, module)
        assert reduced == [(pytest.approx(own), "mean")]
        assert logged == {"loading_share": pytest.approx(0.3), "locality_scale": 1.0}
        assert data.scales == [1, 2]


def test_a_datamodule_without_the_dial_is_refused(tmp_path):
    with pytest.raises(StrategyError, match=said("set_locality_scale loading_share LightningDataModule")):
        fit(LocalityController(), L.LightningDataModule.from_datasets(RandomDataset(32, 2)), tmp_path, 1)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[LocalityController()], logger=False, enable_checkpointing=False
    )
    with pytest.raises(StrategyError, match="got no datamodule"):
        trainer.fit(Quiet(), DataLoader(RandomDataset(32, 2)))


def test_a_sampler_without_locality_is_refused(tmp_path):
    with pytest.raises(StrategyError, match=said("sampler locality NeighborSampler")):
        fit(LocalityController(), FakeData([0.5], gs.NeighborSampler([5])), tmp_path, 1)


def test_a_checkpoint_beyond_the_range_is_refused():
    with pytest.raises(ValueError, match=said("scale [1, max_scale 2] 4")):
        LocalityController(max_scale=2).load_state_dict({"scale": 4.0, "previous": 2.0, "fixed": False})


def test_bad_arguments():
    with pytest.raises(ValueError, match="0 <= lower <= upper <= 1"):
        LocalityController(lower=0.5, upper=0.2)
