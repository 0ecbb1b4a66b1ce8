"""Sources of batches side by side: seeds per second, waits, cores used, bytes held; and replays on more cores."""

import os
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from ..loader import TaskGraphs
from ..loader.batch_graph import TaskTrace
from ..partition_store import PartitionStore
from .graphs import STORES, check_graphs, open_graph, public_root
from .prepare_cases import CPU, WORKLOADS, Shape, grid, make_data, make_trainer, measure, source_of
from .present import LEFT, bars, grouped, lines, panels, save, table, tell
from .replay import record, replay_rows
from .runner import Case, Runner, machine_line, write_csv

WORKERS = ("num_threads", "num_workers")
QUEUE_BATCHES = "queue_batches"  # memory of task graphs, in the largest batches of the workload
MEMORY = (QUEUE_BATCHES, "depth")
TRUSTED = 0.1  # error of a replay, against what was measured, up to which its other figures count
FED, BOUND = "fed", "0"  # trainers: a device that one thread cannot feed, and one that takes no time
_OF_A_CASE = ("graph", "workload", "source", "settings", "workers", "memory_batches", "train", "shape")
TAKES = 3  # of the traces; the middle one is replayed
_SCHEDULINGS = ("fixed_prefetch", "task_graphs")


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
    minutes: float | None = None,
    again: str = "none",
) -> dict[str, list[dict]]:
    """Measure every source in turns, while a trainer takes what it prepares; then replay the measured task times.

    At the end each source's best settings feed a device that one worker cannot feed.

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
        minutes, again: See `Runner`. Nothing is replayed where cases are left.

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
    check_graphs(graphs, root, STORES, "power_law:NODES:EDGES:FEATURES")
    cases = [(name, options) for name in sources for options in grid(settings.get(name, {}))]
    for name, options in cases:
        source_of(name, _plain(options, 1))
    shape = Shape(tuple(fanouts), batch_size, hidden_channels, num_negatives, num_batches, scope, seed)
    rows, replays = [], []
    with Runner(output, minutes, again) as runner:
        for graph, workload in product(graphs, workloads):
            store = cache(partial(open_graph, graph, output / "graphs", num_parts, root))
            bench = _Bench(runner, graph, workload, store, shape, replay_cores, trace_threads)
            found = bench.rows(cases, train, repeats)
            fed = bench.feed(found, cases, device_share, device_batches, repeats)
            rows += found + fed
            if not runner.left:
                takes = [bench.traces(take) for take in range(TAKES)]
                machines = (replay_cores, replay_queue_batches, replay_sigmas)
                replayed = replay_rows(_middle(takes), *machines, measured=partial(capacity, found + fed))
                replays += [{"graph": graph, "workload": workload} | row for row in replayed]
            write_csv(output / "prepare.csv", rows)
            write_csv(output / "replay.csv", replays)
        _print_tables(rows, replays, machine_line())
        _draw(output / "prepare.png", rows, replays)
    return {"rows": rows, "replay": replays}


class _Bench:
    """One workload on one graph: its rows, and the traces of its tasks before, between and after them."""

    def __init__(self, runner: Runner, graph: str, workload: str, store, shape: Shape, cores, most_threads: int):
        self.runner, self.graph, self.workload, self.store, self.shape = runner, graph, workload, store, shape
        folder = runner.folder / "traces" / f"{graph.replace(':', '-')}-{workload}"
        self.traces = cache(lambda take: _record(folder, store(), workload, shape, cores, most_threads, take))

    def rows(self, cases: Sequence[tuple[str, dict]], train: Sequence[str | float], repeats: int) -> list[dict]:
        """Return the medians of each case under each trainer."""
        made = [
            self._case(name, options, _name(trainer), trainer, repeat)
            for trainer, repeat, (name, options) in product(train, range(repeats), cases)
        ]
        return medians(self.runner.rows(made, say=_say))

    def feed(
        self, found: list[dict], cases: Sequence[tuple[str, dict]], share: float, num_batches: int, repeats: int
    ) -> list[dict]:
        """Return medians of each source, at its best for each number of workers, that feeds a device.

        The device takes `share` of the time in which one thread prepares a batch: one worker is too few.
        """
        bound = [row for row in found if row["train"] == BOUND]
        alone = [row for row in bound if row["workers"] == 1]
        if not alone:
            return []
        batch_ms = 1000 * min(row["seconds"] / row["batches"] for row in alone if row["source"] == alone[0]["source"])
        fastest = {(row["source"], row["settings"]) for row in map(best, grouped(bound, "source", "workers").values())}
        device_ms = round(share * batch_ms, 2)
        made = [
            self._case(name, options, FED, device_ms, repeat, num_batches)
            for repeat, (name, options) in product(range(repeats), cases)
            if (name, _text(options)) in fastest
        ]
        if not self.runner.is_over:
            self.traces(1)
        return medians(self.runner.rows(made, say=_say))

    def _case(
        self, name: str, options: dict, train: str, trainer: str | float, repeat: int, num_batches: int | None = None
    ) -> Case:
        shape = self.shape if num_batches is None else replace(self.shape, num_batches=num_batches)
        key = {
            "graph": self.graph,
            "workload": self.workload,
            "source": name,
            "settings": _text(options),
            "workers": next((options[key] for key in WORKERS if key in options), ""),
            "memory_batches": next((options[key] for key in MEMORY if key in options), ""),
            "train": train,
            "repeat": repeat,
            "shape": _tag(shape),
        }
        return Case(key, partial(self._measure, name, options, trainer, shape))

    def _measure(self, name: str, options: dict, trainer: str | float, shape: Shape) -> dict:
        known = (
            batch for of_cores in self.traces(0).values() for trace in of_cores.values() for batch in trace.batches
        )
        source = source_of(name, _plain(options, max(batch.num_bytes for batch in known)))
        data = make_data(self.store(), self.workload, shape, source)
        step = make_trainer(self.store(), self.workload, shape, trainer)
        warm_up = source.batches_ahead + 2  # each buffer of the pool is fresh once
        row = {"train_ms": None if trainer == CPU else trainer}
        try:
            return row | measure(data.train_dataloader(), step, shape.num_batches, warm_up)
        finally:
            data.teardown("fit")


def _say(row: dict) -> None:
    names = ("workload", "source", "settings", "train", "seeds_per_s", "wait_share")
    tell("  ".join(f"{name}={row[name]}" for name in names), markup=False, highlight=False)


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


def medians(rows: list[dict]) -> list[dict]:
    """Return one row for each case, of the medians over its repeats."""
    found = []
    for same in grouped(rows, *_OF_A_CASE).values():
        columns = {name: [row[name] for row in same] for name in same[0] if name not in (*_OF_A_CASE, "repeat")}
        numbers = {n: v for n, v in columns.items() if all(isinstance(value, int | float) for value in v)}
        plain = {name: value for name, value in same[0].items() if name != "repeat"}
        found.append(plain | {name: round(statistics.median(v), 4) for name, v in numbers.items()})
    return found


def best(rows: list[dict]) -> dict:
    """Return the row with the most seeds per second."""
    return max(rows, key=lambda row: row["seeds_per_s"])


def capacities(rows: list[dict]) -> dict[tuple[str, str], float]:
    """Return the seeds per second that were prepared where nothing trained, by source and settings."""
    return {(row["source"], row["settings"]): row["seeds_per_s"] for row in rows if row["train"] == BOUND}


def over_device(row: dict, capacity: Mapping[tuple[str, str], float]) -> float | None:
    """Return what was prepared where nothing trained, over what the row's simulated device takes; None without one."""
    can = capacity.get((row["source"], row["settings"]))
    if not row["train_ms"] or can is None:
        return None
    return can / (row["seeds"] / row["batches"] / row["train_ms"] * 1000)


def trainer_name(rows: list[dict]) -> str:
    """Say what trained in rows of one trainer."""
    train = rows[0]["train"]
    if train == "cpu":
        return "a model step on these cores"
    if train == BOUND:
        return "nothing: what can be prepared"
    milliseconds = statistics.median(row["train_ms"] for row in rows)
    return f"a simulated device (sleep) of {milliseconds:g} ms a batch"


_SOURCES = {
    "source": ("source", LEFT),
    "settings": ("settings", LEFT),
    "seeds_per_s": ("seeds\nper second", ",.0f"),
    "over_one": ("over one\nworker", "{:.2f}x".format),
    "wait_share": ("trainer\nwaited", ".1%"),
    "over_device": ("capacity\nover device", "{:.2f}x".format),
    "cpu_share": ("CPU\nuse", ".0%"),
    "peak_queue_mib": ("ready,\nmost MiB", ",.0f"),
}


def _both(more: Mapping[str, tuple]) -> dict:
    """Return columns of both schedulings side by side, with further ones of each."""
    columns = {}
    for name in _SCHEDULINGS:
        columns[f"{name}_seeds_per_s"] = (f"{name.replace('_', ' ')},\nseeds per second", ",.0f")
        columns[f"{name}_settings"] = ("settings", LEFT)
        columns |= {f"{name}_{column}": spec for column, spec in more.items()}
    return columns | {"ratio": ("ratio", "{:.2f}x".format)}


_BATCHES = ("batches ready\nor under way", "g")
_MEMORY = {"queue_batches": _BATCHES, **_both({})}
_REPLAY = {"replayed_cores": ("cores", "g"), "queue_batches": _BATCHES, **_both({"error": ("error", "+.1%")})}


def _print_tables(rows: list[dict], replays: list[dict], caption: str) -> None:
    """Print what was measured, source by source and memory by memory, and what was replayed."""
    for (graph, workload), own in grouped(rows, "graph", "workload").items():
        by_trainer = grouped(own, "train")
        titles = {train: f"{graph}, {workload}; trainer: {trainer_name(same)}." for train, same in by_trainer.items()}
        for train, same in by_trainer.items():
            tell(_sources(same, capacities(own), f"{titles[train]} Medians; of several settings the best", caption))
        for train, same in by_trainer.items():
            pairs = _same_memory(same)
            if pairs and train != (FED,):
                title = f"{titles[train]} Both schedulings in as much memory, each tuned"
                tell(table(pairs, _MEMORY, title, caption))
    for (graph, workload), same in grouped(replays, "graph", "workload").items():
        tell(table(same, _REPLAY, _replay_title(graph, workload, same), caption))


def _sources(rows: list[dict], capacity: Mapping, title: str, caption: str) -> Table:
    """The best settings of each source and number of workers."""
    shown = [best(same) for same in grouped(rows, "source", "workers").values()]
    alone = {row["source"]: row["seeds_per_s"] for row in shown if row["workers"] == 1}
    shown = [
        row
        | {
            "over_one": row["seeds_per_s"] / alone[row["source"]] if row["source"] in alone else None,
            "over_device": over_device(row, capacity),
        }
        for row in shown
    ]
    return table(shown, _SOURCES, title, caption)


def _same_memory(rows: list[dict]) -> list[dict]:
    """Return both schedulings in as much memory, for each size of memory in which both were measured."""
    known = [row for row in rows if row["memory_batches"] != ""]
    pairs = []
    for most in sorted({row["memory_batches"] for row in known}):
        pair: dict = {"queue_batches": most}
        for source in _SCHEDULINGS:
            fitting = [row for row in known if row["source"] == source and row["memory_batches"] <= most]
            if fitting:
                fastest = best(fitting)
                pair |= {f"{source}_{name}": fastest[name] for name in ("seeds_per_s", "settings")}
        if len(pair) == 5:
            speeds = [pair[f"{source}_seeds_per_s"] for source in _SCHEDULINGS]
            pairs.append(pair | {"ratio": speeds[1] / speeds[0]})
    return pairs


def replay_error(rows: list[dict]) -> float | None:
    """Return the largest error of a replay where it was measured, None where nothing was."""
    errors = [abs(row[f"{name}_error"]) for row in rows for name in _SCHEDULINGS if row[f"{name}_error"] != ""]
    return max(errors, default=None)


def _replay_title(graph: str, workload: str, rows: list[dict]) -> str:
    error = replay_error(rows)
    if error is None:
        verdict = "never measured here: nothing to hold it against"
    else:
        counts = "within" if error <= TRUSTED else "NOT within"
        verdict = f"it is off by at most {error:.1%} of what was measured, {counts} the {TRUSTED:.0%} for it to count"
    return (
        f"{graph}, {workload}: a REPLAY of measured task times, no measurement; the trainer takes no time.\n"
        f"Shared caches and memory of more cores are not modelled; {verdict}"
    )


def _draw(path: Path, rows: list[dict], replays: list[dict]) -> None:
    """Draw, for each graph and workload, what each source can prepare, and the replays against cores."""
    cases = grouped(replays, "graph", "workload")
    if not cases:
        return
    sides = ("measured, best settings, by workers", "replay of measured task times")
    titles = [f"{graph}, {workload}: {side}" for graph, workload in cases for side in sides]
    figure, found = panels(titles, across=2, size=(6, 3.5), beside=0)
    for (graph, workload), replayed in cases.items():
        left, right = (found[f"{graph}, {workload}: {side}"] for side in sides)
        own = [row for row in rows if (row["graph"], row["workload"], row["train"]) == (graph, workload, BOUND)]
        shown = [best(same) for same in grouped(own, "source", "workers").values()]
        labels = [f"{row['source']}, {row['workers']}" for row in shown]
        bars(left, labels, [row["seeds_per_s"] for row in shown], "seeds per second, nothing trains")
        for number, ((memory,), same) in enumerate(grouped(replayed, "queue_batches").items()):
            for name, style in zip(_SCHEDULINGS, ("--", "o-"), strict=True):
                label = f"{name.replace('_', ' ')}, {memory:g} batches"
                lines(right, same, "replayed_cores", f"{name}_seeds_per_s", style, color=f"C{number}", label=label)
        right.set_xscale("log", base=2)
        right.set_yscale("log")
        right.legend(fontsize=6)
        right.set_xlabel("cores")
        for axes in (left, right):
            axes.title.set_fontsize(9)
    save(figure, path)
