"""Workers that join and leave while batches are taken, and as many as keep a trainer busy."""

import time

import pytest
from ray_world import all_contents, contents, make_loader, wait_until

from benchmarks.turns import PacedSampler
from lightning_gnnscale import events
from lightning_gnnscale.remote import RayWorkers, cluster
from lightning_gnnscale.remote.messages import WorkerSettings
from lightning_gnnscale.remote.ray_worker import start_workers

pytestmark = pytest.mark.sweep

pytest.importorskip("ray", reason="the extra [ray] is not installed")


def told(since: int, name: str) -> list[dict]:
    return [event for event in events.recent()[since:] if event["event"] == name]


def epochs(loader, seconds: float, holds=lambda: False, limit_s: float = 60.0) -> list[list[dict]]:
    """Take epochs, each batch of which is trained on for some seconds, until something holds or time is up."""
    found, deadline = [], time.monotonic() + limit_s
    while not holds() and time.monotonic() < deadline:
        loader.set_epoch(0)
        found.append([])
        for batch in loader:
            found[-1].append(contents(batch))
            time.sleep(seconds)
    return found


def test_as_many_workers_as_the_trainer_needs_are_started_and_too_many_end(local_ray):
    sampler, since = PacedSampler([4, 3], sample_ms=60), len(events.recent())
    expected = all_contents(make_loader(sampler=sampler))
    loader = make_loader(RayWorkers(num_workers="auto", worker_bounds=[1, 3]), sampler=sampler)
    found = epochs(loader, 0.03, lambda: len(told(since, "worker_joined")) > 0)
    assert told(since, "worker_joined"), "a batch takes twice as long to prepare as to train"
    found += epochs(loader, 0.3, lambda: len(told(since, "worker_left")) > 0)
    assert told(since, "worker_left"), "one is enough now"
    assert all(one == expected for one in found)
    loader.close()
    assert wait_until(lambda: not cluster.workers_named(loader._source._link._meeting.run)), "none is left behind"


def test_prepared_workers_join_and_leave_a_run(local_ray):
    how, since = WorkerSettings("prepared"), len(events.recent())
    expected = all_contents(make_loader())
    first = start_workers([f"{cluster.PREPARED}a-0"], how)
    loader = make_loader(RayWorkers(address="auto"))
    assert all_contents(loader) == expected
    second = start_workers([f"{cluster.PREPARED}b-0"], how)
    assert all(one == expected for one in epochs(loader, 0.05, lambda: len(loader._source.worker_pids) == 2))
    assert len(loader._source.worker_pids) == 2
    local_ray.kill(first[0])
    assert all(one == expected for one in epochs(loader, 0.05, lambda: len(told(since, "worker_left")) > 0))
    assert told(since, "worker_left") and len(loader._source.worker_pids) == 1
    loader.close()
    del second
