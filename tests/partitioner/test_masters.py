import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner import partition
from lightning_gnnscale.partitioner.vertex_cut import MASTERS, assign_masters
from tests.oracles.masters import master_parts
from tests.partitioner.graphs import simple_graphs, stream_of

RULES = sorted(MASTERS)


def masters_of(src, dst, part, num_nodes, num_parts, rule, seed=0, block=7):
    src, dst, part = (np.asarray(values, np.int32) for values in (src, dst, part))
    degree = np.bincount(np.append(src, dst), minlength=num_nodes).astype(np.int32)
    masters = MASTERS[rule](degree, num_parts, seed)
    for first in range(0, len(src), block):
        masters.watch(*(values[first : first + block] for values in (src, dst, part)), num_parts)
    return assign_masters(masters, num_parts)


@given(graph=simple_graphs(), num_parts=st.sampled_from([1, 2, 5, 16, 17, 40, 300]), data=st.data())
def test_every_rule_equals_the_oracle(graph, num_parts, data):
    num_nodes, edges = graph
    seed = data.draw(st.integers(0, 2**40))
    parts = data.draw(st.lists(st.integers(0, num_parts - 1), min_size=len(edges), max_size=len(edges)))
    placed = [(u, v, part) for (u, v), part in zip(edges, parts, strict=True)]
    src, dst = [u for u, _ in edges], [v for _, v in edges]
    for rule in RULES:
        expected = master_parts(placed, num_nodes, num_parts, rule, seed)
        assert masters_of(src, dst, parts, num_nodes, num_parts, rule, seed).tolist() == expected


@pytest.mark.parametrize("num_parts", [3, 40, 300])
@pytest.mark.parametrize("base", [256, 65_536])
def test_majority_counts_beyond_one_digit(num_parts, base):
    part = np.repeat([0, 1, 2], [base - 1, base + 1, base])  # the lowest digits are base - 1, 1 and 0
    part = np.random.default_rng(0).permutation(part)
    leaf = 1 + np.arange(len(part)) % (len(part) // 4)
    found = masters_of(np.zeros(len(part)), leaf, part, 1 + leaf.max(), num_parts, "majority", block=1 << 16)
    counts = np.zeros((len(found), num_parts), np.int64)
    np.add.at(counts, (leaf, part), 1)
    assert found[0] == 1
    assert found[1:].tolist() == counts[1:].argmax(axis=1).tolist()


@pytest.mark.parametrize("num_parts", [256, 257, 65_536, 65_537])
@pytest.mark.parametrize("rule", RULES)
def test_part_ids_of_any_width(num_parts, rule):
    found = masters_of([0, 0, 0], [1, 2, 3], [0, num_parts - 1, num_parts - 1], 4, num_parts, rule)
    assert found[1:].tolist() == [0, num_parts - 1, num_parts - 1]
    assert found[0] == num_parts - 1 or (rule == "random" and found[0] == 0)


def test_random_masters_are_uniform_and_follow_the_seed():
    num_nodes, num_parts = 3000, 3
    src = np.arange(num_nodes).repeat(4)  # three edges in part 0, one in part 2, none in part 1
    dst = np.full(len(src), num_nodes)
    part = np.tile([0, 0, 2, 0], num_nodes)
    one, other = (masters_of(src, dst, part, num_nodes + 1, num_parts, "random", seed)[:-1] for seed in (1, 2))
    for found in (one, other):
        counts = np.bincount(found, minlength=3)
        assert counts[1] == 0
        assert abs(int(counts[0]) - 1500) < 5 * np.sqrt(3000 / 4)  # five standard deviations
    assert (one != other).mean() > 0.4


def test_nodes_without_an_edge_even_out_the_parts():
    path = [(u, u + 1) for u in range(300)]  # with a weight of 1 HDRF keeps it in one part
    p = partition(stream_of(path, 1000, layout="once"), "hdrf", 7, evaluate=False)
    assert (p.part_id[:301] == 0).all()
    sizes = np.bincount(p.part_id[301:], minlength=7)
    assert sizes[0] == 0
    assert sizes[1:].max() - sizes[1:].min() <= 1


@pytest.mark.parametrize("method", ["dbh", "hdrf", "powergraph", "two_phase"])
def test_an_unknown_rule_is_named(method):
    message = "partitioner.masters must be one of majority, last, random, got 'first'"
    with pytest.raises(ValueError, match=message):
        partition(stream_of([(0, 1)], 2), method, 2, masters="first")
