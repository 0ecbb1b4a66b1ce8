"""Parts that take turns: batches mix them, ranks have as many, every target comes once, restarts change nothing."""

import time
import weakref
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.parts import part_loader, small_world

from lightning_gnnscale.graph import batches_of
from lightning_gnnscale.loader import Interleave, InterleavedWalk, PartLoader
from lightning_gnnscale.loader.part_walk import even_slices, spread_parts
from lightning_gnnscale.sampler import NeighborSampler
from tests.says import said

WORLD = small_world(num_parts=5)


def make_loader(rank=0, world_size=1, open_parts=2, load_part=WORLD.load_part, num_ranks=1, **options) -> PartLoader:
    settings = {"labels": WORLD.labels, "masks": WORLD.masks, "batch_size": 8, "seed": 1} | options
    targets = {part: WORLD.targets(part) for part in range(5)}
    return part_loader(
        range(5), load_part, WORLD.features, targets, NeighborSampler([4, 3]),
        interleave=Interleave(rank, world_size, open_parts, num_ranks=num_ranks), **settings,
    )  # fmt: skip


@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("open_parts", [1, 2, 3])
def test_a_process_that_computes_several_ranks_has_a_batch_of_each_in_every_step(open_parts, start):
    def steps(loader):
        loader.set_epoch(2)
        loader.load_state_dict(loader.state_dict() | {"delivered": start})
        return [[(one.key, one.n_id.tolist()) for one in batches_of(step)] for step in loader]

    each = [steps(make_loader(rank, 4, open_parts)) for rank in range(4)]
    assert len(each[0]) > 0
    first = make_loader(0, 4, open_parts)
    for rank, num_ranks in ((0, 4), (1, 3), (2, 2)):
        loader = make_loader(rank, 4, open_parts, num_ranks=num_ranks)
        assert len(loader) == len(first) and loader.state_dict() == first.state_dict()
        expected = [[one for (one,) in step] for step in zip(*each[rank : rank + num_ranks], strict=True)]
        assert steps(loader) == expected


@given(num_parts=st.integers(1, 20), seed=st.integers(0, 9), epoch=st.integers(0, 9))
def test_parts_that_are_spread_come_once_and_neighbours_are_kept_apart(num_parts, seed, epoch):
    order = spread_parts(range(num_parts), seed, epoch)
    assert sorted(order) == list(range(num_parts)) and order == spread_parts(range(num_parts), seed, epoch)
    for machines in (2, 4):  # whatever a machine holds, no two more are open there than elsewhere
        if num_parts % machines == 0:
            turns = np.array(order).reshape(-1, machines) * machines // num_parts
            assert (np.sort(turns, axis=1) == np.arange(machines)).all()


def test_epochs_spread_parts_in_other_orders():
    orders = {tuple(spread_parts(range(8), 0, epoch)) for epoch in range(200)}
    assert len(orders) > 80  # of 128, each as likely: 101 are expected, with a deviation below 5


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    world_size=st.integers(1, 3),
    open_parts=st.integers(1, 4),
    epoch=st.integers(0, 3),
)
def test_parts_take_turns_and_no_batch_is_left_out(sizes, world_size, open_parts, epoch):
    ranks = [
        list(
            InterleavedWalk(range(len(sizes)), dict(enumerate(sizes)), rank, world_size, open_parts, 7).positions(epoch)
        )
        for rank in range(world_size)
    ]
    steps = list(zip(*ranks, strict=True))
    assert len(steps) == sum(sizes)
    assert all(len({position.part for position in step}) == 1 for step in steps)
    given_out = Counter((position.part, position.batch) for step in steps for position in step)
    assert given_out == {(part, batch): 1 for part, size in enumerate(sizes) for batch in range(size * world_size)}
    for place, position in enumerate(ranks[0]):
        later = {other.part for other in ranks[0][place:]}
        started = {other.part for other in ranks[0][: place + 1]}
        assert len(later & started) <= open_parts
        assert position.following is None or position.following in later
    first = list(dict.fromkeys(position.part for position in ranks[0]))
    for part in first[open_parts:]:
        begun = next(place for place, position in enumerate(ranks[0]) if position.part == part)
        assert part in {position.following for position in ranks[0][:begun]}, "it is loaded ahead"


def test_the_order_of_parts_is_new_every_epoch_and_a_start_skips():
    walk = InterleavedWalk(range(9), dict.fromkeys(range(9), 2), 0, 1, 3, 0)
    first, second = (list(walk.positions(epoch)) for epoch in (0, 1))
    assert [p.part for p in first] != [p.part for p in second]
    assert list(walk.positions(0, 7)) == first[7:]
    assert [p.part for p in first[:3]] == [p.part for p in first[3:6]]


@pytest.mark.parametrize(("num_items", "num_slices"), [(10, 4), (4, 4), (3, 4), (1, 5)])
def test_even_slices(num_items, num_slices):
    slices = even_slices(np.arange(num_items), num_slices)
    assert len(slices) == num_slices
    assert {len(one) for one in slices} <= {max(num_items // num_slices, 1), -(-num_items // num_slices)}
    assert sorted({*np.concatenate(slices).tolist()}) == list(range(num_items))
    if num_items >= num_slices:
        assert sum(len(one) for one in slices) == num_items


def part_of(nodes) -> set[int]:
    return {next(part for part in range(5) if node in WORLD.targets(part)) for node in nodes}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_every_part_and_each_target_comes_once(world_size):
    loaders = [make_loader(rank, world_size) for rank in range(world_size)]
    steps = list(zip(*loaders, strict=True))
    assert len(steps) == len(loaders[0])
    seeds = [[batch.n_id[: batch.batch_size].tolist() for batch in step] for step in steps]
    assert all(len({frozenset(part_of(nodes)) for nodes in step}) == 1 for step in seeds), "of a step, the same parts"
    assert any(len(part_of(step[0])) == 2 for step in seeds), "a batch is a chunk of each part that is open"
    counts = Counter(node for step in seeds for nodes in step for node in nodes)
    targets = np.concatenate([WORLD.targets(part) for part in range(5)])
    assert set(counts) == set(targets.tolist())
    short = {int(node) for part in range(5) if len(WORLD.targets(part)) < world_size for node in WORLD.targets(part)}
    assert {node for node, count in counts.items() if count > 1} <= short, "parts with fewer targets than ranks"
    assert all(len(nodes) <= 8 for step in seeds for nodes in step)


def test_threads_and_restarts_change_no_batch():
    expected = [(batch.key, batch.n_id.tolist()) for batch in make_loader(num_threads=0)]
    found = [(batch.key, batch.n_id.tolist()) for batch in make_loader(num_threads=3, prefetch_batches=7)]
    assert found == expected
    assert [(batch.key, batch.n_id.tolist()) for batch in make_loader(open_parts=4)] != expected
    loader = make_loader(num_threads=2)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    batches.close()
    resumed = make_loader()
    resumed.load_state_dict(state)
    assert [(batch.key, batch.n_id.tolist()) for batch in resumed] == expected[2:]


def test_another_walk_is_not_resumed_within_an_epoch():
    loader = make_loader(open_parts=2)
    next(batches := iter(loader))
    state = loader.state_dict()
    batches.close()
    for other in (make_loader(open_parts=3), make_loader(open_parts=2, world_size=2)):
        with pytest.raises(ValueError, match=r"interleave=\[1, 2\]|length="):
            other.load_state_dict(state)


def test_no_more_parts_are_loaded_than_are_open():
    loaded = []

    def load_part(part):
        loaded.append(part)
        return WORLD.load_part(part)

    targets = {part: WORLD.targets(part) for part in range(5)}
    loader = part_loader(
        range(5), load_part, WORLD.features, targets, NeighborSampler([4]), batch_size=4, masks=WORLD.masks,
        labels=WORLD.labels, interleave=Interleave(open_parts=3), num_threads=2,
    )  # fmt: skip
    assert len(list(loader)) > 5
    assert sorted(loaded) == list(range(5)), "each part is read once a pass"


def test_passes_are_refused():
    with pytest.raises(ValueError, match=said("interleave drop_last passes=2 drop_last=False")):
        make_loader(passes=2)


@pytest.mark.parametrize("open_parts", [1, 2, 3])
def test_no_more_parts_are_in_memory_than_take_turns_and_one(open_parts):
    """However many batches are prepared ahead: here all of an epoch, and a part has but a few."""
    alive, most = set(), 0

    def load(part):
        nonlocal most
        graph = WORLD.load_part(part)
        alive.add(part)
        most = max(most, len(alive))
        weakref.finalize(graph.csc.indices, alive.discard, part)
        return graph

    loader = make_loader(open_parts=open_parts, load_part=load, num_threads=2, prefetch_batches=64)
    for batch in loader:
        del batch
        time.sleep(0.005)  # for whatever can be prepared meanwhile
    loader.close()
    assert 1 < most <= open_parts + 1
