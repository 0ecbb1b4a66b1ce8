"""The loader: Invariant 3, order, padding, resume, threads, errors, and what a batch holds."""

import gc
import threading
import time
from dataclasses import fields

import numpy as np
import pytest
import torch
from oracles.parts import part_loader, small_world

from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.loader import PartLoader, RowReads, batch_columns, longest_rank, parts_of_rank, split_targets
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.partition_store.features import Column, CSRFeatures, DenseFeatures
from lightning_gnnscale.rng import batch_key
from lightning_gnnscale.sampler import ClusterSampler, FullBatchSampler, NeighborSampler, SaintSampler
from tests.says import said

WORLD = small_world(num_parts=5)
SAMPLERS = {
    "neighbor": NeighborSampler([4, 3]),
    "replace": NeighborSampler([4, 3], replace=True),
    "full": FullBatchSampler(),
    "cluster": ClusterSampler(4, 2),
    "saint": SaintSampler("walk", num_roots=9, batches_per_pass=3, num_norm_samples=2),
}


def make_loader(world=WORLD, parts=range(5), sampler=SAMPLERS["neighbor"], **options) -> PartLoader:
    settings = {"labels": world.labels, "masks": world.masks, "batch_size": 16, "seed": 1} | options
    load_part = settings.pop("load_part", world.load_part)
    features = settings.pop("features", world.features)
    return part_loader(parts, load_part, features, {part: world.targets(part) for part in parts}, sampler, **settings)


def contents(batch) -> dict:
    """Everything in a batch, comparable bit for bit."""
    if batch is None:
        return {}
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {k: v.numpy().tobytes() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def all_contents(batches) -> list[dict]:
    return [contents(batch) for batch in batches]


def loader_threads() -> list[str]:
    names = ("gnnscale-batch", "gnnscale-ahead")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert loader_threads() == []


@pytest.mark.parametrize("name", SAMPLERS)
def test_threads_and_prefetch_change_nothing(name):
    expected = all_contents(make_loader(sampler=SAMPLERS[name], num_threads=0))
    assert len(expected) > 4
    for threads, prefetch in ((1, 1), (2, None), (3, 9)):
        loader = make_loader(sampler=SAMPLERS[name], num_threads=threads, prefetch_batches=prefetch)
        assert all_contents(loader) == expected
        assert len(loader) == len(expected)


@pytest.mark.parametrize("ahead", [1, 3])
def test_steps_are_told_of_before_they_are_yielded(ahead):
    """In order, each once, so many ahead; the batches are the same, and those count as delivered that are yielded."""
    expected = all_contents(make_loader(num_threads=0))
    loader, told, found = make_loader(num_threads=1), [], []
    loader.announce_steps(ahead, lambda step: told.append(step.key))
    for number, batch in enumerate(loader, 1):
        found.append(contents(batch))
        assert len(told) == min(number + ahead, len(expected))
        assert loader.state_dict()["delivered"] == number
    assert found == expected and told == [batch["key"] for batch in expected]
    assert loader.waiting_share <= 1.0


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_ranks_change_nothing(world_size):
    """A batch is found on another rank, at another position, with the same bits."""
    by_key = {batch.key: contents(batch) for batch in make_loader(num_threads=0)}
    found = {}
    for rank in range(world_size):
        for batch in make_loader(parts=parts_of_rank(5, rank, world_size)):
            found[batch.key] = contents(batch)
    assert found == by_key


def test_keys_and_seeds_are_those_of_the_epoch():
    loader = make_loader(passes=2)
    loader.set_epoch(3)
    seen = {}
    for batch in loader:
        seen.setdefault(batch.part, []).append(batch)
    assert list(seen) == [0, 1, 2, 3, 4]
    for part, batches in seen.items():
        half = len(batches) // 2
        keys = [batch_key(1, 6 + number, part, i) for number in range(2) for i in range(half)]
        assert [batch.key for batch in batches] == keys
        orders = []
        for one_pass in (batches[:half], batches[half:]):
            seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in one_pass])
            assert sorted(seeds.tolist()) == WORLD.targets(part).tolist()
            orders.append(seeds.tolist())
        assert orders[0] != orders[1] or len(orders[0]) < 4


def test_every_epoch_has_an_order_of_its_own_and_can_be_had_again():
    loader = make_loader()
    first, again = all_contents(loader), all_contents(loader)
    loader.set_epoch(1)
    second = all_contents(loader)
    loader.set_epoch(0)
    assert first == again == all_contents(loader)
    assert all(a["n_id"] != b["n_id"] for a, b in zip(first, second, strict=True))


def test_what_a_batch_holds():
    for batch in make_loader():
        n_id = batch.n_id.numpy()
        np.testing.assert_array_equal(batch.x.numpy(), WORLD.features.array[n_id])
        np.testing.assert_array_equal(batch.y.numpy(), WORLD.labels[n_id])
        for name in ("train", "val", "test"):
            np.testing.assert_array_equal(getattr(batch, f"{name}_mask").numpy(), WORLD.masks[name][n_id])
        np.testing.assert_array_equal(batch.degree.numpy(), WORLD.csc.in_degree[n_id])
        assert batch.train_mask[: batch.batch_size].all()
        start, end = WORLD.part_offsets[batch.part : batch.part + 2]
        assert ((start <= n_id[: batch.batch_size]) & (n_id[: batch.batch_size] < end)).all()
        source, target = n_id[batch.edge_index.numpy()]
        for u, v in zip(source, target, strict=True):
            assert u in WORLD.csc.indices[WORLD.csc.indptr[v] : WORLD.csc.indptr[v + 1]]
            assert start <= u < end or start <= v < end


def test_without_masks_labels_or_features_there_are_none():
    (batch, *_) = make_loader(labels=None, masks={}, features=None)
    assert batch.y is None and batch.x is None and batch.train_mask is None


def test_several_labels_a_node():
    labels = np.random.default_rng(0).integers(0, 2, (300, 6)).astype(np.float32)
    for batch in make_loader(labels=labels):
        np.testing.assert_array_equal(batch.y.numpy(), labels[batch.n_id.numpy()])


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_columns_are_read_by_name_and_keep_their_dtype(whole, pooled, monkeypatch):
    """Every layer passes a mapping on: a column's name is the batch's, its rows are numpy's, and bits are kept."""
    if pooled:
        monkeypatch.setattr(batch_columns, "_SMALL_BYTES", -1)
    rng, num_edges, nodes = np.random.default_rng(0), WORLD.csc.num_edges, len(WORLD.labels)
    columns = {
        "y": rng.random((nodes, 3)).astype(np.float16),
        "node_type": rng.integers(0, 9, nodes).astype(np.uint8),
        "image": DenseFeatures(rng.integers(0, 255, (nodes, 4)).astype(np.uint8)),
    }
    edges = {"edge_attr": rng.random((num_edges, 2)), "edge_time": rng.integers(0, 9, num_edges).astype(np.int16)}
    load_part = (lambda part: WholeGraph.of(WORLD.csc, part)) if whole else WORLD.load_part
    for batch in make_loader(nodes=columns, edges=edges, load_part=load_part, return_e_id=True):
        n_id, e_id = batch.n_id.numpy(), batch.e_id.numpy()
        for name in ("y", "node_type"):
            found = getattr(batch, name).numpy()
            assert found.dtype == columns[name].dtype and np.array_equal(found, columns[name][n_id]), name
        for name, values in edges.items():
            found = getattr(batch, name).numpy()
            assert found.dtype == values.dtype and np.array_equal(found, values[e_id]), name
        np.testing.assert_array_equal(batch.columns["image"].numpy(), columns["image"].array[n_id])
        np.testing.assert_array_equal(batch.val_mask.numpy(), WORLD.masks["val"][n_id])


def test_sparse_features_stay_sparse_until_asked_for():
    rng = np.random.default_rng(0)
    dense = (rng.random((300, 20)) < 0.2).astype(np.float32)
    rows, columns = np.nonzero(dense)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=300))])
    features = CSRFeatures(indptr, columns.astype(np.int32), np.ones(len(rows), np.float32), 20)
    for batch in make_loader(features=features):
        assert batch.x_dense is None
        np.testing.assert_array_equal(batch.x.numpy(), dense[batch.n_id.numpy()])


def test_stored_weights_are_divided_by_the_probability_of_the_sample():
    weights = np.random.default_rng(0).random(WORLD.csc.num_edges)
    for batch in make_loader(edges={"edge_weight": weights}, return_e_id=True):
        source, target = batch.n_id.numpy()[batch.edge_index.numpy()]
        np.testing.assert_array_equal(WORLD.csc.indices[batch.e_id.numpy()], source)
        first = batch.indptr[: batch.batch_size + 1].numpy()
        taken = np.diff(first)
        degree = WORLD.csc.in_degree[batch.n_id[: batch.batch_size].numpy()]  # core rows are whole
        scale = np.repeat(degree / np.maximum(taken, 1), taken)
        expected = weights[batch.e_id[: first[-1]].numpy()] * scale
        np.testing.assert_allclose(batch.edge_weight[: first[-1]].numpy(), expected, rtol=1e-6)
        assert len(target) == len(batch.edge_weight)


def test_edge_positions_of_a_store_without_them_are_refused():
    from dataclasses import replace

    loader = make_loader(load_part=lambda part: replace(WORLD.load_part(part), edge_id=None), return_e_id=True)
    with pytest.raises(GNNScaleError, match=said("part 0 batch 0 epoch 1: ValueError: part 0 edge positions")):
        next(iter(loader))


def test_ranks_are_padded_to_the_longest():
    counts = [len(make_loader(parts=[part])) for part in range(5)]
    pad_to = longest_rank(counts, 2)
    for rank in range(2):
        loader = make_loader(parts=parts_of_rank(5, rank, 2), pad_to=pad_to)
        batches = list(loader)
        own = sum(counts[rank::2])
        assert len(batches) == len(loader) == pad_to
        assert [batch is None for batch in batches] == [False] * own + [True] * (pad_to - own)
        assert loader.state_dict()["delivered"] == pad_to
    assert list(make_loader(parts=[], pad_to=3)) == [None, None, None]
    with pytest.raises(ValueError, match=said(f"pad_to >= {counts[0]} 0")):
        make_loader(parts=[0], pad_to=0)


def test_parts_without_targets_are_passed_over():
    world = small_world(num_parts=3)
    start, end = world.part_offsets[1:3]
    world.masks["train"][start:end] = False
    loaded = []

    def load_part(part):
        loaded.append(part)
        return world.load_part(part)

    assert {batch.part for batch in make_loader(world, range(3), load_part=load_part)} == {0, 2}
    assert loaded == [0, 2]


def test_a_whole_part_is_one_batch():
    batches = list(make_loader(sampler=SAMPLERS["full"]))
    assert [batch.part for batch in batches] == [0, 1, 2, 3, 4]
    for batch in batches:
        part = WORLD.load_part(batch.part)
        np.testing.assert_array_equal(batch.n_id.numpy(), part.nodes)
        assert batch.batch_size == part.num_core
        assert batch.num_targets == batch.num_nodes
        assert batch.num_sampled_nodes is None


def test_scope_graph_gives_every_rank_equal_work_across_parts():
    train = np.flatnonzero(WORLD.masks["train"])
    shares = split_targets(train, 2)
    lengths = []
    for rank in range(2):
        loader = part_loader(
            [rank],
            lambda part: WholeGraph.of(WORLD.csc, part),
            WORLD.features,
            {rank: shares[rank]},
            NeighborSampler([-1]),
            labels=WORLD.labels,
            masks=WORLD.masks,
            batch_size=16,
        )
        lengths.append(len(loader))
        for batch in loader:
            n_id = batch.n_id.numpy()
            assert batch.part == rank
            np.testing.assert_array_equal(batch.x.numpy(), WORLD.features.array[n_id])
            np.testing.assert_array_equal(np.diff(batch.indptr), WORLD.csc.in_degree[n_id[: batch.batch_size]])
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("stop", [0, 1, 5, 9])
@pytest.mark.parametrize("threads", [0, 2])
def test_resume_goes_on_with_the_next_batch(stop, threads):
    everything = all_contents(make_loader(passes=2, num_threads=0))
    loader = make_loader(passes=2, num_threads=threads, prefetch_batches=4)
    iterator = iter(loader)
    head = [contents(next(iterator)) for _ in range(stop)]
    state = loader.state_dict()
    iterator.close()
    assert state["delivered"] == stop  # more is prepared already
    other = make_loader(passes=2, num_threads=1)
    other.load_state_dict(state)
    rest = iter(other)  # Lightning makes the iterator first, and sets the epoch then
    other.set_epoch(state["epoch"])
    assert other.state_dict() == state
    assert head + all_contents(rest) == everything
    assert all_contents(other) == everything  # the next iteration is a whole one


def test_a_state_at_the_end_of_an_epoch_begins_the_next():
    loader = make_loader()
    list(loader)
    other = make_loader()
    other.load_state_dict(loader.state_dict())
    other.set_epoch(1)
    loader.set_epoch(1)
    assert all_contents(other) == all_contents(loader)


def test_resume_loads_no_part_that_is_done():
    loader = make_loader(num_threads=0)
    before = [batch.part for batch in loader].index(3)
    loaded = []

    def load_part(part):
        loaded.append(part)
        return WORLD.load_part(part)

    other = make_loader(load_part=load_part)
    other.load_state_dict(loader.state_dict() | {"delivered": before})
    assert {batch.part for batch in other} == {3, 4}
    assert loaded == [3, 4]


def test_a_state_of_another_shape_is_refused():
    state = make_loader().state_dict() | {"delivered": 3}
    with pytest.raises(ValueError, match=said("length= length=")):
        make_loader(parts=[0, 1]).load_state_dict(state)
    with pytest.raises(ValueError, match=said("batch_size=16 batch_size=8")):
        make_loader(batch_size=8, pad_to=state["length"] * 3).load_state_dict(state | {"length": state["length"] * 3})
    make_loader(parts=[0, 1]).load_state_dict(state | {"delivered": state["length"]})


def test_the_next_part_is_loaded_while_this_one_trains():
    loaded, seen = [], []

    def load_part(part):
        loaded.append(part)
        return WORLD.load_part(part)

    for batch in make_loader(load_part=load_part, num_threads=1, prefetch_batches=1):
        if batch.part not in seen:
            seen.append(batch.part)
            deadline = time.monotonic() + 20
            while len(loaded) < min(len(seen) + 1, 5) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(loaded) == min(len(seen) + 1, 5)  # one ahead, never two
    assert loaded == [0, 1, 2, 3, 4]


def test_parts_that_fit_the_shelf_are_loaded_once():
    loaded = []

    def load_part(part):
        loaded.append(part)
        return WORLD.load_part(part)

    loader = make_loader(parts=[0, 3], load_part=load_part)
    for epoch in range(3):
        loader.set_epoch(epoch)
        list(loader)
    assert loaded == [0, 3]


def test_targets_outside_the_core_are_refused():
    loader = part_loader([1], WORLD.load_part, None, {1: np.array([0])}, NeighborSampler([2]), batch_size=4)
    with pytest.raises(GNNScaleError, match=said("targets 1")):
        list(loader)


@pytest.mark.parametrize("how", ["break", "collect", "interrupt", "last"])
def test_no_thread_outlives_the_iteration(how):
    loader = make_loader(num_threads=2, prefetch_batches=6)
    if how == "break":
        for _ in loader:
            assert loader_threads()
            break
    elif how == "collect":
        iterator = iter(loader)
        next(iterator)
        cycle = [iterator]
        cycle.append(cycle)
        del iterator, cycle
        gc.collect()
    elif how == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            for _ in loader:
                raise KeyboardInterrupt
        gc.collect()
    else:
        iterator = iter(loader)
        for _ in range(len(loader)):  # Lightning never asks beyond the last
            next(iterator)
    assert loader_threads() == []


def test_buffers_go_round():
    from lightning_gnnscale.loader import BufferPool

    pool = BufferPool()
    loader = make_loader(pool=pool, num_threads=2)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for _ in loader:
            pass
    held = pool.held_bytes
    for epoch in range(2, 6):
        loader.set_epoch(epoch)
        for _ in loader:
            pass
    assert pool.held_bytes <= 1.5 * held
    del _
    loader.close()
    assert pool.held_bytes == 0


def test_batches_that_are_kept_stay_as_they_were():
    loader = make_loader(num_threads=2)
    kept = list(loader)
    before = all_contents(kept)
    loader.set_epoch(1)
    list(loader)
    assert all_contents(kept) == before


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"batch_size": 0}, "batch_size 1 0"),
        ({"passes": 0}, "passes 1 0"),
        ({"num_threads": -1}, "num_threads 0 -1"),
        ({"prefetch_batches": 0}, "prefetch_batches 1 0"),
    ],
)
def test_bad_options(option, message):
    with pytest.raises(ValueError, match=said(message)):
        make_loader(**option)


class SamplesNothing(type(SAMPLERS["full"])):
    """A sampler of a user's own, of which a line was forgotten."""

    def sample(self, *args):
        return None


def test_a_sample_that_returns_no_subgraph_is_named():
    told = r"part 0, batch 0 of epoch 1: .*SamplesNothing.sample must return a Subgraph \(n_id, .*, got NoneType$"
    with pytest.raises(GNNScaleError, match=told):
        list(make_loader(sampler=SamplesNothing(), num_threads=0))


def test_a_sampler_with_other_batches_is_refused():
    with pytest.raises(ValueError, match=said("part 0 3")):
        make_loader().set_sampler(SAMPLERS["saint"])


@pytest.mark.parametrize("threads", [0, 1])
def test_the_share_of_waiting(threads):
    loader = make_loader(num_threads=threads)
    assert loader.waiting_share == 0
    list(loader)
    idle = loader.waiting_share
    for _ in loader:
        time.sleep(0.05)
    assert 0 < loader.waiting_share < idle <= 1


class ToldFeatures(Column):
    """Features that note what was told and what was gathered, in the order of both."""

    def __init__(self, table):
        self.table, self.notes = table, []
        self.is_sparse, self.dim, self.dtype = False, table.dim, table.dtype

    def read(self, nodes, out=None):
        self.notes.append(("gather", nodes.tobytes()))
        return self.table.read(nodes, out)

    def expect(self, batches):
        self.notes += [("expect", nodes.tobytes()) for nodes in batches]

    def forget(self):
        self.notes.append(("forget", b""))


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_reads_are_told_before_they_come_and_change_nothing(threads):
    features = ToldFeatures(WORLD.features)
    options = {"num_threads": threads, "prefetch_batches": 2, "reads": RowReads(lookahead_batches=4)}
    batches = list(make_loader(features=features, **options))
    assert all_contents(batches) == all_contents(make_loader(num_threads=0))
    told = [nodes for what, nodes in features.notes if what == "expect"]
    assert told == [batch.n_id.numpy().tobytes() for batch in batches]
    assert [what for what, _ in features.notes][:6] == ["expect"] * 6, "a window is told before the first gather"
    assert features.notes[-1][0] == "forget"


def test_a_foretold_iteration_that_is_broken_off_forgets():
    features = ToldFeatures(WORLD.features)
    batches = iter(make_loader(features=features, num_threads=1, reads=RowReads(lookahead_batches=3)))
    next(batches)
    batches.close()
    assert features.notes[-1][0] == "forget"
