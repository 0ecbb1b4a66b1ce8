import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.edge_stream import open_edge_stream, write_edges
from lightning_gnnscale.partitioner import partition
from lightning_gnnscale.partitioner.graph_input import Checkpoint
from lightning_gnnscale.partitioner.ldg import default_alpha
from lightning_gnnscale.rng import combine_array, fold
from tests.oracles.external_csc import cut_into_blocks, rows_of
from tests.oracles.fennel import fennel_parts
from tests.oracles.full_parts import filled
from tests.oracles.ldg import ldg_parts
from tests.partitioner.graph_access.test_external_csc import random_edges
from tests.partitioner.graphs import ODD, listed, simple_graphs, stream_of
from tests.says import said
from tests.tiers import all_pairs, each_value

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

METHODS = ("ldg", "fennel")
SLACK = {"ldg": 1.0, "fennel": 1.1}


def assign(method, stream, num_parts, **options):
    return partition(stream, method, num_parts, evaluate=False, **options)


def oracle(method, rows, num_parts, slack=None, **options):
    slack = SLACK[method] if slack is None else slack
    capacity = max(math.floor(slack * len(rows) / num_parts * (1 + 1e-12)), -(-len(rows) // num_parts))
    return {"ldg": ldg_parts, "fennel": fennel_parts}[method](rows, num_parts, capacity, **options)


def keyed_order(rows, block_edges, seed):
    """The nodes of each block in the order of a hash of (seed, pass, node)."""
    starts = cut_into_blocks(rows, block_edges)

    def order_of(number):
        key = fold(seed, 0x4E4F4445, number)
        order = []
        for first, last in pairwise(starts):
            order += sorted(range(first, last), key=lambda node: (int(combine_array(key, node)), node))
        return order

    return order_of


@given(graph=simple_graphs(), layout=st.sampled_from(["once", "both_ways", "directed"]), data=st.data())
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_oracle_in_every_layout(method, graph, layout, data):
    num_nodes, edges = graph
    directed_edges = listed(edges, layout, data.draw(st.integers(0, 5)))
    num_parts = data.draw(st.integers(1, num_nodes))
    told = data.draw(st.sampled_from([layout, "auto"])) if edges else "auto"
    slack = data.draw(st.sampled_from([None, 1.0, 1.03, 1.5, 4.0]))
    passes = data.draw(st.integers(1, 3))
    block_edges = data.draw(st.sampled_from([1, 6, 1 << 21]))
    seed = data.draw(st.integers(0, 3))
    own = {}
    if method == "fennel":
        own = {"gamma": data.draw(st.sampled_from([1, 1.5, 2.0])), "alpha": data.draw(st.sampled_from([None, 0, 0.7]))}
    stream = stream_of(directed_edges, num_nodes, layout=told, chunk_edges=data.draw(st.integers(1, 20)))
    options = {"passes": passes, "block_edges": block_edges, "seed": seed, **own}
    if slack is not None:
        options["balance"] = {"nodes": slack}
    p = assign(method, stream, num_parts, **options)
    rows = rows_of(directed_edges, num_nodes, p.notes["layout"])
    assert p.part_id.tolist() == filled(oracle(method, rows, num_parts, slack, passes=passes, **own), num_parts)
    p = assign(method, stream, num_parts, order="random", **options)
    order_of = keyed_order(rows, block_edges, seed)
    assert p.part_id.tolist() == filled(
        oracle(method, rows, num_parts, slack, passes=passes, order_of=order_of, **own), num_parts
    )


@all_pairs
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_odd_graphs_equal_the_oracle(method, name, num_parts):
    num_nodes, edges = ODD[name]
    if num_parts > num_nodes:
        with pytest.raises(ValueError, match=said(f"num_parts [1, {num_nodes}] {num_parts}")):
            assign(method, stream_of(edges, num_nodes), num_parts)
        return
    p = assign(method, stream_of(edges, num_nodes), num_parts)
    assert p.part_id.tolist() == filled(
        oracle(method, rows_of(edges, num_nodes, p.notes["layout"]), num_parts), num_parts
    )
    assert p.part_id.dtype == np.int32
    assert np.bincount(p.part_id).max() <= max(SLACK[method] * num_nodes / num_parts, -(-num_nodes // num_parts))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_parts", [128, 200])
def test_more_parts_than_a_byte_counts(method, num_parts):
    edges = random_edges(600, 4_000)
    rows = rows_of([tuple(edge) for edge in edges.tolist()], 600, "directed")
    p = assign(method, stream_of(edges, 600), num_parts, passes=2, deduplicate=True)
    assert p.part_id.tolist() == filled(oracle(method, rows, num_parts, passes=2), num_parts)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("suffix", [".npy", ".csv", ".parquet"])
def test_file_format_chunk_size_and_id_dtype_change_nothing(tmp_path, method, suffix):
    edges = random_edges(300, 1_500)
    rows = rows_of([tuple(edge) for edge in edges.tolist()], 300, "directed")
    expected = oracle(method, rows, 5)
    for dtype in (np.int32, np.int64):
        path = write_edges(stream_of(edges, 300, dtype), tmp_path / f"{np.dtype(dtype)}{suffix}")
        for chunk_edges in (7, 1 << 20):
            stream = open_edge_stream(path, num_nodes=300, layout="directed", chunk_edges=chunk_edges)
            assert assign(method, stream, 5).part_id.tolist() == expected


@pytest.mark.parametrize("method", METHODS)
def test_two_communities_are_found_and_restreaming_helps(method):
    rng = np.random.default_rng(0)
    side = np.arange(400) % 2
    pairs = rng.integers(0, 400, (20_000, 2))
    keep = (side[pairs[:, 0]] == side[pairs[:, 1]]) | (rng.random(len(pairs)) < 0.1)
    stream = stream_of(pairs[keep], 400, layout="once")
    cuts = [partition(stream, method, 2, passes=passes, deduplicate=True).quality.edge_cut_ratio for passes in (1, 5)]
    true_cut = (side[pairs[keep][:, 0]] != side[pairs[keep][:, 1]]).mean()
    assert cuts[1] <= cuts[0] < 0.45
    assert cuts[1] < 1.2 * true_cut


def test_the_seed_decides_the_random_order_alone():
    stream = stream_of(random_edges(300, 900), 300, layout="once")
    given_order = [assign("ldg", stream, 4, seed=seed).part_id.tolist() for seed in (0, 1)]
    sampled = [assign("ldg", stream, 4, seed=seed, order="random").part_id.tolist() for seed in (0, 0, 1)]
    assert given_order[0] == given_order[1]
    assert sampled[0] == sampled[1]
    assert sampled[0] != sampled[2]


class Killed(Exception):
    pass


original_save = Checkpoint.save


def stop_after(saves):
    left = [saves]

    def save(self, phase, arrays):
        original_save(self, phase, arrays)
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    return save


@each_value
@pytest.mark.parametrize(("method", "layout"), [("ldg", "once"), ("fennel", "both_ways"), ("ldg", "directed")])
@pytest.mark.parametrize("saves", [1, 5, 6, 7, 10, 13])
def test_resuming_after_a_kill_is_bit_identical(tmp_path, monkeypatch, method, layout, saves):
    rows = rows_of([tuple(edge) for edge in random_edges(300, 1_000).tolist()], 300, "directed")
    edges = listed([(u, v) for u, row in enumerate(rows) for v in row if u < v], layout)
    stream = stream_of(edges, 300, chunk_edges=len(edges) // 6 + 1, layout=layout)
    block_edges = sum(len(row) for row in rows) // 3
    options = {"passes": 2, "order": "random", "block_edges": block_edges, "seed": 3}
    expected = assign(method, stream, 4, **options).part_id
    num_blocks = len(cut_into_blocks(rows, block_edges)) - 1
    assert num_blocks == 4
    options |= {"checkpoint": tmp_path / "state.npz", "checkpoint_every": 1}
    monkeypatch.setattr(Checkpoint, "save", stop_after(saves))
    with pytest.raises(Killed):
        assign(method, stream, 4, **options)
    monkeypatch.setattr(Checkpoint, "save", original_save)
    told = []
    resumed = assign(method, stream, 4, progress=lambda what, *_: told.append(what), **options)
    assert np.array_equal(resumed.part_id, expected)
    assert told.count("degrees") == (6 - saves if saves < 6 else 0 if saves == 6 else 6)
    assert told.count("assignment") == 2 * num_blocks - max(0, saves - 6)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("ldg", {"passes": 0}, "partitioner.passes >= 1 0"),
        ("ldg", {"order": "sorted"}, "partitioner.order given random 'sorted'"),
        ("ldg", {"block_edges": 0}, "partitioner.block_edges"),
        ("ldg", {"checkpoint_every": 0}, "partitioner.checkpoint_every"),
        ("ldg", {"balance": {"nodes": 0.9}}, "partitioner.balance.nodes"),
        ("ldg", {"balance": {"nodes": 1.1, "volume": 1.1}}, "partitioner 'ldg' balance="),
        ("ldg", {"scratch": None}, "need scratch disk"),
        ("ldg", {"gamma": 1.5}, "gamma block_edges"),
        ("fennel", {"gamma": 0.5}, "partitioner.gamma"),
        ("fennel", {"alpha": -1}, "partitioner.alpha"),
        ("fennel", {"balance": {"train": 1.1}}, "partitioner 'fennel'"),
    ],
)
def test_bad_options_are_named(method, options, message):
    with pytest.raises(ValueError, match=said(message)):
        assign(method, stream_of([(0, 1)], 2), 2, **options)


def test_the_papers_alpha():
    assert default_alpha(1_000, 5_000, 8, 1.5) == pytest.approx(math.sqrt(8) * 5_000 / 1_000**1.5, rel=1e-15)
