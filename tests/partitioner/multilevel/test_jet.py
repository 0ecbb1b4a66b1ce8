import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner.multilevel import refinement
from lightning_gnnscale.partitioner.multilevel import weighted_graph as threads_module
from lightning_gnnscale.partitioner.multilevel.refinement import JetSpace, refine
from lightning_gnnscale.partitioner.multilevel.row_form import RowSteps
from lightning_gnnscale.partitioner.multilevel.weighted_graph import RowThreads
from tests.oracles.jet import jet
from tests.partitioner.multilevel.graphs import cut_graphs, cut_of, loads_of, weighted_graph, weighted_graphs


def run(graph, part, cap, seed=0, num_threads=1, loss=0.25, patience=3, max_rounds=20):
    """Return (parts, loads as they were kept, cut, balanced)."""
    part = np.array(part, np.int16)
    load = loads_of(graph, part, len(cap))
    threads = RowThreads(num_threads)
    space = JetSpace.empty(graph.num_nodes + 3).first(graph.num_nodes)
    for array in space:
        array[:] = 1  # whatever an earlier level left there
    cut, balanced = refine(graph, part, load, cap, seed, threads, space, loss, patience, max_rounds)
    threads.close()
    return part, load, cut, balanced


def starts(graph, num_parts):
    return st.lists(st.integers(0, num_parts - 1), min_size=graph.num_nodes, max_size=graph.num_nodes)


@given(graph=weighted_graphs(min_nodes=2), num_parts=st.integers(2, 4), data=st.data())
def test_without_balance_equals_the_oracle(graph, num_parts, data):
    start = data.draw(starts(graph, num_parts))
    loss = data.draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
    patience, max_rounds = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 9))
    weights = np.broadcast_to(graph.edge_weight, len(graph.indices)).tolist()
    entries = list(zip(graph.indices.tolist(), weights, strict=True))
    rows = [entries[a:b] for a, b in zip(graph.indptr[:-1], graph.indptr[1:], strict=True)]
    no_cap = np.full((num_parts, graph.node_weight.shape[1]), 1 << 40)
    part, _, cut, balanced = run(graph, start, no_cap, 0, 1, loss, patience, max_rounds)
    assert balanced
    assert (part.tolist(), cut) == jet(rows, start, loss, patience, max_rounds)


@given(graph=cut_graphs(min_nodes=2), num_parts=st.integers(2, 4), data=st.data())
def test_a_balanced_start_never_gets_worse_and_figures_are_those_counted(graph, num_parts, data):
    start = np.array(data.draw(starts(graph, num_parts)))
    load = loads_of(graph, start, num_parts)
    slack = data.draw(st.integers(0, 4))
    cap = np.maximum(1, data.draw(st.sampled_from([load, load.max(axis=0) + 0 * load])) + slack)
    seed = data.draw(st.integers(0, 9))
    part, kept_load, cut, balanced = run(graph, start, cap, seed)
    assert balanced
    assert cut <= cut_of(graph, start)
    assert cut == cut_of(graph, part)
    assert np.array_equal(kept_load, loads_of(graph, part, num_parts))
    assert (kept_load <= cap).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads_module, "MIN_ENTRIES", 2)
        assert np.array_equal(run(graph, start, cap, seed, 2)[0], part)  # nor do threads matter
        # nor blocks, where graphs on disk are rebalanced as those in memory
        patch.setattr(refinement, "FEW_LOOSE_ROUNDS", refinement.LOOSE_ROUNDS)
        patch.setattr(refinement, "INNER", 1.0)
        patch.setattr(refinement, "STALLED", np.inf)
        assert np.array_equal(run(graph.whole, start, cap, seed)[0], run(graph, start, cap, seed)[0])


@given(graph=weighted_graphs(min_nodes=2), num_parts=st.integers(2, 4), data=st.data())
def test_any_start_ends_with_true_figures(graph, num_parts, data):
    start = data.draw(starts(graph, num_parts))
    mean = -(-loads_of(graph, np.array(start), num_parts).sum(axis=0) // num_parts)
    cap = np.repeat(np.maximum(1, mean + data.draw(st.integers(0, 3)))[None], num_parts, axis=0)
    part, kept_load, cut, balanced = run(graph, start, cap)
    assert cut == cut_of(graph, part)
    assert np.array_equal(kept_load, loads_of(graph, part, num_parts))
    assert balanced == (kept_load <= cap).all()
    if graph.node_weight.shape == (1, 1):  # nodes that weigh one always fit
        assert balanced


def test_a_clique_split_in_two_is_put_together_again():
    """Single moves that gain are none at first: Jet lets several nodes go at a loss, together."""
    cliques = [(10 * c + u, 10 * c + v) for c in range(4) for u in range(10) for v in range(u)]
    graph = weighted_graph(40, [*cliques, (0, 10), (20, 30), (5, 35)])
    start = np.repeat([0, 1, 1, 0, 1, 0, 0, 1], 5)
    part, _, cut, balanced = run(graph, start, np.array([[24], [24]]), loss=0.75, patience=8, max_rounds=60)
    assert balanced
    assert cut <= 2
    assert cut == cut_of(graph, part)


def test_overfull_parts_are_emptied_before_the_cut_counts():
    graph = weighted_graph(30, [(v, v + 1) for v in range(29)])
    _, load, cut, balanced = run(graph, np.zeros(30, int), np.array([[10], [10], [10]]))
    assert balanced
    assert load.tolist() == [[10], [10], [10]]
    assert cut <= 6


def test_what_is_read_along_the_border_is_what_all_rows_tell():
    ring = [(v, (v + 1) % 400) for v in range(400)]
    chords = [(v, (v + 7) % 400) for v in range(0, 400, 3)]
    graph, sample = weighted_graph(400, {(u, v): 1 + (u * v) % 5 for u, v in ring + chords}), np.random.default_rng(0)
    part, price, threads = np.repeat(np.arange(4), 100).astype(np.int16), np.zeros((4, 1)), RowThreads(1)
    steps, moved = RowSteps(graph, threads), np.zeros(400, bool)
    for num_moves in (0, 3, 0, 40, 1, 0):
        part[sample.integers(0, 400, num_moves)] = sample.integers(0, 4)
        target, gain = np.full((2, 400), 9, np.int16), np.zeros((2, 400))
        cuts = [
            one.select(part, price, 0.5, target[i], gain[i], moved)
            for i, one in enumerate((steps, RowSteps(graph, threads)))
        ]
        assert cuts[0] == cuts[1] == cut_of(graph, part) == steps.cut(part)
        assert np.array_equal(*target) and np.array_equal(*np.where(target >= 0, gain, 0))
        assert 0 < np.count_nonzero(steps._border) < 300


@given(graph=weighted_graphs(min_nodes=2), num_parts=st.sampled_from([2, 3, 40]), data=st.data())
def test_a_candidate_goes_to_the_best_of_all_parts(graph, num_parts, data):
    part, threads = np.array(data.draw(starts(graph, num_parts)), np.int16), RowThreads(1)
    prices = st.lists(st.sampled_from([0.0, 0.25, 1.5]), min_size=num_parts, max_size=num_parts)
    price = np.repeat(np.array(data.draw(prices))[:, None], graph.node_weight.shape[1], axis=1)
    target, gain, rests = (
        np.empty(graph.num_nodes, np.int16),
        np.empty(graph.num_nodes),
        np.zeros(graph.num_nodes, bool),
    )
    assert RowSteps(graph, threads).select(part, price, 0.5, target, gain, rests) == cut_of(graph, part)
    entry_weights = np.broadcast_to(graph.edge_weight, len(graph.indices))
    node_weights = np.broadcast_to(graph.node_weight, (graph.num_nodes, price.shape[1]))
    for v in range(graph.num_nodes):
        some, own = slice(graph.indptr[v], graph.indptr[v + 1]), part[v]
        conn = np.bincount(part[graph.indices[some]], entry_weights[some], num_parts)
        scores = np.where(conn > 0, conn - (price - price[own]) @ node_weights[v], -np.inf)
        scores[own] = -np.inf
        best = scores.argmax()  # the first of equals
        gained = scores[best] - conn[own]
        assert target[v] == (best if gained >= 0 or -gained < 0.5 * conn[own] else -1)
        assert target[v] < 0 or gain[v] == gained
