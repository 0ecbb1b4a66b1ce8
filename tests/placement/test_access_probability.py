"""Access probabilities: plain-Python counts, and what sampled batches really read."""

from types import SimpleNamespace

import numpy as np
import pytest
from test_place import graph, power_law

from lightning_gnnscale.graph import build_csc
from lightning_gnnscale.placement import access_probability
from lightning_gnnscale.placement.access_probability import epoch_batches, layer_probability, sampled_probability
from lightning_gnnscale.triton_kernels.sample_layer import sample_layers
from tests.says import said


def within(csc, node, hops):
    reached = {node}
    for _ in range(hops):
        reached |= {int(u) for v in reached for u in csc.indices[csc.indptr[v] : csc.indptr[v + 1]]}
    return reached


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_reach_counts_training_nodes(num_layers):
    store, train = power_law(200, 300), np.array([3, 50, 51, 199])
    expected = np.zeros(200)
    for node in train:
        expected[list(within(store.csc, node, num_layers))] += 1
    got = access_probability(store, train, num_layers, method="reach")
    assert got.dtype == np.float32 and np.allclose(got, expected / 4)


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_paths_are_powers_of_the_adjacency_with_self_loops(num_layers):
    store, train = power_law(200, 300), np.array([3, 50, 51, 199])
    dense = np.eye(200)
    for v in range(200):
        np.add.at(dense[v], store.csc.indices[store.csc.indptr[v] : store.csc.indptr[v + 1]], 1)
    paths = np.isin(np.arange(200), train) @ np.linalg.matrix_power(dense, num_layers)
    assert np.allclose(access_probability(store, train, num_layers, method="paths"), paths / paths.max(), rtol=1e-6)


def test_vip_on_a_star_by_hand():
    # Leaves 1 to 4 read the hub 0; the hub reads all of them.
    store = graph(np.array([[0, 0, 0, 0], [1, 2, 3, 4]]), 5)
    got = access_probability(store, np.array([1, 2]), method="vip", fanouts=[1, 2], batch_size=1)
    # Hop 1: the hub, unless neither leaf is a seed, each with probability 1/2. Hop 2: two of the hub's four leaves.
    hub = 1 - (1 - 0.5) ** 2
    assert got[0] == pytest.approx(hub)
    assert got[3] == got[4] == pytest.approx(hub * 2 / 4)
    assert got[1] == pytest.approx(1 - (1 - 0.5) * (1 - hub * 2 / 4))


def test_vip_is_near_what_batches_read():
    store = power_law()
    train = np.random.default_rng(2).permutation(3000)[:600]
    options = {"fanouts": [10, 5], "batch_size": 60}
    estimated = access_probability(store, train, method="vip", **options)
    counted = access_probability(store, train, method="presample", num_epochs=20, **options)
    # 200 batches: the mean noise of a probability is at most 0.8 x 0.036; the rest is for taking reads as independent
    assert np.abs(estimated - counted).mean() < 0.029 + 0.02
    assert np.corrcoef(estimated, counted)[0, 1] > 0.95
    assert estimated.sum() == pytest.approx(counted.sum(), rel=0.1)


def test_all_neighbours_are_certain_reads():
    store, train = power_law(200, 800), np.arange(20)
    got = access_probability(store, train, method="vip", fanouts=[-1, -1], batch_size=20)
    reached = access_probability(store, train, 2, method="reach") > 0
    assert np.allclose(got, reached)
    counted = access_probability(store, train, method="presample", fanouts=[-1, -1], batch_size=20, num_epochs=1)
    assert np.array_equal(counted, reached)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "guess"}, "method vip vip_sampled presample reach paths 'guess'"),
        ({"train_nodes": np.array([5])}, "train_nodes [0, 5) 5 5"),
        ({"train_nodes": np.array([1, 1])}, "train_nodes distinct 1"),
        ({"train_nodes": np.array([], np.int64)}, "at least one"),
        ({"fanouts": [0]}, "fanouts[0] >= 1"),
        ({"batch_size": 0}, "batch_size 1 0"),
        ({"num_layers": 0, "method": "reach"}, "num_layers 1 0"),
    ],
)
def test_bad_arguments_give_one_line(change, message):
    store = graph(np.array([[0, 0, 0, 0], [1, 2, 3, 4]]), 5)
    with pytest.raises(ValueError, match=said(message)):
        access_probability(**{"store": store, "train_nodes": np.array([1]), **change})


def test_sampled_frontiers_give_the_probabilities_of_the_last_hop_by_hand():
    # Leaves 1 to 4 read the hub 0; the hub reads all of them. Seeds are leaves, so hop 1 always finds the hub.
    store = graph(np.array([[0, 0, 0, 0], [1, 2, 3, 4]]), 5)
    got = access_probability(store, np.array([1]), method="vip_sampled", fanouts=[1, 2], batch_size=1, num_batches=4)
    assert np.allclose(got, [1, 1, 0.5, 0.5, 0.5])
    one_hop = access_probability(store, np.array([0]), method="vip_sampled", fanouts=[3], batch_size=1, num_batches=2)
    assert np.allclose(one_hop, [1, 0.75, 0.75, 0.75, 0.75])


def test_sampled_frontiers_see_that_neighbours_are_found_together():
    """Cliques of 12: a seed reads its own clique again and again, which independent neighbours would overcount."""
    size, cliques = 12, 200
    inside = np.array([(u, v) for u in range(size) for v in range(size) if u != v]).T
    edges = np.concatenate([inside + size * c for c in range(cliques)], axis=1)
    num_nodes = size * cliques
    links = np.random.default_rng(0).integers(0, num_nodes, (2, num_nodes))
    store = graph(np.concatenate([edges[:, edges[0] < edges[1]], links], axis=1), num_nodes)
    train = np.arange(0, num_nodes, 4)
    options = {"fanouts": [5, 5, 5], "batch_size": 20}
    counted = access_probability(store, train, method="presample", num_epochs=40, **options)
    independent = access_probability(store, train, method="vip", **options)
    sampled = access_probability(store, train, method="vip_sampled", num_batches=64, **options)
    assert independent.sum() > 1.15 * counted.sum()
    assert sampled.sum() == pytest.approx(counted.sum(), rel=0.03)


def test_the_prior_rules_where_batches_say_little():
    """Independent edges: the formula is right, two batches are mostly noise."""
    store, train = power_law(), np.random.default_rng(2).permutation(3000)[:600]
    options = {"fanouts": [10, 5], "batch_size": 60}
    counted = access_probability(store, train, method="presample", num_epochs=20, **options)
    prior = access_probability(store, train, method="vip", **options)
    few = access_probability(store, train, method="vip_sampled", num_batches=3, **options)
    assert np.abs(few - counted).mean() < 1.1 * np.abs(prior - counted).mean()


def test_few_sampled_batches_are_refused():
    store = graph(np.array([[0, 0], [1, 2]]), 3)
    with pytest.raises(ValueError, match=said("num_batches 2 1")):
        access_probability(store, np.array([1]), method="vip_sampled", num_batches=1)


def test_samples_are_counted_and_shrunk_towards_a_prior():
    batches = [np.array([0, 1, 1]), np.array([0, 2]), np.array([0, 1]), np.array([0, 2])]
    assert np.allclose(sampled_probability(np.array([1, 0.5, 0.5, 0]), batches), [1, 0.5, 0.5, 0])
    far = sampled_probability(np.array([0, 0, 0, 1.0]), batches)
    assert np.all(np.abs(far - [1, 0.5, 0.5, 0]) < 0.5), "a prior that is far off weighs little"
    near = sampled_probability(np.array([1, 0.45, 0.55, 0]), batches)
    assert np.allclose(near, [1, 0.45, 0.55, 0]), "and one within the noise all"
    with pytest.raises(ValueError, match=said("batches 2 1")):
        sampled_probability(np.ones(4), batches[:1])


def test_layers_are_foretold_by_their_importance():
    """By hand: seed 0 reads 1, 2 and 3, of which 1 is read by two more nodes; then what LADIES samples, counted."""
    edges = np.array([[1, 2, 3, 1], [0, 0, 0, 4]])
    store = SimpleNamespace(csc=build_csc(edges[0], edges[1], 5))
    got = layer_probability(store, np.array([0]), [1], batch_size=1)
    assert np.allclose(got, [1, 1 / 3, 1 / 3, 1 / 3, 0])
    got = layer_probability(store, np.array([0, 4]), [1], batch_size=2)
    assert np.allclose(got, [1, 10 / 12, 1 / 12, 1 / 12, 1]), "1 weighs 1 / 3**2 and 1, the others 1 / 3**2"
    store, train = power_law(), np.random.default_rng(2).permutation(3000)[:600]
    counts, number = np.zeros(3000), 0
    for seeds, key in epoch_batches(train, 60, 400, 1):
        counts[np.unique(sample_layers(store.csc, seeds, [50, 50], key).n_id)] += 1
        number += 1
    foretold = layer_probability(store, train, [50, 50], 60)
    others = np.setdiff1d(np.arange(3000), train)
    assert np.corrcoef(foretold[others], counts[others])[0, 1] > 0.9
    assert foretold.sum() == pytest.approx(counts.sum() / number, rel=0.1)
