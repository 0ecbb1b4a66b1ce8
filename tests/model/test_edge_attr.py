"""Layers that read edge features, as PyG's do: in batches, in exact evaluation, and refused elsewhere."""

import copy

import lightning as L
import numpy as np
import pytest
import torch
from torch_geometric.nn import GATConv, GINEConv

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.layer_source import StoreLayerSource
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.model import GAT, GCN, GINE, GraphSAGE, NodeClassifier, layerwise_inference
from lightning_gnnscale.model.block import make_block
from tests.says import said

NUM_NODES, DIM, EDGE_DIM = 60, 6, 3
RNG = np.random.default_rng(7)
EDGES = np.unique(RNG.integers(0, NUM_NODES - 1, (2, 400)), axis=1)  # with self-loops; the last node has no edge
EDGES = RNG.permutation(EDGES, axis=1)
FEATURES = RNG.standard_normal((NUM_NODES, DIM)).astype(np.float32)
ROWS = RNG.standard_normal((EDGES.shape[1], EDGE_DIM)).astype(np.float32)
X, EDGE_INDEX, EDGE_ATTR = torch.from_numpy(FEATURES), torch.from_numpy(EDGES), torch.from_numpy(ROWS)


def backbone(kind, **options):
    torch.manual_seed(0)
    return kind(DIM, 8, 4, num_layers=2, dropout=0.0, edge_dim=EDGE_DIM, **options).eval()


def of_pyg(model, x, edge_attr) -> torch.Tensor:
    """The same layers, with the same parameters, by PyG."""
    for index, layer in enumerate(model.convs):
        if isinstance(model, GAT):
            twin = GATConv(layer.in_channels, layer.out_channels, layer.heads, layer.concat, edge_dim=EDGE_DIM)
        else:
            twin = GINEConv(copy.deepcopy(layer.nn), edge_dim=EDGE_DIM)
        twin.double().load_state_dict(layer.state_dict())
        x = twin(x, EDGE_INDEX, edge_attr=edge_attr)
        x = torch.nn.functional.elu(x) if isinstance(model, GAT) and index == 0 else x
        x = x.relu() if isinstance(model, GINE) and index == 0 else x
    return x


@pytest.mark.parametrize("kind", [GAT, GINE])
def test_outputs_and_gradients_are_those_of_pyg(kind):
    model, x, edge_attr = backbone(kind).double(), X.double(), EDGE_ATTR.double()
    found = model(x, EDGE_INDEX, edge_attr=edge_attr)
    torch.testing.assert_close(found, of_pyg(model, x, edge_attr), rtol=1e-10, atol=1e-10)


def store_of(root, **options):
    stream = gs.open_edge_stream(EDGES, num_nodes=NUM_NODES, chunk_edges=50)
    labels, mask = np.arange(NUM_NODES) % 4, np.arange(NUM_NODES) % 3 > 0
    given = {"features": FEATURES, "edge_features": ROWS, "partitioner": "random", "num_parts": 3} | options
    return {
        "root": root,
        "stream": stream,
        "labels": labels,
        "masks": {"train": mask, "val": ~mask, "test": ~mask},
    } | given


@pytest.mark.parametrize("kind", [GAT, GINE])
@pytest.mark.parametrize("block_edges", [7, None])
def test_exact_evaluation_reads_them(tmp_path, kind, block_edges):
    dm = gs.PartitionDataModule(**store_of(tmp_path / "s"))
    dm.prepare_data()
    dm.setup("test")
    source = StoreLayerSource(dm.store, [0, 1, 2], dm._scratch)
    model = backbone(kind)
    with torch.no_grad():
        expected = model(X, EDGE_INDEX, edge_attr=EDGE_ATTR).numpy()[dm.store.original_nid]
    result = layerwise_inference(model, source, block_edges=block_edges)
    np.testing.assert_allclose(result.read(np.arange(NUM_NODES)), expected, rtol=1e-4, atol=1e-5)
    dm.teardown("test")


@pytest.mark.parametrize("kind", [GAT, GINE])
def test_batches_with_all_neighbours_give_the_full_graphs_outputs(tmp_path, kind):
    sampler = gs.NeighborSampler([-1, -1])
    dm = gs.PartitionDataModule(**store_of(tmp_path / "s"), sampler=sampler, batch_size=16, scope="graph")
    dm.prepare_data()
    dm.setup("fit")
    model = backbone(kind)
    module = NodeClassifier(model)
    with torch.no_grad():
        expected = model(X, EDGE_INDEX, edge_attr=EDGE_ATTR)
        for batch in dm.train_dataloader():
            seeds = dm.store.original_nid[batch.n_id[: batch.batch_size].numpy()]
            torch.testing.assert_close(module(batch)[: batch.batch_size], expected[seeds], rtol=1e-4, atol=1e-5)
    dm.teardown("fit")


@pytest.mark.parametrize("kind", [GAT, GINE])
def test_gradients_are_those_of_differences(kind):
    model = backbone(kind).double()
    weight = (model.convs[0].lin_edge if kind is GAT else model.convs[0].lin).weight

    def loss() -> torch.Tensor:
        return model(X, EDGE_INDEX, edge_attr=EDGE_ATTR).square().sum()

    loss().backward()
    step = torch.zeros_like(weight)
    step[1, 2] = 1e-6
    with torch.no_grad():
        weight += step
        above = loss()
        weight -= 2 * step
        slope = (above - loss()) / 2e-6
    torch.testing.assert_close(weight.grad[1, 2], slope, rtol=1e-4, atol=1e-6)
    assert abs(slope) > 1e-3


def test_sums_of_sampled_rows_are_unbiased():
    """GINE sums: a row that was sampled is scaled up to its degree."""
    model = backbone(GINE)
    model.convs = model.convs[:1]
    layer, node = model.convs[0], int(np.bincount(EDGES[1], minlength=NUM_NODES).argmax())
    edges = np.flatnonzero(EDGES[1] == node)
    messages = (X[EDGES[0][edges]] + layer.lin(EDGE_ATTR[edges])).relu()
    chosen = slice(0, len(edges) // 2)
    layer.nn = torch.nn.Identity()
    index = torch.stack([torch.arange(1, 1 + len(edges[chosen])), torch.zeros(len(edges[chosen]), dtype=torch.int64)])
    x = torch.cat([X[[node]], X[EDGES[0][edges[chosen]]]])
    degree = torch.tensor([len(edges)] + [1] * (len(x) - 1))
    block = make_block(index, len(x), None, degree=degree, edge_attr=EDGE_ATTR[edges[chosen]])
    out = layer(x, model.prepare(block))[0]
    expected = messages[chosen].mean(dim=0) * len(edges) + X[node]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [GAT, GINE])
def test_a_trainer_fits_and_tests(tmp_path, kind):
    dm = gs.PartitionDataModule(**store_of(tmp_path / "s"), sampler=gs.NeighborSampler([3, 3]), batch_size=16)
    dm.prepare_data()
    assert dm.num_edge_features == EDGE_DIM
    module = NodeClassifier(kind(DIM, 8, dm.num_classes, edge_dim=dm.num_edge_features))
    before = {name: value.clone() for name, value in module.state_dict().items() if "edge" in name or ".lin." in name}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy="gnnscale", max_epochs=1, **quiet)
    trainer.fit(module, dm)
    assert 0 <= trainer.test(module, dm, verbose=False)[0]["test_acc"] <= 1
    assert any(not torch.equal(module.state_dict()[name], value) for name, value in before.items())


def check_fit(dm, model) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    L.Trainer(accelerator="cpu", devices=1, strategy="gnnscale", max_epochs=1, **quiet).fit(NodeClassifier(model), dm)


def test_what_no_layer_reads_is_refused(tmp_path):
    dm = gs.PartitionDataModule(**store_of(tmp_path / "s"))
    with pytest.raises(StrategyError, match=said("GraphSAGE features GAT GINE")):
        check_fit(dm, GraphSAGE(DIM, 8, 4))
    with pytest.raises(StrategyError, match=said("GAT 5 3 edge_dim=3")):
        check_fit(dm, GAT(DIM, 8, 4, edge_dim=5))
    check_fit(gs.PartitionDataModule(**store_of(tmp_path / "s"), stored_edge_features=False), GraphSAGE(DIM, 8, 4))
    without = gs.PartitionDataModule(**store_of(tmp_path / "without", edge_features=None))
    with pytest.raises(StrategyError, match=said("GINE 3")):
        check_fit(without, GINE(DIM, 8, 4, edge_dim=3))
    whole = gs.FullGraphDataModule(**store_of(tmp_path / "s"))
    with pytest.raises(StrategyError, match=said("GCN features")):
        check_fit(whole, GCN(DIM, 8, 4))
    with pytest.raises(ValueError, match=said("GAT edge_dim")):
        check_fit(whole, GAT(DIM, 8, 4, edge_dim=3))
    with pytest.raises(ValueError, match=said("edge_dim columns edge")):
        GINE(DIM, 8, 4)
    with pytest.raises(ValueError, match=said("layer GCN edge")):
        GCN(DIM, 8, 4)(X, EDGE_INDEX, edge_attr=EDGE_ATTR)
