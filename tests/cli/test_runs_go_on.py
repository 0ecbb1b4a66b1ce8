"""A run folder used twice, and runs that go on from a checkpoint: what is counted, kept and evaluated."""

import json
from pathlib import Path

import pytest
import torch
from cli.tiny_graph import TINY, write_tiny_graph
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gnnscale import events
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.main import main
from lightning_gnnscale.cli.run_folder import EarlierBest, best_checkpoint, earlier_best
from tests.says import said


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_graph(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny_graph()


def train(folder: str, *words: str) -> dict:
    main(["train", *TINY, f"hydra.run.dir={folder}", *words])
    return json.loads(Path(folder, "summary.json").read_text())


def last_stages(folder: str) -> dict[str, float]:
    log = events.read_log(Path(folder, "events.jsonl"))
    return {event["stage"]: event["seconds"] for event in log if event["event"] == "stage"}


def with_best_score(path: Path, score: float) -> None:
    """Let a checkpoint of a run say that the best one had another score."""
    saved = torch.load(path, weights_only=False)
    key = next(key for key in saved["callbacks"] if key.startswith("ModelCheckpoint"))
    saved["callbacks"][key]["best_model_score"] = torch.tensor(score)
    torch.save(saved, path)


def test_a_run_folder_used_twice_is_summed_up_by_its_last_run(capsys):
    first = train("run", "trainer.max_epochs=2")
    metrics = Path("run/metrics/metrics.csv").read_text()
    second = train("run", "trainer.max_epochs=1", "test=false")
    seconds = last_stages("run")
    assert {row["stage"]: row["seconds"] for row in second["stages"]} == {
        stage: seconds[stage] for stage in ("load", "train")
    }
    assert second["facts"]["epochs"] == 1
    assert json.loads(Path("run/earlier/1/summary.json").read_text()) == first
    assert Path("run/earlier/1/metrics.csv").read_text() == metrics
    resumed = train("run", "trainer.max_epochs=3", "resume=run/checkpoints/last.ckpt", "test=false")
    assert (resumed["epochs"], resumed["facts"]["epochs of this run"]) == (3, 1)
    assert resumed["facts"]["goes on from"].endswith("last.ckpt (all other figures are of this run alone)")
    assert {path.name for path in Path("run/earlier").iterdir()} == {"1", "2"}
    assert "will be deleted" not in capsys.readouterr().err


@pytest.mark.sweep
def test_partition_counts_the_stages_of_its_last_run():
    words = ["dataset=files", "dataset.edges=edges.npy", "num_parts=2", "hydra.run.dir=run"]
    for _ in range(2):
        main(["partition", *words])
    stages = json.loads(Path("run/run.json").read_text())["stages"]
    assert [row["stage"] for row in stages] == ["load"]


@pytest.mark.sweep
def test_the_best_of_the_run_gone_on_from_is_evaluated_where_it_is_better():
    train("a", "trainer.max_epochs=1", "test=false")
    best = next(str(path.resolve()) for path in Path("a/checkpoints").glob("best-*.ckpt"))
    with_best_score(Path("a/checkpoints/last.ckpt"), 2.0)
    words = ["trainer.max_epochs=2", "resume=a/checkpoints/last.ckpt"]
    assert train("b", *words)["facts"]["evaluated"].startswith(f"{best} (val_acc 2.0000), of an earlier run, is better")
    # The next run knows of it, too.
    words = ["trainer.max_epochs=3", "resume=b/checkpoints/last.ckpt"]
    assert best in train("c", *words)["facts"]["evaluated"]
    Path(best).unlink()
    words = ["trainer.max_epochs=4", "resume=c/checkpoints/last.ckpt"]
    assert train("d", *words)["facts"]["evaluated"].endswith("is better, but the file is gone")
    with_best_score(Path("a/checkpoints/last.ckpt"), -1.0)
    assert "evaluated" not in train("e", "trainer.max_epochs=2", "resume=a/checkpoints/last.ckpt")["facts"]


@pytest.mark.parametrize(("mode", "expected"), [("max", "old"), ("min", "own")])
def test_scores_compare_by_their_mode(tmp_path, mode, expected):
    checkpoint = ModelCheckpoint(monitor="val_loss", mode=mode)
    states = {}
    for name, score in (("own", 0.5), ("old", 0.75)):
        states[name] = str(tmp_path / f"{name}.ckpt")
        state = {"best_model_path": states[name], "best_model_score": torch.tensor(score)}
        content = {"state_dict": {}, "callbacks": {checkpoint.state_key: state}, "pytorch-lightning_version": "2.6.0"}
        torch.save(content, states[name])
    earlier = earlier_best(states["old"], checkpoint)
    assert (earlier.path, earlier.score) == (states["old"], 0.75)
    checkpoint.best_model_path = states["own"]
    assert best_checkpoint(checkpoint, earlier)[0] == states[expected]
    assert best_checkpoint(checkpoint, None) == (states["own"], "")
    assert best_checkpoint(checkpoint, EarlierBest(states["own"], 0.5)) == (states["own"], "")


@pytest.mark.parametrize(("mode", "expected"), [("max", "first.ckpt"), ("min", "own.ckpt")])
def test_a_run_gone_on_from_twice_knows_of_the_first_one(tmp_path, mode, expected):
    checkpoint = ModelCheckpoint(monitor="val_loss", mode=mode)
    own = {"best_model_path": "own.ckpt", "best_model_score": torch.tensor(0.5)}
    first = {EarlierBest.__qualname__: {"path": "first.ckpt", "score": 0.75}}
    content = {"state_dict": {}, "callbacks": {checkpoint.state_key: own} | first, "pytorch-lightning_version": "2.6.0"}
    torch.save(content, tmp_path / "last.ckpt")
    assert earlier_best(str(tmp_path / "last.ckpt"), checkpoint).path == expected


def test_what_is_no_checkpoint_is_named(tmp_path):
    torch.save({"weights": 1}, tmp_path / "x.ckpt")
    with pytest.raises(UsageError, match=said("resume x.ckpt")):
        earlier_best(str(tmp_path / "x.ckpt"), ModelCheckpoint(monitor="val_acc"))
    with pytest.raises(UsageError, match=said("x.ckpt checkpoint Lightning")):
        earlier_best(str(tmp_path / "x.ckpt"), None)
    assert earlier_best(None, ModelCheckpoint(monitor="val_acc")) is None
