"""Processes of one machine that sweep a table of rows together: the same batches and weights, each range read once."""

import hashlib

import lightning as L
import numpy as np
import pytest
import torch
from processes import launch

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule import train_loader

FREE_BYTES = 7_000_000


class Digests(L.Callback):
    """Keeps a digest of each batch."""

    def __init__(self):
        self.found = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch is not None:
            self.found.append(hashlib.sha256(batch.n_id.numpy().tobytes() + batch.x.numpy().tobytes()).hexdigest())


def fit(folder, root, rows, free_bytes, weights):
    """Train on the processes of this machine; return batches, weights, and what the epochs of this process read."""
    train_loader.free_memory_bytes = lambda: free_bytes
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    data = gs.PartitionDataModule(
        store=root, sampler=gs.NeighborSampler([5, 5]), batch_size=32, rows=rows, source=gs.Threads(1)
    )
    data.verify = False
    torch.manual_seed(0)
    model, digests = gs.NodeClassifier(gs.model.GraphSAGE(64, 8, 3, num_layers=2), lr=0.01), Digests()
    trainer = L.Trainer(
        accelerator="cpu", devices=world_size, max_epochs=2, strategy=gs.GNNScaleStrategy(weights=weights),
        callbacks=[digests], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, data)
    reads = [event for event in gs.events.recent() if event["event"] == "rows_read"]
    return digests.found, model.state_dict(), reads, data._train_loader.reads


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root, random, num = tmp_path_factory.mktemp("store") / "s", np.random.default_rng(0), 20_000
    stream = gs.open_edge_stream(random.integers(0, num, (2, 100_000)), num_nodes=num, to_undirected=True)
    columns = {"labels": random.integers(0, 3, num), "masks": {"train": np.arange(num) % 4 == 0}}
    columns["features"] = random.random((num, 64), np.float32)  # 5.1 MB
    gs.write_partition_store(root, stream, gs.partition(stream, "range", num_parts=8), **columns)
    return root


def two(folder, root, weights):
    return fit(folder, root, "mapped", FREE_BYTES, weights), fit(folder, root, "auto", FREE_BYTES, weights)


@pytest.mark.parametrize("weights", [gs.GradientAveraging(), gs.ModelAveraging()])
def test_two_processes_read_each_range_once(tmp_path, root, weights):
    ranks = launch(2, two, tmp_path, root, weights)
    for (batches, state, *_), (found, swept_state, _, reads) in ranks:
        assert reads.is_swept and reads.shared_by == 2
        assert found == batches
        assert [name for name, value in state.items() if not torch.equal(value, swept_state[name])] == []
    epochs = [[event for event in told[1][2] if event["how"] == "swept"] for told in ranks]
    print(epochs)
