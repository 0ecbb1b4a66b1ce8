"""Staleness bounds: which epochs send, who takes turns, what counts as a change."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.strategy.exchange import BOUNDS, EpochAdaptive, EpochFixed, VariationGap

RANKS = np.arange(4)


def sending(bound, versions, epochs, sources=RANKS):
    """Return the sources that send in each epoch."""
    versions, sent = np.asarray(versions), []
    for epoch in epochs:
        due = bound.due(epoch, versions)
        versions = np.where(due, epoch, versions)
        sent.append(sources[due].tolist())
    return sent


def test_a_fixed_bound_of_one_sends_every_other_epoch():
    bound = EpochFixed(1)
    versions = bound.restart(0, RANKS)
    assert versions.tolist() == [0, 0, 0, 0]
    everybody = [0, 1, 2, 3]
    assert sending(bound, versions, range(1, 7)) == [[], everybody, [], everybody, [], everybody]


@given(max_age=st.integers(0, 6), start=st.integers(0, 20))
def test_a_fixed_bound_has_period_max_age_plus_one(max_age, start):
    bound = EpochFixed(max_age)
    epochs = range(start + 1, start + 30)
    sent = sending(bound, bound.restart(start, RANKS), epochs)
    assert [bool(ranks) for ranks in sent] == [(epoch - start) % (max_age + 1) == 0 for epoch in epochs]


def test_the_adaptive_bound_follows_the_vector_of_the_paper():
    sent = sending(EpochAdaptive(1), [8, 7, 9, 9], range(9, 13))
    assert [[rank + 1 for rank in ranks] for ranks in sent] == [[2], [1], [2, 3, 4], [1]]


@given(max_age=st.integers(0, 6), start=st.integers(0, 20), num_sources=st.integers(1, 9))
def test_after_a_restart_sources_take_turns(max_age, start, num_sources):
    bound, sources = EpochAdaptive(max_age), np.arange(num_sources)
    versions, period = bound.restart(start, sources), max_age + 1
    assert versions.tolist() == [start - source % period for source in range(num_sources)]
    sent = sending(bound, versions, range(start + 1, start + 4 * period + 1), sources)
    for offset in range(len(sent) - period + 1):
        # over any max_age + 1 epochs in a row each source sends once
        turns = [source for ranks in sent[offset : offset + period] for source in ranks]
        assert sorted(turns) == list(range(num_sources))
    most = max(len(ranks) for ranks in sent)
    assert most == -(-num_sources // period)  # as even as it can be


def test_rows_take_turns_by_their_ids():
    ids = np.array([4, 7, 10, 11])
    bound = EpochAdaptive(2)
    # 4, 7 and 10 are 1 modulo 3, 11 is 2: versions 4 and 3
    assert bound.restart(5, ids).tolist() == [4, 4, 4, 3]
    assert sending(bound, [4, 4, 4, 3], [6, 7, 8, 9], ids) == [[11], [4, 7, 10], [], [11]]


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


HELD = rows((3.0, 4.0), (0.0, 0.0), (1.0, 0.0))
FRESH = rows((3.0, 4.5), (0.0, 0.0), (1.0, 2.0))
# changes (0, .5), (0, 0), (0, 2): norms .5, 0, 2 by row, over held ones of 5, 0, 1; means .25, 0, 1
GAPS = {
    "relative": ([0.1, 0.0, 2.0], np.sqrt(4.25 / 26)),
    "frobenius": ([0.5, 0.0, 2.0], np.sqrt(4.25)),
    "mean_abs": ([0.25, 0.0, 1.0], 2.5 / 6),
}


@pytest.mark.parametrize("norm", GAPS)
def test_a_gap_is_exceeded_from_just_below_its_value(norm):
    by_row, whole = GAPS[norm]
    for row, gap in enumerate(by_row):
        if gap == 0:
            continue
        above, below = VariationGap(gap * 1.001, norm), VariationGap(gap * 0.999, norm)
        assert not above.exceeded(FRESH, HELD, True)[row]
        assert below.exceeded(FRESH, HELD, True)[row]
        factor = torch.ones(len(FRESH), dtype=torch.float64)
        factor[row] = 1.002
        assert above.exceeded(FRESH, HELD, True, factor)[row], "what is multiplied is the change"
    assert not VariationGap(whole * 1.001, norm).exceeded(FRESH, HELD, False)
    assert VariationGap(whole * 0.999, norm).exceeded(FRESH, HELD, False)
    assert VariationGap(0, norm).exceeded(FRESH, HELD, False).shape == ()


@pytest.mark.parametrize("norm", GAPS)
def test_nothing_against_nothing_is_no_change(norm):
    bound, zeros = VariationGap(0.3, norm), torch.zeros(3, 2)
    assert bound.exceeded(zeros, zeros, True).tolist() == [False] * 3
    assert not bound.exceeded(zeros, zeros, False)
    for empty in (torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.float64)):
        assert bound.exceeded(empty, empty, True).shape == (0,)
        assert not bound.exceeded(empty, empty, False)


def test_a_relative_gap_over_nothing_is_exceeded_by_anything():
    bound = VariationGap(1e6)
    fresh = rows((0.0, 1e-9), (0.0, 0.0))
    assert bound.exceeded(fresh, torch.zeros_like(fresh), True).tolist() == [True, False]
    assert bound.exceeded(fresh, torch.zeros_like(fresh), False)


@pytest.mark.parametrize("norm", GAPS)
def test_a_gap_of_zero_sends_always(norm):
    held = torch.ones(4, 2)
    assert VariationGap(0, norm).exceeded(held, held, True).all()
    assert VariationGap(0, norm).exceeded(held, held, False)


def test_what_is_not_a_number_is_a_change():
    held = torch.ones(2, 2)
    fresh = held.clone()
    fresh[1, 0] = torch.nan
    assert VariationGap(0.3).exceeded(fresh, held, True).tolist() == [False, True]
    assert VariationGap(0.3).exceeded(fresh, held, False)


@pytest.mark.parametrize("kind", ["epoch_fixed", "epoch_adaptive"])
@pytest.mark.parametrize("max_age", [-1, 1.5, True, "one", None, float("nan"), float("inf")])
def test_an_age_that_does_not_fit_is_one_line(kind, max_age):
    with pytest.raises(ValueError, match=r"^bound\.max_age .* 0, got .*\Z") as error:
        BOUNDS[kind](max_age)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("max_gap", [-0.1, float("nan"), None, "0.1", True])
def test_a_gap_that_does_not_fit_is_one_line(max_gap):
    with pytest.raises(ValueError, match=r"^bound\.max_gap .* 0, got .*\Z"):
        VariationGap(max_gap)


@pytest.mark.parametrize("versions", ["ab", [0, 0.5], 3, [True]])
def test_versions_that_do_not_fit_are_one_line(versions):
    with pytest.raises(ValueError, match=r"^bound\.initial_versions .*integers.* got .*\Z"):
        EpochAdaptive(1, versions)


def test_an_unknown_norm_lists_those_that_exist():
    with pytest.raises(ValueError, match=r"^bound\.norm .*relative, frobenius, mean_abs.* 'l1'\Z"):
        VariationGap(0.1, "l1")


def test_bounds_tell_their_arguments():
    assert repr(EpochFixed(2)) == "EpochFixed(max_age=2)"
    assert repr(EpochAdaptive(1)) == "EpochAdaptive(max_age=1, initial_versions=None)"
    assert repr(VariationGap(0.3)) == "VariationGap(max_gap=0.3, norm='relative')"
