"""Random splits: disjoint, of the sizes asked for, over labelled nodes alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.dataset import random_split


@given(st.integers(0, 200), st.integers(0, 5))
def test_splits_are_disjoint_and_cover_the_labelled(num_nodes, seed):
    labels = np.arange(num_nodes) % 4 - 1
    masks = random_split(labels, (0.7, 0.15, 0.15), seed)
    total = masks["train"].astype(int) + masks["val"] + masks["test"]
    assert np.array_equal(total, (labels >= 0).astype(int))
    assert masks["train"].sum() == pytest.approx(0.7 * (labels >= 0).sum(), abs=0.5)


def test_nodes_without_any_of_several_labels_are_left_out():
    labels = np.array([[1, -1], [-1, -1], [0, 0], [-1, 1]])
    masks = random_split(labels, (1.0, 0.0, 0.0))
    assert masks["train"].tolist() == [True, False, True, True]


def test_seed_decides():
    labels = np.zeros(100, int)
    first, again, other = (random_split(labels, seed=seed)["train"] for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("fractions", [(0.5, 0.5), (0.9, 0.2, 0.1), (-0.1, 0.5, 0.5), (float("nan"), 0, 0)])
def test_fractions_out_of_range(fractions):
    with pytest.raises(ValueError, match="fractions must be three numbers"):
        random_split(np.zeros(10, int), fractions)
