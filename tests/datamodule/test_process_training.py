"""Training from worker processes: the same weights bit for bit, also under kills and with placed features."""

import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress

import lightning as L
import psutil
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.loader.shared_value import pack
from lightning_gnnscale.placement import PlacementSettings
from tests.says import said
from tests.tiers import first


def make(store_root, **options) -> gs.PartitionDataModule:
    settings = {"sampler": gs.NeighborSampler([4, 3]), "batch_size": 32, "seed": 1} | options
    return gs.PartitionDataModule(store=store_root, **settings)


def trained(dm, weights=None, callbacks=()) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = gs.NodeClassifier(gs.model.GraphSAGE(dm.store.features.dim, 8, dm.num_classes), lr=0.02)
    strategy = gs.GNNScaleStrategy(weights=weights or gs.GradientAveraging())
    L.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False, strategy=strategy,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, callbacks=list(callbacks),
    ).fit(model, dm)  # fmt: skip
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: dict, other: dict) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


class Workers(L.Callback):
    """Notes the worker processes of each step, and kills one in some of them."""

    def __init__(self, kill_at=()):
        self.kill_at, self.pids, self.step = kill_at, set(), 0

    def on_train_batch_end(self, trainer, *_):
        alive = trainer.datamodule._train_loader._source.worker_pids
        self.pids |= set(alive)
        if self.step in self.kill_at and alive:
            with suppress(ProcessLookupError):  # of the last kill, not noticed yet
                os.kill(alive[0], signal.SIGKILL)
        self.step += 1


@first(1)
@pytest.mark.parametrize(
    ("weights", "sampler"),
    [
        (gs.GradientAveraging, gs.NeighborSampler([4, 3])),
        (gs.ModelAveraging, gs.NeighborSampler([4, 3])),
        (gs.ModelAveraging, gs.ClusterSampler(4, 2)),
    ],
)
def test_processes_change_no_bit(store_root, weights, sampler):
    workers = Workers()
    found = trained(make(store_root, sampler=sampler, source=gs.Processes(2)), weights(), [workers])
    assert equal(found, trained(make(store_root, sampler=sampler), weights()))
    assert len(workers.pids) == 2, "they stay over epochs"
    assert not any(psutil.pid_exists(pid) for pid in workers.pids), "and go with the fit"


def test_kills_in_training_change_no_bit(store_root):
    workers = Workers(kill_at=(1, 5, 9))
    found = trained(make(store_root, source=gs.Processes(2)), callbacks=[workers])
    assert equal(found, trained(make(store_root)))
    assert len(workers.pids) > 2


@pytest.mark.sweep
@pytest.mark.parametrize("policy", ["lru", "belady"])
def test_placed_features_are_gathered_by_the_process_that_trains(store_root, policy):
    settings = PlacementSettings(
        buffer_share=0.1, alpha=0, cache_rows=60, cache_policy=policy, lookahead_batches=4, locality_scale=2.0
    )
    options = {"source": gs.Processes(2), "rows": settings}
    found = trained(make(store_root, **options))
    assert equal(found, trained(make(store_root, rows=settings)))


@pytest.mark.sweep
def test_no_process_has_a_copy_of_the_store(store_root):
    """What a worker opens names the files of features, weights and graph: it holds none of their bytes."""
    dm = make(store_root, scope="graph", source="processes")
    dm.setup("fit")
    loader = dm.train_dataloader()
    sent = pack(loader._maker)
    assert sent.num_bytes == 0 and str(store_root) in repr(sent.meta)
    staged = loader._stager(0)
    shared = pack(staged).num_bytes  # in-degrees, masks, targets: shared by all workers
    assert shared < staged.graph.csc.indices.nbytes
    dm.teardown("fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"source": "pigeons"},
            "source threads processes gs.Threads() 'pigeons'",
        ),
        ({"batch_size": 0}, "batch_size 1 0"),
    ],
)
def test_bad_options(store_root, options, message):
    with pytest.raises(ValueError, match=said(message)):
        make(store_root, **options)


@pytest.mark.parametrize("name", ["num_workers", "queue_bytes"])
def test_bad_settings(name):
    with pytest.raises(ValueError, match=said(f"{name} 1 0")):
        gs.Processes(**{name: 0})


@pytest.mark.sweep
@pytest.mark.parametrize("scope", ["part", "graph"])
def test_a_worker_needs_no_lightning_to_make_batches(store_root, tmp_path, scope):
    loader = make(store_root, scope=scope).train_dataloader()
    (tmp_path / "sent").write_bytes(pickle.dumps((loader._stager, loader._maker)))
    worker = (
        f"import pickle, sys; pickle.load(open({str(tmp_path / 'sent')!r}, 'rb'))\n"
        "heavy = {'lightning', 'torch_geometric', 'torchmetrics'} & set(sys.modules)\n"
        "assert not heavy, f'imported for nothing: {heavy}'"
    )
    done = subprocess.run([sys.executable, "-c", worker], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
