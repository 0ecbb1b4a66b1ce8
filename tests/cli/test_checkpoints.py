"""`gnnscale train` and its checkpoints: which is the last, what resume= refuses, and that nothing of a file is run."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from cli.tiny_graph import TINY, write_tiny_graph

from lightning_gnnscale.cli.main import main
from lightning_gnnscale.model.checkpoint_file import read_checkpoint

LAST = Path("run/checkpoints/last.ckpt")


class Touch:
    """What unpickling would run."""

    def __reduce__(self):
        return os.mkdir, ("trap",)


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_graph(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny_graph()


def train(folder: str, *words: str) -> dict:
    main(["train", *TINY, f"hydra.run.dir={folder}", *words])
    return json.loads(Path(folder, "summary.json").read_text())


def refused(capsys, *words: str) -> str:
    """Return the one line with which the command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["train", *TINY, *words])
    assert stopped.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("gnnscale: warning")]
    assert len(lines) == 1, lines
    return lines[0]


def test_the_last_checkpoint_is_of_the_last_epoch_where_nothing_improves():
    words = [
        "callbacks=early_stopping",
        "callbacks.early_stopping.patience=3",
        "model.lr=1e-12",
        "trainer.max_epochs=9",
    ]
    assert train("run", *words)["facts"]["epochs"] == 4  # the first, and three that were no better
    assert read_checkpoint(LAST)["epoch"] == 3
    best = next(iter(LAST.parent.glob("best-*.ckpt")))
    assert best.name.startswith("best-step") and read_checkpoint(best)["epoch"] == 0


@pytest.mark.sweep
def test_the_last_checkpoint_is_of_the_last_epoch_where_few_are_validated():
    train("run", "trainer.max_epochs=3", "trainer.check_val_every_n_epoch=2", "test=false")
    assert read_checkpoint(LAST)["epoch"] == 2
    assert train("run", "trainer.max_epochs=4", f"resume={LAST}")["facts"]["epochs of this run"] == 1
    assert sorted(path.name for path in LAST.parent.glob("last*")) == ["last.ckpt"]
    assert read_checkpoint(LAST)["epoch"] == 3


@pytest.mark.sweep
def test_a_second_run_in_the_folder_leaves_the_first_ones_last():
    train("run", "trainer.max_epochs=2", "test=false")
    first = LAST.read_bytes()
    train("run", "trainer.max_epochs=1", "test=false")
    assert LAST.read_bytes() == first
    assert read_checkpoint(LAST.with_name("last-v1.ckpt"))["epoch"] == 0


def test_what_resume_cannot_go_on_from_is_one_line(capsys):
    train("run", "trainer.max_epochs=1", "test=false")
    best = next(iter(LAST.parent.glob("best-*.ckpt"))).name
    raw = LAST.read_bytes()
    assert "resume=run/metrics: there is no checkpoint in run/metrics" in refused(capsys, "resume=run/metrics")
    assert "resume: none.ckpt: no such checkpoint; give a checkpoint that a run left" in refused(
        capsys, "resume=none.ckpt"
    )
    assert "model than this NodeClassifier (size mismatch for " in refused(
        capsys, f"resume={LAST}", "model.backbone.hidden_channels=5", "trainer.max_epochs=2"
    )
    for content, told in (
        (b"", "is empty"),
        (b"epoch,loss\n0,1.0\n", "is no checkpoint of Lightning"),
        (raw[: len(raw) // 2], "is damaged or cut off"),
        (raw[:2000] + bytes([raw[2000] ^ 1]) + raw[2001:], "is damaged"),
    ):
        LAST.write_bytes(content)
        line = refused(capsys, f"resume={LAST}")
        assert f"gnnscale: resume: {LAST} {told}" in line and f"beside it: {best}" in line


def test_resume_runs_nothing_of_a_checkpoint(capsys):
    train("run", "trainer.max_epochs=1", "test=false")
    saved = read_checkpoint(LAST)
    torch.save(saved | {"hyper_parameters": Touch()}, LAST)
    for words in ([], ["callbacks.checkpoint.monitor=null"], ["trainer.devices=2"]):
        line = refused(capsys, f"resume={LAST}", "trainer.max_epochs=2", *words)
        assert "holds posix.mkdir" in line and "nothing of it was run" in line
    assert not Path("trap").exists()


@pytest.mark.sweep
def test_evaluating_the_best_checkpoint_runs_nothing_of_it(capsys):
    train("a", "trainer.max_epochs=1", "test=false")
    best = next(iter(Path("a/checkpoints").glob("best-*.ckpt")))
    saved = read_checkpoint("a/checkpoints/last.ckpt")
    key = next(key for key in saved["callbacks"] if key.startswith("ModelCheckpoint"))
    saved["callbacks"][key]["best_model_score"] = torch.tensor(2.0)
    torch.save(saved, "a/checkpoints/last.ckpt")
    torch.save(read_checkpoint(best) | {"hyper_parameters": Touch()}, best)
    line = refused(capsys, "resume=a/checkpoints/last.ckpt", "trainer.max_epochs=2", "hydra.run.dir=b")
    assert f"{best.name} holds posix.mkdir" in line
    assert not Path("trap").exists()
    shutil.copy("a/checkpoints/last.ckpt", best)
    train("c", "resume=a/checkpoints/last.ckpt", "trainer.max_epochs=2")
