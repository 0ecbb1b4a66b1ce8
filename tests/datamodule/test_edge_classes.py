"""Classes of edges from the store: batches of labelled edges, the exact pass over held-out ones, a run by config."""

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import lightning_gnnscale as gs
from lightning_gnnscale.cli.checks import check_dataset, check_settings
from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.errors import StrategyError

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


@pytest.mark.parametrize("attr", [0, 3])
def test_the_exact_pass_is_the_head_over_the_full_graph(tmp_path, monkeypatch, attr):
    """Against the backbone over all edges of training and the head over all held-out ones, in float32."""
    monkeypatch.setattr("lightning_gnnscale.model.edge_classifier.CHUNK_BYTES", 4 * 200 * 7)  # several pieces
    dm, module, run = data(tmp_path, attr), model(edge_channels=attr), trainer(max_epochs=8)
    run.fit(module, dm)
    assert {"train_loss", "val_loss", "val_acc"} <= set(run.callback_metrics)
    assert module.hidden.in_features == 32 + attr
    found = run.test(module, dm, verbose=False)[0]
    held, links = dm.dataset, dm.links["test"]
    arcs = torch.from_numpy(np.concatenate([np.stack([c.src, c.dst]) for c in held.stream.chunks()], axis=1)).long()
    with torch.no_grad():
        read = {"edge_attr": torch.from_numpy(held.edge_features)} if attr else {}
        table = module.backbone(torch.from_numpy(held.features), arcs, **read)
        rows = [table[ends] for ends in links.edges] + ([torch.from_numpy(links.features)] if attr else [])
        outputs = module.out(module.hidden(torch.cat(rows, 1)).relu())
    label = torch.from_numpy(links.label)
    known = label >= 0
    assert 0 < int((~known).sum())
    assert found["test_loss"] == pytest.approx(float(F.cross_entropy(outputs[known], label[known])), rel=1e-4)
    right = (outputs.argmax(1) == label)[known].float().mean()
    assert found["test_acc"] == pytest.approx(float(right), abs=1.5 / int(known.sum()))  # one near tie
    assert found["test_acc"] > (0.65 if attr else 0.8)  # half for a guess; attention weighs the node itself less
    sampled = data(tmp_path, attr, mode="sampled")
    assert trainer().test(module, sampled, verbose=False)[0] == pytest.approx(found, rel=1e-3)


def test_what_does_not_fit_is_told_in_one_line(tmp_path):
    inner = gs.NeighborSampler([2])
    with pytest.raises(ValueError, match='labelled=True needs positives="edge"'):
        gs.LinkSampler(inner, labelled=True)
    dm = data(tmp_path)
    dm.links = {name: links._replace(label=None) for name, links in dm.links.items()}
    with pytest.raises(StrategyError, match=r"links\['test'\].label is missing, and edges are classified"):
        trainer().test(model(), dm)
    backbone = gs.model.GraphSAGE(5, 8, 8, num_layers=1)
    with pytest.raises(StrategyError, match="LinkPredictor needs false ends, and batches have none"):
        trainer(max_epochs=1, num_sanity_val_steps=0).fit(gs.LinkPredictor(backbone), data(tmp_path))
    plain = labelled()
    plain.edge_label = None
    without = gs.PartitionDataModule(
        dataset=plain, root=tmp_path / "other", num_parts=2, sampler=gs.LinkSampler(inner, "edge", labelled=True)
    )
    with pytest.raises(ValueError, match="labelled=True needs classes of edges, and the store has none"):
        trainer(max_epochs=1).fit(model(), without)
    with pytest.raises(ValueError, match="edge_label must be integers from 0, -1 = unknown, got float64"):
        plain.edge_label = np.zeros(len(labelled().edge_label))
        gs.hold_out_edges(plain)


EDGES = ["sampler=edges", "model=edge_classifier"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=edge_gat"], "model trains on links, the sampler draws none"),
        (
            ["model=edge_gat", "sampler=links"],
            "model classifies edges, the sampler draws no classes: say sampler=edges",
        ),
        (["model=link_gcn", "sampler=edges"], "sampler.labelled=true draws edges with classes, the model reads none"),
        (EDGES, "dataset.edge_label: signed has 0 classes of edges; classifying them needs two or more"),
    ],
)
def test_settings_that_do_not_go_together(words, message):
    plain = labelled()
    plain.edge_label = None
    with pytest.raises(UsageError, match=message):
        check_dataset(compose_config("train", words), plain)


def test_settings_that_do():
    config = compose_config("train", [*EDGES, "test=false"])
    check_settings(config)
    check_dataset(config, gs.hold_out_edges(labelled()))
