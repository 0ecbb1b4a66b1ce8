"""The tab key: what may stand where a line ends, and the scripts as the shells read them."""

import shutil
import subprocess
import sys

import pytest
from cli.refusals import refused

from lightning_gnnscale.cli.commands import benches
from lightning_gnnscale.cli.help import SHELLS, candidates
from lightning_gnnscale.cli.main import main


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "run").mkdir()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gnnscale tra", ["train"]),
        ("gnnscale train recipe=dem", ["recipe=demo"]),
        ("gnnscale train recipe=mi", ["recipe=mine.yaml"]),
        ("gnnscale train model=g", ["model=gat", "model=gcn", "model=gine", "model=graphsage"]),
        ("gnnscale train model=gcn strategy/w", ["strategy/weights="]),
        ("gnnscale train trainer.max", ["trainer.max_epochs=", "trainer.max_steps=", "trainer.max_time="]),
        ("gnnscale train partitioner=ldg partitioner.pa", ["partitioner.passes="]),
        ("gnnscale train dataset=files dataset.train", ["dataset.train_mask="]),
        ("gnnscale train mod", ["model.", "model="]),
        ("gnnscale train test=", ["test=false", "test=true"]),
        ("gnnscale train sampler.fanouts=", ["sampler.fanouts=[25,10]"]),
        ("gnnscale train resume=r", ["resume=run/"]),
        ("gnnscale predict r", ["recipe=", "resume=", "rows.", "rows=", "run/"]),
        ("gnnscale report ru", ["run/", "runs="]),
        ("gnnscale stores c", ["clean"]),
        ("gnnscale bench spr", ["spring"]),
        ("gnnscale bench partition bench.met", ["bench.methods="]),
        ("gnnscale plan planner.num_d", ["planner.num_devices="]),
        ("gnnscale completion z", ["zsh"]),
        ("gnnscale nosuch a", []),
    ],
)
def test_words_that_a_line_may_go_on_with(line, expected):
    try:
        found = candidates(line)
    except ValueError:
        found = []
    assert found == expected


def test_all_commands_and_benchmarks_are_offered(capsys):
    main(["completion", "query", "gnnscale "])
    offered = capsys.readouterr().out.split()
    assert {"train", "predict", "test", "verify", "inspect", "stores", "doctor"} <= set(offered)
    assert candidates("gnnscale bench ") == sorted(benches())
    main(["completion", "query", "gnnscale train model=nosuch x"])
    assert capsys.readouterr().out.strip() == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_are_read_by_their_shells(capsys, shell):
    main(["completion", shell])
    script = capsys.readouterr().out
    assert "gnnscale completion query" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_bash_completes_behind_an_equals_sign(tmp_path, capsys):
    program = tmp_path / "gnnscale"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lightning_gnnscale.cli "$@"\n')
    program.chmod(0o755)
    main(["completion", "bash"])
    script = capsys.readouterr().out + (
        'COMP_WORDS=(gnnscale train model = gr); COMP_CWORD=4; COMP_LINE="gnnscale train model=gr"\n'
        'COMP_POINT=${#COMP_LINE}; _gnnscale_complete; echo "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", f'PATH="{tmp_path}:$PATH"\n{script}'], capture_output=True, text=True)
    assert done.stdout.strip() == "graphsage"


def test_a_shell_must_be_named(capsys):
    assert "completion takes a shell, one of bash, zsh, fish, got nothing" in refused(capsys, "completion")


def test_help_says_how_each_shell_takes_it(capsys):
    main(["completion", "--help"])
    told = capsys.readouterr().out
    assert 'eval "$(gnnscale completion zsh)"' in told and "gnnscale completion fish | source" in told
