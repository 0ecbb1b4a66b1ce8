"""Predictions of labels leave out node types in which no node has one; the log names them."""

import logging
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule import callbacks

pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often", "ignore:the store has")

PAPERS, AUTHORS = 30, 12


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Stores of papers and authors: with a label of one paper, of a paper and an author, and with none at all."""
    root, rng = tmp_path_factory.mktemp("stores"), np.random.default_rng(0)
    edges = {"author,writes,paper": np.stack([rng.integers(0, AUTHORS, 60), rng.integers(0, PAPERS, 60)])}
    dataset = gs.hetero_graph({"paper": PAPERS, "author": AUTHORS}, edges)
    parts = gs.partition(dataset.stream, method="random", num_parts=2, seed=0)

    def written(name: str, *labelled: int):
        labels = np.full(PAPERS + AUTHORS, -1)
        labels[list(labelled)] = 1
        return gs.write_partition_store(root / name, dataset.stream, parts, labels=labels)

    return {"papers": written("papers", 7), "both": written("both", 7, PAPERS), "none": written("none")}


def predicted(store, module, path) -> list[str]:
    """Let a `PredictionWriter` write a row for every node, and return the node types of the rows."""
    trainer = SimpleNamespace(datamodule=SimpleNamespace(store=store), is_global_zero=True)
    trainer.predict_dataloaders, trainer.precision = None, "32-true"
    writer = gs.PredictionWriter(path)
    writer.on_predict_start(trainer, module)
    rows = {"nodes": np.arange(store.num_nodes), "prediction": torch.zeros(store.num_nodes, dtype=torch.int64)}
    writer.write_on_epoch_end(trainer, module, [rows], None)
    writer.on_predict_end(trainer, module)
    return pq.read_table(path)["node_type"].to_pylist()


def test_node_types_without_a_label_are_left_out(stores, tmp_path, caplog):
    module = gs.NodeClassifier(nn.Linear(2, 2), num_classes=2)
    caplog.set_level(logging.INFO, logger=callbacks._log.name)
    callbacks._log.addHandler(caplog.handler)  # Lightning's loggers may not propagate
    try:
        assert predicted(stores["papers"], module, tmp_path / "papers") == ["paper"] * PAPERS
        assert "No predictions for nodes of author: " in caplog.text
        caplog.clear()
        everyone = ["paper"] * PAPERS + ["author"] * AUTHORS
        assert predicted(stores["both"], module, tmp_path / "both") == everyone
        assert predicted(stores["none"], module, tmp_path / "none") == everyone
        links = gs.LinkPredictor(nn.Linear(2, 2), embedding_channels=2)  # embeddings, whatever is labelled
        assert predicted(stores["papers"], links, tmp_path / "links") == everyone
        assert caplog.text == ""
    finally:
        callbacks._log.removeHandler(caplog.handler)


def test_labels_of_other_shapes_are_found():
    schema = SimpleNamespace(num_node_types=2)

    def left_out(labels, regression=False):
        store = SimpleNamespace(labels=np.array(labels), schema=schema, regression=regression)
        store.node_type = lambda nodes: np.asarray(nodes) // 2
        found = callbacks._without_labels(store)
        return None if found is None else found.tolist()

    assert left_out([[-1.0, -1.0], [0.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]]) == [1]
    assert left_out([[np.nan], [np.nan], [np.nan], [-1.0]], regression=True) == [0]
    assert left_out([[np.nan], [2.0], [np.nan], [-1.0]], regression=True) is None
