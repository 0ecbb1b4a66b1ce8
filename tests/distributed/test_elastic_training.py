"""The same weights, bit for bit, whatever number of processes computes the batches of the logical ranks."""

import re
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from full_graph_runs import NUM_NODES, write_store
from processes import launch

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule import EpochTimes
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.graph import batches_of
from tests.says import said

NUM_RANKS, NUM_EPOCHS, SAVED_EPOCH, SAVED_BATCH = 4, 3, 1, 1
MIXED = {"scope": "part", "interleave_parts": 2, "batch_size": 2}
CROSSING = {"scope": "graph", "batch_size": 3}
ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def near(groups=((0, 1),)):
    """A sampler that prefers the rows placed on two devices."""
    placement = gs.Placement((np.arange(0, 20), np.arange(40, 60)), groups, NUM_NODES, None, {}, ({}, {}), "given")
    return gs.NeighborSampler([3, 3], locality=gs.LocalityBias(placement, scale=4.0))


CASES = {
    "mixed parts": {"data": MIXED},
    "crossing parts": {"data": CROSSING},
    "crossing parts, seeds by part": {"data": CROSSING | {"seed_order": "part"}},
    "accumulated": {"data": MIXED, "trainer": ACCUMULATED},
    "clipped on each rank": {"data": CROSSING, "weights": {"local_clip": 0.05}},
    "sent early, small buckets": {"data": CROSSING, "weights": {"overlap": True, "bucket_bytes": 64}},
    "other threads": {"data": MIXED | {"source": gs.Threads(2, prefetch_batches=5)}},
    "locality of one group": {"data": MIXED | {"sampler": near()}},
    "subgraphs": {"data": {"sampler": gs.SaintSampler("walk", num_roots=4, batches_per_pass=3)}},
}


class SaveWithin(L.Callback):
    """Saves after a batch within an epoch, on every rank; batch -1 is the last one."""

    def __init__(self, path, epoch=SAVED_EPOCH, batch=SAVED_BATCH):
        self.path, self.epoch, self.batch = path, epoch, batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        is_here = trainer.is_last_batch if self.batch < 0 else batch_idx == self.batch
        if trainer.current_epoch == self.epoch and is_here:
            trainer.save_checkpoint(self.path)


class Losses(L.Callback):
    """Keeps `train_loss` of every epoch, and the keys of this process's batches in each step of the first."""

    def __init__(self):
        self.losses, self.keys = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 0:
            self.keys.append([one.key for one in batches_of(batch)])

    def on_train_epoch_end(self, trainer, pl_module):
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def fit(folder, root, case, logical_ranks=NUM_RANKS, callbacks=(), ckpt_path=None):
    data = {"sampler": gs.NeighborSampler([3, 3]), "seed": 3} | case.get("data", {})
    dm = gs.PartitionDataModule(store=root, **data)
    torch.manual_seed(0)
    model = gs.NodeClassifier(
        gs.model.GraphSAGE(dm.store.features.dim, 8, dm.num_classes, dropout=0.3, norm="batch"), lr=0.02
    )
    kept = Losses()
    policy = gs.GradientAveraging(**case.get("weights", {}))
    strategy = gs.GNNScaleStrategy(weights=policy, logical_ranks=logical_ranks)
    trainer = L.Trainer(
        accelerator="cpu", devices=torch.distributed.get_world_size(), max_epochs=NUM_EPOCHS, logger=False,
        enable_checkpointing=False, default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, limit_val_batches=0, strategy=strategy, callbacks=[kept, EpochTimes(), *callbacks],
        **case.get("trainer", {}),
    )  # fmt: skip
    trainer.fit(model, dm, ckpt_path=ckpt_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state |= {"steps": torch.tensor(trainer.global_step)}
    return {"state": state, "losses": kept.losses, "keys": kept.keys}


def run_cases(folder, root, names):
    return {name: fit(folder, root, CASES[name]) for name in names}


def save_within(folder, root, path, name):
    return fit(folder, root, CASES[name], callbacks=[SaveWithin(path)])


def resume(folder, root, path, name, logical_ranks=None, data=None):
    case = CASES[name]
    return fit(folder, root, case | {"data": case["data"] | (data or {})}, logical_ranks, ckpt_path=path)


def resume_refused(folder, root, path, name, logical_ranks):
    with pytest.raises(StrategyError) as caught:
        resume(folder, root, path, name, logical_ranks)
    return str(caught.value)


def save_at_an_end_and_after(folder, root, path, name):
    """Save at the end of the first epoch; go on, and save within the second; go on from there."""
    fit(folder, root, CASES[name], callbacks=[SaveWithin(path, 0, -1)])
    fit(folder, root, CASES[name], callbacks=[SaveWithin(path, 1, 0)], ckpt_path=path)
    return fit(folder, root, CASES[name], ckpt_path=path), fit(folder, root, CASES[name])


def differing(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store") / "store", sizes=(33, 21, 12, 12, 12))


def same_weights(root, folder, names, processes):
    expected = None
    for number in processes:
        for rank, results in enumerate(launch(number, run_cases, folder / str(number), root, names, limit_s=200)):
            expected = expected or results
            for name in names:
                assert differing(expected[name]["state"], results[name]["state"]) == [], (name, number, rank)
                assert results[name]["losses"] == pytest.approx(expected[name]["losses"], rel=1e-5), (name, number)


def test_one_process_and_two_train_the_same_weights(root, tmp_path):
    same_weights(root, tmp_path, ["mixed parts"], (1, 2))


def test_a_run_of_two_processes_goes_on_within_an_epoch_on_one_with_another_source(root, tmp_path):
    saved = tmp_path / "saved.ckpt"
    whole = launch(2, save_within, tmp_path / "2", root, saved, "accumulated")[0]
    more = {"source": gs.TaskGraphs(2)}
    (result,) = launch(1, resume, tmp_path / "1", root, saved, "accumulated", None, more)
    assert differing(whole["state"], result["state"]) == []
    (message,) = launch(1, resume_refused, tmp_path / "1", root, saved, "accumulated", 2)
    assert re.search(said("epoch 4 logical ranks 2 strategy.logical_ranks=4"), message)


@pytest.mark.parametrize("name", ["accumulated"])
def test_saves_at_an_epochs_end_and_after_it_leave_training_as_it_was(root, tmp_path, name):
    ((resumed, whole),) = launch(1, save_at_an_end_and_after, tmp_path, root, tmp_path / "saved.ckpt", name)
    assert differing(whole["state"], resumed["state"]) == []


def test_locality_is_elastic_where_it_prefers_the_same_rows_on_any_process(root):
    def refused(*groups, callbacks=(), **options):
        dm = gs.PartitionDataModule(store=root, sampler=near(groups), **options)
        dm.trainer = SimpleNamespace(callbacks=[*callbacks])
        return dm.shares_by_process

    assert refused((0, 1)) is None
    assert re.search(said("locality groups of devices"), refused((0,), (1,)))
    assert re.search(said("LocalityController time"), refused((0, 1), callbacks=[gs.LocalityController()]))
    assert re.search(said("rows.locality_scale"), refused((0, 1), rows=gs.PlacementSettings("rule", locality_scale=2)))


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["mixed parts", "crossing parts", "accumulated"])
def test_a_run_goes_on_within_an_epoch_on_any_number_of_processes(root, tmp_path, name):
    for began in (1, 3, 4):
        saved = tmp_path / f"{began}.ckpt"
        whole = launch(began, save_within, tmp_path / f"from {began}", root, saved, name)[0]
        for number in (1, 2, 3, 4):
            for result in launch(number, resume, tmp_path / f"{began} to {number}", root, saved, name):
                assert differing(whole["state"], result["state"]) == [], (began, number)


@pytest.mark.sweep
def test_any_number_of_processes_trains_the_same_weights(root, tmp_path):
    same_weights(root, tmp_path, list(CASES), (1, 2, 3, 4))
