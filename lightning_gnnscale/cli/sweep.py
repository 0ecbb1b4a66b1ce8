"""The end of a sweep (`--multirun`): one table of its jobs, from the files in their folders."""

import csv
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..errors import GNNScaleError
from ..memory import format_bytes, format_seconds
from ..report.run_files import read_summary, read_words

TABLE = "sweep.csv"
FAILED = "failed.txt"  # the reason why a job failed


def read_jobs(folder: Path) -> list[dict]:
    """Return one row for each job of a sweep, in order.

    Args:
        folder: The sweep's folder, with a folder for each job that holds `summary.json`, or why it failed.

    Returns:
        `job`, `overrides` ({key: value} of what was swept over), `metrics`, `epochs`, `train_s`, `training_peak_bytes`,
        `failed` ("" where it has not), `folder`.
    """
    found = [one for one in folder.iterdir() if one.is_dir() and (one / ".hydra" / "overrides.yaml").is_file()]
    rows = []
    for one in sorted(found, key=lambda path: (len(path.name), path.name)):
        words = read_words(one / ".hydra" / "overrides.yaml")
        path = one / "summary.json"
        summary = read_summary(path) if path.is_file() else {}
        why = one / FAILED
        failed = why.read_text().strip() if why.is_file() else "" if summary else "no summary: it was ended"
        rows.append(
            {
                "job": one.name,
                "overrides": {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words)},
                "metrics": summary.get("metrics", {}),
                "epochs": summary.get("epochs"),
                "train_s": next((row["seconds"] for row in summary.get("stages", []) if row["stage"] == "train"), None),
                "training_peak_bytes": summary.get("training_peak_bytes"),
                "failed": failed,
                "folder": str(one),
            }
        )
    swept = {key for row in rows for key in row["overrides"]}
    same = {key for key in swept if len({row["overrides"].get(key) for row in rows}) == 1 and len(rows) > 1}
    for row in rows:
        row["overrides"] = {key: value for key, value in row["overrides"].items() if key not in same}
    return rows


def end_sweep(folder: Path) -> None:
    """Print the table of a sweep, and write it as `sweep.csv` into its folder, beside a report of its runs."""
    rows = read_jobs(folder)
    if not any(row["metrics"] or row["failed"] for row in rows):  # a command without summaries
        return
    keys, metrics = (list(dict.fromkeys(key for row in rows for key in row[name])) for name in ("overrides", "metrics"))
    with open(folder / TABLE, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["job", *keys, *metrics, "epochs", "train_s", "training_peak_bytes", "failed", "folder"])
        for row in rows:
            values = [row["overrides"].get(key) for key in keys] + [row["metrics"].get(name) for name in metrics]
            ends = [row[name] for name in ("epochs", "train_s", "training_peak_bytes", "failed", "folder")]
            writer.writerow([row["job"], *values, *ends])
    table = Table(title="sweep", title_justify="left", box=SIMPLE)
    for heading in ("job", *keys, *metrics, "epochs", "train", "peak"):
        table.add_column(heading, overflow="fold")
    scores = [name for name in metrics if "loss" not in name]
    best = {name: max(row["metrics"][name] for row in rows if name in row["metrics"]) for name in scores}
    for row in rows:
        values = [row["metrics"].get(name) for name in metrics]
        shown = ["" if value is None else f"{value:.4f}" for value in values]
        bold = [name in best and value == best[name] for name, value in zip(metrics, values, strict=True)]
        shown = [f"[bold]{text}[/bold]" if is_best else text for text, is_best in zip(shown, bold, strict=True)]
        seconds, peak = row["train_s"], row["training_peak_bytes"]
        table.add_row(
            row["job"],
            *(str(row["overrides"].get(key, "")) for key in keys),
            *shown,
            "failed" if row["failed"] else str(row["epochs"] or ""),
            "" if seconds is None else format_seconds(seconds),
            "" if not peak else format_bytes(peak),
        )
    Console().print(table)
    for row in rows:
        if row["failed"]:
            _tell(f"job {row['job']} failed: {row['failed']}")
    _tell(f"table: {folder / TABLE}")
    ended = [row["folder"] for row in rows if not row["failed"]]
    if ended:
        from ..report.page import write_report  # plotly and Jinja, which nothing before needs

        try:
            _tell(f"report: {write_report(ended, folder / 'report.html')}")
        except GNNScaleError as error:
            _tell(f"no report: {error}")


def _tell(text: str) -> None:
    Console().print(text, soft_wrap=True, highlight=False, markup=False)
