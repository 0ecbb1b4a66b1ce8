"""Training from Ray's workers: the same weights bit for bit, whichever workers are killed meanwhile."""

import os
import random
import signal

import lightning as L
import pytest
from test_process_training import equal, make, trained

import lightning_gnnscale as gs
from lightning_gnnscale import events
from lightning_gnnscale.errors import GNNScaleError

ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")

from lightning_gnnscale.remote import cluster  # noqa: E402
from lightning_gnnscale.remote.messages import WorkerSettings  # noqa: E402
from lightning_gnnscale.remote.ray_worker import start_workers  # noqa: E402
from tests.says import said  # noqa: E402

pytestmark = pytest.mark.sweep


class Killer(L.Callback):
    """Kills random workers, with SIGKILL, after random batches, until it has killed as many as it shall."""

    def __init__(self, num_kills: int, seed: int = 0):
        self.left, self.sample = num_kills, random.Random(seed)

    def on_train_batch_end(self, trainer, *_):
        alive = trainer.datamodule._train_loader._source.worker_pids if self.left else []
        for pid in self.sample.sample(alive, self.sample.randint(0, min(len(alive), self.left))):
            os.kill(pid, signal.SIGKILL)
            self.left -= 1


@pytest.fixture(scope="module")
def pool():
    """Two workers on this machine that a source with an address finds."""
    cluster.join_ray(None, 60.0, 200 << 20)
    workers = start_workers([f"{cluster.PREPARED}{number}" for number in range(2)], WorkerSettings("prepared"))
    ray.get([worker.ping.remote() for worker in workers[:2]])
    yield workers[:2]
    ray.shutdown()


@pytest.mark.parametrize(
    ("weights", "options", "settings"),
    [
        (gs.ModelAveraging, {}, {}),
        (gs.GradientAveraging, {}, {"batches_per_group": 3, "cache_rows": 50}),
        (gs.GradientAveraging, {"scope": "part", "interleave_parts": 2}, {"cache_rows": 200, "cache_policy": "sieve"}),
    ],
)
def test_ray_changes_no_bit(pool, store_root, weights, options, settings):
    found = trained(make(store_root, source=gs.RayWorkers(address="auto", **settings), **options), weights())
    assert equal(found, trained(make(store_root, **options), weights()))
    told = [event for event in events.recent() if event["event"] == "preparation"][-1]
    assert told["bytes_received"] > told["row_bytes"] > 0
    assert (told["rows_received"] < told["rows_asked"]) == ("cache_rows" in settings)
    assert told["parts_read"] >= gs.PartitionStore.open(store_root).num_parts and told["num_workers"] > 0
    assert told["busy_s"] > 0 and told["seconds"] >= told["waited_s"] > 0


def test_as_many_batches_are_asked_for_as_there_are_workers(pool, store_root):
    settings = gs.RayWorkers(address="auto", num_workers=1)
    loader = make(store_root, source=settings, scope="graph").train_dataloader()
    try:
        batches = iter(loader)
        next(batches)
        assert settings.batches_ahead == 2 and loader._source.batches_ahead == 2 * len(pool)
        assert len(loader._source._pending) == min(2 * len(pool), loader.length) - 1
    finally:
        loader.close()


@pytest.mark.parametrize("num_kills", [5, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_kills_in_training_change_no_bit(pool, store_root, num_kills):
    killer, since = Killer(num_kills), len(events.recent())
    options = {"batch_size": 2 if num_kills > 5 else 16}
    found = trained(make(store_root, source=gs.RayWorkers(address="auto"), **options), callbacks=[killer])
    assert killer.left == 0
    assert equal(found, trained(make(store_root, **options)))
    assert [event for event in events.recent()[since:] if event["event"] == "worker_ended"]


@pytest.mark.parametrize("settings", [{}, {"batches_per_group": 2, "cache_rows": 50}])
def test_rows_that_workers_hold_together_change_no_bit(pool, store_root, settings):
    rows, asked = gs.OwnerReads(replicate_bytes=4000 if settings else 0), Asked()
    source = gs.RayWorkers(address="auto", **settings)
    found = trained(make(store_root, source=source, rows=rows, scope="graph"), callbacks=[asked])
    assert equal(found, trained(make(store_root, scope="graph")))
    assert asked.told["asked"] == 0, "the workers of one machine read one memory"


def test_batches_whose_seeds_go_by_part_are_those_of_threads(pool, store_root):
    source = gs.RayWorkers(address="auto", batches_per_group=2)
    options, since = {"seed_order": "part", "interleave_parts": 3, "scope": "graph"}, len(events.recent())
    found = trained(make(store_root, source=source, rows="owners", **options))
    assert equal(found, trained(make(store_root, **options)))
    assert not equal(found, trained(make(store_root, scope="graph")))
    told = [event for event in events.recent()[since:] if event["event"] == "preparation"][-1]
    assert told["rows_gathered"] > told["rows_away"] == told["bytes_away"] == 0, "one machine holds all"


@pytest.mark.slow
def test_owners_that_are_killed_are_stood_in_for(pool, store_root):
    killer, asked = Killer(3), Asked()
    source = gs.RayWorkers(address="auto")
    found = trained(make(store_root, source=source, rows="owners", scope="graph"), callbacks=[killer, asked])
    assert killer.left == 0 and equal(found, trained(make(store_root, scope="graph")))


def test_samplers_of_subgraphs_ask_no_owners(pool, store_root):
    options = {"source": gs.RayWorkers(address="auto"), "rows": "owners"}
    with pytest.raises(ValueError, match=said("owners rows SaintSampler")):
        make(store_root, sampler=gs.SaintSampler(), **options)
    with pytest.raises(ValueError, match=said('batches cross scope="graph"')):
        make(store_root, scope="part", **options)
    with pytest.raises(GNNScaleError, match=said("batches cross scope=graph")):
        trained(make(store_root, **options), gs.ModelAveraging())


class Asked(L.Callback):
    """Notes what the workers say of their requests to each other."""

    def on_train_batch_end(self, trainer, *_):
        self.told = trainer.datamodule._train_loader._source.report()
