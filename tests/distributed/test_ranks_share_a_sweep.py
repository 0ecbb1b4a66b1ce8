"""Processes of one machine that sweep a table of rows together: the same batches and weights, each range read once."""

import hashlib
import os
import signal

import lightning as L
import numpy as np
import pytest
import torch
from processes import launch

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule import train_loader
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.loader import sweep_choice

FREE_BYTES = 8_000_000  # on the machine
SAVED_AT = 1, 5  # the epoch and the batch


class Watch(L.Callback):
    """Keeps a digest of each batch; saves within the second epoch, and is killed some batches later, where it is to."""

    def __init__(self, save=None, killed=None):
        self.save, self.killed, self.found = save, killed, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch is not None:
            self.found.append(hashlib.sha256(batch.n_id.numpy().tobytes() + batch.x.numpy().tobytes()).hexdigest())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        at = trainer.current_epoch, batch_idx
        if self.save is not None and at == SAVED_AT:
            trainer.save_checkpoint(self.save)
        if trainer.global_rank == self.killed and at == (SAVED_AT[0], SAVED_AT[1] + 3):
            os.kill(os.getpid(), signal.SIGKILL)


def fit(root, watch, rows="auto", weights=None, ckpt_path=None):
    """Train on the processes of this machine; return weights, the last epoch's reads, and how they were chosen."""
    train_loader.free_memory_bytes, sweep_choice.WORTH = lambda: FREE_BYTES, 10.0  # swept, whatever windows would read
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    data = gs.PartitionDataModule(
        store=root, sampler=gs.NeighborSampler([5, 5]), batch_size=64 // world_size, rows=rows, source=gs.Threads(1)
    )
    data.verify = False
    torch.manual_seed(0)
    model = gs.NodeClassifier(gs.model.GraphSAGE(256, 8, 3, num_layers=2), lr=0.01)
    strategy = gs.GNNScaleStrategy(weights=weights or gs.GradientAveraging())
    trainer = L.Trainer(
        accelerator="cpu", devices=world_size, max_epochs=2, strategy=strategy, callbacks=[watch], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=ckpt_path)
    told = [event for event in gs.events.recent() if event["event"] == "rows_read"]
    return model.state_dict(), told[-1] if told else {}, data._train_loader.reads


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root, random, num = tmp_path_factory.mktemp("store") / "s", np.random.default_rng(0), 8_000
    stream = gs.open_edge_stream(random.integers(0, num, (2, 24_000)), num_nodes=num, to_undirected=True)
    columns = {"labels": random.integers(0, 3, num), "masks": {"train": np.arange(num) % 8 == 0}}
    columns["features"] = random.random((num, 256), np.float32)  # 8.2 MB
    gs.write_partition_store(root, stream, gs.partition(stream, "range", num_parts=8), **columns)
    return root


def same(state, other):
    return [name for name, value in state.items() if not torch.equal(value, other[name])] == []


def mapped_and_swept(folder, root, weights):
    expected, found = Watch(), Watch()
    mapped, swept = fit(root, expected, "mapped", weights)[0], fit(root, found, "auto", weights)
    assert found.found == expected.found and same(mapped, swept[0])
    return swept[1:]


@pytest.mark.parametrize(
    "weights", [gs.GradientAveraging(), pytest.param(gs.ModelAveraging(), marks=pytest.mark.sweep)]
)
def test_two_processes_read_about_what_one_does(tmp_path, root, weights, monkeypatch):
    for module, name in ((train_loader, "free_memory_bytes"), (sweep_choice, "WORTH")):
        monkeypatch.setattr(module, name, getattr(module, name))  # and back
    _, alone, one = fit(root, Watch())
    assert alone["how"] == "swept" and alone["passes"] > 1.5
    (first, reads), (second, _) = launch(2, mapped_and_swept, tmp_path, root, weights, limit_s=150)
    assert (one.shared_by, reads.shared_by) == (1, 2)
    assert first["how"] == second["how"] == "swept" and second["feature_bytes"] == 0
    assert "predicted_bytes" not in second
    if weights.equal_batches:
        assert first["feature_bytes"] <= 1.4 * alone["feature_bytes"]  # parts of two take memory


def until_the_kill(folder, root, killed):
    """Train until a process is killed; the other leaves without the launcher's barrier."""
    try:
        fit(root, Watch(root.parent / "within.ckpt", killed))
    except GNNScaleError as error:
        torch.save(("ok", str(error)), folder / f"rank{1 - killed}.pt")
        os._exit(0)


def goes_on(folder, root):
    whole, rest = Watch(), Watch()
    expected = fit(root, whole)[0]
    swept = fit(root, rest, ckpt_path=root.parent / "within.ckpt")
    assert swept[2].shared_by == 2 and rest.found == whole.found[-len(rest.found) :]
    return same(expected, swept[0])


@pytest.mark.sweep
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_dies_ends_the_others_and_they_go_on_to_the_same_weights(tmp_path, root, killed):
    lines = launch(2, until_the_kill, tmp_path / "killed", root, killed, killed=[killed], limit_s=150)
    assert len(lines[1 - killed].splitlines()) == 1 and "last checkpoint" in lines[1 - killed]
    assert launch(2, goes_on, tmp_path / "again", root, limit_s=150) == [True, True]
