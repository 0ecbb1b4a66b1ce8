"""What the models of the package let the host wait for in a step on a GPU; see `tests/fake_gpu.py`."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg

import lightning_gnnscale as gs
from benchmarks.gpu_graph import NUM_EDGE_TYPES, generate
from benchmarks.gpu_training import Training
from benchmarks.graphs import NUM_CLASSES
from lightning_gnnscale.graph import GraphSchema, numbered_schema
from lightning_gnnscale.loader.type_counts import counted
from lightning_gnnscale.sampler.minibatch import RowsByNodeType
from tests.fake_gpu import CUDA, fake_gpu

CPU = torch.device("cpu")
SIZES = (8, 8, NUM_CLASSES, 2)
SCHEMA = numbered_schema(NUM_EDGE_TYPES, "test")
MODELS = {
    "GraphSAGE": lambda: gs.model.GraphSAGE(*SIZES),
    "GraphSAGE, batch norm": lambda: gs.model.GraphSAGE(*SIZES, norm="batch"),
    "GCN": lambda: gs.model.GCN(*SIZES),
    "SGC": lambda: gs.model.SGC(8, out_channels=NUM_CLASSES, num_layers=2),
    "GAT": lambda: gs.model.GAT(*SIZES),
    "RGCN": lambda: gs.model.RGCN(*SIZES, schema=SCHEMA),
    "RGCN, bases": lambda: gs.model.RGCN(*SIZES, schema=SCHEMA, num_bases=1),
    "RGCN, narrowing": lambda: gs.model.RGCN(8, 32, NUM_CLASSES, 2, schema=SCHEMA),
    "RGAT": lambda: gs.model.RGAT(*SIZES, schema=SCHEMA),
    "HGT": lambda: gs.model.HGT(*SIZES, schema=SCHEMA),
    "Hetero": lambda: gs.model.Hetero(pyg.GraphSAGE(8, 8, 2, NUM_CLASSES), SCHEMA, 8),
}
RELATIONAL = ("RGCN", "RGCN, bases", "RGCN, narrowing", "RGAT", "HGT", "Hetero")


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    return Training(generate(300, 3000, 8, 64, 0, CPU, tmp_path_factory.mktemp("graph")), CPU, (3, 2), 16, 8, 0, 9.0)


def batches_of(training, name):
    batches = list(training.loader(name in RELATIONAL))
    for batch in batches:
        batch.schema = SCHEMA if name in RELATIONAL else None
        batch.x = torch.from_numpy(training.graph.features[batch.n_id.numpy()])
        batch.train_mask = torch.ones(len(batch.n_id), dtype=torch.bool)
    return [counted(batch) for batch in batches]


@pytest.mark.parametrize("name", list(MODELS))
def test_a_step_waits_for_nothing(training, monkeypatch, name):
    batches = batches_of(training, name)
    with fake_gpu(monkeypatch) as gpu:
        module = gs.NodeClassifier(MODELS[name]()).to(CUDA)
        optimizer = torch.optim.Adam(module.parameters())
        batches = [batch.to(CUDA) for batch in batches]
        for number, batch in enumerate(batches):
            gpu.steady = number > 0
            optimizer.zero_grad()
            module.training_step(batch).backward()
            optimizer.step()
        assert gpu.waits == []
        assert all(np.isfinite(one.held.numpy()).all() for one in module.parameters())


def edges_with_classes():
    return gs.EdgeClassifier(gs.model.RGCN(8, 8, 8, 2, schema=SCHEMA), num_classes=3)


def links_of_types():
    return gs.LinkPredictor(gs.model.RGCN(8, 8, 8, 2, schema=SCHEMA), decoder="distmult", num_relations=NUM_EDGE_TYPES)


@pytest.mark.parametrize("make", [edges_with_classes, links_of_types])
def test_a_step_on_links_of_types_waits_for_nothing(training, monkeypatch, make):
    batches = batches_of(training, "RGCN")
    for batch in batches:
        batch.pairs = torch.stack([torch.arange(batch.batch_size), torch.arange(batch.batch_size).flip(0)])
        batch.edge_label, batch.pair_type = (torch.arange(batch.batch_size) % size for size in (3, NUM_EDGE_TYPES))
        batch.negatives = batch.pairs[1:].T.roll(1, 0).contiguous()
    with fake_gpu(monkeypatch) as gpu:
        module = make().to(CUDA)
        batches = [batch.to(CUDA) for batch in batches]
        for number, batch in enumerate(batches):
            gpu.steady = number > 0
            module.training_step(batch).backward()
        assert gpu.waits == []


def test_a_step_on_several_node_types_waits_for_nothing(training, monkeypatch):
    """Features by node type, and maps of each."""
    names = ("a", "b", "c")
    schema = GraphSchema(names, tuple((names[number % 3], str(number), names[number % 2]) for number in range(4)))
    batches = batches_of(training, "RGCN")
    for batch in batches:
        batch.node_type, batch.edge_type, batch.schema = batch.n_id % 3, batch.edge_type % 4, schema
        rows = [batch.x[batch.node_type == number][:, : 2 + number] for number in range(2)]
        batch.x, batch.type_counts = RowsByNodeType(batch.node_type, [*rows, None]), None
    batches = [counted(batch) for batch in batches]
    widths = dict(zip(names, (2, 3, 0), strict=True))
    for backbone in (gs.model.RGCN, gs.model.RGAT, gs.model.HGT):
        with fake_gpu(monkeypatch) as gpu:
            module = gs.NodeClassifier(backbone(widths, *SIZES[1:], schema=schema)).to(CUDA)
            for number, batch in enumerate([batch.to(CUDA) for batch in batches]):
                gpu.steady = number > 0
                module.training_step(batch).backward()
            assert gpu.waits == []


@pytest.mark.parametrize("name", list(MODELS))
def test_outputs_and_gradients_are_those_of_the_cpu(training, monkeypatch, name):
    """Self-loops stay as edges without attention, and the edges of a layer are counted on the host."""
    batch = batches_of(training, name)[0]
    loops = torch.cat([torch.arange(3), torch.tensor([0])])  # one node has two
    batch.edge_index[0, batch.indptr[loops]] = loops
    batch = counted(replace(batch, type_counts=None))
    module = gs.NodeClassifier(MODELS[name]()).eval()
    expected = module(batch)
    expected[: batch.batch_size].square().sum().backward()
    gradients = [one.grad.clone() for one in module.parameters()]
    with fake_gpu(monkeypatch):
        module.zero_grad()
        module.to(CUDA)
        found = module(batch.to(CUDA))
        found[: batch.batch_size].square().sum().backward()
        torch.testing.assert_close(found.held, expected.detach(), rtol=1e-5, atol=1e-5)
        for one, gradient in zip(module.parameters(), gradients, strict=True):
            torch.testing.assert_close(one.grad.held, gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(MODELS))
def test_on_a_card_torch_finds_no_wait_either(training, name):
    batches = [batch.to(CUDA) for batch in batches_of(training, name)]
    module = gs.NodeClassifier(MODELS[name]()).to(CUDA)
    optimizer = torch.optim.Adam(module.parameters())
    try:
        for number, batch in enumerate(batches):
            torch.cuda.set_sync_debug_mode("error" if number else "default")  # kernels are compiled in the first step
            optimizer.zero_grad()
            module.training_step(batch).backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
