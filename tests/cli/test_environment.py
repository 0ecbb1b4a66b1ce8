"""What environment variables hold is used, and neither written nor printed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from lightning_gnnscale import events
from lightning_gnnscale.cli.compose import hidden, written
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.recipes import check_no_credentials

SECRET = "s3cr3t-value"


@pytest.fixture(autouse=True)
def _nothing_read_stays(monkeypatch):
    monkeypatch.setattr("lightning_gnnscale.cli.compose._read", {})


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv("OWN_SECRET", SECRET)


def test_a_reference_is_written_as_it_is_and_used_all_the_same():
    config = OmegaConf.create(
        {
            "a": "${oc.env:OWN_SECRET}",
            "b": "${a}/x",
            "c": {"d": ["${b}", "${oc.env:NOT_THERE,1}"]},
            "lr": 0.1,
            "e": "${lr}",
            "f": "${oc.env:NOT_THERE,null}",
        }
    )
    assert (config.a, config.b, config.c.d[1], config.f) == (SECRET, f"{SECRET}/x", "1", None)
    told = written(config)
    assert SECRET not in yaml.safe_dump(told) and SECRET not in OmegaConf.to_yaml(told)
    reference = "${oc.env:OWN_SECRET}"
    assert told["a"] == reference and told["b"] == f"{reference}/x" and told["c"]["d"][0] == f"{reference}/x"
    assert (told["e"], told["lr"]) == (0.1, 0.1)
    assert config.a == SECRET  # it is read again afterwards


def test_what_was_read_is_hidden_in_text():
    assert OmegaConf.create({"a": "x${oc.env:OWN_SECRET}y"}).a == f"x{SECRET}y"
    assert hidden(f"dataset.edges: {SECRET}: no such file") == "dataset.edges: ${oc.env:OWN_SECRET}: no such file"
    told = hidden({"facts": {"store": f"/a/{SECRET}"}, "stages": [{"note": SECRET, "seconds": 1.5}]})
    assert SECRET not in str(told) and told["stages"][0]["seconds"] == 1.5


@pytest.mark.parametrize("word", ["name=${oc.env:OWN_SECRET}", "++dataset.name=a-${oc.env:OWN_SECRET,x}"])
def test_no_folder_is_named_by_a_variable(word):
    with pytest.raises(UsageError, match="name names folders.*name=") as caught:
        check_no_credentials("train", None, [word])
    assert SECRET not in str(caught.value)


def test_events_hold_the_reference_also_those_of_started_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("OWN_FOLDER", f"{tmp_path}//a/../{SECRET}/")
    log = tmp_path / "events.jsonl"
    monkeypatch.setenv(events.ENV_FILE, str(log))
    config = OmegaConf.create({"root": "${oc.env:OWN_FOLDER}", "method": "${oc.env:OWN_SECRET}"})
    where = Path(config.root, "store")
    with events.stage("load", note=f"of {config.method}"):
        events.record("scratch", folder=where, files=[str(where.resolve())], notes={config.method: 1}, bytes=4096)
    told = "from lightning_gnnscale import events; import os; events.record('other', what=os.environ['OWN_SECRET'])"
    subprocess.run([sys.executable, "-c", told], check=True, env=os.environ)
    assert SECRET not in log.read_text()
    scratch, stage, other = events.read_log(log)
    reference = "${oc.env:OWN_SECRET}"
    assert (stage["note"], other["what"], scratch["notes"]) == (f"of {reference}", reference, {reference: 1})
    assert scratch["bytes"] == 4096 and scratch["files"] == ["${oc.env:OWN_FOLDER}/store"]


def test_words_of_the_log_itself_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("OWN_METHOD", "train")
    monkeypatch.setenv(events.ENV_FILE, str(tmp_path / "events.jsonl"))
    assert OmegaConf.create({"a": "${oc.env:OWN_METHOD}"}).a == "train"
    with events.stage("train", note="train"):
        pass
    (stage,) = events.read_log(tmp_path / "events.jsonl")
    assert (stage["event"], stage["stage"], stage["note"]) == ("stage", "train", "${oc.env:OWN_METHOD}")


def test_names_of_stages_stay_in_summaries(monkeypatch):
    monkeypatch.setenv("OWN_METHOD", "train")
    assert OmegaConf.create({"a": "${oc.env:OWN_METHOD}"}).a == "train"
    rows = {"stages": [{"stage": "train", "note": "train"}]}
    assert hidden(rows) == {"stages": [{"stage": "train", "note": "${oc.env:OWN_METHOD}"}]}
