"""Workers of Ray's: the same batches bit for bit, in memory of the trainer, and with nothing left behind."""

import threading
from collections import Counter

import numpy as np
import psutil
import pytest
from ray_world import WORLD, all_contents, make_loader, whole_loader

from lightning_gnnscale.loader import Interleave
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.partition_store.features import CSRFeatures
from lightning_gnnscale.remote import RayWorkers
from lightning_gnnscale.sampler import ClusterSampler, FullBatchSampler, NeighborSampler, SaintSampler

SAMPLERS = {
    "neighbor": NeighborSampler([4, 3]),
    "full": FullBatchSampler(),
    "cluster": ClusterSampler(4, 2),
    "saint": SaintSampler("walk", num_roots=9, batches_per_pass=3, num_norm_samples=2),
}
HERE = RayWorkers(address="auto")


@pytest.fixture
def workers(pool):
    """A maker of loaders over the pool, closed at the end; no thread is left."""
    made = []

    def make(settings=HERE, **options):
        made.append(make_loader(settings, **options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("gnnscale-batch")] == []


@pytest.mark.parametrize("name", SAMPLERS)
def test_batches_equal_those_of_threads(workers, name):
    expected = all_contents(make_loader(sampler=SAMPLERS[name]))
    loader = workers(sampler=SAMPLERS[name])
    assert all_contents(loader) == expected
    assert loader._source.num_batches == len(expected)


def test_sparse_features_and_epochs_and_iterations_that_are_broken_off(workers):
    dense = WORLD.features.array * (np.arange(WORLD.features.dim) % 3 == 0)
    rows, columns = np.nonzero(dense)
    indptr = np.searchsorted(rows, np.arange(len(dense) + 1))
    sparse = CSRFeatures(indptr, columns.astype(np.int32), dense[rows, columns], dense.shape[1])
    settings = RayWorkers(address="auto", batches_per_group=3)
    loader, local = workers(settings, features=sparse), make_loader(features=sparse)
    for epoch in (0, 1):
        for done in (loader, local):
            done.set_epoch(epoch)
        iterator = iter(loader)
        next(iterator)
        iterator.close()
        assert all_contents(loader) == all_contents(local)


@pytest.mark.parametrize("bits", [8, 4, pytest.param(16, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("cached", [False, True])
def test_rows_of_codes_travel_as_stored_and_come_decoded(workers, bits, cached):
    quantised, plain = WORLD.quantised(bits)
    settings = RayWorkers(address="auto", batches_per_group=3, **({"cache_rows": 100} if cached else {}))
    loader, local = workers(settings, features=quantised.features), make_loader(features=plain.features)
    for epoch in (0, 1):
        for done in (loader, local):
            done.set_epoch(epoch)
        assert all_contents(loader) == all_contents(local)
    source = loader._source
    assert source.row_bytes == source.rows_received * quantised.features.array.shape[1] > 0
    assert (source.rows_received < source.rows_asked) == cached


def test_batches_without_features_and_of_the_whole_graph(workers):
    whole = WholeGraph.of(WORLD.csc, 0)
    targets = np.concatenate([WORLD.targets(part) for part in range(5)])
    loaders = [make(features=None) for make in (workers, lambda **options: make_loader(None, **options))]
    assert all_contents(loaders[0]) == all_contents(loaders[1])
    loaders = [make(whole, targets) for make in (whole_loader, lambda *world: whole_loader(*world, settings=HERE))]
    expected = all_contents(loaders[0])
    assert all_contents(loaders[1]) == expected
    pids = set(loaders[1]._source.worker_pids)
    loaders[1].close()
    assert len(pids) == 2


def test_unions_of_parts_are_read_once_an_epoch_and_give_the_batches_of_threads(workers):
    together = {"interleave": Interleave(open_parts=2, together=True), "batch_size": 12}
    loader = workers(RayWorkers(address="auto", batches_per_group=2, cache_rows=60), **together)
    local, apart = make_loader(**together), make_loader(**together | {"interleave": Interleave(open_parts=2)})
    for epoch in (0, 1):
        for done in (loader, local, apart):
            done.set_epoch(epoch)
        found = all_contents(loader)
        assert found == all_contents(local) != all_contents(apart)
    read = sum(map(Counter, loader._source.report()["reads"]), Counter())  # parts were read by the tests before
    unions = [unit for epoch in (0, 1) for unit in loader._maker.order.unions.in_order(epoch)]
    assert {unit for unit in read if isinstance(unit, tuple)} == set(unions)
    assert all(read[unit] <= number for unit, number in Counter(unions).items())  # without a cap one may have stayed


def test_batches_lie_in_memory_of_the_trainer(workers):
    loader = workers(RayWorkers(address="auto", batches_per_group=2))
    for batch in loader:
        for tensor in (batch.x, batch.edge_index, batch.n_id, batch.y, batch.degree):
            assert tensor.numpy().flags.writeable
            assert tensor.data_ptr() % 64 == 0


def test_workers_of_a_run_end_with_it(local_ray):
    expected = all_contents(make_loader())
    loader = make_loader(RayWorkers(num_workers=2))
    assert all_contents(loader) == expected
    pids = loader._source.worker_pids
    assert len(set(pids)) == 2
    loader.close()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], 10)
    assert not alive
    assert local_ray.is_initialized(), "it was there before"
