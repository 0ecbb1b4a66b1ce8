"""The generator: fixed vectors, both forms alike, and no bias that a test of this size can see."""

import numpy as np
import pytest

from lightning_gnnscale import rng


def splitmix64_finaliser(value: int) -> int:
    mask = (1 << 64) - 1
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


VALUES = [0, 1, 2, 12345, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("value", VALUES)
def test_both_forms_equal_the_published_finaliser(value):
    expected = splitmix64_finaliser(value)
    assert int(rng.mix64(np.uint64(value))) == expected
    assert int(rng.mix64_array(np.array([value], np.uint64))[0]) == expected


def test_first_output_of_splitmix64():
    # Seeded with 0, SplitMix64's first output is the finaliser of the golden gamma.
    assert int(rng.mix64(rng.GOLDEN)) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("key", VALUES[:4])
def test_combine_forms_agree(key):
    values = np.array(VALUES, np.uint64)
    compiled = [int(rng.combine(np.uint64(key), value)) for value in values]
    assert compiled == rng.combine_array(key, values).tolist()


def test_fold_depends_on_order_and_on_every_value():
    keys = {rng.fold(1, 2, 3), rng.fold(3, 2, 1), rng.fold(1, 2), rng.fold(1, 2, 4), rng.fold(1, 2, 3, 0)}
    assert len(keys) == 5
    assert rng.batch_key(7, 1, 2, 3) == rng.fold(7, 1, 2, 3)
    assert rng.fold(-1) == rng.fold(2**64 - 1)


def test_below_and_unit_stay_in_range():
    assert rng.below(np.uint64(2**64 - 1), 10) == 9
    assert rng.below(np.uint64(0), 10) == 0
    assert 0.0 <= rng.unit(np.uint64(2**64 - 1)) < 1.0


def test_permutation_is_one_and_depends_on_the_key():
    first, second = rng.permutation(1000, rng.fold(0)), rng.permutation(1000, rng.fold(1))
    assert sorted(first.tolist()) == list(range(1000))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, rng.permutation(1000, rng.fold(0)))


def test_uniform_by_chi_square():
    counts = np.bincount((rng.combine_array(5, np.arange(64_000)) >> np.uint64(58)).astype(int), minlength=64)
    statistic = ((counts - 1000.0) ** 2 / 1000.0).sum()
    assert statistic < 116  # chi-square, 63 degrees of freedom: one false alarm in 30,000


@pytest.mark.parametrize("half", [1, 2, 3, 7])
def test_the_network_permutes(half):
    values = np.arange(4**half, dtype=np.uint64)
    assert np.array_equal(np.sort(rng._feistel(values, np.uint64(half), 5)), values)


@pytest.mark.parametrize(
    ("num_items", "count"), [(1, 1), (7, 7), (4096, 3), (4097, 100), (5000, 1250), (5000, 1249), (2**40, 20_000)]
)
def test_distinct_positions_are_distinct_and_depend_on_the_key(num_items, count):
    sampled = rng.distinct_positions(num_items, count, 3)
    assert sampled.dtype == np.int64
    assert len(np.unique(sampled)) == len(sampled) == count
    assert sampled.min() >= 0
    assert sampled.max() < num_items
    assert np.array_equal(sampled, rng.distinct_positions(num_items, count, 3))
    assert count < 10 or not np.array_equal(sampled, rng.distinct_positions(num_items, count, 4))


def test_distinct_positions_are_uniform_each_and_in_pairs():
    """Chi-square at the 1 - 1e-6 quantile, over cells of the first position, and of the first with the second."""
    num_items, cells, samples = 5001, 5, 8_000
    sampled = np.array([rng.distinct_positions(num_items, 2, key) for key in range(samples)]) * cells // num_items
    for found, size, bound in ((sampled[:, 0], cells, 33.4), (sampled[:, 0] * cells + sampled[:, 1], cells**2, 72.3)):
        expected = samples / size
        statistic = ((np.bincount(found, minlength=size) - expected) ** 2 / expected).sum()
        assert statistic < bound
