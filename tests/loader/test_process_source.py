"""Worker processes: the same batches bit for bit, under kills, caps, errors, and with nothing left behind."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial

import psutil
import pytest
from process_parent import train_until_killed
from test_part_loader import SAMPLERS, WORLD, ToldFeatures, all_contents, contents, loader_threads, make_loader

from lightning_gnnscale import events
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.loader import ProcessSource, RowReads
from lightning_gnnscale.sampler import NeighborSampler
from tests.says import said

SLACK_S = 15  # of a machine that others use too


@pytest.fixture
def processes():
    """A maker of loaders over processes, closed at the end; no thread, process or shared memory is left."""
    shared, open_before, made = shared_files(), memory_files(), []

    def make(num_workers=2, prefetch_batches=4, queue_bytes=1 << 26, timeout_s=300.0, **options):
        source = partial(ProcessSource, num_workers=num_workers, queue_bytes=queue_bytes, timeout_s=timeout_s)
        made.append(make_loader(source=source, prefetch_batches=prefetch_batches, **options))
        return made[-1]

    yield make
    pids = [pid for loader in made for pid in loader._source.worker_pids]
    for loader in made:
        loader.close()
    assert loader_threads() == []
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    gc.collect()  # batches that a failed request's traceback holds
    assert shared_files() <= shared
    assert memory_files() <= open_before


def shared_files() -> set[str]:
    """Named shared memory; semaphores of any process there lose their names as soon as they are made."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def memory_files() -> set[str]:
    """Descriptors of unnamed memory that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        found |= {fd} if "gnnscale" in target else set()
    return found


@pytest.mark.parametrize(("name", "num_workers"), [*((name, 2) for name in SAMPLERS), ("neighbor", 1), ("neighbor", 4)])
def test_batches_equal_those_of_threads(processes, name, num_workers):
    expected = all_contents(make_loader(sampler=SAMPLERS[name], num_threads=0))
    assert all_contents(processes(num_workers, sampler=SAMPLERS[name])) == expected


def test_workers_stay_over_epochs_and_iterations_that_are_broken_off(processes):
    loader, local = processes(), make_loader()
    list(loader)
    pids = sorted(loader._source.worker_pids)
    for epoch in (1, 2):
        for done in (loader, local):
            done.set_epoch(epoch)
        iterator = iter(loader)
        next(iterator)
        iterator.close()
        assert all_contents(loader) == all_contents(local)
    assert sorted(loader._source.worker_pids) == pids and len(pids) == 2


def kill_one(loader) -> int:
    """Kill a worker that runs, as soon as there is one."""
    while True:
        for victim in loader._source.worker_pids:
            with suppress(ProcessLookupError):  # it was killed before, and that is not noticed yet
                os.kill(victim, signal.SIGKILL)
                return victim
        time.sleep(0.01)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_killed_worker_loses_no_batch_and_doubles_none(processes, num_workers):
    expected = all_contents(make_loader(num_threads=0))
    loader = processes(num_workers, prefetch_batches=6)
    found, victims, since = [], [], len(events.recent())
    for number, batch in enumerate(loader):
        found.append(contents(batch))
        if number in (1, 4):
            victims.append(kill_one(loader))
    assert found == expected
    assert all_contents(loader) == expected
    alive = loader._source.worker_pids
    assert len(alive) == num_workers and not set(alive) & set(victims)
    told = [event["worker"] for event in events.recent()[since:] if event["event"] == "worker_ended"]
    assert set(told) <= set(victims)


def test_kills_after_every_other_batch_change_nothing(processes):
    expected = all_contents(make_loader(num_threads=0))
    loader = processes(2)
    found = []
    for number, batch in enumerate(loader):
        found.append(contents(batch))
        if number % 2 == 0 and number < 12 and loader._source.worker_pids:
            kill_one(loader)
    assert found == expected


@pytest.mark.parametrize("wakes", [False, True])
def test_the_batch_of_a_stopped_worker_is_prepared_by_another(processes, monkeypatch, wakes):
    monkeypatch.setattr("lightning_gnnscale.loader.work_queue.SLOW_S", 0.5)
    monkeypatch.setattr("lightning_gnnscale.loader.work_queue.SLOW_TIMES", 0)
    expected = all_contents(make_loader(num_threads=0))
    loader = processes(2, prefetch_batches=3)
    found = []
    for number, batch in enumerate(loader):
        found.append(contents(batch))
        if number == 3:
            stopped = loader._source.worker_pids[0]
            os.kill(stopped, signal.SIGSTOP)
        if number == 9 and wakes:
            os.kill(stopped, signal.SIGCONT)
    assert found == expected
    os.kill(stopped, signal.SIGCONT)
    assert all_contents(loader) == expected


def stop_all(loader) -> list[int]:
    pids = loader._source.worker_pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def test_workers_that_are_all_stopped_end_the_run_within_timeout_s(processes):
    loader = processes(2, timeout_s=5)
    list(loader)  # the first batches load kernels, for which there is more time
    batches = iter(loader)
    next(batches)
    stopped, begun = stop_all(loader), time.monotonic()
    message = ""
    try:
        list(batches)
    except GNNScaleError as error:
        message = str(error)
    assert 4 < time.monotonic() - begun < 5 + 5 + SLACK_S
    assert message.startswith("none of the worker processes has answered for timeout_s=5 s")
    assert "\n" not in message and "source=threads" in message
    loader.close()
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in stopped)
    assert all_contents(loader) == all_contents(make_loader(num_threads=0)), "another iteration starts again"


def test_workers_that_come_back_in_time_go_on_with_no_harm(processes):
    loader = processes(2, timeout_s=60)
    batches = iter(loader)
    found = [contents(next(batches))]
    stopped = stop_all(loader)
    back = threading.Timer(1.0, lambda: [os.kill(pid, signal.SIGCONT) for pid in stopped])
    back.start()
    found += [contents(batch) for batch in batches]
    back.join()
    assert found == all_contents(make_loader(num_threads=0))
    assert sorted(loader._source.worker_pids) == sorted(stopped), "none was ended"


class Lethal(NeighborSampler):
    """Ends the process that samples the first batch of part 1."""

    def sample(self, state, items, key, *args):
        if key == KEY_OF_DEATH and threading.current_thread() is threading.main_thread() and _is_worker():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(state, items, key, *args)


KEY_OF_DEATH = next(batch.key for batch in make_loader(num_threads=0) if batch.part == 1)


def _is_worker() -> bool:
    return multiprocessing.parent_process() is not None


def test_a_batch_that_kills_every_worker_is_an_error(processes):
    loader = processes(2, sampler=Lethal([4, 3]))
    message = r"part 1, batch 0 of epoch 1: 5 worker processes ended while they prepared it, the last with signal 9"
    with pytest.raises(GNNScaleError, match=message):
        list(loader)


class Unborn(NeighborSampler):
    """A sampler that no other process can open."""

    def __reduce__(self):
        return _fail, ()


class Stillborn(NeighborSampler):
    def __reduce__(self):
        return _die, ()


def _fail():
    raise ImportError("no such module here")


def _die():
    os._exit(3)


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [(Unborn, "ImportError: no such module here"), (Stillborn, "it ended with exit code 3 while it started")],
)
def test_workers_that_cannot_start_are_one_clear_error(processes, sampler, reason):
    loader = processes(2, sampler=sampler([4, 3]))
    with pytest.raises(GNNScaleError, match=said("2 worker processes")) as caught:
        list(loader)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_what_cannot_be_sent_is_refused_in_one_line(processes):
    class Here(NeighborSampler):
        pass

    with pytest.raises(GNNScaleError, match=said("prepares batches processes")):
        list(processes(sampler=Here([4, 3])))


def batch_bytes(loader) -> list[int]:
    from lightning_gnnscale.loader.shared_value import pack

    return [pack(batch).num_bytes for batch in loader]


def test_memory_stays_below_the_cap_and_changes_nothing(processes):
    local = make_loader(num_threads=0)
    cap = int(1.5 * max(batch_bytes(local)))
    loader = processes(3, prefetch_batches=9, queue_bytes=cap)
    found = []
    for batch in loader:
        assert loader._source.queue_bytes <= cap
        found.append(contents(batch))
    assert found == all_contents(local)


def test_preparation_stops_at_the_cap_when_nobody_takes(processes):
    local = make_loader(num_threads=0)
    cap = 3 * max(batch_bytes(local))
    loader = processes(2, prefetch_batches=len(local), queue_bytes=cap, parts=[3])
    iterator = iter(loader)
    first = contents(next(iterator))
    crew = loader._source._crew

    def finished() -> list:
        return [attempt for attempt in crew.queue.attempts if attempt.is_over]

    def full() -> bool:
        return sum(attempt.space.capacity for attempt in finished()) + crew.queue.largest > cap

    with crew.changed:
        assert crew.changed.wait_for(full, timeout=30)
        assert crew.queue.pool.held_bytes <= cap and len(finished()) < len(crew.queue.line.order)
    assert [first, *all_contents(iterator)] == all_contents(make_loader(num_threads=0, parts=[3]))


def test_a_batch_above_the_cap_says_what_it_needs(processes):
    needed = max(batch_bytes(make_loader(num_threads=0, parts=[0])))
    with pytest.raises(GNNScaleError, match=said("queue_bytes 5000 queue_bytes=")):
        list(processes(queue_bytes=5000))
    assert len(list(processes(queue_bytes=needed + 64, parts=[0]))) > 0, "64: rows begin at a whole cache line"


def test_shared_memory_that_runs_out_says_what_was_needed(processes, monkeypatch):
    def no_space(num_bytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_gnnscale.loader.batch_segments.space", no_space)
    message = r"part 0, batch 0 of epoch 1: no space for \d+ bytes in shared memory .*lower queue_bytes=67108864"
    with pytest.raises(GNNScaleError, match=message):
        list(processes())


def test_batches_that_are_kept_stay_as_they_were(processes):
    loader = processes()
    kept = list(loader)
    before = all_contents(kept)
    loader.set_epoch(1)
    list(loader)
    loader.close()
    assert all_contents(kept) == before
    kept[0].x[:] = 0  # a batch is the reader's own


def test_threads_gather_what_processes_sample(processes):
    features = ToldFeatures(WORLD.features)
    features.lock = threading.Lock()  # cannot be sent: it stays in this process
    expected = all_contents(make_loader(num_threads=0))
    for reads in (RowReads(fill_here=True), RowReads(lookahead_batches=3)):
        assert all_contents(processes(features=features, reads=reads)) == expected
    assert features.notes[-1][0] == "forget"


@pytest.mark.parametrize(
    "reads", [RowReads("resident"), RowReads("planned"), RowReads("planned", 12_000, is_swept=True, by_part=True)]
)
def test_rows_that_are_read_ahead_change_no_bit(processes, reads):
    assert all_contents(processes(reads=reads)) == all_contents(make_loader(num_threads=0))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"num_workers": 0}, "num_workers >= 1 0"),
        ({"queue_bytes": 0}, "queue_bytes >= 1 0"),
        ({"start_method": "fork"}, "start_method forkserver spawn 'fork'"),
    ],
)
def test_bad_options(option, message):
    with pytest.raises(ValueError, match=said(message)):
        ProcessSource(None, None, **option)


def test_nothing_outlives_a_killed_parent():
    """It is killed while its workers prepare; they end by themselves."""
    context, shared = multiprocessing.get_context("forkserver"), shared_files()
    told, tells = context.Pipe(duplex=False)
    parent = context.Process(target=train_until_killed, args=(tells,))
    parent.start()
    assert told.poll(120)
    workers = [psutil.Process(pid) for pid in told.recv()]
    parent.kill()
    parent.join()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert len(workers) == 2 and alive == []
    assert shared_files() <= shared
