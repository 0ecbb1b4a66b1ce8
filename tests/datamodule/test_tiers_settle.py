"""Rows that place themselves once the first step is done, on a GPU that the CPU stands for."""

import logging
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from loader.test_device_batches import LateStream
from oracles.typed_rows import write_typed

import lightning_gnnscale as gs
from lightning_gnnscale import events
from lightning_gnnscale.datamodule import partition, placed_training, tiers
from lightning_gnnscale.errors import PlacementError
from lightning_gnnscale.loader.device_batches import DeviceBatches
from lightning_gnnscale.placement import PlacementSettings, cuda_tiers
from lightning_gnnscale.planner.tier_sizes import FreeMemory
from tests.says import said

pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose memory is the CPU's, and whose kernels run in the interpreter; `free` bytes are free there."""
    told = SimpleNamespace(free=1 << 40, step=0, asked=0, host=1 << 40)

    def free_memory(device):
        told.asked += 1
        return told.free, told.step

    for module in (partition, placed_training, tiers):
        monkeypatch.setattr(module, "device_name", lambda trainer: "cuda:0")
    monkeypatch.setattr(cuda_tiers, "device_of", lambda on, device: torch.device("cpu"))
    monkeypatch.setattr(cuda_tiers, "free_device_memory", free_memory)
    monkeypatch.setattr(tiers, "free_memory_bytes", lambda: told.host)
    monkeypatch.setattr(partition, "predict_evaluation", lambda *_: 0)
    monkeypatch.setattr(placed_training, "gpu_name", lambda device: "Fake GPU-0123")
    return told


def make(store_root, rows="auto", **options) -> gs.PartitionDataModule:
    settings = {"sampler": gs.NeighborSampler([3, 2]), "batch_size": 64, "seed": 1, "rows": rows} | options
    return gs.PartitionDataModule(store=store_root, **settings)


class Watch(L.Callback):
    """Keeps, by batch, the rows that the device had when the batch came."""

    def __init__(self):
        self.rows = []

    def on_train_batch_start(self, trainer, module, batch, index):
        buffer = trainer.datamodule.buffer
        self.rows.append(None if buffer is None else len(buffer.placement.rows[0]))
        assert batch.has_features


def fit(dm, callbacks=(), max_epochs=2, weights=None, model=None, **options):
    torch.manual_seed(0)
    model = model or gs.NodeClassifier(gs.model.GraphSAGE(dm.store.features.dim, 8, dm.num_classes), lr=0.02)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=max_epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, callbacks=list(callbacks),
        strategy=gs.GNNScaleStrategy(weights=weights or gs.GradientAveraging()), **options,
    )  # fmt: skip
    trainer.fit(model, dm)
    return {name: value.clone() for name, value in model.state_dict().items()}, trainer


def last(name: str) -> dict:
    return [event for event in events.recent() if event["event"] == name][-1]


def of_rows(store_root) -> tuple[int, int]:
    store = gs.PartitionStore.open(store_root)
    return store.num_nodes, store.features.raw.dim * store.features.raw.dtype.itemsize


@pytest.mark.parametrize("weights", [gs.GradientAveraging, gs.ModelAveraging])
def test_the_tiers_are_filled_after_the_first_step_and_no_bit_changes(store_root, gpu, weights, caplog):
    num_nodes, row = of_rows(store_root)
    gpu.free = int((100 * row + 8 * num_nodes) / 0.9) + 1
    gpu.host = 200 * row
    watch = Watch()
    with caplog.at_level(logging.INFO, "lightning.pytorch.rows"):
        placed, trainer = fit(make(store_root), [watch], weights=weights())
    assert watch.rows[0] == 0 and set(watch.rows[1:]) == {100} and len(watch.rows) > 4
    assert gpu.asked == 1, "asked once a fit"
    told = last("placement")
    assert told["gpu"] == "Fake GPU-0123" and told["free_bytes"]["device"] == gpu.free
    held = told["tier_bytes"]
    assert held["device"] == 100 * row and held["pinned"] == 100 * row and held["peer"] == 0
    assert sum(held.values()) == num_nodes * row and held["host"] > 0 and held["disk"] > 0
    lines = [record.getMessage() for record in caplog.records if record.name == "lightning.pytorch.rows"]
    assert len(lines) == 1 and "on each device" in lines[0] and "were free" in lines[0]
    reads = last("reads")
    assert reads["local"] > reads["disk"] / 3 and reads["host"] > 0
    assert not any(isinstance(one, L.pytorch.callbacks.LambdaCallback) for one in trainer.callbacks)
    plain, _ = fit(make(store_root, "mapped"), weights=weights())
    assert all(torch.equal(plain[name], placed[name]) for name in plain)


def test_steps_of_several_batches_are_waited_for(store_root, gpu):
    watch = Watch()
    fit(make(store_root), [watch], max_epochs=1, accumulate_grad_batches=3)
    assert watch.rows[:3] == [0, 0, 0] and min(watch.rows[3:]) > 0


def test_a_second_fit_settles_again(store_root, gpu):
    dm = make(store_root)
    for asked in (1, 2):
        fit(dm, max_epochs=1)
        assert gpu.asked == asked and dm.buffer is None


def test_rows_stay_in_the_files_where_no_memory_takes_them(store_root, gpu, monkeypatch):
    def full(layout, number, device):
        if len(layout.placement.rows[number]):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return fill(layout, number, device)

    fill = cuda_tiers.fill_device
    monkeypatch.setattr(cuda_tiers, "fill_device", full)
    watch = Watch()
    with pytest.warns(UserWarning, match="feature rows stay in the store's files"):
        fit(make(store_root), [watch], max_epochs=1)
    assert set(watch.rows) == {0}
    with pytest.raises(PlacementError, match=said("cuda:0 rows.buffer_rows")):
        fit(make(store_root, PlacementSettings(alpha=0), scope="graph"), max_epochs=1)


def test_a_share_that_is_given_is_taken_from_the_start_and_the_host_pins_what_it_can(store_root, gpu):
    num_nodes, row = of_rows(store_root)
    gpu.host = 300 * row
    watch = Watch()
    fit(make(store_root, PlacementSettings(buffer_share=0.1, alpha=0)), [watch], max_epochs=1)
    assert set(watch.rows) == {round(0.1 * num_nodes)}
    assert last("placement")["tier_bytes"]["pinned"] == 150 * row


def test_a_bias_needs_the_placement_from_the_start(store_root, gpu):
    num_nodes, row = of_rows(store_root)
    gpu.free = int(2 * (50 * row + 8 * num_nodes) / 0.9) + 2
    watch = Watch()
    fit(make(store_root, PlacementSettings(alpha=0, locality_scale=2.0)), [watch], max_epochs=1)
    assert set(watch.rows) == {50}, "half of what is free before the first step"


@pytest.mark.parametrize("share", ["auto", 0.1])
def test_belady_looks_ahead_of_the_copies_to_the_gpu(store_root, gpu, monkeypatch, share):
    """Its cache is read more often than one that knows nothing, whether the tiers settle late or not."""
    num_nodes, row = of_rows(store_root)
    gpu.free, gpu.host = int((40 * row + 8 * num_nodes) / 0.9) + 1, 0

    def sending(dm, placed=None):
        if placed is None:
            return None
        foretell = placed.foretell if placed.settings.foretells else None
        return DeviceBatches(torch.device("cpu"), 2, placed.fill, LateStream(), foretell)

    monkeypatch.setattr(gs.PartitionDataModule, "_sending", sending)
    trained, read = {}, {}
    for policy in ("lru", "belady"):
        settings = {"cache_rows": 60, "cache_policy": policy, "lookahead_batches": 4, "probability": "vip"}
        dm = make(store_root, PlacementSettings(buffer_share=share, alpha=0, **settings))
        trained[policy], _ = fit(dm, max_epochs=4)
        read[policy] = last("reads")
        assert not dm._placed._ahead
    assert read["belady"]["cache"] > read["lru"]["cache"] > 0 and read["belady"]["local"] > 0
    assert all(torch.equal(value, trained["belady"][name]) for name, value in trained["lru"].items())


def test_ranks_take_the_least_of_all_and_share_a_gpu(gpu, monkeypatch):
    """Ranks 0 and 2 are on one GPU, with 60 bytes free; rank 1 has 40 to itself."""
    told = [("a", 60), ("b", 40), ("a", 60)]
    gpu.host = 100
    for rank in (0, 1):
        uuid, gpu.free = told[rank]
        monkeypatch.setattr(tiers, "gpu_uuid", lambda device, uuid=uuid: uuid)
        others = [(name, FreeMemory.of_host(free, 100, step)) for step, (name, free) in enumerate(told)]
        monkeypatch.setattr(tiers, "gather_objects", lambda own, others=others: others)
        found = tiers.free_memory(SimpleNamespace(world_size=3), evaluation_bytes=7)
        assert found == FreeMemory(30, 100, 50, 2, 7)


def test_host_rows_beyond_free_memory_are_refused(store_root, gpu, monkeypatch):
    monkeypatch.setattr(cuda_tiers, "free_memory_bytes", lambda: 1000)
    store = gs.PartitionStore.open(store_root)
    placement = gs.place(np.ones(store.num_nodes), 1, 10, alpha=0)
    with pytest.raises(PlacementError, match=said("host rows 1000 host_rows")):
        gs.FeatureBuffer(placement, store.features, on="cuda")


def test_node_types_are_placed_by_bytes(tmp_path, gpu):
    store = write_typed(tmp_path / "store")
    gpu.free, gpu.host = 8 * store.num_nodes + 6000, 1 << 20
    dm = make(tmp_path / "store")
    dm.setup("predict")
    model = gs.model.RGCN(dm.feature_dims, 8, dm.num_classes, schema=dm.schema)
    fit(dm, max_epochs=1, model=gs.NodeClassifier(model, lr=0.02))
    held = last("placement")["tier_bytes"]
    assert 0 < held["device"] <= 6000 and held["pinned"] > 0
    assert sum(held.values()) == store.features.row_bytes.sum(dtype=np.int64)
    assert last("reads")["local"] > 0


@pytest.mark.parametrize("rows", ["mapped", "planned"])
def test_other_settings_place_nothing_by_themselves(store_root, gpu, rows):
    fit(make(store_root, rows), max_epochs=1)
    assert gpu.asked == 0


def test_on_a_cpu_nothing_is_placed_and_an_event_says_so(store_root, caplog):
    with caplog.at_level(logging.INFO, "lightning.pytorch.rows"):
        fit(make(store_root), max_epochs=1)
    lines = [record.getMessage() for record in caplog.records if record.name == "lightning.pytorch.rows"]
    assert not lines, "there was no choice"
    told = last("row_reads")
    assert told["how"] == "mapped" and "no GPU" in told["not_placed"]
