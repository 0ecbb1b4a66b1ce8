import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.edge_stream import open_edge_stream, write_edges
from lightning_gnnscale.errors import EdgeStreamError, GNNScaleError
from lightning_gnnscale.partitioner import grem_placement, partition, registry
from lightning_gnnscale.partitioner.graph_access import scratch
from lightning_gnnscale.partitioner.graph_access.simple_graph import open_simple_graph
from lightning_gnnscale.partitioner.graph_input import Checkpoint
from lightning_gnnscale.partitioner.grem import part_cap, share_of_edges, side_caps
from tests.oracles.full_parts import filled
from tests.oracles.grem import grem_parts, shuffled
from tests.oracles.spring import simple_edges
from tests.partitioner.graphs import ODD, listed, simple_graphs, stream_of
from tests.says import said
from tests.tiers import all_pairs, each_value

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def grem(stream, num_parts, seed_method="random", **options):
    return partition(stream, "grem", num_parts, evaluate=False, seed_method=seed_method, **options)


def random_seed_parts(seed):
    def seed_parts(num_nodes, num_parts):
        nodes = open_edge_stream(np.zeros((2, 0), np.int32), num_nodes=num_nodes)
        return registry.get_partitioner("random")(nodes, num_parts, seed=seed).tolist()

    return seed_parts


def expected_parts(
    edges, num_nodes, num_parts, mode, refine=True, chunk_edges=None, share=0.1, epsilon=0.03, seed=0, **balanced
):
    chunk_edges = chunk_edges or max(1, math.ceil(share * len(edges) * (1 - 1e-12)))
    seed_parts = random_seed_parts(seed)
    return grem_parts(edges, num_nodes, num_parts, mode, refine, chunk_edges, epsilon, seed_parts, **balanced)


@given(graph=simple_graphs(), layout=st.sampled_from(["once", "both_ways", "directed"]), data=st.data())
def test_equals_the_oracle_in_every_layout(graph, layout, data):
    num_nodes, edges = graph
    directed_edges = listed(edges, layout, data.draw(st.integers(0, 5)))
    num_parts = data.draw(st.integers(1, num_nodes))
    options = {
        "mode": data.draw(st.sampled_from(["direct", "recursive"])),
        "refine": data.draw(st.booleans()),
        "epsilon": data.draw(st.sampled_from([0.0, 0.03, 0.5])),
        "chunk_edges": data.draw(st.sampled_from([1, 2, 5, 9, 1000])),
    }
    order, seed = data.draw(st.sampled_from(["given", "shuffle"])), data.draw(st.integers(0, 3))
    told = data.draw(st.sampled_from([layout, "auto"])) if edges else "auto"
    stream = stream_of(directed_edges, num_nodes, layout=told, chunk_edges=data.draw(st.integers(1, 20)))
    p = grem(stream, num_parts, order=order, seed=seed, **options)
    simple = simple_edges(directed_edges, p.notes["layout"])
    simple = shuffled(simple, seed) if order == "shuffle" else simple
    assert p.part_id.tolist() == filled(expected_parts(simple, num_nodes, num_parts, seed=seed, **options), num_parts)
    assert np.bincount(p.part_id).max() <= math.ceil(num_nodes / num_parts) * (1 + options["epsilon"])


@given(graph=simple_graphs(), data=st.data())
def test_balances_equal_the_oracle(graph, data):
    num_nodes, edges = graph
    num_parts = data.draw(st.integers(1, num_nodes))
    masks = {
        "train": np.array(data.draw(st.lists(st.booleans(), min_size=num_nodes, max_size=num_nodes))),
        "kind": np.arange(num_nodes) % 3 == 0,
        "seen": np.array(data.draw(st.lists(st.integers(0, 4), min_size=num_nodes, max_size=num_nodes))),
    }
    degree = np.bincount(np.ravel(edges).astype(int), minlength=num_nodes)
    weight = {"nodes": np.ones(num_nodes, int), "volume": degree, **masks}
    names = data.draw(st.lists(st.sampled_from(sorted(weight)), min_size=1, unique=True))
    balance = {name: data.draw(st.sampled_from([1.0, 1.1, 1.5, 4.0])) for name in names}
    options = {
        "mode": data.draw(st.sampled_from(["direct", "recursive"])),
        "refine": data.draw(st.booleans()),
        "chunk_edges": data.draw(st.sampled_from([1, 2, 5, 9, 1000])),
    }
    stream = stream_of(edges, num_nodes, layout="once")
    try:
        p = grem(stream, num_parts, order="given", masks=masks, balance=balance, **options)
    except ValueError as error:  # of one node, or without any
        assert "cannot be met" in str(error) or "has no nodes" in str(error)
        return
    kept = balance if "nodes" in balance else {"nodes": 1.03, **balance}
    weights = list(zip(*(weight[name].tolist() for name in kept), strict=True))
    expected = expected_parts(edges, num_nodes, num_parts, **options, weights=weights, slacks=list(kept.values()))
    assert p.part_id.tolist() == filled(expected, num_parts)
    assert list(p.notes["balance"]) == list(kept)


@each_value
@pytest.mark.parametrize("mode", ["direct", "recursive"])
@pytest.mark.parametrize("name", ODD)
def test_odd_graphs_equal_the_oracle(name, mode):
    num_nodes, edges = ODD[name]
    for num_parts in (1, 2, 3, 4, 7):
        stream = stream_of(edges, num_nodes)
        if num_parts > num_nodes:
            with pytest.raises(ValueError, match=said(f"num_parts [1, {num_nodes}] {num_parts}")):
                grem(stream, num_parts, mode=mode)
            continue
        p = grem(stream, num_parts, mode=mode, order="given")
        simple = simple_edges(edges, p.notes["layout"])
        assert p.part_id.tolist() == filled(expected_parts(simple, num_nodes, num_parts, mode), num_parts)
        assert p.part_id.dtype == np.int32


def random_edges(num_nodes=300, num_edges=900, seed=3):
    rng = np.random.default_rng(seed)
    weight = rng.pareto(1.5, num_nodes) + 1
    pairs = rng.choice(num_nodes, (num_edges * 2, 2), p=weight / weight.sum())
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    _, first = np.unique(np.sort(pairs, 1), axis=0, return_index=True)
    return pairs[np.sort(first)][:num_edges]


def communities(num_groups=8, group_size=40, seed=0):
    """Groups of random graphs with a few edges between them, in random order under random ids."""
    rng = np.random.default_rng(seed)
    num_nodes = num_groups * group_size
    inside = rng.integers(0, group_size, (6000, 2)) + group_size * rng.integers(0, num_groups, (6000, 1))
    pairs = np.concatenate([inside, rng.integers(0, num_nodes, (400, 2))])
    pairs = rng.permutation(num_nodes)[pairs]
    pairs = np.unique(np.sort(pairs[pairs[:, 0] != pairs[:, 1]], 1), axis=0)
    return rng.permutation(pairs), num_nodes


@pytest.mark.parametrize("suffix", [".bin", ".npy", ".csv", ".parquet"])
def test_file_format_and_stream_chunks_change_nothing(tmp_path, suffix, monkeypatch):
    edges = random_edges()
    monkeypatch.setattr(scratch, "BUCKET_EDGES", 100)
    monkeypatch.setattr(scratch, "STEP_EDGES", 170)
    monkeypatch.setattr("lightning_gnnscale.scratch.SLICE_EDGES", 37)
    order = shuffled([tuple(e) for e in edges.tolist()], 0, bucket_edges=100)
    assert sorted(order) == sorted(map(tuple, edges.tolist()))
    path = write_edges(stream_of(edges, 300, layout="once"), tmp_path / f"edges{suffix}")
    for mode in ("direct", "recursive"):
        expected = expected_parts(order, 300, 5, mode)
        for chunk_edges in (7, 512, 1 << 20):
            stream = open_edge_stream(path, num_nodes=300, layout="once", chunk_edges=chunk_edges)
            assert grem(stream, 5, mode=mode).part_id.tolist() == expected


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_id_dtype_and_counted_nodes_change_nothing(dtype):
    edges = np.append(random_edges(), [[299, 0]], axis=0)
    given_count = grem(stream_of(edges, 300), 4)
    assert grem(stream_of(edges, None, dtype), 4).part_id.tolist() == given_count.part_id.tolist()


def test_the_seed_decides_the_order_and_nothing_else_does():
    stream = stream_of(random_edges(), 300)
    first, again, other = (grem(stream, 4, seed=seed).part_id for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


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


def chunks_placed(stream, num_parts, **options):
    told = []
    p = grem(stream, num_parts, progress=lambda what, done, total: told.append(what), **options)
    return p.part_id, [what for what in told if what.startswith("placing")]


@each_value
@pytest.mark.parametrize("refine", [True, False])
@pytest.mark.parametrize(
    ("mode", "layout", "balance"),
    [
        ("direct", "once", None),
        ("direct", "once", {"volume": 1.05, "train": 1.1}),
        ("recursive", "both_ways", None),
        ("recursive", "directed", {"volume": 1.05, "train": 1.1}),
    ],
)
def test_resuming_after_a_kill_in_any_pass_is_bit_identical(tmp_path, monkeypatch, mode, layout, refine, balance):
    edges = listed([tuple(e) for e in random_edges().tolist()], layout)
    stream = stream_of(edges, 300, chunk_edges=len(edges) // 3 + 1, layout=layout)
    options = {"mode": mode, "refine": refine, "chunk_edges_share": 0.15}
    options |= {"balance": balance, "masks": {"train": np.arange(300) < 100}}
    expected, told = chunks_placed(stream, 7, **options)
    assert len(told) == (7 if mode == "direct" else len(told)) >= 7
    options |= {"checkpoint": tmp_path / "state.npz", "checkpoint_every": 1}
    for saves in (1, 3, 4, 5, 9, *range(11, len(told) + 3, 3), len(told) + 3):
        if saves > len(told) + 3:
            continue
        monkeypatch.setattr(Checkpoint, "save", stop_after(saves))
        with pytest.raises(Killed):
            grem(stream, 7, **options)
        monkeypatch.setattr(Checkpoint, "save", original_save)
        resumed, left = chunks_placed(stream, 7, **options)
        assert np.array_equal(resumed, expected)
        assert len(left) == len(told) - max(0, saves - 3)  # the first three saves are those of the degrees
        assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_run_is_not_used(tmp_path, monkeypatch):
    stream = stream_of(random_edges(), 300, chunk_edges=100)
    path = tmp_path / "state.npz"
    for changed in ({"num_parts": 5}, {"epsilon": 0.1}, {"refine": False}, {"chunk_edges": 50}, {"seed": 1}):
        monkeypatch.setattr(Checkpoint, "save", stop_after(14))
        with pytest.raises(Killed):
            grem(stream, 4, checkpoint=path, checkpoint_every=1)
        monkeypatch.setattr(Checkpoint, "save", original_save)
        changed = {"num_parts": 4, **changed}
        assert np.array_equal(grem(stream, checkpoint=path, **changed).part_id, grem(stream, **changed).part_id)


def test_a_graph_that_changes_between_passes_is_an_error():
    edges = np.ascontiguousarray(random_edges().T.astype(np.int32))
    stream = open_edge_stream(edges, num_nodes=300, layout="once")

    def rewire(what, done, total):
        if what == "degrees":
            edges[1, 5] = (edges[1, 5] + 1) % 300

    with pytest.raises(EdgeStreamError, match="changed while they were partitioned"):
        grem(stream, 4, progress=rewire)


@each_value
@pytest.mark.parametrize("mode", ["direct", "recursive"])
@pytest.mark.parametrize("seed_method", ["multilevel", "metis", "spring", "random"])
def test_any_partitioner_seeds_the_first_chunk(mode, seed_method, tmp_path):
    if seed_method == "metis":
        pytest.importorskip("pymetis", reason="the extra [metis] is not installed")
    edges, num_nodes = communities()
    for num_parts in (4, 5):
        p = grem(stream_of(edges, num_nodes), num_parts, seed_method, mode=mode, epsilon=0.05, scratch=tmp_path)
        assert np.bincount(p.part_id, minlength=num_parts).max() <= math.floor(math.ceil(320 / num_parts) * 1.05)
        assert p.notes["num_edges"] == len(edges)  # the whole graph's, not the first chunk's
        assert set(p.seconds) <= {"degrees", "order", "chunks", "seed", "placing", "split", "total"}


def test_a_seed_method_is_given_the_first_chunk_alone(monkeypatch):
    seen = []

    def parity(stream, num_parts, *, seed=0):
        (chunk,) = stream.chunks()
        seen.append((stream.num_nodes, sorted(zip(chunk.src.tolist(), chunk.dst.tolist(), strict=True)), seed))
        return np.arange(stream.num_nodes) % num_parts

    monkeypatch.setitem(registry._PARTITIONERS, "parity", parity)
    edges = [(9, 2), (4, 9), (2, 7), (0, 1), (1, 2)]
    p = grem(stream_of(edges, 10), 2, "parity", chunk_edges=3, order="given", mode="direct", seed=6, epsilon=1)
    assert seen == [(4, [(0, 2), (0, 3), (1, 3)], 6)]  # nodes 2, 4, 7 and 9
    assert p.part_id[[2, 4, 7, 9]].tolist() == [0, 1, 0, 1]


def cut(part_id, edges):
    return (part_id[edges[:, 0]] != part_id[edges[:, 1]]).mean()


@pytest.mark.parametrize("mode", ["direct", "recursive"])
def test_refinement_lowers_the_cut_and_an_order_by_id_raises_it(mode):
    edges, num_nodes = communities()
    fixed, refined = (
        grem(stream_of(edges, num_nodes), 8, "spring", mode=mode, refine=refine) for refine in (False, True)
    )
    assert cut(refined.part_id, edges) < 0.9 * cut(fixed.part_id, edges)
    by_id = stream_of(edges[np.lexsort(edges.T)], num_nodes)
    given_order, shuffled_order = (grem(by_id, 8, "spring", mode=mode, order=order) for order in ("given", "shuffle"))
    assert cut(shuffled_order.part_id, edges) < 0.9 * cut(given_order.part_id, edges)


def test_a_chunk_of_all_edges_is_partitioned_in_memory_and_fits_the_caps_of_every_level():
    edges, num_nodes = communities()
    planted = 400 / 6400
    for mode in ("direct", "recursive"):
        p = grem(stream_of(edges, num_nodes), 8, "multilevel", mode=mode, chunk_edges_share=1.0)
        assert cut(p.part_id, edges) < 1.5 * planted
        assert np.bincount(p.part_id).max() <= math.floor(40 * 1.03)


def masked(num_nodes, edges):
    """Masks, the training nodes whole communities: a small cut keeps them together."""
    part_id = grem(stream_of(edges, num_nodes), 8, "multilevel", chunk_edges_share=1.0).part_id
    return {"train": part_id < 3, "seen": np.random.default_rng(1).integers(0, 9, num_nodes)}


@all_pairs
@pytest.mark.parametrize("refine", [True, False])
@pytest.mark.parametrize("mode", ["direct", "recursive"])
@pytest.mark.parametrize(
    "balance",
    [{"nodes": 1.05, "train": 1.1}, {"volume": 1.1, "train": 1.05}, {"nodes": 1.0, "train": 1.0, "seen": 1.05}],
)
def test_balances_stay_within_their_caps_and_the_cut_below_that_of_random_parts(balance, mode, refine):
    edges, num_nodes = communities()
    masks = masked(num_nodes, edges)
    weight = {"nodes": np.ones(num_nodes), "volume": np.bincount(edges.ravel(), minlength=num_nodes), **masks}
    options = {"mode": mode, "refine": refine, "masks": masks}
    for num_parts in (2, 5, 8):
        p = grem(stream_of(edges, num_nodes), num_parts, "multilevel", balance=balance, **options)
        for name, slack in ({"nodes": 1.03} | balance).items():
            total = weight[name].sum()
            cap = max(math.floor(slack * total / num_parts * (1 + 1e-12)), -(-total // num_parts))
            load = np.bincount(p.part_id, weights=weight[name], minlength=num_parts)
            assert load.max() <= cap, (name, load)
            assert p.notes["balance"][name] == pytest.approx(load.max() / load.mean())
        assert p.notes["balance_violations"] == {}
        assert cut(p.part_id, edges) < 0.9 * (1 - 1 / num_parts)  # what random parts are expected to cut
        again = grem(stream_of(edges, num_nodes, chunk_edges=99), num_parts, "multilevel", balance=balance, **options)
        assert np.array_equal(again.part_id, p.part_id)


def test_a_balance_of_nodes_alone_is_that_of_epsilon():
    edges, num_nodes = communities()
    for mode in ("direct", "recursive"):
        # 320 nodes and 8 parts: 1.1 times the mean is the cap of either.
        found, expected = (
            grem(stream_of(edges, num_nodes), 8, "multilevel", mode=mode, **bound)
            for bound in ({"balance": {"nodes": 1.1}}, {"epsilon": 0.1})
        )
        assert np.array_equal(found.part_id, expected.part_id)


def test_what_cannot_be_kept_is_passed_by_as_little_as_can_be_and_told():
    # Three nodes of weight 2 in two parts that may hold 3 each.
    masks = {"seen": np.array([2, 2, 2, 0, 0, 0])}
    stream = stream_of([(0, 1), (1, 2), (2, 0), (3, 4), (4, 5)], 6)
    for mode in ("direct", "recursive"):
        with pytest.warns(UserWarning, match=said("balance 1.3333 4 1 3")):
            p = grem(stream, 2, mode=mode, masks=masks, balance={"nodes": 1.0, "seen": 1.0})
        assert p.notes["balance_violations"] == {"seen": 1}
        assert np.bincount(p.part_id).tolist() == [3, 3]


def test_nodes_change_places_where_no_move_alone_relieves():
    # One part has its fill of nodes, the other too many training nodes, and all but one node are training nodes.
    caps = np.array([[10, 10, 9], [10, 10, 9]])
    weight = np.ones((20, 3), np.int32)
    weight[[0, 1], 2] = 0
    part = np.repeat(np.array([0, 1], np.int32), 10)
    sizes = np.array([[10, 10, 8], [10, 10, 10]])
    counts = np.zeros((20, 2), np.float32)
    counts[1, 0] = 1.0  # what this node would lose
    state = grem_placement.PlacementState(part, counts, sizes, np.zeros(1, np.int64))
    grem_placement._relieve(state, caps, weight)
    assert sizes.tolist() == [[10, 10, 9], [10, 10, 9]]
    assert part[:2].tolist() == [1, 0]
    assert np.bincount(part, weights=weight[:, 2]).tolist() == [9, 9]


@given(num_parts=st.integers(1, 300), per_part=st.integers(1, 10**6), less=st.floats(0, 1), epsilon=st.floats(0, 1))
def test_caps_always_leave_room_for_every_node(num_parts, per_part, less, epsilon):
    num_nodes = max(1, int(num_parts * per_part - less * num_parts))
    cap = part_cap(num_nodes, num_parts, epsilon)
    assert num_nodes <= cap * num_parts

    def divide(num_nodes, num_parts):
        if num_parts == 1:
            assert num_nodes <= cap
            return
        share = (num_parts // 2, num_parts - num_parts // 2)
        caps = side_caps(num_nodes, share, cap)
        assert sum(caps) >= num_nodes
        for s in (0, 1):
            divide(min(caps[s], num_nodes), share[s])

    divide(num_nodes, num_parts)


def test_chunks_are_a_share_of_the_edges_rounded_up():
    assert [share_of_edges(0.1, edges) for edges in (0, 1, 10, 11, 30)] == [1, 1, 1, 2, 3]
    assert share_of_edges(1.0, 7) == 7
    p = grem(stream_of(random_edges(), 300), 2, chunk_edges_share=0.01)
    assert p.notes["chunk_edges"] == 9


def test_too_little_scratch_disk_is_told_before_it_is_used(monkeypatch, tmp_path):
    class Disk:
        free = 100

    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda folder: Disk)
    with pytest.raises(GNNScaleError, match=said("2 orders 10 edges 160 bytes scratch disk 60 too few")):
        grem(stream_of([(0, v) for v in range(1, 11)], 11), 3, scratch=tmp_path)


def test_the_shuffle_reads_the_whole_stream_once():
    edges = random_edges()
    graph, _ = open_simple_graph(stream_of(edges, 300))
    told = []
    file = scratch.shuffle_edges(graph, scratch.scratch_folder("auto"), 5, lambda *told_now: told.append(told_now))
    pairs = np.concatenate(list(file.pieces()))
    assert told == [("shuffle", 900, 900)]
    assert [tuple(pair) for pair in pairs.tolist()] == shuffled([tuple(e) for e in edges.tolist()], 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "both"}, "partitioner.mode recursive direct 'both'"),
        ({"refine": "yes"}, "partitioner.refine True False 'yes'"),
        ({"order": "sorted"}, "partitioner.order shuffle"),
        ({"chunk_edges_share": 0}, "partitioner.chunk_edges_share (0, 1] 0"),
        ({"chunk_edges_share": 1.5}, "partitioner.chunk_edges_share"),
        ({"chunk_edges_share": float("nan")}, "partitioner.chunk_edges_share"),
        ({"chunk_edges": 0}, "partitioner.chunk_edges >= 1 0"),
        ({"chunk_edges": 2.5}, "partitioner.chunk_edges 2.5"),
        ({"seed_method": "best"}, "partitioner.seed_method 'best'"),
        ({"seed_method": "grem"}, "partitioner.seed_method"),
        ({"epsilon": -0.1}, "partitioner.epsilon >= 0"),
        ({"checkpoint_every": 0}, "partitioner.checkpoint_every"),
        ({"balance": {"nodes": 0.9}}, "partitioner.balance.nodes >= 1 0.9"),
        ({"balance": {"train": 1.1}}, "partitioner.balance.train 'train'"),
        (
            {"balance": {"nodes": 1.05}, "epsilon": 0.1},
            "epsilon=0.1 partitioner.balance.nodes=1.05",
        ),
        ({"balance": dict.fromkeys("abcdefgh", 1.1)}, "8 constraints nodes 8"),
        ({"scratch": None}, "partitioner 'grem' scratch=<a folder>"),
        ({"chunks": 1}, "chunks chunk_edges_share"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=said(message)):
        grem(stream_of([(0, 1)], 2), 2, **options)
