"""`elastic=true`: what torchrun has started is what trains, from the run's last checkpoint on."""

import os
import re
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

import lightning_gnnscale as gs
from lightning_gnnscale.cli.commands import locate
from lightning_gnnscale.cli.elastic import planned, save_within_epochs, take_what_is_there
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.main import main, shared_run_folder
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


RECIPE = """
defaults: [/train, _self_]
name: mine
elastic: true
save_steps: 7
"""


def folder_of(words):
    """The folder of a run of `gnnscale train`, as its words and its recipe have it."""
    config = locate("train", words).compose()
    ((_, _, told),) = [word.partition("=") for word in shared_run_folder(words)]
    return OmegaConf.create(config | {"folder": told.strip('"')}).folder


def test_a_run_that_is_started_again_has_its_folder_at_any_port(monkeypatch, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPE)
    started(monkeypatch)
    elastic = ["recipe=demo", "elastic=true"], [f"recipe={recipe}"]
    plain = ["recipe=demo"], [f"recipe={recipe}", "elastic=false"]
    before, before_plain = list(map(folder_of, elastic)), list(map(folder_of, plain))
    started(monkeypatch, port="29502")
    assert list(map(folder_of, elastic)) == before
    assert all(now != then for now, then in zip(map(folder_of, plain), before_plain, strict=True))


def test_the_plan_tells_of_what_a_recipe_asks_for(tmp_path):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    words = [f"recipe={tmp_path / 'mine.yaml'}", "strategy.logical_ranks=4"]
    made = OmegaConf.create(locate("train", words).compose())
    assert re.search(said("4 at most a checkpoint every 7 steps"), planned(made, gs.GradientAveraging()))
    made.strategy.logical_ranks = None
    assert re.search(said("strategy.logical_ranks 7"), planned(made, gs.GradientAveraging()))
    with pytest.raises(UsageError, match=said("elastic=true ModelAveraging")):
        planned(made, gs.ModelAveraging())


@pytest.mark.sweep  # the command line imports all that trains
def test_a_recipe_asks_for_it_and_the_plan_tells_of_it(monkeypatch, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(SystemExit):
        main(["train", "recipe=mine.yaml"])
    assert re.search(said("elastic=true torchrun"), capsys.readouterr().err)
    main(["plan", "recipe=mine.yaml", "strategy.logical_ranks=4"])
    assert re.search(said("elastic 4 at most a checkpoint every 7 steps"), capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main(["plan", "recipe=mine.yaml", "strategy/weights=model_averaging"])
    assert re.search(said("elastic=true ModelAveraging"), capsys.readouterr().err)
    with pytest.raises(SystemExit):
        main(["train", "save_steps=5"])
    assert re.search(said("save_steps=5 elastic=true"), capsys.readouterr().err)
    assert not list(tmp_path.rglob("*.ckpt"))


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
    saved = []
    trainer = SimpleNamespace(strategy=gs.GNNScaleStrategy(weights="gradient_averaging"), callbacks=[], global_step=4)
    trainer.save_checkpoint = lambda path: saved.append((path.name, trainer.global_step, trainer.is_last_batch))
    save_within_epochs(trainer, tmp_path, 3)
    (saving,) = trainer.callbacks
    saving.on_train_start(trainer, None)
    for step, is_last in ((4, False), (5, True), (6, False), (6, False), (8, False), (9, True)):
        trainer.global_step, trainer.is_last_batch = step, is_last
        saving.on_train_batch_end(trainer, None, None, None, 0)
        if is_last:
            saved.append("end of an epoch")
            saving.on_train_epoch_end(trainer, None)
    within = "last-within.ckpt"
    assert saved == ["end of an epoch", (within, 6, False), "end of an epoch", (within, 9, True)]
    trainer = SimpleNamespace(strategy=gs.GNNScaleStrategy(weights="model_averaging"), callbacks=[])
    with pytest.raises(UsageError, match=said("elastic=true ModelAveraging strategy/weights=gradient_averaging")):
        save_within_epochs(trainer, tmp_path, 3)
