"""PyG's graphs of several node types sampled by a GPU: what the CPU samples, bit for bit."""

import logging
from dataclasses import asdict

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput

import lightning_gnnscale as gs
from lightning_gnnscale.loader.device_batches import tensors_of
from lightning_gnnscale.sampler import data_sampler, on_device
from lightning_gnnscale.sampler.data_sampler import DataSampler
from tests.sampler.test_data_sampler import hetero_graph
from tests.says import said

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the interpreter takes CPU tensors


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(other, dict | list | tuple):
        names = list(other) if isinstance(other, dict) else range(len(other))
        assert len(one) == len(other)
        for name in names:
            assert_same(one[name], other[name])
    elif isinstance(other, torch.Tensor):
        assert one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize(
    "given",
    [
        {"num_neighbors": [3, 2]},
        {"num_neighbors": [3, 2], "disjoint": True, "replace": True},
        {"num_neighbors": [4, 2], "weight_attr": "weight"},
        {"num_neighbors": [3, 2], "subgraph_type": "induced"},
        {"num_neighbors": [3, 2], "time_attr": "time", "temporal_strategy": "last"},
        {"num_neighbors": [-1, 2], "time_attr": "when", "strictly_before": True},
    ],
)
def test_samples_of_several_node_types(given):
    pytest.importorskip("triton")
    data = hetero_graph()
    host, there = (DataSampler(data, **given) for _ in range(2))
    there.sample_on(DEVICE)
    assert there._on is not None
    for node_type, ids in (("paper", [5, 3, 59, 0]), ("venue", [6, 2])):  # which has no rows
        time = torch.tensor([20, 49, 3, 30])[: len(ids)] if host.is_temporal else None
        seeds = NodeSamplerInput(None, torch.tensor(ids), time, node_type)
        mine, other = there.sample_from_nodes(seeds), host.sample_from_nodes(seeds)
        assert_same(asdict(mine), asdict(other))
        assert any(len(edges) for edges in other.edge.values()) == (node_type == "paper")


def batches_of(loader, on_device):
    if on_device:  # in place of the GPU that `device=` names
        loader._maker.data_sampler.sample_on(DEVICE)
        assert loader._maker.data_sampler._on is not None
    found = list(loader)
    loader.close()
    return found


@pytest.mark.parametrize("links", [False, True])
def test_batches_of_loaders_over_heterogeneous_graphs(links):
    pytest.importorskip("triton")
    data = hetero_graph()
    edge_type = ("author", "writes", "paper")

    def make(threads):
        given = {"num_neighbors": [2, 2], "batch_size": 4, "shuffle": True, "num_threads": threads}
        if not links:
            return gs.NeighborLoader(data, input_nodes=("paper", torch.arange(0, 60, 10)), **given)
        links_of = (edge_type, data[edge_type].edge_index[:, :6])
        return gs.LinkNeighborLoader(data, edge_label_index=links_of, neg_sampling="binary", **given)

    plain = batches_of(make(0), False)
    for threads in (0, 1):
        for mine, other in zip(batches_of(make(threads), True), plain, strict=True):
            for one, wanted in zip(tensors_of(mine), tensors_of(other), strict=True):
                assert torch.equal(one, wanted)


def test_a_graph_with_times_and_one_node_type():
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    data = Data(torch.arange(40.0)[:, None], torch.randint(0, 40, (2, 300), generator=generator))
    data.time = torch.randint(0, 9, (40,), generator=generator)
    host, there = (DataSampler(data, [4, 2], time_attr="time") for _ in range(2))
    there.sample_on(DEVICE)
    seeds = NodeSamplerInput(None, torch.tensor([7, 7, 39, 0]), torch.tensor([8, 2, 5, 9]))
    mine, other = there.sample_from_nodes(seeds), host.sample_from_nodes(seeds)
    assert_same(asdict(mine), asdict(other))
    assert len(other.edge) > 10


@pytest.mark.parametrize(
    ("where", "name", "value", "why"),
    [
        (data_sampler, "free_bytes", lambda device: 100, "edges 100 free"),
        (on_device, "has_triton", lambda: False, "Triton not installed"),
    ],
)
def test_why_a_graph_is_sampled_on_the_cpu(monkeypatch, caplog, where, name, value, why):
    caplog.set_level(logging.INFO, "lightning.pytorch.gnnscale")
    monkeypatch.setattr(where, name, value)
    sampler = DataSampler(hetero_graph(), [2])
    sampler.sample_on(DEVICE)
    assert sampler._on is None
    (line,) = [record.getMessage() for record in caplog.records]
    with pytest.raises(ValueError, match=said(f"on the CPU {why}")):
        raise ValueError(line)
