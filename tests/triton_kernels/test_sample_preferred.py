"""Sampling with a preference: the keyed oracle bit for bit, exact probabilities, unbiased sums, and what is refused."""

import os
import subprocess
import sys
from fractions import Fraction
from math import ceil, floor, sqrt
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampled_graphs import random_csc, star

from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace, sample_neighbors, split_rows
from lightning_gnnscale.triton_kernels.sample_neighbors.reference import sample_neighbors_reference
from tests.says import said

ERROR_RATE = 1e-6  # of a false alarm over all comparisons of one statistical test


def assert_same(mine, other):
    for name, value in mine._asdict().items():
        if isinstance(value, list) or value is None:
            assert value == getattr(other, name), name
        else:
            np.testing.assert_array_equal(value, getattr(other, name), err_msg=name)
            assert value.dtype == (np.float32 if name == "edge_weight" else np.int64), name


def probabilities(num_first, num_rest, fanout, scale) -> tuple[Fraction, Fraction]:
    """Equation (8) with cap and redistribution, in rational numbers; fanout < num_first + num_rest."""
    first, rest = scale * Fraction(fanout) / (scale * num_first + num_rest), None
    if first > 1:
        first, rest = Fraction(1), Fraction(fanout - num_first, num_rest)
    return first, first / scale if rest is None else rest


@given(
    num_nodes=st.integers(1, 120),
    num_edges=st.integers(0, 1500),
    fanouts=st.lists(st.sampled_from([-1, 1, 2, 3, 7, 15, 70]), min_size=1, max_size=3),
    key=st.integers(0, 2**64 - 1),
    scale=st.sampled_from([1.0, 1.0625, 1.5, 2.0, 3.7, 8.0, 1e6]),
    share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    hub=st.booleans(),
    dtype=st.sampled_from([np.int32, np.int64]),
)
def test_equals_the_keyed_oracle(num_nodes, num_edges, fanouts, key, scale, share, hub, dtype):
    rng = np.random.default_rng(key)
    csc = random_csc(num_nodes, num_edges, seed=key % 97, hub=hub, dtype=dtype)
    seeds = rng.permutation(num_nodes)[: max(1, num_nodes // 3)]
    preferred = [rng.random(num_nodes) < share for _ in fanouts]
    split = [split_rows(csc, inside, with_position=True) for inside in preferred]
    mine = sample_neighbors(csc, seeds, fanouts, key, return_e_id=True, split=split, scale=scale)
    assert_same(mine, sample_neighbors_reference(csc, seeds, fanouts, key, preferred=preferred, scale=scale))
    source, target = mine.edge_index
    np.testing.assert_array_equal(csc.indices[mine.e_id], mine.n_id[source])
    np.testing.assert_array_equal(np.searchsorted(csc.indptr, mine.e_id, side="right") - 1, mine.n_id[target])
    unseen = sample_neighbors(csc, seeds, fanouts, key, split=[s._replace(position=None) for s in split], scale=scale)
    assert_same(unseen, mine._replace(e_id=None))


@given(num_nodes=st.integers(1, 60), num_edges=st.integers(0, 500), seed=st.integers(0, 10**6), position=st.booleans())
def test_rows_are_split_in_order(num_nodes, num_edges, seed, position):
    csc = random_csc(num_nodes, num_edges, seed)
    inside = np.random.default_rng(seed + 1).random(num_nodes) < 0.4
    split = split_rows(csc, inside, position)
    assert (split.position is not None) == position
    for node in range(num_nodes):
        row = csc.indices[csc.indptr[node] : csc.indptr[node + 1]].tolist()
        order = sorted(range(len(row)), key=lambda i: (not inside[row[i]], i))
        at = slice(csc.indptr[node], csc.indptr[node + 1])
        assert split.indices[at].tolist() == [row[i] for i in order]
        assert split.num_inside[node] == sum(inside[u] for u in row)
        if position:
            assert split.position[at].tolist() == order


def test_scale_1_samples_the_bits_of_no_preference():
    csc = random_csc(200, 4000, hub=True)
    split = [split_rows(csc, np.arange(200) < 30)] * 2
    for key in range(10):
        mine = sample_neighbors(csc, np.arange(20), [6, 3], key, split=split, scale=1.0, return_e_id=True)
        assert_same(mine, sample_neighbors(csc, np.arange(20), [6, 3], key, return_e_id=True))
        assert mine.edge_weight is None


def test_whole_rows_weigh_one_over_their_length():
    csc = random_csc(100, 1500, seed=2)
    split = [split_rows(csc, np.arange(100) < 30)] * 2
    for fanouts in ([-1, -1], [int(csc.in_degree.max())] * 2):
        mine = sample_neighbors(csc, np.array([3, 50]), fanouts, 1, split=split, scale=8.0)
        plain = sample_neighbors(csc, np.array([3, 50]), fanouts, 1)
        assert sorted(mine.n_id) == sorted(plain.n_id)
        np.testing.assert_array_equal(np.diff(mine.indptr), csc.in_degree[mine.n_id[: len(mine.indptr) - 1]])
        counts = np.diff(mine.indptr)
        np.testing.assert_array_equal(mine.edge_weight, np.repeat(1 / np.maximum(counts, 1), counts).astype(np.float32))


CASES = [  # neighbours in Q, others, fan-out, scale
    (4, 8, 5, 2.0),
    (3, 9, 9, 2.0),
    (2, 10, 5, 8.0),  # capped: all of Q
    (30, 34, 6, 3.0),
    (30, 34, 60, 1.5),
    (5, 60, 6, 4.0),
    (80, 70, 8, 8.0),  # both groups beyond a register
    (100, 20, 70, 2.0),
    (12, 0, 5, 8.0),
    (0, 12, 5, 8.0),
]


@pytest.mark.parametrize(("num_first", "num_rest", "fanout", "scale"), CASES)
def test_probabilities_are_exact_and_weights_undo_them(num_first, num_rest, fanout, scale):
    """Over 4,000 keys: every neighbour as often as equation (8) says, every row of exactly `fanout` edges.

    The bound is the two-sided normal one at ERROR_RATE, shared out over the neighbours.
    """
    num_keys, degree = 4000, num_first + num_rest
    inside = np.zeros(degree + 1, bool)
    inside[1 + np.random.default_rng(degree).permutation(degree)[:num_first]] = True
    csc, space = star(degree), Workspace(degree + 1, np.int32)
    split = [split_rows(csc, inside, True)]
    hits, first_count = np.zeros(degree, np.int64), np.zeros(num_keys, np.int64)
    probability_first, probability_rest = probabilities(num_first, num_rest, fanout, Fraction(scale))
    expected = np.where(inside[1:], float(probability_first), float(probability_rest))
    for key in range(num_keys):
        sampled = sample_neighbors(
            csc, np.array([0]), [fanout], key, return_e_id=True, workspace=space, split=split, scale=scale
        )
        assert len(np.unique(sampled.e_id)) == len(sampled.e_id) == fanout
        np.testing.assert_allclose(sampled.edge_weight, 1 / (degree * expected[sampled.e_id]), rtol=1e-6)
        hits[sampled.e_id] += 1
        first_count[key] = inside[1:][sampled.e_id].sum()
    mean = num_first * probability_first
    assert set(first_count.tolist()) <= {floor(mean), ceil(mean)}
    uncertain = (expected > 0) & (expected < 1)
    assert (hits[expected == 1] == num_keys).all()
    if uncertain.any():
        deviation = np.sqrt(num_keys * expected * (1 - expected))[uncertain]
        score = (hits - num_keys * expected)[uncertain] / deviation
        assert np.abs(score).max() < NormalDist().inv_cdf(1 - ERROR_RATE / (2 * uncertain.sum()))


@pytest.mark.parametrize("hop", [0, 1])
def test_a_hop_of_weighted_sums_is_unbiased(hop):
    """Invariant 6, hop by hop: the mean over keys of the weighted sum is the mean over all neighbours."""
    csc = random_csc(150, 2500, seed=1, hub=True)
    value = np.random.default_rng(2).normal(size=150)
    seeds = np.array([0, 3, 17, 60])  # node 0 is the hub: the filter's path
    exact = np.array([value[csc.indices[csc.indptr[v] : csc.indptr[v + 1]]].mean() for v in seeds])
    preferred = [np.arange(150) < 30, np.arange(150) % 4 == 0]
    split = [split_rows(csc, inside) for inside in preferred][hop:]
    space, results = Workspace(150, np.int32), []
    for key in range(4000):
        sampled = sample_neighbors(csc, seeds, [4, 3][hop:], key, workspace=space, split=split, scale=8.0)
        messages = sampled.edge_weight * value[sampled.n_id[sampled.edge_index[0]]]
        results.append(np.bincount(sampled.edge_index[1], messages, len(sampled.indptr) - 1)[: len(seeds)])
    assert_mean(np.array(results), exact)


def test_two_hops_of_weighted_sums_are_unbiased():
    csc = random_csc(150, 2500, seed=1, hub=True)
    value = np.random.default_rng(2).normal(size=150)
    seeds, degree = np.array([0, 3, 17, 60]), np.maximum(csc.in_degree, 1)
    full = np.add.reduceat(np.append(value[csc.indices], 0), csc.indptr[:-1]) / degree
    full[csc.in_degree == 0] = 0
    exact = np.array([full[csc.indices[csc.indptr[v] : csc.indptr[v + 1]]].mean() for v in seeds])
    split = [split_rows(csc, np.arange(150) < 30), split_rows(csc, np.arange(150) % 4 == 0)]
    space, results = Workspace(150, np.int32), []
    for key in range(4000):
        sampled = sample_neighbors(csc, seeds, [4, 3], key, workspace=space, split=split, scale=4.0)
        source, target = sampled.edge_index
        inner = np.bincount(target, sampled.edge_weight * value[sampled.n_id[source]], len(sampled.n_id))
        first = slice(0, sampled.num_sampled_edges[0])
        results.append(np.bincount(target[first], sampled.edge_weight[first] * inner[source[first]], len(seeds)))
    assert_mean(np.array(results), exact)


def assert_mean(results, exact):
    """Every mean over keys within the two-sided normal bound at ERROR_RATE, shared out over the columns."""
    error = results.std(0, ddof=1) / sqrt(len(results))
    bound = NormalDist().inv_cdf(1 - ERROR_RATE / (2 * len(exact)))
    assert (np.abs(results.mean(0) - exact) / error).max() < bound


def test_fewer_reads_outside_of_the_set():
    csc = random_csc(20_000, 600_000, seed=5)
    inside = np.random.default_rng(0).random(20_000) < 0.1
    split, outside = [split_rows(csc, inside)] * 2, []
    for scale in (1.0, 2.0, 8.0):
        sampled = sample_neighbors(csc, np.arange(20), [10, 5], 3, split=split, scale=scale)
        outside.append((~inside[sampled.n_id]).sum())
    assert outside[0] > 1.05 * outside[1] > 1.05**2 * outside[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0.5}, "scale >= 1 0.5"),
        ({"scale": float("inf")}, "scale >= 1 inf"),
        ({"replace": True}, "preference samples replacement"),
        ({"fanouts": [2, 2]}, "split 2 1"),
        ({"return_e_id": True}, "return_e_id positions split"),
        ({"split": [split_rows(random_csc(4, 10), np.ones(4, bool))]}, "split 4 10 int32"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message):
    csc = random_csc(5, 10)
    given = {"fanouts": [2], "split": [split_rows(csc, np.ones(5, bool))], "scale": 2.0} | arguments
    with pytest.raises(ValueError, match=said(message)):
        sample_neighbors(csc, np.array([0]), given.pop("fanouts"), 0, **given)


UNCOMPILED = """
import numpy as np
np.seterr(over="ignore")
from lightning_gnnscale.graph import CSC
from lightning_gnnscale.triton_kernels.sample_neighbors import sample_neighbors, split_rows
degree = np.array([0, 3, 64, 150, 12])
csc = CSC(np.concatenate([[0], np.cumsum(degree)]), np.random.default_rng(0).integers(0, 5, degree.sum(), np.int32))
split = [split_rows(csc, np.arange(5) % 2 == 1, True)] * 2
for scale in (1.5, 8.0):
    sampled = sample_neighbors(csc, np.array([3, 2]), [8, 60], 5, split=split, scale=scale, return_e_id=True)
    print(*(array.tolist() for array in sampled if isinstance(array, np.ndarray)))
"""


@pytest.mark.sweep
def test_compiled_and_uncompiled_code_agree(capsys):
    """Compiled code would read out of bounds in silence; plain Python would raise."""
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    run = subprocess.run([sys.executable, "-c", UNCOMPILED], env=env, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    with np.errstate(over="ignore"):
        exec(UNCOMPILED, {})
    assert capsys.readouterr().out == run.stdout
