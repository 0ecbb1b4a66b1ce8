"""Parts that share most edges follow each other."""

import numpy as np
import pytest

from lightning_gnnscale.partitioner.part_order import MOST_PARTS, order_parts


def cut(edges: np.ndarray, order: np.ndarray, groups: int) -> float:
    group = np.empty(len(order), np.int64)
    group[order] = np.arange(len(order)) * groups // len(order)
    return edges[group[:, None] != group[None]].sum()


@pytest.mark.parametrize("num_parts", [4, 16, 64])
def test_halves_of_halves_are_found(num_parts):
    number = np.arange(num_parts)
    apart = np.array([[int(a ^ b).bit_length() for b in number] for a in number])  # in a tree of halves
    tree = np.random.default_rng(num_parts).permutation(num_parts)
    edges = np.empty((num_parts, num_parts))
    edges[np.ix_(tree, tree)] = 1000.0 / 5.0**apart
    for groups in (2, 4):
        assert cut(edges, order_parts(edges), groups) == pytest.approx(cut(edges, tree, groups))


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 12, 33])
def test_every_part_gets_one_number_and_no_range_is_cut_more(num_parts):
    rng = np.random.default_rng(num_parts)
    edges = rng.integers(0, 50, (num_parts, num_parts))
    order = order_parts(edges)
    assert np.array_equal(np.sort(order), np.arange(num_parts))
    assert np.array_equal(order, order_parts(edges)), "a function of the edges alone"
    joint = edges + edges.T
    if num_parts > 3:
        assert cut(joint, order, 2) <= cut(joint, np.arange(num_parts), 2)


def test_many_parts_are_left_as_they_are():
    assert np.array_equal(order_parts(np.zeros((MOST_PARTS + 1, MOST_PARTS + 1), np.int8)), np.arange(MOST_PARTS + 1))


def test_parts_without_edges_between_them():
    assert np.array_equal(np.sort(order_parts(np.zeros((9, 9)))), np.arange(9))
