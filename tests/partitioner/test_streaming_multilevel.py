import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnnscale.edge_stream import open_edge_stream, write_edges
from lightning_gnnscale.errors import EdgeStreamError
from lightning_gnnscale.partitioner import evaluate_partitioning, partition, streaming_multilevel
from lightning_gnnscale.partitioner.graph_input import Checkpoint
from lightning_gnnscale.partitioner.multilevel import quotient
from lightning_gnnscale.partitioner.multilevel.row_form import RowClusters
from tests.oracles.spring import simple_edges
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

pytestmark = pytest.mark.filterwarnings("ignore:balance of")

ONE_BLOCK, SOME_BLOCKS = 1 << 23, 400


def multilevel(stream, num_parts, num_threads=1, **options):
    return partition(stream, "streaming_multilevel", num_parts, evaluate=False, num_threads=num_threads, **options)


@settings(max_examples=settings.default.max_examples // 4)
@given(graph=simple_graphs(), layout=st.sampled_from(["once", "both_ways", "directed"]), data=st.data())
def test_parts_are_balanced_or_what_is_too_much_is_told(graph, layout, data):
    num_nodes, edges = graph
    directed_edges = listed(edges, layout, data.draw(st.integers(0, 5)))
    told = data.draw(st.sampled_from([layout, "auto"])) if edges else "auto"
    num_parts = data.draw(st.integers(1, num_nodes))
    choices = [None, {"nodes": 1.0}, {"nodes": 1.5}, {"x": 1.2}, {"volume": 1.4}]
    balance = data.draw(st.sampled_from(choices if edges else choices[:4]))
    if edges and data.draw(st.booleans()):
        balance = {"nodes": 1.1, **(balance or {}), "volume": 1.5}
    masks = {"x": np.array([True, *data.draw(st.lists(st.booleans(), min_size=num_nodes - 1, max_size=num_nodes - 1))])}
    options = {
        "block_edges": data.draw(st.sampled_from([1, 4, 15, ONE_BLOCK])),
        "seed": data.draw(st.integers(0, 3)),
        "refinement_rounds": data.draw(st.integers(0, 2)),
        "balance": balance,
        "masks": masks,
    }
    stream = stream_of(directed_edges, num_nodes, layout=told, chunk_edges=data.draw(st.integers(1, 30)))
    try:
        p = multilevel(stream, num_parts, **options)
    except ValueError as error:
        assert "volume" in balance and "cannot be met: node" in str(error)
        return
    simple = simple_edges(directed_edges, p.notes["layout"])
    violations = check_balance(p, num_nodes, simple, balance, masks)
    if set(balance or {"nodes": 1}) in ({"nodes"}, {"x"}):  # weights of one can always be shared out
        assert violations == {}
    again = stream_of(directed_edges, num_nodes, np.int64, layout=told, chunk_edges=data.draw(st.integers(1, 30)))
    assert np.array_equal(multilevel(again, num_parts, **options).part_id, p.part_id)


@first(4)
@pytest.mark.parametrize("name", ODD)
def test_odd_graphs(name):
    num_nodes, edges = ODD[name]
    with pytest.raises(ValueError, match=said(f"num_parts [1, {num_nodes}] {num_nodes + 1}")):
        multilevel(stream_of(edges, num_nodes), num_nodes + 1)
    for num_parts in {1, min(2, num_nodes), min(4, num_nodes), num_nodes}:
        for block_edges in (1, 6, ONE_BLOCK):
            p = multilevel(stream_of(edges, num_nodes), num_parts, block_edges=block_edges)
            assert p.part_id.dtype == np.int32
            simple = simple_edges(edges, p.notes["layout"])
            assert check_balance(p, num_nodes, simple, None) == {}


@first(1)
@pytest.mark.parametrize(
    ("block_edges", "at_once", "effort"),
    [(ONE_BLOCK, ONE_BLOCK, "default"), (ONE_BLOCK, 0, "default"), (SOME_BLOCKS, 0, "default"), (2_600, 0, "fast")],
)
def test_threads_chunks_and_tables_change_nothing(monkeypatch, block_edges, at_once, effort):
    monkeypatch.setattr(streaming_multilevel, "AT_ONCE", at_once)
    edges, _ = planted(size=60, outside=6)
    options = {"block_edges": block_edges, "balance": {"nodes": 1.05, "volume": 1.1}, "effort": effort}
    expected = multilevel(stream_of(edges, 240, layout="once"), 5, **options).part_id
    assert effort == "default" or block_edges < 2 * len(edges) < 2 * block_edges  # two blocks are held in memory
    shared = use_threads_everywhere(monkeypatch)
    grow_tables(monkeypatch)
    for num_threads in (1, 2, 3):
        shared.clear()
        stream = stream_of(edges, 240, layout="once", chunk_edges=100 * num_threads)
        assert np.array_equal(multilevel(stream, 5, num_threads, **options).part_id, expected)
        if num_threads > 1:
            assert shared.count(num_threads) > (5 if at_once else 100)  # whole runs side by side


@settings(max_examples=settings.default.max_examples // 4)
@given(graph=simple_graphs(), layout=st.sampled_from(["once", "both_ways", "directed"]), data=st.data())
def test_quality_counted_over_rows_is_that_of_a_pass_over_the_stream(graph, layout, data):
    num_nodes, edges = graph
    directed_edges = listed(edges, layout, data.draw(st.integers(0, 5)))
    stream, num_parts = stream_of(directed_edges, num_nodes), data.draw(st.integers(1, num_nodes))
    masks = {"train": np.arange(num_nodes) % 3 == 0}
    options = {"block_edges": data.draw(st.sampled_from([1, 4, 15])), "masks": masks, "num_threads": 2}
    p = partition(stream, "streaming_multilevel", num_parts, **options)
    assert p.quality == evaluate_partitioning(stream, p.part_id, num_parts, masks=masks)


def test_quality_that_was_counted_reads_nothing_more(monkeypatch):
    edges, _ = planted(size=60, outside=6)
    p = partition(stream_of(edges, 240, layout="once"), "streaming_multilevel", 5, block_edges=SOME_BLOCKS)
    monkeypatch.setattr(sys.modules[partition.__module__], "evaluate_partitioning", None)
    assert p.quality.cut_edges == cut_of(edges, p.part_id) and p.seconds["quality"] > 0
    not_asked = multilevel(stream_of(edges, 240, layout="once"), 5, block_edges=SOME_BLOCKS)
    assert not_asked.quality is None and "quality" not in not_asked.seconds


@first(1)
@pytest.mark.parametrize("block_edges", [ONE_BLOCK, SOME_BLOCKS])
def test_file_format_and_id_dtype_change_nothing(tmp_path, block_edges):
    edges, _ = planted(size=60, outside=6)
    stream = stream_of(edges, 240, layout="once")
    expected = multilevel(stream, 4, block_edges=block_edges).part_id
    for suffix in (".bin", ".npy", ".csv", ".parquet"):
        path = write_edges(stream, tmp_path / f"edges{suffix}")
        read = open_edge_stream(path, num_nodes=240, layout="once", chunk_edges=99)
        assert np.array_equal(multilevel(read, 4, block_edges=block_edges).part_id, expected)
    wide = stream_of(edges, 240, np.int64, layout="once")
    assert np.array_equal(multilevel(wide, 4, block_edges=block_edges).part_id, expected)


@first(1)
@pytest.mark.parametrize("block_edges", [ONE_BLOCK, SOME_BLOCKS])
@pytest.mark.parametrize("layout", ["once", "both_ways"])
def test_a_planted_partition_is_found(block_edges, layout):
    for seed in range(3):
        edges, group = planted(seed=seed)
        directed_edges = np.concatenate((edges, edges[:, ::-1])) if layout == "both_ways" else edges
        p = multilevel(stream_of(directed_edges, 600, layout=layout), 4, seed=seed, block_edges=block_edges)
        assert cut_of(edges, p.part_id) <= 1.005 * cut_of(edges, group)
        assert cut_of(edges, p.part_id) < 0.3 * cut_of(edges, np.arange(600) % 4)
        assert p.notes["balance_violations"] == {}


@pytest.mark.sweep
def test_many_blocks_cut_about_as_little_as_one():
    cuts = {}
    for block_edges in (ONE_BLOCK, SOME_BLOCKS):
        cuts[block_edges] = 0
        for seed in range(3):
            edges, _ = planted(6, 100, inside=8, outside=5, seed=seed)
            p = multilevel(stream_of(edges, 600, layout="once"), 6, block_edges=block_edges)
            cuts[block_edges] += cut_of(edges, p.part_id)
    assert cuts[SOME_BLOCKS] <= 1.05 * cuts[ONE_BLOCK]


@first(1)
@pytest.mark.parametrize("block_edges", [ONE_BLOCK, SOME_BLOCKS])
@pytest.mark.parametrize("balance", [{"nodes": 1.05, "volume": 1.1}, {"nodes": 1.05, "volume": 1.1, "train": 1.05}])
def test_several_constraints_are_kept_at_once(block_edges, balance):
    for seed in range(3):
        edges = hubs_and_leaves(seed)
        train = np.random.default_rng(seed).random(500) < np.where(np.arange(500) < 200, 0.6, 0.05)
        p = multilevel(
            stream_of(edges, 500, layout="once"), 4, balance=balance, masks={"train": train}, block_edges=block_edges
        )
        assert check_balance(p, 500, edges.tolist(), balance, {"train": train}) == {}
        assert cut_of(edges, p.part_id) < 0.9 * cut_of(edges, np.arange(500) % 4)


FINE = {"quotient_edges_per_node": 10}
COARSER = {"quotient_edges_per_node": 0.02}  # the quotient graph is always too large: clusters grow to the very end


@first(3)
@pytest.mark.parametrize(
    ("saves", "options"),
    [
        *((saves, {"block_edges": ONE_BLOCK}) for saves in (1, 4, 6)),
        *((saves, {"block_edges": SOME_BLOCKS, **FINE}) for saves in (1, 6, 7, 8, 9, 10, 11, 12)),
        *((saves, {"block_edges": SOME_BLOCKS, **COARSER}) for saves in (8, 9, 10, 11, 12, 13)),
    ],
)
def test_resuming_after_a_kill_is_bit_identical(tmp_path, monkeypatch, saves, options):
    monkeypatch.setattr(streaming_multilevel, "MIN_QUOTIENT_EDGES", 1)
    edges = hubs_and_leaves(1)
    stream = stream_of(edges, 500, chunk_edges=len(edges) // 6 + 1, layout="once")
    options = {"balance": {"nodes": 1.05, "volume": 1.1}, **options}
    expected = multilevel(stream, 6, **options).part_id
    whole, before, after = [], [], []
    resumable = {"checkpoint": tmp_path / "state.npz", "checkpoint_every": 1, "scratch": tmp_path, **options}
    monkeypatch.setattr(Checkpoint, "save", killed_after(-1, whole))
    assert np.array_equal(multilevel(stream, 6, **resumable).part_id, expected)
    monkeypatch.setattr(Checkpoint, "save", killed_after(saves, before))
    with pytest.raises(Killed):
        multilevel(stream, 6, **resumable)
    assert [path.name for path in tmp_path.iterdir()] == ["state.npz"]
    monkeypatch.setattr(Checkpoint, "save", killed_after(-1, after))
    assert np.array_equal(multilevel(stream, 6, **resumable).part_id, expected)
    assert list(tmp_path.iterdir()) == []
    clustering_passes = whole.count("clustering")
    if COARSER.items() <= options.items():
        assert clustering_passes > 3
    else:
        assert clustering_passes == (0 if options["block_edges"] == ONE_BLOCK else 3)
    sweeps = whole.count("refinement")
    assert sweeps in ((0,) if clustering_passes == 0 else range(2, 8))
    clustered = ["clustering"] * clustering_passes + ["parts"] + ["refinement"] * sweeps
    assert whole == ["degrees"] * 6 + (clustered if clustering_passes else [])
    assert before + after == whole  # nothing that was saved is done again


@first(1)
@pytest.mark.parametrize("with_scratch", [True, False])
def test_a_graph_in_one_block_that_is_clustered_first_goes_on_too(tmp_path, monkeypatch, with_scratch):
    monkeypatch.setattr(streaming_multilevel, "AT_ONCE", 0)
    edges, scratch = hubs_and_leaves(1), tmp_path if with_scratch else None
    stream = stream_of(edges, 500, chunk_edges=len(edges) // 2 + 1, layout="once")
    resumable = {"checkpoint": tmp_path / "state.npz", "checkpoint_every": 1, "scratch": scratch}
    whole = []
    monkeypatch.setattr(Checkpoint, "save", killed_after(-1, whole))
    expected = multilevel(stream, 6, **resumable)
    assert expected.notes["balance_violations"] == {} and {"clustering", "parts", "refinement"} < set(whole)
    assert cut_of(edges, expected.part_id) < 1.02 * cut_of(edges, multilevel(stream, 6, effort="fast").part_id)
    for saves in range(3, len(whole)):
        monkeypatch.setattr(Checkpoint, "save", killed_after(saves, []))
        with pytest.raises(Killed):
            multilevel(stream, 6, **resumable)
        monkeypatch.setattr(Checkpoint, "save", original_save)
        assert np.array_equal(multilevel(stream, 6, **resumable).part_id, expected.part_id)


@pytest.mark.sweep
def test_a_checkpoint_of_other_masks_or_runs_is_not_used(tmp_path, monkeypatch):
    edges = hubs_and_leaves(1)
    stream = stream_of(edges, 500, layout="once")
    masks = [{"train": np.random.default_rng(i).random(500) < 0.3} for i in (0, 1)]
    options = {"balance": {"nodes": 1.1, "train": 1.05}, "block_edges": SOME_BLOCKS}
    path = tmp_path / "state.npz"
    for other in ({"masks": masks[1]}, {"masks": masks[0], "runs": 2}, {"masks": masks[0], "seed": 1}):
        monkeypatch.setattr(Checkpoint, "save", killed_after(5, []))
        with pytest.raises(Killed):
            multilevel(stream, 4, masks=masks[0], checkpoint=path, checkpoint_every=1, **options)
        monkeypatch.setattr(Checkpoint, "save", original_save)
        expected = multilevel(stream, 4, **other, **options).part_id
        assert np.array_equal(multilevel(stream, 4, checkpoint=path, **other, **options).part_id, expected)
        assert not path.exists()


@pytest.mark.sweep
def test_a_quotient_graph_that_is_too_large_makes_clusters_coarser(monkeypatch):
    edges, group = planted(outside=8, seed=1)
    stream = stream_of(edges, 600, layout="once")
    notes = {}
    for per_node in (1e6, 0.5, 0.001):
        p = multilevel(stream, 4, block_edges=SOME_BLOCKS, quotient_edges_per_node=per_node)
        notes[per_node] = p.notes["quotient_edges"]
        assert notes[per_node] == notes[1e6]  # below MIN_QUOTIENT_EDGES nothing is too large
    monkeypatch.setattr(streaming_multilevel, "MIN_QUOTIENT_EDGES", 1)
    fine, coarse, coarsest = (
        multilevel(stream, 4, block_edges=SOME_BLOCKS, quotient_edges_per_node=per_node) for per_node in (1e6, 0.5, 0)
    )
    assert fine.notes["quotient_edges"] == notes[1e6]
    assert coarse.notes["quotient_edges"] <= 0.5 * 600 < fine.notes["quotient_edges"]
    assert coarsest.notes["quotient_nodes"] < coarse.notes["quotient_nodes"] < fine.notes["quotient_nodes"]
    for p in (coarse, coarsest):
        assert p.notes["balance_violations"] == {}
        assert cut_of(edges, p.part_id) <= 1.1 * cut_of(edges, group)


def test_clusters_are_joined_in_memory_where_that_saves_a_pass(monkeypatch):
    edges, group = planted(size=300, outside=5)
    monkeypatch.setattr(streaming_multilevel, "MIN_QUOTIENT_EDGES", 1)
    monkeypatch.setattr(quotient, "_ENOUGH_TO_JOIN", 1)
    passes, original = [], RowClusters.step
    monkeypatch.setattr(RowClusters, "step", lambda *args: (passes.append(args[1]), original(*args)))
    counts = []
    for joined_edges in (0.0, 2.0):
        passes.clear()
        monkeypatch.setattr(quotient, "JOINED_EDGES", joined_edges)
        stream, options = stream_of(edges, 1200, layout="once"), {"block_edges": SOME_BLOCKS}
        p = multilevel(stream, 4, quotient_edges_per_node=0.2, **options)
        assert p.notes["quotient_edges"] <= 0.2 * 1200 and p.notes["balance_violations"] == {}
        assert cut_of(edges, p.part_id) <= 1.05 * cut_of(edges, group)
        assert np.array_equal(multilevel(stream, 4, 2, quotient_edges_per_node=0.2, **options).part_id, p.part_id)
        counts.append(len(passes))
    assert counts[1] < counts[0]


@pytest.mark.parametrize("block_edges", [ONE_BLOCK, SOME_BLOCKS])
def test_a_graph_that_changes_between_passes_is_an_error(tmp_path, block_edges):
    edges = np.ascontiguousarray(hubs_and_leaves(0).T.astype(np.int32))
    stream = open_edge_stream(edges, num_nodes=500, layout="once")

    def rewire(what, done, total):
        if what == "degrees":
            edges[1, 5] = (edges[1, 5] + 1) % 500

    with pytest.raises(EdgeStreamError, match="changed while they were partitioned"):
        multilevel(stream, 4, progress=rewire, block_edges=block_edges, scratch=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effort": "most"}, "partitioner.effort fast default best 'most'"),
        ({"passes": 0}, "partitioner.passes >= 1 0"),
        ({"refinement_rounds": -1}, "partitioner.refinement_rounds >= 0 -1"),
        ({"runs": 0}, "partitioner.runs"),
        ({"cycles": float("nan")}, "partitioner.cycles >= 0 nan"),
        ({"quotient_edges_per_node": -1}, "partitioner.quotient_edges_per_node"),
        ({"num_threads": 0}, "partitioner.num_threads >= 1 0"),
        ({"block_edges": 0}, "partitioner.block_edges"),
        ({"checkpoint_every": "often"}, "partitioner.checkpoint_every"),
        ({"scratch": None, "deduplicate": True}, "deduplicate=True scratch="),
        ({"balance": {"nodes": 0.9}}, "partitioner.balance.nodes >= 1 0.9"),
        ({"balance": {"train": 1.1}}, "mask 'train' balanced"),
        ({"blocks": 1}, "blocks refinement_rounds quotient_edges_per_node"),
    ],
)
def test_bad_options_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=said(message)):
        multilevel(stream_of([(0, 1)], 2), 2, **{"scratch": tmp_path, **options})
    assert list(tmp_path.iterdir()) == []


def test_more_parts_than_16_bits_count_are_refused():
    with pytest.raises(ValueError, match=said("'streaming_multilevel' [1, 32767] 32768")):
        multilevel(stream_of([(0, 1)], 40_000), 32_768)


def test_nothing_is_left_behind_after_an_error_while_blocks_are_read(tmp_path, monkeypatch):
    def fail(*_):
        raise Killed

    monkeypatch.setattr(streaming_multilevel, "build_quotient", fail)
    threads = threading.active_count()
    with pytest.raises(Killed):
        multilevel(stream_of(hubs_and_leaves(0), 500), 4, 2, block_edges=SOME_BLOCKS, scratch=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == threads


@pytest.mark.sweep
def test_more_effort_does_not_cut_more():
    for seed in range(2):
        stream = stream_of(hubs_and_leaves(seed), 500, layout="once")
        once, more = (
            cut_of(hubs_and_leaves(seed), multilevel(stream, 4, runs=runs, cycles=cycles).part_id)
            for runs, cycles in ((1, 0), (2, 2))
        )
        assert more <= once


@pytest.mark.sweep
@pytest.mark.parametrize("block_edges", [SOME_BLOCKS, 1 << 20])
def test_efforts_stand_for_options(block_edges, monkeypatch):
    stream, whole = stream_of(hubs_and_leaves(0), 500, layout="once"), block_edges == 1 << 20
    cuts = {}
    for effort, tries in streaming_multilevel.EFFORTS.items():
        passes, rounds, per_node, runs, cycles = tries[:5]
        passes = 1 if whole and tries.sample else passes
        given = {"passes": passes, "refinement_rounds": rounds, "quotient_edges_per_node": per_node}
        given |= {"runs": runs[whole], "cycles": cycles[whole], "block_edges": block_edges}
        by_name = multilevel(stream, 4, effort=effort, block_edges=block_edges).part_id
        with monkeypatch.context() as patched:  # the others are no options
            others = {name: getattr(tries, name) for name in tries._fields[5:]}
            same = streaming_multilevel.EFFORTS["default"]._replace(**others)
            patched.setitem(streaming_multilevel.EFFORTS, "default", same)
            assert np.array_equal(by_name, multilevel(stream, 4, **given).part_id)
        cuts[effort] = cut_of(hubs_and_leaves(0), by_name)
    assert cuts["best"] <= 1.02 * cuts["default"] <= 1.1 * cuts["fast"]
