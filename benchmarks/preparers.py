"""Preparers that are lost, or come, while batches are taken: the same batches, and as many a second as there are."""

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from lightning_gnnscale.loader import Threads
from lightning_gnnscale.partition_store import PartitionStore
from lightning_gnnscale.remote import RayWorkers
from lightning_gnnscale.remote.cluster import PREPARED, import_ray, join_ray, leave_ray
from lightning_gnnscale.remote.messages import WorkerSettings
from lightning_gnnscale.remote.ray_worker import start_workers
from lightning_gnnscale.sampler import MiniBatch

from .prepare_cases import Shape, epochs, make_data
from .present import LEFT

CHANGES = {"lost": -1, "joined": 1}  # by how many the preparers change
COLUMNS = {
    "change": ("preparer", LEFT),
    "preparers": ("preparers\nbefore", "g"),
    "before_per_s": ("batches/s\nbefore", ",.2f"),
    "after_per_s": ("batches/s\nafter", ",.2f"),
    "of_linear": ("after, of\nlinear", ".3f"),
    "pause_s": ("longest\nwait, s", ".2f"),
    "batches": ("batches\ntaken", "g"),
    "same": ("same as of\none thread", LEFT),
}
_START_S = 120.0  # for preparers to start


def measure_change(store: PartitionStore, workload: str, shape: Shape, preparers: int, change: str) -> dict:
    """Take batches, change the preparers, and take as many again once the run has the others.

    Args:
        preparers: Number before the change, >= 2: Ray's workers, as `gnnscale prepare` starts them.
        change: "lost": one is killed, and does not come back; "joined": one more is started.

    Returns:
        `before_per_s`, `after_per_s`: batches a second; `of_linear`: the second over what the first is for the number
        of preparers; `pause_s`: longest wait for a batch from the change on; `batches`, and `same`: whether all that
        were taken are those of one thread of this process, bit for bit.
    """
    address = join_ray(None, _START_S, 1 << 28)
    try:
        *names, new = [f"{PREPARED}bench-{number}" for number in range(preparers + 1)]
        crew = start_workers(names, WorkerSettings("prepared"))
        data = make_data(store, workload, shape, RayWorkers(address=address, timeout_s=_START_S))
        with closing(data.train_dataloader()) as loader:
            taken, source = _Taken(epochs(loader, 10**6 * len(loader))), loader._source
            taken.until(lambda: len(source.worker_pids) == preparers)
            taken.take(2 * source.batches_ahead)  # each worker has compiled its kernels
            before = shape.num_batches / taken.take(shape.num_batches)
            seen = len(taken.waits)
            if change == "lost":
                import_ray().kill(crew[0])
            else:
                crew += start_workers([new], WorkerSettings("prepared"))
            left = preparers + CHANGES[change]
            taken.until(lambda: len(source.worker_pids) == left)
            taken.take(2 * source.batches_ahead)
            after = shape.num_batches / taken.take(shape.num_batches)
        data.teardown("fit")
    finally:
        leave_ray()
    return {
        "before_per_s": round(before, 3),
        "after_per_s": round(after, 3),
        "of_linear": round(after / before * preparers / left, 4),
        "pause_s": round(max(taken.waits[seen:]), 3),
        "batches": len(taken.found),
        "same": taken.found == _of_one_thread(store, workload, shape, len(taken.found)),
    }


class _Taken:
    """Batches that are taken one after another: a checksum of each, and the seconds that it was waited for."""

    def __init__(self, coming: Iterator[MiniBatch]):
        self._coming, self.found, self.waits = coming, [], []

    def take(self, number: int) -> float:
        """Take so many; return the seconds."""
        begun = time.perf_counter()
        for _ in range(number):
            asked = time.perf_counter()
            batch = next(self._coming)
            self.waits.append(time.perf_counter() - asked)
            self.found.append(_checksum(batch))
        return time.perf_counter() - begun

    def until(self, holds) -> None:
        """Take batches until something holds."""
        while not holds():
            self.take(1)


def _of_one_thread(store: PartitionStore, workload: str, shape: Shape, number: int) -> Sequence[int]:
    data = make_data(store, workload, replace(shape, sample_ms=0.0), Threads(1))
    with closing(data.train_dataloader()) as loader:
        taken = _Taken(epochs(loader, 10**6 * len(loader)))
        taken.take(number)
    data.teardown("fit")
    return taken.found


def _checksum(batch: MiniBatch) -> int:
    found = zlib.crc32(str((batch.part, batch.key)).encode())
    for array in (batch.n_id, batch.edge_index, batch.x, batch.y):
        found = found if array is None else zlib.crc32(array.numpy().tobytes(), found)
    return found
