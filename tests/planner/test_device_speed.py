"""The model of a card by hand: what each stage moves, and what bounds it."""

import pytest

from lightning_gnnscale.planner import plan
from lightning_gnnscale.planner.device_speed import batch_counts, card_of, stage_bounds
from lightning_gnnscale.planner.host_memory import BatchShape
from tests.says import said

SHAPE = BatchShape(feature_dim=128, batch_size=1000, fanouts=(10, 5), hidden_channels=256)
NODES, EDGES = 10_000_000, 200_000_000
ROWS = (1000 + 10_000 + 50_000) * 512


def bounds(**options):
    return {one.stage: one for one in stage_bounds(NODES, EDGES, SHAPE, "h200", **options)}


def test_counts_of_a_batch_are_those_of_a_tree_up_to_the_graph():
    assert batch_counts(NODES, EDGES, SHAPE) == ([1000, 10_000, 50_000], [10_000, 50_000])
    assert batch_counts(5000, 100_000, SHAPE) == ([1000, 4000, 0], [10_000, 20_000])
    assert batch_counts(NODES, EDGES, BatchShape(batch_size=10, fanouts=(-1,))) == ([10, 200], [200])


def test_pinned_rows_cross_the_link_in_the_gather():
    found = bounds()
    assert found["gather"].num_bytes == ROWS and found["read"].num_bytes == 0
    assert found["gather"].seconds == pytest.approx(ROWS / 64e9)
    assert found["cross"].num_bytes == 8 * (2 * 61_000 + 2 * 60_000)
    assert found["sample"].seconds == pytest.approx(60_000 / 10e6)
    assert bounds(num_cores=4)["sample"].seconds == pytest.approx(60_000 / 40e6)


def test_resident_rows_are_read_and_written_in_the_cards_memory():
    assert bounds(tier="device")["gather"].seconds == pytest.approx(ROWS / 2400e9)


def test_rows_of_the_host_and_the_disk_are_read_there_and_cross():
    host, disk = bounds(tier="host", num_cores=2), bounds(tier="disk")
    assert host["read"].seconds == pytest.approx(ROWS / 10e9) and disk["read"].seconds == pytest.approx(ROWS / 1.1e9)
    assert host["cross"].num_bytes == disk["cross"].num_bytes == bounds()["cross"].num_bytes + ROWS
    assert host["gather"].num_bytes == 0 and host["gather"].seconds == 0


def test_compute_is_bound_by_memory_or_by_products():
    first = 4 * 128 * (60_000 + 11_000) + 4 * 256 * 11_000
    second = 4 * 256 * (10_000 + 1000) + 4 * 256 * 1000
    compute = bounds()["compute"]
    assert compute.num_bytes == 3 * (first + second)
    assert compute.seconds == pytest.approx(3 * (first + second) / 4800e9)
    wide = BatchShape(feature_dim=8192, batch_size=1000, fanouts=(1,), hidden_channels=8192)
    products = {one.stage: one for one in stage_bounds(NODES, EDGES, wide, "h200")}["compute"]
    assert products.seconds == pytest.approx(3 * 2 * 1000 * 2 * 8192 * 8192 / 495e12)


def test_a_plan_says_what_bounds_a_batch_of_a_named_card():
    sizes = {"num_nodes": NODES, "num_edges": EDGES, "feature_dim": 128, "batch_size": 1000, "fanouts": [10, 5]}
    unlimited = {"device_memory_bytes": None, "host_memory_bytes": None}
    terms = dict(plan(**sizes, **unlimited, device="h200", rows_on="disk").terms())
    assert terms["a batch is bound by"] == f"read, {1e3 * ROWS / 1.1e9:.3f} ms"
    assert "10,000 batches" in terms["a pass over all nodes, at least"]
    assert "a batch is bound by" not in dict(plan(**sizes, **unlimited).terms())


def test_unknown_cards_and_tiers_are_refused():
    assert card_of("H200") is card_of("h200")
    with pytest.raises(ValueError, match=said("planner.device h200 h100 v100")):
        card_of("v100")
    with pytest.raises(ValueError, match=said("planner.rows_on device pinned host disk tape")):
        bounds(tier="tape")
