"""The terminal output of a run: progress bars, and the closing table, made from its events alone."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .. import events
from ..kernel_sets import running
from ..memory import format_bytes, format_seconds


class ProgressBars(Progress):
    """One bar for each name that reports, and one for kernels compiled meanwhile; none where the output is no terminal.

    Use as a context manager; call it as `bars(what, done, total)`.
    """

    _kernels: int | None = None

    def __init__(self, console: Console | None = None):
        console = console or Console(stderr=True)
        columns = TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._bar_of: dict[str, int] = {}

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Move the bar of `what` to `done` of `total` (None: unknown)."""
        if what not in self._bar_of:
            self._bar_of[what] = self.add_task(what, total=total)
        self.update(self._bar_of[what], completed=done, total=total)

    def __enter__(self) -> "ProgressBars":
        if not self.disable and running() is not None:
            self._kernels = self.add_task("compiling kernels, once", total=None, visible=False)
        return super().__enter__()

    def get_renderables(self):
        """Yield what is drawn; the bar of kernels is moved, or removed once they are compiled."""
        if self._kernels is not None:
            ahead = running()
            if ahead is None:
                self.remove_task(self._kernels)
                self._kernels = None
            elif ahead.total is not None:
                self.update(self._kernels, total=ahead.total, completed=ahead.done, visible=ahead.total > 0)
        yield from super().get_renderables()


def is_terminal() -> bool:
    """Whether the output is a terminal, where progress bars can be drawn."""
    return Console().is_terminal


def print_line(text: str) -> None:
    """Print one line of progress with the time of day, at once: for output to a file that is read during the run."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def print_text(text: str) -> None:
    """Print text that is neither wrapped nor marked up."""
    Console().print(text, soft_wrap=True, highlight=False, markup=False)


def print_facts(title: str, facts: dict) -> None:
    """Print a title and, where there is one, the text of each fact beside its name."""
    Console().print(title, style="bold", highlight=False, markup=False)
    for name, value in facts.items():
        if value not in (None, ""):
            print_text(f"  {name:<22} {value}")


@contextmanager
def stage_lines() -> Iterator[None]:
    """Print a line as each stage of this process begins."""
    process = os.getpid()
    events.on_stage = lambda name: print_line(name.replace("_", " ")) if os.getpid() == process else None
    try:
        yield
    finally:
        events.on_stage = None


def stage_rows(log: list[dict], predicted: dict[str, int]) -> list[dict]:
    """Return one row per stage of a log: the sum of its seconds, its largest peak, and the predicted bytes."""
    rows: dict[str, dict] = {}
    for event in log:
        if event["event"] != "stage":
            continue
        row = rows.setdefault(event["stage"], {"stage": event["stage"], "seconds": 0.0, "peak_bytes": 0})
        row["seconds"] += event["seconds"]
        row["peak_bytes"] = max(row["peak_bytes"], event["peak_bytes"])
        row["note"] = event.get("note", row.get("note", ""))
    for name, row in rows.items():
        row["predicted_bytes"] = predicted.get(name)
    return list(rows.values())


def write_summary(folder: str | os.PathLike, summary: dict, name: str = "summary.json") -> Path:
    """Write a summary into a run folder, whole or not at all."""
    path = Path(folder) / name
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(summary, indent=2, default=_plain) + "\n")
    os.replace(temporary, path)
    return path


def print_summary(summary: dict, console: Console | None = None) -> None:
    """Print the stages, the parts' quality, the results, and their paths: {"stages": rows, "facts": {title: value}}."""
    console = console or Console()
    stages = Table(title=str(summary.get("title", "run")), title_justify="left")
    for heading, justify in (("stage", "left"), ("seconds", "right"), ("peak memory", "right"), ("predicted", "right")):
        stages.add_column(heading, justify=justify)
    stages.add_column("note")
    for row in summary["stages"]:
        predicted = row.get("predicted_bytes")
        stages.add_row(
            row["stage"],
            format_seconds(row["seconds"]),
            format_bytes(row["peak_bytes"]),
            format_bytes(predicted) if predicted else "",
            row.get("note", ""),
        )
    console.print(stages)
    for title, value in summary["facts"].items():
        text = shown(value)
        # Not a table: a truncated path cannot be copied. No markup: a path may hold brackets.
        console.print(f"[bold]{title:<28}[/bold]", Text(text), soft_wrap=True, highlight=False)


def shown(value) -> str:
    """Return a fact of a summary as it is printed: numbers other than counts with four digits."""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _plain(value):
    """Return numpy's numbers as Python's, and other values without a JSON form as text."""
    return value.item() if isinstance(value, np.generic) else str(value)
