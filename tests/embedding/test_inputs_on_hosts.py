"""Embeddings and remote features in training on two processes, of one host and of two that are simulated."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from embedding_runs import NUM, embedding, fit, write_store

import lightning_gnnscale as gs

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from processes import launch

from tests.tiers import first


def train_on_hosts(folder, root, hosts, policy):
    """Three parts on two ranks: rank 1 lacks batches under model averaging, and takes part without them."""
    store = gs.PartitionStore.open(root)
    inputs = embedding(store, hosts=hosts)
    weights = {"model": gs.ModelAveraging, "gradient": gs.GradientAveraging}[policy]()
    trainer, model, dm = fit(folder, root, inputs, weights, devices=2)
    metrics = trainer.test(model, dm, verbose=False)[0]
    # Ranks with other numbers of batches: the one that is done serves the other.
    sizes = {"batch_size": (15, 50)[trainer.global_rank], "sampler": dm.sampler, "stored_features": False}
    uneven = gs.PartitionDataModule(root, evaluation="sampled", **sizes)
    sampled = trainer.test(model, uneven, verbose=False)[0]
    assert sampled["test_acc"] == metrics["test_acc"]
    assert sampled["test_loss"] == pytest.approx(metrics["test_loss"], rel=1e-5)
    rows = inputs.pull(np.arange(NUM)).clone()
    path = trainer.checkpoint_callback.best_model_path
    fresh = embedding(store, hosts=hosts, seed=5)
    model.inputs = fresh
    again = trainer.test(model, dm, ckpt_path=path, verbose=False)[0]
    same = torch.equal(fresh.pull(np.arange(NUM)), rows)
    owners = [sorted(os.listdir(f"{path}.rows"))] if Path(f"{path}.rows").is_dir() else []
    return metrics, again, rows, same, inputs.received_bytes, len(owners[0])


@first(1)
@pytest.mark.parametrize("policy", ["model", "gradient"])
@pytest.mark.parametrize("hosts", [[0, 1], None])
def test_two_processes_train_one_table(tmp_path, policy, hosts):
    store = write_store(tmp_path / "store")
    ranks = launch(2, train_on_hosts, tmp_path / "run", store.root, hosts, policy, limit_s=120)
    for metrics, again, rows, same, received, num_files in ranks:
        assert metrics["test_acc"] > 0.75
        assert metrics == again == ranks[0][0]
        assert torch.equal(rows, ranks[0][2])
        assert same
        assert received > 0
        assert num_files >= 6  # rows, moments and counts of each rank's share


def train_owners(folder, root):
    """Four parts on two hosts, batches that cross parts: the targets of each rank, and who owns them."""
    store = gs.PartitionStore.open(root)
    inputs = embedding(store, hosts=[0, 1])
    weights = gs.GradientAveraging()
    trainer, _, dm = fit(folder, root, inputs, weights, epochs=1, devices=2, scope="graph")
    seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in dm.train_dataloader()])
    owner = inputs._ownership.locate(seeds.numpy())[0]
    return trainer.global_rank, owner, dm.rank_of_part.tolist()


@pytest.mark.sweep
def test_a_host_owns_the_targets_that_its_ranks_train_on(tmp_path):
    store = write_store(tmp_path / "store", num_parts=4)
    for rank, owner, rank_of_part in launch(2, train_owners, tmp_path / "run", store.root, limit_s=120):
        assert rank_of_part == [0, 0, 1, 1]
        assert np.mean(owner == rank) > 0.9  # the part in the middle may have targets of both
