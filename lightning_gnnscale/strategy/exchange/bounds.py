"""SANCUS' bounds: when a process must send its rows again. Pure functions of epochs, versions and changes.

A version is the epoch in which the rows were last sent. All bounds agree that rows are sent in the first epoch and in
every epoch that is exact for another reason; `restart` says what the versions are then.
"""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import check_integer, short

NORMS = ("relative", "frobenius", "mean_abs")


class Bound:
    """Base of the bounds.

    Attributes:
        needs_change: the bound looks at values, so that only the owner of rows knows.
        initial_versions: the versions before the first epoch, one for each process; None: none are given.
    """

    needs_change = False
    initial_versions: list[int] | None = None

    def restart(self, epoch: int, sources: np.ndarray) -> np.ndarray:
        """Return the (num,) int64 versions of sources (ranks, or node ids) after all were sent in an epoch."""
        return np.full(len(sources), epoch, np.int64)

    def due(self, epoch: int, versions: np.ndarray) -> np.ndarray:
        """Return (num,) bool: which sources must send, by their versions alone."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class EpochFixed(Bound):
    """Send when the copies are more than max_age epochs old: every max_age + 1 epochs, all at once.

    Args:
        max_age: epochs, >= 0; 0 sends always.

    Source: SANCUS, Definition 1 and Algorithm 4.
    """

    def __init__(self, max_age: int = 1) -> None:
        self.max_age = checked_epochs("bound.max_age", max_age)

    def due(self, epoch: int, versions: np.ndarray) -> np.ndarray:
        return epoch - versions > self.max_age


class EpochAdaptive(EpochFixed):
    """Send when some process holds a copy older than max_age epochs; sources take turns.

    In bulk-synchronous training all copies of a block have one age, so versions start staggered: source j at
    -(j mod (max_age + 1)), after every exact exchange too.

    Args:
        max_age: epochs, >= 0.
        initial_versions: one for each rank, in place of the staggered ones, and no exact exchange in the first
            epoch: for tests and for a state that is known.

    Source: SANCUS, Definition 2 and Algorithm 5. Differs: staggered, since otherwise it is Definition 1 again.
    """

    def __init__(self, max_age: int = 1, initial_versions: list[int] | None = None) -> None:
        super().__init__(max_age)
        if initial_versions is not None and not _are_integers(initial_versions):
            raise ValueError(
                f"bound.initial_versions must be a list of integers, one for each rank, got {short(initial_versions)}"
            )
        self.initial_versions = initial_versions

    def restart(self, epoch: int, sources: np.ndarray) -> np.ndarray:
        return epoch - sources % (self.max_age + 1)


class VariationGap(Bound):
    """Send when the rows differ from what the receivers hold by more than max_gap.

    Ranks announce a step ahead who will send, by how the gap has grown since rows were sent: then no layer waits
    to learn of it. A sudden change is sent one step later.

    Args:
        max_gap: >= 0; 0 sends always.
        norm: "relative": Frobenius norm of the change over that of what is held (0 over 0 counts as 0);
            "frobenius": of the change alone, as the paper writes; "mean_abs": mean absolute change, as its code does.

    Source: SANCUS, Definition 3 and Algorithm 6. Differs: foretold.
    """

    needs_change = True

    def __init__(self, max_gap: float = 0.1, norm: str = "relative") -> None:
        self.max_gap = checked_number("bound.max_gap", max_gap)
        if norm not in NORMS:
            raise ValueError(f"bound.norm must be one of {', '.join(NORMS)}, got {short(norm)}")
        self.norm = norm

    def exceeded(self, fresh: Tensor, held: Tensor, by_row: bool, factor: Tensor | float = 1.0) -> Tensor:
        """Return whether rows changed too much: (num_rows,) bool by row, else one bool; NaN always does.

        Args:
            fresh, held: (num_rows, width).
            by_row: Whether each row is looked at by itself.
            factor: What the change is multiplied by: (num_rows,) by row, else one number.
        """
        if self.max_gap == 0:
            return fresh.new_ones(len(fresh) if by_row else (), dtype=torch.bool)
        dims = (1,) if by_row else (0, 1)
        if fresh.dtype.itemsize < 4:
            fresh, held = fresh.float(), held.float()
        change = fresh - held
        if self.norm == "mean_abs":
            # the mean of no rows is no change
            gap = change.abs().mean(dims) if change.numel() else change.abs().sum(dims)
        else:
            gap = change.square().sum(dims).sqrt()
        most = self.max_gap * held.square().sum(dims).sqrt() if self.norm == "relative" else self.max_gap
        return ~(gap * factor <= most)


BOUNDS: dict[str, type[Bound]] = {
    "epoch_fixed": EpochFixed,
    "epoch_adaptive": EpochAdaptive,
    "variation_gap": VariationGap,
}


def checked_number(name: str, value: Any) -> float:
    """Return a number.

    Raises:
        ValueError: not a number of at least 0.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not value >= 0:
        raise ValueError(f"{name} must be a number of at least 0, got {short(value)}")
    return float(value)


def checked_epochs(name: str, value: Any) -> int:
    """Return a number of epochs.

    Raises:
        ValueError: not an integer of at least 0.
    """
    check_integer(name, value, 0)
    return int(value)


def checked_epochs_or_share(name: str, value: Any) -> int | float:
    """Return a number of epochs, or a share of a run's epochs.

    Raises:
        ValueError: neither an integer of at least 0 nor a number between 0 and 1.
    """
    if isinstance(value, Integral) and not isinstance(value, bool) and value >= 0:
        return int(value)
    if isinstance(value, Real) and not isinstance(value, Integral) and 0 < value < 1:
        return float(value)
    raise ValueError(f"{name} must be a number of epochs, or a share of max_epochs between 0 and 1, got {short(value)}")


def _are_integers(values: Any) -> bool:
    if isinstance(values, str) or not isinstance(values, Sequence):
        return False
    return all(isinstance(value, Integral) and not isinstance(value, bool) for value in values)
