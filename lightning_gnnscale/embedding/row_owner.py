"""The rows that one process steps: read with the time of the read, stepped by the gradients of all ranks together."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..triton_kernels.gather_rows import gather_rows
from .optimizers import SparseAdam, SparseSGD, sum_duplicates


class Pushed(NamedTuple):
    """What one process pushes of a step.

    Attributes:
        rows: (num,) int64 rows of the owner, those of its first logical rank first; distinct within a logical rank.
        gradients: (num, dim).
        since: Steps that the rows had seen when they were read for this step; -1: all, which is not counted.
    """

    rows: np.ndarray
    gradients: np.ndarray
    since: int = -1


class RowOwner:
    """Rows with their optimizer, in memory that other processes may map.

    A step adds up the gradients of a row in the order of the logical ranks, and steps the row once, so that its bits
    depend neither on which process computed them nor on when they came.

    Args:
        arrays: "rows", and with Adam "moments" and "counts"; changed in place.
        optimizer: Steps the rows.
        clock: Steps so far.
        watched: Whether `changed` and `among` are asked, and age is counted: takes 5 bytes a row.

    Attributes:
        clock: Steps so far; a row that was read at a clock has seen the steps up to it.
        stale_rows: Rows that were used though a step had changed them since they were read.
        greatest_age: Most steps that such a row had missed.
    """

    def __init__(
        self, arrays: dict[str, np.ndarray], optimizer: SparseAdam | SparseSGD, clock: int = 0, watched: bool = False
    ):
        self._arrays, self.optimizer, self.clock = arrays, optimizer, clock
        self._stepped = np.zeros(len(arrays["rows"]) if watched else 0, np.int32)  # clock after a row's last step
        self._marked = np.zeros(len(self._stepped), bool)  # while `among` compares
        self.stale_rows = self.greatest_age = 0

    def read(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return (num, dim) rows; rows: (num,) int64."""
        return gather_rows(self._arrays["rows"], rows, out)

    def changed(self, rows: np.ndarray, since: int) -> np.ndarray:
        """Return the positions of those rows that a step has changed since a clock; rows: (num,) int64."""
        return np.flatnonzero(self._stepped[rows] > since)

    def among(self, rows: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
        """Return (num,) bool, which of some rows are among others; rows: (num,) int64, others: arrays of such."""
        for one in others:
            self._marked[one] = True
        found = self._marked[rows]
        for one in others:
            self._marked[one] = False
        return found

    def step(self, pushed: Sequence[Pushed], goes_on: bool = False) -> None:
        """Step the rows by what each process pushed, in the order of the processes.

        Args:
            pushed: By process.
            goes_on: It is of the step before, and of other rows than that has stepped.
        """
        for one in pushed:
            if one.since >= 0 and len(self._stepped):
                missed = self._stepped[one.rows] > one.since
                if missed.any():
                    self.stale_rows += int(np.count_nonzero(missed))
                    self.greatest_age = max(self.greatest_age, self.clock - one.since)
        self.clock += not goes_on
        whole = [one for one in pushed if len(one.rows)] or list(pushed[:1])
        rows, gradients = whole[0].rows, whole[0].gradients
        if len(whole) > 1:
            rows, gradients = np.concatenate([one.rows for one in whole]), np.concatenate([one[1] for one in whole])
        rows, gradients = sum_duplicates(rows, gradients)
        arrays = self._arrays
        self.optimizer.apply(rows, gradients, arrays["rows"], arrays.get("moments"), arrays.get("counts"), self.clock)
        if len(self._stepped):
            self._stepped[rows] = self.clock
