import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.partitioner import phases
from lightning_gnnscale.partitioner.constraints import judge, node_weight, part_loads, resolve_constraints
from tests.says import said

DEGREE = np.array([4, 1, 1, 1, 1, 0, 2, 2], np.int32)
TRAIN = np.array([1, 1, 0, 0, 0, 0, 1, 0], bool)
VAL = np.array([0, 1, 1, 0, 0, 0, 0, 1], bool)


def test_caps_of_every_node_type():
    balance = {"nodes": 1.25, "volume": 1.5, "train": 1.0, "val": 2.0}
    constraints = resolve_constraints(balance, {"train": TRAIN, "val": VAL, "test": None}, DEGREE, 2)
    assert constraints.names == ("nodes", "volume", "train", "val")
    assert constraints.total.tolist() == [8, 12, 3, 3]
    assert constraints.cap.tolist() == [5, 9, 2, 3]  # a part must hold the mean, rounded up
    assert [node_weight(constraints, DEGREE, node) for node in (0, 1, 7)] == [[1, 4, 1, 0], [1, 1, 1, 1], [1, 2, 0, 1]]
    part = np.array([0, 0, 0, 0, 1, 1, 1, 1], np.int32)
    assert part_loads(constraints, DEGREE, part, 2).tolist() == [[4, 7, 2, 2], [4, 5, 1, 1]]


@given(num_nodes=st.integers(1, 500), num_parts=st.integers(1, 40), hundredths=st.integers(100, 300))
def test_a_cap_is_the_slack_times_the_mean_rounded_down_but_at_least_the_mean_rounded_up(
    num_nodes, num_parts, hundredths
):
    constraints = resolve_constraints({"nodes": hundredths / 100}, None, np.zeros(num_nodes, np.int32), num_parts)
    exact = hundredths * num_nodes // (100 * num_parts)
    assert constraints.cap.tolist() == [max(exact, math.ceil(num_nodes / num_parts))]


def test_without_wishes_nodes_are_balanced():
    for balance in (None, {}):
        constraints = resolve_constraints(balance, None, DEGREE, 2, default_slack=1.25)
        assert (constraints.names, constraints.cap.tolist()) == (("nodes",), [5])


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        ({"nodes": 0.99}, "partitioner.balance.nodes >= 1 0.99"),
        ({"volume": float("inf")}, "partitioner.balance.volume >= 1 inf"),
        ({"train": "1.1"}, "partitioner.balance.train >= 1 '1.1'"),
        ({"edges": 1.1}, "mask 'edges' balanced"),
        ({"gone": 1.1}, "partitioner.balance.gone 'gone'"),
        ({"short": 1.1}, "masks['short'] (8,) counts (3,)"),
        ({"wide": 1.1}, "masks['wide'] 0 -1 [0, 2147483648)"),
        ({"none": 1.1}, "partitioner.balance.none masks['none'] balance"),
        (dict.fromkeys("abcdefghi", 1.1), "partitioner.balance 8 9"),
        (
            {"volume": 1.1},
            "partitioner.balance.volume=1.1 0 4 3 12 1.333",
        ),
    ],
)
def test_what_cannot_be_asked_for_is_named(balance, message):
    masks = {
        "train": TRAIN,
        "short": TRAIN[:3],
        "wide": -TRAIN.astype(np.int64),
        "none": np.zeros(8, bool),
        "gone": None,
    }
    with pytest.raises(ValueError, match=said(message)):
        resolve_constraints(balance, masks, DEGREE, 4)


def test_the_slack_that_is_told_suffices():
    constraints = resolve_constraints({"volume": 1.334}, None, DEGREE, 4)
    assert constraints.cap.tolist() == [4]


def test_eight_constraints_fit():
    masks = {name: np.arange(8) == d for d, name in enumerate("abcdefgh")}
    constraints = resolve_constraints(dict.fromkeys(masks, 1.0), masks, DEGREE, 2)
    assert [node_weight(constraints, DEGREE, node) for node in range(8)] == np.eye(8, dtype=int).tolist()


def test_a_violation_is_told_with_its_size_and_part():
    constraints = resolve_constraints({"nodes": 1.25, "volume": 1.5}, None, DEGREE, 2)
    with phases.recording() as record, pytest.warns(UserWarning) as warned:
        judge(constraints, np.array([[2, 9], [6, 3]]))
    message = (
        "balance of nodes is 1.5000, above the 1.25 asked for or promised: part 1 holds 6, 1 more than its 5: take "
        "fewer parts than 2, or allow partitioner.balance.nodes=1.5"
    )
    assert [str(warning.message) for warning in warned] == [message]
    assert record.notes["balance"] == {"nodes": 1.5, "volume": 1.5}
    assert record.notes["balance_violations"] == {"nodes": 1}
    assert record.notes["warnings"] == [message]


def test_kept_caps_are_told_without_a_warning(recwarn):
    constraints = resolve_constraints({"nodes": 1.25, "volume": 1.5}, None, DEGREE, 2)
    with phases.recording() as record:
        judge(constraints, np.array([[5, 9], [3, 3]]))
    assert record.notes == {"balance": {"nodes": 1.25, "volume": 1.5}, "balance_violations": {}}
    assert len(recwarn) == 0
