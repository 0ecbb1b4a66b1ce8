"""Neighbours sampled by the store's edge weights:

their probabilities, the weights that a batch has, and what is refused.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.partition_store.part_graph import load_part_graph
from lightning_gnnscale.planner import predict_training
from lightning_gnnscale.planner.host_memory import BatchShape, RunSize
from tests.says import said

NUM_NODES, NUM_EDGES = 120, 3000
pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often", "ignore:the store has")


def write_store(root, num_parts, weight=None):
    rng = np.random.default_rng(0)
    pairs = np.unique(rng.integers(0, NUM_NODES, (NUM_EDGES, 2)), axis=0).T
    given = rng.random(pairs.shape[1]).astype(np.float32) ** 3 if weight is None else weight(pairs)
    stream = gs.open_edge_stream(pairs, num_nodes=NUM_NODES)
    masks = {"train": np.ones(NUM_NODES, bool)}
    parts = gs.partition(stream, "random", num_parts)
    return gs.write_partition_store(root, stream, parts, features=np.eye(NUM_NODES, 3, dtype=np.float32), masks=masks,
                                    labels=np.zeros(NUM_NODES, int), edge_weight=given)  # fmt: skip


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weighted")
    return {parts: write_store(folder / str(parts), parts) for parts in (1, 3)}


def batches(store, sampler, epochs=1, **options):
    dm = gs.PartitionDataModule(store=store, sampler=sampler, batch_size=40, seed=5, **options)
    dm.setup("fit")
    loader, found = dm.train_dataloader(), []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        found += loader
    return found


def rows_of(store):
    """Return, by store id, its sources and their weights."""
    indptr, indices, weight = store.csc.indptr, np.asarray(store.csc.indices), np.asarray(store.edge_weight)
    return [(indices[a:b], weight[a:b]) for a, b in pairwise(indptr)]


def sampled_of(batch):
    """Return, by seed, the sources of its edges and their weights, in store ids."""
    source, target = batch.edge_index.numpy()
    for seed in range(batch.batch_size):
        chosen = target == seed
        yield int(batch.n_id[seed]), batch.n_id.numpy()[source[chosen]], batch.edge_weight.numpy()[chosen]


@pytest.mark.parametrize("scope", ["part", "graph"])
def test_rows_weigh_as_much_as_whole_ones(stores, scope):
    sampler, rows = gs.NeighborSampler([6], weighted=True), rows_of(stores[3])
    short = 0
    for batch in batches(stores[3], sampler, scope=scope):
        for node, sources, weights in sampled_of(batch):
            there, stored = rows[node]
            assert len(sources) == min(6, len(there)) and set(sources) <= set(there)
            assert weights.sum() == pytest.approx(stored.sum(), rel=1e-5)
            if len(there) > 6:
                assert np.allclose(weights, stored.sum() / 6, rtol=1e-5)
            else:
                short += 1
                np.testing.assert_allclose(weights[np.argsort(sources)], stored[np.argsort(there)], rtol=1e-6)
    assert short < NUM_NODES


def test_probabilities_are_in_proportion_to_weights(stores):
    """With replacement the share of a neighbour over many epochs is its share of the row; all sums are unbiased."""
    sampler, rows = gs.NeighborSampler([5], replace=True, weighted=True), rows_of(stores[1])
    seen, epochs = np.zeros((NUM_NODES, NUM_NODES)), 200
    for batch in batches(stores[1], sampler, epochs):
        for node, sources, _ in sampled_of(batch):
            np.add.at(seen[node], sources, 1)
    for node, (sources, weights) in enumerate(rows):
        expected = np.zeros(NUM_NODES)
        expected[sources] = weights / weights.sum()
        error = np.sqrt(expected * (1 - expected) * 5 * epochs)  # of the count; that of a light edge is no normal one
        assert (np.abs(seen[node] - expected * 5 * epochs) <= 4 * error + 4 * (expected > 0)).all()


def test_without_replacement_heavy_edges_are_there_more_often(stores):
    sampler, rows = gs.NeighborSampler([5], weighted=True), rows_of(stores[1])
    seen = np.zeros((NUM_NODES, NUM_NODES))
    for batch in batches(stores[1], sampler, 50):
        for node, sources, _ in sampled_of(batch):
            assert len(set(sources)) == len(sources)
            seen[node, sources] += 1
    heavy = light = 0.0
    for node, (sources, weights) in enumerate(rows):
        order = sources[np.argsort(weights)]
        light, heavy = light + seen[node, order[:5]].sum(), heavy + seen[node, order[-5:]].sum()
    assert heavy > 20 * light


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"disjoint": True}])
def test_a_weight_of_zero_is_never_sampled(tmp_path, options):
    store = write_store(tmp_path / "store", 2, lambda pairs: (pairs[0] * (pairs[1] > 9) % 3 > 0).astype(np.float32))
    rows, original = rows_of(store), np.asarray(store.original_nid)
    for fanout in (6, 1000):
        for batch in batches(store, gs.NeighborSampler([fanout], weighted=True, **options)):
            for node, sources, weights in sampled_of(batch):
                assert (original[sources] % 3 > 0).all() and (weights > 0).all()
                there = int((rows[node][1] > 0).sum())
                assert len(sources) == ((fanout if there else 0) if "replace" in options else min(fanout, there))
                assert original[node] > 9 or not len(sources)
                if fanout > there > 0 and not options:
                    np.testing.assert_array_equal(weights, 1)  # the stored ones


def test_a_fanout_of_all_takes_edges_of_weight_zero_too(tmp_path):
    store = write_store(tmp_path / "store", 1, lambda pairs: np.zeros(pairs.shape[1], np.float32))
    rows = rows_of(store)
    for batch in batches(store, gs.NeighborSampler([-1], weighted=True)):
        for node, sources, _ in sampled_of(batch):
            assert len(sources) == len(rows[node][0])


@pytest.mark.parametrize("source", [gs.Threads(2), gs.Processes(2), gs.TaskGraphs(2)])
def test_sources_and_parts_give_the_same_batches(stores, source):
    sampler = gs.NeighborSampler([6, 3], weighted=True)
    plain, other = batches(stores[3], sampler), batches(stores[3], sampler, source=source)
    for one, two in zip(plain, other, strict=True):
        assert torch.equal(one.n_id, two.n_id) and torch.equal(one.edge_weight, two.edge_weight)
    whole, part = batches(stores[1], sampler, scope="graph"), batches(stores[1], sampler, scope="part")
    for one, two in zip(whole, part, strict=True):
        assert torch.equal(one.n_id, two.n_id) and torch.equal(one.edge_weight, two.edge_weight)


def test_relations_are_sampled_by_their_own_weights(tmp_path):
    rng, count = np.random.default_rng(1), {"a": 40, "b": 30}
    edges = {}
    for source, name, target in (("a", "to", "b"), ("a", "in", "a")):
        pairs = np.unique(
            np.stack([rng.integers(0, count[source], 500), rng.integers(0, count[target], 500)]).T, axis=0
        )
        edges[source, name, target] = {"edges": pairs.T, "weight": rng.random(len(pairs)).astype(np.float32)}
    nodes = {
        node_type: {"num_nodes": num, "features": np.ones((num, 2), np.float32)} for node_type, num in count.items()
    }
    nodes["b"] |= {"labels": np.zeros(30, int), "masks": {"train": np.ones(30, bool)}}
    data = gs.hetero_graph(nodes, edges, to_undirected=False)
    parts = gs.partition(data.stream, "random", 2)
    store = gs.write_partition_store(tmp_path / "store", data.stream, parts, data)
    rows = rows_of(store)
    for scope in ("part", "graph"):
        for batch in batches(store, gs.NeighborSampler({"*": [4]}, weighted=True), scope=scope):
            for node, sources, weights in sampled_of(batch):
                there, stored = rows[node]
                assert len(sources) == min(4, len(there))
                assert weights.sum() == pytest.approx(stored.sum(), rel=1e-5)


def test_what_cannot_be_sampled_is_refused(stores, tmp_path):
    with pytest.raises(ValueError, match=said('weighted False temporal_strategy="last"')):
        gs.NeighborSampler([5], weighted=True, temporal_strategy="last")
    with pytest.raises(ValueError, match=said('direction "in"')):
        gs.NeighborSampler([5], weighted=True, direction="both")
    stream = gs.open_edge_stream(np.array([[0, 1], [1, 0]]), num_nodes=2)
    given = {"features": np.ones((2, 1), np.float32), "labels": np.zeros(2, int), "masks": {"train": np.ones(2, bool)}}
    plain = gs.write_partition_store(tmp_path / "plain", stream, gs.partition(stream, "random", 1), **given)
    with pytest.raises(ValueError, match=said("store edge_weight=")):
        batches(plain, gs.NeighborSampler([5], weighted=True))
    below = write_store(tmp_path / "below", 1, lambda pairs: np.where(pairs[0] == 3, -1, 1).astype(np.float32))
    with pytest.raises(gs.GNNScaleError, match=said("weights >= 0")):
        batches(below, gs.NeighborSampler([5], weighted=True))


def test_the_plan_counts_the_weights_of_the_edges_that_are_grouped(stores):
    """As many bytes as the sampler holds of a part that is ready."""
    store = stores[3]
    shapes = {
        name: gs.PartitionDataModule(store=store, sampler=sampler, batch_size=32)._batch_shape()
        for name, sampler in {
            "plain": gs.NeighborSampler([4], disjoint=True),
            "weighted": gs.NeighborSampler([4], weighted=True),
            "links": gs.LinkSampler(gs.NeighborSampler([4], weighted=True)),
        }.items()
    }
    assert [shape.get("grouped_weights", False) for shape in shapes.values()] == [False, True, True]
    sizes = (RunSize(store.num_nodes, store.num_edges, num_parts=3), BatchShape())
    weighted, plain = (predict_training(*sizes, grouped_edge_types=1, grouped_weights=has) for has in (True, False))
    counted = weighted - plain
    graph = load_part_graph(store, 1, 0)
    (relation,) = gs.NeighborSampler([4], weighted=True).prepare(graph, np.arange(graph.num_core), 0).relations
    assert counted == 2 * -(-store.num_edges // 3) * relation.weight.nbytes // graph.csc.num_edges  # two parts are held
