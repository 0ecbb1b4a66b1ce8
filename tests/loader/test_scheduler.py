"""Threads that prepare batches: order, bits, caps, errors, ends, what is recorded, and decisions as in the replay."""

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from oracles import task_schedule
from oracles.parts import small_world

from benchmarks.fixed_prefetch import FixedPrefetchPolicy
from benchmarks.replay import replay
from benchmarks.task_trace import TaskTrace, traced
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.loader import BatchKey
from lightning_gnnscale.loader.batch_graph import BatchGraph, Task
from lightning_gnnscale.loader.batch_maker import BatchMaker
from lightning_gnnscale.loader.operators import FanoutNeighborhood
from lightning_gnnscale.loader.scheduling_policy import TwoLevelPolicy
from lightning_gnnscale.loader.staged_part import PartStager, node_values
from lightning_gnnscale.loader.task_graph import Operators, Workflow
from lightning_gnnscale.loader.task_source import Scheduler, machine_utilisation
from lightning_gnnscale.rng import batch_key
from lightning_gnnscale.sampler import NeighborSampler
from tests.says import said

WORLD = small_world(num_parts=3)
SAMPLER = NeighborSampler([4, 3])
CHAIN = [(4, (), 1), (6, (0,), 5), (3, (1,), 9)]
FORK = [(2, (), 1), (7, (0,), 9), (3, (0,), 2), (5, (0,), 9), (1, (1, 2, 3), 0)]


def two_level(make, threads, sigma=10.0, queue_bytes=None, **options) -> Scheduler:
    return Scheduler(make, TwoLevelPolicy(threads, sigma, queue_bytes), **options)


def fixed_prefetch(make, threads, depth=3, **options) -> Scheduler:
    return Scheduler(make, FixedPrefetchPolicy(threads, depth), **options)


KINDS = {"two levels": two_level, "fixed": fixed_prefetch}


def threads_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gnnscale-batch")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert threads_left() == []


class Clock:
    """Seconds that pass only where a task says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


def fake_graphs(batches, clock, begun, num_bytes=10):
    """Task graphs of hand-made times on a clock that tasks put forward."""

    def make(dag_id, key):
        def task(number, ticks, before, cost):
            def run():
                begun.append((clock.now, dag_id, number))
                clock.advance(ticks)

            return Task(dag_id, number, "fetch", before, run, lambda: cost)

        tasks = [task(number, *times) for number, times in enumerate(batches[dag_id])]
        return BatchGraph(tasks, lambda: f"batch {key}", lambda: num_bytes)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_one_thread_runs_tasks_in_the_oracles_order(kind):
    """Requested at once, nothing trained yet: one thread on a clock of its own is the tick oracle's."""
    batches, clock, begun = [CHAIN, FORK, FORK], Clock(), []
    options = {"sigma": 0} if kind == "two levels" else {}
    scheduler = KINDS[kind](fake_graphs(batches, clock, begun), 1, clock=clock, **options)
    for key in "abc":
        scheduler.request(key)
    taken = [scheduler.ready() for _ in batches]
    scheduler.close()
    assert taken == [("a", "batch a"), ("b", "batch b"), ("c", "batch c")]
    if kind == "fixed":
        starts, _ = task_schedule.fixed_prefetch(batches, 1, 3, 10**6)
    else:
        starts, _ = task_schedule.two_level(batches, 1, 0, 10**6)
    assert [(now, batch, task) for now, batch, task in begun] == [(now, batch, task) for now, _, batch, task in starts]


class Source:
    """Batches of parts by keys, as a loader asks for them."""

    def __init__(self):
        targets = {part: WORLD.targets(part) for part in range(3)}
        stager = PartStager(WORLD.load_part, targets, SAMPLER, node_values(WORLD.labels, WORLD.masks), 1)
        self.parts = {part: stager(part) for part in range(3)}
        self.maker = BatchMaker(SAMPLER, WORLD.features)
        self.workflow = Workflow(self.maker, Operators(FanoutNeighborhood(SAMPLER)))
        counts = {part: SAMPLER.num_batches(len(targets[part]), 16, False) for part in range(3)}
        self.keys = [BatchKey(1, epoch, p, b) for epoch in range(3) for p in range(3) for b in range(counts[p])]

    def items(self, key):
        return self.parts[key.part].items(SAMPLER, 16, False, key.seed, key.epoch, True)[key.batch]

    def make(self, dag_id, key):
        return self.workflow.instance(dag_id, batch_key(*key), self.parts[key.part], self.items(key))

    def expected(self, key):
        return self.maker.build(self.parts[key.part], self.items(key), batch_key(*key))


SOURCE = Source()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_batches_come_in_request_order_bit_for_bit(kind, threads):
    scheduler = KINDS[kind](SOURCE.make, threads)
    for key in SOURCE.keys:
        scheduler.request(key)
    for key in SOURCE.keys:
        found, batch = scheduler.ready()
        expected = SOURCE.expected(key)
        assert found == key
        for name in ("n_id", "edge_index", "indptr", "x", "y", "degree", "train_mask"):
            assert getattr(batch, name).numpy().tobytes() == getattr(expected, name).numpy().tobytes()
    scheduler.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_finished_batches_stay_below_the_cap(threads):
    """A trainer that stops consuming: preparation stops at the cap, and goes on when there is space."""
    clock, begun = Clock(), []
    scheduler = two_level(fake_graphs([CHAIN] * 12, clock, begun), threads, sigma=0, queue_bytes=45, clock=clock)
    stopped = threading.Condition(scheduler._lock)
    wait = scheduler._work.wait
    idle = set()

    def counted(timeout=None):
        assert timeout is None, "nothing is polled at the cap"
        idle.add(threading.current_thread())
        stopped.notify_all()
        wait()
        idle.discard(threading.current_thread())

    scheduler._work.wait = counted
    for number in range(12):
        scheduler.request(number)
    for taken in range(12):
        left = 12 - taken
        with stopped:
            full = lambda: len(idle) == threads and scheduler.policy.queue_size == min(4, left)  # noqa: E731, B023
            assert stopped.wait_for(full, 20)
        assert scheduler.policy.held_bytes == 10 * min(4, left)
        assert scheduler.ready() == (taken, f"batch {taken}")
    assert scheduler.policy.peak_bytes == 40
    scheduler.close()


def test_one_batch_fits_under_any_cap():
    scheduler = two_level(SOURCE.make, 2, queue_bytes=1)
    for key in SOURCE.keys[:5]:
        scheduler.request(key)
    assert [scheduler.ready()[0] for _ in range(5)] == SOURCE.keys[:5]
    scheduler.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["make", "task", "cost", "result"])
def test_an_error_names_its_key_and_the_others_come(kind, where):
    broken = SOURCE.keys[2]

    def fail(*_):
        raise OSError("disk gone")

    def make(dag_id, key):
        if key == broken and where == "make":
            fail()
        graph = SOURCE.make(dag_id, key)
        if key == broken:
            task = graph.tasks[1]
            if where == "result":
                graph.result = fail
            else:
                setattr(task, "run" if where == "task" else "cost", fail)
        return graph

    if kind == "fixed" and where == "cost":
        return  # costs are nothing to it
    scheduler = KINDS[kind](make, 3)
    for key in SOURCE.keys[:6]:
        scheduler.request(key)
    found = []
    for _ in range(6):
        try:
            found.append(scheduler.ready()[0])
        except GNNScaleError as error:
            where = f"part {broken.part}, batch {broken.batch} of epoch {broken.epoch + 1}"
            assert str(error) == f"{where}: OSError: disk gone"
            found.append("error")
    scheduler.close()
    assert found == [*SOURCE.keys[:2], "error", *SOURCE.keys[3:6]]


def test_remote_tasks_begin_first_and_hold_up_no_thread():
    """One thread: a request goes out before its batch's local tasks, and the batch that has its reply first goes on."""
    clock, begun, replies = Clock(), [], {0: Future(), 1: Future()}

    def make(dag_id, key):
        def local(number):
            begun.append((dag_id, number))
            if (dag_id, number) == (1, 1):  # all that waits for no reply is done: the later batch's comes first
                replies[1].set_result(None)
            elif (dag_id, number) == (1, 2):
                replies[0].set_result(None)

        def ask():
            begun.append((dag_id, 0))
            return replies[dag_id]

        tasks = [Task(dag_id, 0, "ask", [], ask, lambda: 9, is_remote=True)]
        tasks += [Task(dag_id, 1, "fetch", [], lambda: local(1), lambda: 1)]
        tasks += [Task(dag_id, 2, "fetch", [0, 1], lambda: local(2), lambda: 1)]
        return BatchGraph(tasks, lambda: key, lambda: 1)

    scheduler = two_level(make, 1, sigma=0, clock=clock)
    for key in "ab":
        scheduler.request(key)
    assert [scheduler.ready() for _ in "ab"] == [("a", "a"), ("b", "b")]
    scheduler.close()
    assert begun == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_thread_outlives_what_was_asked_for(kind):
    scheduler = KINDS[kind](SOURCE.make, 2)
    assert threads_left() == []
    for _ in range(2):  # requests may follow
        for key in SOURCE.keys[:8]:
            scheduler.request(key)
        assert len(threads_left()) == 2
        assert scheduler.ready()[0] == SOURCE.keys[0]
        scheduler.forget()
        assert threads_left() == []
        with pytest.raises(ValueError, match=said("request(key) ready")):
            scheduler.ready()


def test_a_trace_holds_every_task_and_replays():
    trace = TaskTrace()
    scheduler = two_level(traced(SOURCE.make, trace, time.perf_counter), 2)
    for key in SOURCE.keys:
        scheduler.request(key)
    seeds = sum(scheduler.ready()[1].batch_size for _ in SOURCE.keys)
    scheduler.close()
    assert len(trace.batches) == len(SOURCE.keys)
    assert sum(batch.num_seeds for batch in trace.batches) == seeds
    kinds = [task.kind for task in SOURCE.workflow.tasks]
    for batch in trace.batches:
        assert [task.kind for task in batch.tasks] == kinds
        assert all(task.seconds > 0 and task.cost >= 0 for task in batch.tasks)
        assert batch.num_bytes > 0
    found = replay(trace, two_level(SOURCE.make, 4).policy, 4)
    assert found.num_seeds == seeds


def test_task_times_may_be_on_a_clock_of_their_own():
    clock, trace = Clock(), TaskTrace()
    make = traced(fake_graphs([CHAIN], clock, []), trace, lambda: 2 * clock.now)
    scheduler = fixed_prefetch(make, 1, 1, clock=clock)
    scheduler.request(0)
    scheduler.ready()
    scheduler.close()
    assert [task.seconds for task in trace.batches[0].tasks] == [8, 12, 6]


def test_waits_of_the_trainer_are_counted():
    clock, begun = Clock(), []
    scheduler = fixed_prefetch(fake_graphs([CHAIN] * 2, clock, begun), 1, depth=1, clock=clock)
    scheduler.request(0)
    scheduler.ready()
    clock.advance(5)
    scheduler.request(1)
    scheduler.ready()
    scheduler.close()
    assert scheduler.policy.train_s.value >= 5
    assert 0 <= scheduler.waited_s <= 26


def test_the_gauge_of_the_machine_is_a_percentage():
    gauge = machine_utilisation()
    np.arange(10**6).sum()
    assert 0 <= gauge() <= 100


def test_the_gauge_forgets_what_was_long_ago():
    now, readings = [0.0], iter([0.0, 100.0, 0.0, 0.0, 50.0])
    gauge = machine_utilisation(lambda: next(readings), lambda: now[0])
    assert gauge() == 100
    now[0] = 0.01
    assert gauge() == 100, "too soon for another reading"
    now[0] = 0.25
    assert gauge() == pytest.approx(100 * np.exp(-1))
    now[0] = 10.0
    assert gauge() == pytest.approx(0, abs=1e-9)
    now[0] = 20.0
    assert gauge() == pytest.approx(50)
