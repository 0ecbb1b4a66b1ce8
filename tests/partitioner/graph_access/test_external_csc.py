import os
import threading
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.errors import EdgeStreamError, GNNScaleError
from lightning_gnnscale.partitioner import phases
from lightning_gnnscale.partitioner.graph_access import entry_buckets, layout, scratch, simple_graph
from lightning_gnnscale.partitioner.graph_access.external_csc import open_external_csc
from lightning_gnnscale.partitioner.multilevel.weighted_graph import RowThreads
from tests.oracles.external_csc import cut_into_blocks, rows_of
from tests.partitioner.graphs import ODD, listed, simple_graphs, stream_of
from tests.says import said
from tests.tiers import each_value, first

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def rows_read(csc, first_block=0):
    rows = []
    for block in csc.blocks(first_block):
        assert block.first_node == csc.block_start[first_block] + len(rows)
        assert block.indptr[0] == 0
        assert block.indptr[-1] == len(block.indices)
        rows += [block.indices[a:b].tolist() for a, b in zip(block.indptr[:-1], block.indptr[1:], strict=True)]
    return rows


def check(csc, expected, block_edges):
    assert rows_read(csc) == expected
    assert csc.degree.tolist() == [len(row) for row in expected]
    assert csc.num_edges == sum(len(row) for row in expected) // 2
    assert csc.num_nodes == len(expected)
    assert csc.block_start.tolist() == cut_into_blocks(expected, block_edges)


@given(graph=simple_graphs(), layout=st.sampled_from(["once", "both_ways", "directed"]), data=st.data())
def test_every_layout_gives_the_rows_in_stream_order(graph, layout, data):
    num_nodes, edges = graph
    directed_edges = [*listed(edges, layout, data.draw(st.integers(0, 5))), (0, 0)]
    told = data.draw(st.sampled_from([layout, "auto"])) if edges else "auto"
    dtype = data.draw(st.sampled_from([np.int32, np.int64]))
    stream = stream_of(directed_edges, num_nodes, dtype, layout=told, chunk_edges=data.draw(st.integers(1, 30)))
    block_edges = data.draw(st.integers(1, 20))
    with open_external_csc(stream, block_edges=block_edges) as csc:
        expected = rows_of(directed_edges, num_nodes, csc.report.layout)
        check(csc, expected, block_edges)
        first_block = data.draw(st.integers(0, csc.num_blocks))
        assert rows_read(csc, first_block) == expected[csc.block_start[first_block] :]
    with open_external_csc(stream, block_edges=100, held_blocks=1) as csc:
        check(csc, expected, 100)


@each_value
@pytest.mark.parametrize("deduplicate", [None, False, True])
@pytest.mark.parametrize("name", ODD)
def test_odd_graphs(name, deduplicate):
    num_nodes, edges = ODD[name]
    for block_edges in (1, 5, 1 << 21):
        with open_external_csc(stream_of(edges, num_nodes), block_edges=block_edges, deduplicate=deduplicate) as csc:
            check(csc, rows_of(edges, num_nodes, csc.report.layout, deduplicate is not False), block_edges)


def random_edges(num_nodes=2_000, num_edges=12_000, seed=1):
    rng = np.random.default_rng(seed)
    weight = rng.pareto(1.2, num_nodes) + 1
    return rng.choice(num_nodes, (num_edges, 2), p=weight / weight.sum())


def small_buckets(monkeypatch, max_entries=256, max_rows=64):
    """Many buckets, and chunks that fill often, on a graph that is small; threads take turns often."""
    for module in (simple_graph, entry_buckets):
        monkeypatch.setattr(module, "SHARE_EDGES", 100)
    monkeypatch.setattr(entry_buckets, "STAGED_CHUNK", 8)
    monkeypatch.setattr(entry_buckets, "MIN_ENTRIES", max_entries)
    monkeypatch.setattr(entry_buckets, "MAX_ENTRIES", max_entries)
    monkeypatch.setattr(entry_buckets, "MAX_ROWS", max_rows)
    monkeypatch.setattr(entry_buckets, "MIN_CHUNK", 16)
    monkeypatch.setattr(entry_buckets, "MAX_CHUNK", 16)
    monkeypatch.setattr(entry_buckets, "READ_BYTES", 200)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("wide_ids", [False, True])
def test_many_buckets_with_a_hub_across_chunks(monkeypatch, tmp_path, wide_ids, deduplicate, num_threads):
    small_buckets(monkeypatch)
    if wide_ids:
        for module in (layout, simple_graph):
            monkeypatch.setattr(module, "id_dtype", lambda num_nodes: np.dtype(np.int64))
    edges = random_edges()
    expected = rows_of([tuple(edge) for edge in edges.tolist()], 2_000, "directed", deduplicate)
    assert max(len(row) for row in expected) > 256
    stream = stream_of(edges, 2_000, chunk_edges=777)
    threads = RowThreads(num_threads)
    with open_external_csc(stream, tmp_path, 300, deduplicate, threads=threads) as csc, closing(threads):
        check(csc, expected, 300)
        assert csc.degree.dtype == (np.int64 if wide_ids else np.int32)
        assert all(block.indices.dtype == csc.degree.dtype for block in csc.blocks())
        assert os.listdir(tmp_path) == []  # the scratch file has no name, so nothing can be left behind


def test_two_iterations_at_a_time_do_not_meet():
    edges = random_edges()
    with open_external_csc(stream_of(edges, 2_000), block_edges=500, deduplicate=True) as csc:
        for _ in range(2):
            for one, other in zip(csc.blocks(), csc.blocks(1), strict=False):
                assert other.first_node == one.first_node + one.num_rows
        started = threading.active_count()
        reading = csc.blocks()
        next(reading)
        assert threading.active_count() == started + 1
        reading.close()
        assert threading.active_count() == started


def test_scratch_is_told_beforehand_and_shrinks_to_the_neighbours(monkeypatch, tmp_path):
    edges = random_edges(200, 100_000)
    edges = edges[edges[:, 0] != edges[:, 1]]
    sizes = []
    sort = entry_buckets.EntryBuckets.sort

    def note_size(self, file, *rest):
        sizes.append(os.fstat(file.fileno()).st_size)
        sort(self, file, *rest)
        sizes.append(os.fstat(file.fileno()).st_size)

    monkeypatch.setattr(entry_buckets.EntryBuckets, "sort", note_size)
    with phases.recording() as record, open_external_csc(stream_of(edges, 200), tmp_path, deduplicate=False):
        told = record.notes["scratch_bytes"]
    assert sizes == [told, 8 * len(edges)]
    assert 12 * len(edges) <= told <= 12 * len(edges) + 6 * entry_buckets.MAX_CHUNK


def test_too_little_scratch_disk_is_told_before_it_is_used(monkeypatch, tmp_path):
    class Disk:
        free = 10

    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda folder: Disk)
    with pytest.raises(GNNScaleError, match=said("neighbours 3 edges 384 bytes scratch disk 374 too few")):
        open_external_csc(stream_of([(0, 1), (1, 0), (1, 2)], 3), tmp_path)
    with pytest.raises(ValueError, match=said("scratch=<a folder> scratch=auto")):
        open_external_csc(stream_of([(0, 1)], 3), scratch=None)
    with pytest.raises(ValueError, match=said("partitioner.block_edges >= 1 0")):
        open_external_csc(stream_of([(0, 1)], 3), block_edges=0)


@first(2)
@pytest.mark.parametrize("wide_ids", [False, True])
@pytest.mark.parametrize("num_rounds", [1, 2, 3])
def test_where_disk_is_short_the_stream_is_read_more_often(monkeypatch, tmp_path, num_rounds, wide_ids):
    small_buckets(monkeypatch, max_entries=1_000)
    if wide_ids:
        for module in (layout, simple_graph):
            monkeypatch.setattr(module, "id_dtype", lambda num_nodes: np.dtype(np.int64))
    edges = np.random.default_rng(5).integers(0, 2_000, (60_000, 2))
    edges = edges[edges[:, 0] != edges[:, 1]]
    bytes_an_edge = ((12, 9, 8.31), (20, 16.67, 16.13))[wide_ids][num_rounds - 1]
    disk = type("Disk", (), {"free": int(1.03 * bytes_an_edge * len(edges))})
    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda folder: disk)
    sizes, told, threads = [], [], RowThreads(num_rounds)
    sort = entry_buckets.EntryBuckets.sort

    def note_size(self, file, *rest):
        sizes.append(os.fstat(file.fileno()).st_size)
        sort(self, file, *rest)

    monkeypatch.setattr(entry_buckets.EntryBuckets, "sort", note_size)
    stream = stream_of(edges, 2_000, layout="once", chunk_edges=len(edges))
    given = {"deduplicate": True, "progress": lambda what, *_: told.append(what), "threads": threads}
    with phases.recording() as record, closing(threads), open_external_csc(stream, tmp_path, **given) as csc:
        assert rows_read(csc) == rows_of([tuple(edge) for edge in edges.tolist()], 2_000, "once")
    assert told.count("adjacency") == len(sizes) == num_rounds
    assert max(sizes) <= record.notes["scratch_bytes"] <= disk.free


@pytest.mark.parametrize("new_end", [0, 1])
@pytest.mark.parametrize("num_changed", [1, 50, 11_000])
def test_a_graph_that_changes_between_passes_is_an_error(monkeypatch, tmp_path, new_end, num_changed):
    small_buckets(monkeypatch)
    edges = np.ascontiguousarray(random_edges().T.astype(np.int32))
    stream = open_edge_stream(edges, num_nodes=2_000, layout="once")

    def rewire(what, done, total):
        if what == "degrees":
            edges[new_end, :num_changed] = (edges[new_end, :num_changed] + 1) % 2_000 if num_changed == 1 else 5

    with pytest.raises(EdgeStreamError, match=said("edges changed partitioned")):
        open_external_csc(stream, tmp_path, progress=rewire)
    assert os.listdir(tmp_path) == []


def test_rows_that_fit_a_block_need_no_scratch_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda folder: type("Disk", (), {"free": 0}))
    edges = np.ascontiguousarray(random_edges(200, 3_000).T.astype(np.int32))
    stream = open_edge_stream(edges, num_nodes=200)
    for block_edges, blocks in ((6_000, 1), (3_000, 2)):
        with open_external_csc(stream, tmp_path, block_edges, True, held_blocks=blocks) as csc:
            expected = rows_of([tuple(edge) for edge in edges.T.tolist()], 200, "directed")
            assert csc.held and rows_read(csc) == rows_read(csc) == expected

    def rewire(what, done, total):
        edges[0, :7] = (edges[0, :7] + 1) % 200

    with pytest.raises(EdgeStreamError, match=said("edges changed partitioned")):
        open_external_csc(stream, tmp_path, 6_000, progress=rewire, held_blocks=1)
    with pytest.raises(GNNScaleError, match=said("scratch disk")):
        open_external_csc(stream, tmp_path, 1_000, held_blocks=1)


def test_rows_that_do_not_match_their_degrees_are_an_error(tmp_path):
    """Even where the checksum is blind, nothing is written outside of a row's place."""
    degree = np.array([2, 1, 1], np.int32)
    for edges in ([(1, 0), (1, 2)], [(2, 2), (2, 2)], [(0, 1)]):
        src, dst = np.array(edges, np.int32).T.copy()
        buckets = entry_buckets.EntryBuckets(degree, "a graph")
        with scratch.nameless_file(tmp_path) as file:
            file.truncate(buckets.file_bytes)
            buckets.spread(file, [[[(src, dst)]]])
            with pytest.raises(EdgeStreamError, match=said("graph edges changed")):
                buckets.sort(file, False)


def test_the_first_pass_goes_on_from_a_saved_state():
    edges = random_edges()
    stream = stream_of(edges, 2_000, chunk_edges=1_000)
    states = []

    def keep(state):
        states.append(layout.ScanState(*(array.copy() for array in state)))

    with open_external_csc(stream, deduplicate=True, after_chunk=keep) as csc:
        expected = rows_read(csc)
    told = []
    with open_external_csc(
        stream, deduplicate=True, state=states[6], progress=lambda what, *_: told.append(what)
    ) as csc:
        assert rows_read(csc) == expected
    assert told.count("degrees") == 5
    assert told.count("adjacency") == 12
    assert told.count("adjacency sort") == 1


def test_notes_and_phases_go_to_the_open_record():
    with phases.recording() as record, open_external_csc(stream_of([(0, 1), (1, 2)], 3)):
        pass
    assert set(record.seconds) == {"degrees", "adjacency"}
    assert record.notes == {
        "scratch_bytes": 384, "layout": "once", "repeated_share": 0.0, "deduplicated": False, "num_edges": 2,
    }  # fmt: skip
    assert record.graph.num_edges == 2
    with phases.recording() as record, open_external_csc(stream_of([(0, 1), (1, 0), (1, 2)], 3)):
        pass
    assert (record.notes["deduplicated"], record.notes["num_edges"], record.graph) == (True, 2, None)
