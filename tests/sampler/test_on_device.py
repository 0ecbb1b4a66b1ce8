"""Training batches sampled by Triton: those of the CPU, bit for bit; and where they are sampled, and why."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from loader.test_typed_batches import description
from torch_geometric.data import Data

import lightning_gnnscale as gs
from lightning_gnnscale.loader.device_batches import DeviceBatches, tensors_of
from lightning_gnnscale.sampler import on_device
from lightning_gnnscale.sampler.on_device import DeviceSampler, sampler_for
from tests.says import said

FAKE = torch.device("cpu")  # in place of a GPU: Triton's interpreter samples from CPU tensors


def contents(loader) -> list:
    found = [tensors_of(batch) for batch in loader]
    assert found
    return found


def assert_equal(mine, other):
    assert len(mine) == len(other)
    for batch, expected in zip(mine, other, strict=True):
        assert len(batch) == len(expected)
        for one, wanted in zip(batch, expected, strict=True):
            assert one.dtype == wanted.dtype
            assert torch.equal(one, wanted)


def on_fake(loader, stays=False):
    """A loader whose batches a fake device samples, and are sent there."""
    if stays:
        loader.send_to(DeviceBatches(FAKE))
    loader.sample_on(FAKE)
    assert isinstance(loader._maker.sampler, DeviceSampler)
    return loader


@pytest.fixture(scope="module")
def module_of(tmp_path_factory):
    graph = gs.SyntheticGraph(200, 1500, num_communities=3, seed=0)
    generator = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("store")

    def make(sampler, **options):
        dm = gs.PartitionDataModule(
            root=root, stream=graph.stream(), features=graph.features(4), labels=graph.labels(), masks=graph.masks(),
            edge_weight=weights, num_parts=2, batch_size=32, partitioner="random", sampler=sampler, **options,
        )  # fmt: skip
        dm.prepare_data()
        dm.setup()
        return dm

    weights = generator.random(graph.stream().num_edges).astype(np.float32)
    return make


@pytest.mark.parametrize(
    "sampler",
    [
        gs.NeighborSampler([4, 3]),
        gs.NeighborSampler([-1, 2], direction="both"),
        gs.NeighborSampler([3, 2], replace=True),
        gs.NeighborSampler([3, 2], weighted=True),
        gs.NeighborSampler([3, 2], weighted=True, replace=True),
        gs.NeighborSampler([3, 2], disjoint=True),
        gs.NeighborSampler([3], subgraph_type="induced"),
        gs.LayerwiseSampler([40, 20]),
        gs.ClusterSampler(6, 2),
        gs.sampler.LinkSampler(gs.LayerwiseSampler([20]), "walk", num_negatives=2),
    ],
    ids=repr,
)
def test_batches_of_a_datamodule_are_those_of_the_cpu(module_of, sampler, monkeypatch):
    pytest.importorskip("triton")
    dm = module_of(sampler)
    plain = contents(dm.train_dataloader())
    monkeypatch.setattr(gs.PartitionDataModule, "_gpu", FAKE)
    monkeypatch.setattr(gs.PartitionDataModule, "_sending", lambda *_: None)
    loader = dm.train_dataloader()
    assert isinstance(loader._maker.sampler, DeviceSampler)
    assert_equal(contents(loader), plain)
    loader.close()


def stayed(loader) -> list:
    """The batches of a loader, all of which stay where they are sampled; their ids on the host are theirs."""
    found = list(loader)
    for batch in found:
        assert batch.made is not None and loader._maker.sampler.stays
        assert np.array_equal(batch.host_ids, batch.n_id.numpy())
    return [tensors_of(batch) for batch in found]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"fanouts": [4, 3]}, {}),
        ({"fanouts": [4, 3]}, {"scope": "graph"}),
        ({"fanouts": [4, 3]}, {"scope": "graph", "seed_order": "part"}),
        ({"fanouts": [-1, 2], "direction": "both"}, {}),
        ({"fanouts": [3, 2], "weighted": True}, {"scope": "graph"}),
        ({"fanouts": [3, 2], "weighted": True}, {}),
        ({"fanouts": [3, 2], "disjoint": True}, {}),
    ],
)
def test_batches_stay_where_they_are_sampled_and_are_those_of_the_cpu(module_of, given, options, monkeypatch):
    pytest.importorskip("triton")
    dm = module_of(gs.NeighborSampler(**given), **options)
    plain = contents(dm.train_dataloader())
    loader = on_fake(dm.train_dataloader(), stays=True)
    assert_equal(stayed(loader), plain)
    loader.close()
    assert loader._maker.sampler._spaces._free.empty()


@pytest.mark.parametrize("wide", [True, False], ids=["edge features there", "edge features on the host"])
@pytest.mark.parametrize(
    "sampler",
    [gs.NeighborSampler([3, 2]), gs.NeighborSampler({"*": [3, 2]}, temporal_strategy="uniform")],
    ids=["together", "by edge type and time"],
)
def test_typed_batches_with_edge_features_stay_too(tmp_path, monkeypatch, sampler, wide):
    pytest.importorskip("triton")
    given = description()
    for number, edges in enumerate(given["edges"].values()):
        edges["features"] = np.random.default_rng(number).random((edges["edges"].shape[1], 2)).astype(np.float32)
    dataset = gs.hetero_graph(**given)
    rows = {"features": dataset.features, "labels": dataset.labels, "masks": dataset.masks}
    rows |= {"node_time": dataset.node_time, "edge_time": dataset.edge_time, "edge_features": dataset.edge_features}
    p = gs.partition(dataset.stream, "random", 2, evaluate=False)
    store = gs.write_partition_store(tmp_path / "store", dataset.stream, p, **rows)
    dm = gs.PartitionDataModule(store=store, sampler=sampler, batch_size=32)
    dm.setup("fit")
    plain = contents(dm.train_dataloader())
    asked = []
    if not wide:  # of each part edge features are asked for after all else
        monkeypatch.setattr(DeviceSampler, "fits", lambda self, num: asked.append(num) or len(asked) % 2 == 1)
    loader = on_fake(dm.train_dataloader(), stays=True)
    batches = list(loader)
    assert all(batch.made is not None and batch.edge_attr is not None for batch in batches)
    staged = loader._source._cache.request(0, None).result()
    assert ("edge_attr" in staged._there[0]._edges) == wide
    assert_equal([tensors_of(batch) for batch in batches], plain)
    loader.close()


def test_parts_with_and_without_space_there_are_mixed_on_the_host(module_of, monkeypatch):
    pytest.importorskip("triton")
    dm = module_of(gs.NeighborSampler([4, 3]), scope="graph", seed_order="part")
    plain = contents(dm.train_dataloader())
    fits = iter([True, False])
    monkeypatch.setattr(DeviceSampler, "fits", lambda self, num_bytes: next(fits))
    loader = on_fake(dm.train_dataloader(), stays=True)
    batches = list(loader)
    assert loader.chunks == 2
    assert batches[0].made is None
    assert_equal([tensors_of(batch) for batch in batches], plain)
    loader.close()


@pytest.mark.parametrize("replace", [False, True])
def test_batches_of_neighbor_loader_are_those_of_the_cpu(replace):
    pytest.importorskip("triton")
    edges = torch.from_numpy(np.random.default_rng(0).integers(0, 60, (2, 600)))
    data = Data(x=torch.arange(60.0)[:, None], edge_index=edges)

    def make(threads):
        return gs.NeighborLoader(data, [5, 3], batch_size=16, replace=replace, shuffle=True, num_threads=threads)

    plain = contents(make(0))
    for threads, stays in ((0, False), (1, False), (1, True)):  # the interpreter runs in one thread at a time
        loader = on_fake(make(threads), stays)
        assert loader._maker.sampler.stays == stays
        assert_equal(contents(loader), plain)
        assert_equal([tensors_of(loader([3, 1]))], [tensors_of(make(0)([3, 1]))])
        loader.close()


@pytest.mark.parametrize(("asked", "says"), [("auto", "is sampled on the CPU"), ("cuda", "from pinned host memory")])
def test_a_part_that_does_not_fit_is_sampled_on_the_cpu_or_from_the_host(module_of, monkeypatch, caplog, asked, says):
    pytest.importorskip("triton")
    caplog.set_level(logging.INFO, "lightning.pytorch.gnnscale")
    loader = module_of(gs.NeighborSampler([3, 2], device="cpu")).train_dataloader()
    plain = contents(loader)
    monkeypatch.setattr(on_device, "free_bytes", lambda device: 1000)
    loader.sample_on(FAKE)
    loader.set_sampler(gs.NeighborSampler([3, 2], device=asked))
    loader.set_epoch(0)
    assert_equal(contents(loader), plain)
    assert any(says in record.getMessage() for record in caplog.records)
    loader.close()


class OfTheUser(gs.SaintSampler):
    """A sampler that is none of those that have a form for GPUs."""


@pytest.mark.parametrize(
    ("sampler", "device", "by_threads", "why"),
    [
        (gs.NeighborSampler([2]), FAKE, False, "other processes source=threads"),
        (gs.ClusterSampler(4), FAKE, False, "other processes source=threads"),
        (gs.LayerwiseSampler(4), FAKE, False, "other processes source=threads"),
        (gs.sampler.LinkSampler(), FAKE, False, "other processes source=threads"),
        (OfTheUser(), FAKE, True, "OfTheUser no form GPUs: sampler=neighbor layerwise links"),
        (gs.NeighborSampler([2]), None, True, "training not on a GPU: trainer.accelerator=gpu"),
    ],
)
def test_why_a_sampler_samples_on_the_cpu(sampler, device, by_threads, why, caplog):
    pytest.importorskip("triton")
    caplog.set_level(logging.INFO, "lightning.pytorch.gnnscale")
    assert sampler_for(sampler, device, by_threads) is sampler
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == (device is not None)
    for line in found:
        with pytest.raises(ValueError, match=said(f"sampled on the CPU: {why}")):
            raise ValueError(line)


def asking(sampler, device: str):
    """The sampler, to be sampled on a device."""
    if isinstance(sampler, gs.sampler.LinkSampler):
        return replace(sampler, sampler=replace(sampler.sampler, device=device))
    return replace(sampler, device=device)


SAMPLERS = [gs.NeighborSampler([2]), gs.LayerwiseSampler(4), gs.ClusterSampler(4), gs.sampler.LinkSampler()]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
def test_a_sampler_that_asks_for_a_gpu_is_refused_or_obeyed(sampler):
    pytest.importorskip("triton")
    assert sampler_for(asking(sampler, "cpu"), FAKE) == asking(sampler, "cpu")
    assert isinstance(sampler_for(asking(sampler, "cuda"), FAKE), DeviceSampler)
    for device, by_threads, why in ((FAKE, False, "source=threads"), (None, True, "trainer.accelerator=gpu")):
        with pytest.raises(ValueError, match=said(f"sampler.device auto cpu cuda {why}")):
            sampler_for(asking(sampler, "cuda"), device, by_threads)
    with pytest.raises(ValueError, match=said("device auto, cpu, cuda 'gpu'")):
        asking(sampler, "gpu")


def test_without_triton_samples_are_the_cpus(monkeypatch):
    monkeypatch.setattr(on_device, "has_triton", lambda: False)
    sampler = gs.NeighborSampler([2])
    assert sampler_for(sampler, FAKE) is sampler
