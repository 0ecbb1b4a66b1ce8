"""Processes that sweep together, as threads here: the rows of each, each range once for all, ends that are told."""

import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from test_part_loader import loader_threads
from test_row_sweep import waiting

from lightning_gnnscale.errors import GNNScaleError, PartitionStoreError
from lightning_gnnscale.loader import MachineSweeps, RowReads
from lightning_gnnscale.loader.row_sweep import RowSweep
from lightning_gnnscale.loader.shared_sweep import SharedSweep, board_dtype
from lightning_gnnscale.partition_store import DenseFeatures
from lightning_gnnscale.placement.shared_rows import SharedRows
from tests.says import said


class Exchange:
    """What threads tell each other."""

    def __init__(self, number):
        self.told, self.barrier = [None] * number, threading.Barrier(number)

    def of(self, rank):
        def exchange(own):
            self.told[rank] = own
            self.barrier.wait()
            told = list(self.told)
            self.barrier.wait()
            return told

        return exchange


def together(number, function, reads):
    """Call function(rank, reads, sweeps) in so many threads that have joined; return results, or what is raised."""
    exchange = Exchange(number)

    def run(rank):
        own, sweeps = MachineSweeps.join(reads, number, exchange.of(rank))
        try:
            return function(rank, own, sweeps)
        except Exception as error:
            return error
        finally:
            exchange.barrier.wait()  # as processes live on
            if sweeps.server is not None:
                sweeps.server.wait()

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(run, range(number)))


def rows_of(sweep, batches, most=None):
    """Return the rows of the batches of nodes that a sweep reads, as `fill_swept` goes through it."""
    coming, found = iter(batches), []
    try:
        while len(found) != most:
            added = 0
            while sweep.takes_more and (added < 2 or not sweep.is_ready):
                nodes, added = next(coming, None), added + 1
                sweep.end() if nodes is None else sweep.add(waiting(nodes))
            sweep.advance()
            if sweep.is_ready:
                batch, rows = sweep.take()
                found.append(rows.read(batch.nodes.astype(np.int64)))
                sweep.free()
            elif sweep.is_empty and not sweep.takes_more:
                break
            else:
                sweep.wait()
        return found
    finally:
        sweep.close()


def reads_of(features, held_rows, number, **options):
    return RowReads("planned", held_rows * features.array[:1].nbytes, is_swept=True, shared_by=number, **options)


@pytest.mark.parametrize(("number", "held_rows"), [(3, 1), (2, 300), (2, 5000)])
def test_each_gets_its_rows_in_sweep_after_sweep(number, held_rows):
    random = np.random.default_rng(held_rows)
    features = DenseFeatures(random.integers(0, 256, (5000, 6)).astype("uint8"))
    nodes = [[[random.permutation(5000)[: random.integers(1, 99)] for _ in range(40 + 17 * rank * epoch)]
              for rank in range(number)] for epoch in range(2)]  # fmt: skip

    def read(rank, reads, sweeps):
        return [rows_of(sweeps.begin(features, reads), epoch[rank]) for epoch in nodes]

    found = together(number, read, reads_of(features, held_rows, number, waiting_bytes=20_000))
    for epoch in range(2):
        for rank in range(number):
            assert len(found[rank][epoch]) == len(nodes[epoch][rank])
            for rows, given in zip(found[rank][epoch], nodes[epoch][rank], strict=True):
                np.testing.assert_array_equal(rows, features.array[given])


def test_two_read_about_what_one_reads_for_all():
    random, num = np.random.default_rng(0), 64 * 32 * 20
    features = DenseFeatures(np.arange(num, dtype=np.int32)[:, None])
    batches = [random.integers(0, num, 20) for _ in range(2000)]
    alone = RowSweep(features, num // 8 * 4)
    rows_of(alone, batches)

    def read(rank, reads, sweeps):
        sweep = sweeps.begin(features, reads)
        rows_of(sweep, batches[rank::2])
        return sweep

    first, second = together(2, read, reads_of(features, num // 8, 2))
    assert second.passes is None
    assert first.passes <= 1.1 * alone.passes
    assert loader_threads() == []


def test_a_disk_that_fails_ends_all_in_its_line(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).random((3000, 16)))
    features = DenseFeatures(np.load(tmp_path / "rows.npy", mmap_mode="r"))
    with open(tmp_path / "rows.npy", "r+b") as file:
        file.truncate(100_000)

    def read(rank, reads, sweeps):
        return rows_of(sweeps.begin(features, reads), [np.arange(3000)] * 3)

    first, second = together(2, read, reads_of(features, 5000, 2))
    assert isinstance(first, PartitionStoreError) and isinstance(second, GNNScaleError)
    for error in first, second:
        assert re.search(said("rows.npy cannot be read the file was shortened"), str(error))
    assert loader_threads() == []


@pytest.mark.parametrize("leaves", [0, 1])
def test_one_that_leaves_early_leaves_the_sweep_to_the_others_and_the_next_one_goes(leaves):
    random = np.random.default_rng(0)
    features = DenseFeatures(random.random((5000, 2)))
    batches = [random.integers(0, 5000, 50) for _ in range(200)]

    def read(rank, reads, sweeps):
        most = 3 if rank == leaves else None
        return [rows_of(sweeps.begin(features, reads), batches, one) for one in (most, 3, None)]

    found = together(2, read, reads_of(features, 300, 2))
    assert [len(rows) for rows in found[leaves]] == [3, 3, 200]
    assert [len(rows) for rows in found[1 - leaves]] == [200, 3, 200]
    for rows in (*found[0], *found[1]):
        np.testing.assert_array_equal(np.concatenate(rows), features.array[np.concatenate(batches[: len(rows)])])
    assert loader_threads() == []


def test_processes_that_cannot_share_memory_sweep_for_themselves(monkeypatch):
    features = DenseFeatures(np.zeros((100, 2)))
    exchange, reads = Exchange(2), [reads_of(features, 10, 2), RowReads()]
    with ThreadPoolExecutor(2) as pool:

        def join(given):
            return list(pool.map(lambda rank: MachineSweeps.join(given[rank], 2, exchange.of(rank)), range(2)))

        assert join(reads[::-1]) == [None, None], "the lowest one does not sweep"
        assert join([reads[0], None])[1][0] == reads[0], "one without batches takes part"
        monkeypatch.setattr(SharedSweep, "__init__", None)
        monkeypatch.setattr("lightning_gnnscale.placement.shared_rows.os.open", _refuse)
        assert join(reads) == [None, None]


@pytest.mark.parametrize("is_lowest", [True, False])
def test_one_whose_peer_has_ended_says_so_and_waits_no_more(is_lowest):
    features, ended = DenseFeatures(np.zeros((100, 2))), subprocess.Popen(["true"])
    own = SharedRows.create(1, board_dtype(2).itemsize, np.uint8)
    handles = [own.handle, own.handle._replace(pid=ended.pid)]  # which is a zombie until it is waited for
    time.sleep(0.1)
    with pytest.raises(GNNScaleError, match=said(f"{ended.pid} has ended last checkpoint")):
        MachineSweeps(own, handles, 0 if is_lowest else 1).begin(features, reads_of(features, 10, 2))
    ended.wait()


def _refuse(*_):
    raise OSError("not permitted")
