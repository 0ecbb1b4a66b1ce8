"""Layer-wise batches through the Trainer: every kind of backbone learns, with near rows preferred and without."""

import lightning as L
import numpy as np
import pytest
import torch

import lightning_gnnscale as gs
from tests.tiers import first


@first(1)
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT"])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_backbones_learn(store_root, name, scale):
    locality = None
    if scale is not None:
        rows = np.random.default_rng(0).permutation(400)[:80]
        placement = gs.Placement((rows,), ((0,),), 400, None, {}, (), "test")
        locality = gs.LocalityBias(placement, scale, neighbor_set_size=100)
    dm = gs.PartitionDataModule(store=store_root, sampler=gs.LayerwiseSampler(60, 2, locality=locality), batch_size=32)
    dm.prepare_data()
    torch.manual_seed(0)
    backbone = getattr(gs.model, name)(dm.num_features, 16, dm.num_classes, num_layers=2, dropout=0.2)
    model = gs.NodeClassifier(backbone, lr=0.02)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy="gnnscale", max_epochs=12, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(model, dm)
    assert trainer.test(model, dm, verbose=False)[0]["test_acc"] > 0.8
