"""The LFR-like graph: sizes of communities, edges that leave, degrees, and that position decides everything."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnnscale.edge_stream import SyntheticGraph, lfr_graph
from lightning_gnnscale.edge_stream.planted_edges import community_sizes
from tests.says import said

NUM_NODES, NUM_EDGES = 100_000, 800_000
GRAPH = lfr_graph(NUM_NODES, NUM_EDGES, mixing=0.3, min_community=20, max_community=5_000, seed=7)

PEAK = """
import sys, re, pathlib
from lightning_gnnscale.edge_stream import lfr_graph
def anon():
    text = pathlib.Path("/proc/self/status").read_text()
    return sum(int(kb) for kb in re.findall(r"Rss(?:Anon|Shmem):\\s+(\\d+)", text)) * 1024
num_nodes, num_edges, chunk_edges = map(int, sys.argv[1:])
next(lfr_graph(1000, 5000).stream(chunk_edges=1000).chunks())
before, peak, count = anon(), 0, 0
for chunk in lfr_graph(num_nodes, num_edges).stream(chunk_edges=chunk_edges).chunks():
    count += len(chunk.src)
    peak = max(peak, anon())
assert count == num_edges
print(peak - before)
"""


def edges_of(graph, **options):
    chunks = list(graph.stream(**options).chunks())
    return np.concatenate([np.stack([chunk.src, chunk.dst]) for chunk in chunks], axis=1)


@pytest.fixture(scope="module")
def edges():
    return edges_of(GRAPH)


def likeliest_exponent(sizes, smallest, largest):
    """The exponent b for which the density s ** -b on [smallest, largest] makes the sizes likeliest."""
    candidates = np.arange(1.01, 3, 0.01)
    mass = (largest ** (1 - candidates) - smallest ** (1 - candidates)) / (1 - candidates)
    return candidates[np.argmax(-candidates * np.log(sizes).sum() - len(sizes) * np.log(mass))]


@pytest.mark.parametrize("exponent", [1.2, 1.5, 2.0])
def test_sizes_of_communities_follow_their_power_law(exponent):
    graph = lfr_graph(NUM_NODES, 500_000, community_exponent=exponent, min_community=20, max_community=5_000)
    sizes = np.bincount(graph.communities(), minlength=graph.num_communities)
    assert sizes.sum() == NUM_NODES
    assert sizes.min() >= 20 - 6 * np.sqrt(20)
    assert 2_500 < sizes.max() <= 5_000 + 6 * np.sqrt(5_000)
    # The maximum of the likelihood has a standard deviation of about 1 / sqrt(K * var(log s)): 0.05 at K = 300.
    assert abs(likeliest_exponent(np.clip(sizes, 20, 5_000), 20, 5_000) - exponent) < 0.15
    # Nodes settle by hash: each size is a count of independent samples.
    planned = community_sizes(NUM_NODES, graph.num_communities, exponent, 5_000)
    assert np.all(np.abs(sizes - planned) <= 6 * np.sqrt(planned) + 0.02 * planned)


def test_hubs_live_in_communities_that_hold_their_neighbours():
    sizes = community_sizes(NUM_NODES, GRAPH.num_communities, 1.5, 5_000)
    home = sizes[GRAPH.communities()]
    inside = GRAPH._neighbors_inside()
    assert inside.max() > 200
    assert np.all((home > inside) | (home == sizes.max()))
    assert (home[inside > 100] > 100).all() and (home < 100).any()


@pytest.mark.parametrize("mixing", [0.0, 0.1, 0.6, 1.0])
def test_the_share_of_edges_that_leave_is_the_mixing(mixing):
    graph = lfr_graph(20_000, 200_000, mixing=mixing, seed=3)
    src, dst = edges_of(graph)
    community = graph.communities()
    leaving = (community[src] != community[dst]).mean()
    # A Bernoulli share: five standard deviations.
    assert abs(leaving - mixing) <= 5 * np.sqrt(mixing * (1 - mixing) / 200_000)


def test_repeats_are_few_and_leave_the_mixing_near(edges):
    src, dst = edges
    assert not (src == dst).any()
    pairs = np.unique(np.minimum(src, dst).astype(np.int64) * NUM_NODES + np.maximum(src, dst))
    assert len(pairs) > 0.93 * NUM_EDGES
    community = GRAPH.communities()
    leaving = (community[pairs // NUM_NODES] != community[pairs % NUM_NODES]).mean()
    assert 0.3 <= leaving < 0.33


def test_nodes_of_every_degree_mix_alike(edges):
    src, dst = edges
    community = GRAPH.communities()
    leaving = (community[src] != community[dst]).astype(np.float64)
    degree = np.bincount(edges.ravel(), minlength=NUM_NODES)
    outside = np.bincount(src, leaving, NUM_NODES) + np.bincount(dst, leaving, NUM_NODES)
    for low, high in ((5, 15), (15, 60), (60, 2_000)):
        group = (degree >= low) & (degree < high)
        assert abs(outside[group].sum() / degree[group].sum() - 0.3) < 0.03


def test_degrees_follow_their_power_law(edges):
    degree = np.bincount(edges.ravel(), minlength=NUM_NODES)
    above = [(degree > d).mean() for d in (25, 50, 100, 200)]
    slopes = np.diff(np.log(above)) / np.log(2)
    assert np.all(np.abs(slopes + 1.5) < 0.2), slopes


@settings(max_examples=settings.default.max_examples // 4)
@given(st.integers(1, 800), st.integers(0, 5))
def test_chunk_size_and_start_change_nothing(chunk_edges, start_chunk):
    graph = lfr_graph(200, 700, min_community=5)
    chunks = list(graph.stream(chunk_edges=chunk_edges).chunks(start_chunk))
    whole = edges_of(graph)[:, start_chunk * chunk_edges :]
    assert np.array_equal(np.concatenate([[], *(chunk.src for chunk in chunks)]), whole[0])
    assert np.array_equal(np.concatenate([[], *(chunk.dst for chunk in chunks)]), whole[1])


def test_parameters_and_seed_decide():
    assert np.array_equal(GRAPH.communities(), pickle.loads(pickle.dumps(GRAPH)).communities())
    other = lfr_graph(NUM_NODES, NUM_EDGES, mixing=0.3, min_community=20, max_community=5_000, seed=8)
    assert (GRAPH.communities() != other.communities()).any()
    assert GRAPH.stream().fingerprint() != other.stream().fingerprint()


def test_graphs_of_one_size_say_nothing_of_power_laws():
    plain = SyntheticGraph(100, 1000, seed=3)
    assert plain.parameters() == {
        "num_nodes": 100,
        "num_edges": 1000,
        "num_communities": 16,
        "homophily": 0.8,
        "exponent": 2.5,
        "max_degree": None,
        "label_noise": 0.0,
        "seed": 3,
    }
    uneven = SyntheticGraph(100, 1000, seed=3, community_exponent=1.5)
    assert uneven.parameters() == {**plain.parameters(), "community_exponent": 1.5}
    assert plain.stream().fingerprint() != uneven.stream().fingerprint()


@pytest.mark.parametrize("exponent", [1.0, 1.5, 3.0])
@pytest.mark.parametrize(("num_nodes", "num_communities"), [(4, 2), (9, 4), (60, 7), (1000, 1)])
def test_tiny_graphs(num_nodes, num_communities, exponent):
    graph = SyntheticGraph(num_nodes, 300, num_communities, 0.5, community_exponent=exponent)
    src, dst = edges_of(graph)
    assert not (src == dst).any()
    assert 0 <= graph.communities().min() <= graph.communities().max() < num_communities
    assert graph._sizes().max() <= num_nodes


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"mixing": 1.2}, "lfr.mixing [0, 1] 1.2"),
        ({"min_community": 1}, "lfr.min_community [2, 1000] 1"),
        ({"min_community": 60, "max_community": 50}, "lfr.max_community [60, 1000] 50"),
        ({"community_exponent": 0.5}, "lfr.community_exponent [1, 100] 0.5"),
        ({"exponent": 2.0}, "exponent must be in"),
    ],
)
def test_parameters_are_checked(parameters, message):
    with pytest.raises(ValueError, match=said(message)):
        lfr_graph(**{"num_nodes": 1000, "num_edges": 5000, **parameters})


def test_the_largest_community_needs_a_law():
    with pytest.raises(ValueError, match=said("synthetic.max_community synthetic.community_exponent")):
        SyntheticGraph(100, 1000, max_community=30)
    with pytest.raises(ValueError, match=said("synthetic.max_community [6.25, 100] 5")):
        SyntheticGraph(100, 1000, max_community=5, community_exponent=2)


def peak_bytes(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, arguments)], capture_output=True, text=True, check=True, timeout=280
    )
    return int(done.stdout)


@pytest.mark.slow
def test_thirty_million_edges_are_never_held():
    # 40 bytes a node while the tables are built, two chunks of int32 pairs, allocator and compiled code.
    assert peak_bytes(3_000_000, 30_000_000, 1 << 20) < 40 * 3_000_000 + 2 * 8 * (1 << 20) + (12 << 20)
