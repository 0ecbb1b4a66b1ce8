"""Links in real processes: each is ranked or classified once, with the metrics and predictions of one process."""

import os
from pathlib import Path

import lightning as L
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from processes import launch

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.model import GraphSAGE, edge_classifier
from tests.tiers import first

GRAPH = SyntheticGraph(300, 2400, num_communities=10, homophily=0.95, seed=1)


def planted() -> GraphDataset:
    stream = GRAPH.stream(to_undirected=True)
    return gs.hold_out_edges(GraphDataset("planted", stream, GRAPH.features(8, noise=0.2)), val=0.05, test=0.1)


def run(folder: Path, root: str, weights: str, scores_of: str | None = None) -> dict:
    """Train for two epochs, and give weights and metrics; `scores_of`: the metrics of these weights instead."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = L.Trainer(
        accelerator="cpu", devices=world_size, max_epochs=2, default_root_dir=folder, logger=False,
        strategy=gs.GNNScaleStrategy(weights=getattr(gs, weights)()), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = gs.LinkPredictor(GraphSAGE(8, 16, 16, num_layers=2, dropout=0.0), hits=(1, 10), decoder="mlp")
    sampler = gs.LinkSampler(gs.NeighborSampler([5, 5]), "walk", walk_length=2, num_negatives=3)
    data = gs.PartitionDataModule(
        store=root, sampler=sampler, batch_size=64, evaluation=gs.EvaluationOptions(links=planted().links, negatives=50)
    )
    if scores_of is None:
        trainer.fit(model, data)
        if trainer.global_rank == 0:
            torch.save(model.state_dict(), folder / "weights.pt")
    else:
        model.load_state_dict(torch.load(scores_of))
    scores = trainer.test(model, data, verbose=False)[0] | trainer.validate(model, data, verbose=False)[0]
    return {"weights": {name: value.clone() for name, value in model.state_dict().items()}, "scores": scores}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root, dataset = tmp_path_factory.mktemp("links") / "store", planted()
    parts = gs.partition(dataset.stream, "random", num_parts=3)
    gs.write_partition_store(root, dataset.stream, parts, features=dataset.features)
    return str(root)


@first(1)
@pytest.mark.parametrize(("world_size", "weights"), [(2, "ModelAveraging"), (3, "GradientAveraging")])
def test_several_ranks_train_and_give_the_metrics_of_one(root, tmp_path, world_size, weights):
    results = launch(world_size, run, tmp_path / "ranks", root, weights)
    for result in results[1:]:
        assert all(torch.equal(result["weights"][name], value) for name, value in results[0]["weights"].items())
    alone = launch(1, run, tmp_path / "alone", root, weights, str(tmp_path / "ranks" / "weights.pt"))[0]["scores"]
    assert {"val_mrr", "val_hits@10", "test_mrr", "test_hits@1", "test_loss"} <= set(alone)
    for result in results:
        for name, value in alone.items():
            assert np.isclose(result["scores"][name], value, atol=1e-6), name


TRIPLES = np.unique(np.random.default_rng(3).integers(0, [[40], [5], [60]], (3, 700)), axis=1)


def rank_triples(folder: Path, root: str) -> dict:
    """Metrics of triples by rows of 6 numbers, without training."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = L.Trainer(
        accelerator="cpu", devices=world_size, default_root_dir=folder, logger=False, strategy="gnnscale",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = gs.LinkPredictor(gs.model.NoLayers(6), hits=(1, 10), decoder="complex", num_relations=5)
    links = {"test": gs.LinkSet(TRIPLES[[0, 2]][:, ::7], edge_type=TRIPLES[1, ::7])}
    sampler = gs.LinkSampler(positives="edge", corrupt="both", neighborhoods=False)
    data = gs.PartitionDataModule(store=root, sampler=sampler, evaluation=gs.EvaluationOptions(links=links))
    return trainer.test(model, data, verbose=False)[0]


def test_triples_are_ranked_once_over_all_ranks(tmp_path):
    training = np.delete(TRIPLES, np.s_[::7], axis=1)
    stream = gs.open_edge_stream(training[[0, 2]], num_nodes=60)
    features = np.random.default_rng(4).normal(size=(60, 6)).astype(np.float32)
    dataset = GraphDataset("kg", stream, features, edge_type=training[1])
    parts = gs.partition(dataset.stream, "random", num_parts=3)
    gs.write_partition_store(tmp_path / "store", dataset.stream, parts, features=features)
    (alone,) = launch(1, rank_triples, tmp_path / "alone", str(tmp_path / "store"))
    assert {"test_mrr", "test_hits@10", "test_loss"} <= set(alone)
    for result in launch(2, rank_triples, tmp_path / "ranks", str(tmp_path / "store")):
        assert result == pytest.approx(alone, abs=1e-5)


def predict_edges(folder: Path, root: str, target: str, num: int | None = None, killed_at: int | None = None) -> None:
    """Write the classes of held-out edges, of an untrained model; end at once in the chunk `killed_at`."""
    world_size = torch.distributed.get_world_size()
    trainer = L.Trainer(
        accelerator="cpu", devices=world_size, default_root_dir=folder, logger=False, strategy="gnnscale",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[gs.PredictionWriter(target)],
    )  # fmt: skip
    edge_classifier.CHUNK_BYTES = 4 * 300  # a few edges
    torch.manual_seed(0)
    backbone = GraphSAGE(8, 16, 16, num_layers=2, dropout=0.0)
    model = gs.EdgeClassifier(backbone, 3, predict_logits=True)
    chunks, decide = [], model.decide

    def decide_or_end(outputs):
        chunks.append(outputs)
        if len(chunks) == killed_at:
            os._exit(9)
        return decide(outputs)

    model.decide = decide_or_end
    links = {"test": gs.LinkSet(planted().links["test"].edges[:, :num])}
    sampler = gs.LinkSampler(gs.NeighborSampler([5, 5]), "edge", labelled=True)
    data = gs.PartitionDataModule(store=root, sampler=sampler, evaluation=gs.EvaluationOptions(links=links))
    trainer.predict(model, data)
    assert len(chunks) > 10 or num is not None


@first(1)
@pytest.mark.parametrize("several", [3, 2])
def test_ranks_write_the_edges_that_one_writes(root, tmp_path, several):
    tables = {}
    for world_size in (1, several):
        target = tmp_path / f"{world_size}.parquet"
        launch(world_size, predict_edges, tmp_path / str(world_size), root, str(target))
        tables[world_size] = pq.read_table(target)
    edges = planted().links["test"].edges
    alone = np.array(tables[1]["prediction"].to_pylist())
    for table in tables.values():
        assert np.array_equal(np.stack([table["source"], table["target"]]), edges)
        found = np.array(table["prediction"].to_pylist())
        assert np.allclose(found, alone, atol=1e-6) and np.array_equal(found.argmax(1), alone.argmax(1))
    launch(2, predict_edges, tmp_path / "few", root, str(tmp_path / "few.parquet"), 1)  # one rank has none
    assert (
        pq.read_table(tmp_path / "few.parquet")
        .drop_columns(["prediction"])
        .equals(tables[1].slice(0, 1).drop_columns(["prediction"]))
    )
    assert sorted(path.name for path in tmp_path.glob("*.parquet*")) == [
        "1.parquet", f"{several}.parquet", "few.parquet"
    ]  # fmt: skip


@pytest.mark.sweep
def test_a_process_that_is_killed_leaves_no_half_file(root, tmp_path):
    target = tmp_path / "edges.parquet"
    launch(1, predict_edges, tmp_path / "run", root, str(target), None, 5, killed=(0,))
    assert [path.name for path in tmp_path.glob("edges*")] == ["edges.parquet.0"]
    launch(1, predict_edges, tmp_path / "again", root, str(target))
    assert [path.name for path in tmp_path.glob("edges*")] == ["edges.parquet"]
    assert pq.read_table(target).num_rows == planted().links["test"].edges.shape[1]
