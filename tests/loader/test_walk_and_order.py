"""Seed order, the split of targets, and the walk over parts."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.loader import (
    PartWalk,
    assign_targets,
    core_targets,
    longest_rank,
    parts_of_rank,
    rank_of_parts,
    split_targets,
)
from lightning_gnnscale.loader.part_walk import order_key
from lightning_gnnscale.partition_store import WholeGraph
from tests.says import said


@given(num_targets=st.integers(1, 200), world_size=st.integers(1, 9))
def test_every_rank_gets_the_same_number_of_targets(num_targets, world_size):
    if world_size > num_targets:
        world_size = num_targets
    targets = np.arange(num_targets) * 3 + 1
    shares = split_targets(targets, world_size)
    assert len({len(share) for share in shares}) == 1
    assert set(np.concatenate(shares)) == set(targets)
    assert sum(map(len, shares)) - num_targets < world_size
    for share, coming in pairwise(shares):
        assert (np.diff(share) == 3).all()
        assert len(np.intersect1d(share, coming)) <= 1


@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=9), world_size=st.integers(1, 5), seed=st.integers(0, 9)
)
def test_no_more_targets_leave_their_owner_than_must(counts, world_size, seed):
    total, ends = sum(counts), np.cumsum(counts)
    if total < world_size:
        return
    targets = [2 * np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)]
    owner = rank_of_parts(counts, np.array(counts) + 1, world_size)
    affinity = np.random.default_rng(seed).integers(0, 9, (total, world_size))
    shares = assign_targets(targets, owner, world_size, lambda nodes: affinity[nodes // 2])
    assert {len(share) for share in shares} == {-(-total // world_size)}
    assert all((np.diff(share) > 0).all() for share in shares)
    trained = np.concatenate(shares)
    assert set(trained) == set(np.concatenate(targets)) and len(trained) - total < world_size
    owner_of = np.repeat(owner, counts)
    loads, even = np.bincount(owner_of, minlength=world_size), total // world_size
    must = int(np.maximum(loads - even, 0).sum()) - min(total % world_size, int((loads > even).sum()))
    left = sum(int((owner_of[share // 2] != rank).sum()) for rank, share in enumerate(shares))
    assert must <= left <= must + len(trained) - total  # a repeated one is another rank's


def test_a_target_leaves_for_the_rank_that_owns_most_of_its_neighbours():
    affinity = np.array([[9, 0, 0], [1, 0, 5], [2, 2, 0], [0, 1, 1], [3, 9, 4], [5, 0, 5]])
    targets = [np.arange(6), np.empty(0, int), np.empty(0, int)]
    shares = assign_targets(targets, np.array([0, 1, 2]), 3, lambda nodes: affinity[nodes])
    # Gains: 4 to rank 1 by 6, 1 to rank 2 by 4, 3 to rank 1 by 1, which is full then, and 5 to rank 2 by 0.
    assert [share.tolist() for share in shares] == [[0, 2], [3, 4], [1, 5]]


@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=12), world_size=st.integers(1, 5))
def test_a_part_belongs_to_the_rank_that_trains_most_of_it(counts, world_size):
    sizes = np.array(counts) + 7
    owner = rank_of_parts(counts, sizes, world_size)
    assert owner.shape == (len(counts),) and 0 <= owner.min() <= owner.max() < world_size
    ends = np.cumsum(counts)
    if ends[-1] < world_size:
        return
    shares = split_targets(np.arange(ends[-1]), world_size)
    for part, (count, end) in enumerate(zip(counts, ends, strict=True)):
        trained = [np.isin(np.arange(end - count, end), share).sum() for share in shares]
        assert trained[owner[part]] >= max(trained) - 1  # one target may be trained by two ranks


def test_parts_without_targets_balance_the_nodes():
    assert rank_of_parts([4, 0, 0, 4, 0], [10, 3, 5, 20, 8], 2).tolist() == [0, 1, 0, 1, 0]
    assert rank_of_parts([0, 0], [1, 1], 2).tolist() == [0, 1]


def test_ranks_own_the_parts_of_their_machine_where_the_numbers_fit():
    counts, sizes = [8, 0, 1, 1, 3, 3], [9, 9, 9, 9, 9, 9]
    assert rank_of_parts(counts, sizes, 2, num_machines=2).tolist() == [0, 0, 0, 1, 1, 1]
    assert rank_of_parts(counts, sizes, 2).tolist() == [0, 0, 1, 1, 1, 1]
    assert rank_of_parts(counts, sizes, 4, num_machines=2).tolist() == [0, 0, 1, 2, 2, 3]
    assert rank_of_parts(counts, sizes, 6, num_machines=3).tolist() == [0, 1, 2, 3, 4, 5]
    for world_size in (1, 3, 5):
        ranges = rank_of_parts(counts, sizes, world_size)
        assert np.array_equal(rank_of_parts(counts, sizes, world_size, num_machines=2), ranges), "no multiple: ranges"


@pytest.mark.parametrize("world_size", [0, 4])
def test_more_ranks_than_targets_are_refused(world_size):
    with pytest.raises(ValueError, match=said("world_size [1, 3]")):
        split_targets(np.arange(3), world_size)


def test_core_targets_reads_the_parts_own_range():
    mask = np.array([1, 0, 1, 1, 0, 1], bool)
    offsets = np.array([0, 3, 3, 6])
    assert [core_targets(mask, offsets, part).tolist() for part in range(3)] == [[0, 2], [], [3, 5]]


def test_parts_go_to_ranks_cyclically():
    assert [parts_of_rank(7, rank, 3) for rank in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert longest_rank([1, 5, 2, 1, 5, 2, 1], 3) == 10


def test_orders_differ_by_epoch_and_part():
    keys = {order_key(seed, epoch, part) for seed in range(3) for epoch in range(5) for part in range(5)}
    assert len(keys) == 75


@given(
    sizes=st.lists(st.integers(0, 4), min_size=0, max_size=5),
    passes=st.integers(1, 3),
    epoch=st.integers(0, 5),
    data=st.data(),
)
def test_the_walk_from_any_position_is_the_rest_of_the_walk(sizes, passes, epoch, data):
    walk = PartWalk([10 + i for i in range(len(sizes))], {10 + i: size for i, size in enumerate(sizes)}, passes)
    everything = list(walk.positions(epoch))
    expected = [
        (10 + i, epoch * passes + number, batch)
        for i, size in enumerate(sizes)
        for number in range(passes)
        for batch in range(size)
    ]
    assert [(p.part, p.epoch, p.batch) for p in everything] == expected
    assert len(walk) == len(expected)
    visits = [p.visit for p in everything]
    assert visits == sorted(visits) and set(visits) == set(range(len(set(visits))))
    start = data.draw(st.integers(0, len(expected)))
    rest = list(walk.positions(epoch, start))
    assert rest == everything[start:]


def test_the_part_after_passes_over_empty_ones():
    walk = PartWalk([4, 2, 9], {4: 1, 2: 0, 9: 3})
    assert [position.following for position in walk.positions(0)] == [9, None, None, None]


def test_the_whole_graph_has_no_other_direction_to_add():
    from lightning_gnnscale.graph import build_csc

    csc = build_csc(np.array([0]), np.array([1]), 2)
    assert WholeGraph.of(csc, 0, symmetric=True).symmetrised().num_local == 2
    with pytest.raises(ValueError, match="to_undirected=True"):
        WholeGraph.of(csc, 0).symmetrised()
