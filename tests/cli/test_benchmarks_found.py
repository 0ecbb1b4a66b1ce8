"""`gnnscale bench` finds the benchmarks of the source tree, and says where they are where it does not."""

import os
import sys
from pathlib import Path

import pytest

from lightning_gnnscale.cli import run_paths
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.main import main
from lightning_gnnscale.cli.settings import taker_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A wheel's package, seen from a folder without benchmarks; what is found stays in this test."""
    monkeypatch.setattr(
        run_paths, "__file__", str(tmp_path / "site-packages" / "lightning_gnnscale" / "cli" / "run_paths.py")
    )
    monkeypatch.setattr(sys, "path", [one for one in sys.path if Path(one).absolute() != ROOT])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(run_paths.SOURCE, raising=False)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")


def test_they_are_found_beside_the_package_that_is_installed_from_its_source():
    assert run_paths.find_benchmarks() == ROOT and str(ROOT) in sys.path
    assert str(ROOT) in os.environ["PYTHONPATH"].split(os.pathsep)  # of the processes that measure


@pytest.mark.parametrize("how", ["the current folder", "GNNSCALE_SOURCE"])
def test_a_wheel_finds_them_in_a_clone(installed, monkeypatch, how):
    monkeypatch.setenv(run_paths.SOURCE, str(ROOT)) if how == run_paths.SOURCE else monkeypatch.chdir(ROOT)
    assert run_paths.find_benchmarks() == run_paths.find_benchmarks() == ROOT
    assert sys.path[0] == str(ROOT) and sys.path.count(str(ROOT)) == 1
    assert os.environ["PYTHONPATH"] == f"{ROOT}{os.pathsep}/elsewhere"
    assert "sample_ms" in taker_of("benchmarks.turns.PacedSampler").settings


@pytest.mark.parametrize("named", [None, "no/clone"])
def test_where_they_are_not_one_line_says_where_they_are(installed, monkeypatch, capsys, tmp_path, named):
    if named:
        monkeypatch.setenv(run_paths.SOURCE, named)
    with pytest.raises(SystemExit) as end:
        main(["bench", "partition", "bench.parts=[2]"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    for word in (named or str(tmp_path / "benchmarks"), "the source tree has them", "GNNSCALE_SOURCE", "clone"):
        assert word in said


def test_a_folder_of_that_name_without_ours_is_none(installed, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    with pytest.raises(UsageError, match="no benchmarks in"):
        run_paths.find_benchmarks()
