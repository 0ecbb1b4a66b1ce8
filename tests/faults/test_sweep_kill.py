"""Training that is killed within a read of a sweep goes on from a checkpoint within the epoch to the same weights."""

import os
import signal

import lightning as L
import numpy as np
import pytest
import torch
from own_process import OwnProcess

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule import train_loader
from lightning_gnnscale.loader.row_sweep import RowSweep

EPOCHS, SAVED_AT = 2, (1, 5)  # the epoch and the batch
READS_BEFORE_THE_KILL = 3  # after the checkpoint
FREE_BYTES = 4_000_000


class SaveOnce(L.Callback):
    """Saves within the second epoch."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == SAVED_AT:
            trainer.save_checkpoint(self.path)


def fit(folder, free_bytes, rows="auto", save=None, ckpt_path=None):
    """Train with so much memory free; return the weights, and how batches got their rows."""
    train_loader.free_memory_bytes = lambda: free_bytes
    data = gs.PartitionDataModule(
        store=folder / "store", sampler=gs.NeighborSampler([4, 4]), batch_size=64, rows=rows, source=gs.Threads(1)
    )
    data.verify = False
    torch.manual_seed(0)
    model = gs.NodeClassifier(gs.model.GraphSAGE(64, 8, 3, num_layers=2, dropout=0.3), lr=0.01)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, strategy=gs.GNNScaleStrategy(weights=gs.GradientAveraging()),
        callbacks=[] if save is None else [SaveOnce(save)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=ckpt_path)
    reads = [event for event in gs.events.recent() if event["event"] == "rows_read"]
    return model.state_dict(), reads[-1] if reads else {}


def killed(folder):
    """Train, and be killed within a read, some reads after the checkpoint."""
    path, read, since = folder / "within.ckpt", RowSweep._read, []

    def read_until_the_kill(*arguments):
        since.extend([0] * path.is_file())
        if len(since) == READS_BEFORE_THE_KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        read(*arguments)

    RowSweep._read = read_until_the_kill
    fit(folder, FREE_BYTES, save=path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(train_loader, "free_memory_bytes", train_loader.free_memory_bytes)  # and back
    random, num = np.random.default_rng(0), 20_000
    stream = gs.open_edge_stream(random.integers(0, num, (2, 100_000)), num_nodes=num, to_undirected=True)
    columns = {"labels": random.integers(0, 3, num), "masks": {"train": np.arange(num) % 16 == 0}}
    columns["features"] = random.random((num, 64), np.float32)  # 5.1 MB
    gs.write_partition_store(tmp_path / "store", stream, gs.partition(stream, "range", num_parts=8), **columns)
    return tmp_path


def test_a_run_killed_within_a_sweep_goes_on_to_the_weights_of_an_undisturbed_one(folder):
    expected, _ = fit(folder, FREE_BYTES, rows="mapped")
    assert OwnProcess(folder, killed, folder).wait(120).returncode == -signal.SIGKILL
    found, reads = fit(folder, FREE_BYTES * 5 // 4, ckpt_path=folder / "within.ckpt")
    assert reads["how"] == "swept" and reads["passes"] > 1
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []
