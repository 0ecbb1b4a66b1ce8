"""`gnnscale report RUN [RUN ...]`: write the report of a run again, or of several side by side."""

import sys
from pathlib import Path

from omegaconf import DictConfig

from ..report.page import write_report
from .errors import UsageError


def run(config: DictConfig) -> None:
    """Write the report and print its path; runs that ended before training are left out with a warning.

    Raises:
        UsageError: no run is named.
        GNNScaleError: no folder is a run's, or the report cannot be written.
    """
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
