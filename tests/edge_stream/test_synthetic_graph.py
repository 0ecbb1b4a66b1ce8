"""The generated graph: what it promises of degrees, communities, features, and that position decides everything."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnnscale.edge_stream import SyntheticGraph, open_edge_stream
from lightning_gnnscale.edge_stream.planted_edges import SAMPLE_VERSION
from lightning_gnnscale.edge_stream.synthetic import _WEIGHT
from tests.says import said

GRAPH = SyntheticGraph(num_nodes=5_000, num_edges=60_000, num_communities=8, seed=3)

ALLOWANCE = 12 << 20  # allocator and compiled code

PEAK = """
import sys, resource, re, pathlib
from lightning_gnnscale.edge_stream import SyntheticGraph
def anon():
    text = pathlib.Path("/proc/self/status").read_text()
    return sum(int(kb) for kb in re.findall(r"Rss(?:Anon|Shmem):\\s+(\\d+)", text)) * 1024
num_nodes, num_edges, chunk_edges = map(int, sys.argv[1:])
next(SyntheticGraph(100, 1000).stream(chunk_edges=1000).chunks())
before, peak, count = anon(), 0, 0
for chunk in SyntheticGraph(num_nodes, num_edges).stream(chunk_edges=chunk_edges).chunks():
    count += len(chunk.src)
    peak = max(peak, anon())
assert count == num_edges
print(peak - before)
"""


def edges_of(graph, **options):
    chunks = list(graph.stream(**options).chunks())
    return np.concatenate([np.stack([chunk.src, chunk.dst]) for chunk in chunks], axis=1)


def test_edges_keep_what_they_promise():
    edges = edges_of(GRAPH)
    assert edges.shape == (2, 60_000)
    assert edges.min() >= 0 and edges.max() < 5_000
    assert not (edges[0] == edges[1]).any()
    community = GRAPH.communities()
    inside = (community[edges[0]] == community[edges[1]]).mean()
    # Bernoulli share: five standard deviations of sqrt(0.8 * 0.2 / 60000).
    assert abs(inside - 0.8) < 5 * np.sqrt(0.16 / 60_000)


def test_the_edges_of_this_version():
    # Known edges: other ones need another SAMPLE_VERSION, or fingerprints would call two graphs the same.
    chunk = next(GRAPH.stream(chunk_edges=600).chunks())
    assert SAMPLE_VERSION == 1
    assert chunk.src[:6].tolist() == [2547, 3649, 2814, 1467, 2319, 58]
    assert chunk.dst[:6].tolist() == [2187, 1484, 2533, 3649, 2742, 1219]
    assert (int(chunk.src.sum()), int(chunk.dst.sum())) == (1528416, 1498594)


def test_degrees_follow_the_power_law_up_to_the_cap():
    graph = SyntheticGraph(num_nodes=50_000, num_edges=1_000_000, exponent=2.5, max_degree=500, seed=1)
    degree = np.bincount(edges_of(graph).ravel(), minlength=50_000)
    assert degree.mean() == 40
    # Poisson around an expected degree of at most 500, over a few dozen nodes: six standard deviations.
    assert 400 < degree.max() < 500 + 6 * np.sqrt(500)
    # Between the smallest degrees and the cap, P(degree > d) falls as d ** -1.5.
    above = [(degree > d).mean() for d in (50, 100, 200)]
    slopes = np.diff(np.log(above)) / np.log(2)
    assert np.all(np.abs(slopes + 1.5) < 0.15), slopes


def test_node_ids_tell_nothing_of_communities():
    community = GRAPH.communities()
    assert abs(np.corrcoef(np.arange(5_000), community)[0, 1]) < 5 / np.sqrt(5_000)
    sizes = np.bincount(community, minlength=8)
    assert np.all(np.abs(sizes - 625) < 5 * np.sqrt(625))


@settings(max_examples=settings.default.max_examples // 4)
@given(st.integers(1, 800), st.integers(0, 5))
def test_chunk_size_and_start_change_nothing(chunk_edges, start_chunk):
    graph = SyntheticGraph(num_nodes=60, num_edges=700, num_communities=4)
    stream = graph.stream(chunk_edges=chunk_edges)
    chunks = list(stream.chunks(start_chunk))
    whole = edges_of(graph)[:, start_chunk * chunk_edges :]
    assert np.array_equal(np.concatenate([[], *(chunk.src for chunk in chunks)]), whole[0])
    assert np.array_equal(np.concatenate([[], *(chunk.dst for chunk in chunks)]), whole[1])


def test_parameters_and_seed_decide_and_pickles_are_small():
    assert np.array_equal(edges_of(GRAPH), edges_of(pickle.loads(pickle.dumps(GRAPH))))
    assert len(pickle.dumps(GRAPH)) < 1000
    other = SyntheticGraph(num_nodes=5_000, num_edges=60_000, num_communities=8, seed=4)
    assert (edges_of(GRAPH) != edges_of(other)).any()
    assert GRAPH.stream().fingerprint() != other.stream().fingerprint()
    assert GRAPH.stream(chunk_edges=10).fingerprint() == GRAPH.stream().fingerprint()


@pytest.mark.parametrize(
    ("num_nodes", "num_communities", "homophily"),
    [(2, 1, 0.0), (2, 1, 1.0), (4, 2, 0.5), (6, 3, 1.0), (9, 4, 0.0), (200, 100, 0.9)],
)
def test_tiny_graphs_have_no_self_loops(num_nodes, num_communities, homophily):
    for seed in range(8):
        graph = SyntheticGraph(num_nodes, 300, num_communities, homophily, seed=seed)
        edges = edges_of(graph)
        assert edges.min() >= 0 and edges.max() < num_nodes
        assert not (edges[0] == edges[1]).any()
        community = graph.communities()
        if homophily == 0.0 and len(np.unique(community)) > 1:
            assert not (community[edges[0]] == community[edges[1]]).any()
        if homophily == 1.0:
            assert (community[edges[0]] == community[edges[1]]).all()


def test_ends_are_sampled_in_proportion_to_their_weights():
    graph = SyntheticGraph(num_nodes=40, num_edges=400_000, num_communities=1, max_degree=60_000, seed=5)
    edges = edges_of(graph)
    weight = np.minimum((1 - graph._units(_WEIGHT)) ** (-1 / 1.5), graph._largest_weight())
    share = weight / weight.sum()
    # The first end is sampled from the weights alone (the second avoids the first): chi-square over 39 cells.
    counts = np.bincount(edges[0], minlength=40)
    expected = share * 400_000
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 39 + 6 * np.sqrt(2 * 39)


def test_labels_are_communities_up_to_noise():
    assert np.array_equal(GRAPH.labels(), GRAPH.communities())
    assert GRAPH.labels().dtype == np.int64
    noisy = SyntheticGraph(num_nodes=5_000, num_edges=10, num_communities=8, label_noise=0.4, seed=3)
    changed = (noisy.labels() != noisy.communities()).mean()
    assert abs(changed - 0.4 * 7 / 8) < 5 * np.sqrt(0.25 / 5_000)
    assert np.array_equal(noisy.communities(), GRAPH.communities())


def test_features_are_centres_plus_noise():
    x = GRAPH.features(64, noise=0.5)
    assert x.shape == (5_000, 64) and x.dtype == np.float32
    community = GRAPH.communities()
    centres = np.stack([x[community == c].mean(0) for c in range(8)])
    assert np.all(np.abs(np.linalg.norm(centres, axis=1) - 1) < 0.5)
    spread = (x - centres[community]).std()
    assert abs(spread - 0.5) < 0.01
    exact = GRAPH.features(7, noise=0)
    assert all(len(np.unique(exact[community == c], axis=0)) == 1 for c in range(8))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("dim", [1, 5])
def test_features_in_a_file_are_those_in_memory(tmp_path, dtype, dim, monkeypatch):
    in_memory = GRAPH.features(dim, dtype=dtype)
    monkeypatch.setattr("lightning_gnnscale.edge_stream.synthetic._FEATURE_BYTES", 4 * dim * 777)
    seen = []
    on_disk = GRAPH.features(dim, dtype=dtype, path=tmp_path / "x.npy", progress=lambda *event: seen.append(event))
    assert isinstance(on_disk, np.memmap)
    assert on_disk.dtype == dtype
    assert np.array_equal(on_disk, in_memory)
    assert seen[-1] == ("synthetic features", 5_000, 5_000)
    assert len(seen) == 7
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.npy"]


def test_masks_are_disjoint_shares():
    masks = GRAPH.masks(train=0.5, val=0.3)
    assert list(masks) == ["train", "val", "test"]
    assert np.array_equal(sum(mask.astype(int) for mask in masks.values()), np.ones(5_000))
    for name, share in (("train", 0.5), ("val", 0.3), ("test", 0.2)):
        assert abs(masks[name].mean() - share) < 5 * np.sqrt(0.25 / 5_000)
    some = GRAPH.masks(train=0.1, val=0.1, test=0.1)
    assert np.array_equal(some["train"], GRAPH.masks(0.1, 0.2)["train"])
    assert not (some["test"] & some["val"]).any()
    assert 0.2 < sum(mask.mean() for mask in some.values()) < 0.4


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"num_nodes": 1}, "num_nodes 2 2147483647 1"),
        ({"num_nodes": 2**31}, "num_nodes"),
        ({"num_edges": -1}, "num_edges at least 0 -1"),
        ({"num_communities": 51}, "num_communities 1 50 51"),
        ({"homophily": 1.5}, "homophily 0 1 1.5"),
        ({"homophily": float("nan")}, "homophily"),
        ({"exponent": 2.0}, "exponent must be in"),
        ({"max_degree": 5}, "max_degree 20 inf 5"),
        ({"label_noise": "some"}, "label_noise"),
        ({"seed": 0.5}, "seed must be an integer"),
    ],
)
def test_parameters_are_checked(parameters, message):
    with pytest.raises(ValueError, match=said(message)):
        SyntheticGraph(**{"num_nodes": 100, "num_edges": 1000, **parameters})


def test_requests_are_checked():
    with pytest.raises(ValueError, match=said("dtype float32 float16 int8")):
        GRAPH.features(4, dtype="int8")
    with pytest.raises(ValueError, match=said("dim at least 1 0")):
        GRAPH.features(0)
    with pytest.raises(ValueError, match=said("shares 1")):
        GRAPH.masks(train=0.6, val=0.3, test=0.2)
    with pytest.raises(ValueError, match=said("masks.test")):
        GRAPH.masks(train=0.8, val=0.3)
    with pytest.raises(ValueError, match=said("num_nodes >= 5000 10")):
        GRAPH.stream(num_nodes=10)


def test_the_stream_opens_through_the_one_door():
    stream = open_edge_stream(GRAPH, chunk_edges=1000, to_undirected=True)
    assert (stream.num_nodes, stream.num_edges, stream.layout) == (5_000, 60_000, "once")
    assert stream.to_undirected
    assert np.array_equal(next(stream.chunks(2)).src, edges_of(GRAPH)[0, 2000:3000])
    relabelled = open_edge_stream(GRAPH, relabel=True, chunk_edges=1000)
    first = next(relabelled.chunks())
    ids = np.asarray(relabelled.node_ids)
    assert np.array_equal(ids[first.src], edges_of(GRAPH)[0, :1000])
    with pytest.raises(ValueError, match=said("option 'dtype' synthetic")):
        open_edge_stream(GRAPH, dtype="int32")


def peak_bytes(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, arguments)], capture_output=True, text=True, check=True, timeout=280
    )
    return int(done.stdout)


def test_memory_is_nodes_and_two_chunks():
    num_nodes, chunk_edges = 200_000, 1 << 18
    # 40 bytes a node while the tables are built, two chunks of int32 pairs; all edges would be 32 MB.
    assert peak_bytes(num_nodes, 4_000_000, chunk_edges) < 40 * num_nodes + 2 * 8 * chunk_edges + ALLOWANCE


@pytest.mark.slow
def test_a_hundred_million_edges_are_never_held():
    assert peak_bytes(4_000_000, 100_000_000, 1 << 22) < 40 * 4_000_000 + 2 * 8 * (1 << 22) + ALLOWANCE
