"""Store, DataModule, strategy and model together, on 1, 2 and 4 processes (Invariants 2 and 7)."""

import functools
import math

import numpy as np
import pytest
import torch
from processes import launch

from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.partition_store import PartitionStore, write_partition_store
from lightning_gnnscale.partitioner import partition

NUM_PARTS = 5  # does not divide by 2 or 4: some ranks have one part more and the others are padded


def train_and_test(folder, root, options):
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    import lightning_gnnscale as gs

    torch.manual_seed(0)
    weights = getattr(gs, options.get("weights", "ModelAveraging"))(**options.get("weight_options", {}))
    dm = gs.PartitionDataModule(
        store=root,
        batch_size=16,
        sampler=gs.NeighborSampler([3, 2]),
        seed=7,
        evaluation=gs.EvaluationOptions(**options.get("evaluation", {})),
    )
    backbone = gs.model.GraphSAGE(8, 12, 6, num_layers=2, dropout=0.3)
    model = gs.NodeClassifier(backbone, lr=0.01)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=gs.GNNScaleStrategy(weights=weights),
        max_epochs=3,
        logger=False,
        callbacks=[ModelCheckpoint(folder, monitor=options.get("monitor"))],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, dm)
    val_acc = float(trainer.callback_metrics["val_acc"])
    train_loss = float(trainer.callback_metrics["train_loss"])
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    test = trainer.test(model, dm, verbose=False)[0]
    rows = np.concatenate([result["nodes"] for result in trainer.predict(model, dm)])
    best = trainer.checkpoint_callback.best_model_path
    return {
        "weights": weights,
        "test_acc": test["test_acc"],
        "rows": rows,
        "train_loss": train_loss,
        "best": best,
        "val_acc": val_acc,
    }


def write_store(root, train_parts=None):
    graph = SyntheticGraph(300, 1500, num_communities=6, homophily=0.9)
    stream = graph.stream(to_undirected=True)
    parts = partition(stream, "random", num_parts=NUM_PARTS)
    masks = graph.masks()
    if train_parts is not None:
        masks["train"] &= np.isin(parts.part_id, train_parts)
    write_partition_store(
        root, stream, parts, features=graph.features(8, noise=0.3), labels=graph.labels(), masks=masks
    )
    return root


@pytest.fixture(scope="module")
def store_root(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store") / "graph")


@pytest.fixture(scope="module")
def runs(store_root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return functools.cache(lambda size: launch(size, train_and_test, folder / str(size), store_root, {}))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_number_of_processes_does_not_change_the_weights(runs, size):
    alone = runs(1)[0]["weights"]
    for result in runs(size):
        # float32: sums over parts are added in another order on another number of ranks.
        assert torch.allclose(result["weights"], alone, atol=1e-5, rtol=0)
        assert torch.equal(result["weights"], runs(size)[0]["weights"])


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.sweep)])
def test_evaluation_sees_each_node_once(runs, size):
    assert len({result["test_acc"] for result in runs(size)}) == 1
    assert runs(size)[0]["test_acc"] == pytest.approx(runs(1)[0]["test_acc"], abs=0.02)
    rows = np.concatenate([result["rows"] for result in runs(size)])
    assert np.array_equal(np.sort(rows), np.arange(300))


@pytest.mark.sweep
def test_any_number_of_processes_validates_the_same_sample(store_root, tmp_path):
    """Weights differ by rounding alone, so that the sample has the same accuracy to the node."""
    count = math.ceil(0.2 * PartitionStore.open(store_root).masks["val"].sum())
    options = {"evaluation": {"sample": 0.2}}
    found = {size: launch(size, train_and_test, tmp_path / str(size), store_root, options) for size in (1, 2, 4)}
    accuracies = {result["val_acc"] for results in found.values() for result in results}
    assert len(accuracies) == 1
    assert accuracies.pop() * count == pytest.approx(round(found[1][0]["val_acc"] * count), abs=1e-4)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_the_training_loss_is_the_mean_over_all_seeds(runs, size):
    losses = {result["train_loss"] for result in runs(size)}
    assert len(losses) == 1
    assert losses.pop() == pytest.approx(runs(1)[0]["train_loss"], rel=1e-4)


def test_a_rank_without_training_nodes_monitors_the_same_loss(tmp_path):
    root = write_store(tmp_path / "graph", train_parts=[0, 2, 4])  # on two processes the second one has 1 and 3
    results = launch(2, train_and_test, tmp_path, root, {"monitor": "train_loss"})
    assert results[0]["train_loss"] == results[1]["train_loss"] > 0
    assert results[0]["best"] == results[1]["best"] != ""


def test_gradient_averaging_keeps_replicas_equal(store_root, tmp_path):
    results = launch(2, train_and_test, tmp_path, store_root, {"weights": "GradientAveraging"})
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    assert results[0]["test_acc"] > 0.5
