"""The streamed multilevel method without scratch disk."""

import os
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnnscale.edge_stream import open_edge_stream, write_edges
from lightning_gnnscale.errors import EdgeStreamError
from lightning_gnnscale.partitioner import partition, streaming_multilevel
from lightning_gnnscale.partitioner.graph_input import Checkpoint
from tests.partitioner.graphs import ODD, listed, simple_graphs, stream_of
from tests.partitioner.streamed_runs import (
    Killed,
    check_balance,
    cut_of,
    grow_tables,
    hubs_and_leaves,
    killed_after,
    original_save,
    planted,
    use_threads_everywhere,
)
from tests.says import said
from tests.tiers import first

pytestmark = pytest.mark.filterwarnings("ignore:balance of", "ignore:.*listed more often than")

IN_MEMORY, STREAMED = 1 << 23, 1  # block_edges
TWO = {"nodes": 1.05, "volume": 1.1}


def without_scratch(stream, num_parts, num_threads=1, block_edges=STREAMED, **options):
    options = {"evaluate": False, "scratch": None, "block_edges": block_edges, **options}
    return partition(stream, "streaming_multilevel", num_parts, num_threads=num_threads, **options)


def counted_edges(edges, layout):
    """The edges that count: repeats do, where the layout does not distinguish them."""
    return [(u, v) for u, v in edges if (u < v if layout == "both_ways" else u != v)]


@settings(max_examples=settings.default.max_examples // 4)
@given(graph=simple_graphs(), layout=st.sampled_from(["once", "both_ways", "directed"]), data=st.data())
def test_parts_are_balanced_or_what_is_too_much_is_told(graph, layout, data):
    num_nodes, edges = graph
    directed_edges = listed(edges, layout, data.draw(st.integers(0, 5)))
    told = data.draw(st.sampled_from([layout, "auto"])) if edges else "auto"
    num_parts = data.draw(st.integers(1, num_nodes))
    choices = [None, {"nodes": 1.0}, {"x": 1.2}, {"volume": 1.4}, {"nodes": 1.1, "volume": 1.5}]
    balance = data.draw(st.sampled_from(choices if edges else choices[:3]))
    masks = {"x": np.array([True, *data.draw(st.lists(st.booleans(), min_size=num_nodes - 1, max_size=num_nodes - 1))])}
    options = {
        "block_edges": data.draw(st.sampled_from([STREAMED, STREAMED, IN_MEMORY])),
        "seed": data.draw(st.integers(0, 3)),
        "refinement_rounds": data.draw(st.integers(0, 2)),
        "balance": balance,
        "masks": masks,
    }
    stream = stream_of(directed_edges, num_nodes, layout=told, chunk_edges=data.draw(st.integers(1, 30)))
    try:
        p = without_scratch(stream, num_parts, **options)
    except ValueError as error:
        assert "volume" in balance and "cannot be met: node" in str(error)
        return
    violations = check_balance(p, num_nodes, counted_edges(directed_edges, p.notes["layout"]), balance, masks)
    if set(balance or {"nodes": 1}) in ({"nodes"}, {"x"}):  # weights of one can always be shared out
        assert violations == {}
    again = stream_of(directed_edges, num_nodes, np.int64, layout=told, chunk_edges=data.draw(st.integers(1, 30)))
    assert np.array_equal(without_scratch(again, num_parts, **options).part_id, p.part_id)


@first(4)
@pytest.mark.parametrize("name", ODD)
def test_odd_graphs(name):
    num_nodes, edges = ODD[name]
    for num_parts in {1, min(2, num_nodes), min(4, num_nodes), num_nodes}:
        for block_edges in (STREAMED, IN_MEMORY):
            p = without_scratch(stream_of(edges, num_nodes), num_parts, block_edges=block_edges)
            assert p.part_id.dtype == np.int32
            assert check_balance(p, num_nodes, counted_edges(edges, p.notes["layout"]), None) == {}


@first(1)
@pytest.mark.parametrize("num_parts", [5, 12])
def test_threads_chunks_and_tables_change_nothing(monkeypatch, num_parts):
    edges, _ = planted(size=60, outside=6)
    options = {"balance": {"nodes": 1.05, "volume": 1.2}}
    expected = without_scratch(stream_of(edges, 240, layout="once"), num_parts, **options).part_id
    shared = use_threads_everywhere(monkeypatch)
    grow_tables(monkeypatch)
    for num_threads in (1, 2, 3):
        shared.clear()
        stream = stream_of(edges, 240, layout="once", chunk_edges=100 * num_threads)
        assert np.array_equal(without_scratch(stream, num_parts, num_threads, **options).part_id, expected)
        if num_threads > 1:
            assert shared.count(num_threads) > 100


@first(1)
@pytest.mark.parametrize("block_edges", [STREAMED, IN_MEMORY])
def test_file_format_and_id_dtype_change_nothing(tmp_path, block_edges):
    edges, _ = planted(size=60, outside=6)
    stream = stream_of(edges, 240, layout="once")
    expected = without_scratch(stream, 4, block_edges=block_edges).part_id
    for suffix in (".bin", ".npy", ".csv", ".parquet"):
        path = write_edges(stream, tmp_path / f"edges{suffix}")
        read = open_edge_stream(path, num_nodes=240, layout="once", chunk_edges=99)
        assert np.array_equal(without_scratch(read, 4, block_edges=block_edges).part_id, expected)


@first(1)
@pytest.mark.parametrize("layout", ["once", "both_ways"])
def test_a_planted_partition_is_found(layout):
    for seed in range(3):
        edges, group = planted(seed=seed)
        directed_edges = np.concatenate((edges, edges[:, ::-1])) if layout == "both_ways" else edges
        p = without_scratch(stream_of(directed_edges, 600, layout=layout), 4, seed=seed)
        assert cut_of(edges, p.part_id) <= 1.02 * cut_of(edges, group)
        assert p.notes["balance_violations"] == {}


@pytest.mark.sweep
def test_the_cut_is_about_that_with_scratch_disk():
    cuts = np.zeros(2)
    for seed in range(3):
        stream = stream_of(edges := planted(6, 100, inside=8, outside=5, seed=seed)[0], 600, layout="once")
        with_scratch = partition(stream, "streaming_multilevel", 6, evaluate=False, block_edges=400)
        cuts += cut_of(edges, without_scratch(stream, 6).part_id), cut_of(edges, with_scratch.part_id)
    assert cuts[0] <= 1.1 * cuts[1]


def test_what_fits_one_block_is_partitioned_as_with_scratch_disk():
    stream = stream_of(hubs_and_leaves(0), 500, layout="once")
    with_scratch = partition(stream, "streaming_multilevel", 6, evaluate=False)
    told = []
    p = without_scratch(stream, 6, block_edges=IN_MEMORY, progress=lambda what, *_: told.append(what))
    assert abs(cut_of(hubs_and_leaves(0), p.part_id) / cut_of(hubs_and_leaves(0), with_scratch.part_id) - 1) < 0.05
    assert set(told) == {"degrees", "rows"}


@first(1)
@pytest.mark.parametrize("balance", [TWO, {**TWO, "train": 1.05}])
def test_several_constraints_are_kept_at_once(balance):
    for seed in range(3):
        edges = hubs_and_leaves(seed)
        train = np.random.default_rng(seed).random(500) < np.where(np.arange(500) < 200, 0.6, 0.05)
        p = without_scratch(stream_of(edges, 500, layout="once"), 4, balance=balance, masks={"train": train})
        assert check_balance(p, 500, edges.tolist(), balance, {"train": train}) == {}
        assert cut_of(edges, p.part_id) < 0.9 * cut_of(edges, np.arange(500) % 4)


COARSER = {"quotient_edges_per_node": 0.02}  # the quotient graph is always too large: clusters grow to the very end


@first(1)
@pytest.mark.parametrize("options", [{"balance": TWO, "quotient_edges_per_node": 10}, COARSER])
def test_a_kill_in_any_pass_changes_nothing(tmp_path, monkeypatch, options):
    monkeypatch.setattr(streaming_multilevel, "MIN_QUOTIENT_EDGES", 1)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # it is the process that is killed, not the machine
    edges = hubs_and_leaves(1)
    stream = stream_of(edges, 500, chunk_edges=len(edges) // 2 + 1, layout="once")
    told, phases = [], []
    monkeypatch.setattr(Checkpoint, "save", killed_after(-1, phases))
    resumable = {"checkpoint": tmp_path / "state.npz", "checkpoint_every": 1, **options}
    expected = without_scratch(stream, 9, progress=lambda what, *_: told.append(what), **resumable).part_id
    rounds = phases.count("clustering") // 2
    assert rounds > 3 if options is COARSER else rounds == 3
    assert phases == ["degrees"] * 2 + ["clustering"] * (1 + 2 * rounds) + ["parts"] + ["refinement"] * 2
    for kill in range(0, len(told), 2):  # in the middle of every pass
        left = [kill]

        def progress(*_, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        phases.clear()
        with pytest.raises(Killed):
            without_scratch(stream, 9, progress=progress, **resumable)
        assert np.array_equal(without_scratch(stream, 9, **resumable).part_id, expected)
        assert list(tmp_path.iterdir()) == []
        assert phases.count("clustering") == 1 + 2 * rounds  # nothing that was saved is done again
        assert phases.count("refinement") == 2


def test_a_checkpoint_of_the_form_with_scratch_disk_is_not_used(tmp_path, monkeypatch):
    stream = stream_of(hubs_and_leaves(1), 500, layout="once")
    path = tmp_path / "state.npz"
    options = {"evaluate": False, "block_edges": 400, "checkpoint": path, "checkpoint_every": 1}
    monkeypatch.setattr(Checkpoint, "save", killed_after(4, []))
    with pytest.raises(Killed):
        partition(stream, "streaming_multilevel", 4, **options)
    monkeypatch.setattr(Checkpoint, "save", original_save)
    expected = without_scratch(stream, 4, block_edges=400).part_id
    assert np.array_equal(partition(stream, "streaming_multilevel", 4, scratch=None, **options).part_id, expected)
    assert not path.exists()


@first(2)
@pytest.mark.parametrize("when", ["degrees", "rows", "clustering", "quotient", "refinement"])
def test_a_graph_that_changes_between_passes_is_an_error(when):
    edges = np.ascontiguousarray(hubs_and_leaves(0).T.astype(np.int32))
    stream = open_edge_stream(edges, num_nodes=500, layout="once", chunk_edges=600)

    def rewire(what, done, total):
        if what == when and done == (600 if when == "rows" else total):  # the last pass over rows is no longer checked
            edges[1, 5 if when != "rows" else -1] = (edges[1, 5] + 1) % 500

    with pytest.raises(EdgeStreamError, match="changed while they were partitioned"):
        without_scratch(stream, 4, progress=rewire, block_edges=IN_MEMORY if when == "rows" else STREAMED)


written = None  # files opened to be written, while someone listens


def _listen(event, args):
    if written is not None and event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        written.append(args[0])


def test_no_file_is_written():
    global written
    stream = stream_of(hubs_and_leaves(0), 500, layout="once")
    sys.addaudithook(_listen)
    for block_edges in (STREAMED, IN_MEMORY):
        without_scratch(stream, 4, block_edges=block_edges)  # whatever is not compiled yet may be written once
        written = []
        try:
            without_scratch(stream, 4, block_edges=block_edges)
        finally:
            seen, written = written, None
        assert seen == []


def test_repeats_stay_and_are_told():
    edges = hubs_and_leaves(0)
    directed_edges = np.concatenate((edges, edges[:800, ::-1], edges[:500]))
    with pytest.warns(UserWarning, match="again in the partitioner's cut.* cut alone: .* keeps every listed edge"):
        p = without_scratch(stream_of(directed_edges, 500, layout="once"), 4)
    assert p.notes["num_edges"] == len(directed_edges)
    assert p.notes["deduplicated"] is False
    assert p.notes["balance_violations"] == {}
    with pytest.raises(ValueError, match=said("deduplicate=True scratch=")):
        without_scratch(stream_of(directed_edges, 500), 4, deduplicate=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert without_scratch(stream_of(directed_edges, 500, layout="once"), 1).notes["repeated_share"]  # nothing cut
    with pytest.warns(UserWarning, match="cut alone: .* keeps one edge of each type"):
        without_scratch(stream_of(directed_edges, 500, layout="once", to_undirected=True), 4)


def test_a_node_with_many_more_repeats_than_edges_stays_with_them():
    """What is listed a hundred times weighs a hundred: it is not cut, though each pair is but one edge."""
    edges = [(u, u + 1) for u in range(0, 40, 2)] * 100 + [(u, (u + 5) % 40) for u in range(40)]
    p = without_scratch(stream_of(edges, 40, layout="once"), 4)
    assert all(p.part_id[u] == p.part_id[u + 1] for u in range(0, 40, 2))
