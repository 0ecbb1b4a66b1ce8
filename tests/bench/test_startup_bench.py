"""`gnnscale bench startup` at a small size: fresh processes, a second run over a store that exists, what it leaves."""

import json

import numpy as np
import pytest

from benchmarks import startup
from benchmarks.runner import RowFile
from lightning_gnnscale.cli.checks import check_settings
from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.errors import GNNScaleError
from tests.says import said


def test_ratios_of_imports_are_taken_within_a_turn():
    taken = {startup.PEER: [(1.0, 2.0), (10.0, 4.0), (2.0, 2.0)], "own": [(1.2, 1.0), (12.0, 2.0), (2.4, 4.0)]}
    peer, own = startup.summarise_imports(taken)
    assert (peer["seconds"], peer["cpu_s"], peer["ratio"], peer["cpu_ratio"]) == (2.0, 2.0, 1.0, 1.0)
    assert (own["seconds"], own["cpu_s"], own["ratio"], own["cpu_ratio"]) == (2.4, 2.0, 1.2, 0.5)


@pytest.mark.sweep
def test_every_statement_is_run_in_turns(monkeypatch):
    run = []
    monkeypatch.setattr(startup, "_import_seconds", lambda statement: run.append(statement) or (1.0, 1.0))
    rows = startup.measure_imports(2)
    assert run == [*startup.IMPORTS.values()] * 3
    assert [row["imported"] for row in rows] == [*startup.IMPORTS]


def test_an_import_is_timed_in_a_fresh_process():
    seconds, cpu_seconds = startup._import_seconds("import time as t; t.sleep(0.1); import zipapp")
    assert seconds >= 0.1
    assert 0 < cpu_seconds < seconds
    with pytest.raises(GNNScaleError, match=said("module 'no_such_package'")):
        startup._import_seconds("import no_such_package")


def test_a_generated_graph_stands_in_for_cora(tmp_path, monkeypatch):
    monkeypatch.setattr(startup, "data_root", lambda: tmp_path)
    words = startup._words(None)
    config = compose_config("train", words)
    check_settings(config)
    assert (config.dataset.num_nodes, config.num_parts) == (2708, 4)
    (tmp_path / "cora").mkdir()
    (tmp_path / "cora" / "graph.npz").touch()
    assert startup._words(None) == ["recipe=cora"]


@pytest.mark.slow
def test_a_second_run_starts_over_the_standing_store(tmp_path, monkeypatch):
    nodes = np.arange(40)
    files = {"edges": "edges", "features": "x", "labels": "y"}
    np.save(tmp_path / "edges.npy", np.stack([nodes, (nodes + 1) % 40]))
    np.save(tmp_path / "x.npy", np.eye(40, 6, dtype=np.float32))
    np.save(tmp_path / "y.npy", nodes % 2)
    words = [
        "dataset=files",
        *(f"dataset.{key}={tmp_path / name}.npy" for key, name in files.items()),
        "partitioner=random",
        "trainer.devices=1",
        "num_parts=2",
        "sampler.fanouts=[2,2]",
        "model.backbone.hidden_channels=4",
    ]
    out = tmp_path / "out"
    first, second = startup.run(out, words, import_repeats=0, train_repeats=1)["training"]
    assert (first["run"], first["made_store"]) == ("first", True)
    assert (second["run"], second["made_store"]) == ("second", False)
    for row in (first, second):
        assert 0 < row["to_first_epoch_s"] < row["to_its_end_s"]
    assert [row["run"] for row in RowFile(out / "training.csv").rows] == ["first", "second"]
    saved = json.loads((out / "startup.json").read_text())
    assert saved["training"] == [first, second] and saved["limits"]["import_ratio"] == 1.5

    def made_again(*arguments):
        return {**second, "made_store": True}

    monkeypatch.setattr(startup, "_train", made_again)
    with pytest.raises(GNNScaleError, match=said("run store overwrite")):
        startup.measure_training(out, words, 1)
