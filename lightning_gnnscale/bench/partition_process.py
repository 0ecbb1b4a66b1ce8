"""Partitioners measured one by one, each in a process of its own: seconds when warm, memory above the warm interpreter.

The process is a fork of a server that has imported the package, because importing takes longer than many cases.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

from ..memory import resident_bytes

SAMPLE_S, LONGEST_SAMPLE_S = 0.004, 0.05


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
            settings: Settings of `partition_worker.measure_here`: chunk_edges, layout, reader, repeats, seed, options,
                balance, masks, halo_hops, feature_bytes.

        Returns:
            What `partition_worker.measure_here` returns, and peak_bytes: by how much the memory of the first run
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
            [sys.executable, "-m", "lightning_gnnscale.bench.partition_worker", str(self.cores)],
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
