"""Tables and plot of the benchmark of preparation, from its rows alone."""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from .results import machine_line

TRUSTED = 0.1  # error of a replay, against what was measured, up to which its other figures count
_OF_A_CASE = ("graph", "workload", "source", "settings", "workers", "memory_batches", "train", "shape")
FED, BOUND = "fed", "0"  # trainers: a device that one thread cannot feed, and one that takes no time
_SCHEDULINGS = ("fixed_prefetch", "task_graphs")


def medians(rows: list[dict]) -> list[dict]:
    """Return one row for each case, of the medians over its repeats."""
    cases: dict[tuple, list[dict]] = {}
    for row in rows:
        cases.setdefault(tuple(row[name] for name in _OF_A_CASE), []).append(row)
    found = []
    for same in cases.values():
        columns = {name: [row[name] for row in same] for name in same[0] if name != "repeat"}
        plain = {name: values[0] for name, values in columns.items()}
        measured = {n: v for n, v in columns.items() if n not in _OF_A_CASE and not any(isinstance(x, str) for x in v)}
        found.append(plain | {name: round(statistics.median(v), 4) for name, v in measured.items()})
    return found


def best(rows: list[dict]) -> dict:
    """Return the row with the most seeds per second."""
    return max(rows, key=lambda row: row["seeds_per_s"])


def print_tables(console: Console, rows: list[dict], replays: list[dict], facts: Mapping) -> None:
    """Print what was measured, source by source and memory by memory, and what was replayed."""
    caption = machine_line(facts)
    for (graph, workload), own in _grouped(rows, "graph", "workload"):
        for same in _each(own, "train"):
            console.print(_sources(graph, workload, same, capacities(own), caption))
        for (train,), same in _grouped(own, "train"):
            table = _memory(graph, workload, same, caption)
            if table.row_count and train != FED:
                console.print(table)
    for (graph, workload), same in _grouped(replays, "graph", "workload"):
        console.print(_replay(graph, workload, same, caption))


def capacities(rows: list[dict]) -> dict[tuple[str, str], float]:
    """Return the seeds per second that were prepared where nothing trained, by source and settings."""
    return {(row["source"], row["settings"]): row["seeds_per_s"] for row in rows if row["train"] == BOUND}


def over_device(row: dict, capacity: Mapping[tuple[str, str], float]) -> float | None:
    """Return what was prepared where nothing trained, over what the row's simulated device takes; None without one."""
    can = capacity.get((row["source"], row["settings"]))
    if row["train_ms"] in ("", 0) or can is None:
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


def _sources(graph: str, workload: str, rows: list[dict], capacity: Mapping, caption: str) -> Table:
    """The best settings of each source and number of workers."""
    title = f"{graph}, {workload}; trainer: {trainer_name(rows)}. Medians; of several settings the best"
    table = Table(title=title, caption=caption, box=SIMPLE, title_justify="left")
    for name in ("source", "settings"):
        table.add_column(name)
    columns = ("seeds\nper second", "over one\nworker", "trainer\nwaited", "capacity\nover device", "CPU\nuse")
    for name in (*columns, "ready,\nmost MiB"):
        table.add_column(name, justify="right")
    alone = {row["source"]: row["seeds_per_s"] for row in map(best, _each(rows, "source", "workers"))
             if row["workers"] == 1}  # fmt: skip
    for same in _each(rows, "source", "workers"):
        row = best(same)
        one, share = alone.get(row["source"]), over_device(row, capacity)
        table.add_row(
            row["source"],
            row["settings"],
            f"{row['seeds_per_s']:,.0f}",
            f"{row['seeds_per_s'] / one:.2f}x" if one else "",
            f"{row['wait_share']:.1%}",
            f"{share:.2f}x" if share else "",
            f"{row['cpu_share']:.0%}",
            "" if row["peak_queue_mib"] == "" else f"{row['peak_queue_mib']:,.0f}",
        )
    return table


def _memory(graph: str, workload: str, rows: list[dict], caption: str) -> Table:
    """Both schedulings in as much memory."""
    title = f"{graph}, {workload}; trainer: {trainer_name(rows)}. Both schedulings in as much memory, each tuned"
    table = Table(title=title, caption=caption, box=SIMPLE, title_justify="left")
    table.add_column("batches ready\nor under way", justify="right")
    for name in (
        "fixed prefetch,\nseeds per second",
        "settings",
        "task graphs,\nseeds per second",
        "settings",
        "ratio",
    ):
        table.add_column(name, justify="left" if name == "settings" else "right")
    sizes = sorted({row["memory_batches"] for row in rows if row["memory_batches"] != ""})
    for most in sizes:
        pair = []
        for source in _SCHEDULINGS:
            known = [row for row in rows if row["source"] == source and row["memory_batches"] != ""]
            fitting = [row for row in known if row["memory_batches"] <= most]
            pair += [best(fitting)] if fitting else []
        if len(pair) == 2:
            cells = [cell for row in pair for cell in (f"{row['seeds_per_s']:,.0f}", row["settings"])]
            table.add_row(f"{most:g}", *cells, f"{pair[1]['seeds_per_s'] / pair[0]['seeds_per_s']:.2f}x")
    return table


def replay_error(rows: list[dict]) -> float | None:
    """Return the largest error of a replay where it was measured, None where nothing was."""
    errors = [abs(row[f"{name}_error"]) for row in rows for name in _SCHEDULINGS if row[f"{name}_error"] != ""]
    return max(errors, default=None)


def _replay(graph: str, workload: str, rows: list[dict], caption: str) -> Table:
    error = replay_error(rows)
    if error is None:
        verdict = "never measured here: nothing to hold it against"
    else:
        counts = "within" if error <= TRUSTED else "NOT within"
        verdict = f"it is off by at most {error:.1%} of what was measured, {counts} the {TRUSTED:.0%} for it to count"
    title = (
        f"{graph}, {workload}: a REPLAY of measured task times, no measurement; the trainer takes no time.\n"
        f"Shared caches and memory of more cores are not modelled; {verdict}"
    )
    table = Table(title=title, caption=caption, box=SIMPLE, title_justify="left")
    heads = ("cores", "batches ready\nor under way", "fixed prefetch,\nseeds per second", "settings", "error")
    for name in (*heads, "task graphs,\nseeds per second", "settings", "error", "ratio"):
        table.add_column(name, justify="left" if name == "settings" else "right")
    for row in rows:
        cells = []
        for name in _SCHEDULINGS:
            off = row[f"{name}_error"]
            cells += [f"{row[f'{name}_seeds_per_s']:,.0f}", row[f"{name}_settings"], "" if off == "" else f"{off:+.1%}"]
        table.add_row(f"{row['replayed_cores']:g}", f"{row['queue_batches']:g}", *cells, f"{row['ratio']:.2f}x")
    return table


def _grouped(rows: list[dict], *names: str) -> Iterator[tuple[tuple, list[dict]]]:
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    yield from found.items()


def _each(rows: list[dict], *names: str) -> Iterator[list[dict]]:
    return (same for _, same in _grouped(rows, *names))


def draw(path: Path, rows: list[dict], replays: list[dict]) -> None:
    """Draw, for each graph and workload, what each source can prepare, and the replays against cores."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(_grouped(replays, "graph", "workload"))
    figure = Figure(figsize=(12, 3.4 * len(cases) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    for place, ((graph, workload), replayed) in enumerate(cases):
        left, right = (figure.add_subplot(len(cases), 2, 2 * place + side) for side in (1, 2))
        own = [row for row in rows if (row["graph"], row["workload"], row["train"]) == (graph, workload, "0")]
        shown = [best(same) for same in _each(own, "source", "workers")]
        bars = left.barh([f"{r['source']}, {r['workers']}" for r in shown], [row["seeds_per_s"] for row in shown])
        left.bar_label(bars, fmt="{:,.0f}", padding=3)
        left.invert_yaxis()
        left.margins(x=0.2)
        left.set_title(f"{graph}, {workload}: measured, best settings, by workers", fontsize=9)
        left.set_xlabel("seeds per second, nothing trains")
        for (memory,), same in _grouped(replayed, "queue_batches"):
            cores = [row["replayed_cores"] for row in same]
            speeds = {name: [row[f"{name}_seeds_per_s"] for row in same] for name in _SCHEDULINGS}
            (line,) = right.plot(cores, speeds["task_graphs"], marker="o", label=f"task graphs, {memory:g} batches")
            style = {"linestyle": "--", "color": line.get_color()}
            right.plot(cores, speeds["fixed_prefetch"], label=f"fixed prefetch, {memory:g}", **style)
        right.set_xscale("log", base=2)
        right.set_yscale("log")
        right.legend(fontsize=6)
        right.set_title("replay of measured task times", fontsize=9)
        right.set_xlabel("cores")
    figure.savefig(path, dpi=120)
