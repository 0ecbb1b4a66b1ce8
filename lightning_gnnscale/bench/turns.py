"""Speed measured in turns: what else runs on the machine hits every contender, so ratios within a turn hold."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from ..loader import BufferPool
from ..triton_kernels.gather_rows import gather_rows

Name = TypeVar("Name", bound=Hashable)


class Taken(NamedTuple):
    """One run: seeds that it prepared, CPU seconds of all its processes, seconds."""

    seeds: int
    cpu_s: float
    wall_s: float


Contender = Callable[[], Taken]


def in_this_process(prepare: Callable[[], int]) -> Contender:
    """Return the contender that runs a function of this process, which returns the number of its seeds."""

    def contender() -> Taken:
        start, start_cpu = time.perf_counter(), time.process_time()
        seeds = prepare()
        return Taken(seeds, time.process_time() - start_cpu, time.perf_counter() - start)

    return contender


def measure(contenders: Mapping[Name, Contender], repeats: int) -> dict[Name, list[Taken]]:
    """Run each contender `repeats` times, in turns, after one run that does not count."""
    found: dict[Name, list[Taken]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, contender in contenders.items():
            taken = contender()
            if repeat:
                found[name].append(taken)
    return found


def speeds(runs: list[Taken]) -> dict[str, float]:
    """Return medians, and the best, of seeds per CPU-second and per second."""
    return {
        "seeds_per_cpu_s": statistics.median(run.seeds / run.cpu_s for run in runs),
        "seeds_per_cpu_s_best": max(run.seeds / run.cpu_s for run in runs),
        "seeds_per_s": statistics.median(run.seeds / run.wall_s for run in runs),
    }


def ratio(runs: list[Taken], others: list[Taken] | None, clock: str = "cpu_s") -> float | None:
    """Return the median over the turns of seeds per second of a clock against another contender's, None without it."""
    if others is None:
        return None
    pairs = zip(runs, others, strict=True)
    return statistics.median((a.seeds / getattr(a, clock)) / (b.seeds / getattr(b, clock)) for a, b in pairs)


def row_copies(
    features: np.ndarray, rows_a_seed: float, batch_size: int, num_batches: int, threads: int
) -> Callable[[], int]:
    """Copy as many random rows as batches read, into one reused buffer a thread, and nothing else: the copy bound."""
    num = min(int(rows_a_seed * batch_size), len(features))
    orders = [np.random.default_rng(i).permutation(len(features))[:num] for i in range(3)]
    outs = [BufferPool().take((num, features.shape[1]), features.dtype) for _ in range(threads)]

    def copy(thread: int) -> None:
        for batch in range(thread, num_batches, threads):
            gather_rows(features, orders[batch % 3], outs[thread])

    def copies() -> int:
        with ThreadPoolExecutor(threads) as executor:
            list(executor.map(copy, range(threads)))
        return round(num_batches * num / rows_a_seed)

    return copies
