"""The deal of parts: disjoint, even, random by epoch, and steady for those whose worker lives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.remote.dealing import assign_parts


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 5), st.data())
def test_every_part_has_one_worker_that_lives(num_parts, num_workers, epoch, data):
    alive = data.draw(st.sets(st.integers(0, num_workers - 1), min_size=1))
    parts = list(range(3, 3 + num_parts))
    all_alive = assign_parts(parts, num_workers, range(num_workers), 1, epoch)
    owner = assign_parts(parts[::-1], num_workers, alive, 1, epoch)
    assert sorted(owner) == parts and set(owner.values()) <= alive
    assert all(owner[part] == worker for part, worker in all_alive.items() if worker in alive)
    counts = [list(all_alive.values()).count(worker) for worker in range(num_workers)]
    assert max(counts) - min(counts) <= 1


def test_epochs_and_seeds_deal_differently_and_evenly():
    deals = [assign_parts(range(8), 4, range(4), seed, epoch) for seed in range(20) for epoch in range(20)]
    # 2520 deals are possible: 370 distinct ones are expected of 400, with a deviation of 5.
    assert len({tuple(sorted(deal.items())) for deal in deals}) > 340
    share = [sum(deal[0] == worker for deal in deals) / len(deals) for worker in range(4)]
    assert all(abs(one - 0.25) < 0.1 for one in share)  # five standard deviations


def test_nobody_alive():
    with pytest.raises(ValueError, match=r"alive must be workers in \[0, 2\), at least one, got \[\]"):
        assign_parts([0], 2, [], 0, 0)
