import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner.multilevel import Effort, cycle, partition_in_memory
from lightning_gnnscale.partitioner.multilevel import weighted_graph as threads_module
from lightning_gnnscale.partitioner.multilevel.cycle import level_cap, run_cycle
from lightning_gnnscale.partitioner.multilevel.refinement import JetSpace
from lightning_gnnscale.partitioner.multilevel.weighted_graph import RowThreads, part_loads
from tests.partitioner.multilevel.graphs import cut_of, loads_of, weighted_graph, weighted_graphs

QUICK = Effort(stop=4, tries=2, max_rounds=10)


@given(graph=weighted_graphs(max_nodes=24), num_parts=st.integers(1, 4), seed=st.integers(0, 9))
def test_every_node_gets_a_part_whatever_the_threads(graph, num_parts, seed):
    mean = -(-loads_of(graph, np.zeros(graph.num_nodes, int), 1)[0] // num_parts)
    cap = np.repeat(np.maximum(1, mean + 1)[None], num_parts, axis=0)
    part = partition_in_memory(graph, cap, seed, effort=QUICK, threads=RowThreads(1))
    assert part.shape == (graph.num_nodes,)
    assert part.min() >= 0
    assert part.max() < num_parts
    if graph.node_weight.shape[1] == 1 and (graph.node_weight == 1).all():
        assert (loads_of(graph, part, num_parts) <= cap).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads_module, "MIN_ENTRIES", 2)
        threads = RowThreads(2)
        assert np.array_equal(partition_in_memory(graph, cap, seed, effort=QUICK, threads=threads), part)
        threads.close()


def ring_of_cliques(num_cliques=12, size=8):
    cliques = [(size * c + u, size * c + v) for c in range(num_cliques) for u in range(size) for v in range(u)]
    ring = [(size * c, (size * c + size + 1) % (size * num_cliques)) for c in range(num_cliques)]
    return weighted_graph(size * num_cliques, cliques + ring)


def test_a_ring_of_cliques_is_cut_between_them():
    graph = ring_of_cliques()
    for seed in range(4):
        part = partition_in_memory(graph, np.full((3, 1), 33), seed)
        assert cut_of(graph, part) == 3
        assert np.bincount(part).tolist() == [32, 32, 32]


def test_uneven_shares_are_met():
    graph = ring_of_cliques()
    share = np.array([0.5, 0.25, 0.25])
    for seed in range(3):
        part = partition_in_memory(graph, np.array([[48], [24], [24]]), seed, share)
        assert np.bincount(part).tolist() == [48, 24, 24]
        assert cut_of(graph, part) <= 6


def test_further_runs_and_cycles_do_not_cut_more():
    rng = np.random.default_rng(3)
    edges = {tuple(sorted(pair)) for pair in rng.integers(0, 150, (600, 2)).tolist() if pair[0] != pair[1]}
    graph = weighted_graph(150, edges)
    cap = np.full((4, 1), 39)
    cuts = [
        cut_of(graph, partition_in_memory(graph, cap, 5, effort=QUICK._replace(runs=runs, cycles=cycles, **more)))
        for runs, cycles, more in ((1, 0, {}), (2, 0, {}), (2, 3, {}), (4, 3, {"combines": True, "flows": 2}))
    ]
    assert cuts == sorted(cuts, reverse=True)


def test_a_large_graph_has_fewer_runs(monkeypatch):
    graph, run_cycle, found = ring_of_cliques(), cycle.run_cycle, []
    monkeypatch.setattr(cycle, "run_cycle", lambda *args: found.append(run_cycle(*args)) or found[-1])
    for entries, runs in ((len(graph.indices), 2), (4 * len(graph.indices), 4), (None, 6)):
        found.clear()
        partition_in_memory(graph, np.full((3, 1), 33), effort=QUICK._replace(runs=6, entries_of_runs=entries))
        assert len(found) == runs


@pytest.mark.parametrize(("num_parts", "tries"), [(3, 8), (12, 4), (40, 1), (90, 1)])
def test_many_parts_are_begun_fewer_times(num_parts, tries, monkeypatch):
    monkeypatch.setattr(cycle, "TRIED_PARTS", 48)
    graph, grow_parts, found = ring_of_cliques(), cycle.grow_parts, []
    monkeypatch.setattr(cycle, "grow_parts", lambda *args: found.append(0) or grow_parts(*args))
    partition_in_memory(graph, np.full((num_parts, 1), 33), effort=Effort(stop=1), threads=RowThreads(1))
    assert len(found) == tries


@given(graph=weighted_graphs(max_nodes=24, max_dims=0), num_parts=st.sampled_from([3, 300]), data=st.data())
def test_parts_combined_with_others_do_not_cut_more(graph, num_parts, data):
    ids = st.lists(st.integers(0, num_parts - 1), min_size=graph.num_nodes, max_size=graph.num_nodes)
    part, other = np.array(data.draw(ids), np.int16), np.array(data.draw(ids), np.int16)
    cap, share = np.full((num_parts, 1), graph.num_nodes), np.full(num_parts, 1 / num_parts)
    effort, space = QUICK._replace(flows=1, stop=0), JetSpace.empty(graph.num_nodes)
    state, found = run_cycle(graph, cap, 0, share, effort, RowThreads(1), space, part.copy(), other)
    assert state == (False, cut_of(graph, found))
    assert state[1] <= cut_of(graph, part)


def test_caps_of_a_coarse_graph_let_half_a_heavy_node_pass():
    graph = weighted_graph(4, [(0, 1)], np.array([[10, 1], [2, 1], [2, 1], [2, 1]]))
    assert level_cap(graph, np.array([[8, 2], [20, 2]]), np.full(2, 0.5)).tolist() == [[13, 2], [20, 2]]
    assert part_loads(graph.node_weight, np.array([0, 1, 1, 0], np.int16), 3).tolist() == [[12, 2], [4, 2], [0, 0]]
