"""Predictions of a new version of a store: computed where the change can have altered them, else those of before."""

import logging

import lightning as L
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule import changed_outputs
from lightning_gnnscale.errors import GNNScaleError, StrategyError
from lightning_gnnscale.model import GAT, GCN, RGCN, SGC, GraphSAGE
from lightning_gnnscale.model.inference import table_width
from tests.says import said

NUM, DIM = 300, 5


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """A store of a long ring with chords, one way and both ways, and its next version."""
    made = {}
    for both in (False, True):
        rng, around = np.random.default_rng(1), np.arange(NUM)
        edges = np.concatenate([[around, (around + 1) % NUM], [around[::9], (around[::9] + 3) % NUM]], axis=1)
        stream = gs.open_edge_stream(edges, num_nodes=NUM, to_undirected=both)
        parts = gs.partition(stream, method="random", num_parts=3, seed=0)
        features = rng.standard_normal((NUM, DIM)).astype(np.float32)
        root = tmp_path_factory.mktemp("stores") / "ring"
        old = gs.write_partition_store(root, stream, parts, features=features)
        new = gs.update_store(
            old, nodes=[NUM, 17], features=rng.standard_normal((2, DIM)).astype(np.float32), removed_nodes=[50],
            edges=np.array([[100, NUM, 40], [NUM, 120, 200]]), removed_edges=np.array([[210], [211]]),
        )  # fmt: skip
        made[both] = old, new
    return made


def make(kind, dtype=torch.float64, **options):
    torch.manual_seed(0)
    backbone = kind(DIM, 8, 3, num_layers=2, **({} if kind is SGC else {"dropout": 0.5}))
    return gs.NodeClassifier(backbone, predict_logits=True, **options).to(dtype)


def predict(module, store, path, earlier=(), **options):
    """Write predictions, and return the nodes that were computed, and the table."""
    computed = []
    data = gs.PartitionDataModule(store=store, sampler=gs.NeighborSampler([-1, -1]))
    trainer = L.Trainer(
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        accelerator="cpu", precision="64-true" if module.dtype == torch.float64 else "32-true",
        callbacks=[gs.PredictionWriter(path, earlier=earlier, **options)],
    )  # fmt: skip
    decide = module.decide
    module.decide = lambda outputs: computed.append(len(outputs)) or decide(outputs)
    try:
        trainer.predict(module, data)
    finally:
        del module.decide
    return sum(computed), pq.read_table(path)


def told(caplog):
    lines = (record.getMessage() for record in caplog.records if record.name == changed_outputs._log.name)
    return list(dict.fromkeys(lines))  # where Lightning's loggers do propagate, each comes twice


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, logger=changed_outputs._log.name)
    changed_outputs._log.addHandler(caplog.handler)  # Lightning's loggers may not propagate
    yield
    changed_outputs._log.removeHandler(caplog.handler)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", [GCN, GraphSAGE, GAT, SGC])
def test_they_are_those_of_a_full_pass(versions, tmp_path, caplog, kind, both):
    (old, new), module = versions[both], make(kind)
    before, every, few = (tmp_path / f"{name}.parquet" for name in ("before", "every", "few"))
    assert predict(module, old, before)[0] == NUM
    num_all, expected = predict(module, new, every)
    num_few, joined = predict(module, new, few, [tmp_path / "none.parquet", before])
    assert num_all == new.num_nodes == NUM and 5 < num_few < 60
    assert joined["node"].equals(expected["node"])
    found, wanted = (np.array(table["prediction"].to_pylist()) for table in (joined, expected))
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    (line,) = told(caplog)
    assert f"{num_few} of 300 nodes are computed again, what 1 new, 1 with changed features" in line


def test_no_row_less_is_computed_than_differs(versions, tmp_path):
    """Nodes whose outputs differ are all among those that are computed; in-degrees of sources reach one hop more."""
    (old, new), sizes = versions[False], {}
    for kind in (GraphSAGE, GCN):
        before, every = (predict(make(kind), one, tmp_path / "p.parquet")[1].to_pydict() for one in (old, new))
        earlier = dict(zip(before["node"], before["prediction"], strict=True))
        rows = zip(every["node"], every["prediction"], strict=True)
        differs = {node for node, row in rows if node not in earlier or not np.allclose(row, earlier[node], atol=1e-13)}
        source = changed_outputs.StoreLayerSource(new, [0, 1, 2], None)
        found = changed_outputs.altered_nodes(source, new.changes(), 2, kind.needs_degree)
        assert differs <= set(new.user_ids(found[-1].within(0, NUM)).tolist())
        sizes[kind] = len(found[-1])
    assert sizes[GraphSAGE] < sizes[GCN]


def test_all_are_computed_where_nothing_fits(versions, tmp_path, caplog):
    (old, new), module, path = versions[False], make(GCN), tmp_path / "some.parquet"
    before = tmp_path / "before.parquet"
    assert predict(module, new, path, [before])[0] == NUM  # no file
    predict(module, old, before)
    assert predict(module, old, path, [before])[0] == NUM
    other = make(GCN)
    torch.nn.init.ones_(next(other.parameters()))
    assert predict(other, new, path, [before])[0] == NUM
    predict(module, new, before)
    assert predict(module, new, path, [before])[0] == NUM
    ends = [line.partition("are computed: ")[2] for line in told(caplog)]
    assert ends == [
        "there are none of the version before",
        f"{old.root} is no update of another store",
        f"those of {before} are of another model or precision",
        f"those of {before} are of another version",
    ]


def test_a_change_that_reaches_most_is_computed_for_all(versions, tmp_path, caplog, monkeypatch):
    old, new = versions[False]
    predict(make(GCN), old, tmp_path / "before.parquet")
    monkeypatch.setattr(changed_outputs, "MOST", 0.01)
    assert predict(make(GCN), new, tmp_path / "all.parquet", [tmp_path / "before.parquet"])[0] == NUM
    assert "the change reaches more than half of them in 2 layers" in told(caplog)[0]


def test_a_file_that_lacks_a_node_is_refused(versions, tmp_path):
    old, new = versions[False]
    path = tmp_path / "before.parquet"
    predict(make(GCN), old, path)
    pq.write_table(pq.read_table(path).slice(3), path)
    with pytest.raises(GNNScaleError, match=said("before.parquet no prediction of node 0 changed=false")):
        predict(make(GCN), new, tmp_path / "new.parquet", [path])


def rows_of(table):
    return np.array(table["prediction"].to_pylist())


def make_deep(kind, **options):
    torch.manual_seed(0)
    return gs.NodeClassifier(kind(DIM, 8, 3, num_layers=3, **options), predict_logits=True).to(torch.float64)


@pytest.fixture(scope="module")
def chain(versions):
    """Four versions one after the other: nodes, edges and features come, change and go."""
    rng, stores = np.random.default_rng(2), list(versions[False])
    news = [
        {"edges": np.array([[5, 230], [80, 229]]), "removed_nodes": [150]},
        {"nodes": [NUM + 1, 60], "features": rng.standard_normal((2, DIM)).astype(np.float32), "slack": 9.0,
         "edges": np.array([[NUM + 1, 31], [30, NUM + 1]])},
    ]  # fmt: skip
    for new in news:
        stores.append(gs.update_store(stores[-1], **new))
    return stores


@pytest.mark.parametrize(("kind", "kept"), [(GCN, True), (GraphSAGE, False), (GAT, True)])
def test_each_version_is_predicted_from_the_one_before(chain, tmp_path, caplog, kind, kept):
    module, before = make_deep(kind), tmp_path / "v0.parquet"
    predict(module, chain[0], before, keep_layers=kept)
    for number, store in enumerate(chain[1:], 1):
        path = tmp_path / f"v{number}.parquet"
        few, found = predict(module, store, path, [before], keep_layers=kept)
        every, wanted = predict(module, store, tmp_path / "every.parquet")
        assert few < every // 3 and found["node"].equals(wanted["node"])
        np.testing.assert_allclose(rows_of(found), rows_of(wanted), rtol=1e-12, atol=1e-12)
        before = path
    assert len([line for line in told(caplog) if ", and hidden layers those of" in line]) == 3 * kept
    if kept:  # the tables of the last version are those of a pass over all of it
        predict(module, chain[-1], tmp_path / "again.parquet", keep_layers=True)
        for layer in (1, 2):
            one, other = (np.load(tmp_path / f"{name}.layers" / f"layer{layer}.npy") for name in ("v3", "again"))
            assert one.shape == (NUM, table_width(module.backbone, layer)) and one.dtype == np.float64
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_a_layer_computes_the_rows_alone_that_can_have_altered(chain, tmp_path, monkeypatch):
    module, counts = make_deep(GraphSAGE), []
    predict(module, chain[0], tmp_path / "kept.parquet", keep_layers=True)
    predict(module, chain[0], tmp_path / "bare.parquet")
    finish = type(module.backbone).finish_layer
    monkeypatch.setattr(
        type(module.backbone), "finish_layer", lambda *given: counts.append(len(given[2])) or finish(*given)
    )
    for name in ("kept", "bare"):
        predict(module, chain[1], tmp_path / "new.parquet", [tmp_path / f"{name}.parquet"])
    of_kept, of_bare = counts[:3], counts[3:]
    assert of_kept[0] < of_kept[1] < of_kept[2] == of_bare[2] and of_bare[0] > of_bare[1] > of_bare[2]


def test_layers_that_are_no_use_are_named(chain, tmp_path, caplog):
    module, before, new = make_deep(GraphSAGE), tmp_path / "before.parquet", tmp_path / "new.parquet"
    layers = tmp_path / "before.layers"
    predict(module, chain[0], before)
    assert predict(module, chain[1], new, [before], keep_layers=True)[0] == NUM
    predict(module, chain[0], before, keep_layers=True)
    table = layers / "layer2.npy"
    data = bytearray(table.read_bytes())
    data[-1] ^= 1
    table.write_bytes(data)
    assert predict(module, chain[1], new, [before], keep_layers=True)[0] == NUM
    assert predict(module, chain[1], new, [before])[0] < NUM // 3  # through all layers
    (layers / "layers.json").write_text("{}")
    assert predict(module, chain[1], new, [before], keep_layers=True)[0] == NUM
    ends = [line.partition("to be kept, and ")[2] for line in told(caplog)]
    none = f"{layers} holds none of the version before"
    assert list(filter(None, ends)) == [none, f"those of {layers} are damaged"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "before.layers", "before.parquet", "new.layers", "new.parquet",
    ]  # fmt: skip


def test_layers_are_kept_of_exact_predictions_alone(chain, tmp_path):
    writer = gs.PredictionWriter(tmp_path / "p.parquet", keep_layers=True)
    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    data = gs.PartitionDataModule(store=chain[0], sampler=gs.NeighborSampler([-1, -1, -1]), evaluation="sampled")
    with pytest.raises(StrategyError, match=said("keep_layers=True layer by layer evaluation")):
        L.Trainer(callbacks=[writer], **options).predict(make_deep(GraphSAGE).float(), data)


@pytest.mark.parametrize(("labelled", "kept"), [(["paper"], True), (["paper", "author"], False)])
def test_types_are_followed_by_their_edge_types(tmp_path, caplog, labelled, kept):
    """Ids count within their node type, and those of node types without a label have no predictions."""
    rng, count = np.random.default_rng(3), 90
    names, around = np.array([f"n{i}" for i in range(count)]), np.arange(count)
    nodes = {
        name: {"nodes": names, "features": rng.standard_normal((count, dim)).astype(np.float32)}
        for name, dim in (("paper", 4), ("author", 3))
    }
    for name in labelled:
        nodes[name]["labels"] = around % 3
    edges = {
        ("paper", "cites", "paper"): np.stack([names, names[(around + 1) % count]]),
        ("author", "writes", "paper"): np.stack([names, names[(around * 7) % count]]),
        ("paper", "written_by", "author"): np.stack([names[::2], names[(around[::2] * 5) % count]]),
    }
    graph = gs.hetero_graph(nodes, edges, separate_reverses=True)
    parts = gs.partition(graph.stream, method="random", num_parts=3, seed=0)
    stores = [gs.write_partition_store(tmp_path / "stores" / "typed", graph.stream, parts, graph)]
    changes = [
        {"nodes": {"author": {"nodes": ["n90"], "features": rng.standard_normal((1, 3)).astype(np.float32)}},
         "edges": {"author,writes,paper": {"edges": np.array([["n90"], ["n4"]])}}},
        {"nodes": {"paper": {"nodes": ["n7"], "features": rng.standard_normal((1, 4)).astype(np.float32)}},
         "removed_nodes": {"author": ["n3"]}},
    ]  # fmt: skip
    for change in changes:
        stores.append(gs.update_store(stores[-1], slack=9.0, **change))
    torch.manual_seed(0)
    model = RGCN({"paper": 4, "author": 3}, 8, 3, num_layers=2, schema=stores[0].schema)
    module, before = gs.NodeClassifier(model, predict_logits=True).to(torch.float64), tmp_path / "v0.parquet"
    predict(module, stores[0], before, keep_layers=kept)
    for number, store in enumerate(stores[1:], 1):
        path = tmp_path / f"v{number}.parquet"
        few, found = predict(module, store, path, [before], keep_layers=kept)
        every, wanted = predict(module, store, tmp_path / "every.parquet")
        assert 0 < few < every // 2
        assert found.drop_columns("prediction").equals(wanted.drop_columns("prediction"))
        assert set(found["node_type"].to_pylist()) == set(labelled)
        np.testing.assert_allclose(rows_of(found), rows_of(wanted), rtol=1e-12, atol=1e-12)
        before = path
    assert sum("are computed again" in line for line in told(caplog)) == 2
