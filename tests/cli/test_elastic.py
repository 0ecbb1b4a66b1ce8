"""`elastic=true`: what torchrun has started is what trains, from the run's last checkpoint on."""

import os
from types import SimpleNamespace

import lightning as L
import pytest
from omegaconf import OmegaConf

import lightning_gnnscale as gs
from lightning_gnnscale.cli.elastic import is_elastic, save_within_epochs, take_what_is_there
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.main import shared_run_folder
from tests.says import said


def started(monkeypatch, run_id="mine", world_size=6, local=2, port="29501"):
    words = {"TORCHELASTIC_RUN_ID": run_id, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local, "MASTER_PORT": port}
    for name, value in words.items():
        monkeypatch.setenv(name, str(value))


def config(**given):
    made = OmegaConf.create({"trainer": {"devices": 4}, "resume": None, "elastic": True, "save_steps": 3} | given)
    OmegaConf.set_struct(made, True)
    return made


def test_processes_are_those_that_are_left_and_go_on_from_the_latest_checkpoint(monkeypatch, tmp_path):
    started(monkeypatch)
    first = config()
    take_what_is_there(first, tmp_path)
    assert first.trainer == {"devices": 2, "num_nodes": 3} and first.resume is None
    (tmp_path / "checkpoints").mkdir()
    for age, name in enumerate(("best-step9.ckpt", "last-within.ckpt", "last.ckpt")):
        path = tmp_path / "checkpoints" / name
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    started(monkeypatch, world_size=2)
    again = config()
    take_what_is_there(again, tmp_path)
    assert again.trainer == {"devices": 2, "num_nodes": 1}
    assert again.resume == str(tmp_path / "checkpoints" / "last-within.ckpt")


def test_a_run_that_is_started_again_has_its_folder_at_any_port(monkeypatch):
    started(monkeypatch)
    words = ["recipe=demo", "elastic=true"]
    before = shared_run_folder(words)
    started(monkeypatch, port="29502")
    assert is_elastic(words) and shared_run_folder(words) == before
    assert not is_elastic([*words, "elastic=false"]) and shared_run_folder(["recipe=demo"]) != before


def test_what_cannot_be_found_again_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(UsageError, match=said("elastic=true torchrun --rdzv-id=ID")):
        take_what_is_there(config(), tmp_path)
    started(monkeypatch, run_id="none")
    with pytest.raises(UsageError, match=said("elastic=true --rdzv-id=ID")):
        take_what_is_there(config(), tmp_path)
    started(monkeypatch, world_size=5)
    with pytest.raises(UsageError, match=said("elastic=true 5 2 --nproc-per-node")):
        take_what_is_there(config(), tmp_path)
    started(monkeypatch)
    with pytest.raises(ValueError, match=said("save_steps 0")):
        take_what_is_there(config(save_steps=0), tmp_path)


def test_it_saves_within_epochs_under_gradient_averaging(tmp_path):
    trainer = SimpleNamespace(strategy=gs.GNNScaleStrategy(weights="gradient_averaging"), callbacks=[])
    save_within_epochs(trainer, tmp_path, 3)
    (saving,) = trainer.callbacks
    assert isinstance(saving, L.pytorch.callbacks.ModelCheckpoint) and saving._every_n_train_steps == 3
    assert saving.format_checkpoint_name({}) == str(tmp_path / "checkpoints" / "last-within.ckpt")
    trainer = SimpleNamespace(strategy=gs.GNNScaleStrategy(weights="model_averaging"), callbacks=[])
    with pytest.raises(UsageError, match=said("elastic=true ModelAveraging strategy/weights=gradient_averaging")):
        save_within_epochs(trainer, tmp_path, 3)
