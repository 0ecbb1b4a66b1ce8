import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner.multilevel.cycle import grow_parts
from tests.partitioner.multilevel.graphs import cut_of, loads_of, weighted_graph, weighted_graphs


@given(graph=weighted_graphs(), num_parts=st.integers(1, 5), seed=st.integers(0, 9), data=st.data())
def test_every_node_gets_a_part_and_no_part_more_than_its_share_and_one_node(graph, num_parts, seed, data):
    share = np.array(data.draw(st.lists(st.floats(0.1, 1), min_size=num_parts, max_size=num_parts)))
    share /= share.sum()
    part = grow_parts(graph, share, seed)
    assert part.min() >= 0
    assert part.max() < num_parts
    total = np.maximum(1, loads_of(graph, part, num_parts).sum(axis=0))
    filled = (loads_of(graph, part, num_parts) / total).mean(axis=1)
    heaviest = (graph.node_weight / total).mean(axis=1).max()
    assert (filled[:-1] <= share[:-1] + heaviest + 1e-9).all()
    assert np.array_equal(grow_parts(graph, share, seed), part)


def test_parts_come_within_half_a_node_of_their_shares():
    rng = np.random.default_rng(0)
    edges = {tuple(sorted(pair)) for pair in rng.integers(0, 90, (200, 2)).tolist() if pair[0] != pair[1]}
    graph = weighted_graph(90, edges)
    share = np.array([0.4, 0.15, 0.25, 0.2])
    for seed in range(5):
        sizes = np.bincount(grow_parts(graph, share, seed), minlength=4)
        assert (np.abs(sizes - 90 * share)[:-1] <= 0.5).all()


def test_a_part_grows_along_edges():
    cliques = [(10 * c + u, 10 * c + v) for c in range(2) for u in range(10) for v in range(u)]
    graph = weighted_graph(20, [*cliques, (3, 14)])
    parts = [grow_parts(graph, np.array([0.5, 0.5]), seed) for seed in range(8)]
    assert [cut_of(graph, part) for part in parts] == [1] * 8
    assert len({part[0] for part in parts}) == 2  # the seed decides where growing starts


def test_heavy_edges_sample_a_node_in():
    edges = {(0, 1): 9, (1, 2): 1, (2, 3): 9, (3, 4): 1, (4, 5): 9}
    graph = weighted_graph(6, edges)
    for seed in range(8):
        part = grow_parts(graph, np.full(3, 1 / 3), seed)
        assert part[0] == part[1]
        assert part[4] == part[5]
