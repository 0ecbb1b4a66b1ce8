"""What an epoch of batches has read from the disk, beside what its batches used of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..memory import disk_read_bytes
from ..partition_store.features import Column
from ..partition_store.planned_reads import bytes_read
from ..sampler.minibatch import MiniBatch
from .row_reads import RowReads


@dataclass
class EpochReads:
    """Counts while an epoch is under way.

    Attributes:
        row_bytes: Bytes of a row as it is stored.
        disk: What the process had read from the disk at first; None: unknown.
        planned: What planned reads had taken from files at first.
        rows: Rows of batches so far.
    """

    row_bytes: float
    disk: int | None
    planned: int
    rows: int = 0

    @classmethod
    def begin(cls, columns: Sequence[Column]) -> "EpochReads":
        """Begin to count; columns: those of the store whose rows are read ahead."""
        row_bytes = sum(column.nbytes / max(1, column.num_rows) for column in columns)
        return cls(row_bytes, disk_read_bytes(), bytes_read.total)

    def add(self, batch: MiniBatch) -> None:
        """Count a batch that is handed over."""
        self.rows += batch.num_nodes

    def end(self, reads: RowReads, passes: float | None) -> dict[str, Any]:
        """Return the counts of an epoch: bytes of rows and of all else that were read, and of rows in batches.

        Args:
            reads: How rows were read.
            passes: How often a sweep went through the table; None: there was none.
        """
        feature_bytes, disk = bytes_read.total - self.planned, disk_read_bytes()
        told = {"how": "swept" if reads.is_swept else reads.how, "rows": self.rows, "feature_bytes": feature_bytes}
        told |= {"used_bytes": int(self.rows * self.row_bytes)}
        if disk is not None and self.disk is not None:
            told["disk_bytes"] = disk - self.disk
        if reads.predicted_bytes is not None:
            told["predicted_bytes"] = reads.predicted_bytes
        return told if passes is None else told | {"passes": round(passes, 2)}
