"""Results of benchmarks on disk: every row carries the machine and the versions that it was measured with."""

import csv
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGES = ("lightning-gnnscale", "numpy", "numba", "torch", "lightning", "torch-geometric", "pymetis", "kaminpar")


def machine() -> dict[str, str | int]:
    """Return CPU model, cores, memory, GPU and the versions of what the figures depend on, as plain values."""
    facts: dict[str, str | int] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": _memory_gib(),
        "gpu": _gpu(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = ""
    return facts


def machine_line(facts: Mapping | None = None) -> str:
    """Return the machine in one line, for a table's caption."""
    facts = machine() if facts is None else facts
    versions = ", ".join(f"{name} {facts[name]}" for name in PACKAGES if facts.get(name))
    gpu = f", {facts['gpu']}" if facts["gpu"] else ""
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB{gpu}; {versions}"


def mean_of(num_seeds: int) -> str:
    """Return what a table's title says of its seeds."""
    return f"mean of {num_seeds} seeds" if num_seeds > 1 else "one seed"


def write_csv(path: str | os.PathLike, rows: Iterable[Mapping], facts: Mapping | None = None) -> Path:
    """Write rows, each with the machine's columns at its end, whole or not at all.

    Args:
        path: the file; its folder is made where missing.
        rows: one mapping a row; a column that a row lacks stays empty.
        facts: columns for every row; None: `machine()`.

    Returns:
        The path.
    """
    path = Path(path)
    facts = machine() if facts is None else facts
    rows = [{**row, **facts} for row in rows]
    own = {name: None for row in rows for name in row if name not in facts}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, [*own, *facts])
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)
    return path


def read_rows(path: str | os.PathLike) -> list[dict[str, str]]:
    """Return the rows of a CSV, all values as text; none where there is no such file."""
    if not Path(path).is_file():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def append_row(path: str | os.PathLike, row: Mapping) -> None:
    """Write one more row of a CSV; all of its rows have the same columns."""
    new = not Path(path).is_file()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if new:
            writer.writeheader()
        writer.writerow(row)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> int:
    import psutil

    return round(psutil.virtual_memory().total / 2**30)


def _gpu() -> str:
    if "torch" not in sys.modules and not Path("/dev/nvidia0").exists():
        return ""  # the seconds that importing torch takes would be for nothing
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
