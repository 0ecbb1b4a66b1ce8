"""Everything that a run refuses, on one process: one line that names the remedy."""

import pickle
from datetime import timedelta

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from partition_stand_ins import Classifier, PartsData, make_trainer, train
from processes import launch

from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.strategy import (
    GNNScaleStrategy,
    GradientAveraging,
    ModelAveraging,
    NoExchange,
)
from tests.says import said


class TwoOptimizers(Classifier):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.2)]


class ByHand(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Lazy(Classifier):
    def __init__(self):
        super().__init__()
        self.lazy = torch.nn.LazyLinear(3)


class MixedSchedulers(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)]
        return [optimizer], [
            {"scheduler": s, "interval": i} for s, i in zip(schedulers, ("step", "epoch"), strict=True)
        ]


class StepPlateau(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": plateau, "interval": "step", "monitor": "train_loss"}]


class NoParts(L.LightningDataModule):
    def train_dataloader(self):
        return PartsData.train_dataloader(self)


class BatchesWithoutPart(PartsData):
    def train_dataloader(self):
        loader = super().train_dataloader()
        return [tuple(batch.x for batch in loader)]


def steps(interval):
    return ModelCheckpoint(**interval)


REFUSED = {
    "max_time": ({"max_time": "00:01:00:00"}, 'Timer(duration, interval="epoch")'),
    "max_steps": ({"max_steps": 5}, "use max_epochs"),
    "min_steps": ({"min_steps": 5}, "use min_epochs"),
    "val_check_interval": ({"val_check_interval": 2}, "check_val_every_n_epoch"),
    "half an epoch": ({"val_check_interval": 0.5}, "check_val_every_n_epoch"),
    "by time": ({"val_check_interval": timedelta(seconds=5)}, "check_val_every_n_epoch"),
    "by batches": ({"check_val_every_n_epoch": None}, "give a number of epochs"),
    "train steps": ({"callbacks": [steps({"every_n_train_steps": 3})]}, "use every_n_epochs"),
    "train time": ({"callbacks": [steps({"train_time_interval": timedelta(1)})]}, "use every_n_epochs"),
    "a failed run": ({"callbacks": [OnExceptionCheckpoint(".")]}, "resume from last.ckpt"),
    "a failed run's last": ({"callbacks": [steps({"save_on_exception": True})]}, "save_last=True"),
    "stochastic averages": ({"callbacks": [StochasticWeightAveraging(0.1)]}, "weights=GradientAveraging()"),
    "moving averages": ({"callbacks": [WeightAveraging()]}, "weights=GradientAveraging()"),
    "sync_batchnorm": ({"sync_batchnorm": True}, "leave it False"),
    "no parts": ({"data": NoParts()}, "weights=GradientAveraging()"),
    "no training nodes": ({"data": PartsData(sizes=(0, 0))}, "check the train mask"),
    "batches of no part": ({"data": BatchesWithoutPart()}, "train with PartitionDataModule"),
    "two optimizers": ({"model": TwoOptimizers()}, "groups of one optimizer"),
    "by hand": ({"model": ByHand()}, "leave automatic_optimization at True"),
    "lazy": ({"model": Lazy()}, "in_channels"),
    "mixed schedulers": ({"model": MixedSchedulers()}, "the same interval"),
    "plateau by steps": ({"model": StepPlateau()}, 'use interval="epoch"'),
}


def run_refused(folder):
    messages = {}
    for name, (options, _) in REFUSED.items():
        try:
            train(folder, **options)
        except StrategyError as error:
            messages[name] = str(error)
    return messages


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    return launch(1, run_refused, tmp_path_factory.mktemp("refused"))[0]


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_with_the_remedy(messages, name):
    assert REFUSED[name][1] in messages[name]
    assert "\n" not in messages[name]


def run_more_ranks_than_parts(folder):
    with pytest.raises(StrategyError) as caught:
        train(folder, data=PartsData(sizes=(8,)))
    return str(caught.value)


def test_more_ranks_than_parts_is_refused_on_every_rank(tmp_path):
    for message in launch(2, run_more_ranks_than_parts, tmp_path):
        assert "rank 1 has none" in message and "more parts" in message


class NothingToLearn(Classifier):
    def configure_optimizers(self):
        return None

    def training_step(self, batch, batch_idx):
        self.net(batch.x)


def run_allowed(folder):
    """What gradient averaging or a dry run may do although model averaging may not, and changes of policy."""
    data = PartsData(sizes=(8, 8))
    train(folder, GradientAveraging(), data=data, max_steps=3, val_check_interval=0.5)
    dry = make_trainer(folder, fast_dev_run=True)
    dry.fit(Classifier(), datamodule=PartsData())
    with pytest.warns(UserWarning, match=said("limit_train_batches=3 last parts")):
        limited = train(folder, ModelAveraging(every_n_epochs=2), limit_train_batches=3)
    monitor = LearningRateMonitor()
    logged = {"callbacks": [monitor], "logger": CSVLogger(folder), "log_every_n_steps": 1}
    with pytest.warns(UserWarning, match=said("process trains 2 divide 2")):
        train(folder, model=Classifier(scheduler="step"), data=data, **logged)
    start = NothingToLearn().state_dict()
    unlearned = train(folder, model=NothingToLearn())

    kept = ModelCheckpoint(dirpath=folder, filename="gradients")
    train(folder, GradientAveraging(), data=data, callbacks=[kept], max_epochs=1)
    with pytest.warns(UserWarning, match=said("optimizer state ModelAveraging")):
        resumed = train(folder, data=data, ckpt_path=kept.best_model_path)
    kept = ModelCheckpoint(dirpath=folder, filename="models")
    train(folder, data=data, callbacks=[kept], max_epochs=1)
    train(folder, GradientAveraging(), data=data, ckpt_path=kept.best_model_path)
    with pytest.warns(UserWarning, match=said("weights optimizers parts part")):
        other = train(folder, data=PartsData(sizes=(4, 4, 8)), ckpt_path=kept.best_model_path)
    return {
        "steps of a dry run": dry.global_step,
        "limited": bool(torch.isfinite(limited["net.0.weight"]).all()),
        "statistics alone": torch.equal(unlearned["net.0.weight"], start["net.0.weight"])
        and not torch.equal(unlearned["net.1.running_mean"], start["net.1.running_mean"]),
        "resumed": bool(torch.isfinite(resumed["net.0.weight"]).all()),
        "resumed on other parts": bool(torch.isfinite(other["net.0.weight"]).all()),
        "learning rates": monitor.lrs["lr-Adam"],
        "pickles": pickle.loads(pickle.dumps(GNNScaleStrategy(weights=ModelAveraging(3)))).weights.every_n_epochs,
    }


def test_allowed(tmp_path):
    assert launch(1, run_allowed, tmp_path)[0] == {
        "steps of a dry run": 1,
        "limited": True,
        "statistics alone": True,
        "resumed": True,
        "resumed on other parts": True,
        "learning rates": [0.01, 0.01] * 2 + [0.005] * 4 + [0.0025] * 4,
        "pickles": 3,
    }


def test_bad_arguments():
    with pytest.raises(ValueError, match=said("every_n_epochs 1 0")):
        ModelAveraging(every_n_epochs=0)
    with pytest.raises(ValueError, match=said("per_part 'mine'")):
        ModelAveraging(optimizer_state="mine")
    with pytest.raises(ValueError, match=said("local_clip > 0 None 'x'")):
        GradientAveraging(local_clip="x")
    with pytest.raises(ValueError, match=said("exchange ''")):
        GNNScaleStrategy(exchange="")
    with pytest.raises(ValueError, match=r"bucket_bytes"):
        GradientAveraging(bucket_bytes=0)
    with pytest.raises(ValueError, match=said("gradient_averaging model_averaging 'sgd'")):
        GNNScaleStrategy(weights="sgd")
    with pytest.raises(ValueError, match=said("no_exchange skip_broadcast 'telepathy'")):
        GNNScaleStrategy(exchange="telepathy")
    with pytest.raises(StrategyError, match=r"weights=GradientAveraging\(\)"):
        GNNScaleStrategy(weights="model_averaging", exchange="halo")
    with pytest.raises(StrategyError, match=said("find_unused_parameters DDP")):
        GNNScaleStrategy(find_unused_parameters=True)
    assert isinstance(GNNScaleStrategy(exchange="no_exchange", timeout=5).exchange, NoExchange)
