"""A run folder whose entries are of other types gives a report, or one line that names the file."""

import copy
import json
import random

import pytest
import yaml
from report.recorded_runs import write_run

from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.report import page
from lightning_gnnscale.report.run_files import read_metrics, read_settings, read_summary, read_words
from lightning_gnnscale.report.run_record import RunRecord
from tests.says import said

LEFT_OUT = object()
VALUES = [None, True, -5, 2.5, 10**30, 1e308, float("nan"), "", "x", "${oc.env:HOME}", [], [[]], [None], {}, {"a": [1]}]
VALUES.append(LEFT_OUT)
FILES = {
    "summary.json": (json.loads, json.dumps),
    "events.jsonl": (
        lambda text: [json.loads(line) for line in text.splitlines()],
        lambda log: "\n".join(map(json.dumps, log)),
    ),
    "config.yaml": (yaml.safe_load, yaml.safe_dump),
}
COUNT = 40  # mutations of each file


@pytest.fixture(autouse=True)
def _no_plotly(monkeypatch):
    monkeypatch.setattr(page, "get_plotlyjs", lambda: "")


def places(node, path=()):
    """Yield the path of every entry."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, entry in pairs:
        yield (*path, key)
        yield from places(entry, (*path, key))


def changed(content, path, value):
    content = copy.deepcopy(content)
    node = content
    for key in path[:-1]:
        node = node[key]
    if value is LEFT_OUT:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return content


def is_told(folder) -> bool:
    """Make a page; whether it was made, and else one line was said."""
    try:
        page.render([RunRecord.open(folder)], folder)
    except GNNScaleError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return False
    return True


@pytest.mark.parametrize("name", FILES)
def test_entries_of_other_types_are_one_line(tmp_path, name):
    run = write_run(tmp_path / "run")
    read, write = FILES[name]
    content = read((run / name).read_text())
    attacks = [(path, value) for path in places(content) for value in VALUES]
    told = []
    for path, value in random.Random(name).sample(attacks, COUNT):
        (run / name).write_text(write(changed(content, path, value)))
        told.append(is_told(run))
    assert not all(told)  # so that some do harm


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ({"stages": {"a": 1}}, "stages must be a list of stages, got a dict"),
        ({"num_nodes": 2.5}, "num_nodes must be a whole number of at least 0, got 2.5"),
        ({"num_nodes": True}, "num_nodes must be a whole number of at least 0, got True"),
        ({"num_nodes": -5}, "num_nodes must be a whole number of at least 0, got -5"),
        ({"num_nodes": 10**30}, "num_nodes must be a whole number of at least 0, got an integer of 100 bits"),
        ({"facts": [1]}, "facts must be numbers or text by name, got a list"),
        ({"stages": [{"stage": "load", "seconds": "1", "peak_bytes": 1}]}, "stages.seconds must be a number"),
        ({"quality": {"edge_cut_ratio": {}}}, "quality.edge_cut_ratio must be a number, got a dict"),
    ],
)
def test_the_entry_is_named(tmp_path, entry, line):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(entry))
    with pytest.raises(GNNScaleError) as caught:
        read_summary(path)
    assert str(caught.value).startswith(f"{path}: {line}")


def test_a_loss_that_is_not_finite_is_read(tmp_path):
    (tmp_path / "summary.json").write_text('{"metrics": {"test_loss": NaN}, "facts": {"test_loss": Infinity}}')
    assert read_summary(tmp_path / "summary.json")["metrics"]["test_loss"] != 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("epoch,loss\n1.5,2\n", "line 2: epoch must be a whole number of at least 0, got '1.5'"),
        ("epoch,loss\n-1,2\n", "line 2: epoch must be a whole number of at least 0, got '-1'"),
        ("epoch,loss\n1,two\n", "line 2: loss must be a number, got 'two'"),
        ("epoch,loss\n1,2,3\n", "line 2 has more values than names"),
    ],
)
def test_metrics_are_numbers(tmp_path, text, line):
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(GNNScaleError, match=said(f"metrics.csv {line}")):
        read_metrics(tmp_path / "metrics.csv")
    (tmp_path / "metrics.csv").write_text("epoch,loss,other\n1,nan,\n")
    assert read_metrics(tmp_path / "metrics.csv")[0]["loss"] == "nan"


def test_settings_that_grow_are_refused_in_a_report_too(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "config.yaml").write_text("a: &a\n  b: *a\n")
    with pytest.raises(GNNScaleError, match=said("line 1 settings run aliases")):
        RunRecord.open(run)
    (run / "config.yaml").write_text("a: ${oc.env:HOME}\n")
    assert read_settings(run / "config.yaml") == {"a": "${oc.env:HOME}"}
    (run / "words.yaml").write_text("a: 1\n")
    with pytest.raises(GNNScaleError, match=said("words command dict")):
        read_words(run / "words.yaml")
