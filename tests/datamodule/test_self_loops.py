"""GCN, SGC and GAT on a graph with self-loops, some listed twice, equal PyG's on every way that rows are computed."""

from functools import partial

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.full_graph_batch import block_batch
from lightning_gnnscale.datamodule.layer_source import StoreLayerSource
from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.model import GAT, GCN, SGC, layerwise_inference
from lightning_gnnscale.model.block import make_block, normalized
from lightning_gnnscale.partition_store.block_rows import load_block_rows
from lightning_gnnscale.scratch import Scratch

NUM_NODES, CHANNELS = 60, 6
_RNG = np.random.default_rng(3)
_EDGES = _RNG.integers(0, NUM_NODES - 1, (2, 240))
_EDGES = _EDGES[:, _EDGES[0] != _EDGES[1]]
_LOOPS = np.concatenate([np.arange(0, NUM_NODES, 3), np.arange(0, NUM_NODES, 6), [0]])  # once, twice, three times
EDGES = np.concatenate([_EDGES, np.stack([_LOOPS, _LOOPS])], axis=1)
EDGES = EDGES[:, _RNG.permutation(EDGES.shape[1])]
WEIGHT = _RNG.uniform(0.5, 2, EDGES.shape[1]).astype(np.float32)
X = _RNG.standard_normal((NUM_NODES, CHANNELS)).astype(np.float32)
WEIGHED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


class OwnGCN(GCN):
    """One that is derived, so that its layers are computed a block at a time."""


def build(kind, num_layers=2):
    torch.manual_seed(0)
    return kind(CHANNELS, 8, 4, num_layers=num_layers, dropout=0.0).eval()


def expected(model, weighted):
    """Return the outputs of PyG's own classes with the same parameters, on the whole graph."""
    num_layers, edge_index = model.num_layers, torch.from_numpy(EDGES)
    if isinstance(model, SGC):
        twin = pyg.SGConv(CHANNELS, 4, K=num_layers)
        twin.load_state_dict(model.conv.state_dict())
    else:
        own = {"heads": 4, "act": "elu"} if isinstance(model, GAT) else {}
        twin = (pyg.GAT if isinstance(model, GAT) else pyg.GCN)(CHANNELS, 8, num_layers, 4, **own)
        twin.load_state_dict(model.state_dict())
    weight = {"edge_weight": torch.from_numpy(WEIGHT)} if weighted else {}
    with torch.no_grad():
        return twin.eval()(torch.from_numpy(X), edge_index, **weight)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    stream = open_edge_stream(EDGES, num_nodes=NUM_NODES, to_undirected=False)
    parts = gs.partition(stream, "random", num_parts=3, seed=1, evaluate=False)
    labels = np.arange(NUM_NODES) % 4
    masks = {"train": np.ones(NUM_NODES, bool), "val": np.zeros(NUM_NODES, bool), "test": np.zeros(NUM_NODES, bool)}
    rows = {"features": X, "labels": labels, "masks": masks}
    write = partial(gs.write_partition_store, stream=stream, p=parts, **rows)
    folder = tmp_path_factory.mktemp("stores")
    return {False: write(folder / "plain"), True: write(folder / "weighted", edge_weight=WEIGHT)}


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)  # float32, values of order 1


CASES = [(GCN, False), (GCN, True), (SGC, False), (SGC, True), (GAT, False)]
KINDS = pytest.mark.parametrize(("kind", "weighted"), CASES, ids=lambda value: getattr(value, "__name__", value))


@KINDS
def test_in_memory(kind, weighted):
    model = build(kind)
    weight = {"edge_weight": torch.from_numpy(WEIGHT)} if weighted else {}
    with torch.no_grad():
        close(model(torch.from_numpy(X), torch.from_numpy(EDGES), **weight), expected(model, weighted))


@KINDS
@pytest.mark.parametrize("scope", ["part", "graph"])
def test_sampled_with_full_fanout(stores, kind, weighted, scope):
    store, model = stores[weighted], build(kind)
    sampler = gs.NeighborSampler([-1, -1])
    dm = gs.PartitionDataModule(store=store, sampler=sampler, batch_size=7, halo_hops=2, scope=scope)
    dm.prepare_data()
    dm.setup("fit")
    wanted, module, seen = expected(model, weighted), gs.NodeClassifier(model, num_classes=4), 0
    for batch in dm.train_dataloader():
        seeds = store.original_nid[batch.n_id[: batch.batch_size].numpy()]
        with torch.no_grad():
            close(module(batch), wanted[torch.from_numpy(np.asarray(seeds, np.int64))])
        seen += len(seeds)
    assert seen == NUM_NODES


@pytest.mark.parametrize(("kind", "weighted"), [*CASES, (OwnGCN, False), (OwnGCN, True)])
def test_layer_by_layer(stores, tmp_path, kind, weighted):
    store, model = stores[weighted], build(kind)
    source = StoreLayerSource(store, [0, 1, 2], Scratch(tmp_path, "run-1"))
    output = layerwise_inference(model, source, block_edges=40)
    found = torch.from_numpy(np.asarray(output.read(np.asarray(store.store_nid, np.int64))))
    close(found, expected(model, weighted))


@KINDS
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_of_the_full_graph(stores, kind, weighted, world_size):
    store, model = stores[weighted], build(kind, num_layers=2 if world_size == 1 else 1)  # one reads features alone
    wanted, module = expected(model, weighted), gs.NodeClassifier(model, num_classes=4)
    for rank in range(world_size):
        batch = block_batch(store, load_block_rows(store, rank, world_size))
        own = store.original_nid[batch.n_id[: batch.batch_size].numpy()]
        with torch.no_grad():
            close(module(batch), wanted[torch.from_numpy(np.asarray(own, np.int64))])


def test_sampled_rows_are_unbiased():
    """Of all pairs of two edges out of a row that has two self-loops, the mean weight of each source is PyG's."""
    edges = torch.tensor([[0, 1, 0, 2, 3], [0, 0, 0, 0, 0]])
    degree, own = torch.tensor([5.0, 2, 4, 1]), torch.tensor([-1.0, 1, 0, 1])
    x = torch.eye(4)

    def summed(directed_edges):
        block = normalized(
            make_block(edges[:, directed_edges], 4, None, degree=degree, self_weight=own).head(1), torch.float32
        )
        return block.edge_weight @ x[block.indices]

    pairs = [[i, j] for i in range(5) for j in range(i + 1, 5)]
    mean = torch.stack([summed(pair) for pair in pairs]).mean(0)
    close(mean, torch.tensor([1 / 4, 1 / (4 * 3) ** 0.5, 1 / (4 * 4) ** 0.5, 1 / (4 * 2) ** 0.5]))
    close(summed([0, 1, 2, 3, 4]), mean)


@WEIGHED
def test_a_store_keeps_what_each_self_loop_lacks(stores, weighted):
    store = stores[weighted]
    wanted = np.ones(NUM_NODES, np.float64)
    for node in range(NUM_NODES):
        values = WEIGHT[(EDGES[0] == node) & (EDGES[1] == node)] if weighted else np.ones((_LOOPS == node).sum())
        if len(values):
            wanted[node] = values[-1] - values.astype(np.float64).sum()
    found = store.self_weight(np.asarray(store.store_nid, np.int64))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    assert np.array_equal(found, store.self_weight()[store.store_nid])
    store.verify()


def test_nothing_is_kept_where_there_are_no_self_loops(tmp_path):
    stream = open_edge_stream(_EDGES, num_nodes=NUM_NODES, to_undirected=True)
    parts = gs.partition(stream, "random", num_parts=2, seed=1, evaluate=False)
    store = gs.write_partition_store(tmp_path / "store", stream, parts)
    assert store.self_weight() is None and not list(store.root.glob("self_loop*"))
