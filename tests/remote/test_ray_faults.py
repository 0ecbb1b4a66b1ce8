"""What goes wrong: killed, stopped and vanished workers, a trainer that stops; and rows that travel once."""

import os
import signal
import threading
import time
import warnings
from contextlib import suppress

import psutil
import pytest
from ray_world import WORLD, all_contents, contents, make_loader, wait_until

import lightning_gnnscale as gs
from lightning_gnnscale import events
from lightning_gnnscale.datamodule.train_loader import make_interleaved_loader
from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.loader import Interleave, LoaderOptions, RankPlace, Threads
from lightning_gnnscale.loader.shared_value import SharedValue
from lightning_gnnscale.remote import RayWorkers
from lightning_gnnscale.remote.held_parts import hold_part, machine_caps, part_bytes
from lightning_gnnscale.sampler import NeighborSampler
from tests.says import said

pytestmark = pytest.mark.sweep

EXPECTED = all_contents(make_loader())
CACHED = {"batches_per_group": 2, "cache_rows": 60}


def told_since(number: int, name: str) -> list[dict]:
    return [event for event in events.recent()[number:] if event["event"] == name]


@pytest.mark.parametrize("options", [{}, CACHED])
def test_a_killed_worker_loses_no_batch_and_doubles_none(pool, options):
    loader = make_loader(RayWorkers(address="auto", **options))
    since, found = len(events.recent()), []
    for number, batch in enumerate(loader):
        found.append(contents(batch))
        if number in (0, 5):
            for pid in loader._source.worker_pids[: 1 + number // 5]:  # one, then all at once
                os.kill(pid, signal.SIGKILL)
    assert found == EXPECTED
    assert all_contents(loader) == EXPECTED
    assert wait_until(lambda: len(loader._source.worker_pids) == 2), "Ray started them again"
    loader.close()
    assert {event["worker"] for event in told_since(since, "worker_ended")} <= {0, 1}


def test_a_killed_holder_of_parts_is_started_again_and_changes_no_batch(pool):
    loader = make_loader(RayWorkers(address="auto", worker_memory_bytes=None))
    found, killed = [], set()

    def holders() -> set[int]:
        return {held["pid"] for held in loader._source.report()["held"] if "pid" in held} - killed

    for number, batch in enumerate(loader):
        found.append(contents(batch))
        if number in (0, 6):
            assert wait_until(holders)
            killed |= holders()
            for pid in killed:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert found == EXPECTED and len(killed) == 2
    assert all_contents(loader) == EXPECTED
    loader.close()


def test_the_batches_of_a_stopped_worker_are_made_by_another(pool):
    loader = make_loader(RayWorkers(address="auto", slow_s=0.5))
    list(loader)
    since, found = len(events.recent()), []
    stopped = loader._source.worker_pids[0]
    loader.set_epoch(0)
    os.kill(stopped, signal.SIGSTOP)
    try:
        found = all_contents(loader)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert found == EXPECTED
    assert [event["worker"] for event in told_since(since, "worker_slow")] == [0]
    assert all_contents(loader) == EXPECTED
    loader.close()


SLACK_S = 15  # of a machine that others use too


def ends_with(loader, batches, pids) -> str:
    """Stop processes, and return the error that the batches end with, well within five seconds."""
    begun = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        list(batches)
    except GNNScaleError as error:
        assert time.monotonic() - begun < 5 + 5 + SLACK_S
        return str(error)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    return ""


def test_workers_that_are_all_stopped_end_the_run_within_timeout_s(pool):
    loader = make_loader(RayWorkers(address="auto", timeout_s=5))
    batches = iter(loader)
    next(batches)
    message = ends_with(loader, batches, loader._source.worker_pids)
    assert message.startswith("none of 2 preparation workers answers (no answer for timeout_s=5 s)")
    assert "source.timeout_s" in message and "\n" not in message
    assert wait_until(lambda: len(loader._source.worker_pids) == 2), "they are back"
    assert all_contents(loader) == EXPECTED
    loader.close()


def test_a_stopped_worker_loses_its_batches_to_the_others_within_timeout_s(pool):
    loader = make_loader(RayWorkers(address="auto", timeout_s=4, slow_s=1000))
    list(loader)
    since, stopped = len(events.recent()), loader._source.worker_pids[0]
    loader.set_epoch(0)
    begun = time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert all_contents(loader) == EXPECTED
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert time.monotonic() - begun < 4 + 5 + SLACK_S
    assert [event["worker"] for event in told_since(since, "worker_ended")] == [0]
    assert wait_until(lambda: len(loader._source.worker_pids) == 2), "it is back"
    loader.close()


def test_workers_that_come_back_in_time_go_on_with_no_harm(pool):
    loader = make_loader(RayWorkers(address="auto", timeout_s=60))
    batches, since = iter(loader), len(events.recent())
    found, pids = [contents(next(batches))], loader._source.worker_pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    back = threading.Timer(1.0, lambda: [os.kill(pid, signal.SIGCONT) for pid in pids])
    back.start()
    assert found + all_contents(batches) == EXPECTED
    assert told_since(since, "worker_ended") == []
    loader.close()


def test_a_stopped_hub_ends_the_run_within_timeout_s(pool):
    """The coordinator that ranks of a machine share is a process of its own."""
    place = RankPlace(num_local=2)
    loader = make_loader(source=RayWorkers(address="auto", timeout_s=5).connect(place), prefetch_batches=4)
    batches = iter(loader)
    next(batches)
    hubs = [process.pid for process in psutil.process_iter(["name"]) if "Coordinator" in (process.info["name"] or "")]
    message = ends_with(loader, batches, hubs)
    assert message.startswith("the coordinator of node 0 has not answered for timeout_s=5 s: was it stopped?")
    assert "\n" not in message
    begun = time.monotonic()
    loader.close()
    assert time.monotonic() - begun < 5 + SLACK_S


def test_workers_that_are_all_gone_are_told_in_one_line(local_ray):
    loader = make_loader(RayWorkers(num_workers=2))
    with pytest.raises(GNNScaleError, match=said("2 preparation workers gone")) as caught:
        for number, _ in enumerate(loader):
            if number == 2:
                assert wait_until(lambda: len(loader._source.worker_pids) == 2)
                for worker in loader._source._link._workers:
                    local_ray.kill(worker)
    assert "\n" not in str(caught.value)
    loader.close()
    assert all_contents(loader) == EXPECTED, "another iteration starts again"
    loader.close()


def test_a_trainer_that_stops_taking_batches_stops_preparation_at_the_credits(pool):
    loader = make_loader(RayWorkers(address="auto", credits=2), prefetch_batches=12)
    batches = iter(loader)
    next(batches)
    source = loader._source
    assert wait_until(lambda: source.report()["credits_held"] >= 2)
    seen = [-1, 0]

    def stands_still():
        seen[:] = seen[1], source.report()["num_union"]
        time.sleep(0.3)
        return seen[0] == seen[1]

    assert wait_until(stands_still), "the nodes of batches that were asked for before count once they are made"
    assert source.report()["credits_held"] <= 3
    assert len(list(batches)) == len(EXPECTED) - 1
    loader.close()


def test_an_error_of_a_batch_names_it(pool):
    loader = make_loader(RayWorkers(address="auto"), labels=WORLD.labels[:3])
    with pytest.raises(GNNScaleError, match=said("part 0 batch 0 epoch 1")):
        list(loader)
    loader.close()


def test_groups_and_cache_cut_what_travels_and_change_no_bit(pool):
    sent, sampler = {}, NeighborSampler([8, 8])
    expected = all_contents(make_loader(sampler=sampler))
    for name, options in {"alone": {}, "grouped": {"batches_per_group": 4}, "cached": CACHED}.items():
        loader = make_loader(RayWorkers(address="auto", **options), sampler=sampler, prefetch_batches=8)
        assert all_contents(loader) == expected
        sent[name] = loader._source.row_bytes
        assert all_contents(loader) == expected
        source = loader._source
        assert source.bytes_received > source.row_bytes == source.rows_received * 64
        loader.close()
    assert sent["grouped"] < 0.8 * sent["alone"]
    assert sent["cached"] < sent["alone"]


@pytest.mark.parametrize("parts_held", [1, 2])
def test_each_part_is_read_once_an_epoch_under_a_cap(local_ray, parts_held):
    """At a cap that holds one part a worker; with two workers, one more is there while the next one is read."""
    stage = make_loader()._stager
    largest = max(SharedValue(hold_part(stage(part), WORLD.features)).handle.num_bytes for part in range(5))
    loader = make_loader(RayWorkers(num_workers=parts_held, worker_memory_bytes=largest, slow_s=1000))
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert all_contents(loader) == EXPECTED or epoch
        told = loader._source.report()
        assert sum(sum(one.values()) for one in told["reads"]) == 5 * (epoch + 1)
        assert [one["most_held_bytes"] <= parts_held * largest for one in told["held"]] == [True]
    loader.close()


def test_under_a_cap_a_batch_mixes_as_many_parts_as_it_holds_and_each_is_read_once(local_ray, tmp_path):
    """Eight parts, batches of four, two workers whose machine holds two parts."""
    graph = SyntheticGraph(1600, 12_000, num_communities=8, seed=0)
    stream = graph.stream(to_undirected=True)
    arrays = {"features": graph.features(6, noise=1.0), "labels": graph.labels(), "masks": graph.masks()}
    store = gs.write_partition_store(tmp_path, stream, gs.partition(stream, "random", num_parts=8, seed=1), **arrays)
    sampler, options = NeighborSampler([4, 3]), LoaderOptions(16, 1)

    def make(source, lanes):
        return make_interleaved_loader(store, sampler, 1, lanes, options, store.features, source, RankPlace())

    plain = make(Threads(), 4)
    largest = part_bytes(plain._stager, range(8), store.features)
    with pytest.warns(UserWarning, match=rf"mixes 2 parts, not interleave_parts=4: .*{2 * largest} bytes"):
        loader = make(RayWorkers(num_workers=2, worker_memory_bytes=largest, slow_s=1000), 4)  # no batch is made twice
    assert loader.interleave.open_parts == 2
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert (all_contents(loader) == all_contents(make(Threads(), 2))) == (epoch == 0)
        told = loader._source.report()
        # A worker that is asked for a part's last batch after another let it go reads it again: seldom, at most once.
        assert 8 * (epoch + 1) <= sum(sum(one.values()) for one in told["reads"]) <= 9 * (epoch + 1)
    loader.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert make(RayWorkers(num_workers=4, worker_memory_bytes=largest), 4).interleave.open_parts == 4


def test_the_cap_of_a_machine_is_what_its_workers_add():
    assert machine_caps([("a", 3), ("b", 5), ("a", 4)]) == {"a": 7, "b": 5}
    assert machine_caps([("a", 3), ("a", None), ("b", 0)]) == {"a": None, "b": 0}


def test_parts_that_are_read_again_and_again_are_told_in_one_line(local_ray):
    stage = make_loader()._stager
    largest = max(SharedValue(hold_part(stage(part), WORLD.features)).handle.num_bytes for part in range(5))
    settings = RayWorkers(num_workers=1, worker_memory_bytes=largest)
    loader = make_loader(settings, interleave=Interleave(open_parts=3), batch_size=12)
    with pytest.warns(UserWarning, match=said(f"5 times worker_memory_bytes={largest}")):
        assert all_contents(loader) == all_contents(make_loader(interleave=Interleave(open_parts=3), batch_size=12))
    loader.set_epoch(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert all_contents(loader)
    loader.close()
