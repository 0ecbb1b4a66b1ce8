"""Nodes by probability: as numpy's stable sort has them."""

import numpy as np
import pytest

from lightning_gnnscale.placement.hottest import hottest_first

TINY = np.float32(1e-45)  # subnormal


@pytest.mark.parametrize("num_nodes", [0, 1, 63, 2049, 5000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_order_is_that_of_a_stable_sort(num_nodes, dtype):
    sample = np.random.default_rng(num_nodes)
    prob = (sample.random(num_nodes) ** 20).astype(dtype)
    prob[sample.random(num_nodes) < 0.3] = 0.25  # ties
    order = hottest_first(prob)
    assert order.dtype == np.int64
    assert order.tolist() == np.argsort(-prob, kind="stable").tolist()


def test_zeros_of_both_signs_and_extremes():
    prob = np.array([0.0, -0.0, TINY, 1e38, -0.0, 0.0, 1.0, 3e-39], np.float32)
    assert hottest_first(prob).tolist() == [3, 6, 7, 2, 0, 1, 4, 5]


def test_rows_that_lie_apart_in_memory():
    prob = np.arange(20, dtype=np.float32).reshape(10, 2)[:, 1]
    assert hottest_first(prob).tolist() == list(range(9, -1, -1))
