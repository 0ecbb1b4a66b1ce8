"""Classes of edges from the store: batches of labelled edges, the exact pass over held-out ones, a run by config."""

import lightning as L
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

import lightning_gnnscale as gs
from lightning_gnnscale.cli.checks import check_dataset, check_settings
from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.errors import StrategyError
from tests.says import said
from tests.tiers import each_value, first

NUM_NODES, NUM_EDGES = 200, 1500
pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often", "ignore:.*does not have many workers")


def labelled(attr: int = 0) -> GraphDataset:
    """The class of an edge says which of its ends has the larger first feature: it depends on the order of the ends."""
    rng = np.random.default_rng(0)
    edges = np.unique(rng.integers(0, NUM_NODES, (2, NUM_EDGES)), axis=1)
    features = rng.random((NUM_NODES, 5)).astype(np.float32)
    label = (features[edges[0], 0] > features[edges[1], 0]).astype(np.int64)
    label[::11] = -1
    more = {"edge_features": rng.random((edges.shape[1], attr)).astype(np.float32)} if attr else {}
    return GraphDataset("signed", gs.open_edge_stream(edges, num_nodes=NUM_NODES), features, edge_label=label, **more)


def data(root, attr=0, mode="layerwise", **options) -> gs.PartitionDataModule:
    held = gs.hold_out_edges(labelled(attr), val=0.1, test=0.2)
    sampler = gs.LinkSampler(gs.NeighborSampler([5]), "edge", edges_per_node=8, labelled=True)
    return gs.PartitionDataModule(
        dataset=held, root=root / "store", num_parts=3, partitioner="random", sampler=sampler, batch_size=64,
        evaluation=gs.EvaluationOptions(mode, links=held.links), **options,
    )  # fmt: skip


def trainer(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **options)


def model(**options):
    torch.manual_seed(0)
    backbone = gs.model.GraphSAGE(5, 16, 16, num_layers=1, dropout=0.0)
    if options.get("edge_channels"):
        backbone = gs.model.GAT(5, 16, 16, num_layers=1, heads=2, dropout=0.0, edge_dim=options["edge_channels"])
    return gs.EdgeClassifier(backbone, 2, lr=0.02, **options)


@each_value
@pytest.mark.parametrize("scope", ["part", "graph"])
@pytest.mark.parametrize("attr", [0, 3])
def test_batches_have_the_classes_and_features_of_their_edges(tmp_path, scope, attr):
    dm = data(tmp_path, attr, scope=scope)
    dm.prepare_data()
    dm.setup("fit")
    given = dm.dataset
    src, dst = (np.concatenate(ends) for ends in zip(*((c.src, c.dst) for c in given.stream.chunks()), strict=True))
    place = {pair: at for at, pair in enumerate(zip(src.tolist(), dst.tolist(), strict=True))}
    assert len(place) == len(src) == len(given.edge_label)
    seen, original = set(), np.asarray(dm.store.original_nid)
    for source in (gs.Threads(), gs.TaskGraphs(), *([gs.Processes(num_workers=2)] if attr and scope == "part" else [])):
        dm.source = source
        for batch in dm.train_dataloader():
            ends = original[batch.n_id[batch.pairs].numpy()]
            rows = [place[pair] for pair in zip(*ends.tolist(), strict=True)]  # source and target, in this order
            assert np.array_equal(batch.edge_label, given.edge_label[rows])
            assert batch.negatives.shape == (len(rows), 0)
            assert (batch.pair_attr is None) == (attr == 0)
            assert attr == 0 or np.array_equal(batch.pair_attr, given.edge_features[rows])
            seen |= set(rows)
    assert len(seen) > 0.9 * len(src)


def test_held_out_classes_follow_their_edges():
    given, held = labelled(2), gs.hold_out_edges(labelled(2), val=0.1, test=0.2)
    chunk = next(iter(given.stream.chunks()))
    place = {pair: at for at, pair in enumerate(zip(chunk.src.tolist(), chunk.dst.tolist(), strict=True))}
    for links in held.links.values():
        rows = [place[pair] for pair in zip(*links.edges.tolist(), strict=True)]
        assert np.array_equal(links.label, given.edge_label[rows])
        assert np.array_equal(links.features, given.edge_features[rows])


def outputs_by_hand(module, dm, links, attr):
    """The backbone over all edges of training, and the head over some links."""
    held = dm.dataset
    edges = torch.from_numpy(np.concatenate([np.stack([c.src, c.dst]) for c in held.stream.chunks()], axis=1)).long()
    with torch.no_grad():
        read = {"edge_attr": torch.from_numpy(held.edge_features)} if attr else {}
        table = module.backbone(torch.from_numpy(held.features), edges, **read)
        rows = [table[ends] for ends in links.edges] + ([torch.from_numpy(links.features)] if attr else [])
        return module.out(module.hidden(torch.cat(rows, 1)).relu())


@first(1)
@pytest.mark.parametrize("attr", [0, 3])
def test_the_exact_pass_is_the_head_over_the_full_graph(tmp_path, monkeypatch, attr):
    """Against the backbone over all edges of training and the head over all held-out ones, in float32."""
    monkeypatch.setattr("lightning_gnnscale.model.edge_classifier.CHUNK_BYTES", 4 * 200 * 7)  # several chunks
    dm, module, run = data(tmp_path, attr), model(edge_channels=attr), trainer(max_epochs=8)
    run.fit(module, dm)
    assert {"train_loss", "val_loss", "val_acc"} <= set(run.callback_metrics)
    assert module.hidden.in_features == 32 + attr
    found = run.test(module, dm, verbose=False)[0]
    links = dm.links["test"]
    outputs = outputs_by_hand(module, dm, links, attr)
    label = torch.from_numpy(links.label)
    known = label >= 0
    assert 0 < int((~known).sum())
    assert found["test_loss"] == pytest.approx(float(F.cross_entropy(outputs[known], label[known])), rel=1e-4)
    right = (outputs.argmax(1) == label)[known].float().mean()
    assert found["test_acc"] == pytest.approx(float(right), abs=1.5 / int(known.sum()))  # one near tie
    assert found["test_acc"] > (0.65 if attr else 0.8)  # half for a guess; attention weighs the node itself less
    sampled = data(tmp_path, attr, mode="sampled")
    assert trainer().test(module, sampled, verbose=False)[0] == pytest.approx(found, rel=1e-3)


@first(1)
@pytest.mark.parametrize("attr", [0, 3])
def test_predictions_are_the_held_out_edges_in_their_order(tmp_path, monkeypatch, attr):
    """Against the head over the full graph; in memory, in chunks on disk, and in sampled batches."""
    monkeypatch.setattr("lightning_gnnscale.model.edge_classifier.CHUNK_BYTES", 4 * 200 * 7)
    module, found = model(edge_channels=attr, predict_logits=True), {}
    for mode in ("layerwise", "sampled"):
        dm = data(tmp_path, attr, mode)
        monkeypatch.setattr("lightning_gnnscale.datamodule.callbacks._BLOCK_ROWS", 16 if mode == "layerwise" else 1000)
        chunks = trainer().predict(module, dm)
        assert len(chunks) == 1 or mode == "sampled"
        edges = np.hstack([chunk["edges"] for chunk in chunks])
        links = dm.links["test"]
        assert np.array_equal(np.asarray(dm.store.original_nid)[edges], links.edges)
        assert all("edge_type" not in chunk for chunk in chunks)
        path = tmp_path / mode / "predictions.parquet"
        given = trainer(callbacks=[gs.PredictionWriter(path)]).predict(module, data(tmp_path, attr, mode))
        assert mode == "sampled" or len(given[0]["prediction"]) == 0  # written as they came
        assert list(path.parent.iterdir()) == [path]
        table = pq.read_table(path, page_checksum_verification=True)
        assert table.column_names == ["source", "target", "prediction"]
        assert np.array_equal(np.stack([table["source"], table["target"]]), links.edges)
        found[mode] = np.array(table["prediction"].to_pylist(), np.float32)
        assert np.array_equal(torch.cat([chunk["prediction"] for chunk in chunks]).numpy(), found[mode])
    np.testing.assert_allclose(found["layerwise"], outputs_by_hand(module, dm, links, attr), atol=1e-5)
    np.testing.assert_allclose(found["sampled"], found["layerwise"], atol=1e-5)
    groups = {mode: pq.ParquetFile(tmp_path / mode / "predictions.parquet").num_row_groups for mode in found}
    assert groups == {"layerwise": -(-len(links.label) // 16), "sampled": 1}
    module.predict_logits = False
    (classes,) = trainer().predict(module, data(tmp_path, attr))
    assert classes["prediction"].dtype == torch.int64
    assert np.array_equal(classes["prediction"].numpy(), found["layerwise"].argmax(1))


def test_a_run_that_fails_leaves_the_file_before_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_gnnscale.model.edge_classifier.CHUNK_BYTES", 4 * 200 * 7)
    module, path = model(), tmp_path / "out" / "predictions.parquet"
    trainer(callbacks=[gs.PredictionWriter(path)]).predict(module, data(tmp_path))
    before, decide, chunks = path.read_bytes(), module.decide, []

    def failing(outputs):
        chunks.append(len(outputs))
        if len(chunks) == 4:
            assert {other.name for other in path.parent.iterdir()} == {path.name, f"{path.name}.0"}
            raise RuntimeError("half way")
        return decide(outputs)

    module.decide = failing
    with pytest.raises(RuntimeError, match="half way"):
        trainer(callbacks=[gs.PredictionWriter(path)]).predict(module, data(tmp_path))
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_which_edges_are_predicted(tmp_path):
    """Those of test, else of validation; without classes, and edges that stand in the store, when they are named."""
    module, dm = model(), data(tmp_path)
    links = dm.links
    dm.links = {"val": links["val"]}
    (rows,) = trainer().predict(module, dm)
    assert np.array_equal(np.asarray(dm.store.original_nid)[rows["edges"]], links["val"].edges)
    indptr, indices = dm.store.csc.indptr, np.asarray(dm.store.csc.indices)
    node = int(np.argmax(np.diff(indptr)))
    sources = np.asarray(dm.store.original_nid)[indices[indptr[node] : indptr[node + 1]]]
    standing = np.stack([sources, np.full(len(sources), dm.store.original_nid[node])])
    dm.links = {"test": gs.LinkSet(standing, negatives=np.zeros((len(sources), 2), int)), "val": links["val"]}
    (rows,) = trainer().predict(module, dm)
    assert np.array_equal(np.asarray(dm.store.original_nid)[rows["edges"]], standing)
    with pytest.raises(StrategyError, match=said("test links edges")):  # a score of them would tell nothing
        dm.links["test"] = dm.links["test"]._replace(label=np.zeros(len(sources), int))
        trainer().test(module, dm)
    dm.links = {"test": gs.LinkSet(standing[:, :0])}
    with pytest.raises(StrategyError, match=said("predicting classes edges held-out edges")):
        trainer().predict(module, dm)
    nodes = gs.NodeClassifier(gs.model.GraphSAGE(5, 8, 2, num_layers=1))
    assert len(trainer().predict(nodes, data(tmp_path))[0]["nodes"]) == NUM_NODES


NODE_TYPES = {"user": [f"u{i:02}" for i in range(30)], "item": [f"i{i}" for i in range(20)]}


def typed() -> gs.GraphDataset:
    """Two edge types between node types whose nodes have the user's own names; classes of the edges of one of them."""
    rng = np.random.default_rng(0)
    rated = np.unique(rng.integers(0, [[30], [20]], (2, 400)), axis=1)
    trusts = np.unique(rng.integers(0, 30, (2, 200)), axis=1)
    users, items = (np.array(names) for names in NODE_TYPES.values())
    return gs.hetero_graph(
        {
            "user": {"nodes": users, "features": rng.random((30, 4), np.float32)},
            "item": {"nodes": items, "features": rng.random((20, 3), np.float32)},
        },
        {
            ("user", "rated", "item"): {
                "edges": np.stack([users[rated[0]], items[rated[1]]]),
                "labels": rng.integers(0, 3, rated.shape[1]),
            },
            ("user", "trusts", "user"): users[trusts],
        },
    )


def test_predictions_of_a_typed_graph_name_node_types_and_relation(tmp_path):
    held = gs.hold_out_edges(typed(), val=0.1, test=0.2)
    links = held.links["test"]
    assert set(links.edge_type) == {0, 1}
    sampler = gs.LinkSampler(gs.NeighborSampler([4]), "edge", labelled=True)
    found = []
    for mode in ("layerwise", "sampled"):
        dm = gs.PartitionDataModule(dataset=held, root=tmp_path / "store", num_parts=3, sampler=sampler,
                                    partitioner="random", evaluation=mode, batch_size=64)  # fmt: skip
        dm.prepare_data()
        torch.manual_seed(0)
        backbone = gs.model.RGCN(dm.feature_dims, 8, 8, num_layers=1, schema=dm.schema)
        path = tmp_path / f"{mode}.parquet"
        trainer(callbacks=[gs.PredictionWriter(path)]).predict(gs.EdgeClassifier(backbone, 3), dm)
        found.append(pq.read_table(path))
    assert found[0].column_names == ["source_type", "source", "relation", "target_type", "target", "prediction"]
    assert found[0].drop_columns(["prediction"]).equals(found[1].drop_columns(["prediction"]))
    names = np.array(NODE_TYPES["user"] + NODE_TYPES["item"])  # node type after node type, as original ids are
    assert found[0]["source"].to_pylist() == names[links.edges[0]].tolist()
    assert found[0]["target"].to_pylist() == names[links.edges[1]].tolist()
    assert set(found[0]["source_type"].to_pylist()) == {"user"}
    assert found[0]["relation"].to_pylist() == np.array(["rated", "trusts"])[links.edge_type].tolist()
    assert found[0]["target_type"].to_pylist() == np.array(["item", "user"])[links.edge_type].tolist()


def test_what_does_not_fit_is_told_in_one_line(tmp_path):
    inner = gs.NeighborSampler([2])
    with pytest.raises(ValueError, match=said('labelled=True positives="edge"')):
        gs.LinkSampler(inner, labelled=True)
    dm = data(tmp_path)
    dm.links = {name: links._replace(label=None) for name, links in dm.links.items()}
    with pytest.raises(StrategyError, match=said("links['test'] label missing")):
        trainer().test(model(), dm)
    backbone = gs.model.GraphSAGE(5, 8, 8, num_layers=1)
    with pytest.raises(StrategyError, match=said("LinkPredictor negatives batches")):
        trainer(max_epochs=1, num_sanity_val_steps=0).fit(gs.LinkPredictor(backbone), data(tmp_path))
    plain = labelled()
    plain.edge_label = None
    without = gs.PartitionDataModule(
        dataset=plain, root=tmp_path / "other", num_parts=2, sampler=gs.LinkSampler(inner, "edge", labelled=True)
    )
    with pytest.raises(ValueError, match=said("labelled=True classes edges")):
        trainer(max_epochs=1).fit(model(), without)
    with pytest.raises(ValueError, match=said("edge_label 0 -1 = float64")):
        plain.edge_label = np.zeros(len(labelled().edge_label))
        gs.hold_out_edges(plain)


EDGES = ["sampler=edges", "model=edge_classifier"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=edge_gat"], "model trains links"),
        (
            ["model=edge_gat", "sampler=links"],
            "model sampler=edges",
        ),
        (["model=link_gcn", "sampler=edges"], "sampler.labelled=true reads classes"),
        (EDGES, "dataset.edge_label 0"),
    ],
)
def test_settings_that_do_not_go_together(words, message):
    plain = labelled()
    plain.edge_label = None
    with pytest.raises(UsageError, match=said(message)):
        check_dataset(compose_config("train", words), plain)


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("predict", [], r"dataset\.hold_out\.test=0\.1$"),
        ("train", ["test=false"], r"dataset\.hold_out\.test=0\.1, .*predict=false$"),
    ],
)
def test_edges_to_predict_are_held_out(command, words, message):
    config = compose_config("train", [*EDGES, *words, "predict=true"])
    with pytest.raises(UsageError, match=message):
        check_dataset(config, labelled(), command)
    check_dataset(config, gs.hold_out_edges(labelled()), command)
    config.predict = command == "predict"
    bare = labelled()
    bare.edge_label = None
    if command == "predict":  # edges without classes will do
        check_dataset(config, gs.hold_out_edges(bare), command)


def test_settings_that_do():
    config = compose_config("train", [*EDGES, "test=false"])
    check_settings(config)
    check_dataset(config, gs.hold_out_edges(labelled()))
