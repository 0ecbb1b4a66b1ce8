"""The plan of a run with placement counts the buffer of each device, its places and its cache."""

from dataclasses import replace

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.planner import predict_training
from lightning_gnnscale.planner.host_memory import BatchShape, RunSize

NODES, DIM = 1000, 64
RUN = RunSize(NODES, 8000, 4, 2)
BATCHES = BatchShape(feature_dim=DIM, batch_size=32, fanouts=[5, 5], hidden_channels=16)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("rows", [200, 0.2])
def test_a_buffer_is_its_rows_and_a_place_a_node(rows, on_gpu):
    none = predict_training(RUN, BATCHES, on_gpu=on_gpu, placed_rows=0)
    placed = predict_training(RUN, BATCHES, on_gpu=on_gpu, placed_rows=rows, cache_rows=50)
    assert placed - none == pytest.approx((200 + 50) * 4 * DIM, abs=1)


def test_places_are_eight_bytes_a_node():
    without = predict_training(RUN, BATCHES)
    assert predict_training(RUN, BATCHES, placed_rows=0) - without == pytest.approx(8 * NODES, abs=1)


def test_a_gpu_holds_the_batches_copied_ahead_and_the_host_their_pinned_copies():
    def told(where: dict, **counts: int) -> int:
        return predict_training(RUN, replace(BATCHES, **counts), **where)

    gpu, host = {"on_gpu": True}, {"to_gpu": True}
    batch = told({}, prefetch_batches=2) - told({}, prefetch_batches=1)
    assert batch > 0 and told(gpu, device_batches=4) - told(gpu, device_batches=2) == pytest.approx(2 * batch, abs=8)
    assert told(gpu, prefetch_batches=9) == told(gpu, prefetch_batches=1)
    assert told(host, device_batches=3) - told({}) == pytest.approx(3 * batch, abs=8)
    assert told({}, device_batches=9) == told({}, device_batches=1)


@pytest.mark.parametrize("rows", [-1, "many"])
def test_placed_rows_are_a_number(rows):
    with pytest.raises(ValueError, match="placed_rows must be"):
        predict_training(RUN, BATCHES, placed_rows=rows)


def planned(tmp_path, placement, **options):
    ring = np.stack([np.arange(NODES), (np.arange(NODES) + 1) % NODES])
    dataset = GraphDataset("ring", gs.open_edge_stream(ring, num_nodes=NODES), np.ones((NODES, DIM), np.float32))
    data = gs.PartitionDataModule(
        root=tmp_path / "store", dataset=dataset, partitioner="random", num_parts=2, rows=placement or "auto"
    )
    return data.make_plan(2, **options)


def test_the_plan_of_a_datamodule_counts_its_placement(tmp_path):
    rule = gs.PlacementSettings(buffer_share=0.3, alpha=0.2)
    without, placed = (planned(tmp_path, placement) for placement in (None, rule))
    assert placed.device_peak_bytes - without.device_peak_bytes == pytest.approx(300 * 4 * DIM + 8 * NODES, abs=2)
    of_number = planned(tmp_path, gs.PlacementSettings(buffer_rows=300, alpha=0.2))
    assert of_number.device_peak_bytes == placed.device_peak_bytes
    made = gs.place(np.linspace(1, 2, NODES), 2, 300)
    assert planned(tmp_path, made).device_peak_bytes == placed.device_peak_bytes


def test_on_gpus_the_rows_are_theirs_and_the_host_pins_the_others(tmp_path):
    rule = gs.PlacementSettings(buffer_share=0.3, alpha=0.2)
    without, placed = (planned(tmp_path, placement, accelerator="gpu") for placement in ("mapped", rule))
    row = 4 * DIM
    assert placed.host_peak_bytes["train"] - without.host_peak_bytes["train"] == pytest.approx(400 * row, abs=row)
    assert placed.device_peak_bytes - without.device_peak_bytes == pytest.approx(300 * row + 8 * NODES, abs=row)
    assert placed.tier_bytes == pytest.approx({"device": 300 * row, "peer": 300 * row, "pinned": 400 * row, "host": 0,
                                              "disk": 0}, abs=row)  # fmt: skip
    assert planned(tmp_path, None, accelerator="gpu").tier_bytes["device"] == NODES * row, "rows=auto"
    few = planned(tmp_path, gs.PlacementSettings(buffer_share=0.3, host_rows=100, alpha=0.2), accelerator="gpu")
    assert few.tier_bytes["pinned"] == pytest.approx(100 * row, abs=row) and few.tier_bytes["host"] > 0


def of_gpu(gpu: int, host: int | None = None, **given):
    sizes = {"num_nodes": NODES, "num_edges": 8000, "feature_bytes": NODES * 400, "feature_dim": 100, "num_parts": 2}
    sizes |= {"device_memory_bytes": gpu, "host_memory_bytes": host, "accelerator": "gpu", "placed_rows": "auto"}
    return gs.plan(**sizes | given)


def test_rows_fill_what_training_leaves_of_a_gpu():
    """Of a GPU that the batches leave 400 kB, nine tenths are rows and their places; the rest are pinned."""
    peak = of_gpu(1 << 40).device_peak_bytes - NODES * 408
    made = of_gpu(peak + 300_000, 8 << 30)
    assert made.tier_bytes["device"] == pytest.approx(0.9 * 300_000 - 8 * NODES, abs=2)
    assert made.tier_bytes["pinned"] == NODES * 400 - made.tier_bytes["device"] and made.fits
    terms = dict(made.terms())
    assert terms["feature rows, on a GPU"] and terms["feature rows, pinned on the host"]
    assert made.device_peak_bytes <= peak + 300_000
    assert sum(of_gpu(1, 1 << 20).tier_bytes.values()) == NODES * 400, "no space: all stay in the files"
    assert of_gpu(1 << 40, placeable_bytes=0).tier_bytes == {}, "sparse rows are not placed"


def test_without_gpus_nothing_is_placed_by_itself():
    sizes = {"num_nodes": NODES, "num_edges": 8000, "feature_bytes": NODES * 400, "feature_dim": 100, "num_parts": 2}
    on_cpu = {**sizes, "device_memory_bytes": None, "host_memory_bytes": None, "accelerator": "cpu"}
    plain = gs.plan(**on_cpu)
    assert gs.plan(**on_cpu, placed_rows="auto") == plain and plain.tier_bytes == {}
    simulated = gs.plan(**on_cpu, placed_rows="auto", simulated_rows=0.1)
    assert simulated.device_peak_bytes - plain.device_peak_bytes == pytest.approx(100 * 400 + 8 * NODES, abs=1)


@pytest.mark.parametrize("storage", [None, "float16", "bfloat16", "int8", "int4"])
def test_what_is_planned_is_what_a_buffer_takes(tmp_path, storage):
    ring = np.stack([np.arange(NODES), (np.arange(NODES) + 1) % NODES])
    features = np.random.default_rng(0).standard_normal((NODES, DIM), np.float32)
    columns = {"labels": np.zeros(NODES, np.int64), "masks": {"train": np.ones(NODES, bool)}}
    dataset = GraphDataset("ring", gs.open_edge_stream(ring, num_nodes=NODES), features, **columns)
    dataset.feature_storage = storage
    rows = gs.PlacementSettings(buffer_rows=700, alpha=0.2, cache_rows=200)
    made = {"root": tmp_path / "store", "dataset": dataset, "partitioner": "random", "num_parts": 2}
    data, without = (gs.PartitionDataModule(**made, rows=one) for one in (rows, "mapped"))
    told = data.make_plan(1).device_peak_bytes - without.make_plan(1).device_peak_bytes
    data.prepare_data()
    data.setup("fit")
    taken = data.buffer.nbytes
    data.teardown("fit")
    assert told == pytest.approx(taken, rel=0.15)
