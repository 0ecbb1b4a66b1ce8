"""The replay of measured times: against an oracle that ticks, and on its own arithmetic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import task_schedule

from benchmarks.fixed_prefetch import FixedPrefetchPolicy
from benchmarks.replay import replay
from benchmarks.task_trace import BatchTimes, TaskTime, TaskTrace
from lightning_gnnscale.loader.scheduling_policy import TwoLevelPolicy, launch_score
from tests.says import said
from tests.tiers import all_pairs

TICK = 1 / 1024  # seconds: sums of ticks are exact
CHAIN = [(4, (), 1), (6, (0,), 5), (3, (1,), 9)]
FORK = [(2, (), 1), (7, (0,), 9), (3, (0,), 2), (5, (0,), 9), (1, (1, 2, 3), 0)]
MIXES = {
    "chains": [CHAIN] * 9,
    "forks": [FORK] * 9,
    "mixed": [CHAIN, FORK, FORK, CHAIN, [(11, (), 1)], CHAIN, FORK, [(1, (), 1)], CHAIN],
}


def trace_of(batches, num_bytes=10, train_s=()):
    """Ticks of the oracle as seconds; task graphs are made in no time."""
    times = []
    for tasks in batches:
        found = [TaskTime("fetch", before, float(cost), ticks * TICK) for ticks, before, cost in tasks]
        times.append(BatchTimes(0.0, found, 100, num_bytes))
    return TaskTrace(times, list(train_s))


def in_ticks(replayed):
    starts = [(now / TICK, thread, batch, task) for now, thread, batch, task in replayed.ran if task >= 0]
    return sorted(starts), [now / TICK for now in replayed.delivered_s]


@pytest.mark.sweep
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("train_ticks", [1, 4, 30])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_fixed_prefetch_is_the_oracles(name, threads, train_ticks, depth):
    found = replay(trace_of(MIXES[name]), FixedPrefetchPolicy(threads, depth), threads, train_s=train_ticks * TICK)
    assert in_ticks(found) == task_schedule.fixed_prefetch(MIXES[name], threads, depth, train_ticks)


@all_pairs
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("train_ticks", [1, 4, 30])
@pytest.mark.parametrize("cap", [None, 2])
def test_two_levels_without_a_threshold_are_the_oracles(name, threads, train_ticks, cap):
    """sigma 0 launches whenever a thread is free and the cap allows: no waiting by the clock."""
    policy = TwoLevelPolicy(threads, sigma=0, queue_bytes=None if cap is None else 10 * cap)
    found = replay(trace_of(MIXES[name]), policy, threads, train_s=train_ticks * TICK)
    assert in_ticks(found) == task_schedule.two_level(MIXES[name], threads, 0, train_ticks, cap)
    if cap:
        assert found.peak_bytes <= 10 * cap


@all_pairs
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("sigma", [20.3, 49.7, 500.9])
def test_two_levels_with_a_threshold_deliver_what_the_oracles_do(name, threads, sigma, monkeypatch):
    """With a look every tick, as the oracle has it, launches come at the same instants."""
    monkeypatch.setattr("lightning_gnnscale.loader.scheduling_policy.POLL_S", TICK)
    batches = MIXES[name] * 2
    found = replay(trace_of(batches), TwoLevelPolicy(threads, sigma), threads, train_s=14 * TICK)
    assert in_ticks(found) == task_schedule.two_level(batches, threads, sigma, 14)


def test_the_score_is_the_products_and_waits_for_no_one():
    assert launch_score(1.0, 2.0, 4.0, 1, 0) == pytest.approx(1 / 4 * 100 * 2 / 4)
    assert launch_score(1.0, 9.0, 4.0, 2, 0) == pytest.approx(1 / 4 * 100 * 9 / 8), "slow batches are begun earlier"
    assert launch_score(1.0, 2.0, 4.0, 1, 100) == pytest.approx(0, abs=1e-9)
    assert launch_score(1.0, 2.0, 4.0, 1, 50) == pytest.approx(1 / 8 * (101 - 101**0.5))
    assert launch_score(0.0, 2.0, 4.0, 0, 100) == launch_score(0.0, None, None, 3, 50) == float("inf")


@pytest.mark.parametrize(("options", "least", "most"), [({"sigma": 10}, 6, 12), ({}, 1, 3)])
def test_the_threshold_decides_how_many_batches_wait(options, least, most):
    """Idle cores, a batch takes as long as a step: the queue settles at 100 / sigma batches."""
    policy = TwoLevelPolicy(4, **options)
    sizes = []
    taken = policy.taken
    policy.taken = lambda *arguments: (sizes.append(policy.queue_size), taken(*arguments))
    found = replay(trace_of([CHAIN] * 60), policy, 4, train_s=14 * TICK)
    assert found.wait_share < 0.02
    assert max(sizes) <= max(most, 8) + 4, "while the first step shows how slow training is"
    assert least <= min(sizes[12:-20]) and max(sizes[12:]) <= most


def test_shared_cores_slow_everything_down_alike():
    """Four threads on one core are as fast as one; training on the same core takes its share."""
    batches = [[(10, (), 1)]] * 8
    one = replay(trace_of(batches), FixedPrefetchPolicy(1, 8), 1, train_s=0.0)
    four = replay(trace_of(batches), FixedPrefetchPolicy(4, 8), 1, train_s=0.0)
    assert one.seconds == pytest.approx(80 * TICK)
    assert four.seconds == pytest.approx(80 * TICK)
    assert four.busy_share == pytest.approx(1)
    shared = replay(trace_of(batches), FixedPrefetchPolicy(1, 8), 1, train_s=10 * TICK, train_cores=1)
    assert shared.seconds == pytest.approx(160 * TICK)
    apart = replay(trace_of(batches), FixedPrefetchPolicy(1, 8), 1, train_s=10 * TICK)
    assert apart.seconds == pytest.approx(90 * TICK)
    assert apart.waited_s == pytest.approx(10 * TICK)


def test_one_thread_at_a_time_is_in_the_interpreter():
    """Eight threads, tasks as long in the interpreter as out of it: never more than two of them are at work."""
    batches = [[(10, (), 1)]] * 64
    options = {"train_s": 0.0, "overhead_s": 10 * TICK}
    one = replay(trace_of(batches), FixedPrefetchPolicy(1, 8), 8, **options)
    eight = replay(trace_of(batches), FixedPrefetchPolicy(8, 16), 8, **options)
    assert one.seconds == pytest.approx(64 * 20 * TICK)
    assert eight.seconds == pytest.approx((64 * 10 + 10) * TICK)


def test_throughput_waits_and_use_add_up():
    found = replay(trace_of([CHAIN]), TwoLevelPolicy(2), 2, train_s=0.02, num_batches=12, overhead_s=0.001)
    assert found.num_seeds == 1200
    assert found.seconds == pytest.approx(found.waited_s + 12 * 0.02)
    assert found.seeds_per_s == pytest.approx(1200 / found.seconds)
    assert found.busy_share == pytest.approx(12 * (13 * TICK + 3 * 0.001) / (2 * found.seconds))
    again = replay(trace_of([CHAIN]), TwoLevelPolicy(2), 2, train_s=0.02, num_batches=12, overhead_s=0.001)
    assert again == found


def test_a_trace_round_and_round_with_its_own_steps():
    trace = trace_of([CHAIN, FORK], train_s=[0.010, 0.030])
    found = replay(trace, FixedPrefetchPolicy(1, 1), 2, num_batches=4)
    assert found.seconds == pytest.approx(found.waited_s + 0.08)


def test_requests_ahead_bound_what_is_under_way():
    batches = [[(10, (), 1)]] * 8
    found = replay(trace_of(batches), TwoLevelPolicy(8, sigma=0), 8, train_s=0.02, requests_ahead=2)
    assert found.peak_bytes <= 20
    free = replay(trace_of(batches), TwoLevelPolicy(8, sigma=0), 8, train_s=0.02)
    assert free.peak_bytes == 80


@st.composite
def graphs(draw):
    tasks = []
    for number in range(draw(st.integers(1, 6))):
        before = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        tasks.append((draw(st.integers(1, 9)), tuple(sorted(before)), draw(st.integers(0, 3))))
    return tasks


@settings(max_examples=60)
@given(batches=st.lists(graphs(), min_size=1, max_size=8), threads=st.integers(1, 4), cap=st.integers(1, 5))
def test_orders_and_caps_of_any_graphs(batches, threads, cap):
    """Tasks once each, after those they need; launches and deliveries in order; bytes below the cap."""
    policy = TwoLevelPolicy(threads, queue_bytes=10 * cap)
    found = replay(trace_of(batches), policy, threads, train_s=7 * TICK)
    begun = {(batch, task): now for now, _, batch, task in found.ran}
    assert len(begun) == len(found.ran) == sum(len(tasks) + 1 for tasks in batches)
    for (batch, task), now in begun.items():
        if task >= 0:
            for other in batches[batch][task][1]:
                assert begun[batch, other] + batches[batch][other][0] * TICK <= now + 1e-12  # what rounding leaves over
    launches = [begun[batch, -1] for batch in range(len(batches))]
    assert launches == sorted(launches)
    assert found.delivered_s == sorted(found.delivered_s)
    assert found.peak_bytes <= 10 * cap
    starts, taken = task_schedule.two_level(batches, threads, 0, 7, cap)
    free = replay(trace_of(batches), TwoLevelPolicy(threads, 0, 10 * cap), threads, train_s=7 * TICK)
    assert in_ticks(free) == (starts, taken)


def test_a_trace_is_saved_and_read(tmp_path):
    trace = trace_of([CHAIN, FORK], train_s=[0.5])
    trace.save(tmp_path / "trace.json")
    assert TaskTrace.load(tmp_path / "trace.json") == trace


def test_bad_arguments_are_refused():
    trace = trace_of([CHAIN])
    for options, message in (
        ({"cores": 0}, "cores must be at least 1, got 0"),
        ({"cores": 1, "train_cores": -1}, "train_cores must be at least 0, got -1"),
        ({"cores": 1, "requests_ahead": 0}, "requests_ahead must be at least 1, or None for all, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            replay(trace, FixedPrefetchPolicy(1, 1), **options)
    with pytest.raises(ValueError, match=said("batch none")):
        replay(TaskTrace(), FixedPrefetchPolicy(1, 1), 1)
    for make, message in (
        (lambda: TwoLevelPolicy(0), "num_threads must be at least 1, got 0"),
        (lambda: TwoLevelPolicy(1, sigma=-1.0), "sigma must be >= 0, got -1.0"),
        (lambda: TwoLevelPolicy(1, queue_bytes=0), "queue_bytes must be at least 1, or None for no cap, got 0"),
        (lambda: FixedPrefetchPolicy(1, 0), "depth must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
