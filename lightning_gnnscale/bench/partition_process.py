"""Partitioners measured one by one, each in a process of its own: seconds when warm, memory above the warm interpreter.

The process is a fork of a server that has imported the package, because importing takes longer than many cases. The
server is this module, run as `python -m lightning_gnnscale.bench.partition_process CORES`. It reads a JSON object a
line and answers each with lines of its own: the fork's process id, when it is warm, when its first run is over, its
result or error, its end.
"""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from statistics import median

import numpy as np

from ..edge_stream import SyntheticGraph, open_edge_stream, write_edges
from ..edge_stream.write import WRITE_SUFFIXES
from ..errors import GNNScaleError
from ..memory import resident_bytes
from ..partitioner import evaluate_partitioning, partition

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

    Args:
        cores: how many a case may use, or "all".

    Raises:
        ValueError: fewer cores are there.
    """

    def __init__(self, cores: int | str = 1):
        self.cores = core_count(cores)
        self._process: subprocess.Popen | None = None
        self._complaints = None
        self._lines: list[dict] = []
        self._arrived = threading.Event()

    def __enter__(self) -> "MeasuringServer":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the server."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._reader.join()
            self._process.stdout.close()
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
            path: An edge file that `open_edge_stream` can read.
            num_nodes: Upper bound of the ids in the file, exclusive.
            method: Name of a partitioner.
            num_parts: Number of parts.
            limit_s, limit_bytes: Time that the process may work once it is warm, and memory that it may hold, before it
                is stopped; None: no limit.
            settings: Settings of `measure_here`: chunk_edges, layout, reader, repeats, seed, options,
                balance, masks, halo_hops, feature_bytes.

        Returns:
            What `measure_here` returns, and peak_bytes: by how much the memory of the first run
            exceeded that of the warm interpreter at its peak.

        Raises:
            RuntimeError: the method refused (with its own message), crashed, or exceeded a limit.
        """
        self._start()
        del self._lines[:]
        request = {"path": str(path), "num_nodes": num_nodes, "method": method, "num_parts": num_parts, **settings}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        said = self._complaints.tell()
        try:
            peak_bytes = self._watch(limit_s, limit_bytes)
        except BaseException:
            self._stop_worker()
            raise
        found = self._seen()
        if "error" in found:
            raise RuntimeError(found["error"])
        if "result" not in found:
            self._complaints.seek(said)
            text = self._complaints.read().strip()[-2000:] or f"its process ended with status {found.get('ended')}"
            raise RuntimeError(f"measuring {method} on {path} failed:\n{text}")
        return {**found["result"], "peak_bytes": peak_bytes - found["result"]["resident_bytes"]}

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.cores), "NUMBA_NUM_THREADS": str(self.cores)}
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 (`close` does)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lightning_gnnscale.bench.partition_process", str(self.cores)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.append(json.loads(line))
            self._arrived.set()
        self._lines.append({"ended": "unknown: the server is gone"})
        self._arrived.set()

    def _watch(self, limit_s: float | None, limit_bytes: int | None) -> int:
        """Sample the worker's memory from when it is warm until its first run is over; return the peak.

        Sampled from outside: a thread of the process itself would stand still while METIS holds the interpreter.
        """
        peak_bytes, warm_s, worked_s = 0, None, 0.0
        while True:
            seen = self._seen()
            if "ended" in seen:
                return peak_bytes
            if "warm" in seen:
                warm_s = time.perf_counter() if warm_s is None else warm_s
                worked_s = time.perf_counter() - warm_s
                if "first" not in seen:
                    peak_bytes = max(peak_bytes, resident_bytes(seen["pid"]))
            if limit_s is not None and worked_s > limit_s:
                raise RuntimeError(f"stopped after {limit_s:g} s (limit_s)")
            if limit_bytes is not None and peak_bytes > limit_bytes:
                limit = f"above {limit_bytes / 1e9:.2f} GB (limit_bytes)"
                raise RuntimeError(f"stopped at {peak_bytes / 1e9:.2f} GB of memory, {limit}")
            self._arrived.wait(min(max(SAMPLE_S, worked_s / 100), LONGEST_SAMPLE_S))
            self._arrived.clear()

    def _seen(self) -> dict:
        """Return all facts that were told of this case so far."""
        return {name: value for line in list(self._lines) for name, value in line.items()}

    def _stop_worker(self) -> None:
        killed = False
        while True:
            seen = self._seen()
            if "ended" in seen:
                return
            if "pid" in seen and not killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(seen["pid"], signal.SIGKILL)
                killed = True
            self._arrived.wait(LONGEST_SAMPLE_S)
            self._arrived.clear()


def measure_here(
    path: str,
    num_nodes: int,
    method: str,
    num_parts: int,
    tell,
    chunk_edges: int = 1 << 22,
    layout: str = "once",
    reader: dict | None = None,
    repeats: int = 3,
    seed: int = 0,
    options: dict | None = None,
    balance: dict | None = None,
    masks: str | None = None,
    halo_hops: int = 1,
    feature_bytes: float = 0,
) -> dict:
    """Partition an edge file in this process, after a small graph has warmed up the interpreter.

    Args:
        path, num_nodes, method, num_parts, seed, options, balance: The edge file, its number of nodes, and what to
            partition it by.
        tell: Called as tell(warm=True) before the first run and tell(first=True) after it.
        chunk_edges, layout, reader: Arguments of `open_edge_stream`; reader holds the options for this kind of file.
        repeats: Number of further runs after the first.
        masks: Path of an .npz of masks by name; loaded before memory is measured.
        halo_hops, feature_bytes: Arguments of `evaluate_partitioning`.

    Returns:
        seconds (of the best run), seconds_median, cpu_seconds (all threads, of the best run), resident_bytes (of the
        warm interpreter), phases, notes, components, largest_part_bytes, and the fields of the quality except its
        lists.
    """

    def open_stream(file, nodes):
        return open_edge_stream(file, num_nodes=nodes, chunk_edges=chunk_edges, layout=layout, **(reader or {}))

    def run(stream, parts, masks):
        more = {"seed": seed, "balance": balance, "masks": masks, **(options or {})}
        return partition(stream, method, parts, evaluate=False, **more)

    masks = _load_masks(masks)
    with tempfile.TemporaryDirectory() as folder:
        small = _small_graph(Path(folder), Path(path), layout, reader)
        with contextlib.suppress(ValueError, GNNScaleError):  # the real graph shows whether it can be done
            run(open_stream(*small), min(num_parts, _WARM_PARTS), _small_masks(small[1], masks))  # compiles
    start_bytes = resident_bytes()
    tell(warm=True)
    time.sleep(5 * SAMPLE_S)
    seconds, cpu_seconds = [], []
    for i in range(repeats + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        p = run(open_stream(path, num_nodes), num_parts, masks)
        seconds.append(time.perf_counter() - wall)
        cpu_seconds.append(time.process_time() - cpu)
        if i == 0:
            tell(first=True)
        if sum(seconds) > ENOUGH_S:
            break
    stream = open_stream(path, num_nodes)
    quality = evaluate_partitioning(stream, p.part_id, num_parts, halo_hops, masks, feature_bytes=feature_bytes)
    return {
        "seconds": min(seconds),
        "seconds_median": median(seconds),
        "cpu_seconds": cpu_seconds[seconds.index(min(seconds))],
        "resident_bytes": start_bytes,
        "phases": p.seconds,
        "notes": p.notes,
        "components": sum(quality.components_per_part),
        "largest_part_bytes": max(quality.bytes_per_part),
        **{name: value for name, value in asdict(quality).items() if not isinstance(value, list)},
    }


def _load_masks(path: str | None) -> dict | None:
    if path is None:
        return None
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _small_graph(folder: Path, path: Path, layout: str, reader: dict | None) -> tuple[Path, int]:
    """Write a small graph in the same format and layout, so that the same code is compiled."""
    graph = SyntheticGraph(num_nodes=1000, num_edges=5000)
    chunk = next(graph.stream().chunks())
    ends = np.stack([chunk.src, chunk.dst])
    if layout != "once":  # "auto" finds out: what is listed more than once takes more code
        back = ends[::-1] if layout == "both_ways" else ends[::-1, :2500]
        ends = np.concatenate([ends, back], axis=1)
    suffix = path.suffix if path.suffix in WRITE_SUFFIXES else ".bin"
    dtype = (reader or {}).get("dtype", "int32")
    stream = open_edge_stream(np.ascontiguousarray(ends), num_nodes=graph.num_nodes)
    return write_edges(stream, folder / f"small{suffix}", dtype=dtype), graph.num_nodes


def _small_masks(num_nodes: int, masks: dict | None) -> dict | None:
    """Return masks of the same names for the small graph: a third of the nodes each."""
    if masks is None:
        return None
    return {name: np.arange(num_nodes) % 3 == i % 3 for i, name in enumerate(masks)}


def serve(num_cores: int) -> None:
    """Answer the requests on standard input, each in a fork, until there are no more."""
    # What libraries print goes to the error stream: the lines of the protocol are this module's alone.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**facts) -> None:
        print(json.dumps(facts, default=str), file=channel, flush=True)

    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the asking process, which ends this one
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[-num_cores:]))
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                tell(pid=os.getpid())
                status = _work(json.loads(line), tell)
            finally:
                os._exit(status)
        tell(ended=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _work(request: dict, tell) -> int:
    """Measure, and tell the result or the error; return the exit status."""
    try:
        tell(result=measure_here(**request, tell=tell))
    except (ValueError, MemoryError, GNNScaleError) as error:
        tell(error=str(error) or type(error).__name__)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve(int(sys.argv[1]))
