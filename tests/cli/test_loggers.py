"""logger=tensorboard, mlflow and wandb: the config, the curves and the test metrics are in each of them."""

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from cli.refusals import refused
from cli.tiny_graph import TINY, write_tiny_graph
from own_process import gnnscale

from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.cli.loggers import log_results
from lightning_gnnscale.cli.main import _stage_lines, main
from lightning_gnnscale.report import terminal

WORDS = [*TINY, "trainer.max_epochs=2", "hydra.run.dir=run"]


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_graph(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    write_tiny_graph()


def metrics() -> dict:
    return json.loads(Path("run/summary.json").read_text())["metrics"]


def test_a_line_a_stage_and_an_epoch_where_no_bar_is_sampled(monkeypatch, capsys):
    every_second = ["trainer.check_val_every_n_epoch=2", "callbacks.checkpoint=null", "hydra.run.dir=lines"]
    words = [*(word for word in WORDS if "progress_bar" not in word), *every_second]
    main(["train", *words])
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\[\d\d:\d\d:\d\d\] ", line)]
    told = [re.sub(r"\d+\.\d+", "#", line[11:]) for line in lines]
    epochs = ["epoch 1 of 2: train_loss #, # s", "epoch 2 of 2: train_loss #, val_acc #, val_loss #, # s"]
    assert told == ["load", "partition", "partition store", "train", *epochs, "evaluate"]
    main(["train", *words, "trainer.enable_progress_bar=false", "test=false"])
    assert not re.search(r"^\[\d\d:", capsys.readouterr().out, re.MULTILINE)


def test_a_terminal_shows_bars_and_no_lines(monkeypatch):
    config = compose_config("train", [])
    assert isinstance(_stage_lines("plan", config), nullcontext)
    monkeypatch.setattr(terminal, "is_terminal", lambda: False)
    assert not isinstance(_stage_lines("train", config), nullcontext)
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    assert isinstance(_stage_lines("train", config), nullcontext)


@pytest.mark.sweep
def test_tensorboard():
    pytest.importorskip("tensorboard", reason="the extra [tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    main(["train", *WORDS, "logger=tensorboard"])
    events = EventAccumulator("run/tensorboard").Reload()
    assert events.Scalars("test_acc")[-1].value == pytest.approx(metrics()["test_acc"])
    assert len(events.Scalars("val_acc")) == 2
    assert "hidden_channels: 4" in Path("run/tensorboard/hparams.yaml").read_text()
    assert Path("run/metrics/metrics.csv").is_file()


@pytest.mark.sweep
def test_mlflow_of_two_processes():
    """The second process is forked: the parent's run is the one that it logs to."""
    mlflow = pytest.importorskip("mlflow", reason="the extra [mlflow] is not installed")
    words = [word for word in WORDS if not word.startswith("trainer.devices")]
    done = gnnscale(Path.cwd(), "train", *words, "trainer.devices=2", "logger=mlflow")
    assert done.returncode == 0, done.stderr
    client = mlflow.MlflowClient(f"sqlite:///{Path('runs/mlflow.db').absolute()}")
    found = client.get_experiment_by_name(Path.cwd().name)
    (run,) = client.search_runs([found.experiment_id])
    assert run.data.metrics["test_acc"] == pytest.approx(metrics()["test_acc"])
    assert "val_acc" in run.data.metrics and run.data.params["model/backbone/hidden_channels"] == "4"


@pytest.mark.sweep
def test_wandb_offline():
    pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    done = gnnscale(Path.cwd(), "train", *WORDS, "logger=wandb", "logger.wandb.offline=true")
    assert done.returncode == 0, done.stderr
    (log,) = Path("run/wandb").glob("offline-run-*/*.wandb")
    content = log.read_bytes()
    for name in (b"test_acc", b"val_acc", b"hidden_channels"):
        assert name in content


def test_results_are_appended_to_the_metrics_file(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    folder = tmp_path / "metrics"
    folder.mkdir()
    (folder / "metrics.csv").write_text("epoch,step,val_acc\n0,3,0.5\n1,7,0.6\n")
    log_results([CSVLogger(tmp_path, name="metrics", version="")], {"test_acc": 0.25, "best_val_acc": 0.6}, tmp_path)
    assert (folder / "metrics.csv").read_text().splitlines() == [
        "epoch,step,val_acc,test_acc",
        "0,3,0.5,",
        "1,7,0.6,",
        "1,7,,0.25",
    ]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ["logger=wandbb"],
            "logger=wandbb: no such choice (did you mean wandb?); there are csv, mlflow, tensorboard, wandb",
        ),
        (["logger=mlflow", "logger.mlflow.run=x"], "logger.mlflow.run is not a setting (did you mean run_id?)"),
        (["logger=tensorboard", "trainer.logger=false"], "trainer.logger and logger= both choose loggers"),
    ],
)
def test_wrong_words_are_one_line(capsys, words, part):
    assert part in refused(capsys, "train", *WORDS, *words)


def test_a_package_that_is_missing_is_named(capsys, monkeypatch):
    import lightning.pytorch.loggers.wandb as module

    class Missing:
        def __bool__(self):
            return False

        def __str__(self):
            return "No module named 'wandb'"

    monkeypatch.setattr(module, "_WANDB_AVAILABLE", Missing())
    line = refused(capsys, "train", *WORDS, "logger=wandb")
    assert "logger=wandb needs a package that is missing" in line and "lightning-gnnscale[wandb]" in line
    assert not Path("run").exists()  # nothing has begun
