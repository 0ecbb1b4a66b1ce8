"""Training from task graphs: the same weights bit for bit as from threads, on nodes and on links, and resumed."""

import lightning as L
import pytest
import torch
from test_process_training import equal, make, trained

import lightning_gnnscale as gs
from benchmarks.fixed_prefetch import FixedPrefetch
from lightning_gnnscale.placement import PlacementSettings
from tests.tiers import first


@first(1)
@pytest.mark.parametrize("source", [gs.TaskGraphs(3), FixedPrefetch(2, depth=4)])
@pytest.mark.parametrize(
    ("weights", "sampler"),
    [(gs.GradientAveraging, gs.NeighborSampler([4, 3])), (gs.ModelAveraging, gs.ClusterSampler(4, 2))],
)
def test_task_graphs_change_no_bit(store_root, source, weights, sampler):
    found = trained(make(store_root, sampler=sampler, source=source), weights())
    assert equal(found, trained(make(store_root, sampler=sampler), weights()))


@pytest.mark.sweep
@pytest.mark.parametrize("policy", ["lru", "belady"])
def test_placed_features_are_gathered_chunk_by_chunk(store_root, policy):
    settings = PlacementSettings(
        buffer_share=0.1, alpha=0, cache_rows=60, cache_policy=policy, lookahead_batches=4, locality_scale=2.0
    )
    found = trained(make(store_root, rows=settings, source="task_graphs"))
    assert equal(found, trained(make(store_root, rows=settings)))


def on_links(store_root, **options) -> dict[str, torch.Tensor]:
    sampler = gs.LinkSampler(gs.NeighborSampler([4, 3]), "walk", num_negatives=3)
    dm = make(store_root, sampler=sampler, **options)
    torch.manual_seed(0)
    model = gs.LinkPredictor(gs.model.GraphSAGE(dm.store.features.dim, 8, 8), lr=0.02)
    L.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False, limit_val_batches=0,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, dm)  # fmt: skip
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_links_change_no_bit(store_root):
    assert equal(on_links(store_root, source="task_graphs"), on_links(store_root))
