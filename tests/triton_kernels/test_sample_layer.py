"""Layer-wise sampling: bit-equal to plain Python, exact probabilities, unbiased sums; states' reuse; bad input."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.graph import CSC, build_csc
from lightning_gnnscale.rng import batch_key
from lightning_gnnscale.triton_kernels.sample_layer import (
    check_layer_sizes,
    sample_layers,
)
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace
from tests.oracles.sample_layers import inclusion_probabilities, sample_layers_reference
from tests.says import said


def random_graph(num_nodes, num_edges, seed, skew=2.0) -> CSC:
    """Edges with a few hubs among the sources, some empty rows, self-loops and repeats."""
    random = np.random.default_rng(seed)
    src = (random.random(num_edges) ** skew * num_nodes).astype(np.int64)
    return build_csc(src, (random.random(num_edges) ** 1.3 * num_nodes).astype(np.int64), num_nodes)


def same(one, other):
    for name in ("n_id", "edge_index", "indptr", "e_id", "edge_weight"):
        a, b = getattr(one, name), getattr(other, name)
        assert a.dtype == b.dtype and np.array_equal(a, b), name
    assert one.num_sampled_nodes == other.num_sampled_nodes
    assert one.num_sampled_edges == other.num_sampled_edges


graphs = st.builds(
    random_graph, st.integers(1, 40), st.integers(0, 200), st.integers(0, 99), st.sampled_from([1.0, 3.0])
)


@given(graphs, st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(0, 2**64 - 1), st.data())
def test_equals_plain_python_bit_for_bit(csc, sizes, key, data):
    seeds = np.array(data.draw(st.lists(st.integers(0, csc.num_rows - 1), unique=True, max_size=8)), np.int64)
    preferred, scale = None, 1.0
    if data.draw(st.booleans()):
        preferred = [np.random.default_rng(hop).random(csc.num_rows) < 0.3 for hop in range(len(sizes))]
        scale = data.draw(st.sampled_from([1.0, 2.0, 7.5]))
    options = {"preferred": preferred, "scale": scale}
    same(
        sample_layers(csc, seeds, sizes, key, return_e_id=True, **options),
        sample_layers_reference(csc, seeds, sizes, key, **options),
    )


def test_a_workspace_serves_batch_after_batch():
    csc, space = random_graph(300, 3000, 1), Workspace(300, np.int32)
    space.base = np.iinfo(np.int32).max - 500  # the labels start again in one of these batches
    for batch in range(20):
        seeds = np.random.default_rng(batch).choice(300, 10 + batch, replace=False)
        sampled = sample_layers(csc, seeds, [40, 5, 60], batch, return_e_id=True, workspace=space)
        same(sampled, sample_layers_reference(csc, seeds, [40, 5, 60], batch))
    assert space.base < 2**30


def test_shape_of_a_batch():
    csc = random_graph(500, 6000, 2)
    seeds, sizes = np.arange(30, 50), [50, 60, 70]
    sampled = sample_layers(csc, seeds, sizes, 5, return_e_id=True)
    assert sampled.num_sampled_nodes[:3] == [20, 50, 60]
    assert sampled.num_sampled_nodes[3] <= 70
    hops = np.cumsum([0, *sampled.num_sampled_nodes])
    edges = np.cumsum([0, *sampled.num_sampled_edges])
    source, target = sampled.edge_index
    np.testing.assert_array_equal(sampled.n_id[:20], seeds)
    np.testing.assert_array_equal(target, np.repeat(np.arange(hops[3]), np.diff(sampled.indptr)))
    np.testing.assert_array_equal(csc.indices[sampled.e_id], sampled.n_id[source])
    row = sampled.n_id[target]
    assert ((csc.indptr[row] <= sampled.e_id) & (sampled.e_id < csc.indptr[row + 1])).all()
    for hop in range(3):
        span = slice(edges[hop], edges[hop + 1])
        assert ((hops[hop] <= target[span]) & (target[span] < hops[hop + 1])).all()
        own = sampled.n_id[hops[hop] : hops[hop + 1]]
        assert len(np.unique(own)) == len(own)
        if hop < 2:  # edges of a hop come from the entries of that hop
            assert ((hops[hop + 1] <= source[span]) & (source[span] < hops[hop + 2])).all()
    assert len(np.unique(sampled.n_id[source[edges[2] :]])) == 70
    assert not set(sampled.n_id[hops[3] :]) & set(sampled.n_id[: hops[3]])  # the last hop holds no node a second time


def test_few_candidates_are_taken_whole():
    csc = CSC(np.array([0, 3, 3, 4, 6]), np.array([1, 2, 3, 0, 1, 1], np.int32))
    sampled = sample_layers(csc, np.array([0, 1, 3]), [5], 9, return_e_id=True)
    assert sampled.n_id.tolist() == [0, 1, 3, 2]
    assert sampled.edge_index.tolist() == [[1, 3, 2, 1, 1], [0, 0, 0, 2, 2]]
    assert sampled.indptr.tolist() == [0, 3, 3, 5]
    np.testing.assert_array_equal(sampled.edge_weight, np.float32([1 / 3, 1 / 3, 1 / 3, 0.5, 0.5]))


def test_importance_by_hand():
    """Rows 0 = {2, 3} and 1 = {2, 4, 5, 6}: q_2 = 1/4 + 1/16, q_3 = 1/4, others 1/16; of 3 nodes, 2 and 3 are sure."""
    csc = CSC(np.array([0, 2, 6, 6, 6, 6, 6, 6]), np.array([2, 3, 2, 4, 5, 6], np.int32))
    for key in range(20):
        sampled = sample_layers(csc, np.array([0, 1]), [3], key)
        third = int(sampled.n_id[-1])
        assert sampled.n_id[:4].tolist() == [0, 1, 2, 3] and third in (4, 5, 6)
        np.testing.assert_allclose(sampled.edge_weight, [0.5, 0.5, 0.25, 0.75], rtol=1e-6)  # pi of the third is 1 / 3


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=60), st.integers(1, 60))
def test_probabilities_add_up_and_keep_proportions(values, size):
    importance = dict(enumerate(values))
    probability = inclusion_probabilities(importance, size)
    total = sum(probability.values())
    assert abs(total - min(size, len(values))) < 1e-9
    assert all(0 < p <= 1 for p in probability.values())
    below = [(importance[j], p) for j, p in probability.items() if p < 1]
    if below:
        factor = below[0][1] / below[0][0]
        assert all(abs(p - factor * q) < 1e-9 for q, p in below)
        assert all(factor * importance[j] >= 1 - 1e-9 for j, p in probability.items() if p == 1)


KEYS = 4000


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_every_candidate_comes_with_its_probability(scale):
    """Counts over 4,000 keys are binomial. 250 candidates a case, |z| < 5: error rate 250 * 6e-7 = 1.5e-4."""
    csc, seeds, size = random_graph(300, 3000, 3), np.arange(25), 60
    preferred = [np.arange(300) % 7 == 0]
    share = 1 / np.maximum(csc.in_degree, 1)
    importance = {}
    for v in seeds:
        for j in csc.indices[csc.indptr[v] : csc.indptr[v + 1]].tolist():
            importance[j] = importance.get(j, 0) + int(2**40 * share[v] ** 2 * (scale if preferred[0][j] else 1))
    probability = inclusion_probabilities(importance, size)
    assert 60 < len(probability) <= 250 and 0 < sum(p == 1 for p in probability.values()) < 60
    counts, space = np.zeros(300), Workspace(300, np.int32)
    for key in range(KEYS):
        sampled = sample_layers(
            csc, seeds, [size], batch_key(0, 0, 0, key), preferred=preferred, scale=scale, workspace=space
        )
        nodes = np.unique(sampled.n_id[sampled.edge_index[0]])
        assert len(nodes) == size
        counts[nodes] += 1
    for j, p in probability.items():
        spread = np.sqrt(p * (1 - p) * KEYS)
        assert abs(counts[j] - p * KEYS) <= 5 * spread + 1e-6 * KEYS
    assert counts.sum() == KEYS * size


def propagate(sampled, x, num_layers):
    """Apply the sampled averaging matrix num_layers times, trimmed by hops, and return the seeds' rows."""
    source, target = sampled.edge_index
    h = x[sampled.n_id]
    for layer in range(num_layers):
        num_rows = sum(sampled.num_sampled_nodes[: num_layers - layer])
        num_edges = int(sampled.indptr[num_rows])
        h = np.bincount(target[:num_edges], sampled.edge_weight[:num_edges] * h[source[:num_edges]], num_rows)
    return h


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_a_stack_of_linear_layers_is_unbiased(num_layers, scale):
    """Seeds that are each other's neighbours, on a dense graph. 6 cases of 20 seeds, |z| < 5: error rate 7e-5.

    Means of 4,000 batches are normal enough: single values are bounded sums of about 40 sampled rows a layer.
    """
    csc, seeds = random_graph(60, 900, 4, skew=1.5), np.arange(20)
    x = np.random.default_rng(5).normal(size=60) + 1
    matrix = np.zeros((60, 60))
    np.add.at(matrix, (np.repeat(np.arange(60), csc.in_degree), csc.indices), 1)
    matrix /= np.maximum(csc.in_degree, 1)[:, None]
    expected = np.linalg.matrix_power(matrix, num_layers) @ x
    preferred, space = [np.arange(60) % 5 == hop for hop in range(num_layers)], Workspace(60, np.int32)
    values = np.empty((KEYS, 20))
    for key in range(KEYS):
        sampled = sample_layers(
            csc, seeds, [25] * num_layers, batch_key(1, 0, 0, key), preferred=preferred, scale=scale, workspace=space
        )
        values[key] = propagate(sampled, x, num_layers)
    z = (values.mean(axis=0) - expected[:20]) / (values.std(axis=0) / np.sqrt(KEYS) + 1e-12)
    assert np.abs(z).max() < 5, z
    assert (values.std(axis=0) > 0).sum() >= 15


def test_preferred_nodes_come_more_often():
    csc, seeds, preferred = random_graph(400, 6000, 6), np.arange(40), [np.arange(400) % 4 == 0]
    shares = []
    for scale in (1.0, 2.0, 8.0):
        nodes = [sample_layers(csc, seeds, [80], key, preferred=preferred, scale=scale) for key in range(50)]
        shares.append(np.mean([preferred[0][np.unique(d.n_id[d.edge_index[0]])].mean() for d in nodes]))
    assert shares[0] < shares[1] < shares[2]
    assert shares[0] < 0.35 and shares[2] > 0.6


def test_scale_one_samples_as_without_preference():
    csc, seeds = random_graph(200, 2000, 7), np.arange(20)
    preferred = [np.arange(200) % 3 == 0] * 2
    same(
        sample_layers(csc, seeds, [30, 30], 3, preferred=preferred, scale=1.0, return_e_id=True),
        sample_layers(csc, seeds, [30, 30], 3, return_e_id=True),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": [0, 9]}, "seeds [0, 9) 0 9"),
        ({"seeds": [-1]}, "-1 -1"),
        ({"seeds": [1, 1, 2]}, "1 repeats 3"),
        ({"nodes_per_layer": [4, 0]}, "nodes_per_layer[1] >= 1 0"),
        ({"scale": 0.5}, "scale >= 1 0.5"),
        ({"preferred": [np.ones(9, bool)]}, "2 hops"),
        ({"preferred": [np.ones(8, bool)] * 2}, "shape (9,)"),
        ({"workspace": Workspace(3, np.int32)}, "3 int32 9"),
    ],
)
def test_refuses(arguments, message):
    given = {"csc": random_graph(9, 30, 8), "seeds": [0], "nodes_per_layer": [3, 3], "key": 0} | arguments
    given["seeds"] = np.array(given["seeds"])
    with pytest.raises(ValueError, match=said(message)):
        sample_layers(**given)


def test_layer_sizes():
    assert check_layer_sizes(64) == (64, 64)
    assert check_layer_sizes(64, 3) == (64, 64, 64)
    assert check_layer_sizes([8, 4]) == check_layer_sizes([8, 4], 2) == (8, 4)
    assert check_layer_sizes(np.int64(5), 1) == (5,)
    for arguments, message in [
        ((0,), "nodes_per_layer >= 1 0"),
        ((2.5,), "2.5"),
        (("64",), "'64'"),
        (([],), "at least one hop"),
        (([3, True],), "nodes_per_layer[1]"),
        ((4, 0), "num_layers >= 1 0"),
        (([4, 4], 3), "num_layers 3 2"),
    ]:
        with pytest.raises(ValueError, match=said(message)):
            check_layer_sizes(*arguments)
