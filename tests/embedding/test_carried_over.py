"""A checkpoint of one version of a store is that of the next one: weights as they are, learned rows by node."""

import os

import lightning as L
import numpy as np
import pytest
import torch
from embedding_runs import NUM, fit, write_store

import lightning_gnnscale as gs
from lightning_gnnscale.errors import PartitionStoreError
from tests.says import said


@pytest.fixture
def versions(no_disk_wait, tmp_path):
    """A store, and a version of it with 20 nodes more and 10 fewer."""
    old = write_store(tmp_path / "store", features=True)
    rng = np.random.default_rng(0)
    new = gs.update_store(
        old, nodes=np.arange(NUM, NUM + 20), features=rng.random((20, 8)).astype(np.float32), labels=np.zeros(20, int),
        masks={"test": np.ones(20, bool)}, edges=np.stack([np.arange(NUM, NUM + 20), rng.integers(20, NUM, 20)]),
        removed_nodes=np.arange(10), drift=9,
    )  # fmt: skip
    return old, new


@pytest.fixture
def no_disk_wait(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_rows_go_to_the_nodes_that_had_them(versions, tmp_path, optimizer):
    old, new = versions
    rows = gs.DistributedEmbedding.for_store(old, 4, optimizer=optimizer).open()
    rows.push(np.arange(NUM), np.random.default_rng(1).random((NUM, 4)))
    saved = [rows.save(tmp_path / "rows")]
    after = gs.DistributedEmbedding.for_store(new, 4, optimizer=optimizer).open()
    initial = after.pull(np.arange(new.num_nodes)).clone()
    after.load(tmp_path / "rows", saved)
    found, places = after.pull(np.arange(new.num_nodes)), new.places_in(old.layout_fingerprint)
    assert (places < 0).sum() == 20
    assert torch.equal(found[places >= 0], rows.pull(places[places >= 0]))
    assert torch.equal(found[places < 0], initial[places < 0])
    # And the optimizer's state: the next step is the same.
    kept = np.flatnonzero(places >= 0)
    gradients = np.random.default_rng(2).random((len(kept), 4))
    after.push(kept, gradients), rows.push(places[kept], gradients)
    assert torch.allclose(after.pull(kept), rows.pull(places[kept]), atol=1e-7)
    other = write_store(tmp_path / "other", num_parts=2, features=True)
    assert gs.DistributedEmbedding.for_store(other, 4).open().load(tmp_path / "rows", saved) is None  # as many nodes
    with pytest.raises(PartitionStoreError, match=said("neither nor an update of it")):
        gs.DistributedEmbedding.for_store(old, 4).open().load(tmp_path / "rows", [after.save(tmp_path / "rows")])


def test_a_checkpoint_of_the_old_version_evaluates_on_the_new(versions, tmp_path):
    old, new = versions
    trainer, model, _ = fit(tmp_path, old.root, gs.DistributedEmbedding.for_store(old, 16, seed=1), epochs=2)
    path = trainer.checkpoint_callback.best_model_path
    inputs = gs.DistributedEmbedding.for_store(new, 16, seed=1)
    dm = gs.PartitionDataModule(store=new.root, sampler=gs.NeighborSampler([5, 5]), batch_size=32)
    again = gs.NodeClassifier(gs.model.GraphSAGE(8 + 16, 16, dm.num_classes), lr=0.01, inputs=inputs)
    tester = L.Trainer(accelerator="cpu", logger=False, strategy=gs.GNNScaleStrategy(), enable_progress_bar=False,
                       default_root_dir=tmp_path)  # fmt: skip
    result = tester.test(again, dm, ckpt_path=path, verbose=False)[0]
    assert 0 <= result["test_acc"] <= 1
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    places = new.places_in(old.layout_fingerprint)
    kept = np.flatnonzero(places >= 0)
    assert torch.equal(inputs.pull(kept), model.inputs.pull(places[kept]))
