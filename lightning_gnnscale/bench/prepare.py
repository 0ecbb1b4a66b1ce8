"""Sources of batches side by side: seeds per second, waits, cores used, bytes held; and replays on more cores."""

import itertools
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ..loader import TaskGraphs
from ..loader.task_trace import TaskTrace
from ..partition_store import PartitionStore
from .partition_graphs import public_root
from .placement_graphs import check_graph
from .prepare_cases import CPU, WORKLOADS, Shape, grid, make_data, make_trainer, source_of
from .prepare_graphs import GENERATED, open_graph
from .prepare_measure import measure
from .prepare_replay import record, replay_rows
from .prepare_tables import BOUND, FED, best, draw, medians, print_tables
from .results import append_row, machine, read_rows, write_csv

WORKERS = ("num_threads", "num_workers")
QUEUE_BATCHES = "queue_batches"  # memory of task graphs, in the largest batches of the workload
MEMORY = (QUEUE_BATCHES, "depth")


def run(
    output_dir: str | os.PathLike,
    graphs: Sequence[str],
    sources: Sequence[str],
    settings: Mapping[str, Mapping[str, Sequence[Any]]],
    workloads: Sequence[str] = tuple(WORKLOADS),
    train: Sequence[str | float] = (CPU, 0),
    fanouts: Sequence[int] = (15, 10),
    batch_size: int = 1024,
    hidden_channels: int = 16,
    num_negatives: int = 5,
    num_batches: int = 24,
    repeats: int = 3,
    num_parts: int = 4,
    scope: str = "graph",
    device_share: float = 0.7,
    device_batches: int = 96,
    replay_cores: Sequence[int] = (1, 2, 8, 16, 64),
    replay_queue_batches: Sequence[int] = (1, 2, 4, 16, 64),
    replay_sigmas: Sequence[float] = (10,),
    trace_threads: int = 2,
    seed: int = 0,
    data_root: str | None = None,
) -> dict[str, list[dict]]:
    """Measure every source in turns, while a trainer takes what it prepares; then replay the measured task times.

    Rows are appended as they are measured. Run again with the same `hydra.run.dir=`, the benchmark resumes at the first
    missing row. Then each source's best settings feed a device that one worker cannot feed.

    Args:
        output_dir: Folder for `prepare.csv`, `replay.csv`, `prepare.png`, the graphs and the traces.
        graphs: Public graphs, and "power_law:NODES:EDGES:FEATURES".
        sources: Names in conf/source.
        settings: Maps a source to its settings, every combination of which is measured; a source without any is
            measured with its defaults. Task graphs also take "queue_batches": their cap on memory, in batches.
        workloads: Any of "gcn", "graphsage" and "unsupervised".
        train: Trainers. "cpu": a model step on these cores; a number: a device that takes this many milliseconds per
            batch, simulated by sleep. 0 shows how much a source can prepare.
        fanouts, num_negatives: Fan-outs of the batches, and negatives per link.
        batch_size: Number of nodes at the head of a batch; a link of the unsupervised workload puts 2 + num_negatives
            there.
        hidden_channels: Width of the model on the CPU.
        num_batches: Number of batches in one measurement.
        repeats: Number of measurements of each case, in turns; the median counts.
        num_parts, scope: Number of parts in the stores, and the scope of batches; see `PartitionDataModule`.
        device_share: Time that the device to be fed takes per batch, divided by the time in which one thread prepares a
            batch.
        device_batches: Number of batches in such a measurement; it includes the wait for an epoch's first batch.
        replay_cores, replay_queue_batches: Numbers of cores, and sizes of memory in batches, of the machines in the
            replay.
        replay_sigmas: Values of sigma over which two-level scheduling is tuned in the replay.
        trace_threads: Largest number of concurrent threads for which task times are recorded. A machine with fewer
            cores is replayed with the times of as many threads, so that these include what threads cost each other in
            shared memory.
        seed: Seed of the order and of the draws.
        data_root: Folder of public graphs; None: it is searched for.

    Returns:
        {"rows": medians of the measurements, "replay": rows}.

    Raises:
        ValueError: an unknown graph, workload or source, or settings that a source does not take.
    """
    unknown = sorted(set(workloads) - set(WORKLOADS))
    if unknown:
        raise ValueError(f"bench.workloads must be of {', '.join(WORKLOADS)}; got {', '.join(unknown)}")
    for trainer in train:
        if trainer != CPU and not (isinstance(trainer, int | float) and trainer >= 0):
            raise ValueError(f"bench.train must hold cpu, or milliseconds >= 0, got {trainer!r}")
    root, output = public_root(data_root), Path(output_dir)
    for graph in graphs:
        check_graph(graph, GENERATED, "power_law:NODES:EDGES:FEATURES", root)
    cases = [(name, options) for name in sources for options in grid(settings.get(name, {}))]
    for name, options in cases:
        source_of(name, _plain(options, 1))
    shape = Shape(tuple(fanouts), batch_size, hidden_channels, num_negatives, num_batches, scope, seed)
    console, facts = Console(width=max(Console().width, 150)), machine()
    rows, replays = [], []
    for graph in graphs:
        console.print(f"{graph}: its store is opened, or made once")
        store = open_graph(graph, output / "graphs", num_parts, root)
        for workload in workloads:
            folder = output / "traces" / f"{graph.replace(':', '-')}-{workload}"
            record_now = partial(_record, folder, store, workload, shape, replay_cores, trace_threads)
            takes = [record_now(take=0)]
            bench = _Bench(output / "rows.csv", graph, workload, store, shape, takes[0], console)
            found = bench.rows(cases, train, repeats)
            takes.append(record_now(take=1))
            found += bench.feed(found, cases, device_share, device_batches, repeats)
            takes.append(record_now(take=2))
            rows += found
            machines = (replay_cores, replay_queue_batches, replay_sigmas)
            replayed = replay_rows(_middle(takes), *machines, measured=partial(capacity, found))
            replays += [{"graph": graph, "workload": workload} | row for row in replayed]
            write_csv(output / "prepare.csv", rows, facts)
            write_csv(output / "replay.csv", replays, facts)
    print_tables(console, rows, replays, facts)
    draw(output / "prepare.png", rows, replays)
    return {"rows": rows, "replay": replays}


class _Bench:
    """One workload on one graph."""

    def __init__(
        self, log: Path, graph: str, workload: str, store: PartitionStore, shape: Shape, traces: dict, console
    ):
        self.log, self.graph, self.workload, self.store, self.shape = log, graph, workload, store, shape
        known = (batch for of_cores in traces.values() for trace in of_cores.values() for batch in trace.batches)
        self.largest_bytes = max(batch.num_bytes for batch in known)
        self.console = console
        self.done = read_rows(log)

    def rows(self, cases: Sequence[tuple[str, dict]], train: Sequence[str | float], repeats: int) -> list[dict]:
        """Return the medians of each case under each trainer."""
        found: list[dict] = []
        for trainer in train:
            for repeat in range(repeats):
                found += [self._row(name, options, _name(trainer), trainer, repeat) for name, options in cases]
        return medians(found)

    def feed(
        self, found: list[dict], cases: Sequence[tuple[str, dict]], share: float, num_batches: int, repeats: int
    ) -> list[dict]:
        """Return medians of each source, at its best for each number of workers, that feeds a device.

        The device takes `share` of the time in which one thread prepares a batch: one worker is too few.
        """
        alone = [row for row in found if row["train"] == BOUND and row["workers"] == 1]
        if not alone:
            return []
        batch_ms = 1000 * min(row["seconds"] / row["batches"] for row in alone if row["source"] == alone[0]["source"])
        fastest = {(row["source"], row["settings"]) for row in map(best, _by_workers(found))}
        chosen = [(name, options) for name, options in cases if (name, _text(options)) in fastest]
        fed: list[dict] = []
        for repeat, (name, options) in itertools.product(range(repeats), chosen):
            fed.append(self._row(name, options, FED, round(share * batch_ms, 2), repeat, num_batches))
        return medians(fed)

    def _row(
        self, name: str, options: dict, train: str, trainer: str | float, repeat: int, num_batches: int | None = None
    ) -> dict:
        shape = self.shape if num_batches is None else replace(self.shape, num_batches=num_batches)
        workers = next((options[key] for key in WORKERS if key in options), "")
        key = {"graph": self.graph, "workload": self.workload, "source": name, "settings": _text(options)}
        memory = next((options[name] for name in MEMORY if name in options), "")
        key |= {"workers": workers, "memory_batches": memory, "train": train, "repeat": repeat, "shape": _tag(shape)}
        told = {column: str(value) for column, value in key.items()}
        for row in self.done:
            if all(row.get(column) == value for column, value in told.items()):
                return key | {column: _number(value) for column, value in row.items() if column not in key}
        source = source_of(name, _plain(options, self.largest_bytes))
        data = make_data(self.store, self.workload, shape, source)
        step = make_trainer(self.store, self.workload, shape, trainer)
        warm_up = source.batches_ahead + 2  # each buffer of the pool is fresh once
        row = key | {"train_ms": "" if trainer == CPU else trainer}
        try:
            row |= measure(data.train_dataloader(), step, shape.num_batches, warm_up)
        finally:
            data.teardown("fit")
        append_row(self.log, row)
        shown = ("workload", "source", "settings", "train", "seeds_per_s", "wait_share")
        self.console.print("  ".join(f"{column}={row[column]}" for column in shown))
        return row


def _record(
    folder: Path, store: PartitionStore, workload: str, shape: Shape, cores: Sequence[int], most: int, take: int
) -> dict[int, dict[int, TaskTrace]]:
    """Return the traces of a workload, by cores and pieces of a hop, each recorded once by `most` threads or fewer."""
    traces: dict[tuple[int, int], TaskTrace] = {}
    by_cores: dict[int, dict[int, TaskTrace]] = {}
    for number in sorted({*cores, 1}):
        threads = min(number, most)
        for pieces in sorted({1, TaskGraphs(number).num_pieces}):
            if (threads, pieces) not in traces:
                path = folder / f"{_tag(shape, threads, pieces)}-{take}.json"
                traces[threads, pieces] = record(store, workload, shape, threads, pieces, path)
            by_cores.setdefault(number, {})[pieces] = traces[threads, pieces]
    return by_cores


def _middle(takes: Sequence[dict[int, dict[int, TaskTrace]]]) -> dict[int, dict[int, TaskTrace]]:
    """Return of each trace the take whose tasks took the median of the time: a machine is not always as fast."""
    return {
        cores: {
            pieces: sorted((take[cores][pieces] for take in takes), key=_task_s)[len(takes) // 2] for pieces in found
        }
        for cores, found in takes[0].items()
    }


def _task_s(trace: TaskTrace) -> float:
    return sum(task.seconds for batch in trace.batches for task in batch.tasks)


def _by_workers(rows: list[dict]) -> Iterator[list[dict]]:
    """Yield the rows without training of each source and number of workers."""
    bound = [row for row in rows if row["train"] == BOUND]
    for name, workers in dict.fromkeys((row["source"], row["workers"]) for row in bound):
        yield [row for row in bound if (row["source"], row["workers"]) == (name, workers)]


def capacity(rows: list[dict], source: str, cores: int, memory_batches: int) -> float | None:
    """Return the most seeds per second that a source prepared without training, in so much memory; None: unknown.

    Fixed prefetch may have used fewer threads than there are cores, task graphs share them all.
    """
    found = [
        row["seeds_per_s"]
        for row in rows
        if (row["source"], row["train"]) == (source, BOUND)
        and (row["workers"] == cores or (source == "fixed_prefetch" and row["workers"] < cores))
        and row["memory_batches"] != ""
        and row["memory_batches"] <= memory_batches
    ]
    return max(found) if found and cores <= (os.cpu_count() or 1) else None


def _plain(options: Mapping[str, Any], largest_bytes: int) -> dict[str, Any]:
    """Return options as the source takes them: memory in bytes."""
    plain = dict(options)
    if QUEUE_BATCHES in plain:
        batches = plain.pop(QUEUE_BATCHES)
        plain["queue_bytes"] = batches * largest_bytes
    return plain


def _name(trainer: str | float) -> str:
    return trainer if trainer == CPU else f"{trainer:g}"


def _text(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


def _tag(shape: Shape, *more: int) -> str:
    return f"{zlib.crc32(repr((shape, more)).encode()):08x}"


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text
