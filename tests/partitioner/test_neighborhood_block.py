"""ByteGNN's blocks equal the oracle's; their parts are balanced, resume after a kill, and stay together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.edge_stream import open_edge_stream, write_edges
from lightning_gnnscale.errors import EdgeStreamError
from lightning_gnnscale.partitioner import evaluate_partitioning, partition
from lightning_gnnscale.partitioner import neighborhood_block as module
from lightning_gnnscale.partitioner.graph_input import Checkpoint, GraphInput
from lightning_gnnscale.partitioner.multilevel import pair_table
from lightning_gnnscale.partitioner.multilevel.pair_table import EdgeSample, PairTable, edge_pairs, rows_of_pairs
from tests.oracles.neighborhood_block import grow
from tests.oracles.spring import simple_edges
from tests.partitioner.graphs import ODD, listed, simple_graphs, stream_of
from tests.says import said
from tests.tiers import first

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NAMES = ("train", "val", "test")


def blocks(stream, num_parts, masks, **options):
    return partition(stream, "neighborhood_block", num_parts, masks=masks, evaluate=False, **options)


@given(graph=simple_graphs(), layout=st.sampled_from(["once", "both_ways", "directed"]), data=st.data())
def test_blocks_equal_the_oracles_in_every_layout(graph, layout, data):
    num_nodes, edges = graph
    directed_edges = listed(edges, layout, data.draw(st.integers(0, 5)))
    labelled = np.array(data.draw(st.lists(st.booleans(), min_size=num_nodes, max_size=num_nodes)))
    labelled[data.draw(st.integers(0, num_nodes - 1))] = True
    most = data.draw(st.integers(2, 6))
    stream = stream_of(
        directed_edges, num_nodes, layout=layout if edges else "auto", chunk_edges=data.draw(st.integers(1, 20))
    )
    given_graph = GraphInput("neighborhood_block", stream, {"num_parts": 2})
    given_graph.open_simple()
    found = module._grow_blocks(given_graph, labelled, most)
    assert found.tolist() == grow(simple_edges(directed_edges, layout), num_nodes, labelled, most)


@given(graph=simple_graphs(), num_parts=st.integers(1, 6), data=st.data())
def test_every_node_has_a_part_and_nodes_are_capped(graph, num_parts, data):
    num_nodes, edges = graph
    num_parts = min(num_parts, num_nodes)
    masks = {
        name: np.array(data.draw(st.lists(st.booleans(), min_size=num_nodes, max_size=num_nodes))) for name in NAMES
    }
    masks["train"][data.draw(st.integers(0, num_nodes - 1))] = True
    p = blocks(stream_of(edges, num_nodes), num_parts, masks)
    assert p.part_id.dtype == np.int32 and p.part_id.min() >= 0 and p.part_id.max() < num_parts
    told = p.notes["balance_violations"]
    for name, counted in {"nodes": np.ones(num_nodes, bool), **masks}.items():
        if counted.any():
            cap = max(int(1.05 * counted.sum() / num_parts * (1 + 1e-12)), -(-int(counted.sum()) // num_parts))
            most = np.bincount(p.part_id[counted], minlength=num_parts).max()
            assert max(0, most - cap) == told.get(name, 0)


@pytest.mark.parametrize("name", ODD)
def test_odd_graphs_have_parts(name):
    num_nodes, edges = ODD[name]
    masks = {"train": np.arange(num_nodes) % 4 == 0, "test": np.zeros(num_nodes, bool)}
    for num_parts in (1, 2, 4):
        if num_parts > num_nodes:
            with pytest.raises(ValueError, match=said(f"num_parts [1, {num_nodes}] {num_parts}")):
                blocks(stream_of(edges, num_nodes), num_parts, masks)
            continue
        p = blocks(stream_of(edges, num_nodes), num_parts, masks)
        assert len(p.part_id) == num_nodes and set(p.part_id.tolist()) <= set(range(num_parts))


def labelled_graph(num_nodes=300, num_edges=700, seed=3, share=0.4):
    """A heavy-tailed graph with a long tail of nodes that two hops do not reach, and some without any edge."""
    rng = np.random.default_rng(seed)
    weight = rng.pareto(1.5, num_nodes) + 1
    pairs = rng.choice(num_nodes, (num_edges, 2), p=weight / weight.sum())
    pairs = np.concatenate(
        [pairs[pairs[:, 0] != pairs[:, 1]], np.stack([np.arange(19), np.arange(1, 20)], 1) + num_nodes]
    )
    _, first = np.unique(np.sort(pairs, 1), axis=0, return_index=True)
    pairs, num_nodes = pairs[np.sort(first)], num_nodes + 30
    masks = {name: (rng.random(num_nodes) < share / 3) & (np.arange(num_nodes) <= 300) for name in NAMES}
    return pairs, num_nodes, masks


@first(1)
@pytest.mark.parametrize("suffix", [".bin", ".npy", ".csv", ".parquet"])
def test_file_format_and_chunk_size_change_nothing(tmp_path, suffix, monkeypatch):
    edges, num_nodes, masks = labelled_graph()
    expected = blocks(stream_of(edges, num_nodes, layout="once"), 3, masks).part_id
    path = write_edges(stream_of(edges, num_nodes, layout="once"), tmp_path / f"edges{suffix}")
    for chunk_edges, bits in ((70, 1), (512, 6), (1 << 20, 12)):
        monkeypatch.setattr(pair_table, "FIRST_BITS", bits)
        stream = open_edge_stream(path, num_nodes=num_nodes, layout="once", chunk_edges=chunk_edges)
        assert np.array_equal(blocks(stream, 3, masks).part_id, expected)


def test_the_order_and_the_dtype_of_edges_change_nothing():
    edges, num_nodes, masks = labelled_graph()
    expected = blocks(stream_of(edges, num_nodes), 5, masks).part_id
    shuffled = np.random.default_rng(0).permutation(edges)[:, ::-1]
    assert np.array_equal(blocks(stream_of(shuffled, num_nodes, np.int64), 5, masks).part_id, expected)


def test_nodes_beyond_the_last_hop_make_blocks_by_their_ids(monkeypatch):
    monkeypatch.setattr(module, "MAX_HOPS", 3)
    path = [(v, v + 1) for v in range(29)]
    graph = GraphInput("neighborhood_block", stream_of(path, 30), {"num_parts": 2})
    graph.open_simple()
    labelled = np.arange(30) < 2
    assert module._grow_blocks(graph, labelled, 5).tolist() == grow(path, 30, labelled, 5, max_hops=3)
    p = blocks(stream_of(path, 30), 2, {"train": labelled})
    assert abs(int(p.part_id.sum()) - 15) <= 1


class Killed(Exception):
    pass


def stop_after(saves):
    left = [saves]

    def save(self, phase, arrays):
        original_save(self, phase, arrays)
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    return save


original_save = Checkpoint.save


@first(1)
@pytest.mark.parametrize("layout", ["once", "directed"])
def test_resuming_after_a_kill_in_any_pass_is_bit_identical(tmp_path, monkeypatch, layout):
    edges, num_nodes, masks = labelled_graph()
    directed_edges = listed([tuple(e) for e in edges.tolist()], layout)
    stream = stream_of(directed_edges, num_nodes, chunk_edges=len(directed_edges) // 2 + 1, layout=layout)
    options = {"checkpoint": tmp_path / "state.npz", "checkpoint_every": 1}
    saved = []

    def counted(self, phase, arrays):
        saved.append(phase)
        original_save(self, phase, arrays)

    monkeypatch.setattr(Checkpoint, "save", counted)
    expected = blocks(stream, 7, masks, **options)
    assert list(dict.fromkeys(saved))[1:] == ["blocks", "parts", "refinement"]
    ends = [i for i in range(1, len(saved) + 1) if i == len(saved) or saved[i] != saved[i - 1]]
    for saves in sorted({*ends, *(end - 1 for end in ends), 2, 3, 5}):
        monkeypatch.setattr(Checkpoint, "save", stop_after(saves))
        with pytest.raises(Killed):
            blocks(stream, 7, masks, **options)
        monkeypatch.setattr(Checkpoint, "save", original_save)
        assert np.array_equal(blocks(stream, 7, masks, **options).part_id, expected.part_id)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.sweep
def test_a_checkpoint_of_another_run_is_not_used(tmp_path, monkeypatch):
    edges, num_nodes, masks = labelled_graph()
    stream = stream_of(edges, num_nodes, chunk_edges=100)
    path = tmp_path / "state.npz"
    other_masks = {"train": ~masks["train"]}
    for changed in ({"num_parts": 5}, {"seed": 1}, {"masks": other_masks}, {"balance": {"nodes": 1.2}}):
        monkeypatch.setattr(Checkpoint, "save", stop_after(14))
        with pytest.raises(Killed):
            blocks(stream, 4, masks, checkpoint=path, checkpoint_every=1)
        monkeypatch.setattr(Checkpoint, "save", original_save)
        changed = {"num_parts": 4, "masks": masks, **changed}
        assert np.array_equal(blocks(stream, checkpoint=path, **changed).part_id, blocks(stream, **changed).part_id)


def test_a_graph_that_changes_between_passes_is_an_error():
    edges, num_nodes, masks = labelled_graph()
    edges = np.ascontiguousarray(edges.T.astype(np.int32))
    stream = open_edge_stream(edges, num_nodes=num_nodes, layout="once")

    def rewire(what, done, total):
        if what == "degrees":
            edges[1, 5] = (edges[1, 5] + 1) % num_nodes

    with pytest.raises(EdgeStreamError, match="changed while they were partitioned"):
        blocks(stream, 4, masks, progress=rewire)


def test_nodes_and_masks_are_balanced_and_neighborhoods_stay_together():
    rng = np.random.default_rng(0)
    inside = rng.integers(0, 50, (10_000, 2)) + 50 * rng.integers(0, 40, (10_000, 1))
    edges = np.concatenate([inside, rng.integers(0, 2000, (1_000, 2))])
    edges = np.unique(np.sort(edges[edges[:, 0] != edges[:, 1]], 1), axis=0)
    masks = {"train": rng.random(2000) < 0.2}
    stream = stream_of(edges, 2000)
    p = blocks(stream, 4, masks)
    q = evaluate_partitioning(stream, p.part_id, 4, masks=masks)
    assert q.train_balance <= 1.06 and q.node_balance <= 1.05
    assert q.edge_cut_ratio < 0.15  # 0.75 at random, 0.07 of the edges lead anywhere


def test_the_quotient_is_summed_exactly_while_its_table_grows(monkeypatch):
    rng = np.random.default_rng(1)
    block = rng.integers(-1, 30, 200).astype(np.int32)
    src, dst = rng.integers(0, 200, (2, 5000)).astype(np.int32)
    monkeypatch.setattr(pair_table, "FIRST_BITS", 1)
    table, keys, bound = PairTable(5), np.empty(700, np.int64), EdgeSample(0).bound
    for start in range(0, 5000, 700):
        table.add(
            keys,
            [(0, edge_pairs(src[start : start + 700], dst[start : start + 700], block, 5, keys, bound))],
        )
    num_pairs = table.size
    indptr, other, weight = rows_of_pairs([table], 30, np.int64)
    expected = np.zeros((30, 30), int)
    for a, b in zip(block[src], block[dst], strict=True):
        if a >= 0 and b >= 0 and a != b:
            expected[a, b] += 1
            expected[b, a] += 1
    found = np.zeros((30, 30), int)
    for a in range(30):
        row = slice(indptr[a], indptr[a + 1])
        assert len(set(other[row].tolist())) == row.stop - row.start
        found[a, other[row]] = weight[row]
    assert np.array_equal(found, expected)
    assert num_pairs == np.count_nonzero(np.triu(expected))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"masks": None}, "nodes masks={'train' (2,) None"),
        ({"masks": {"train": np.zeros(2, bool)}}, "with at least one node, got"),
        (
            {"masks": {"labelled": np.ones(2, bool)}},
            "'train' 'val' 'test' ['labelled'",
        ),
        ({"masks": {"val": np.ones(3, bool)}}, "masks['val'] (2,) (3,)"),
        ({"masks": {"val": np.ones(2, int)}}, "masks['val'] (2,) (2,) int64"),
        ({"refinement_rounds": -1}, "partitioner.refinement_rounds >= 0 -1"),
        ({"checkpoint_every": 0}, "partitioner.checkpoint_every"),
        (
            {"balance": {"volume": 1.05}},
            "partitioner.balance 'neighborhood_block' nodes masks volume",
        ),
        ({"balance": {"val": 1.05}}, "partitioner.balance.val 'val'"),
        ({"num_hops": 2}, "num_hops refinement_rounds"),
    ],
)
def test_bad_options_are_named(options, message):
    options = {"masks": {"train": np.ones(2, bool)}, **options}
    with pytest.raises(ValueError, match=said(message)):
        blocks(stream_of([(0, 1)], 2), 2, **options)
