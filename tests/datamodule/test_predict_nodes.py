"""Outputs of a few nodes of a store, without a Trainer: those of a full exact pass, and of sampled neighbours."""

import lightning as L
import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule import few_nodes
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.model import GAT, GCN, SGC, GraphSAGE
from tests.says import said

NUM, DIM = 200, 6


def write(root, names=False, weights=False, **columns):
    """A random directed graph with a hub, self-loops and an isolated node."""
    rng = np.random.default_rng(0)
    edges = np.concatenate([rng.integers(0, NUM - 1, (2, 500)), [np.arange(40), np.full(40, 7)]], axis=1)
    columns = columns or {"features": rng.standard_normal((NUM, DIM)).astype(np.float32)}
    if weights:
        columns["edge_weight"] = rng.random(edges.shape[1]).astype(np.float32) + 0.1
    if names:
        edges = np.array([f"user-{node:03d}" for node in range(NUM)])[edges]
    stream = gs.open_edge_stream(edges, **({"relabel": True} if names else {"num_nodes": NUM}))
    parts = gs.partition(stream, method="random", num_parts=3, seed=0)
    if names:
        num_nodes = stream.count()[0]
        columns = {"features": rng.standard_normal((num_nodes, DIM)).astype(np.float32)}
    return gs.write_partition_store(root, stream, parts, **columns)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write(tmp_path_factory.mktemp("stores") / "plain")


def make(kind=GCN, module=gs.NodeClassifier, dtype=torch.float64, in_channels=DIM, **options):
    torch.manual_seed(0)
    model = kind(in_channels, 8, 3, num_layers=2, **({} if kind is SGC else {"dropout": 0.5}))
    more = {"predict_logits": True} if module is gs.NodeClassifier else {}
    return module(model, **more, **options).to(dtype)


def of_all(module, store, **data):
    """What `trainer.predict` gives of every node, by store id."""
    datamodule = gs.PartitionDataModule(store=store, sampler=gs.NeighborSampler([-1, -1]), **data)
    trainer = L.Trainer(
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        accelerator="cpu", precision="64-true" if module.dtype == torch.float64 else "32-true",
    )  # fmt: skip
    rows = trainer.predict(module, datamodule)
    nodes = np.concatenate([one["nodes"] for one in rows])
    return torch.cat([one["prediction"] for one in rows])[torch.from_numpy(np.argsort(nodes))]


@pytest.mark.parametrize("kind", [GCN, GraphSAGE, GAT, SGC])
def test_exact_outputs_are_those_of_a_full_pass(store, kind):
    module = make(kind)
    expected, nodes = of_all(module, store), np.array([7, 150, 3, 7, 199])  # a hub, twice, and an isolated node
    rows = module.train().predict_nodes(store, nodes)
    assert module.training
    assert rows["nodes"].tolist() == store.store_nid[nodes].tolist()
    assert rows["prediction"].dtype == torch.float64
    torch.testing.assert_close(rows["prediction"], expected[torch.from_numpy(rows["nodes"])], rtol=1e-12, atol=1e-12)
    again = module.predict_nodes(store, rows["nodes"], by_store_id=True)
    assert torch.equal(again["prediction"], rows["prediction"])


def test_all_neighbours_sampled_are_the_exact_outputs(store):
    module, nodes = make(GraphSAGE).eval(), np.array([9, 7, 9, 120])
    exact, sampled = (module.predict_nodes(store, nodes, fanouts=some)["prediction"] for some in (None, [-1, -1]))
    torch.testing.assert_close(sampled, exact, rtol=1e-12, atol=1e-12)
    few = [module.predict_nodes(store, nodes, fanouts=[2, 2], seed=seed)["prediction"] for seed in (0, 0, 1)]
    assert torch.equal(few[0], few[1]) and not torch.equal(few[0], few[2])
    alone = module.predict_nodes(store, [7], fanouts=[2, 2])["prediction"][0]
    torch.testing.assert_close(alone, few[0][1], rtol=1e-12, atol=1e-12)  # its neighbours are its own


def test_edge_weights_and_single_precision(tmp_path):
    store, module = write(tmp_path / "weighted", weights=True), make(GCN, dtype=torch.float32)
    rows = module.predict_nodes(store, np.arange(0, NUM, 3))
    expected = of_all(module, store)[torch.from_numpy(rows["nodes"])]
    torch.testing.assert_close(rows["prediction"], expected, rtol=1e-5, atol=1e-5)  # values of order 1


@pytest.mark.parametrize("kind", [GCN, GraphSAGE])
@pytest.mark.parametrize("weights", [False, True])
def test_a_batch_of_all_neighbours_gives_what_a_pass_does(tmp_path, monkeypatch, kind, weights):
    store, module, nodes = write(tmp_path / "store", weights=weights), make(kind), np.array([7, 150, 3, 7, 199])
    batch, seen = module.predict_nodes(store, nodes)["prediction"], []
    infer = type(module)._infer
    monkeypatch.setattr(type(module), "_infer", lambda self, share: seen.append(share) or infer(self, share))
    assert torch.equal(module.predict_nodes(store, nodes)["prediction"], batch) and not seen
    monkeypatch.setattr(few_nodes, "MOST_EDGES", 3)
    passed = module.predict_nodes(store, nodes)["prediction"]
    assert len(seen) == 1
    torch.testing.assert_close(batch, passed, rtol=1e-12, atol=1e-12)


def test_each_part_of_a_module_is_in_the_mode_it_was_in(store):
    module = make(GraphSAGE).train()
    module.backbone.eval()
    module.predict_nodes(store, [3])
    assert module.training and not module.backbone.training


def test_numbers_of_nodes_by_names(tmp_path):
    store = write(tmp_path / "named", names=True)
    module, names = make(GraphSAGE, gs.NodeRegressor), ["user-007", "user-100"]
    rows = module.predict_nodes(store, names)
    assert store.user_ids(rows["nodes"]).tolist() == names
    expected = of_all(module, store)[torch.from_numpy(rows["nodes"])]
    torch.testing.assert_close(rows["prediction"], expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=said("nodes no node 'nobody'")):
        module.predict_nodes(store, ["user-007", "nobody"])


def test_nodes_that_came_after_the_training(store):
    module = gs.NodeClassifier(GraphSAGE(DIM, 8, 3, num_layers=2)).double()
    new = gs.update_store(
        store, nodes=[NUM, NUM + 1], features=np.ones((2, DIM), np.float32),
        edges=np.array([[3, 7, NUM], [NUM, NUM + 1, NUM + 1]]),
    )  # fmt: skip
    rows = module.predict_nodes(new, [NUM + 1, NUM])
    assert rows["prediction"].dtype == torch.int64
    assert torch.equal(rows["prediction"], of_all(module, new)[torch.from_numpy(rows["nodes"])])


def test_a_model_of_other_layers_is_sampled(store):
    module = gs.NodeClassifier(pyg.GraphSAGE(DIM, 8, 2, 3), num_classes=3)
    assert module.predict_nodes(store, [1, 2], fanouts=[-1, -1])["prediction"].shape == (2,)
    with pytest.raises(StrategyError, match=said("GraphSAGE no exact outputs fanouts")):
        module.predict_nodes(store, [1, 2])


def test_no_nodes_have_no_outputs(store):
    assert make().predict_nodes(store, [])["prediction"].shape == (0, 3)


def test_what_does_not_fit_is_refused(store, tmp_path):
    with pytest.raises(ValueError, match=said("nodes no node 200 is in the store")):
        make().predict_nodes(store, [3, 200])
    with pytest.raises(ValueError, match=said("nodes store ids [0, 200) -1")):
        make().predict_nodes(store, [3, -1], by_store_id=True)
    with pytest.raises(ValueError, match=said("nodes list of ids integers or strings 0.5")):
        make().predict_nodes(store, [0.5])
    with pytest.raises(StrategyError, match=said("model reads 9 features has 6 version")):
        make(in_channels=9).predict_nodes(store, [3])
    bare = write(tmp_path / "bare", labels=np.zeros(NUM, np.int64))
    with pytest.raises(StrategyError, match=said("bare no features model reads 6")):
        make().predict_nodes(bare, [3])


def test_learned_rows_are_those_of_the_nodes(store):
    module = make(GraphSAGE, dtype=torch.float32, in_channels=DIM + 4, inputs=gs.DistributedEmbedding(NUM, 4))
    module.inputs.open()
    with pytest.warns(UserWarning, match="as they were initialised"):
        expected = of_all(module, store)
    nodes = np.array([150, 7])
    with pytest.warns(UserWarning, match="as they were initialised"):
        rows = module.predict_nodes(store, nodes)
    found = module.predict_nodes(store, nodes, fanouts=[-1, -1])
    for one in (rows, found):
        torch.testing.assert_close(one["prediction"], expected[torch.from_numpy(rows["nodes"])], rtol=1e-5, atol=1e-5)
