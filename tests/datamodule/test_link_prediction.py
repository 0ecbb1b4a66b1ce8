"""Links from the store to the metrics: training, ranking, embeddings, under the Trainer and on several ranks."""

from dataclasses import replace

import lightning as L
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.model import GAT, GCN, GraphSAGE
from tests.says import said
from tests.tiers import first

# 24 communities of 20 nodes: an end sampled at random is of the other's community once in 24.
GRAPH = SyntheticGraph(480, 4800, num_communities=24, homophily=0.97, seed=1)


def planted(**options) -> GraphDataset:
    stream = GRAPH.stream(chunk_edges=1000, to_undirected=True)
    dataset = GraphDataset("planted", stream, GRAPH.features(16, noise=0.2))
    return gs.hold_out_edges(dataset, **{"val": 0.05, "test": 0.1, **options})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("links") / "store"
    dataset = planted()
    gs.write_partition_store(
        root, dataset.stream, gs.partition(dataset.stream, "random", num_parts=4), features=dataset.features
    )
    return root


def data(root, fanouts=(8, 8), **options):
    sampler = gs.LinkSampler(gs.NeighborSampler(fanouts), **options.pop("sampler", {}))
    negatives = {"negatives": options.pop("negatives")} if "negatives" in options else {}
    options.setdefault("evaluation", gs.EvaluationOptions(links=planted().links, **negatives))
    return gs.PartitionDataModule(store=root, sampler=sampler, batch_size=64, **options)


def trainer(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **options)


def model(kind=GraphSAGE, **options):
    torch.manual_seed(0)
    backbone = kind(in_channels=16, hidden_channels=32, out_channels=32, num_layers=2, dropout=0.0)
    return gs.LinkPredictor(backbone, **{"lr": 0.01, "hits": (1, 5, 10), **options})


# A guess has an MRR among 100 negatives of sum(1/k, k <= 101) / 101 = 0.051 and Hits@10 of 10 / 101 = 0.099.
@first(2)
@pytest.mark.parametrize("kind", [GraphSAGE, GCN, GAT])
@pytest.mark.parametrize("positives", ["walk", "edge"])
def test_links_of_a_planted_graph_are_found_far_better_than_by_probability(root, kind, positives):
    dm = data(root, sampler={"positives": positives, "walk_length": 2}, scope="graph")
    run, links = trainer(max_epochs=6), model(kind)
    run.fit(links, dm)
    assert {"train_loss", "val_loss", "val_mrr", "val_hits@1", "val_hits@5", "val_hits@10"} <= set(run.callback_metrics)
    logged = run.test(links, dm, verbose=False)[0]
    assert logged["test_mrr"] > 0.15
    assert logged["test_hits@10"] > 0.4
    assert logged["test_hits@1"] <= logged["test_hits@5"] <= logged["test_hits@10"]


@pytest.mark.sweep
def test_a_small_graph_is_overfitted(tmp_path):
    """A ring of 24 nodes, joined to the next two: every pair is reported by the sign of its score."""
    ring = np.arange(24)
    edges = np.concatenate([np.stack([ring, (ring + step) % 24]) for step in (1, 2)], axis=1)
    stream = gs.open_edge_stream(edges, to_undirected=True)
    gs.write_partition_store(
        tmp_path / "s", stream, gs.partition(stream, "random", num_parts=1), features=np.eye(24, dtype=np.float32)
    )
    sampler = gs.LinkSampler(
        gs.NeighborSampler([-1, -1]), "edge", num_negatives=10, negatives="uniform", edges_per_node=4
    )
    dm = gs.PartitionDataModule(store=tmp_path / "s", sampler=sampler, batch_size=48, halo_hops=1)
    torch.manual_seed(0)
    links = gs.LinkPredictor(
        GraphSAGE(24, 64, 32, num_layers=2, dropout=0.0), lr=0.01, negative_weight=1, decoder="mlp"
    )
    trainer(max_epochs=60).fit(links, dm)
    (result,) = trainer().predict(links, dm)
    embedding = torch.empty(24, 32)
    embedding[torch.as_tensor(dm.store.original_nid[result["nodes"]])] = result["prediction"]
    with torch.no_grad():
        scores = links.decoder(embedding[:, None], embedding[None])
    joined = torch.zeros(24, 24, dtype=torch.bool)
    joined[edges[0], edges[1]] = joined[edges[1], edges[0]] = True
    apart = ~joined & ~torch.eye(24, dtype=torch.bool)
    assert ((scores > 0) == joined)[joined | apart].float().mean() > 0.97


def test_metrics_equal_plain_python(root):
    """Ranks by hand, from embeddings and negatives; none of the negatives is joined to its link's first end."""
    dm, links = data(root, negatives=30), model()
    run = trainer()
    logged = run.test(links, dm, verbose=False)[0]
    (result,) = run.predict(links, dm)
    embedding = np.empty((480, 32), np.float32)
    embedding[result["nodes"]] = result["prediction"]
    dm.setup("test")
    source = dm.test_dataloader().evaluation.links
    pairs, negatives = (
        np.concatenate(chunks, axis=axis)
        for axis, chunks in zip((1, 0), zip(*source.chunks(7), strict=True), strict=True)
    )
    known = {
        tuple(edge) for name in ("val", "test") for edge in dm.store.store_nid[planted().links[name].edges].T.tolist()
    }
    for target in range(480):
        known |= {
            (int(s), target)
            for s in dm.store.csc.indices[dm.store.csc.indptr[target] : dm.store.csc.indptr[target + 1]]
        }
    reciprocal, hits = [], []
    for (u, v), false in zip(pairs.T.tolist(), negatives.tolist(), strict=True):
        assert all(n >= 0 and n != u and (u, n) not in known and (n, u) not in known for n in false)
        score = embedding[u] @ embedding[v]
        rank = 1 + sum(embedding[u] @ embedding[n] > score for n in false)
        reciprocal.append(1 / rank)
        hits.append(rank <= 5)
    assert len(reciprocal) == planted().links["test"].edges.shape[1]
    # Scores in another order of sums: a few links may change places with a negative next to them.
    assert logged["test_mrr"] == pytest.approx(np.mean(reciprocal), abs=2e-3)
    assert logged["test_hits@5"] == pytest.approx(np.mean(hits), abs=1e-2)


def test_parts_change_no_false_end(root, tmp_path):
    dataset = planted()
    gs.write_partition_store(
        tmp_path / "s", dataset.stream, gs.partition(dataset.stream, "range", num_parts=2), features=dataset.features
    )
    found = []
    for place in (root, tmp_path / "s"):
        dm = data(place)
        dm.setup()
        ((pairs, negatives),) = dm.val_dataloader().evaluation.links.chunks(10**6)
        found.append((dm.store.original_nid[pairs], dm.store.original_nid[negatives]))
        dm.teardown("test")
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)


def test_given_negatives_are_taken_as_they_are(root):
    links = planted().links["test"]
    given = np.tile(links.edges[1][:, None], 3)  # the other end itself: every rank is a tie of four
    dm = data(root)
    dm.links = {"test": links._replace(negatives=given)}
    logged = trainer().test(model(), dm, verbose=False)[0]
    assert logged["test_mrr"] == pytest.approx(1 / 2.5)
    assert logged["test_hits@1"] == 0


@pytest.mark.parametrize(
    ("low", "high", "dtype", "message"),
    [
        (-2, 5, np.int64, "nodes [0, -1 -2 5"),
        (0, 10**6, np.int64, "-1 0 1000000"),
        (0, 1, np.float64, "integers shape"),
    ],
)
def test_given_negatives_are_nodes(root, low, high, dtype, message):
    links = planted().links["test"]
    given = np.full((links.edges.shape[1], 2), low, dtype)
    given[-1] = high
    dm = data(root)
    dm.links = {"test": links._replace(negatives=given)}
    with pytest.raises(StrategyError, match=said(message)):
        trainer().test(model(), dm, verbose=False)


def test_embeddings_go_out_by_the_users_ids(root, tmp_path):
    writer = gs.PredictionWriter(tmp_path / "embeddings.parquet")
    links, dm = model(), data(root)
    run = trainer(callbacks=[writer])
    (result,) = run.predict(links, dm)
    table = pq.read_table(tmp_path / "embeddings.parquet")
    assert table["node"].to_pylist() == list(range(480))
    rows = np.array(table["prediction"].to_pylist(), np.float32)
    assert np.array_equal(rows[dm.store.original_nid[result["nodes"]]], result["prediction"].numpy())


def test_the_loss_is_graphsages(root, monkeypatch):
    monkeypatch.setattr(gs.LinkPredictor, "log", lambda *args, **options: None)
    dm, links = data(root), model()
    dm.setup()
    batch = next(iter(dm.train_dataloader()))
    z = links(batch).double()
    positive = (z[batch.src_index] * z[batch.dst_pos_index]).sum(1)
    negative = torch.einsum("pc,pqc->pq", z[batch.src_index], z[batch.dst_neg_index])
    expected = (-positive.sigmoid().log() - 5 * (1 - negative.sigmoid()).log().mean(1)).mean()
    torch.testing.assert_close(links.training_step(batch).double(), expected, rtol=1e-4, atol=1e-5)
    nothing = replace(batch, pairs=batch.pairs[:, :0], negatives=batch.negatives[:0])
    lonely = model(decoder="mlp")
    loss = lonely.training_step(nothing)
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(p.grad is not None and not p.grad.any() for p in lonely.parameters())
    dm.teardown("fit")


def test_batches_rank_links_as_layers_do(root):
    """All neighbours of as many hops as layers; sums of float32 in another order may swap near ties."""
    links, found = planted(val=0, test=0.02).links, {}
    for mode in ("layerwise", "sampled"):
        dm = data(root, evaluation=gs.EvaluationOptions(mode, links=links, negatives=15))
        found[mode] = trainer().test(model(), dm, verbose=False)[0]
    assert found["sampled"] == pytest.approx(found["layerwise"], rel=1e-3)


def test_bad_input_is_told_in_one_line(root, tmp_path):
    whole = GRAPH.stream(to_undirected=True)
    leaky = gs.write_partition_store(
        tmp_path / "s", whole, gs.partition(whole, "random", num_parts=2), features=GRAPH.features(16)
    )
    with pytest.raises(StrategyError, match=said("val links edges training sees")):
        run = data(leaky)
        run.setup()
        run.val_dataloader()
    run.teardown("fit")
    with pytest.raises(StrategyError, match="none are held out"):
        dm = data(root)
        dm.links = {}
        trainer().test(model(), dm)
    with pytest.raises(ValueError, match=said("evaluation.negatives 1 0")):
        data(root, negatives=0)
    with pytest.raises(StrategyError, match=said("trains batches pairs")):
        dm = data(root)
        dm.sampler = type("Unpaired", (gs.NeighborSampler,), {"trains_on_links": True})([2, 2])
        trainer(max_epochs=1).fit(model(), dm)
    for options, message in (
        ({"decoder": "cosine"}, "decoder must be a module or one of dot, mlp, distmult, complex, transe, got 'cosine'"),
        ({"hits": (0,)}, "hits must be an integer of at least 1, got 0"),
        ({"negative_weight": -1}, "negative_weight must be at least 0 or None, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**options)
