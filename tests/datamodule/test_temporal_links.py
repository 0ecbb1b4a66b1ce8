"""Links with times over a store: no neighbourhood reaches an edge of the link's time or later, in training or after."""

import lightning as L
import numpy as np
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.sampler import LinkSampler
from tests.says import said
from tests.tiers import all_pairs

NUM_NODES, NUM_EVENTS = 150, 2000
pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often", "ignore:.*does not have many workers")


def events() -> GraphDataset:
    rng = np.random.default_rng(0)
    stream = gs.open_edge_stream(rng.integers(0, NUM_NODES, (2, NUM_EVENTS)), num_nodes=NUM_NODES, to_undirected=True)
    features = rng.random((NUM_NODES, 6)).astype(np.float32)
    return GraphDataset("events", stream, features, edge_time=rng.integers(0, 500, NUM_EVENTS))


def shop() -> gs.GraphDataset:
    rng = np.random.default_rng(1)
    bought = np.stack([rng.integers(0, 60, 900), rng.integers(0, 40, 900)])
    near = rng.integers(0, 40, (2, 100))  # without times: always there
    times = rng.integers(0, 300, 900)
    return gs.hetero_graph(
        {"user": {"features": rng.random((60, 3), np.float32)}, "item": {"features": rng.random((40, 5), np.float32)}},
        {("user", "buys", "item"): {"edges": bought, "time": times}, ("item", "near", "item"): near},
    )


def stored(root, dataset, parts=3):
    partitioning = gs.partition(dataset.stream, "random", parts, evaluate=False)
    times = {"edge_time": dataset.edge_time}
    return gs.write_partition_store(root, dataset.stream, partitioning, features=dataset.features, **times)


@pytest.fixture(scope="module")
def held():
    return gs.hold_out_edges(events(), val=0.1, test=0.2, by_time=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory, held):
    return stored(tmp_path_factory.mktemp("temporal") / "store", held)


@pytest.fixture(scope="module")
def typed_store(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("temporal") / "typed", shop())


def sampler(strategy="uniform", **options):
    inner = gs.NeighborSampler([4, 3], temporal_strategy=strategy, strictly_before=True)
    return LinkSampler(inner, "edge", **{"edges_per_node": 3, "num_negatives": 2} | options)


def data(store, sampled_by=None, links=None, negatives=20, mode="layerwise", **options):
    evaluation = gs.EvaluationOptions(mode, links=links, negatives=negatives)
    return gs.PartitionDataModule(
        store=store, sampler=sampled_by or sampler(), batch_size=40, evaluation=evaluation, **options
    )


def batches_of(dm, split="train"):
    dm.setup("fit")
    return list(getattr(dm, f"{split}_dataloader")())


def future_edges(batch) -> int:
    """Edges of a batch that are not before the seed for which they were sampled."""
    return int((batch.edge_time >= batch.seed_time[batch.seed_of[batch.edge_index[1]]]).sum())


def edges_of(store) -> set:
    target = np.repeat(np.arange(store.num_nodes), np.diff(store.csc.indptr))
    return set(zip(np.asarray(store.csc.indices).tolist(), target.tolist(), store.edge_time.tolist(), strict=True))


@all_pairs
@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("scope", ["part", "graph"])
@pytest.mark.parametrize("name", ["store", "typed_store"])
def test_neighbours_of_links_are_before_them(request, name, scope, strategy):
    store, num_edges, sampled = request.getfixturevalue(name), 0, set()
    edges = edges_of(store)
    for batch in batches_of(data(store, sampler(strategy, corrupt="both"), scope=scope)):
        assert future_edges(batch) == 0
        num_edges += batch.num_edges
        first, other = (0, 1) if name == "typed_store" else (1, 0)  # untyped: the target of the edge comes first
        nodes, time = batch.n_id[batch.pairs], batch.seed_time[batch.pairs[0]]
        ends = zip(nodes[first].tolist(), nodes[other].tolist(), time.tolist(), strict=True)
        sampled |= set(ends)
        assert torch.equal(time, batch.seed_time[batch.pairs[1]])
        assert torch.equal(time[:, None].expand(-1, 2), batch.seed_time[batch.negatives])
        assert torch.equal(time[:, None].expand(-1, 2), batch.seed_time[batch.source_negatives])
        if name == "typed_store":
            node_types = batch.node_type
            assert set(batch.pair_type.tolist()) == {0}  # what is always there is no link
            assert (
                set(node_types[batch.negatives].flatten().tolist()) == {1} == set(node_types[batch.pairs[1]].tolist())
            )
            assert (
                set(node_types[batch.source_negatives].flatten().tolist())
                == {0}
                == set(node_types[batch.pairs[0]].tolist())
            )
    assert num_edges > 1000 and len(sampled) > 200 and sampled <= edges


def test_a_leak_would_be_seen(store, monkeypatch):
    monkeypatch.setattr(LinkSampler, "_check_times", lambda self: None)
    with_own = LinkSampler(gs.NeighborSampler([-1], temporal_strategy="uniform"), "edge", num_negatives=1)
    batches = batches_of(data(store, with_own, scope="graph"))
    assert sum(map(future_edges, batches)) >= sum(batch.pairs.shape[1] for batch in batches)  # each link sees itself
    sample = gs.NeighborSampler.sample

    def of_any_time(self, *args, times=None, **options):
        found = sample(self, *args, times=np.full_like(times, np.iinfo(np.int64).max), **options)
        return found._replace(seed_time=times)

    monkeypatch.setattr(gs.NeighborSampler, "sample", of_any_time)
    assert sum(map(future_edges, batches_of(data(store, scope="graph")))) > 1000


def test_every_source_gives_the_same_batches(typed_store):
    expected = batches_of(data(typed_store))
    for source in (gs.TaskGraphs(), gs.Processes(num_workers=2)):
        for one, other in zip(batches_of(data(typed_store, source=source)), expected, strict=True):
            for field in ("n_id", "edge_index", "pairs", "negatives", "pair_type", "seed_time", "seed_of", "edge_time"):
                assert torch.equal(getattr(one, field), getattr(other, field)), field


def test_the_latest_edges_are_held_out(held):
    given = events()
    edges, time = next(iter(given.stream.chunks()))[:2], given.edge_time
    val, test = held.links["val"], held.links["test"]
    assert held.edge_time.max() < val.time.min() <= val.time.max() < test.time.min()
    assert len(held.edge_time) + len(val.time) + len(test.time) == NUM_EVENTS == len(time)
    assert abs(len(test.time) - 0.2 * NUM_EVENTS) < 20 and abs(len(val.time) - 0.1 * NUM_EVENTS) < 20  # 4 a time
    assert (np.diff(test.time) >= 0).all()
    found = np.concatenate([val.edges, test.edges], axis=1), np.concatenate([val.time, test.time])
    late = time >= val.time.min()
    rows = [sorted(zip(*(one.tolist() for one in (*ends, when)), strict=True)) for ends, when in
            (found, (np.stack(edges)[:, late], time[late]))]  # fmt: skip
    assert rows[0] == rows[1]
    kept = next(iter(held.stream.chunks()))
    assert np.array_equal(np.stack([kept.src, kept.dst]), np.stack(edges)[:, ~late])


def test_relations_without_a_time_stay_whole():
    held = gs.hold_out_edges(shop(), val=0.1, test=0.1, by_time=True)
    assert set(held.links["test"].edge_type.tolist()) == {0}
    assert held.stream.count()[1] == 1000 - sum(len(links.time) for links in held.links.values())
    assert (held.links["test"].edges[0] < 60).all() and (held.links["test"].edges[1] >= 60).all()
    assert held.stream.edge_type_of(np.arange(held.stream.num_edges)).tolist().count(1) == 100


def trained(dm):
    torch.manual_seed(0)
    backbone = gs.model.GraphSAGE(6, 16, 8, num_layers=2, dropout=0.0)
    module = gs.LinkPredictor(backbone, lr=0.01, hits=[1, 10])
    run = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                    enable_model_summary=False, max_epochs=1)  # fmt: skip
    run.fit(module, dm)
    return run.test(module, dm, verbose=False)[0]


def test_sampled_evaluation_equals_layers_where_all_edges_are_before_the_links(store, held):
    """With all neighbours, and no edge left after the links, both see the same graph; float32 sums in other orders."""
    exact = trained(data(store, links=held.links))
    sampled = trained(data(store, links=held.links, mode="sampled"))
    assert exact["test_mrr"] == pytest.approx(sampled["test_mrr"], abs=2e-3)
    assert exact["test_loss"] == pytest.approx(sampled["test_loss"], rel=1e-4)


@pytest.mark.parametrize("split", ["val", "test"])
def test_links_among_the_edges_are_evaluated_before_their_own_time(store, split):
    rng = np.random.default_rng(3)
    time = rng.integers(100, 300, 50)
    links = {name: gs.LinkSet(rng.integers(0, NUM_NODES, (2, 50)), time=time) for name in ("val", "test")}
    dm = data(store, links=links, mode="sampled", negatives="auto")
    batches = batches_of(dm, split)
    assert sum(batch.pairs.shape[1] for batch in batches) == 50 and batches[0].negatives.shape[1] == 100
    assert sum(map(future_edges, batches)) == 0 < sum(batch.num_edges for batch in batches)
    when = np.concatenate([batch.seed_time[batch.pairs[1]].numpy() for batch in batches])
    assert np.array_equal(when, time)
    with pytest.raises(StrategyError, match=said("computes node edges time edges")):
        batches_of(data(store, links=links), split)


def test_what_does_not_fit_is_told_in_one_line(store, held, tmp_path):
    plain = gs.NeighborSampler([2], temporal_strategy="last", strictly_before=True)
    for options, message in (
        ({"positives": "neighbor"}, 'positives must be "edge" with temporal_strategy'),
        ({"positives": "edge", "share_negatives": True}, "share_negatives=True does not go with temporal_strategy"),
        ({"positives": "edge", "negatives": "all"}, 'negatives="all" does not go with temporal_strategy'),
        ({"positives": "edge", "exclude_pairs": True}, "exclude_pairs must be False with temporal_strategy"),
    ):
        with pytest.raises(ValueError, match=message):
            LinkSampler(plain, **options)
    with pytest.raises(ValueError, match=said("strictly_before True")):
        LinkSampler(gs.NeighborSampler([2], temporal_strategy="last"), "edge")
    with pytest.raises(ValueError, match=said("exclude_pairs False disjoint=True")):
        LinkSampler(gs.NeighborSampler([2], disjoint=True), exclude_pairs=True)
    untimed = {name: links._replace(time=None) for name, links in held.links.items()}
    with pytest.raises(StrategyError, match=said("links['val'] time missing")):
        batches_of(data(store, links=untimed), "val")
    with pytest.raises(StrategyError, match=said("evaluation.negatives=all ranks links")):
        batches_of(data(store, links=held.links, mode="sampled", negatives="all"), "val")
    without = events()
    without.edge_time = None
    with pytest.raises(ValueError, match=said("by_time=True edge_time")):
        gs.hold_out_edges(without, by_time=True)
    with pytest.raises(ValueError, match=said("time link edge_time")):
        batches_of(data(stored(tmp_path / "plain", without)))
