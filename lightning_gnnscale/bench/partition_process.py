"""One partitioner measured in a process of its own: seconds when warm, and memory above the warm interpreter.

Run as `python -m lightning_gnnscale.bench.partition_process`, with a JSON object on standard input; its first
lines tell when it is warm and when memory has been measured, the last one is the result.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

SAMPLE_S = 0.004
ENOUGH_S = 20.0  # no further run is started after this long


def measure(path: str | os.PathLike, num_nodes: int, method: str, num_parts: int, **settings) -> dict:
    """Partition an edge file in a fresh process.

    Args:
        path: an edge file that `open_edge_stream` takes.
        num_nodes: ids in the file are below it.
        method: name of a partitioner.
        num_parts: number of parts.
        settings: chunk_edges, layout, repeats (further runs after the first one), seed.

    Returns:
        seconds (best), seconds_median, cpu_seconds (all threads, of the best run), peak_bytes (above the warm
        interpreter), resident_bytes (of the warm interpreter), phases, notes, and the quality's fields.
    """
    request = {"path": str(path), "num_nodes": num_nodes, "method": method, "num_parts": num_parts, **settings}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_gnnscale.bench.partition_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=environment,
        )
        with process:
            process.stdin.write(json.dumps(request))
            process.stdin.close()
            peak_bytes, last = _watch(process)
        if process.returncode:
            complaints.seek(0)
            raise RuntimeError(f"measuring {method} on {path} failed:\n{complaints.read().strip()[-2000:]}")
    found = json.loads(last)
    return {**found, "peak_bytes": peak_bytes - found["resident_bytes"]}


def _watch(process: subprocess.Popen) -> tuple[int, str]:
    """Sample the process's memory from when it is warm until its first run is over; return the peak, the last line.

    Sampled from outside: a thread of the process itself would stand still while METIS holds the interpreter.
    """
    from ..memory import resident_bytes

    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")), daemon=True)
    reader.start()
    peak_bytes = 0
    while reader.is_alive():
        if len(lines) == 1:
            peak_bytes = max(peak_bytes, resident_bytes(process.pid))
        reader.join(SAMPLE_S)
    return peak_bytes, lines[-1] if lines else ""


def _measure_here(
    path: str,
    num_nodes: int,
    method: str,
    num_parts: int,
    chunk_edges: int = 1 << 22,
    layout: str = "once",
    repeats: int = 3,
    seed: int = 0,
) -> dict:
    from dataclasses import asdict
    from statistics import median

    from ..edge_stream import open_edge_stream
    from ..memory import resident_bytes
    from ..partitioner import evaluate_partitioning, partition

    def run(file=path, nodes=num_nodes, parts=num_parts):
        stream = open_edge_stream(file, num_nodes=nodes, chunk_edges=chunk_edges, layout=layout)
        return partition(stream, method, parts, seed=seed, evaluate=False)

    _use_one_core()
    with tempfile.TemporaryDirectory() as folder:
        run(*_small_file(Path(folder), Path(path).suffix), 2)  # compiles
    start_bytes = resident_bytes()
    print("warm", flush=True)
    time.sleep(5 * SAMPLE_S)
    seconds, cpu_seconds = [], []
    for i in range(repeats + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        p = run()
        seconds.append(time.perf_counter() - wall)
        cpu_seconds.append(time.process_time() - cpu)
        if i == 0:
            print("first run over", flush=True)
        if sum(seconds) > ENOUGH_S:
            break
    stream = open_edge_stream(path, num_nodes=num_nodes, chunk_edges=chunk_edges, layout=layout)
    quality = evaluate_partitioning(stream, p.part_id, num_parts)
    return {
        "seconds": min(seconds),
        "seconds_median": median(seconds),
        "cpu_seconds": cpu_seconds[seconds.index(min(seconds))],
        "resident_bytes": start_bytes,
        "phases": p.seconds,
        "notes": p.notes,
        **{name: value for name, value in asdict(quality).items() if not isinstance(value, list)},
    }


def _use_one_core() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _small_file(folder: Path, suffix: str) -> tuple[Path, int]:
    """Write a small graph in the same format, so that the same code is compiled."""
    from ..edge_stream import SyntheticGraph, write_edges

    graph = SyntheticGraph(num_nodes=1000, num_edges=5000)
    return write_edges(graph.stream(), folder / f"small{suffix}", dtype="int32"), graph.num_nodes


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(_measure_here(**json.load(sys.stdin)), default=str))
