"""The runner of benchmarks: how it goes on, what it measures again, its budget; and the tables of the presenter."""

import csv
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import psutil
import pytest
import yaml
from hydra.utils import get_object
from omegaconf import OmegaConf

from benchmarks import runner as bench
from benchmarks.present import LEFT, average, grouped, table
from benchmarks.runner import Case, RowFile, Runner, benchmark
from lightning_gnnscale.cli.typed import check_ranges
from tests.says import said


def read_rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


class Measured:
    """Cases that write down when they are measured."""

    def __init__(self):
        self.asked = []

    def case(self, name, error="", **key):
        def measure():
            self.asked.append(name)
            return {"value": len(self.asked), "error": error}

        return Case({"name": name, **key}, measure)


@pytest.fixture
def measured():
    return Measured()


def test_a_case_is_measured_once(tmp_path, measured):
    cases = [measured.case("a", settings="01"), measured.case("b", settings="01")]
    with Runner(tmp_path) as runner:
        rows = runner.rows(cases[:1])
    with Runner(tmp_path) as runner:
        assert runner.rows(cases) == [*rows, {"name": "b", "settings": "01", "value": 2, "error": ""}]
    assert measured.asked == ["a", "b"]
    with Runner(tmp_path) as runner:  # other settings are another case
        assert [row["value"] for row in runner.rows([measured.case("a", settings="02")])] == [3]
    written = read_rows(tmp_path / "rows.csv")
    assert [row["value"] for row in written] == ["1", "2", "3"]
    assert all(row["cpu"] and row["numpy"] for row in written)


def test_failed_cases_and_all_cases_are_measured_again_in_place(tmp_path, measured):
    cases = [measured.case("a"), measured.case("b", error="no memory")]
    for again in ("none", "failed", "all"):
        with Runner(tmp_path, again=again) as runner:
            rows = runner.rows(cases)
    assert measured.asked == ["a", "b", "b", "a", "b"]
    assert [(row["name"], row["value"]) for row in rows] == [("a", 4), ("b", 5)]
    assert [row["value"] for row in read_rows(tmp_path / "rows.csv")] == ["4", "5"]


def test_a_budget_that_is_spent_begins_no_case_and_says_how_to_go_on(tmp_path, measured, monkeypatch, capsys):
    clock = iter([0.0, 59.0, 61.0, 62.0])
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(clock))
    cases = [measured.case(name) for name in "abc"]
    with Runner(tmp_path, minutes=1) as runner:
        assert [row["name"] for row in runner.rows(cases)] == ["a"]
    said = capsys.readouterr().out
    assert "bench.minutes=1 are over, and 2 of 3 cases are left: the same command with hydra.run.dir=" in said
    monkeypatch.undo()
    with Runner(tmp_path, minutes=1) as runner:
        assert [row["name"] for row in runner.rows(cases)] == ["a", "b", "c"]
    assert measured.asked == ["a", "b", "c"]
    assert "are left" not in capsys.readouterr().out
    with Runner(tmp_path, minutes=0, again="all") as runner:  # what stands is shown
        assert len(runner.rows(cases)) == 3
    assert "3 of 3 cases are left: the same command with bench.again=none hydra.run.dir=" in capsys.readouterr().out


def test_contenders_are_one_case_that_is_done_when_all_have_rows(tmp_path):
    asked = []

    def case(*names):
        def measure():
            asked.append(names)
            return [{"way": name, "speed": 0.5} for name in names]

        return Case({"graph": "g"}, measure, [{"way": name} for name in names])

    with Runner(tmp_path) as runner:
        assert [row["way"] for row in runner.rows([case("a", "b")])] == ["a", "b"]
        assert [row["way"] for row in runner.rows([case("b")])] == ["b"]
        assert [row["way"] for row in runner.rows([case("b", "c")])] == ["b", "c"]
    assert asked == [("a", "b"), ("b", "c")]
    assert [row["way"] for row in read_rows(tmp_path / "rows.csv")] == ["a", "b", "c"]


def test_rows_of_an_earlier_version_gain_columns(tmp_path):
    (tmp_path / "rows.csv").write_text("name,value\na,1\nb,2\nc,")
    file = RowFile(tmp_path / "rows.csv")
    assert file.find({"name": "a"}) == [{"name": "a", "value": 1}]
    assert file.put({"name": "d"}, [{"value": 1.5, "more": True}]) == [{"name": "d", "value": 1.5, "more": True}]
    assert [(row["name"], row["value"], row["more"]) for row in RowFile(tmp_path / "rows.csv").rows] == [
        ("a", 1, None), ("b", 2, None), ("d", 1.5, True),
    ]  # fmt: skip


def test_any_rows_of_a_key_are_one_case_unless_one_was_cut_short(tmp_path):
    asked = []

    def case(name):
        return Case({"name": name}, lambda: asked.append(name) or [{"way": way} for way in "xyz"], contenders=None)

    with Runner(tmp_path) as runner:
        assert len(runner.rows([case("a"), case("b")])) == 6
        assert len(runner.rows([case("a"), case("b")])) == 6
    path = tmp_path / "rows.csv"
    path.write_bytes(path.read_bytes()[:-5])
    with Runner(tmp_path) as runner:
        assert len(runner.rows([case("a"), case("b")])) == 6
    assert asked == ["a", "b", "b"]
    assert [(row["name"], row["way"]) for row in read_rows(path)] == [(name, way) for name in "ab" for way in "xyz"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"again": "maybe"}, "bench.again none failed all 'maybe'"),
        ({"minutes": -1}, "bench.minutes null at 0 -1"),
    ],
)
def test_bad_options(tmp_path, options, message):
    with pytest.raises(ValueError, match=said(message)):
        Runner(tmp_path, **options)


def test_every_benchmark_takes_the_runners_settings():
    folder = Path(__file__).parents[2] / "conf"
    assert {"minutes", "again"} <= yaml.safe_load((folder / "bench_run.yaml").read_text())["bench"].keys()
    files = sorted((folder / "bench").glob("*.yaml"))
    assert len(files) == 24
    for path in files:
        config = yaml.safe_load(path.read_text())
        assert {"/bench_run": None} in config["defaults"] or "/bench_run" in config["defaults"], path
        assert {"minutes", "again"} <= signature(get_object(config["bench"]["_target_"])).parameters.keys()
        check_ranges(OmegaConf.create({"bench": config["bench"]}))  # a benchmark's own settings are not refused


@dataclass(frozen=True)
class SizesBench:
    """Measure sizes."""

    sizes: Sequence[int]
    repeats: int = 3

    def __post_init__(self):
        if self.repeats < 1:
            raise ValueError(f"bench.repeats must be at least 1, got {self.repeats}")

    def measure(self, runner):
        return runner.rows(Case({"size": size}, lambda: {"repeats": self.repeats}) for size in self.sizes)


def test_run_takes_the_fields_of_its_settings(tmp_path):
    run = benchmark(SizesBench)
    assert list(signature(run).parameters) == ["output_dir", "sizes", "repeats", "minutes", "again"]
    assert signature(run).parameters["repeats"].default == 3 and run.__doc__ == "Measure sizes."
    with pytest.raises(TypeError, match=said("keyword argument 'size'")):
        run(tmp_path / "out", [1], size=2)
    with pytest.raises(ValueError, match=said("bench.repeats 1 0")):
        run(tmp_path / "out", [1], repeats=0)
    assert not (tmp_path / "out").exists()
    assert run(tmp_path / "out", [1, 2], minutes=0) == []
    rows = run(tmp_path / "out", sizes=[1, 2])
    assert rows == [{"size": 1, "repeats": 3}, {"size": 2, "repeats": 3}]
    assert run(tmp_path / "out", [1], 4, again="all") == [{"size": 1, "repeats": 4}]


STARTS = """
import subprocess
from omegaconf import OmegaConf

from lightning_gnnscale.cli.typed import check_ranges
from lightning_gnnscale.system import end_with_parent
started = subprocess.Popen(["sleep", "60"], preexec_fn=end_with_parent, stdout=subprocess.DEVNULL)
print(started.pid, flush=True)
started.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system ends processes with their parent on Linux alone")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGALRM, signal.SIGKILL])
def test_what_a_benchmark_starts_ends_with_it(how):
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True) as running:
        started = psutil.Process(int(running.stdout.readline()))
        assert started.is_running()
        running.send_signal(how)
        assert running.wait(30) == -how
    psutil.wait_procs([started], timeout=30)
    assert not started.is_running() or started.status() == psutil.STATUS_ZOMBIE


def test_tables_show_what_is_there():
    rows = [{"name": "a [b]", "share": 0.25}, {"name": "c", "share": None}]
    found = table(rows, {"name": ("name", LEFT), "share": ("share", ".0%"), "none": ("none", "g")}, "title")
    assert [list(column.cells) for column in found.columns] == [["a \\[b]", "c"], ["25%", ""], ["", ""]]
    assert [column.justify for column in found.columns] == ["left", "right", "right"]


def test_means_need_every_value():
    rows = [{"name": "a", "x": 1}, {"name": "b", "x": 2}, {"name": "a", "x": 2}]
    assert {key: average(own, "x", 2, factor=10) for key, own in grouped(rows, "name").items()} == {
        ("a",): 15.0, ("b",): 20.0,
    }  # fmt: skip
    assert average([{"x": 1}, {"x": None}], "x", 2) is None
    assert average([], "x", 2) is None
