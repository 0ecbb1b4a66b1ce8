"""Placement: the seed's example, Algorithm 1 against plain Python, what the baselines read more."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.graph import build_csc
from lightning_gnnscale.placement import DISK, access_probability, place
from lightning_gnnscale.placement.place import assign_training_nodes
from lightning_gnnscale.placement.placement import mean_shares, read_shares
from tests.says import said

PAIR = SimpleNamespace(csc=build_csc(np.array([0]), np.array([1]), 2))
PAPER_EDGES = np.array([[0, 1], [1, 2], [1, 3], [2, 3], [2, 4], [2, 5]]).T


def graph(edges, num_nodes):
    """An undirected graph as a store would show it."""
    both = np.concatenate([edges, edges[::-1]], axis=1)
    return SimpleNamespace(csc=build_csc(both[0], both[1], num_nodes), layout_fingerprint="made here")


def power_law(num_nodes=3000, num_edges=20000, seed=0):
    rng = np.random.default_rng(seed)
    weight = (rng.pareto(1.5, num_nodes) + 1) ** 1.0
    ends = rng.choice(num_nodes, (2, num_edges), p=weight / weight.sum())
    return graph(np.unique(ends[:, ends[0] != ends[1]], axis=1), num_nodes)


def algorithm_1(order, prob, num_devices, buffer_rows, alpha):
    """The rule in plain Python, from the text."""
    rows = [list(order[:buffer_rows]) for _ in range(num_devices)]
    added = [0.0] * num_devices
    following, turn = buffer_rows, list(range(num_devices))
    for i in range(num_devices * buffer_rows):
        if num_devices == 1 or following >= len(order):
            break
        if i % num_devices == 0:
            turn = sorted(range(num_devices), key=lambda device: added[device])
        if i % num_devices == num_devices - 1:
            continue
        device, position = turn[i % num_devices], buffer_rows - 1 - i // num_devices
        if prob[order[following]] <= alpha * prob[rows[device][position]]:
            break
        rows[device][position] = order[following]
        added[device] += prob[order[following]]
        following += 1
    return rows


def test_the_example_of_the_paper():
    store = graph(PAPER_EDGES, 6)
    prob = access_probability(store, np.arange(6), num_layers=2, method="reach")
    assert (prob * 6).round().astype(int).tolist() == [4, 6, 6, 6, 5, 5]
    placement = place(prob, num_devices=2, buffer_rows=2, alpha=0.3)
    assert [rows.tolist() for rows in placement.rows] == [[1, 3], [4, 2]]
    assert placement.dev_num.tolist() == [[-1, 0, 1, 0, 1, -1]] * 2
    assert placement.buf_pos.tolist() == [[0, 0, 1, 1, 0, 5]] * 2
    assert placement.dev_num.dtype == np.int32 and placement.buf_pos.dtype == np.int64


@given(
    probabilities=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    num_devices=st.integers(1, 5),
    data=st.data(),
    alpha=st.sampled_from([0.0, 0.2, 0.3, 0.7, 1.0]),
)
def test_the_rule_equals_plain_python(probabilities, num_devices, data, alpha):
    prob = np.array(probabilities) / 6
    buffer_rows = data.draw(st.integers(1, len(prob)))
    placement = place(prob, num_devices, buffer_rows, alpha)
    order = sorted(range(len(prob)), key=lambda node: -prob[node])
    assert [rows.tolist() for rows in placement.rows] == algorithm_1(order, prob, num_devices, buffer_rows, alpha)


@pytest.mark.parametrize("groups", [None, [[0, 1], [2, 3]], [[0], [1, 2, 3]]])
@pytest.mark.parametrize("method", ["rule", "ranges", "naive", "random", "degree", "metis", "pagraph"])
def test_lookup_finds_every_row_where_it_lies(method, groups):
    store = power_law()
    train = np.arange(0, 3000, 7)
    prob = access_probability(store, train, method="vip", batch_size=64)
    part_id = np.arange(3000) % 4
    options = {"store": store, "part_id": part_id, "train_nodes": train, "num_layers": 2, "host_rows": 1000}
    placement = place(prob, 4, 200, groups=groups, method=method, **options)
    assert placement.fingerprint == "made here"
    for device in range(4):
        dev_num, buf_pos = placement.lookup(device)
        group = next(group for group in placement.groups if device in group)
        for node in range(3000):
            if dev_num[node] < 0:
                assert buf_pos[node] == node
                assert not any(node in placement.rows[peer] for peer in group)
                assert (dev_num[node] == DISK) == placement.on_disk[node]
            else:
                assert dev_num[node] in group and placement.rows[dev_num[node]][buf_pos[node]] == node
        assert (dev_num[placement.rows[device]] == device).all(), "an own row is read here, not from a peer"
        shares = placement.device_shares[device]
        assert sum(shares.values()) == pytest.approx(1)
        local = prob[np.isin(np.arange(3000), placement.rows[device])].sum(dtype=np.float64)
        assert shares["local"] == pytest.approx(local / prob.sum(dtype=np.float64))
    assert int((~placement.on_disk).sum()) <= 1000 + 4 * 200


@pytest.mark.parametrize("groups", [None, [[0, 1], [2, 3]]])
def test_the_rule_reads_least_from_the_host_and_costs_least(groups):
    store = power_law(seed=1)
    train = np.arange(0, 3000, 5)
    prob = access_probability(store, train, batch_size=128)
    options = {"groups": groups, "store": store, "part_id": np.arange(3000) // 750, "train_nodes": train}
    others = [
        place(prob, 4, 150, method=name, **options) for name in ("ranges", "random", "degree", "metis", "pagraph")
    ]
    free_peers = place(prob, 4, 150, alpha=0.0, **options)
    assert free_peers.shares["host"] <= min(other.shares["host"] for other in others) + 1e-9
    balanced = place(prob, 4, 150, alpha=0.2, **options)

    def cost(placement):
        return placement.shares["host"] + 0.2 * placement.shares["peer"]

    assert cost(balanced) <= min(cost(other) for other in [*others, free_peers]) + 1e-9


@pytest.mark.parametrize("nodes", [[3, 9], [-1], [True, False], [1, 1], []])
def test_training_nodes_that_pagraph_cannot_take_are_refused(nodes):
    with pytest.raises(ValueError, match=said("train_nodes")):
        place(np.ones(9), 2, 3, method="pagraph", store=power_law(9, 12), train_nodes=np.array(nodes))


@pytest.mark.parametrize("dtype", ["u1", "i2", "f2", "f4"])
def test_probabilities_of_any_dtype_place_alike(dtype):
    counts = np.array([4, 6, 0, 6, 5, 0])
    expected = [rows.tolist() for rows in place(counts.astype(float), 2, 2, alpha=0.3).rows]
    assert [rows.tolist() for rows in place(counts.astype(dtype), 2, 2, alpha=0.3).rows] == expected


def test_host_rows_count_what_other_groups_hold():
    prob = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    placement = place(prob, 2, 1, groups=[[0], [1]], method="metis", part_id=np.arange(6) % 2, host_rows=2)
    # Row 0 is on device 0, row 1 on device 1: each reads the other's from the host, which has no space for more.
    assert placement.dev_num.tolist() == [[0, -1, -2, -2, -2, -2], [-1, 1, -2, -2, -2, -2]]


def test_lone_devices_keep_their_hottest_rows():
    prob = np.array([0.1, 0.9, 0.5, 0.7])
    placement = place(prob, 2, 2, alpha=0.0, groups=[[0], [1]])
    assert [rows.tolist() for rows in placement.rows] == [[1, 3], [1, 3]]
    assert placement.shares["peer"] == 0


def test_pagraph_keeps_neighbourhoods_together():
    cliques = [np.array([(i, j) for i in part for j in part if i < j]).T for part in (range(10), range(10, 20))]
    store = graph(np.concatenate(cliques, axis=1), 20)
    train = np.array([0, 10, 1, 11, 2, 12, 3, 13])
    device = assign_training_nodes(store.csc, train, 2, 1)
    assert device.tolist() == [0, 1] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prob": np.array([0.5, np.nan, 0.1])}, "nan 1"),
        ({"prob": np.array([0.5, -1.0, 0.1])}, "-1.0 node 1"),
        ({"num_devices": 0}, "num_devices 1 0"),
        ({"num_devices": 2.0}, "num_devices 1 2.0"),
        ({"buffer_rows": 1.5}, "buffer_rows 1.5"),
        ({"buffer_rows": 0}, "buffer_rows [1, 3] 0"),
        ({"buffer_rows": 4}, "buffer_rows [1, 3] 4"),
        ({"alpha": 1.5}, 'alpha [0, 1] "auto" 1.5'),
        ({"alpha": "low"}, "alpha [0, 1] \"auto\" 'low'"),
        ({"alpha": None}, 'alpha [0, 1] "auto" None'),
        ({"method": "best"}, "method rule ranges 'best'"),
        ({"groups": [[0]]}, "groups devices 0 1"),
        ({"method": "degree"}, "store="),
        ({"method": "metis"}, "part_id="),
        (
            {"method": "metis", "part_id": np.array([0, 1, np.nan])},
            "(3,) float64",
        ),
        ({"method": "metis", "part_id": np.array([0, 1, 2])}, "part_id [0, 2) 0 2"),
        ({"method": "pagraph"}, "store= train_nodes="),
        ({"method": "pagraph", "store": PAIR, "train_nodes": [0]}, "prob 3 2"),
        ({"method": "degree", "store": PAIR}, "prob 3 2"),
        ({"alpha": np.full((2, 2), 1.5)}, "alpha (2, 2) [0, 1]"),
        (
            {"prob": np.ones((3, 3))},
            "prob numbers one (2, num_nodes) float64 (3, 3)",
        ),
        ({"host_rows": -1}, "host_rows 0"),
    ],
)
def test_bad_arguments_give_one_line(change, message):
    arguments = {"prob": np.array([0.5, 0.2, 0.1]), "num_devices": 2, "buffer_rows": 1, **change}
    with pytest.raises(ValueError, match=said(message)):
        place(**arguments)


@pytest.mark.parametrize("num_devices", [2, 3, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.6, 1.0])
def test_rule_by_cost_stops_where_all_devices_together_are_cheapest(num_devices, alpha):
    """Of all the states that Algorithm 1 passes through, none has a lower predicted cost."""
    prob = np.sort(np.random.default_rng(num_devices).pareto(0.7, 60))[::-1]
    prob = prob / prob.max()

    def cost_of(placement):
        return placement.shares["host"] + alpha * placement.shares["peer"]

    chosen = cost_of(place(prob, num_devices, 12, alpha=alpha, method="rule_by_cost"))
    passed = [cost_of(place(prob, num_devices, 12, alpha=threshold)) for threshold in np.linspace(0, 1, 400)]
    assert chosen <= min(passed) + 1e-12
    if num_devices == 5 and alpha in (0.2, 0.6):
        assert chosen < cost_of(place(prob, num_devices, 12, alpha=alpha, method="rule"))


def test_devices_that_read_different_rows_hold_their_own():
    """Each of two linked devices reads one half of the rows only, and is given the hottest of that half."""
    rng = np.random.default_rng(0)
    prob = np.zeros((2, 40))
    prob[0, :20], prob[1, 20:] = rng.random(20), rng.random(20)
    placement = place(prob, 2, 8, alpha=0)
    for device, own in enumerate(prob):
        assert set(placement.rows[device]) == set(np.argsort(-own)[:8])
        assert placement.device_shares[device]["peer"] == 0
        assert placement.device_shares[device]["local"] == pytest.approx(np.sort(own)[-8:].sum() / own.sum())
    blind = place(prob.mean(axis=0), 2, 8, alpha=0)
    held = [set(np.concatenate(some.rows)) for some in (placement, blind)]
    assert held[0] == held[1], "which rows the group holds is decided by the mean"


@pytest.mark.parametrize("alpha", [0, 0.3])
@pytest.mark.parametrize("num_devices", [2, 3, 5])
def test_dealing_out_again_keeps_rows_and_copies(num_devices, alpha):
    prob = np.random.default_rng(num_devices).pareto(1.5, (num_devices, 200))
    mean = np.broadcast_to(prob.mean(axis=0), prob.shape)
    again, before = (place(probabilities, num_devices, 15, alpha=alpha) for probabilities in (prob, mean))
    assert [len(set(rows)) for rows in again.rows] == [15] * num_devices
    assert sorted(np.concatenate(again.rows)) == sorted(np.concatenate(before.rows))
    as_read = read_shares(before.rows, before.groups, None, prob)
    assert mean_shares(as_read)["local"] < again.shares["local"]
    assert mean_shares(as_read)["host"] == pytest.approx(again.shares["host"])


def test_hot_ranges_are_the_hottest_rows_of_each_range():
    prob = np.array([0.1, 0.9, 0.2, 0.8, 0.3, 0.4, 0.7, 0.6])
    assert [set(rows) for rows in place(prob, 2, 2, alpha=0, method="naive").rows] == [{1, 3}, {6, 7}]


def pairs(near: float, far: float) -> np.ndarray:
    """Four devices, linked in pairs 0-1 and 2-3."""
    alphas = np.full((4, 4), far)
    alphas[:2, :2] = alphas[2:, 2:] = near
    return alphas - np.diag(np.diag(alphas))


@pytest.mark.parametrize(
    ("near", "far", "groups"),
    [
        (0.1, 1.0, ((0, 1), (2, 3))),
        (0.1, 0.9, ((0, 1), (2, 3))),  # the others are reached, but at nearly the host's cost
        (0.1, 0.2, ((0, 1, 2, 3),)),
        (1.0, 1.0, ((0,), (1,), (2,), (3,))),
    ],
)
def test_groups_are_those_with_which_the_slowest_device_is_cheapest(near, far, groups):
    prob, alphas = np.random.default_rng(0).pareto(2.0, 4000), pairs(near, far)
    placement = place(prob, 4, 400, alpha=alphas, method="rule_by_cost")
    assert placement.groups == groups
    for other in (((0, 1), (2, 3)), ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))):
        forced = place(prob, 4, 400, alpha=alphas, groups=other, method="rule_by_cost")
        assert max(placement.costs) <= max(forced.costs) + 1e-9


def test_costs_are_those_of_every_read():
    prob, alphas = np.random.default_rng(1).random((4, 50)), pairs(0.2, 0.5)
    placement = place(prob, 4, 6, alpha=alphas, groups=[[0, 1], [2, 3]])
    for device in range(4):
        dev_num, _ = placement.lookup(device)
        cost = sum(p * (1 if at < 0 else alphas[device, at]) for p, at in zip(prob[device], dev_num, strict=True))
        assert placement.costs[device] == pytest.approx(cost, rel=1e-6)


def test_rule_by_cost_takes_hot_ranges_where_they_are_cheaper():
    """Devices that read ranges of their own, each by probabilities of another size: the mean is that of one device."""
    rng, prob = np.random.default_rng(3), np.full((2, 100), 0.05)
    prob[0, :50], prob[1, 50:] = 0.1 + 0.01 * rng.random(50), 0.9 + 0.1 * rng.random(50)
    found = {name: place(prob, 2, 20, alpha=0.8, method=name) for name in ("rule", "naive", "rule_by_cost")}
    costs = {name: max(placement.costs) for name, placement in found.items()}
    assert costs["rule_by_cost"] == min(costs.values())
