"""`gnnscale report RUN [RUN ...]`: the page of a run made anew, or of several side by side."""

from pathlib import Path

from omegaconf import DictConfig

from ..report.page import write_report
from .errors import UsageError


def run(config: DictConfig) -> None:
    """Write the page, and say where.

    Raises:
        UsageError: no run is named.
        GNNScaleError: a folder is none of a run, or the page cannot be written.
    """
    folders = [str(config.runs)] if isinstance(config.runs, str | int) else [str(one) for one in config.runs]
    if not folders:
        raise UsageError("runs must name at least one run folder: gnnscale report runs/demo/2026-01-31_12-00-00")
    runs = [job for folder in folders for job in _jobs(Path(folder))]
    print(write_report(runs, config.output))


def _jobs(folder: Path) -> list[Path]:
    """Return the runs of a folder: itself, or those of a sweep, which lie below it under their numbers."""
    if (folder / "events.jsonl").exists() or (folder / "summary.json").exists():
        return [folder]
    jobs = [path for path in folder.glob("*") if path.name.isdecimal() and (path / "events.jsonl").exists()]
    return sorted(jobs, key=lambda path: int(path.name)) or [folder]
