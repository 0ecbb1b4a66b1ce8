"""One source, measured while something trains on what it prepares."""

import itertools
import time
from collections.abc import Callable, Iterator

import psutil

from ..loader import PartLoader
from ..sampler import MiniBatch
from .prepare_cases import num_seeds


def measure(loader: PartLoader, train: Callable[[MiniBatch], None], num_batches: int, warm_up: int = 2) -> dict:
    """Train on batches and return the measurements.

    Each epoch is as long as the loader's, or begins late enough to end at the last batch, so that nothing is prepared
    that is not trained on. The wait for an epoch's first batch counts; the order of the first epoch's seeds is made
    before.

    Args:
        loader: Loader of the batches.
        train: Called with each batch.
        num_batches: Number of batches, in as many epochs as it takes.
        warm_up: Number of the epoch's last batches that are prepared once before and do not count. They compile kernels
            and start workers; as all of them are held at once, they also take the buffers. Two of them are trained on.

    Returns:
        `batches`, `seeds`, `seconds`, `seeds_per_s`; `wait_share`: share of the seconds in which the trainer waited, in
        [0, 1]; `cpu_share`: share of all cores used by this process and those it started; `peak_queue_mib`: largest
        size of the batches that were ready when the trainer asked, "" if the source does not report it.
    """
    held = []
    for batch in epochs(loader, warm_up):
        held.append(batch)
        if len(held) <= 2:
            train(batch)
    held.clear()
    seeds = batches = 0
    waited, peak, batch = 0.0, None, None
    cpu, begun = _cpu_s(), time.perf_counter()
    coming = epochs(loader, num_batches)
    while True:
        ready = getattr(loader._source, "queue_bytes", None)
        peak = ready if peak is None else max(peak, ready)
        asked = time.perf_counter()
        batch = next(coming, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        seeds, batches = seeds + num_seeds(batch), batches + 1
        train(batch)
        del batch
    seconds = time.perf_counter() - begun
    return {
        "batches": batches,
        "seeds": seeds,
        "seconds": round(seconds, 4),
        "seeds_per_s": round(seeds / seconds, 1),
        "wait_share": round(waited / seconds, 4),
        "cpu_share": round((_cpu_s() - cpu) / seconds / psutil.cpu_count(), 4),
        "peak_queue_mib": "" if peak is None else round(peak / 2**20, 2),
    }


def epochs(loader: PartLoader, num_batches: int) -> Iterator[MiniBatch]:
    """Yield so many batches, in whole epochs but for the first, which begins where it must to end with them."""
    first = num_batches % len(loader)
    for epoch in itertools.count():
        if num_batches <= 0:
            return
        loader.set_epoch(epoch)
        size = first or len(loader)
        first = 0
        loader.load_state_dict(loader.state_dict() | {"delivered": (len(loader) - size) % len(loader)})
        yield from loader
        num_batches -= size


def _cpu_s() -> float:
    """CPU seconds of this process and of all below it that run."""
    total = 0.0
    process = psutil.Process()
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
