import itertools

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.partitioner import available_partitioners, partition, registry
from lightning_gnnscale.partitioner.two_levels import MachineEdges
from tests.partitioner.graphs import ODD, stream_of
from tests.says import said

NUM_NODES, COMMUNITIES = 480, 12


def communities(seed=0, **options):
    """Twelve communities of 40 nodes, three to a group: six neighbours inside, one in the group, few outside."""
    rng = np.random.default_rng(seed)
    own = np.arange(NUM_NODES) % COMMUNITIES
    pairs = set()
    for node, community in enumerate(own.tolist()):
        inside = rng.choice(np.flatnonzero(own == community), 6)
        group = rng.choice(np.flatnonzero(own // 3 == community // 3), 1)
        anywhere = rng.choice(NUM_NODES, 1) if rng.random() < 0.2 else group
        pairs |= {(min(node, other), max(node, other)) for other in (*inside, *group, *anywhere) if other != node}
    edges = sorted(pairs)
    order = rng.permutation(len(edges))
    return stream_of([edges[i] for i in order], NUM_NODES, layout="once", chunk_edges=257, **options)


def cut(stream, part):
    return sum(int((part[chunk.src] != part[chunk.dst]).sum()) for chunk in stream.chunks())


TRAIN = np.random.default_rng(5).random(NUM_NODES) < 0.3


SEEN = []


def probe(stream, num_parts, *, seed=0, masks=None, balance=None, progress=None, scratch="auto"):
    """Whole communities for machines, ranges of ids within them; of the whole graph nothing good in more parts."""
    if isinstance(stream, MachineEdges):
        chunks = [(chunk.src.tolist(), chunk.dst.tolist(), chunk.first_edge) for chunk in stream.chunks()]
        SEEN.append((stream.num_nodes, num_parts, seed, dict(masks or {}), dict(balance or {}), chunks))
        return np.arange(stream.num_nodes) * num_parts // stream.num_nodes
    community = np.arange(stream.num_nodes) % COMMUNITIES
    return community * num_parts // COMMUNITIES if num_parts < 5 else np.arange(stream.num_nodes) % 7 % num_parts


@pytest.mark.parametrize("scratch", ["auto", None])
def test_the_method_sees_the_edges_inside_each_machine(scratch, monkeypatch):
    """With scratch disk they are sorted once, else the stream is filtered: either way those that are listed by hand."""
    monkeypatch.setitem(registry._PARTITIONERS, "probe", probe)
    SEEN.clear()
    made = partition(communities(), "probe", 8, num_machines=2, masks={"train": TRAIN}, scratch=scratch)
    assert made.options == {"num_machines": 2, "scratch": scratch}
    machine = np.arange(NUM_NODES) % COMMUNITIES // 6
    assert np.array_equal(made.part_id // 4, machine)
    src, dst = (np.concatenate(ends) for ends in zip(*((c.src, c.dst) for c in communities().chunks()), strict=True))
    for one, (num_nodes, num_parts, _, masks, balance, chunks) in enumerate(SEEN):
        nodes = np.flatnonzero(machine == one)
        assert (num_nodes, num_parts, balance) == (len(nodes), 4, {})
        assert np.array_equal(masks["train"], TRAIN[nodes])
        inside = (machine[src] == one) & (machine[dst] == one)
        seen = [np.concatenate([chunk[end] for chunk in chunks]) for end in (0, 1)]
        assert np.array_equal(nodes[seen[0]], src[inside])
        assert np.array_equal(nodes[seen[1]], dst[inside])
        assert [len(chunk[0]) for chunk in chunks[:-1]] == [257] * (len(chunks) - 1)
        assert np.array_equal(made.part_id[nodes], 4 * one + np.arange(len(nodes)) * 4 // len(nodes))
    assert len({seed for _, _, seed, *_ in SEEN}) == 2


@pytest.mark.sweep
@pytest.mark.parametrize("method", [name for name in available_partitioners() if name != "kaminpar"])
def test_every_method_gives_each_machine_a_range_of_parts(method):
    masks = {"train": TRAIN}
    made = partition(communities(), method, 8, num_machines=2, masks=masks, evaluate=False)
    again = partition(communities(), method, 8, num_machines=2, masks=masks, evaluate=False)
    assert np.array_equal(made.part_id, again.part_id)
    assert np.bincount(made.part_id, minlength=8).min() > 0
    assert made.part_id.dtype == np.int32


@pytest.mark.parametrize("num_machines", [2, 3, 8])
def test_machines_are_cut_no_more_than_ranges_of_parts_made_at_once(num_machines):
    num_parts = {3: 12}.get(num_machines, 8)
    at_once = partition(communities(), num_parts=num_parts, evaluate=False).part_id
    levels = partition(communities(), num_parts=num_parts, num_machines=num_machines, evaluate=False).part_id
    each = num_parts // num_machines
    assert cut(communities(), levels // each) <= cut(communities(), at_once // each)


def test_all_balances_hold_over_the_parts_of_all_machines():
    balance = {"nodes": 1.06, "volume": 1.12, "train": 1.1}
    for method, machines in itertools.product(("streaming_multilevel", "grem"), (2, 4)):
        made = partition(communities(), method, 8, masks={"train": TRAIN}, balance=balance, num_machines=machines)
        quality = made.quality
        assert not made.notes["balance_violations"], (method, machines)
        assert quality.node_balance <= 1.06
        assert quality.train_balance <= 1.1
        degree = np.zeros(NUM_NODES, np.int64)
        for chunk in communities().chunks():
            np.add.at(degree, chunk.src, 1)
            np.add.at(degree, chunk.dst, 1)
        volume = np.bincount(made.part_id, degree, 8)
        assert volume.max() <= 1.12 * volume.mean(), "of all edges, not only of those inside machines"
        assert made.notes["balance"]["volume"] == pytest.approx(volume.max() / volume.mean())


def test_node_types_are_balanced_on_both_levels():
    rng = np.random.default_rng(0)
    nodes = {"paper": {"num_nodes": 300}, "author": {"num_nodes": 180}}
    ends = np.stack([rng.integers(0, 300, 2000), rng.integers(0, 180, 2000)])
    stream = gs.hetero_graph(nodes, {("paper", "by", "author"): ends}).stream
    balance = {"paper": 1.1, "author": 1.1}
    part = partition(stream, num_parts=6, num_machines=3, balance=balance, evaluate=False).part_id
    for counts in (np.bincount(part[:300], minlength=6), np.bincount(part[300:], minlength=6)):
        assert counts.max() <= 1.1 * counts.mean()


class Killed(Exception):
    pass


@pytest.mark.parametrize("method", ["streaming_multilevel", "spring"])
def test_a_killed_run_goes_on_after_the_machines_that_were_done(method, tmp_path):
    options = {"checkpoint": tmp_path / "state", "checkpoint_every": 1}
    whole = partition(communities(), method, 12, num_machines=3, evaluate=False).part_id
    calls = []

    def kill(what, done, total):
        calls.append(what.partition(":")[0])
        if calls[-1] == "machine 1":
            raise Killed

    if method == "streaming_multilevel":  # a graph in memory tells no progress while it is partitioned
        options |= {"block_edges": 64}
        whole = partition(communities(), method, 12, num_machines=3, evaluate=False, block_edges=64).part_id
    with pytest.raises(Killed):
        partition(communities(), method, 12, num_machines=3, evaluate=False, progress=kill, **options)
    assert (tmp_path / "state").exists()
    calls.clear()
    told = lambda what, done, total: calls.append(what.partition(":")[0])  # noqa: E731
    resumed = partition(communities(), method, 12, num_machines=3, evaluate=False, progress=told, **options)
    assert np.array_equal(resumed.part_id, whole)
    assert "machines" not in calls and "machine 0" not in calls
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(ODD))
def test_odd_graphs(name):
    num_nodes, edges = ODD[name]
    num_parts = min(4, num_nodes) // 2 * 2
    if num_parts < 2:
        return
    part = partition(stream_of(edges, num_nodes), num_parts=num_parts, num_machines=2, evaluate=False).part_id
    assert sorted(set(part.tolist())) == list(range(num_parts))


def test_one_machine_is_none_and_wrong_numbers_are_refused_with_the_rule():
    plain = partition(communities(), num_parts=4, evaluate=False)
    one = partition(communities(), num_parts=4, num_machines=1, evaluate=False)
    assert np.array_equal(plain.part_id, one.part_id)
    assert plain.options == one.options
    for num_machines, num_parts, words in (
        (3, 8, "num_parts must be a multiple of partitioner.num_machines=3, so that each machine has as many, got 8: "
               "take num_parts=6 or 9, or another num_machines"),
        (4, 3, "got 3: take num_parts=4, or"),
        (0, 4, "partitioner.num_machines must be"),
        (1.5, 4, "partitioner.num_machines must be"),
        ("2", 4, "partitioner.num_machines must be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said(words)):
            partition(communities(), num_parts=num_parts, num_machines=num_machines)
