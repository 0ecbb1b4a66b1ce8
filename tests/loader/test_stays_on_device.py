"""Batches that a device sampled, up to a training step: the host waits ahead of it, in the pipeline's thread alone."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

import lightning_gnnscale as gs
from benchmarks.gpu_graph import NUM_EDGE_TYPES, generate
from benchmarks.graphs import NUM_CLASSES
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.graph import numbered_schema
from lightning_gnnscale.loader import LoaderOptions, PartData, PartLoader
from lightning_gnnscale.loader.device_batches import DeviceBatches, tensors_of
from lightning_gnnscale.loader.device_columns import DeviceColumns
from lightning_gnnscale.loader.staged_part import node_values
from tests.fake_gpu import CUDA, DeviceTensor, FakeStream, fake_pipeline
from tests.says import said

CPU = torch.device("cpu")
SCHEMA = numbered_schema(NUM_EDGE_TYPES, "test")
AHEAD = 2
_OF = "lightning_gnnscale/sampler/device_stream.py"
# The sizes of a hop; the ids of rows that are read on the host, and counts of types; a block of rows on its way.
HOPS = {"tolist: triton_kernels/sample_neighbors/device.py, read"}
BLOCKS = {"synchronize an event: lightning_gnnscale/loader/device_batches.py, _block"}
IDS = {f"synchronize an event: {_OF}, read"}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return generate(300, 3000, 8, 64, 0, CPU, tmp_path_factory.mktemp("graph"))


def loader_of(graph, typed, resident, threads=0):
    whole = graph.whole(typed)
    features = None if resident else gs.partition_store.DenseFeatures(graph.features)
    data = PartData(lambda part: whole, features, node_values(graph.labels, {"train": np.ones(300, bool)}))
    options = LoaderOptions(16, num_threads=threads)
    return PartLoader([0], data, {0: graph.seeds}, gs.NeighborSampler([3, 2]), options)


def values(batch):
    return [one.held if isinstance(one, DeviceTensor) else one for one in tensors_of(batch)]


@pytest.mark.parametrize("resident", [True, False], ids=["resident rows", "rows of the host"])
@pytest.mark.parametrize("typed", [False, True])
def test_a_step_waits_for_nothing_and_the_pipeline_for_sizes_and_ids(graph, monkeypatch, typed, resident):
    pytest.importorskip("triton")
    plain = list(loader_of(graph, typed, False))
    with fake_pipeline(monkeypatch) as gpu:
        table = torch.from_numpy(graph.features).to(CUDA)

        def fill(batch, nodes):
            assert nodes is batch.n_id and isinstance(nodes, DeviceTensor)
            batch.x = table[nodes]

        loader = loader_of(graph, typed, resident)
        loader.send_to(DeviceBatches(CUDA, AHEAD, fill if resident else None))
        loader.sample_on(CUDA)
        sizes = (8, 8, NUM_CLASSES, 2)
        model = gs.model.RGCN(*sizes, schema=SCHEMA) if typed else gs.model.GraphSAGE(*sizes)
        module = gs.NodeClassifier(model).to(CUDA)
        found = []
        for batch in loader:
            assert all(isinstance(one, DeviceTensor) for one in tensors_of(batch))
            module.training_step(batch).backward()
            gpu.steady = True
            found.append(batch)
        gpu.steady = False
        assert gpu.waits == []
        expected = HOPS | (set() if resident and not typed else IDS) | (set() if resident else BLOCKS)
        assert {*gpu.waits_ahead} == expected
        copies, trains = loader._device._stream._stream, FakeStream.current()
        for batch in found:  # made on a stream, copied on another, used on a third
            assert batch.made.event in copies.waited and batch.made.event not in trains.waited
            assert all(any(one is batch.n_id for one in stream.used) for stream in (copies, trains))
        assert len(trains.waited) == len(found) and not {*map(id, trains.waited)} & {*map(id, copies.waited)}
    assert len(found) == len(plain)
    for one, other in zip(found, plain, strict=True):
        pairs = list(zip(values(one), tensors_of(other), strict=True))
        assert all(mine.dtype == wanted.dtype and torch.equal(mine, wanted) for mine, wanted in pairs)
    loader.close()


class Alive:
    """How many sampled batches there are at a time."""

    def __init__(self, monkeypatch, fails_at=None):
        self.refs, self.most, look_up = [], 0, DeviceColumns.look_up

        def noting(columns, sampled, *arguments):
            if len(self.refs) == fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.refs.append(weakref.ref(sampled.edge_index))
            return look_up(columns, sampled, *arguments)

        monkeypatch.setattr(DeviceColumns, "look_up", noting)

    @property
    def now(self):
        return sum(ref() is not None for ref in self.refs)


def staying(graph, threads=0):
    loader = loader_of(graph, False, True, threads)
    loader.send_to(DeviceBatches(CPU, AHEAD))
    loader.sample_on(CPU)  # the interpreter samples
    return loader


@pytest.mark.parametrize("threads", [0, 1])
def test_as_many_batches_are_there_as_are_asked_for_ahead(graph, monkeypatch, threads):
    pytest.importorskip("triton")
    alive, loader, most = Alive(monkeypatch), staying(graph, threads), 0
    for _ in loader:
        most = max(most, alive.now)
    del _
    assert len(alive.refs) == len(loader)
    ahead = loader.options.batches_ahead if threads else 0
    assert 0 < most <= 1 + AHEAD + ahead, "the one in use, those ahead, and those that threads prepare"
    loader.close()
    assert alive.now == 0


def test_memory_is_given_back_where_the_device_has_none_left(graph, monkeypatch):
    pytest.importorskip("triton")
    alive, loader = Alive(monkeypatch, fails_at=3), staying(graph)
    with pytest.raises(GNNScaleError, match=said("part 0 no memory to sample out of memory device=cpu batch_size")):
        for _ in loader:
            pass
    del _
    loader.close()
    gc.collect()  # the error's frames
    assert alive.now == 0 and loader._maker.sampler._spaces._free.empty()


def test_a_loader_that_is_broken_off_leaves_nothing_there(graph, monkeypatch):
    pytest.importorskip("triton")
    alive, loader = Alive(monkeypatch), staying(graph, 1)
    batches = iter(loader)
    next(batches)
    batches.close()
    loader.close()
    gc.collect()
    assert alive.now == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gnnscale-batch")]
