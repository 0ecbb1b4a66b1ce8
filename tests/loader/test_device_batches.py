"""Batches copied to a device ahead of their use, on a stream whose copies are done as late as its events allow."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loader.test_part_loader import all_contents, contents, make_loader
from torch_geometric.data import Data, HeteroData

import lightning_gnnscale as gs
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.loader import Processes, RankPlace, device_batches
from lightning_gnnscale.loader.device_batches import DeviceBatches, tensors_of
from lightning_gnnscale.loader.part_loader import PartLoader
from lightning_gnnscale.sampler.data_sampler import DataSampler
from lightning_gnnscale.sampler.minibatch import MiniBatch, RowsByNodeType, SparseFeatures
from tests.says import said

GPU = torch.device("cuda", 0)  # no tensor is made there


class Event:
    """Passes once the stream has done its first `number` operations."""

    def __init__(self, stream: "LateStream", number: int):
        self.stream, self.number = stream, number

    def query(self) -> bool:
        return self.stream.done >= self.number

    def synchronize(self) -> None:
        self.stream.run(self.number)


class LateStream:
    """A stream on the CPU that runs a copy only when the host waits for it; what it has not copied yet is garbage.

    Args:
        fails: The stage that fails, "pin" or "send".
        reads: Whether whoever is handed a batch reads it at once, on the host.
    """

    def __init__(self, fails: str | None = None, reads: bool = True):
        self.todo, self.done, self.fails, self.reads, self.is_running = [], 0, fails, reads, False
        self.blocks, self.handed, self.lock = [], [], threading.RLock()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        if self.fails == "pin":
            raise RuntimeError("CUDA error: out of memory\nmore")
        self.blocks.append(num_bytes)
        return torch.full((num_bytes,), 0xAA, dtype=torch.uint8)

    @contextmanager
    def running(self):
        self.is_running = True
        yield
        self.is_running = False

    def send(self, block: torch.Tensor) -> torch.Tensor:
        assert self.is_running
        if self.fails == "send":
            raise torch.OutOfMemoryError("CUDA out of memory")
        there = torch.full_like(block, 0xEE)
        with self.lock:
            self.todo.append((there, block))
        return there

    def mark(self) -> Event:
        return Event(self, len(self.todo))

    def run(self, number: int) -> None:
        with self.lock:
            for there, block in self.todo[self.done : number]:
                there.copy_(block)
            self.done = max(self.done, number)

    def hand_over(self, event: Event, tensors: list) -> None:
        self.handed.append(event.number)
        if self.reads:
            event.synchronize()


def moved(batches, ahead: int = 2, stream: LateStream | None = None, fill=None) -> tuple[DeviceBatches, list]:
    pipeline = DeviceBatches(GPU, ahead, fill, stream or LateStream())
    return pipeline, pipeline.moved(batch for batch in batches)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "gnnscale-device-batch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert threads() == []


def batch_of_every_form(number: int) -> MiniBatch:
    """Odd sizes, an empty array, sparse rows, rows by node type, a further column, bools."""
    rng = np.random.default_rng(number)
    num = 3 + number % 7
    rows = lambda *shape: torch.from_numpy(rng.random(shape, np.float32))  # noqa: E731
    sparse = SparseFeatures(torch.arange(num + 1), torch.zeros(num, dtype=torch.int32), rows(num).half(), 4)
    return MiniBatch(
        n_id=torch.from_numpy(rng.integers(0, 99, num)),
        edge_index=torch.zeros((2, 0), dtype=torch.int64),
        indptr=torch.zeros(num + 1, dtype=torch.int64),
        batch_size=2,
        part=0,
        key=number,
        x_csr=sparse,
        x_by_node_type=RowsByNodeType(torch.zeros(num, dtype=torch.int64), [rows(num, 5), None]),
        train_mask=torch.from_numpy(rng.random(num) < 0.5),
        loss_weight=rows(2),
        columns={"image": torch.from_numpy(rng.integers(0, 255, (num, 3)).astype(np.uint8)), "words": sparse},
    )


def same(one: MiniBatch, other: MiniBatch) -> bool:
    pairs = list(zip(tensors_of(one), tensors_of(other), strict=True))
    return one.key == other.key and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_every_array_arrives_and_no_block_is_filled_before_its_copy_is_done(ahead):
    """Copies run as late as they may: a block that is filled too early shows."""
    stream, num = LateStream(reads=False), 200
    pipeline, batches = moved((batch_of_every_form(number) for number in range(num)), ahead, stream)
    kept = [*batches]
    stream.run(num)
    assert len(kept) == num and all(same(batch, batch_of_every_form(number)) for number, batch in enumerate(kept))
    assert stream.handed == [*range(1, num + 1)], "each is handed over behind its own copy"
    assert len(stream.blocks) <= ahead + 2
    assert pipeline.pinned_bytes <= (ahead + 1) * max(stream.blocks)
    pipeline.close()
    assert pipeline.pinned_bytes == 0


def test_no_more_batches_are_taken_ahead_than_asked_for():
    taken, asked = [], threading.Event()

    def source():
        for number in range(9):
            taken.append(number)
            if len(taken) == 3:
                asked.set()
            yield batch_of_every_form(number)

    batches = DeviceBatches(GPU, 2, None, LateStream()).moved(source())
    next(batches)
    assert asked.wait(10)
    assert len(taken) == 3, "the one in use, and two ahead"
    batches.close()


def test_a_thousand_batches_leave_nothing():
    stream = LateStream()
    pipeline, batches = moved((batch_of_every_form(number % 7) for number in range(1000)), 2, stream)
    assert sum(1 for _ in batches) == 1000
    assert len(stream.blocks) <= 4 and len(pipeline._free) + len(pipeline._copying) <= 3


def fails_at(number: int):
    for each in range(number):
        yield batch_of_every_form(each)
    raise ValueError("the disk is gone")


@pytest.mark.parametrize(
    ("stage", "error", "told"),
    [
        ("source", ValueError, "the disk is gone"),
        ("pin", GNNScaleError, "KiB cannot be pinned CUDA error ulimit device_batches=0"),
        ("send", GNNScaleError, "cuda:0 no memory for 2 batches device_batches=1 batch_size"),
        ("fill", KeyError, "row 7"),
    ],
)
def test_a_failure_of_each_stage_reaches_the_one_who_asks(stage, error, told):
    def fill(batch, nodes):
        if stage == "fill" and batch.key == 2:
            raise KeyError("row 7")

    num = 3 if stage == "source" else 9
    source = fails_at(num) if stage == "source" else (batch_of_every_form(number) for number in range(num))
    pipeline = DeviceBatches(GPU, 2, fill, LateStream(stage))
    with pytest.raises(error, match=said(told)):
        assert all(same(batch, batch_of_every_form(number)) for number, batch in enumerate(pipeline.moved(source)))
    pipeline.close()
    assert pipeline.pinned_bytes == 0


def test_an_iteration_that_is_broken_off_ends_its_thread_and_closes_its_source():
    closed = []

    def source():
        try:
            yield from map(batch_of_every_form, range(100))
        finally:
            closed.append(threading.current_thread().name)

    for _ in DeviceBatches(GPU, 2, None, LateStream()).moved(source()):
        break
    assert closed == ["gnnscale-device-batch"] and threads() == []


def test_rows_on_the_device_are_gathered_on_the_stream_by_ids_of_the_host():
    stream, seen = LateStream(), []

    def fill(batch, nodes):
        assert stream.is_running
        seen.append(nodes.clone())
        batch.x = torch.full((len(nodes), 2), float(batch.key))

    plain = [batch_of_every_form(number) for number in range(5)]
    _, batches = moved(plain, 2, stream, fill)
    assert [float(batch.x[0, 0]) for batch in batches] == [0, 1, 2, 3, 4]
    assert all(torch.equal(nodes, batch.n_id) for nodes, batch in zip(seen, plain, strict=True))


@pytest.mark.parametrize("how", [{"num_threads": 0}, {"num_threads": 2}, {"source": "processes"}])
def test_a_loader_gives_the_same_batches_through_it(how):
    options = dict(how)
    if options.pop("source", None):
        options["source"] = Processes(num_workers=2).connect(RankPlace())
    expected = all_contents(make_loader(num_threads=0))
    loader = make_loader(**options)
    loader.send_to(DeviceBatches(GPU, 2, None, LateStream()))
    for _ in range(2):
        assert all_contents(loader) == expected
    loader.close()


def test_a_checkpoint_counts_the_batches_handed_over_not_those_ahead():
    expected = all_contents(make_loader(num_threads=0))
    loader = make_loader(num_threads=1)
    loader.send_to(DeviceBatches(GPU, 3, None, LateStream()))
    iteration = iter(loader)
    first = [contents(next(iteration)) for _ in range(4)]
    state = loader.state_dict()
    assert state["delivered"] == 4
    iteration.close()
    resumed = make_loader(num_threads=1)
    resumed.load_state_dict(state)
    resumed.send_to(DeviceBatches(GPU, 3, None, LateStream()))
    assert first + all_contents(resumed) == expected
    for one in (loader, resumed):
        one.close()


@pytest.mark.parametrize(("ahead", "device", "number"), [(2, GPU, 2), (0, GPU, None), (2, torch.device("cpu"), None)])
def test_a_datamodule_sends_its_training_batches_to_a_gpu(tmp_path, monkeypatch, ahead, device, number):
    monkeypatch.setattr(device_batches, "CopyStream", lambda device: LateStream())
    for there in (PartLoader, DataSampler):  # no card is here to sample on
        monkeypatch.setattr(there, "sample_on", lambda self, device: None)
    graph = gs.SyntheticGraph(300, 1200, num_communities=3, seed=0)
    data = {"features": graph.features(4), "labels": graph.labels(), "masks": graph.masks()}
    options = {"num_parts": 2, "batch_size": 16, "device_batches": ahead, "partitioner": "random"}
    dm = gs.PartitionDataModule(root=tmp_path, stream=graph.stream(), **data, **options)
    dm.prepare_data()
    dm.setup()
    plain = all_contents(dm.train_dataloader())
    strategy = SimpleNamespace(root_device=device, broadcast=lambda value: value, weights=None)
    one = {"world_size": 1, "num_nodes": 1, "global_rank": 0, "node_rank": 0, "local_rank": 0, "overfit_batches": 0}
    dm.trainer = SimpleNamespace(strategy=strategy, lightning_module=None, **one)
    loader = dm.train_dataloader()
    assert (None if loader._device is None else loader._device.ahead) == number
    assert all_contents(loader) == plain
    dm.trainer = None
    dm.teardown("fit")


@pytest.mark.parametrize("node_types", [1, 2])
def test_a_loader_of_pyg_sends_its_batches_after_their_transform(monkeypatch, node_types):
    monkeypatch.setattr(device_batches, "CopyStream", lambda device: LateStream())
    for there in (PartLoader, DataSampler):  # no card is here to sample on
        monkeypatch.setattr(there, "sample_on", lambda self, device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    edges, x = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]]), torch.arange(10.0).view(5, 2)
    if node_types == 1:
        data, fanouts, seeds = Data(x, edges), [2, 2], None
    else:
        data = HeteroData({"a": {"x": x}, "b": {"x": -x}, ("a", "to", "b"): {"edge_index": edges}})
        fanouts, seeds = [2], "b"

    def transform(batch):
        batch.seen = torch.ones(1)
        return batch

    def batches(**options) -> list[dict]:
        loader = gs.NeighborLoader(data, fanouts, seeds, batch_size=2, transform=transform, **options)
        assert (loader._device is not None) == ("device" in options)
        return [batch.to_dict() for batch in loader]

    for one, other in zip(batches(device="cuda:0"), batches(), strict=True):
        assert str(one) == str(other) and "seen" in str(one)


@pytest.mark.parametrize(("device", "told"), [("gpu", "device cpu cuda:0 gpu"), ("cuda:3", "device 1 GPUs cpu cuda:3")])
def test_a_device_that_is_not_there(monkeypatch, device, told):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    data = Data(torch.zeros(2, 1), torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match=said(told)):
        gs.NeighborLoader(data, [1], device=device)
    assert gs.NeighborLoader(data, [1], device="cpu")._device is None


def test_batches_ahead_on_a_device_are_a_count(tmp_path):
    with pytest.raises(ValueError, match=said("device_batches 0 -1")):
        gs.PartitionDataModule(store=tmp_path, device_batches=-1)


@pytest.mark.gpu
def test_on_a_gpu_nothing_of_a_step_waits_for_the_device():
    device = torch.device("cuda", torch.cuda.current_device())
    expected, loader = [*make_loader(num_threads=0)], make_loader(num_threads=2)
    loader.send_to(DeviceBatches(device, 2))
    weight = torch.ones(expected[0].x.shape[1], 8, device=device)
    next(iter(loader))
    torch.cuda.synchronize()
    arrived, sums = [], []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in loader:
            sums.append((batch.x @ weight).sum())
            arrived.append(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch, plain in zip(arrived, expected, strict=True):
        assert all(tensor.device == device for tensor in tensors_of(batch))
        assert same(batch.to("cpu"), plain)
    assert np.allclose([float(one) for one in sums], [float((one.x @ weight.cpu()).sum()) for one in expected])
    loader.close()
