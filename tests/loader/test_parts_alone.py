"""Ranks that train on their own parts alone, `repartition_every=`; the oracles read rows of the full graph."""

from itertools import combinations, permutations, product

import lightning as L
import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.train_loader import make_alone_loader
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.graph import batches_of
from lightning_gnnscale.loader import LoaderOptions, PartLoader, PartShares, RankPlace, Threads, part_walk
from tests.says import said

NODES, PARTS = 120, 6
pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often")


def write(root, **columns):
    rng = np.random.default_rng(4)
    stream = gs.open_edge_stream(rng.integers(0, NODES, (2, 900)), num_nodes=NODES)
    p = gs.partition(stream, "random", PARTS, evaluate=False)
    columns |= {"features": rng.random((NODES, 5)).astype(np.float32), "labels": rng.integers(0, 3, NODES)}
    train = rng.random(NODES) < 0.7
    return gs.write_partition_store(root, stream, p, masks={"train": train, "val": ~train, "test": ~train}, **columns)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write(tmp_path_factory.mktemp("alone") / "store")


@pytest.fixture(scope="module")
def weighted(tmp_path_factory):
    weights = np.random.default_rng(5).random(900).astype(np.float32) + 0.5
    return write(tmp_path_factory.mktemp("alone") / "weighted", edge_weight=weights)


def part_of(store) -> np.ndarray:
    return np.repeat(np.arange(store.num_parts), np.diff(store.part_offsets))


def loader(store, place, fanouts=(3, 2), every=2, size=10) -> PartLoader:
    sampler, options = gs.NeighborSampler(list(fanouts)), LoaderOptions(size)
    return make_alone_loader(store, sampler, every, options, store.features, Threads(), place)


def test_a_rank_reads_its_own_parts_alone_and_each_target_once(store):
    parts, targets = part_of(store), np.flatnonzero(store.masks["train"])
    loaders = [loader(store, RankPlace(rank, 2)) for rank in range(2)]
    assert len({len(one) for one in loaders}) == 1
    held = []
    for epoch in range(4):
        seeds, of_rank = [], []
        for one in loaders:
            one.set_epoch(epoch)
            nodes = set()
            for batch in one:
                nodes |= set(batch.n_id.tolist())
                seeds += batch.n_id[: batch.batch_size].tolist()
                assert np.array_equal(batch.x.numpy(), store.features.read(batch.n_id.numpy()))
                assert np.array_equal(batch.degree.numpy(), np.diff(store.csc.indptr)[batch.n_id.numpy()])
            of_rank.append(frozenset(parts[list(nodes)].tolist()))
        assert sorted(seeds) == targets.tolist()
        assert not of_rank[0] & of_rank[1]
        held.append(of_rank)
    assert held[0] == held[1] and held[2] == held[3] and held[0] != held[2]
    for one in loaders:
        one.close()


def test_processes_that_compute_several_ranks_make_the_same_batches(store):
    each = [list(loader(store, RankPlace(rank, 2))) for rank in range(2)]
    for step, *ranks in zip(loader(store, RankPlace(0, 1, logical_ranks=2)), *each, strict=True):
        for batch, other in zip(batches_of(step), ranks, strict=True):
            assert batch.key == other.key and np.array_equal(batch.n_id, other.n_id)
            assert np.array_equal(batch.edge_weight, other.edge_weight)


def test_sums_over_stored_weights_are_unbiased_over_all_deals(weighted, monkeypatch):
    """Of fan-outs that take all: the mean over all deals is the sum over all neighbours."""
    mine = list(combinations(range(PARTS), PARTS // 2))
    deals = [[one, tuple(sorted(set(range(PARTS)) - set(one)))] for one in mine]
    monkeypatch.setattr(part_walk, "_dealt", lambda shares, deal: deals[deal])
    found = np.zeros((NODES, 5))
    loaders = [loader(weighted, RankPlace(rank, 2), (-1,), every=1) for rank in range(2)]
    for epoch, one in product(range(len(deals)), loaders):
        one.set_epoch(epoch)
        for batch in one:
            src, dst = batch.edge_index.numpy()
            messages = batch.edge_weight.numpy()[:, None] * batch.x.numpy()[src]
            np.add.at(found, batch.n_id.numpy()[dst], messages)
    csc, weight, rows = weighted.csc, weighted.edge_column("edge_weight"), weighted.features.read(np.arange(NODES))
    for node in np.flatnonzero(weighted.masks["train"]):
        edges = slice(*csc.indptr[node : node + 2])
        whole = (weight[edges, None] * rows[csc.indices[edges]]).sum(0)
        assert np.allclose(found[node] / len(deals), whole, atol=1e-4)


def test_means_weigh_the_parts_of_others_by_how_seldom_they_are_there(store):
    parts = part_of(store)
    for batch in loader(store, RankPlace(0, 2), (4, 2)):
        (src, dst), weight, own = batch.edge_index.numpy(), batch.edge_weight.numpy(), parts[batch.n_id.numpy()]
        assert batch.averaging_weights
        sums = np.bincount(dst, weight)
        assert np.allclose(sums[np.unique(dst)], 1)
        share = np.where(own[src] == own[dst], 1, 5 / 2)  # two of five others are there
        assert np.allclose(weight, share / np.bincount(dst, share)[dst])


def test_the_chance_that_parts_are_together_is_that_of_all_deals():
    shares, together, deals = PartShares((0, 1, 2), (3, 4), 2, 1, 1, 0), np.zeros((5, 5)), 0
    for trained, idle in product(permutations(range(3)), permutations((3, 4))):
        order, deals = np.array([*trained, *idle]), deals + 1
        for rank in range(2):
            held = order[rank::2]
            together[np.ix_(held, held)] += 1
    sort, found = np.array([0, 0, 0, 1, 1]), shares.together()
    for one, other in permutations(range(5), 2):
        assert together[one, other] / deals == pytest.approx(found[sort[one], sort[other]])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"repartition_every": 0}, "repartition_every 0"),
        ({"repartition_every": 1, "scope": "graph"}, "repartition_every=1 scope graph"),
        ({"repartition_every": 1, "sampler": gs.SaintSampler("walk", 20)}, "repartition_every NeighborSampler"),
        ({"repartition_every": 1, "rows": "tiered"}, "repartition_every rows=auto"),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_one_line(store, given, words):
    with pytest.raises(ValueError, match=said(words)):
        gs.PartitionDataModule(store, **given)


@pytest.mark.parametrize(
    ("weights", "ranks", "words"),
    [
        (gs.ModelAveraging(), None, "GradientAveraging"),
        (gs.GradientAveraging(), 4, "repartition_every=1 4 ranks 6 parts num_parts=16"),
    ],
)
def test_a_run_that_cannot_be_dealt_is_refused_in_one_line(store, weights, ranks, words):
    strategy = gs.GNNScaleStrategy(weights=weights, **({} if ranks is None else {"logical_ranks": ranks}))
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=strategy, **quiet)
    model = gs.NodeClassifier(gs.model.GraphSAGE(5, 8, 3, 2))
    with pytest.raises(StrategyError, match=said(words)):
        trainer.fit(model, gs.PartitionDataModule(store, repartition_every=1))
