"""Partitioners measured one by one, each in a process of its own: seconds when warm, memory above the warm interpreter.

The process is a fork of a server that has imported the package, because importing takes longer than many cases.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NoReturn

import numpy as np

from lightning_gnnscale.edge_stream import EdgeStream, SyntheticGraph, open_edge_stream, write_edges
from lightning_gnnscale.edge_stream.open import WRITE_SUFFIXES
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.memory import format_bytes, resident_bytes
from lightning_gnnscale.partitioner import Partitioning, evaluate_partitioning, partition
from lightning_gnnscale.system import end_with_parent

from . import streaming_peers  # noqa: F401 (imported to be registered)

SAMPLE_S, LONGEST_SAMPLE_S = 0.004, 0.05
ENOUGH_S = 20.0  # no further run is started after this long
_WARM_PARTS = 64  # of the small graph at most


def measure(path: str | os.PathLike, num_nodes: int, method: str, num_parts: int, cores: int | str = 1, **more) -> dict:
    """Partition an edge file in a fresh process; see `MeasuringServer.measure`."""
    with MeasuringServer(cores) as server:
        return server.measure(path, num_nodes, method, num_parts, **more)


def core_count(cores: int | str) -> int:
    """Return how many cores a setting of 1, another number or "all" means here.

    Raises:
        ValueError: fewer are there.
    """
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores == "all":
        return have
    if isinstance(cores, bool) or not isinstance(cores, int) or not 1 <= cores <= have:
        raise ValueError(f"bench.cores must be in [1, {have}], or all, got {cores!r}")
    return cores


class MeasuringServer:
    """A process that forks once for each case; it starts with the first one, and `close` or a with-block ends it.

    It is spawned: a script of one's own that measures needs a `__main__` guard.

    Args:
        cores: how many a case may use, or "all".

    Raises:
        ValueError: fewer cores are there.
    """

    def __init__(self, cores: int | str = 1):
        self.cores = core_count(cores)
        self._process: multiprocessing.Process | None = None

    def __enter__(self) -> "MeasuringServer":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the server."""
        if self._process is not None:
            self._pipe.close()
            self._process.join()
            self._complaints.close()
            self._process = None

    def measure(
        self,
        path: str | os.PathLike,
        num_nodes: int,
        method: str,
        num_parts: int,
        limit_s: float | None = None,
        limit_bytes: int | None = None,
        **settings,
    ) -> dict:
        """Partition an edge file in a fresh process.

        Args:
            path, num_nodes, method, num_parts, settings: See `Request`.
            limit_s, limit_bytes: Time that the process may work once it is warm, and memory that it may hold, before it
                is stopped; None: no limit.

        Returns:
            What `measure_here` returns, and peak_bytes: by how much the memory of the first run
            exceeded that of the warm interpreter at its peak.

        Raises:
            RuntimeError: the method refused (with its own message), crashed, or exceeded a limit.
        """
        self._start()
        said, seen = os.path.getsize(self._complaints.name), {}
        self._pipe.send(Request(str(path), num_nodes, method, num_parts, **settings))
        try:
            peak_bytes = self._watch(seen, limit_s, limit_bytes)
        except BaseException:
            self._stop_worker(seen)
            raise
        if "error" in seen:
            raise RuntimeError(seen["error"])
        if "result" not in seen:
            text = Path(self._complaints.name).read_bytes()[said:].decode(errors="replace").strip()[-2000:]
            text = text or f"its process ended with status {seen['ended']}"
            raise RuntimeError(f"measuring {method} on {path} failed:\n{text}")
        return {**seen["result"], "peak_bytes": peak_bytes - seen["result"]["resident_bytes"]}

    def _start(self) -> None:
        if self._process is not None and self._process.is_alive():
            return
        self.close()
        spawn, before = multiprocessing.get_context("spawn"), dict(os.environ)
        self._complaints = tempfile.NamedTemporaryFile()  # noqa: SIM115 (`close` does)
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, self._complaints.name, self.cores), daemon=True)
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(self.cores))
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()

    def _watch(self, seen: dict, limit_s: float | None, limit_bytes: int | None) -> int:
        """Sample the worker's memory from when it is warm until its first run is over; return the peak.

        Sampled from outside: a thread of the process itself would be blocked while METIS holds the interpreter.
        """
        peak_bytes, warm_s, worked_s = 0, None, 0.0
        while "ended" not in seen:
            if self._pipe.poll(min(max(SAMPLE_S, worked_s / 100), LONGEST_SAMPLE_S)):
                seen |= self._told()
            if "warm" in seen and "ended" not in seen:
                warm_s = time.perf_counter() if warm_s is None else warm_s
                worked_s = time.perf_counter() - warm_s
                if "first" not in seen:
                    peak_bytes = max(peak_bytes, resident_bytes(seen["pid"]))
            if limit_s is not None and worked_s > limit_s:
                raise RuntimeError(f"stopped after {limit_s:g} s (limit_s)")
            if limit_bytes is not None and peak_bytes > limit_bytes:
                limit = f"above {format_bytes(limit_bytes)} (limit_bytes)"
                raise RuntimeError(f"stopped at {format_bytes(peak_bytes)} of memory, {limit}")
        return peak_bytes

    def _told(self) -> dict:
        try:
            return self._pipe.recv()
        except EOFError:
            return {"ended": "unknown: the server is gone"}

    def _stop_worker(self, seen: dict) -> None:
        while "ended" not in seen:
            if "pid" in seen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(seen["pid"], signal.SIGKILL)
            seen |= self._told()


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        path: An edge file that `open_edge_stream` can read.
        num_nodes: Upper bound of the ids in the file, exclusive.
        method, num_parts, seed, options, balance: What to partition it by: name of a partitioner, number of parts.
        chunk_edges, layout, reader: Arguments of `open_edge_stream`; reader holds the options for this kind of file.
        repeats: Number of further runs after the first.
        masks: Path of an .npz of masks by name; loaded before memory is measured.
        halo_hops, feature_bytes: Arguments of `evaluate_partitioning`.
    """

    path: str
    num_nodes: int
    method: str
    num_parts: int
    chunk_edges: int = 1 << 22
    layout: str = "once"
    reader: dict | None = None
    repeats: int = 3
    seed: int = 0
    options: dict | None = None
    balance: dict | None = None
    masks: str | None = None
    halo_hops: int = 1
    feature_bytes: float = 0

    def stream(self, path: str | Path, num_nodes: int) -> EdgeStream:
        """Open the file, or another one of its kind."""
        options = {"chunk_edges": self.chunk_edges, "layout": self.layout, **(self.reader or {})}
        return open_edge_stream(path, num_nodes=num_nodes, **options)

    def partition(self, stream: EdgeStream, num_parts: int, masks: dict | None) -> Partitioning:
        """Partition a stream by the method, without measuring its quality."""
        options = {"seed": self.seed, "balance": self.balance, "masks": masks, **(self.options or {})}
        return partition(stream, self.method, num_parts, evaluate=False, **options)


def measure_here(request: Request, tell: Callable[..., None]) -> dict:
    """Partition an edge file in this process, after a small graph has warmed up the interpreter.

    `tell` is called as tell(warm=True) before the first run and tell(first=True) after it.

    Returns:
        seconds (of the best run), seconds_median, cpu_seconds (all threads, of the best run), resident_bytes (of the
        warm interpreter), phases, notes, components, largest_part_bytes, and the fields of the quality except its
        lists.
    """
    masks = None
    if request.masks is not None:
        with np.load(request.masks, allow_pickle=False) as arrays:
            masks = dict(arrays)
    with tempfile.TemporaryDirectory() as folder:
        path, num_nodes = _small_graph(Path(folder), request)
        thirds = masks and {name: np.arange(num_nodes) % 3 == i % 3 for i, name in enumerate(masks)}
        with contextlib.suppress(ValueError, GNNScaleError):  # the real graph shows whether it can be done
            request.partition(request.stream(path, num_nodes), min(request.num_parts, _WARM_PARTS), thirds)  # compiles
    start_bytes = resident_bytes()
    tell(warm=True)
    time.sleep(5 * SAMPLE_S)
    took: list[tuple[float, float]] = []  # seconds, CPU seconds
    while len(took) <= request.repeats and sum(seconds for seconds, _ in took) <= ENOUGH_S:
        wall, cpu = time.perf_counter(), time.process_time()
        found = request.partition(request.stream(request.path, request.num_nodes), request.num_parts, masks)
        took.append((time.perf_counter() - wall, time.process_time() - cpu))
        if len(took) == 1:
            tell(first=True)
    stream, scale = request.stream(request.path, request.num_nodes), (request.num_parts, request.halo_hops)
    quality = evaluate_partitioning(stream, found.part_id, *scale, masks, feature_bytes=request.feature_bytes)
    seconds, cpu_seconds = min(took)
    return {
        "seconds": seconds,
        "seconds_median": median(seconds for seconds, _ in took),
        "cpu_seconds": cpu_seconds,
        "resident_bytes": start_bytes,
        "phases": found.seconds,
        "notes": found.notes,
        "components": sum(quality.components_per_part),
        "largest_part_bytes": max(quality.bytes_per_part),
        **{name: value for name, value in asdict(quality).items() if not isinstance(value, list)},
    }


def _small_graph(folder: Path, request: Request) -> tuple[Path, int]:
    """Write a small graph in the same format and layout, so that the same code is compiled."""
    graph = SyntheticGraph(num_nodes=1000, num_edges=5000)
    chunk = next(graph.stream().chunks())
    ends = np.stack([chunk.src, chunk.dst])
    if request.layout != "once":  # "auto" finds out: what is listed more than once takes more code
        back = ends[::-1] if request.layout == "both_ways" else ends[::-1, :2500]
        ends = np.concatenate([ends, back], axis=1)
    suffix = Path(request.path).suffix
    path = folder / f"small{suffix if suffix in WRITE_SUFFIXES else '.bin'}"
    stream = open_edge_stream(np.ascontiguousarray(ends), num_nodes=graph.num_nodes)
    return write_edges(stream, path, dtype=(request.reader or {}).get("dtype", "int32")), graph.num_nodes


def serve(pipe: Connection, complaints: str, num_cores: int) -> None:
    """Answer requests from a pipe, each in a fork, until there are no more.

    Each is answered with dicts: the fork's process id, when it is warm, when its first run is over, its result or its
    error, its end. What is printed goes to the file `complaints`.
    """
    printed = os.open(complaints, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(printed, stream)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the asking process, which ends this one
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[-num_cores:]))
    gc.freeze()
    end_with_parent()
    with contextlib.suppress(EOFError):
        while request := pipe.recv():
            pid = os.fork()
            if pid == 0:
                end_with_parent()
                _work(request, lambda **facts: pipe.send(facts))
            pipe.send({"ended": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})


def _work(request: Request, tell: Callable[..., None]) -> NoReturn:
    """Measure, report the result or the error, and end this process."""
    status = 1
    try:
        tell(pid=os.getpid())
        tell(result=measure_here(request, tell))
        status = 0
    except (ValueError, MemoryError, GNNScaleError) as error:
        tell(error=str(error) or type(error).__name__)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)
