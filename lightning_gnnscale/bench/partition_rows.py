"""Rows of the partitioner benchmark: appended as they are measured, read again by the run that goes on."""

import csv
import os
from pathlib import Path

from ..errors import GNNScaleError
from .results import machine

KEY = ("graph", "method", "parts", "settings")
MEASURED = (
    "num_nodes",
    "num_edges",
    "edge_cut_ratio",
    "replication_factor",
    "node_balance",
    "edge_balance",
    "volume_balance",
    "train_balance",
    "val_balance",
    "test_balance",
    "components",
    "largest_part_bytes",
    "seconds",
    "seconds_median",
    "cpu_seconds",
    "million_edges_per_s",
    "peak_bytes",
    "bytes_a_node",
    "resident_bytes",
)
_DESCRIBED, _TOLD = (
    ("family", "partitioner", "options", "balance", "cores_a_case"),
    ("broken", "phases", "notes", "error"),
)
COLUMNS = (*KEY, *_DESCRIBED, "seed", *MEASURED, *_TOLD)
_NUMBERS = ("parts", "seed", *MEASURED)


class RowFile:
    """A CSV of finished cases; every row carries the machine that it was measured on.

    Args:
        path: the file; its folder is made where missing. A last line that was cut short is dropped.
        again: what is measured again although there is a row: "none", "failed" or "all".

    Attributes:
        rows: one dict a case; columns in `MEASURED` are numbers, or None where the case failed; `broken` names the
            balance constraints that the method broke.

    Raises:
        GNNScaleError: the file has other columns.
    """

    def __init__(self, path: str | os.PathLike, again: str = "none"):
        if again not in ("none", "failed", "all"):
            raise ValueError(f"bench.again must be one of none, failed, all, got {again!r}")
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._facts = machine()
        self._columns = [*COLUMNS, *self._facts]
        self.rows = [row for row in self._read() if again == "none" or (again == "failed" and not row["error"])]

    def find(self, key: dict) -> dict | None:
        """Return the latest row with these values of KEY, or None."""
        return next((row for row in reversed(self.rows) if all(row[name] == key[name] for name in KEY)), None)

    def append(self, row: dict) -> dict:
        """Add a row to the file, flushed to the disk, and return it."""
        values = {name: row.get(name) for name in COLUMNS} | self._facts
        written = {name: "" if value is None else str(value) for name, value in values.items()}
        new = not self.path.is_file()
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            if new:
                writer.writeheader()
            writer.writerow(written)
            file.flush()
            os.fsync(file.fileno())
        self.rows.append({name: _parse(name, value) for name, value in written.items()})
        return self.rows[-1]

    def _read(self) -> list[dict]:
        if not self.path.is_file():
            return []
        whole = self.path.read_bytes()
        kept = whole[: whole.rfind(b"\n") + 1]
        if len(kept) < len(whole):
            self.path.write_bytes(kept)
        if not kept:
            self.path.unlink()
            return []
        with open(self.path, newline="") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames != self._columns:
                raise GNNScaleError(
                    f"{self.path} has other columns than this version writes: move it, or give another hydra.run.dir="
                )
            return [{name: _parse(name, value) for name, value in row.items()} for row in reader]


def _parse(name: str, value: str):
    if name not in _NUMBERS:
        return value
    if value == "":
        return None
    return int(value) if value.lstrip("-").isdigit() else float(value)
