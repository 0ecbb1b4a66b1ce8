"""Algorithm 2: the value against the paper's lines, its fixed points, and what it refuses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.locality_scale import algorithm_2

from lightning_gnnscale.sampler.locality import LocalityScale
from tests.says import said


def run(state, shares):
    states = [state]
    for share in shares:
        states.append(states[-1].after_epoch(share))
    return states


@given(
    st.lists(st.floats(0, 1) | st.sampled_from([0.1, 0.15, 0.17, 0.2, 0.21, 0.9]), max_size=30),
    st.tuples(st.floats(0, 1), st.floats(0, 1)) | st.just((0.15, 0.2)),
    st.floats(1, 64) | st.sampled_from([1.0, 2.0, 8.0]),
)
def test_equals_the_printed_algorithm(shares, bounds, max_scale):
    lower, upper = sorted(bounds)
    states = run(LocalityScale(lower, upper, max_scale), shares)
    scales, fixed = algorithm_2(shares, lower, upper, max_scale)
    assert [state.scale for state in states] == scales
    assert states[-1].fixed == fixed


@pytest.mark.parametrize(
    ("shares", "scales"),
    [
        ([0.5, 0.5, 0.5, 0.5, 0.5], [1, 2, 4, 8, 8, 8]),
        ([0.5, 0.5, 0.1, 0.1, 0.18, 0.9], [1, 2, 4, 3, 2.5, 2.5, 2.5]),
        ([0.1, 0.9], [1, 1, 1]),  # loading is cheap from the start: no bias, for good
        ([0.3, 0.1, 0.3, 0.2, 0.0], [1, 2, 1.5, 3, 3, 3]),
    ],
)
def test_by_hand(shares, scales):
    assert [state.scale for state in run(LocalityScale(), shares)] == scales


@given(st.lists(st.floats(0, 1), max_size=40))
def test_never_leaves_its_range_and_never_moves_once_fixed(shares):
    states = run(LocalityScale(), shares)
    assert all(1 <= state.scale <= 8 for state in states)
    first = next((i for i, state in enumerate(states) if state.fixed), len(states))
    assert all(state == states[first] for state in states[first:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lower": 0.3}, "0 <= lower <= upper <= 1 0.3 0.2"),
        ({"upper": 1.5}, "0.15 1.5"),
        ({"lower": math.nan}, "nan 0.2"),
        ({"max_scale": 0.5}, "max_scale >= 1 0.5"),
        ({"max_scale": math.inf}, "got inf"),
        ({"scale": 16.0}, "scale [1, max_scale 8.0] 16.0"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=said(message)):
        LocalityScale(**options)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_out_of_range(share):
    with pytest.raises(ValueError, match=said("loading_share [0, 1]")):
        LocalityScale().after_epoch(share)
