"""Sources of batches side by side: seeds per second, waits, cores used, bytes held; and replays on more cores."""

import os
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from lightning_gnnscale.errors import check_count
from lightning_gnnscale.loader import TaskGraphs
from lightning_gnnscale.remote import RayWorkers

from .graphs import STORES, check_graphs, open_graph, public_root
from .prepare_cases import CPU, WORKLOADS, Shape, grid, make_data, make_trainer, measure, measure_ranks, source_of
from .preparers import CHANGES, measure_change
from .preparers import COLUMNS as _CHANGES
from .present import LEFT, bars, grouped, lines, panels, save, show, tell
from .replay import record, replay_rows
from .runner import Case, Runner, benchmark, check_names, machine_line, write_csv
from .task_trace import TaskTrace

WORKERS = ("num_threads", "num_workers")
QUEUE_BATCHES = "queue_batches"  # memory of task graphs, in the largest batches of the workload
MEMORY = (QUEUE_BATCHES, "depth")
TRUSTED = 0.1  # error of a replay, against what was measured, up to which its other figures count
FED, BOUND = "fed", "0"  # trainers: a device that one thread cannot feed, and one that takes no time
_OF_A_CASE = ("graph", "workload", "source", "settings", "workers", "memory_batches", "train", "shape")
TAKES = 3  # of the traces; the middle one is replayed
_SCHEDULINGS = ("fixed_prefetch", "task_graphs")


@dataclass(frozen=True)
class PrepareBench:
    """Measure every source in turns, while a trainer takes what it prepares; then replay the measured task times.

    At the end each source's best settings feed a device that one worker cannot feed. Writes `rows.csv`, `prepare.csv`
    (medians), `changes.csv`, `replay.csv`, `prepare.png`, the graphs and the traces. Nothing is replayed where cases
    are left, or where neither of the schedulings that the replay compares is among the sources.

    Attributes:
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
        sample_ms: Time for which each sample of neighbours sleeps in addition, milliseconds: so more workers than
            cores can be seen side by side.
        reply_ms: Time after which the owner of every other part answers, milliseconds: neighbours and rows of these
            parts are then asked for, of threads that sleep; None: the store is read.
        num_parts, scope: Number of parts in the stores, and the scope of batches; see `PartitionDataModule`.
        num_ranks: Trainers, each a process of this machine that takes as many batches; above 1 sources must be of Ray,
            whose workers they share. Rows are sums over them.
        device_share: Time that the device to be fed takes per batch, divided by the time in which one thread prepares a
            batch.
        device_batches: Number of batches in such a measurement; it includes the wait for an epoch's first batch.
        replay_cores, replay_queue_batches: Numbers of cores, and sizes of memory in batches, of the machines in the
            replay.
        replay_sigmas: Values of sigma over which two-level scheduling is tuned in the replay.
        trace_threads: Largest number of concurrent threads for which task times are recorded. A machine with fewer
            cores is replayed with the times of as many threads, so that these include what threads cost each other in
            shared memory.
        changes: Any of "lost" and "joined": one of `change_workers` workers of Ray is killed, or one more starts, while
            they prepare; a measurement before and one after it.
    """

    graphs: Sequence[str]
    sources: Sequence[str]
    settings: Mapping[str, Mapping[str, Sequence[Any]]]
    workloads: Sequence[str] = tuple(WORKLOADS)
    train: Sequence[str | float] = (CPU, 0)
    fanouts: Sequence[int] = (15, 10)
    batch_size: int = 1024
    hidden_channels: int = 16
    num_negatives: int = 5
    num_batches: int = 24
    repeats: int = 3
    sample_ms: float = 0.0
    reply_ms: float | None = None
    num_parts: int = 4
    scope: str = "graph"
    num_ranks: int = 1
    device_share: float = 0.7
    device_batches: int = 96
    replay_cores: Sequence[int] = (1, 2, 8, 16, 64)
    replay_queue_batches: Sequence[int] = (1, 2, 4, 16, 64)
    replay_sigmas: Sequence[float] = (50,)
    trace_threads: int = 2
    changes: Sequence[str] = ()
    change_workers: int = 4
    seed: int = 0
    data_root: str | None = None

    def __post_init__(self):
        check_names("workloads", self.workloads, WORKLOADS)
        check_names("changes", self.changes, CHANGES)
        if self.change_workers < 2:
            raise ValueError(f"bench.change_workers must be at least 2, got {self.change_workers}")
        if not self.sample_ms >= 0:
            raise ValueError(f"bench.sample_ms must be >= 0, got {self.sample_ms}")
        if self.reply_ms is not None and (self.reply_ms < 0 or self.scope != "graph" or self.num_ranks > 1):
            raise ValueError(
                f"bench.reply_ms must be >= 0, with bench.scope=graph and bench.num_ranks=1, got {self.reply_ms}, "
                f"{self.scope} and {self.num_ranks}"
            )
        for trainer in self.train:
            if trainer != CPU and not (isinstance(trainer, int | float) and trainer >= 0):
                raise ValueError(f"bench.train must hold cpu, or milliseconds >= 0, got {trainer!r}")
        check_graphs(self.graphs, public_root(self.data_root), STORES, "power_law:NODES:EDGES:FEATURES")
        check_count("bench.num_ranks", self.num_ranks)
        if self.scope == "part" and self.num_parts < self.num_ranks:
            raise ValueError(
                f"bench.num_parts must be at least bench.num_ranks={self.num_ranks} with bench.scope=part, "
                f"got {self.num_parts}"
            )
        for name, options in self.cases:
            source = source_of(name, _plain(options, 1))
            if self.num_ranks > 1 and not isinstance(source, RayWorkers):
                raise ValueError(
                    f"bench.num_ranks={self.num_ranks} is measured where ranks share workers: "
                    f"set bench.sources=[ray], got {name}"
                )

    @property
    def cases(self) -> list[tuple[str, dict]]:
        """(source, settings) of all contenders."""
        return [(name, options) for name in self.sources for options in grid(self.settings.get(name, {}))]

    @property
    def shape(self) -> Shape:
        model = (self.hidden_channels, self.num_negatives, self.num_batches, self.scope, self.seed)
        return Shape(tuple(self.fanouts), self.batch_size, *model, self.sample_ms, self.reply_ms)

    def measure(self, runner: Runner) -> dict[str, list[dict]]:
        """Return {"rows": medians of the measurements, "replay": rows, "changes": rows of workers lost and joined}."""
        rows, replays, changes = [], [], []
        machines = (self.replay_cores, self.replay_queue_batches, self.replay_sigmas)
        for graph, workload in product(self.graphs, self.workloads):
            work = _Work(self, runner, graph, workload)
            found = work.rows()
            fed = work.feed(found)
            rows += found + fed
            changes += work.changes()
            if not runner.left and work.replayed:
                traces = _middle([work.traces(take) for take in range(TAKES)])
                replayed = replay_rows(traces, *machines, measured=partial(capacity, found + fed))
                replays += [{"graph": graph, "workload": workload} | row for row in replayed]
            write_csv(runner.folder / "prepare.csv", rows)
            write_csv(runner.folder / "replay.csv", replays)
        _print_tables(rows, replays, machine_line())
        for (graph, workload), same in grouped(changes, "graph", "workload").items():
            show(same, _CHANGES, f"{graph}, {workload}: a preparer lost, a preparer joined", machine_line())
        _draw(runner.folder / "prepare.png", rows, replays)
        return {"rows": rows, "replay": replays, "changes": changes}


run = benchmark(PrepareBench)


class _Work:
    """One workload on one graph: its rows, and the traces of its tasks before, between and after them."""

    def __init__(self, bench: PrepareBench, runner: Runner, graph: str, workload: str):
        self.bench, self.runner, self.graph, self.workload = bench, runner, graph, workload
        root = public_root(bench.data_root)
        self.store = cache(lambda: open_graph(graph, runner.folder / "graphs", bench.num_parts, root))
        self.traces = cache(self._record)
        self.replayed = not set(_SCHEDULINGS).isdisjoint(bench.sources)

    def rows(self) -> list[dict]:
        """Return the medians of each case under each trainer."""
        return self._medians(
            self._case(name, options, _name(trainer), trainer, repeat, self.bench.shape)
            for trainer, repeat, (name, options) in product(
                self.bench.train, range(self.bench.repeats), self.bench.cases
            )
        )

    def feed(self, found: list[dict]) -> list[dict]:
        """Return medians of each source, at its best for each number of workers, that feeds a device.

        The device takes `device_share` of the time in which one thread prepares a batch: one worker is too few.
        """
        bound = [row for row in found if row["train"] == BOUND]
        alone = [row for row in bound if row["workers"] == 1]
        if not alone:
            return []
        batch_ms = 1000 * min(row["seconds"] / row["batches"] for row in alone if row["source"] == alone[0]["source"])
        fastest = {(row["source"], row["settings"]) for row in map(best, grouped(bound, "source", "workers").values())}
        device_ms = round(self.bench.device_share * batch_ms, 2)
        shape = replace(self.bench.shape, num_batches=self.bench.device_batches)
        if self.replayed and not self.runner.is_over:
            self.traces(1)
        return self._medians(
            self._case(name, options, FED, device_ms, repeat, shape)
            for repeat, (name, options) in product(range(self.bench.repeats), self.bench.cases)
            if (name, _text(options)) in fastest
        )

    def changes(self) -> list[dict]:
        """Return a row for each change of the workers."""
        shape, workers = self.bench.shape, self.bench.change_workers

        def case(change: str) -> Case:
            key = {"graph": self.graph, "workload": self.workload, "change": change, "preparers": workers}
            return Case(
                {**key, "shape": _tag(shape)},
                lambda: measure_change(self.store(), self.workload, shape, workers, change),
            )

        return self.runner.rows(map(case, self.bench.changes), "changes.csv")

    def _medians(self, cases: Iterable[Case]) -> list[dict]:
        return medians(self.runner.rows(cases, say=_say))

    def _case(self, name: str, options: dict, train: str, trainer: str | float, repeat: int, shape: Shape) -> Case:
        key = {
            "graph": self.graph,
            "workload": self.workload,
            "source": name,
            "settings": _text(options),
            "workers": next((options[key] for key in WORKERS if key in options), ""),
            "memory_batches": next((options[key] for key in MEMORY if key in options), ""),
            "train": train,
            "repeat": repeat,
            "shape": _tag(shape) if self.bench.num_ranks == 1 else _tag(shape, self.bench.num_ranks),
        }
        return Case(key, partial(self._measure, name, options, trainer, shape))

    def _measure(self, name: str, options: dict, trainer: str | float, shape: Shape) -> dict:
        largest = 0
        if QUEUE_BATCHES in options:
            traces = (trace for of_cores in self.traces(0).values() for trace in of_cores.values())
            largest = max(batch.num_bytes for trace in traces for batch in trace.batches)
        source = source_of(name, _plain(options, largest))
        took = {"ranks": self.bench.num_ranks, "train_ms": None if trainer == CPU else trainer}
        if self.bench.num_ranks > 1:
            given = (self.store(), self.workload, shape, source, trainer, self.bench.num_ranks)
            return took | measure_ranks(*given)
        data = make_data(self.store(), self.workload, shape, source)
        step = make_trainer(self.store(), self.workload, shape, trainer)
        warm_up = source.batches_ahead + 2  # each buffer of the pool is fresh once
        try:
            measured = measure(data.train_dataloader(), step, shape.num_batches, warm_up)
        finally:
            data.teardown("fit")
        return took | measured

    def _record(self, take: int) -> dict[int, dict[int, TaskTrace]]:
        """Return the traces by cores and chunks of a hop, each recorded once by `trace_threads` or fewer."""
        folder = self.runner.folder / "traces" / f"{self.graph.replace(':', '-')}-{self.workload}"
        shape = replace(self.bench.shape, reply_ms=None)  # replies take no work of these cores
        traces: dict[tuple[int, int], TaskTrace] = {}
        by_cores: dict[int, dict[int, TaskTrace]] = {}
        for number in sorted({*self.bench.replay_cores, 1}):
            threads = min(number, self.bench.trace_threads)
            for chunks in sorted({1, TaskGraphs(number).num_chunks}):
                case = (threads, chunks)
                if case not in traces:
                    path = folder / f"{_tag(shape, *case)}-{take}.json"
                    traces[case] = record(self.store(), self.workload, shape, *case, path)
                by_cores.setdefault(number, {})[chunks] = traces[case]
        return by_cores


def _say(row: dict) -> None:
    names = ("workload", "source", "settings", "train", "seeds_per_s", "wait_share")
    tell("  ".join(f"{name}={row[name]}" for name in names), markup=False, highlight=False)


def _middle(takes: Sequence[dict[int, dict[int, TaskTrace]]]) -> dict[int, dict[int, TaskTrace]]:
    """Return of each trace the take whose tasks took the median of the time: a machine is not always as fast."""

    def middle(cores: int, chunks: int) -> TaskTrace:
        own = [take[cores][chunks] for take in takes]
        return sorted(own, key=lambda trace: sum(t.seconds for b in trace.batches for t in b.tasks))[len(own) // 2]

    return {cores: {chunks: middle(cores, chunks) for chunks in found} for cores, found in takes[0].items()}


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
        plain["queue_bytes"] = plain.pop(QUEUE_BATCHES) * largest_bytes
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
    """Return what trained in rows of one trainer."""
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
    "held_mib": ("held,\nMiB", ",.0f"),
    "parts": ("parts", "g"),
    "parts_read": ("of them\nread", "g"),
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
            title = f"{titles[train]} Medians; of several settings the best"
            show(_sources(same, capacities(own)), _SOURCES, title, caption)
        for train, same in by_trainer.items():
            pairs = _same_memory(same)
            if pairs and train != (FED,):
                title = f"{titles[train]} Both schedulings in as much memory, each tuned"
                show(pairs, _MEMORY, title, caption)
    for (graph, workload), same in grouped(replays, "graph", "workload").items():
        show(same, _REPLAY, _replay_title(graph, workload, same), caption)


def _sources(rows: list[dict], capacity: Mapping) -> list[dict]:
    """Return the best settings of each source and number of workers, compared with one worker and the device."""
    found = [best(same) for same in grouped(rows, "source", "workers").values()]
    alone = {row["source"]: row["seeds_per_s"] for row in found if row["workers"] == 1}
    over_one = [row["seeds_per_s"] / alone[row["source"]] if row["source"] in alone else None for row in found]
    return [
        row | {"over_one": over, "over_device": over_device(row, capacity)}
        for row, over in zip(found, over_one, strict=True)
    ]


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
