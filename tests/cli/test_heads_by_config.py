"""Runs that a config chooses the head of: classes of edges, and numbers of nodes, in batches and on the full graph."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from lightning_gnnscale.cli.main import main
from lightning_gnnscale.dataset import load_files
from tests.tiers import first

NUM_NODES = 240


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    edges = rng.integers(0, NUM_NODES, (1500, 2))
    features = rng.random((NUM_NODES, 6)).astype(np.float32)
    targets = features[:, 0] * 3 - features[:, 1]
    targets[::9] = np.nan
    label = (features[edges[:, 0], 0] + features[edges[:, 1], 0] > 1).astype(np.int64)
    for name, array in (("edges", edges), ("x", features), ("y", targets), ("e", label)):
        np.save(f"{name}.npy", array)


def summary_of(*words: str) -> dict:
    common = ["dataset=files", "dataset.edges=edges.npy", "dataset.features=x.npy", "num_parts=2", "trainer.devices=1",
              "trainer.accelerator=cpu", "hydra.run.dir=run", "trainer.enable_progress_bar=false"]  # fmt: skip
    assert main(["train", *common, *words]) in (0, None)
    return json.loads(Path("run/summary.json").read_text())["metrics"]


def test_classes_of_edges():
    words = [
        "dataset.edge_label=e.npy",
        "dataset.hold_out={val:0.1,test:0.1}",
        "sampler=edges",
        "model=edge_classifier",
    ]
    more = ["sampler.edges_per_node=10", "trainer.max_epochs=6", "model.lr=0.01"]
    assert summary_of(*words, *more, "predict=true")["test_acc"] > 0.7  # half for a guess
    written = pq.read_table("run/predictions.parquet")
    assert written.column_names == ["source", "target", "prediction"]
    held = load_files("edges.npy", "x.npy", edge_label="e.npy", hold_out={"val": 0.1, "test": 0.1}).links["test"]
    assert np.array_equal(np.stack([written["source"], written["target"]]), held.edges)
    main(["predict", "run"])
    assert pq.read_table("run/predict/predictions.parquet").equals(written)
    main(["predict", "run", "dataset.edge_label=null", "model.predict_logits=true", "hydra.run.dir=bare"])
    outputs = np.array(pq.read_table("bare/predictions.parquet")["prediction"].to_pylist())
    assert np.array_equal(outputs.argmax(1), written["prediction"])


@first(1)
@pytest.mark.parametrize("words", [["model=node_regressor"], ["model=regress_gcn", "datamodule=full_graph"]])
def test_numbers_of_nodes(words):
    words = [*words, "callbacks=regression", "dataset.labels=y.npy", "dataset.regression=true", "trainer.max_epochs=4"]
    metrics = summary_of(*words, "model.backbone.hidden_channels=16")
    assert {"test_mae", "test_rmse", "test_loss"} <= set(metrics) and np.isfinite(metrics["test_mae"])
