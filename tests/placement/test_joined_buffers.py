"""One process a device: rows written once and mapped by peers, nothing left behind, also after a crash."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from buffer_cases import counted, placed, table

import lightning_gnnscale as gs
from lightning_gnnscale.errors import PlacementError
from lightning_gnnscale.placement import cpu_tiers
from lightning_gnnscale.placement.shared_rows import SharedRows
from tests.says import said
from tests.tiers import each_value

WORLD = 4


class FileExchange:
    """All objects of all ranks through files, in place of a process group."""

    def __init__(self, folder, rank, timeout_s):
        self.folder, self.rank, self.timeout_s, self.round = folder, rank, timeout_s, 0

    def __call__(self, own):
        self.round += 1
        path = self.folder / f"{self.round}-{self.rank}"
        path.with_suffix(".part").write_bytes(pickle.dumps(own))
        path.with_suffix(".part").rename(path)
        return [self.read(self.folder / f"{self.round}-{rank}") for rank in range(WORLD)]

    def read(self, path):
        end = time.monotonic() + self.timeout_s
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(path.name)
            time.sleep(0.01)
        return pickle.loads(path.read_bytes())


def run_rank(rank, case, folder, exchange):
    features, placement = table(300, 16, "f4"), placed(300, WORLD, [[0, 1], [2, 3]], share=0.2)
    if case == "crash" and rank == 1:
        made = cpu_tiers.shared_copy
        cpu_tiers.shared_copy = lambda *given: (made(*given), os.kill(os.getpid(), signal.SIGKILL))
    buffer = gs.FeatureBuffer.join(placement, features, rank, host="copy", folder=folder, exchange=exchange)
    expected = features.array.copy()
    features.array[:] = 0  # nothing is read from the store any more
    for nodes in (np.arange(300), np.random.default_rng(rank).integers(0, 300, 1000)):
        assert buffer.read(nodes).tobytes() == expected[nodes].tobytes()
        assert buffer.hits == {**counted(placement, rank, nodes), "cache": 0}
        buffer.reset_hits()
    exchange(None)
    if case == "late" and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    assert buffer.read(np.arange(300)).tobytes() == expected.tobytes(), "what a peer that died had made stays"
    buffer.close()


@each_value
@pytest.mark.parametrize("case", ["memory", "folder", "late", "crash"])
def test_ranks_share_rows_and_leave_nothing(tmp_path, case):
    before = set(os.listdir("/dev/shm"))
    folder = tmp_path / "rows"
    folder.mkdir()
    fork = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(WORLD):
        exchange = FileExchange(tmp_path, rank, 10 if case == "crash" else 60)
        place = folder if case == "folder" else None
        ranks.append(fork.Process(target=run_rank, args=(rank, case, place, exchange)))
        ranks[-1].start()
    for rank in ranks:
        rank.join(100)
        rank.kill()
    codes = [rank.exitcode for rank in ranks]
    killed = -signal.SIGKILL
    assert codes == {"late": [killed, 0, 0, 0], "crash": [1, killed, 1, 1]}.get(case, [0, 0, 0, 0])
    left = {name for name in set(os.listdir("/dev/shm")) - before if "gnnscale" in name}
    assert left == set() and list(folder.iterdir()) == []


def test_rows_of_a_process_that_ended_are_refused_in_one_line():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    rows = SharedRows.create(3, 2, "f4")
    handle = rows.handle._replace(pid=ended.pid)
    with pytest.raises(PlacementError, match=said(f"rows process {ended.pid}")):
        SharedRows.attach(handle)
    rows.release()
    with pytest.raises(PlacementError, match="can no longer be shared"):
        _ = rows.handle


def test_rows_that_find_no_room_are_refused():
    with pytest.raises(PlacementError, match=said("space rows 4096 bytes")):
        SharedRows.create(1 << 40, 1024, "f4", "/dev/shm")
    with pytest.raises(PlacementError, match=said("/proc folder=")):
        SharedRows.create(1, 1, "f4", "/proc")


def test_processes_that_do_not_fit_the_placement_are_refused():
    features, placement = table(30, 4, "f4"), placed(30, 2, [[0, 1]])
    with pytest.raises(PlacementError, match=said("2 devices processes [0]")):
        gs.FeatureBuffer.join(placement, features, 0, exchange=lambda own: [own])
    with pytest.raises(PlacementError, match=said("different hosts groups=")):
        gs.FeatureBuffer.join(placement, features, 0, exchange=lambda own: [own, (1, "elsewhere", own[2])])
    with pytest.raises(PlacementError, match=said("torch.distributed exchange=")):
        gs.FeatureBuffer.join(placement, features, 0)


class ThreadExchange:
    """All objects of threads that stand for processes."""

    def __init__(self, world):
        self.barrier, self.objects = threading.Barrier(world, timeout=60), [None] * world

    def of(self, rank):
        def exchange(own):
            self.objects[rank] = own
            self.barrier.wait()
            objects = list(self.objects)
            self.barrier.wait()
            return objects

        return exchange


def errors_of(joins):
    """What each of some threads raises that join side by side."""
    exchange = ThreadExchange(len(joins))

    def join(rank):
        with pytest.raises(PlacementError) as caught:
            joins[rank](exchange=exchange.of(rank))
        return str(caught.value)

    with ThreadPoolExecutor(len(joins)) as pool:
        return list(pool.map(join, range(len(joins))))


def test_where_one_process_finds_no_room_none_waits_for_it():
    features, placement = table(30, 4, "f4"), placed(30, 2, [[0, 1]])
    join = partial(gs.FeatureBuffer.join, placement, features)
    joins = [partial(join, 0), partial(join, 1, memory_bytes=8)]
    reason = "device 1 has 8 bytes, less than one row of 16: train without placement"
    assert errors_of(joins) == [f"device 1 could not share its rows: {reason}", reason]


def test_rows_that_cannot_be_mapped_stop_all(monkeypatch):
    features, placement = table(30, 4, "f4"), placed(30, 2, [[0, 1]])

    def attach(handle):
        raise PlacementError(f"no way to {len(handle.shape)} dimensions")

    monkeypatch.setattr(SharedRows, "attach", attach)
    found = errors_of([partial(gs.FeatureBuffer.join, placement, features, rank) for rank in range(2)])
    assert found == ["no way to 2 dimensions"] * 2


def test_processes_that_placed_other_rows_are_refused():
    features, joins = table(30, 4, "f4"), []
    for rank, seed in enumerate((0, 1)):
        joins.append(partial(gs.FeatureBuffer.join, placed(30, 2, [[0, 1]], seed=seed), features, rank))
    assert all("a host have placements that differ: place with the same" in error for error in errors_of(joins))


def test_rows_that_nobody_holds_leave_no_file_open():
    before = len(os.listdir("/proc/self/fd"))
    SharedRows.create(3, 2, "f4")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lone_process_joins_itself():
    features, placement = table(30, 4, "f4"), placed(30, 1, None)
    buffer = gs.FeatureBuffer.join(placement, features, 0, exchange=lambda own: [own], cache=gs.FeatureCache(3))
    assert buffer.read(np.arange(30)).tobytes() == features.array.tobytes()
    with pytest.raises(ValueError, match="read-only|not writeable"):
        SharedRows.attach((rows := SharedRows.create(2, 2, "f4")).handle).array[:] = 1
    rows.release()
