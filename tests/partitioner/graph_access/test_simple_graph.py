import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.errors import EdgeStreamError, GNNScaleError
from lightning_gnnscale.partitioner import phases
from lightning_gnnscale.partitioner.graph_access import scratch, simple_graph
from lightning_gnnscale.partitioner.graph_access.layout import SAMPLE_COPIES, ScanState, scan
from lightning_gnnscale.partitioner.graph_access.simple_graph import open_simple_graph
from lightning_gnnscale.partitioner.multilevel.weighted_graph import RowThreads
from tests.oracles.spring import simple_edges
from tests.partitioner.graphs import ODD, listed, simple_graphs, stream_of
from tests.says import said

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def edges_of(graph):
    return [(int(u), int(v)) for src, dst in graph.one_pass("test") for u, v in zip(src, dst, strict=True)]


def degrees_of(edges, num_nodes):
    degree = [0] * num_nodes
    for u, v in edges:
        degree[u] += 1
        degree[v] += 1
    return degree


@given(graph=simple_graphs(), layout=st.sampled_from(["once", "both_ways", "directed"]), chunk=st.integers(1, 30))
def test_every_layout_gives_the_simple_graph_in_stream_order(graph, layout, chunk):
    num_nodes, edges = graph
    directed_edges = [*listed(edges, layout), (0, 0)]
    found, degree = open_simple_graph(stream_of(directed_edges, num_nodes, layout=layout, chunk_edges=chunk))
    expected = simple_edges(directed_edges, layout)
    assert edges_of(found) == expected
    assert found.num_edges == len(expected)
    assert degree.tolist() == degrees_of(expected, num_nodes)


@pytest.mark.parametrize("name", ODD)
def test_odd_graphs_are_made_simple(name):
    num_nodes, edges = ODD[name]
    found, degree = open_simple_graph(stream_of(edges, num_nodes))
    expected = simple_edges(edges, found.report.layout)
    assert edges_of(found) == expected
    assert degree.tolist() == degrees_of(expected, num_nodes)


@given(graph=simple_graphs(), chunk=st.integers(1, 30), seed=st.integers(0, 3))
def test_the_layout_is_found(graph, chunk, seed):
    num_nodes, edges = graph
    if len(edges) < 2:
        return
    for layout in ("once", "both_ways"):
        directed_edges = listed(edges, layout, seed)
        report, _ = scan(stream_of(directed_edges, num_nodes, chunk_edges=chunk))
        assert (report.layout, report.detected, report.repeated_share) == (layout, True, 0.0)
    some_reversed = [*edges, edges[0][::-1]]
    report, _ = scan(stream_of(some_reversed, num_nodes, chunk_edges=chunk))
    assert report.layout == "directed"
    assert report.repeated_share == pytest.approx(1 / len(edges))


def large_edges(repeated_share, num_nodes=5_000, num_edges=60_000):
    rng = np.random.default_rng(1)
    pairs = np.unique(np.sort(rng.integers(0, num_nodes, (num_edges, 2)), 1), axis=0)
    pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    again = pairs[rng.random(len(pairs)) < repeated_share][:, ::-1]
    edges = np.concatenate([pairs, again])
    return rng.permutation(edges), len(pairs)


def test_the_share_of_repeats_is_estimated_from_a_bounded_sample():
    edges, num_pairs = large_edges(0.2)
    assert len(edges) > 4 * SAMPLE_COPIES
    reports = [scan(stream_of(edges, 5_000, chunk_edges=chunk))[0] for chunk in (1000, 1 << 20)]
    assert reports[0] == reports[1]
    # Binomial with at least SAMPLE_COPIES / 6 pairs: five standard deviations.
    share = (len(edges) - num_pairs) / num_pairs
    assert abs(reports[0].repeated_share - share) < 5 * (0.2 * 0.8 / (SAMPLE_COPIES / 6)) ** 0.5
    assert reports[0].layout == "directed"


def test_one_pair_listed_very_often_does_not_fill_the_sample():
    edges = np.concatenate([np.tile([[0, 1]], (3 * SAMPLE_COPIES, 1)), [[1, 2], [2, 3], [3, 4]]])
    report, _ = scan(stream_of(edges, 5))
    assert report.layout == "once"
    assert report.repeated_share == pytest.approx(1 / 4)


def test_a_few_repeats_are_told_and_kept():
    edges = [(0, v) for v in range(1, 201)] + [(0, 7)]
    with pytest.warns(UserWarning, match=said("0.5% edges")):
        graph, _ = open_simple_graph(stream_of(edges, 201))
    assert graph.num_edges == 201
    graph, degree = open_simple_graph(stream_of(edges, 201), deduplicate=True)
    assert graph.num_edges == 200
    assert degree[7] == 1


def test_a_layout_that_the_edges_contradict_is_an_error():
    both = [(0, 1), (1, 0), (1, 2), (2, 1)]
    with pytest.raises(ValueError, match=said("layout 'once' edge")):
        scan(stream_of(both, 3, layout="once"))
    with pytest.raises(ValueError, match=said("layout 'both_ways' edges")):
        scan(stream_of(both[:3], 3, layout="both_ways"))


def test_the_scan_goes_on_from_a_saved_state():
    edges, _ = large_edges(0.2)
    stream = stream_of(edges, 5_000, chunk_edges=7_000)
    whole = scan(stream)
    states = []
    scan(stream, after_chunk=lambda state: states.append(ScanState(*(array.copy() for array in state))))
    for state in states[::3]:
        resumed = scan(stream, state)
        assert resumed[0] == whole[0]
        assert np.array_equal(resumed[1], whole[1])


def test_first_copies_through_many_buckets(monkeypatch, tmp_path):
    edges, num_pairs = large_edges(0.3)
    monkeypatch.setattr(simple_graph, "BUCKET_BYTES", 1 << 14)
    graph, degree = open_simple_graph(stream_of(edges, 5_000, chunk_edges=9_999), deduplicate=True, scratch=tmp_path)
    expected = simple_edges([tuple(edge) for edge in edges.tolist()], "directed")
    assert len(expected) == graph.num_edges == num_pairs
    assert edges_of(graph) == expected
    assert degree.tolist() == degrees_of(expected, 5_000)
    assert os.listdir(tmp_path) == []  # scratch files have no name, so nothing can be left behind


def test_too_little_scratch_disk_is_told_before_it_is_used(monkeypatch, tmp_path):
    class Disk:
        free = 10

    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda folder: Disk)
    with pytest.raises(GNNScaleError, match=said("3 edges 49 bytes scratch disk 10 free 39 too few")):
        open_simple_graph(stream_of([(0, 1), (1, 0), (1, 2)], 3), scratch=tmp_path)


def test_changed_edges_are_noticed_by_count_and_by_checksum():
    edges = np.array([[0, 1, 2], [1, 2, 3]], np.int32)
    graph, _ = open_simple_graph(stream_of(edges.T, 4))
    for changed in (edges[:, :2], np.array([[0, 1, 2], [1, 2, 0]], np.int32)):
        other = type(graph)(stream_of(changed.T, 4), graph.report, graph.num_edges)
        with pytest.raises(EdgeStreamError, match=said("changed partitioned 3 edges")):
            edges_of(other)


def test_notes_go_to_the_open_record():
    with phases.recording() as record:
        graph, _ = open_simple_graph(stream_of([(0, 1), (1, 0), (1, 2)], 3))
    assert record.graph is graph
    assert record.notes["layout"] == "directed"
    assert record.notes["deduplicated"] is True
    assert record.notes["scratch_bytes"] == 49


def test_a_word_for_deduplicate_is_refused():
    with pytest.raises(ValueError, match=said("partitioner.deduplicate true false null 'no'")):
        open_simple_graph(stream_of([(0, 1)], 2), deduplicate="no")


def test_threads_that_scan_find_what_one_finds():
    rng = np.random.default_rng(3)
    edges = rng.integers(0, 5_000, (50_000, 2))
    edges = rng.permutation(np.concatenate([edges, edges[:9_000], edges[:5_000, ::-1]]))
    assert len(edges) > 7 * SAMPLE_COPIES  # so that the sample shrinks several times
    stream, found = stream_of(edges, 5_000, chunk_edges=17_000), []
    for num_threads in (1, 2, 3):
        state, threads = ScanState.empty(5_000), RowThreads(num_threads)
        report, degree = scan(stream, state, threads=threads)
        threads.close()
        assert degree.tolist() == np.bincount(edges[edges[:, 0] != edges[:, 1]].ravel(), minlength=5_000).tolist()
        found.append((report, state.counts.tolist(), state.sample.tolist()))
    assert found[0] == found[1] == found[2]
