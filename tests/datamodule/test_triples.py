"""Triples from the store to the filtered metrics: against brute force, PyG, other chunks, parts and ranks."""

import lightning as L
import numpy as np
import pytest
import torch
from torch_geometric.nn import kge

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.evaluation import LinkQueries, evaluation_links
from lightning_gnnscale.dataset import GraphDataset, LinkSet
from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.model import RGCN, NoLayers, link_predictor
from tests.says import said
from tests.tiers import all_pairs, each_value

NODES, RELATIONS, WIDTH = 70, 4, 6


def all_triples() -> np.ndarray:
    """(3, 500) distinct heads, relations and tails; some from a node to itself, many sharing head and relation."""
    rng = np.random.default_rng(0)
    sampled = np.stack([rng.integers(0, 25, 900), rng.integers(0, RELATIONS, 900), rng.integers(0, NODES, 900)])
    return np.unique(sampled, axis=1)[:, rng.permutation(np.unique(sampled, axis=1).shape[1])[:500]]


TRIPLES = all_triples()
CHUNKS = dict(zip(("train", "val", "test"), np.split(TRIPLES, [400, 440], axis=1), strict=True))


def dataset(**options) -> GraphDataset:
    (head, relation, tail), held = CHUNKS["train"], {name: CHUNKS[name] for name in ("val", "test")}
    stream = open_edge_stream(np.stack([head, tail]), num_nodes=NODES, **options)
    links = {name: LinkSet(found[[0, 2]], edge_type=found[1]) for name, found in held.items()}
    features = np.random.default_rng(1).normal(size=(NODES, WIDTH)).astype(np.float32)
    return GraphDataset("kg", stream, features, links=links, edge_type=relation)


def store_of(root, num_parts=3, **options):
    graph = dataset(**options)
    parts = gs.partition(graph.stream, "random", num_parts=num_parts)
    gs.write_partition_store(root, graph.stream, parts, features=graph.features)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return store_of(tmp_path_factory.mktemp("triples") / "store")


def data(root, ranked_among="auto", links=None, **sampler):
    links = dataset().links if links is None else links
    given = {"positives": "edge", "corrupt": "both", "neighborhoods": False, "num_negatives": 8, **sampler}
    return gs.PartitionDataModule(
        store=root,
        sampler=gs.LinkSampler(**given),
        batch_size=64,
        evaluation=gs.EvaluationOptions(links=links, negatives=ranked_among),
    )


def trainer(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **options)


def model(decoder="complex", backbone=None, **options):
    torch.manual_seed(0)
    if isinstance(decoder, str) and decoder not in ("dot", "mlp"):
        options = {"num_relations": RELATIONS, **options}
    backbone = NoLayers(WIDTH) if backbone is None else backbone
    return gs.LinkPredictor(backbone, decoder=decoder, hits=(1, 3, 10), **options)


def brute_force(score, chunks=("train", "val", "test"), split="test") -> np.ndarray:
    """Ranks of a split's triples, tails then heads, by the definition: known others left out, ties by their mean."""
    known = {tuple(triple) for name in chunks for triple in CHUNKS[name].T.tolist()}
    ranks = []
    for asks_head in (False, True):
        for h, r, t in CHUNKS[split].T.tolist():
            true, above, beside = score(h, r, t, asks_head), 0, 0
            for node in range(NODES):
                other = (node, r, t) if asks_head else (h, r, node)
                if other in known:
                    continue
                found = score(*other, asks_head)
                above, beside = above + (found > true), beside + (found == true)
            ranks.append(1 + above + beside / 2)
    return np.array(ranks)


def score_by(module, rows):
    @torch.no_grad()
    def score(h, r, t, asks_head):
        rows_of = torch.from_numpy(rows[[h, t]])
        return float(link_predictor.pair_scores(module.decoder, *rows_of, torch.tensor(r), asks_head))

    return score


@all_pairs
@pytest.mark.parametrize("decoder", ["distmult", "complex", "transe"])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_filtered_metrics_equal_brute_force(root, monkeypatch, decoder, inverse, small):
    if small:  # many chunks of queries, candidates and scores
        monkeypatch.setattr(link_predictor, "CHUNK_BYTES", 4 * WIDTH * 17)
        monkeypatch.setattr(link_predictor, "SCORE_BYTES", 4 * 17 * 5)
        monkeypatch.setattr(link_predictor, "_POSITIVE_ROWS", 3)
    module, dm = model(decoder, decoder_options={"inverse": inverse}), data(root)
    logged = trainer().test(module, dm, verbose=False)[0]
    ranks = brute_force(score_by(module, dataset().features))
    assert logged["test_mrr"] == pytest.approx((1 / ranks).mean(), abs=1e-5)
    for k in (1, 3, 10):
        assert logged[f"test_hits@{k}"] == pytest.approx((ranks <= k).mean(), abs=1e-6)
    unfiltered = brute_force(score_by(module, dataset().features), chunks=())
    assert abs((1 / ranks).mean() - (1 / unfiltered).mean()) > 5e-3  # the filter matters in this graph


def test_nodes_that_are_equal_share_their_ranks(root):
    module, dm = model("distmult"), data(root)
    module.decoder.relations.data.zero_()  # all scores are 0
    logged = trainer().test(module, dm, verbose=False)[0]
    ranks = brute_force(lambda *triple: 0.0)
    assert ranks.min() > 20
    assert logged["test_mrr"] == pytest.approx((1 / ranks).mean(), abs=1e-6)


@pytest.mark.parametrize("theirs", [kge.DistMult, kge.ComplEx])
def test_ranks_without_a_filter_equal_pygs(theirs):
    torch.manual_seed(3)
    pyg = theirs(NODES, RELATIONS, WIDTH // 2 if theirs is kge.ComplEx else WIDTH)
    module = model(theirs.__name__.lower())
    imaginary = [pyg.node_emb_im.weight, pyg.rel_emb_im.weight] if theirs is kge.ComplEx else [torch.empty(0)] * 2
    tables = ([pyg.node_emb.weight, imaginary[0]], [pyg.rel_emb.weight, imaginary[1]])
    rows, relations = (torch.cat([t for t in table if t.numel()], dim=1).detach() for table in tables)
    module.decoder.relations.data.copy_(relations)
    head, relation, tail = (np.ascontiguousarray(ends) for ends in CHUNKS["test"])
    output = type("Rows", (), {"read": staticmethod(lambda nodes: rows.numpy()[nodes])})
    places = np.arange(len(tail))
    queries = LinkQueries(head, tail, relation, False, NODES, np.arange(len(tail) + 1), tail, places)  # itself alone
    with torch.no_grad():
        ranks, _ = module._rank_among_all(output, queries)
    as_tensors = (torch.from_numpy(ends) for ends in (head, relation, tail))
    mean_rank, mrr, hits = pyg.test(*as_tensors, batch_size=16, k=10, log=False)
    assert float(ranks.mean()) - 1 == pytest.approx(mean_rank)  # theirs begin at 0
    assert float((1 / ranks).mean()) == pytest.approx(mrr, abs=1e-6)
    assert float((ranks <= 10).double().mean()) == pytest.approx(hits)


def test_parts_ranks_and_reverses_in_the_store_change_nothing(root, tmp_path):
    expected = trainer().test(model(), data(root), verbose=False)[0]
    for name, options in (("one", {"num_parts": 1}), ("both_ways", {"to_undirected": True})):
        logged = trainer().test(model(), data(store_of(tmp_path / name, **options)), verbose=False)[0]
        assert logged == pytest.approx(expected, abs=1e-5)
    dm, module = data(root), model()
    dm.setup("test")
    rows = dm.store.features.read(np.arange(NODES))
    output, found = type("Rows", (), {"read": staticmethod(lambda nodes: rows[nodes])}), []
    for rank in range(3):
        share = evaluation_links(dm.store, dm.links, "test", "auto", 0, rank, 3)
        with torch.no_grad():
            found += [module._rank_among_all(output, queries)[0] for queries in share.queries(9)]
    ranks = torch.cat(found)
    assert len(ranks) == 2 * CHUNKS["test"].shape[1]
    assert float((1 / ranks).mean()) == pytest.approx(expected["test_mrr"], abs=1e-6)


def test_embeddings_are_learned_and_ranked(root):
    """A decoder alone: rows of the entities are pulled and pushed, and known triples end up far above probability."""
    dm = data(root, share_negatives=True, num_negatives=40, negatives="uniform", links=None, edges_per_node=6)
    dm.links = {"val": dataset().links["val"]}
    torch.manual_seed(0)
    rows = gs.DistributedEmbedding(NODES, 32, optimizer=gs.SparseAdam(0.05))
    module = gs.LinkPredictor(
        NoLayers(32), lr=0.05, decoder="complex", num_relations=RELATIONS, inputs=rows, loss="softmax", penalty=1e-3
    )
    dm.stored_features = False
    losses = []
    module.on_train_epoch_end = lambda: losses.append(float(module.trainer.callback_metrics["train_loss"]))
    trainer(max_epochs=30, strategy="gnnscale").fit(module, dm)
    assert losses[-1] < 0.6 * losses[0]


def test_the_loss_is_that_of_each_direction(root, monkeypatch):
    monkeypatch.setattr(gs.LinkPredictor, "log", lambda *args, **options: None)
    for share in (False, True):
        dm = data(root, share_negatives=share)
        dm.setup("fit")
        batch = next(iter(dm.train_dataloader()))
        module = model("complex", loss="softmax", penalty=0.3, decoder_options={"inverse": True})
        x = batch.x.double()
        head, tail = x[batch.pairs[0]], x[batch.pairs[1]]
        module.double()
        total = 0.0
        for i in range(len(head)):
            for reverse in (False, True):
                answer = int(batch.pairs[1 - reverse][i])
                false = (batch.source_negatives if reverse else batch.negatives)[0 if share else i]
                nodes = torch.tensor([answer, *(node for node in false.tolist() if node != answer)])
                sides = (x[nodes], tail[i]) if reverse else (head[i], x[nodes])
                scores = module.decoder(*sides, batch.pair_type[i].expand(len(nodes)), reverse)
                total = total + torch.logsumexp(scores, dim=0) - scores[0]
        expected = total / (2 * len(head)) + 0.3 * module.decoder.penalty(head, tail, batch.pair_type)
        torch.testing.assert_close(module.training_step(batch), expected, rtol=1e-5, atol=1e-6)


def test_links_without_relations_among_all_nodes(tmp_path):
    """Every node that no edge and no held-out link joins to the first end is a false one."""
    edges = np.unique(TRIPLES[[0, 2]], axis=1)
    edges = edges[:, edges[0] != edges[1]]
    graph = GraphDataset("plain", open_edge_stream(edges, num_nodes=NODES, to_undirected=True), dataset().features)
    graph = gs.hold_out_edges(graph, val=0.1, test=0.1)
    parts = gs.partition(graph.stream, "random", num_parts=2)
    gs.write_partition_store(tmp_path / "s", graph.stream, parts, features=graph.features)
    sampler = gs.LinkSampler(positives="edge", neighborhoods=False)
    options = gs.EvaluationOptions(links=graph.links, negatives="all")
    dm = gs.PartitionDataModule(store=tmp_path / "s", sampler=sampler, evaluation=options)
    module = model("dot")
    logged = trainer().test(module, dm, verbose=False)[0]
    joined = {(u, v) for u, v in edges.T.tolist()} | {(v, u) for u, v in edges.T.tolist()}
    x, ranks = graph.features, []
    for u, v in graph.links["test"].edges.T.tolist():
        false = [n for n in range(NODES) if n != u and (u, n) not in joined]
        ranks.append(1 + sum(x[u] @ x[n] > x[u] @ x[v] for n in false))
    assert logged["test_mrr"] == pytest.approx(np.mean(1 / np.array(ranks)), abs=1e-4)


def test_given_negatives_are_ranked_by_relation(root):
    links = dataset().links["test"]
    given = np.random.default_rng(4).integers(0, NODES, (links.edges.shape[1], 6))
    dm, module = data(root), model()
    dm.links = {"test": links._replace(negatives=given)}
    logged = trainer().test(module, dm, verbose=False)[0]
    score, ranks = score_by(module, dataset().features), []
    for (h, t), r, false in zip(links.edges.T.tolist(), links.edge_type.tolist(), given.tolist(), strict=True):
        scores = np.array([score(h, r, node, False) for node in [t, *false]])
        ranks.append(1 + (scores[1:] > scores[0]).sum() + (scores[1:] == scores[0]).sum() / 2)
    assert logged["test_mrr"] == pytest.approx(np.mean(1 / np.array(ranks)), abs=1e-5)


def test_what_does_not_fit_is_told_in_one_line(root, tmp_path):
    links = dataset().links
    leaked = CHUNKS["train"][:, :3]
    both = LinkSet(leaked[[0, 2]], edge_type=leaked[1])

    def tested(module=None, **options):
        return lambda: trainer().test(module or model(), data(root, **options), verbose=False)

    plain = store_of_plain(tmp_path / "plain")
    cases = [
        (tested(links={"test": both}), "3 of 3 test links are edges of .*, where training sees them"),
        (tested(ranked_among=50), "evaluation.negatives=50: links with edge types are ranked among all nodes"),
        (tested(links={**links, "val": LinkSet(links["val"].edges)}), "edge types in all splits or in none"),
        (tested(links={"test": links["test"]._replace(edge_type=links["test"].edge_type + 3)}), r"must be in \[0, 4\)"),
        (tested(links={"test": links["test"]._replace(edge_type=[1])}), r"edge_type must be \(\d+,\) integers"),
        (lambda: trainer().test(model(), data(plain), verbose=False), "write it with edge_type="),
        (tested(model(), links={"test": both._replace(edge_type=None)}), "are edges of"),
    ]
    for run, message in cases:
        with pytest.raises(StrategyError, match=message) as error:
            run()
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=said("evaluation.negatives auto all >= 1 'some'")):
        gs.EvaluationOptions(negatives="some")
    dm = data(root, positives="neighbor")
    with pytest.raises(StrategyError, match=said('ComplEx sampler.positives="edge"')):
        trainer(max_epochs=1, limit_val_batches=0).fit(model(), dm)
    with pytest.warns(UserWarning, match=said("links DotDecoder")):
        trainer().test(model("dot"), data(root), verbose=False)


def store_of_plain(root):
    stream = open_edge_stream(CHUNKS["train"][[0, 2]], num_nodes=NODES)
    gs.write_partition_store(root, stream, gs.partition(stream, "random", num_parts=1), features=dataset().features)
    return root


def test_layers_over_a_graph_of_triples_are_ranked_too(root):
    """Embeddings of a model with layers, which come from its own inference."""
    torch.manual_seed(1)
    backbone = RGCN(WIDTH, 8, 10, num_layers=2, dropout=0.0, schema=dataset().schema)
    module = model("distmult", backbone)
    dm = data(root, sampler=gs.NeighborSampler([4, 4]), neighborhoods=True)
    logged = trainer().test(module, dm, verbose=False)[0]
    (result,) = trainer().predict(module, dm)
    rows = np.empty((NODES, 10), np.float32)
    rows[dm.store.original_nid[result["nodes"]]] = result["prediction"]
    ranks = brute_force(score_by(module, rows))
    assert logged["test_mrr"] == pytest.approx((1 / ranks).mean(), abs=2e-3)


@each_value
@pytest.mark.parametrize("neighborhoods", [False, True])
@pytest.mark.parametrize("share", [False, True])
def test_every_source_gives_the_same_triples(root, neighborhoods, share):
    found = {}
    for source in ("threads", "processes", "task_graphs"):
        dm = data(root, sampler=gs.NeighborSampler([3, 2]), neighborhoods=neighborhoods, share_negatives=share)
        dm = gs.PartitionDataModule(store=root, sampler=dm.sampler, batch_size=64, source=source)
        dm.setup("fit")
        found[source] = list(dm.train_dataloader())
        dm.teardown("fit")
    names = ("n_id", "edge_index", "edge_type", "pairs", "negatives", "pair_type", "source_negatives")
    for batches in zip(*found.values(), strict=True):
        for name in names:
            first, *others = (getattr(batch, name) for batch in batches)
            assert all(torch.equal(first, other) for other in others), name
    parts = sum(len(batch.pair_type) for batch in found["threads"])
    assert parts == NODES  # a triple a node, sampled in its part
