"""Seconds and money of an epoch by machines: a run tells what was predicted, and the plan counts by that run."""

import json
import re

import pytest

from lightning_gnnscale.cli.machines import batch_seconds, trained_seconds
from lightning_gnnscale.cli.main import main
from lightning_gnnscale.report.run_record import RunRecord

SMALL = ["dataset=synthetic", "dataset.num_nodes=2000", "dataset.num_edges=12000", "num_parts=4", "trainer.devices=1"]
SMALL += ["trainer.accelerator=cpu", "model.backbone.hidden_channels=16", "datamodule.batch_size=64"]
SMALL += ["strategy/weights=gradient_averaging", "datamodule.scope=graph", "partitioner=spring"]


def test_seconds_of_a_batch_are_those_of_the_training_thread_and_of_preparation():
    training = {"wait": 9.0, "forward": 1.0, "backward": 2.0, "other": 0.5, "average": 5.0, "sample": 0.25}
    event = {"training": training, "beside": {"sample": 0.5, "read": 0.25}, "counts": {"batches": 5}, "device": "cpu"}
    found = batch_seconds([event, event | {"disk_bytes": 100}])
    assert found.train_s == pytest.approx(0.7) and found.prepare_s == pytest.approx(0.2)
    assert found.disk_bytes == 10 and not found.on_gpu
    with pytest.raises(ValueError, match="no batches"):
        batch_seconds([event | {"counts": {}}])


def test_an_epoch_is_that_of_the_slowest_rank_without_validation():
    told = {"event": "epoch_times", "training": {"validation": 1.0, "save": 0.5}, "counts": {}, "beside": {}}
    epochs = [(1, 0, 9.0), (2, 0, 4.0), (2, 1, 5.0), (3, 0, 6.0), (3, 1, 5.5)]
    log = [told | {"epoch": epoch, "rank": rank, "seconds": seconds} for epoch, rank, seconds in epochs]
    assert trained_seconds(RunRecord("runs", log=log)) == pytest.approx(((5.0 - 1.5) + (6.0 - 1.5)) / 2)


@pytest.mark.sweep
def test_a_run_tells_what_was_predicted_and_the_plan_counts_by_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["train", *SMALL, "trainer.max_epochs=3", "machines.price_per_hour=2", "hydra.run.dir=run", "test=false"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    found = summary["machines"]
    assert found["seconds_from"] == "this run's batches"
    assert 0.3 < found["predicted"]["seconds"] / found["measured"]["seconds"] < 3
    assert found["predicted"]["sent_bytes"] == found["measured"]["sent_bytes"] == 0
    assert found["measured"]["price"] == pytest.approx(2 * found["measured"]["seconds"] / 3600)
    assert [(one["training"], one["preparing"]) for one in found["others"]] == [(2, 0)]
    assert "one machine more that trains" in (tmp_path / "run" / "report.html").read_text()
    capsys.readouterr()
    main(["plan", *SMALL, f"store={summary['store']}", "machines.run=run", "machines.most=3", "rows=owners"])
    told = capsys.readouterr().out
    rows = re.findall(r"^ (\d) +0 +([\d.]+) +\w+ +([\d.]+ \w+)", told, re.M)
    assert [int(one[0]) for one in rows] == [1, 2, 3]
    assert rows[0][2] == "0 B" and rows[2][2] != "0 B"
    assert "By those of run:" in told


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("machines.price_per_hour=-2", "machines.price_per_hour"),
        ("machines.cores=0", "machines.cores"),
        ("machines.run=nowhere", "nowhere: there is no such folder"),
    ],
)
@pytest.mark.sweep
def test_bad_values_are_one_line(tmp_path, monkeypatch, capsys, word, message):
    monkeypatch.chdir(tmp_path)
    main(["partition", *SMALL, "output=store"])
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *SMALL, "store=store", "machines.price_per_hour=1", word])
    assert message in capsys.readouterr().err
