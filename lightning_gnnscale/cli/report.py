"""`gnnscale report RUN ...`, the report of a run again or of several; and the end of a sweep: its table and report."""

import csv
import sys
from pathlib import Path

from omegaconf import DictConfig
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..errors import GNNScaleError
from ..memory import format_bytes, format_seconds
from ..report.run_files import read_summary, read_words
from ..report.terminal import print_text
from .errors import UsageError


def run(config: DictConfig) -> None:
    """Write the report and print its path; runs that ended before training are left out with a warning."""
    from ..report.page import write_report  # plotly and Jinja, which a sweep without runs does without

    folders = [str(config.runs)] if isinstance(config.runs, str | int) else [str(one) for one in config.runs]
    if not folders:
        raise UsageError("runs must name at least one run folder: gnnscale report runs/demo/2026-01-31_12-00-00")
    runs = [job for folder in folders for job in _jobs(Path(folder))]
    # A missing folder was mistyped; one without records belongs to a run that ended before training.
    empty = [run for run in runs if run.is_dir() and not _has_records(run)]
    if len(empty) < len(runs):
        for run in empty:
            print(f"gnnscale: warning: {run}: left out, it holds no records of a run", file=sys.stderr)
        runs = [run for run in runs if run not in empty]
    print(write_report(runs, config.output).resolve())


def _has_records(folder: Path) -> bool:
    return any(
        (folder / name).is_file() and (folder / name).stat().st_size for name in ("events.jsonl", "summary.json")
    )


def _jobs(folder: Path) -> list[Path]:
    """Return the runs of a folder: itself, or those of a sweep, in numbered folders below it."""
    if _has_records(folder):
        return [folder]
    jobs = [path for path in folder.glob("*") if path.name.isdecimal() and (path / "events.jsonl").exists()]
    return sorted(jobs, key=lambda path: int(path.name)) or [folder]


TABLE = "sweep.csv"
FAILED = "failed.txt"  # the reason why a job failed


def read_jobs(folder: Path) -> list[dict]:
    """Return one row for each job of a sweep's folder, in order.

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
            print_text(f"job {row['job']} failed: {row['failed']}")
    print_text(f"table: {folder / TABLE}")
    ended = [row["folder"] for row in rows if not row["failed"]]
    if ended:
        from ..report.page import write_report

        try:
            print_text(f"report: {write_report(ended, folder / 'report.html')}")
        except GNNScaleError as error:
            print_text(f"no report: {error}")
