"""From 1 to num_nodes parts every method fills each part, and keeps the balance that it promised or says that not."""

import inspect

import numpy as np
import pytest

from lightning_gnnscale.partitioner import (
    available_partitioners,
    metis,
    partition,
    register_partitioner,
    registry,
)
from lightning_gnnscale.partitioner.registry import fill_empty_parts
from tests.partitioner.graphs import ODD, stream_of
from tests.says import said
from tests.tiers import all_pairs

rng = np.random.default_rng(5)
GRAPHS = {
    "club": (34, sorted({tuple(sorted(pair)) for pair in rng.integers(0, 34, (90, 2)).tolist() if pair[0] != pair[1]})),
    "path": ODD["path"],
    "star": ODD["star"],
    "isolated": (14, [(0, 1), (4, 5), (5, 6), (4, 6)]),
}
PARTS = {
    "1": lambda n: 1,
    "2": lambda n: 2,
    "3": lambda n: 3,
    "half": lambda n: n // 2,
    "three_quarters": lambda n: 3 * n // 4,
    "all_but_six": lambda n: n - 6,
    "all_but_one": lambda n: n - 1,
    "all": lambda n: n,
}
# The largest part over the mean that the method's description promises of its own accord.
PROMISED = {"metis": 1.03, "kaminpar": 1.03, "streaming_multilevel": 1.03, "mixed": 1.03, "neighborhood_block": 1.05}
PROMISED |= {"ldg": 1.0, "fennel": 1.1, "random": 1.0, "range": 1.0}
NEEDS = {"metis": metis.metis_is_installed, "kaminpar": metis.kaminpar_is_installed}
METHODS = available_partitioners()


def run(method, num_nodes, edges, num_parts):
    """Parts, and what was warned of balance."""
    if not NEEDS.get(method, lambda: True)():
        pytest.skip(f"needs {method}")
    given = {}
    if method == "mixed":
        given["pieces"] = min(2, num_nodes // num_parts)
    if method == "neighborhood_block":
        given["masks"] = {"train": np.arange(num_nodes) % 3 == 0}
    result = partition(stream_of(edges, num_nodes), method, num_parts, evaluate=False, **given)
    return result, [text for text in result.notes.get("warnings", []) if text.startswith("balance of nodes")]


@pytest.mark.filterwarnings("ignore::UserWarning")
@all_pairs
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("method", METHODS)
def test_every_part_has_a_node_and_the_balance_is_kept_or_told(method, graph, parts):
    num_nodes, edges = GRAPHS[graph]
    num_parts = PARTS[parts](num_nodes)
    result, told = run(method, num_nodes, edges, num_parts)
    sizes = np.bincount(result.part_id, minlength=num_parts)
    assert len(sizes) == num_parts and sizes.min() >= 1 and sizes.sum() == num_nodes
    if method in PROMISED:
        cap = max(int(PROMISED[method] * num_nodes / num_parts), -(-num_nodes // num_parts))
        assert len(told) == int(sizes.max() > cap), (sizes, told)
        assert all(f"take fewer parts than {num_parts}" in text for text in told)
    again, _ = run(method, num_nodes, edges, num_parts)
    assert method == "kaminpar" or np.array_equal(again.part_id, result.part_id)


@pytest.mark.parametrize("method", METHODS)
def test_more_parts_than_nodes_are_refused_before_the_work(method, monkeypatch):
    def work(stream, num_parts, **given):
        raise AssertionError("the method was called")

    work.__signature__ = inspect.signature(registry.get_partitioner(method))
    monkeypatch.setitem(registry._PARTITIONERS, method, work)
    with pytest.raises(ValueError, match=said("partitioner.num_parts 1 34 35")) as refused:
        partition(stream_of(GRAPHS["club"][1], 34), method, 35)
    assert "\n" not in str(refused.value)


def test_empty_parts_get_the_last_nodes_of_the_largest():
    part_id = np.array([1, 1, 1, 1, 3, 3, 3, 1], np.int32)
    part_id.flags.writeable = False  # a method's own array is not written to
    assert fill_empty_parts(part_id, 6).tolist() == [1, 1, 0, 2, 3, 3, 5, 4]
    whole = np.array([1, 0, 2], np.int32)
    assert fill_empty_parts(whole, 3) is whole


@pytest.fixture
def own_method():
    """A method of a user that puts all but the first nodes into part 0, and promises another balance."""

    @register_partitioner("lopsided", slack=1.5)
    def lopsided(stream, num_parts, *, seed=0, masks=None, balance=None, progress=None):
        part_id = np.zeros(stream.num_nodes, np.int64)
        part_id[1] = num_parts - 1
        return part_id

    yield "lopsided"
    del registry._PARTITIONERS["lopsided"], registry._PROMISED["lopsided"]


def test_a_users_own_method_is_judged_by_what_it_promises(own_method):
    num_nodes, edges = GRAPHS["club"]
    with pytest.warns(UserWarning, match=said("nodes 3.6471 1.5 0 31 19 12 fewer 4 balance.nodes 3.6471")):
        result = partition(stream_of(edges, num_nodes), own_method, 4)
    assert np.bincount(result.part_id).tolist() == [31, 1, 1, 1]
    assert result.notes["parts_filled"] == 2


def test_a_balance_asked_of_it_counts_instead(own_method):
    num_nodes, edges = GRAPHS["club"]
    masks, asked = {"train": np.arange(num_nodes) < 4}, {"nodes": 4, "train": 1.0, "volume": 1.1}
    with pytest.warns(UserWarning, match=said("train 3.0000 1 0 3 2 1 fewer 4")) as told:
        notes = partition(stream_of(edges, num_nodes), own_method, 4, masks=masks, balance=asked).notes
    assert len(told) == 1 and notes["balance_violations"] == {"train": 2}
    assert notes["balance_unchecked"] == ["volume"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_masks_are_judged_after_empty_parts_were_filled():
    num_nodes, edges = GRAPHS["club"]
    given = {"masks": {"train": np.arange(num_nodes) % 2 == 0}, "balance": {"nodes": 1.05, "train": 1.05}}
    result = partition(stream_of(edges, num_nodes), "streaming_multilevel", 28, **given)
    assert result.notes["parts_filled"]
    sizes = np.bincount(result.part_id[::2], minlength=28)
    assert result.notes["balance"]["train"] == pytest.approx(sizes.max() * 28 / 17)
