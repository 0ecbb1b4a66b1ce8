"""Seconds and money of an epoch, against sums made by hand."""

from dataclasses import replace

import pytest

from lightning_gnnscale.planner.machine_cost import (
    BatchSeconds,
    MachineRates,
    SetUp,
    cheapest,
    epoch_cost,
    fetch_seconds,
    ring_bytes,
)
from tests.says import said

BATCH = BatchSeconds(train_s=0.2, prepare_s=0.1, disk_bytes=3e6)
RATES = MachineRates(price_per_hour=3.6, preparing_price_per_hour=1.8, link_gbit=0.8, latency_ms=10, cores=8)
# 0.8 Gbit/s carry 1e8 bytes in a second.


def test_one_machine_is_as_busy_as_its_training_thread():
    cost = epoch_cost(SetUp(training=1, steps=50), BATCH, RATES)
    assert cost.seconds == pytest.approx(50 * 0.2 + 0.1), "the first batch is waited for"
    assert (cost.bound_by, cost.sent_bytes, cost.averaged_bytes) == ("layers", 0, 0)
    assert cost.price == pytest.approx(3.6 * cost.seconds / 3600)


def test_cores_that_layers_and_preparation_share():
    of_one = epoch_cost(SetUp(training=1, steps=50), BATCH, replace(RATES, cores=1))
    assert of_one.bound_by == "processors" and of_one.seconds == pytest.approx(50 * 0.3 + 0.1)
    two = epoch_cost(SetUp(training=1, steps=50, devices=2), BATCH, replace(RATES, cores=1))
    assert two.seconds == pytest.approx(50 * 0.6 + 0.1)
    on_gpu = epoch_cost(SetUp(training=1, steps=50), replace(BATCH, on_gpu=True), replace(RATES, cores=1))
    assert on_gpu.bound_by == "layers" and on_gpu.seconds == pytest.approx(50 * 0.2 + 0.1)


def test_owners_are_waited_for_by_those_who_prepare():
    setup = SetUp(training=2, steps=10, requests=3, received_bytes=4e8, sent_bytes=3e8, total_bytes=7e8)
    fetch_s = 4e8 / 1e8 / 10 + 3 * 0.01
    assert fetch_seconds(setup, RATES) == pytest.approx(fetch_s)
    cost = epoch_cost(setup, BATCH, RATES)
    assert cost.bound_by == "preparation"
    assert cost.seconds == pytest.approx(10 * (0.1 + fetch_s) + 0.1 + fetch_s)
    assert cost.sent_bytes == 7e8
    threads = epoch_cost(replace(setup, makers=4), BATCH, RATES)
    assert threads.bound_by == "links" and threads.seconds == pytest.approx(10 * 0.4 + 0.1 + fetch_s)
    assert cost.price == pytest.approx(2 * 3.6 * cost.seconds / 3600)


def test_averages_follow_the_training_thread_and_fill_the_links():
    setup = SetUp(training=4, steps=10, averaged_bytes=1e9, averages=10)
    assert ring_bytes(1e9, 4) == 1.5e9
    cost = epoch_cost(setup, BATCH, RATES)
    assert cost.bound_by == "layers" and cost.averaged_bytes == pytest.approx(6e9)
    assert cost.seconds == pytest.approx(10 * 0.2 + 15 + 2 * 3 * 10 * 0.01 + 0.1)


def test_machines_that_prepare():
    setup = SetUp(training=1, preparing=2, steps=100, makers=3, trained_bytes=6e8, sent_bytes=3e8, total_bytes=6e8)
    cost = epoch_cost(setup, replace(BATCH, prepare_s=3.0), RATES)
    assert cost.bound_by == "preparation", "six workers"
    assert cost.seconds == pytest.approx(100 * 3.0 / 6 + 3.0)
    assert cost.price == pytest.approx((3.6 + 2 * 1.8) * cost.seconds / 3600)
    slow = epoch_cost(setup, BATCH, replace(RATES, link_gbit=0.08))
    assert slow.bound_by == "links" and slow.seconds == pytest.approx(60 + 0.1), "the trainer's link"
    few = epoch_cost(setup, replace(BATCH, prepare_s=3.0), replace(RATES, cores=1))
    assert few.bound_by == "processors" and few.seconds == pytest.approx(100 * 3.0 / 2 + 3.0)


def test_disks_and_prices_that_are_not_known():
    rates = MachineRates(disk_gb_per_s=0.01, cores=4)
    cost = epoch_cost(SetUp(training=1, steps=10), BATCH, rates)
    assert cost.bound_by == "disks" and cost.seconds == pytest.approx(10 * 0.3 + 0.1)
    assert cost.price is None and cheapest([cost]) is None
    costs = [epoch_cost(SetUp(training=t, steps=100 // t), BATCH, RATES) for t in (1, 2, 4)]
    assert cheapest(costs) is min(costs, key=lambda one: one.price)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"price_per_hour": -1}, "price_per_hour -1"),
        ({"link_gbit": 0}, "link_gbit > 0 0"),
        ({"disk_gb_per_s": "fast"}, "disk_gb_per_s fast"),
        ({"cores": 0}, "cores 1 0"),
        ({"latency_ms": float("nan")}, "latency_ms nan"),
    ],
)
def test_rates_out_of_range(given, words):
    with pytest.raises(ValueError, match=said(words)):
        MachineRates(**given)
