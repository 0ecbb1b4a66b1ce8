"""The closing table of a run, made from its events alone."""

import json
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..units import format_bytes, format_seconds


def stage_rows(events: list[dict], predicted: dict[str, int]) -> list[dict]:
    """Return one row per stage: the sum of its seconds, its largest peak, and the prediction beside it.

    Args:
        events: Events of a run, see `events.py`.
        predicted: Predicted bytes for each stage, for example `plan.host_peak_bytes`.
    """
    rows: dict[str, dict] = {}
    for event in events:
        if event["event"] != "stage":
            continue
        row = rows.setdefault(event["stage"], {"stage": event["stage"], "seconds": 0.0, "peak_bytes": 0})
        row["seconds"] += event["seconds"]
        row["peak_bytes"] = max(row["peak_bytes"], event["peak_bytes"])
        row["note"] = event.get("note", row.get("note", ""))
    for name, row in rows.items():
        row["predicted_bytes"] = predicted.get(name)
    return list(rows.values())


def write_summary(folder: str | os.PathLike, summary: dict) -> Path:
    """Write `summary.json` into a run folder, whole or not at all."""
    path = Path(folder) / "summary.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(summary, indent=2, default=str) + "\n")
    os.replace(temporary, path)
    return path


def print_summary(summary: dict, console: Console | None = None) -> None:
    """Print the stages, the parts' quality, the results, and where they lie.

    Args:
        summary: {"stages": rows of `stage_rows`, "facts": {title: text}}.
    """
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
    for title, text in summary["facts"].items():
        # Not a table: a path that is cut cannot be copied.
        console.print(f"[bold]{title:<28}[/bold]", text, soft_wrap=True, highlight=False)
