"""Parts that share most edges follow each other."""

import numpy as np
import pytest

from lightning_gnnscale.partitioner.multilevel.weighted_graph import WeightedGraph
from lightning_gnnscale.partitioner.part_order import MOST_PARTS, numbered, order_parts


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


@pytest.mark.parametrize("weighted", [False, True])
def test_parts_of_a_graph_keep_their_nodes_and_get_other_numbers(weighted):
    """A ring of 12 parts, numbered at random: neighbours on the ring follow each other, so halves are cut twice."""
    rng, size = np.random.default_rng(0), 5
    place = np.repeat(rng.permutation(12), size)
    nodes = np.argsort(place, kind="stable")
    ends = np.stack([nodes, np.roll(nodes, -1)])
    ends = np.concatenate([ends, ends[::-1]], axis=1)
    order = np.lexsort((ends[0], ends[1]))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(ends[1], minlength=len(nodes)))])
    weight = np.full(ends.shape[1] if weighted else 1, 3, np.int32)
    graph = WeightedGraph(indptr, ends[0][order].astype(np.int32), weight, np.ones((1, 1), np.int32))
    part = np.repeat(np.arange(12), size).astype(np.int16)
    found = numbered(graph, part, 12)
    assert found.dtype == part.dtype
    assert len({*zip(part.tolist(), found.tolist(), strict=True)}) == 12, "each part has one number"
    half = found >= 6
    assert (half[ends[0]] != half[ends[1]]).sum() == 4, "two edges, in both directions"


def test_two_parts_stay_as_they_are():
    graph = WeightedGraph(np.array([0, 1, 2]), np.array([1, 0], np.int32), np.ones(1, np.int32), np.ones((1, 1)))
    assert numbered(graph, np.array([1, 0], np.int16), 2).tolist() == [1, 0]
