"""The table at the end of a sweep: a row a job, failed ones too, and only what was swept over."""

import csv
import json
from pathlib import Path

from cli.tiny_graph import TINY, write_tiny_graph
from pytest import raises

from lightning_gnnscale.cli.main import main
from lightning_gnnscale.cli.report import end_sweep, read_jobs


def job(folder: Path, name: str, words: list[str], acc: float | None) -> None:
    (folder / name / ".hydra").mkdir(parents=True)
    (folder / name / ".hydra" / "overrides.yaml").write_text(json.dumps(words))
    if acc is None:
        (folder / name / "failed.txt").write_text("model.lr must be above 0\n")
    else:
        summary = {"metrics": {"test_acc": acc}, "epochs": 3, "training_peak_bytes": 1 << 20}
        summary["stages"] = [{"stage": "train", "seconds": 2.0, "peak_bytes": 1 << 20}]
        (folder / name / "summary.json").write_text(json.dumps(summary))


def test_jobs_are_read_in_order_with_what_differs(tmp_path, capsys):
    for number in range(11):
        job(tmp_path, str(number), [f"++model.lr={number}", "num_parts=2"], None if number == 3 else number / 20)
    (tmp_path / "10" / "summary.json").unlink()
    rows = read_jobs(tmp_path)
    assert [row["job"] for row in rows] == [str(number) for number in range(11)]
    assert rows[4]["overrides"] == {"model.lr": "4"} and rows[4]["metrics"] == {"test_acc": 0.2}
    assert rows[3]["failed"] == "model.lr must be above 0" and rows[10]["failed"] == "no summary: it was ended"
    end_sweep(tmp_path)
    out = capsys.readouterr().out
    assert "model.lr" in out and "0.4500" in out and "job 3 failed: model.lr must be above 0" in out
    with open(tmp_path / "sweep.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["test_acc"] for row in table][:4] == ["0.0", "0.05", "0.1", ""] and table[9]["train_s"] == "2.0"


def test_a_sweep_ends_in_its_table_though_a_job_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tiny_graph()
    words = [*TINY, "trainer.max_epochs=1", "model.lr=0.01,-1", "hydra.sweep.dir=sweep", "--multirun"]
    with raises(SystemExit) as stop:
        main(["train", *words])
    told = capsys.readouterr()
    assert stop.value.code == 2 and "model.lr must be a number above 0, got -1" in told.err
    assert "job 1 failed: model.lr must be a number above 0, got -1" in told.out
    first, second = read_jobs(Path("sweep"))
    assert first["metrics"]["test_acc"] >= 0 and not first["failed"] and second["failed"]
    assert Path("sweep/sweep.csv").is_file()
