import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnnscale.edge_stream import open_edge_stream, write_edges
from lightning_gnnscale.errors import EdgeStreamError
from lightning_gnnscale.partitioner import evaluate_partitioning, partition
from lightning_gnnscale.partitioner import neighborhood_block as module
from lightning_gnnscale.partitioner.graph_input import Checkpoint
from lightning_gnnscale.partitioner.multilevel import pair_table
from lightning_gnnscale.partitioner.multilevel.pair_table import PairTable, edge_pairs, rows_of_pairs
from tests.oracles.neighborhood_block import block_parts
from tests.oracles.spring import simple_edges
from tests.partitioner.graphs import ODD, listed, simple_graphs, stream_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NAMES = ("train", "val", "test")


def blocks(stream, num_parts, masks, **options):
    return partition(stream, "neighborhood_block", num_parts, masks=masks, evaluate=False, **options)


def expected_parts(edges, num_nodes, num_parts, masks, **options):
    used = [masks[name].tolist() for name in NAMES if name in masks and masks[name].any()]
    return block_parts(edges, num_nodes, num_parts, used, **options)


@settings(max_examples=150)
@given(graph=simple_graphs(), layout=st.sampled_from(["once", "both_ways", "directed"]), data=st.data())
def test_equals_the_oracle_in_every_layout(graph, layout, data):
    num_nodes, edges = graph
    arcs = listed(edges, layout, data.draw(st.integers(0, 5)))
    num_parts = data.draw(st.integers(1, min(num_nodes, 6)))
    masks = {
        name: np.array(data.draw(st.lists(st.booleans(), min_size=num_nodes, max_size=num_nodes)))
        for name in data.draw(st.sampled_from([("train",), ("val", "train"), NAMES]))
    }
    if not any(mask.any() for mask in masks.values()):
        masks["train"][data.draw(st.integers(0, num_nodes - 1))] = True
    options = {"num_hops": data.draw(st.integers(1, 3)), "epsilon": data.draw(st.sampled_from([0.0, 0.03, 0.5]))}
    given_weights = data.draw(st.sampled_from([{}, {"train_weight": 0.5, "val_weight": 0.0, "test_weight": 2.0}]))
    used = [name for name in NAMES if name in masks and masks[name].any()]
    weights = [given_weights[f"{name}_weight"] for name in used] if given_weights else None
    told = data.draw(st.sampled_from([layout, "auto"])) if edges else "auto"
    stream = stream_of(arcs, num_nodes, layout=told, chunk_edges=data.draw(st.integers(1, 20)))
    p = blocks(stream, num_parts, masks, **options, **given_weights)
    simple = simple_edges(arcs, p.notes["layout"])
    assert p.part_id.tolist() == expected_parts(simple, num_nodes, num_parts, masks, weights=weights, **options)


@pytest.mark.parametrize("name", ODD)
def test_odd_graphs_equal_the_oracle(name):
    num_nodes, edges = ODD[name]
    masks = {"train": np.arange(num_nodes) % 4 == 0, "test": np.zeros(num_nodes, bool)}
    for num_parts in (1, 2, 4):
        if num_parts > num_nodes:
            with pytest.raises(ValueError, match=rf"num_parts must be in \[1, {num_nodes}\], got {num_parts}"):
                blocks(stream_of(edges, num_nodes), num_parts, masks)
            continue
        p = blocks(stream_of(edges, num_nodes), num_parts, masks)
        simple = simple_edges(edges, p.notes["layout"])
        assert p.part_id.tolist() == expected_parts(simple, num_nodes, num_parts, masks)
        assert p.part_id.dtype == np.int32


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


@pytest.mark.parametrize("suffix", [".bin", ".npy", ".csv", ".parquet"])
def test_file_format_and_chunk_size_change_nothing(tmp_path, suffix, monkeypatch):
    edges, num_nodes, masks = labelled_graph()
    expected = expected_parts([tuple(e) for e in edges.tolist()], num_nodes, 3, masks)
    path = write_edges(stream_of(edges, num_nodes, layout="once"), tmp_path / f"edges{suffix}")
    for chunk_edges, counters, bits in ((70, 40, 1), (512, 60, 6), (1 << 20, 1 << 20, 12)):
        monkeypatch.setattr(module, "MIN_COUNTERS", counters)
        monkeypatch.setattr(module, "COUNTERS_A_NODE", 0)
        monkeypatch.setattr(pair_table, "FIRST_BITS", bits)
        stream = open_edge_stream(path, num_nodes=num_nodes, layout="once", chunk_edges=chunk_edges)
        p = blocks(stream, 3, masks)
        assert p.part_id.tolist() == expected
    assert p.notes["merged_blocks"] < p.notes["blocks"]
    assert p.notes["leftovers"] > 20


def test_the_order_and_the_dtype_of_edges_change_nothing():
    edges, num_nodes, masks = labelled_graph()
    expected = blocks(stream_of(edges, num_nodes), 5, masks).part_id
    shuffled = np.random.default_rng(0).permutation(edges)[:, ::-1]
    assert np.array_equal(blocks(stream_of(shuffled, num_nodes, np.int64), 5, masks).part_id, expected)


def test_nodes_beyond_the_last_round_go_to_the_least_filled_parts(monkeypatch):
    monkeypatch.setattr(module, "MAX_ROUNDS", 3)
    path = [(v, v + 1) for v in range(29)]
    masks = {"train": np.arange(30) < 2}
    p = blocks(stream_of(path, 30), 2, masks)
    assert p.part_id.tolist() == expected_parts(path, 30, 2, masks, max_rounds=3)
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


@pytest.mark.parametrize("layout", ["once", "directed"])
def test_resuming_after_a_kill_in_any_pass_is_bit_identical(tmp_path, monkeypatch, layout):
    edges, num_nodes, masks = labelled_graph()
    arcs = listed([tuple(e) for e in edges.tolist()], layout)
    stream = stream_of(arcs, num_nodes, chunk_edges=len(arcs) // 2 + 1, layout=layout)
    monkeypatch.setattr(module, "MIN_COUNTERS", 280)
    monkeypatch.setattr(module, "COUNTERS_A_NODE", 0)
    monkeypatch.setattr(pair_table, "FIRST_BITS", 1)
    options = {"checkpoint": tmp_path / "state.npz", "checkpoint_every": 1}

    def run(**options):
        read = []
        p = blocks(stream, 7, masks, progress=lambda what, done, total: read.append(what), **options)
        return p, [what for what in read if what != "first copies"]

    expected, read = run()
    kinds = list(dict.fromkeys(read))
    assert kinds[:5] == ["degrees", "blocks, hop 1", "blocks, hop 2", "quotient", "leftovers, round 1"]
    assert read.count("leftovers, round 1") > 2  # not all leftovers are counted in one pass
    ends = [i for i in range(1, len(read) + 1) if i == len(read) or read[i] != read[i - 1]]
    for saves in sorted({*ends[:6], *(end - 1 for end in ends[:5]), ends[4] - 3, ends[-1]}):
        monkeypatch.setattr(Checkpoint, "save", stop_after(saves))
        with pytest.raises(Killed):
            run(**options)
        monkeypatch.setattr(Checkpoint, "save", original_save)
        resumed, read_again = run(**options)
        assert np.array_equal(resumed.part_id, expected.part_id)
        assert read_again == read[saves:]
        assert resumed.notes["leftovers"] == expected.notes["leftovers"]
        assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_run_is_not_used(tmp_path, monkeypatch):
    edges, num_nodes, masks = labelled_graph()
    stream = stream_of(edges, num_nodes, chunk_edges=100)
    path = tmp_path / "state.npz"
    other_masks = {"train": ~masks["train"]}
    for changed in ({"num_parts": 5}, {"num_hops": 1}, {"masks": other_masks}, {"train_weight": 0.9}):
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


def test_training_nodes_are_balanced_and_neighborhoods_stay_together():
    rng = np.random.default_rng(0)
    inside = rng.integers(0, 50, (10_000, 2)) + 50 * rng.integers(0, 40, (10_000, 1))
    edges = np.concatenate([inside, rng.integers(0, 2000, (1_000, 2))])
    edges = np.unique(np.sort(edges[edges[:, 0] != edges[:, 1]], 1), axis=0)
    masks = {"train": rng.random(2000) < 0.2}
    stream = stream_of(edges, 2000)
    p = blocks(stream, 4, masks)
    q = evaluate_partitioning(stream, p.part_id, 4, masks=masks)
    assert q.train_balance < 1.15
    assert q.edge_cut_ratio < 0.6  # 0.75 at random


def test_the_quotient_is_summed_exactly_while_its_table_grows(monkeypatch):
    rng = np.random.default_rng(1)
    block = rng.integers(-1, 30, 200).astype(np.int32)
    src, dst = rng.integers(0, 200, (2, 5000)).astype(np.int32)
    monkeypatch.setattr(pair_table, "FIRST_BITS", 1)
    table, keys = PairTable(5), np.empty(700, np.int64)
    for start in range(0, 5000, 700):
        table.add(keys, [(0, edge_pairs(src[start : start + 700], dst[start : start + 700], block, 5, keys))])
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
        ({"masks": None}, r"grows its blocks from labelled nodes: give masks=\{'train': \(2,\) bool, .*got None"),
        ({"masks": {"train": np.zeros(2, bool)}}, "with at least one node, got"),
        (
            {"masks": {"labelled": np.ones(2, bool)}},
            r"'train', 'val' or 'test'\) with at least one node, got \['labelled'",
        ),
        ({"masks": {"val": np.ones(3, bool)}}, r"masks\['val'\] must be \(2,\) bool, got \(3,\) bool"),
        ({"masks": {"val": np.ones(2, int)}}, r"masks\['val'\] must be \(2,\) bool, got \(2,\) int64"),
        ({"num_hops": 0}, "partitioner.num_hops must be a finite number >= 1, got 0"),
        ({"num_hops": 1.5}, "partitioner.num_hops must be a whole number, got 1.5"),
        ({"val_weight": -1}, "partitioner.val_weight must be a finite number >= 0, got -1"),
        ({"epsilon": -0.1}, "partitioner.epsilon"),
        ({"checkpoint_every": 0}, "partitioner.checkpoint_every"),
        ({"balance": {"train": 1.05}}, "takes no balance constraints"),
        ({"hops": 2}, "no option hops; allowed: num_hops, train_weight"),
    ],
)
def test_bad_options_are_named(options, message):
    options = {"masks": {"train": np.ones(2, bool)}, **options}
    with pytest.raises(ValueError, match=message):
        blocks(stream_of([(0, 1)], 2), 2, **options)
