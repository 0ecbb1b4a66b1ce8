"""Gradient rows sampled by their norm: their probabilities, and that their mean is what they were."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.strategy.exchange.layer_exchange import inclusion_probability, sample_rows, uniform

SIZES = st.lists(st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-6, 1e3)), max_size=30)


@given(sizes=SIZES, threshold=st.floats(0.01, 10))
def test_probabilities_equal_plain_python(sizes, threshold):
    positive = [size for size in sizes if size > 0]
    floor = threshold * sum(positive) / len(positive) if positive else 1.0
    probabilities = inclusion_probability(torch.tensor(sizes, dtype=torch.float64), threshold)
    assert probabilities.dtype == torch.float64 and probabilities.shape == (len(sizes),)
    # sums of at most 30 numbers, in another order
    assert probabilities.tolist() == pytest.approx([min(1.0, size / floor) for size in sizes], rel=1e-12)


def test_probabilities_by_hand():
    sizes = torch.tensor([1.0, 4.0, 1.0, 0.0]).double()
    assert inclusion_probability(sizes, 1.0).tolist() == [0.5, 1.0, 0.5, 0.0]  # the mean is 2
    assert inclusion_probability(sizes, 4.0).tolist() == [0.125, 0.5, 0.125, 0.0]
    assert inclusion_probability(torch.zeros(3, dtype=torch.float64), 1.0).tolist() == [0.0, 0.0, 0.0]
    with_nan = torch.tensor([2.0, math.nan, math.inf, 2.0]).double()
    assert inclusion_probability(with_nan, 2.0).tolist() == [0.5, 1.0, 1.0, 0.5], "training that went wrong is reported"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keeping_all_takes_every_row_that_is_not_zero_bit_for_bit(dtype):
    rows = torch.randn(9, 4, dtype=dtype)
    rows[2] = 0
    rows[5] = torch.tensor([0.0, -0.0, 0.0, 0.0])
    rows[6] = torch.tensor([0.0, 0.0, 1e-30, 0.0])  # its square is no float32
    rows[7, 1] = torch.finfo(dtype).max  # so is this one
    rows[8, 0] = math.nan  # an owner must learn that training went wrong
    chosen, sampled = sample_rows(rows, 0, 7, torch.arange(9))
    assert chosen.tolist() == [True, True, False, True, True, False, True, True, True]
    assert torch.equal(sampled.nan_to_num(nan=77.0), rows[chosen].nan_to_num(nan=77.0))


def gradient_rows():
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(24, 3, dtype=torch.float64, generator=generator)
    rows *= torch.logspace(-2, 2, 24, dtype=torch.float64).unsqueeze(1)
    rows[::6] = 0
    return rows


@pytest.mark.parametrize("threshold", [0.1, 1.0, 5.0])
def test_the_mean_over_keys_is_the_row(threshold):
    rows, ids, num_keys = gradient_rows(), torch.arange(100, 124), 4000
    norms = rows.norm(dim=1)
    probability = inclusion_probability(norms, threshold)
    total, count = torch.zeros_like(rows), torch.zeros(24)
    for key in range(num_keys):
        chosen, sampled = sample_rows(rows, threshold, key, ids)
        total[chosen] += sampled
        count += chosen
    assert count[::6].eq(0).all()
    # row / p with probability p: the variance of a value is value**2 (1 - p) / p; 5 standard deviations of the mean
    spread = rows.abs() * ((1 - probability) / probability.clamp(min=1e-300)).sqrt().unsqueeze(1) / num_keys**0.5
    spread[norms == 0] = 0
    rounding = num_keys * 2.0**-53 * rows.abs()
    assert bool(((total / num_keys - rows).abs() <= 5 * spread + rounding).all())
    # the number of rows: variance below the number of rows expected
    expected = float(probability.sum())
    assert abs(float(count.sum()) / num_keys - expected) <= 5 * (expected / num_keys) ** 0.5


def test_a_probability_hangs_on_key_and_id_alone():
    rows, ids = torch.randn(24, 3, generator=torch.Generator().manual_seed(2)), torch.arange(24) * 1000
    chosen, sampled = sample_rows(rows, 2, 3, ids)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    again, redrawn = sample_rows(rows[order], 2, 3, ids[order])
    assert torch.equal(again, chosen[order])
    place = {int(i): row for i, row in zip(ids[chosen], sampled, strict=True)}
    # the mean of the norms adds up in another order
    assert all(torch.allclose(row, place[int(i)], rtol=1e-6) for i, row in zip(ids[order][again], redrawn, strict=True))
    assert not torch.equal(sample_rows(rows, 2, 4, ids)[0], chosen)


@pytest.mark.parametrize("threshold", [0, 1.5])
def test_no_rows_and_zero_rows(threshold):
    for rows in (torch.zeros(0, 3), torch.zeros(5, 3)):
        chosen, sampled = sample_rows(rows, threshold, 0, torch.arange(len(rows)))
        assert chosen.shape == (len(rows),) and not chosen.any() and sampled.shape == (0, 3)


def test_random_numbers_are_even():
    numbers = uniform((1 << 64) - 1, torch.arange(-5000, 5000))
    assert numbers.dtype == torch.float64 and bool((numbers >= 0).all()) and bool((numbers < 1).all())
    # 10,000 samples: mean 1/2 with standard deviation 0.0029; deciles hold 1000 with 30
    assert abs(float(numbers.mean()) - 0.5) < 5 * 0.0029
    counts = torch.histc(numbers, 10, 0, 1)
    assert float((counts - 1000).abs().max()) < 5 * 30
