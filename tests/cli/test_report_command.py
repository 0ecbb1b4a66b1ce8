"""`gnnscale report` as a user types it: of one run, of several, of a sweep, and of what is none."""

import pytest
from cli.refusals import refused

from lightning_gnnscale.cli.main import main
from tests.report.recorded_runs import write_run


def reported(capsys, *words: str) -> str:
    main(["report", *words])
    return capsys.readouterr().out.strip()


def test_the_report_of_a_run_lies_in_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "2026-01-31, a=b")
    assert reported(capsys, "runs/2026-01-31, a=b") == str(tmp_path / "runs/2026-01-31, a=b/report.html")
    page = (tmp_path / "runs" / "2026-01-31, a=b" / "report.html").read_text()
    assert "0.8125" in page and "Plotly" in page
    assert not list(tmp_path.rglob("*.tmp")) and not (tmp_path / "outputs").exists()


@pytest.mark.sweep
def test_several_runs_and_the_runs_of_a_sweep_share_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "alone")
    for number in (0, 2, 10):
        write_run(tmp_path / "sweep" / str(number))
    assert reported(capsys, "alone", "sweep", "output=both.html") == str(tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    places = [page.index(f">small {name}<") for name in ("alone", "0", "2", "10")]
    assert places == sorted(places)
    assert reported(capsys, "sweep") == str(tmp_path / "report.html")
    assert "3 runs side by side" in (tmp_path / "report.html").read_text()


def test_a_folder_of_a_run_that_failed_at_once_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "good")
    (tmp_path / "runs" / "bad" / ".hydra").mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "events.jsonl").touch()
    main(["report", "runs/bad", "runs/good"])
    told = capsys.readouterr()
    assert told.out.strip() == str(tmp_path / "runs/good/report.html")
    assert told.err == "gnnscale: warning: runs/bad: left out, it holds no records of a run\n"
    assert "runs/bad: holds no events.jsonl" in refused(capsys, "report", "runs/bad")
    assert "runs/gud: there is no such folder" in refused(capsys, "report", "runs/good", "runs/gud")
    said = (
        "runs/bad is the folder of a run that ended before it trained; the words of its command are in runs/bad/.hydra/"
    )
    assert said in refused(capsys, "inspect", "runs/bad")


def test_help_says_where_the_page_goes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["report", "--help"])
    assert "of several in the current folder" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["runs must name at least one run folder"]),
        (["none"], ["none: there is no such folder", "name the folder of a run"]),
        (["."], [".: holds no events.jsonl and no summary.json"]),
        (["run", "ouput=x"], ["ouput is not a setting", "output"]),
        (["run", "output=run/summary.json/x"], ["cannot be written", "output="]),
    ],
)
def test_what_cannot_be_reported_is_one_line(tmp_path, monkeypatch, capsys, words, parts):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    line = refused(capsys, "report", *words)
    for part in parts:
        assert part in line
