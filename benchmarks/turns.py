"""Speed measured in turns: what else runs on the machine hits every contender, so ratios within a turn hold."""

import json
import os
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from lightning_gnnscale.loader import BufferPool
from lightning_gnnscale.sampler import NeighborSampler
from lightning_gnnscale.system import end_with_parent
from lightning_gnnscale.triton_kernels.gather_rows import gather_rows

Name, Result = TypeVar("Name", bound=Hashable), TypeVar("Result")


@dataclass(frozen=True)
class PacedSampler(NeighborSampler):
    """Samples the same as `NeighborSampler`, and sleeps: more workers than cores can then be seen to work side by side.

    Args:
        sample_ms: Time that each sample sleeps, milliseconds.
    """

    sample_ms: float = 0.0

    def finish(self, *arguments):
        """Sleep, whichever owner sampled the rows."""
        time.sleep(self.sample_ms / 1000)
        return super().finish(*arguments)


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


def measure(contenders: Mapping[Name, Callable[[], Result]], repeats: int) -> dict[Name, list[Result]]:
    """Run each contender `repeats` times, in turns, after one run that does not count."""
    found: dict[Name, list[Result]] = {name: [] for name in contenders}
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


def batches_title(batch_size: int, fanouts: Sequence[int]) -> str:
    """Return the title of a table of runs in turns."""
    return f"Batches of {batch_size} seeds, fan-outs {', '.join(map(str, fanouts))}: medians of runs in turns"


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


class Peer:
    """A peer's process, which waits for its turns.

    Args:
        kind: "pyg" or "graphbolt".
        python: the interpreter of an environment that has it.
        folder: with the graph, see `peer_worker.py`.
        options: fanouts and batch_size; `map`: features stay in their file, memory-mapped.
        procs: file of a memory group's processes, which it joins; None: it stays in this one's.
        limit_s: seconds after which the process is ended, done or not; None: it may take as long as it does.

    Raises:
        ValueError: the interpreter is not there, or cannot run the peer.
    """

    def __init__(
        self,
        kind: str,
        python: str,
        folder: str | os.PathLike,
        options: Mapping,
        procs: Path | None = None,
        limit_s: float | None = None,
    ):
        self.kind, self.rows_a_seed = kind, 0.0
        script = Path(__file__).with_name("peer_worker.py")
        command = [python, str(script), kind, str(folder), json.dumps(dict(options))]
        if os.path.dirname(python) == "" or not os.access(python, os.X_OK):
            raise ValueError(f"bench.{kind}_python must be an interpreter like /path/to/venv/bin/python, got {python}")
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115

        def begin() -> None:
            end_with_parent()
            if procs is not None:
                procs.write_text(str(os.getpid()))

        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, preexec_fn=begin
        )
        self._late = threading.Timer(limit_s or 0, self._process.terminate)  # who waits for its answer gets an error
        self._late.daemon = True
        if limit_s is not None:
            self._late.start()
        self.versions: dict[str, str] = self._answer()["versions"]

    def contender(self, workers: int, threads: int = 1) -> Contender:
        """Return one epoch with so many worker processes, or threads of torch, timed over all processes of the peer."""

        def run() -> Taken:
            start, start_cpu = time.perf_counter(), tree_cpu_s(self._process.pid)
            with suppress(BrokenPipeError):  # it ended since its last turn: its answer says why
                print(workers, threads, file=self._process.stdin, flush=True)
            answer = self._answer()
            self.rows_a_seed = answer["rows"] / answer["seeds"]
            return Taken(answer["seeds"], tree_cpu_s(self._process.pid) - start_cpu, time.perf_counter() - start)

        return run

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._late.cancel()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines() or ["it ended without a message"]
        last = {-signal.SIGKILL: "killed for memory", -signal.SIGTERM: "ended for time"}.get(
            self._process.returncode, lines[-1]
        )
        self.close()
        raise ValueError(f"bench.{self.kind}_python: {last}")


def tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds, user and system, of a process and all its descendants, the ended ones included."""
    import psutil

    root = psutil.Process(pid)
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])  # user, system, and both of ended children
        except psutil.NoSuchProcess:  # it ended meanwhile: its parent's times hold it
            continue
    return total


def write_graph(folder: Path, csc, features: np.ndarray, seeds: np.ndarray) -> None:
    """Write what `peer_worker.py` reads."""
    for name, array in zip(("indptr", "indices"), csc, strict=True):
        np.save(folder / f"{name}.npy", array)
    np.save(folder / "features.npy", features)
    np.save(folder / "seeds.npy", seeds)
