"""What an epoch's events say of real trainings: activities add up, batches are counted, the first and last by time."""

from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import scipy.sparse
import torch

import lightning_gnnscale as gs
from lightning_gnnscale import events
from lightning_gnnscale.datamodule import EpochTimes
from lightning_gnnscale.datamodule.callbacks import _sizes
from lightning_gnnscale.graph import Batch
from lightning_gnnscale.sampler.minibatch import RowsByNodeType, SparseFeatures
from tests.tiers import first

SOURCES = {"threads": gs.Threads(), "tasks": gs.TaskGraphs()}


def trained(tmp_path, source=None, epochs: int = 3, sparse: bool = False, **options):
    sample = np.random.default_rng(0)
    edges = sample.integers(0, 600, (2, 6000))
    stream = gs.open_edge_stream(edges, num_nodes=600, to_undirected=True)
    features = sample.normal(size=(600, 8)).astype(np.float32)
    if sparse:
        features = scipy.sparse.csr_array(np.maximum(features, 0))
    masks = {"train": np.arange(600) % 2 == 0, "val": np.arange(600) % 2 == 1}
    dm = gs.PartitionDataModule(
        root=tmp_path / "store", stream=stream, features=features, labels=sample.integers(0, 3, 600),
        masks=masks, num_parts=2, batch_size=50, source=source or gs.Threads(),
        sampler=gs.NeighborSampler([4, 3]), **options,
    )  # fmt: skip
    dm.prepare_data()
    model = gs.NodeClassifier(gs.model.GraphSAGE(8, 8, 3, num_layers=2), lr=0.01)
    before = len(events.recent())
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, strategy="gnnscale", callbacks=[EpochTimes()], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, dm)
    log = [event for event in events.recent()[before:] if event["event"] in ("epoch_times", "timeline")]
    return log, trainer.num_training_batches


@first(1)
@pytest.mark.parametrize("name", SOURCES)
def test_an_epoch_is_told_whole(tmp_path, name):
    log, num_batches = trained(tmp_path, SOURCES[name])
    times = [event for event in log if event["event"] == "epoch_times"]
    assert [event["epoch"] for event in times] == [0, 1, 2]
    for event in times:
        spent = event["training"]
        assert event["seconds"] == pytest.approx(sum(spent.values()), abs=1e-4)
        assert {"wait", "transfer", "forward", "backward", "update", "validation", "other"} <= set(spent)
        assert min(spent.values()) >= 0
        assert event["counts"]["seeds"] == 300
        assert event["counts"]["batches"] == num_batches
        assert event["counts"]["row_bytes"] == 32 * event["counts"]["nodes"]
        assert event["hop_nodes"][0] == 300
        assert sum(event["hop_nodes"]) == event["counts"]["nodes"]
        assert sum(event["hop_edges"]) == event["counts"]["edges"]
        assert {"sample", "read"} <= set(event["beside"])
    assert times[1]["began"] + times[1]["seconds"] == pytest.approx(times[2]["began"], abs=0.05)
    shown = [event for event in log if event["event"] == "timeline" and event["lane"] == "training"]
    assert [event["epoch"] for event in shown] == [0, 2]
    for event, told in zip(shown, (times[0], times[2]), strict=True):
        for activity, bins in event["by_time"].items():
            assert sum(bins) == pytest.approx(told["training"][activity], abs=0.05 * len(bins) * 1e-3 + 1e-3)


@pytest.mark.sweep
def test_worker_processes_tell_when_they_sampled_and_read(tmp_path):
    log, _ = trained(tmp_path, gs.Processes(num_workers=1), epochs=2)
    last = next(event for event in reversed(log) if event["event"] == "epoch_times")
    assert last["beside"]["sample"] > 0 and last["beside"]["read"] > 0
    assert last["beside"]["sample"] + last["beside"]["read"] <= 2 * last["seconds"]


@pytest.mark.parametrize("how", ["resident", "planned"])
def test_rows_that_are_read_ahead_count_as_read(tmp_path, how):
    log, _ = trained(tmp_path, epochs=2, rows=how)
    last = next(event for event in reversed(log) if event["event"] == "epoch_times")
    assert last["beside"]["read"] > 0


def test_sparse_rows_count_by_the_bytes_that_are_brought(tmp_path):
    log, _ = trained(tmp_path, epochs=1, sparse=True)
    counts = next(event["counts"] for event in log if event["event"] == "epoch_times")
    pointers = 8 * (counts["nodes"] + counts["batches"])
    assert pointers < counts["row_bytes"] <= pointers + 12 * 8 * counts["nodes"]


def test_one_epoch_is_shown_once_and_a_failure_ends_it(tmp_path):
    log, _ = trained(tmp_path, epochs=1)
    assert [event["lane"] for event in log if event["event"] == "timeline"] == ["training", "beside"]
    assert events.clock.end() is False


def test_an_epoch_tells_the_bytes_read_from_disk_in_it(monkeypatch):
    reads = iter([1000, 1030, 1050, 1090])  # of the process, as two epochs begin and end
    monkeypatch.setattr("lightning_gnnscale.datamodule.callbacks.disk_read_bytes", lambda: next(reads))
    trainer = SimpleNamespace(global_rank=0, strategy=SimpleNamespace(root_device=torch.device("cpu")))
    times, before = EpochTimes(), len(events.recent())
    for trainer.current_epoch in range(2):
        times.on_train_epoch_start(trainer, None)
    times.on_train_end(trainer, None)
    log = [event for event in events.recent()[before:] if event["event"] == "epoch_times"]
    assert [event["disk_bytes"] for event in log] == [30, 40]


def test_rows_of_several_node_types_are_counted_as_they_are_held():
    class OfTypes(Batch):
        n_id, batch_size, full_graph, indices = torch.arange(5), 2, False, None
        edge_index = torch.zeros(2, 3, dtype=torch.int64)
        x_by_node_type = RowsByNodeType(
            torch.tensor([0, 0, 1, 2, 2]),
            [
                torch.zeros(2, 4),
                SparseFeatures(torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int32), torch.zeros(3), 9),
                None,
            ],
        )

    assert _sizes(OfTypes())["row_bytes"] == 2 * 4 * 4 + 2 * 8 + 3 * 4 + 3 * 4
