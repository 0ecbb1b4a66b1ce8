"""Feature rows on two devices, one a process: training reads its peer's rows and changes no bit."""

import os
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.distributed as dist
from full_graph_runs import write_store
from oracles.typed_rows import as_rows, write_typed
from processes import launch

import lightning_gnnscale as gs
from lightning_gnnscale import events
from lightning_gnnscale.datamodule import partition, placed_training, tiers
from lightning_gnnscale.errors import PlacementError
from lightning_gnnscale.placement import PlacementSettings, cuda_tiers, link_cost
from tests.says import said


def train(folder, root):
    """Train without a placement, with one of two linked devices, and with one of two that are not."""
    results = {}
    for name, placement in {
        "plain": "auto",
        "linked": PlacementSettings("rule", buffer_share=0.3, alpha=0, locality_scale=1),
        "alone": PlacementSettings(
            "rule", buffer_share=0.3, alpha=0, groups=[[0], [1]], cache_rows=50, locality_scale=1
        ),
    }.items():
        dm = gs.PartitionDataModule(
            store=root, sampler=gs.NeighborSampler([3, 3]), batch_size=8, rows=placement, scope="graph",
        )  # fmt: skip
        torch.manual_seed(0)
        model = gs.NodeClassifier(gs.model.GraphSAGE(dm.store.features.dim, 8, dm.num_classes), lr=0.02).double()
        trainer = L.Trainer(
            accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False,
            default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
            strategy=gs.GNNScaleStrategy(weights=gs.GradientAveraging()),
            callbacks=[Raise()] if name == "linked" else [],
        )  # fmt: skip
        trainer.fit(model, dm)
        reads = [event for event in events.recent() if event["event"] == "reads"]
        scale = dm.sampler.locality.scale if name != "plain" else None
        results[name] = model.state_dict(), reads[-1] if name != "plain" else None, scale
    return results


class Rows(L.Callback):
    """Keeps nodes and features of the batches."""

    def __init__(self):
        self.held = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.held.append((batch.n_id.tolist(), as_rows(batch.x)))


def train_on_node_types(folder, root):
    """Train where node types have features of their own, with and without a placement."""
    results = []
    for placement in ("auto", PlacementSettings("rule", buffer_share=0.2, alpha=0.2, cache_rows=60)):
        dm = gs.PartitionDataModule(
            store=root, sampler=gs.NeighborSampler([3, 3]), batch_size=8, rows=placement, scope="graph",
        )  # fmt: skip
        torch.manual_seed(0)
        model = gs.model.RGCN(dm.feature_dims, 8, dm.num_classes, schema=dm.store.schema)
        seen = Rows()
        L.Trainer(
            accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False,
            default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
            strategy=gs.GNNScaleStrategy(weights=gs.GradientAveraging()), callbacks=[seen],
        ).fit(gs.NodeClassifier(model, lr=0.02), dm)  # fmt: skip
        results.append(seen.held)
    reads = [event for event in events.recent() if event["event"] == "reads"][-1]
    return results, {tier: reads[tier] for tier in ("local", "peer", "host", "disk", "cache")}


class Raise(gs.LocalityController):
    """Raise the scale after the last epoch alone: training stays the plain one's, but the ranks must agree."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == trainer.max_epochs - 1:
            trainer.datamodule.loading_share = lambda: 1.0 - trainer.global_rank  # the mean is a half
            super().on_train_epoch_end(trainer, pl_module)


def place_for_one(folder, root):
    settings = PlacementSettings(buffer_rows=5, alpha=0)
    store = gs.PartitionStore.open(root)
    placement = settings.place(store, store.masks["train"].nonzero()[0], 1, (3, 3), 8)
    dm = gs.PartitionDataModule(store=root, sampler=gs.NeighborSampler([3, 3]), rows=placement)
    model = gs.NodeClassifier(gs.model.GraphSAGE(dm.store.features.dim, 8, dm.num_classes))
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir=folder,
        strategy=gs.GNNScaleStrategy(weights=gs.GradientAveraging()),
    )  # fmt: skip
    with pytest.raises(PlacementError, match=said("placement 1 devices training 2 processes")):
        trainer.fit(model, dm)


def set_up_by_measurement(folder, root):
    """Place where no rank finds what another one measured, and each measures something else."""
    Path("file").write_text("")
    os.environ["XDG_CACHE_HOME"] = str(Path("file").resolve())  # no folder can be made there
    link_cost.measure_on_cpu = link_cost.measure_on_cuda = lambda: ((0.0, 0.9)[dist.get_rank()], 1.0)
    dm = gs.PartitionDataModule(
        store=root, sampler=gs.NeighborSampler([3, 3]), rows=PlacementSettings("rule", buffer_share=0.3)
    )
    dm.trainer = SimpleNamespace(
        lightning_module=None, global_rank=dist.get_rank(), world_size=2, num_nodes=1, node_rank=0,
        local_rank=dist.get_rank(),
        strategy=SimpleNamespace(
            weights=gs.GradientAveraging(), root_device=torch.device("cpu"), broadcast=broadcast
        ),
    )  # fmt: skip
    dm.setup("fit")
    rows = [own.tolist() for own in dm.buffer.placement.rows]
    dm.buffer.close()
    return rows


def broadcast(value, src=0):
    values = [value]
    dist.broadcast_object_list(values, src)
    return values[0]


@pytest.mark.sweep
def test_ranks_place_by_one_measurement(tmp_path):
    write_store(tmp_path / "store")
    first, second = launch(2, set_up_by_measurement, tmp_path / "run", tmp_path / "store", limit_s=90)
    assert first == second
    assert not set(first[0]) & set(first[1]), "a peer's read costs nothing, as the first measured"


def test_two_processes_read_each_others_rows_and_train_alike(tmp_path):
    write_store(tmp_path / "store")
    ranks = launch(2, train, tmp_path / "run", tmp_path / "store", limit_s=120)
    for results in ranks:
        plain = results["plain"][0]
        for name in ("linked", "alone"):
            weights, reads, scale = results[name]
            assert all(torch.equal(plain[key], weights[key]) for key in plain), name
            assert (reads["peer"] > 0) == (name == "linked")
            assert (reads["cache"] > 0) == (name == "alone")
            assert reads["local"] > 0
            assert reads["disk"] == 0
            assert scale == (2 if name == "linked" else 1)


@pytest.mark.sweep
def test_two_processes_read_each_others_rows_of_every_node_type(tmp_path):
    write_typed(tmp_path / "store")
    for (plain, placed), reads in launch(2, train_on_node_types, tmp_path / "run", tmp_path / "store", limit_s=120):
        assert plain == placed and len(plain) > 6
        assert sum(reads.values()) == sum(sum(map(len, rows)) for _, rows in plain)
        assert all(reads[tier] > 0 for tier in ("local", "peer", "host", "cache"))


def test_a_placement_for_another_number_of_devices_is_refused_on_every_rank(tmp_path):
    write_store(tmp_path / "store")
    launch(2, place_for_one, tmp_path / "run", tmp_path / "store", limit_s=90)


def settle_on_ranks(folder, root):
    """Train with rows that place themselves, on GPUs that the CPU stands for, and with rows of the store."""
    for module in (partition, placed_training, tiers):
        module.device_name = lambda trainer: f"cuda:{trainer.global_rank}"
    for module in (placed_training, tiers):
        module.gpu_uuid = str
    placed_training.gpus_seen = lambda uuids: [None] * len(uuids)  # no peers
    placed_training.gpu_name = str
    partition.predict_evaluation = lambda *_: 0
    cuda_tiers.device_of = lambda on, device: torch.device("cpu")
    results = {}
    for rows in ("auto", "mapped"):
        dm = gs.PartitionDataModule(store=root, sampler=gs.NeighborSampler([3, 3]), batch_size=8, rows=rows)
        features, num_nodes = dm.store.features, dm.store.num_nodes
        row = features.dim * features.dtype.itemsize
        # The other rank has space for 10 rows more, and this one's host for half of what the other's has.
        space = 8 * num_nodes + (12 + 10 * dist.get_rank()) * row
        cuda_tiers.free_device_memory = lambda gpu, space=space: (int(space / 0.9) + 1, 0)
        tiers.free_memory_bytes = lambda row=row: (20 + 20 * dist.get_rank()) * row
        torch.manual_seed(0)
        model = gs.NodeClassifier(gs.model.GraphSAGE(features.dim, 8, dm.num_classes), lr=0.02).double()
        trainer = L.Trainer(
            accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False,
            default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
            strategy=gs.GNNScaleStrategy(weights=gs.GradientAveraging()),
        )  # fmt: skip
        trainer.fit(model, dm)
        results[rows] = model.state_dict()
    placed = [event for event in events.recent() if event["event"] == "placement"]
    return results, [(one["buffer_rows"], one["tier_bytes"]["pinned"] // row) for one in placed]


def test_ranks_settle_together_by_the_least_that_is_free(tmp_path):
    write_store(tmp_path / "store")
    for results, placed in launch(2, settle_on_ranks, tmp_path / "run", tmp_path / "store", limit_s=120):
        assert placed == [(12, 10)]
        assert all(torch.equal(value, results["auto"][name]) for name, value in results["mapped"].items())
