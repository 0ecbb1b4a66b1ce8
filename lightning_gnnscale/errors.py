"""The errors of this package. Bad arguments raise `ValueError`; everything else is a `GNNScaleError`."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from os import PathLike
from typing import Any


class GNNScaleError(Exception):
    """Base of every error that this package raises on its own account."""


class EdgeStreamError(GNNScaleError):
    """An edge source cannot be read as edges; the message names the path and the position."""


class PartitionStoreError(GNNScaleError):
    """A partition store is missing, incomplete, damaged or in use; the message says how to go on."""


class PlacementError(GNNScaleError):
    """A feature placement does not fit the store or the devices."""


class StrategyError(GNNScaleError):
    """The Trainer, the strategy and the DataModule do not fit together; the message names the remedy."""


class CheckpointError(GNNScaleError):
    """A checkpoint is missing, damaged, of another model or not to be trusted, or cannot be written."""


def check_integer(name: str, value: Any, low: int) -> None:
    """Raise ValueError unless an argument is an integer of at least `low`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")


def check_count(name: str, value: Any) -> None:
    """Raise ValueError unless an argument is an integer of at least 1."""
    check_integer(name, value, 1)


@contextmanager
def disk_errors_told(
    path: str | PathLike, kind: type[GNNScaleError] = GNNScaleError, remedy: str = "run the same command again"
) -> Iterator[None]:
    """Turn what the system says of a failed read or write into one line with a path.

    Args:
        path: what is being written, for errors that name no file (a full disk, a failed flush).
        kind: the error that is raised.
        remedy: how to go on, the end of the line.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full; free space and" if full else f"{error.strerror or error};"
        raise kind(f"{error.filename or path}: {what} {remedy}") from error
