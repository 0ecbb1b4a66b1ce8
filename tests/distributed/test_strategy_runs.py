"""The strategy with Lightning's own features in real processes: resume, callbacks, evaluation, lost ranks."""

import csv
import functools
import os
import signal

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from partition_stand_ins import Classifier, PartsData, make_trainer, train
from processes import launch

from lightning_gnnscale import events
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.strategy import GNNScaleStrategy, GradientAveraging, ModelAveraging
from lightning_gnnscale.strategy.gnnscale import RoundCallback
from tests.tiers import first

RESUMES = {
    "interval 1": {"weights": {}, "from": 1},
    "interval 2, inside a round": {"weights": {"every_n_epochs": 2}, "from": 0},
    "interval 2, saved after validation": {"weights": {"every_n_epochs": 2}, "from": 2, "at_train_end": False},
    "shared": {"weights": {"optimizer_state": "shared"}, "from": 1},
    "reset": {"weights": {"optimizer_state": "reset", "every_n_epochs": 2}, "from": 2},
    "control variates, inside a round": {"weights": {"control_variates": True, "every_n_epochs": 2}, "from": 2},
}
NUM_EPOCHS = 4


def resumed_model():
    return Classifier(scheduler="step")


def run_resume(folder, name, case):
    options = {"max_epochs": NUM_EPOCHS, "accumulate_grad_batches": 2}
    kept = ModelCheckpoint(
        dirpath=folder / name,
        filename="{epoch}",
        save_top_k=-1,
        every_n_epochs=1,
        save_on_train_epoch_end=case.get("at_train_end", True),
    )
    weights = case["weights"]
    whole = train(folder, ModelAveraging(**weights), resumed_model(), callbacks=[kept], **options)
    path = folder / name / f"epoch={case['from']}.ckpt"
    resumed = train(folder, ModelAveraging(**weights), resumed_model(), ckpt_path=path, **options)
    return whole, resumed


def run_resumes(folder):
    return {name: run_resume(folder, name, case) for name, case in RESUMES.items()}


def resume_elsewhere(folder, name, path):
    options = {"max_epochs": NUM_EPOCHS, "accumulate_grad_batches": 2}
    return train(folder, ModelAveraging(**RESUMES[name]["weights"]), resumed_model(), ckpt_path=path, **options)


@pytest.fixture(scope="module")
def resumes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumes")
    return folder, functools.cache(lambda size: launch(size, run_resumes, folder / str(size)))


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", list(RESUMES))
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(resumes, world_size, name):
    for result in resumes[1](world_size):
        whole, resumed = result[name]
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_a_checkpoint_of_two_processes_resumes_on_one(resumes, tmp_path):
    folder, results = resumes
    name = "interval 2, inside a round"
    path = folder / "2" / name / "epoch=0.ckpt"
    resumed = launch(1, resume_elsewhere, tmp_path, name, path)[0]
    whole = results(2)[0][name][0]
    assert max((resumed[key].double() - whole[key].double()).abs().max() for key in whole) <= 1e-6


class Recorder(L.Callback):
    """Keeps the weights that validation sees."""

    def __init__(self):
        self.seen = {}

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.seen[trainer.current_epoch] = {k: v.clone() for k, v in pl_module.state_dict().items()}


def run_with_callbacks(folder):
    events.open_log(folder / "events.jsonl")
    model, recorder = Classifier(lr=0.05), Recorder()
    best = ModelCheckpoint(dirpath=folder / "best", monitor="val_loss", filename="{epoch}")
    stopping = EarlyStopping("val_loss", min_delta=10.0, patience=2)
    data = PartsData(sizes=(8, 6, 20, 3))  # 3 against 7 batches on two ranks
    trainer = make_trainer(
        folder,
        ModelAveraging(every_n_epochs=2),
        max_epochs=9,
        callbacks=[best, stopping, recorder, LearningRateMonitor()],
        logger=CSVLogger(folder / "csv"),
        num_sanity_val_steps=1,
        profiler="simple",
        log_every_n_steps=1,
        precision="bf16-mixed",
    )
    trainer.fit(model, datamodule=data)
    after_fit = {k: v.clone() for k, v in model.state_dict().items()}
    trainer.validate(model, datamodule=data, verbose=False)
    trainer.save_checkpoint(folder / "last.ckpt")
    trainer.fit_loop.max_epochs = 5
    trainer.fit(model, datamodule=data)
    events.open_log(None)
    return {
        "epochs": trainer.current_epoch,
        "best": best.best_model_path,
        "seen": recorder.seen,
        "after_fit": after_fit,
        "inserted": [i for i, callback in enumerate(trainer.callbacks) if isinstance(callback, RoundCallback)],
        "steps": trainer.global_step,
    }


def test_checkpoints_early_stopping_loggers_and_profiler(tmp_path):
    results = launch(2, run_with_callbacks, tmp_path)
    for result in results:
        assert result["inserted"] == [0]
        # min_delta=10 lets no epoch count as better than the first: patience ends the run after the third.
        assert list(result["seen"])[:3] == [0, 1, 2]
        assert result["best"] == results[0]["best"]
        best_epoch = int(result["best"].split("epoch=")[1].split(".")[0])
        saved = torch.load(result["best"], weights_only=True)["state_dict"]
        assert all(torch.equal(saved[key], result["seen"][best_epoch][key]) for key in saved)
        assert all(torch.equal(result["seen"][2][key], result["after_fit"][key]) for key in saved)
        last = torch.load(tmp_path / "last.ckpt", weights_only=True)
        assert all(torch.equal(last["state_dict"][key], result["after_fit"][key]) for key in saved)
        assert sorted(last["gnnscale"]["optimizers"]) == [0, 1, 2, 3]
    assert results[0]["seen"].keys() == results[1]["seen"].keys()
    assert results[0]["steps"] == results[1]["steps"]
    with open(next((tmp_path / "csv").rglob("metrics.csv"))) as file:
        rows = list(csv.DictReader(file))
    assert [float(row["passes"]) for row in rows if row.get("passes")][:3] == [1.0, 2.0, 3.0]
    assert any(float(row["average_ms"]) > 0 for row in rows if row.get("average_ms"))
    averages = [event for event in events.read_log(tmp_path / "events.jsonl") if event["event"] == "average"]
    values = sum(tensor.numel() for tensor in results[0]["after_fit"].values())
    rounds = [event for event in averages if event["purpose"] == "round"]
    assert {event["rank"] for event in rounds} == {0, 1}
    assert all(event["bytes"] == 8 * (1 + values) and event["seconds"] > 0 for event in rounds)
    assert [event["epoch"] for event in averages if event["rank"] == 0][:3] == [0, 1, 2]


def evaluate_only(folder):
    """Evaluate a model that differs between ranks: rank 0's counts."""
    results = {}
    for weights in (ModelAveraging(), GradientAveraging()):
        model, data = Classifier(), PartsData()
        if torch.distributed.get_rank() == 1:
            torch.nn.init.zeros_(model.net[0].weight)
        trainer = make_trainer(folder, weights)
        results[type(weights).__name__] = (
            trainer.validate(model, datamodule=data, verbose=False),
            trainer.test(model, datamodule=data, verbose=False),
            trainer.predict(model, datamodule=data)[0],
        )
    return results


def test_evaluation_without_training(tmp_path):
    first, second = launch(2, evaluate_only, tmp_path)
    for name in first:
        assert first[name][0] == second[name][0] and first[name][1] == second[name][1]
        assert torch.equal(first[name][2], second[name][2])


class Dying(Classifier):
    def training_step(self, batch, batch_idx):
        if self.trainer.current_epoch == 1 and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def train_and_die(folder, weights):
    try:
        train(folder, weights, Dying(batch_norm=False), PartsData(sizes=(8, 8)), limit_val_batches=0)
    except StrategyError as error:
        # The process group is broken: leave as a user's script would, without the barrier.
        torch.save(("ok", str(error)), folder / "rank0.pt")
        os._exit(0)


@first(1)
@pytest.mark.parametrize("weights", [ModelAveraging(), GradientAveraging()], ids=["models", "gradients"])
def test_a_killed_rank_ends_the_others_with_one_clear_error(tmp_path, weights):
    message = launch(2, train_and_die, tmp_path, weights, killed=(1,), limit_s=40)[0]
    assert "\n" not in message
    assert message.startswith("rank 0: ") and "was lost" in message and "last checkpoint" in message
    assert "/gloo/" not in message and "typically" not in message
    assert ("averaging gradients" in message) == isinstance(weights, GradientAveraging)


def train_names(folder):
    kept = {}
    for given in ({"strategy": "gnnscale"}, {"strategy": GNNScaleStrategy(weights="gradient_averaging")}):
        model = Classifier()
        make_trainer(folder, **given).fit(model, datamodule=PartsData())
        kept[str(given["strategy"])[:8]] = model.state_dict()["net.0.weight"].clone()
    return list(kept.values())


def test_the_strategy_is_known_by_name(tmp_path):
    by_name, by_policy_name = launch(1, train_names, tmp_path)[0]
    assert torch.equal(by_name, by_policy_name)
