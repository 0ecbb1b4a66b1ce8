"""Held-out links and edges on 1, 2 and 3 processes: each is scored once, and every rank tells the same."""

import lightning as L
import numpy as np
import pytest
import torch
from processes import launch

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import GraphDataset

NUM_NODES, NUM_EDGES, NUM_PARTS = 150, 1403, 4  # neither held-out links nor parts divide by 2 and by 3
CASES = ("links in time, sampled", "classes, exact", "classes, sampled")
pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore:.*listed more often", "ignore:the store has")]


def held_out() -> GraphDataset:
    rng = np.random.default_rng(0)
    features = rng.random((NUM_NODES, 6)).astype(np.float32)
    pairs = rng.permutation(NUM_NODES * NUM_NODES)[:NUM_EDGES]
    edges = np.stack([pairs // NUM_NODES, pairs % NUM_NODES])
    label = (features[edges[0], 0] > features[edges[1], 0]).astype(np.int64)
    label[::7] = -1
    times = rng.integers(0, 500, NUM_EDGES)
    stream = gs.open_edge_stream(edges, num_nodes=NUM_NODES)
    data = GraphDataset("signed", stream, features, edge_label=label, edge_time=times)
    return gs.hold_out_edges(data, val=0.1, test=0.2, by_time=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root, data = tmp_path_factory.mktemp("store") / "store", held_out()
    parts = gs.partition(data.stream, "random", num_parts=NUM_PARTS)
    given = {"edge_time": data.edge_time, "edge_label": data.edge_label}
    gs.write_partition_store(root, data.stream, parts, features=data.features, **given)
    return root


def score(folder, root, case) -> dict[str, float]:
    """Return what a fixed model scores; a dropped or repeated link would change it."""
    in_time = {"temporal_strategy": "uniform", "strictly_before": True} if "time" in case else {}
    inner = gs.NeighborSampler([-1], **in_time)
    sampler = gs.LinkSampler(inner, "edge", num_negatives=2, labelled=not in_time)
    evaluation = gs.EvaluationOptions(
        "layerwise" if "exact" in case else "sampled", links=held_out().links, **({"negatives": 20} if in_time else {})
    )
    dm = gs.PartitionDataModule(
        store=root, sampler=sampler, batch_size=32, seed=3, evaluation=evaluation,
        **({"scope": "graph"} if "sampled" in case else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    backbone = gs.model.GraphSAGE(6, 16, 16, num_layers=1, dropout=0.0)
    model = gs.LinkPredictor(backbone, hits=[1, 10]) if in_time else gs.EdgeClassifier(backbone, 2)
    weights = gs.GradientAveraging() if "sampled" in case else gs.ModelAveraging()
    trainer = L.Trainer(
        accelerator="cpu", devices=torch.distributed.get_world_size(), logger=False, enable_checkpointing=False,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        strategy=gs.GNNScaleStrategy(weights=weights),
    )  # fmt: skip
    return trainer.validate(model, dm, verbose=False)[0] | trainer.test(model, dm, verbose=False)[0]


def run_cases(folder, root):
    return {case: score(folder, root, case) for case in CASES}


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {size: launch(size, run_cases, folder / str(size), root, limit_s=280) for size in (1, 2, 3)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_processes_scores_the_same(runs, case, size):
    alone = runs[1][0][case]
    assert {name.partition("_")[0] for name in alone} == {"val", "test"}
    for results in runs[size]:
        assert results[case] == pytest.approx(alone, rel=1e-4)
        assert results[case] == runs[size][0][case]
