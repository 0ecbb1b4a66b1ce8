"""The plan of a run with placement counts the buffer of each device, its places and its cache."""

from dataclasses import replace

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.planner import predict_training
from lightning_gnnscale.planner.sizes import BatchShape, RunSize

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


def test_on_gpus_the_rows_are_theirs(tmp_path):
    rule = gs.PlacementSettings(buffer_share=0.3, alpha=0.2)
    without, placed = (planned(tmp_path, placement, accelerator="gpu") for placement in (None, rule))
    assert placed.host_peak_bytes["train"] == without.host_peak_bytes["train"]
    assert placed.device_peak_bytes != without.device_peak_bytes
