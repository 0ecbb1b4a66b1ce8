"""Link prediction in real processes: each link is ranked once, and the metrics are those of one process."""

from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from processes import launch

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.model import GraphSAGE

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
