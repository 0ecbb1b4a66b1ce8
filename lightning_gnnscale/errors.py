"""The errors of this package. Bad arguments raise `ValueError`; everything else is a `GNNScaleError`."""

import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

# What numpy raises where a file is no .npy or .npz, or a damaged one.
UNREADABLE = (OSError, ValueError, EOFError, SyntaxError, TypeError, OverflowError, MemoryError, KeyError, RuntimeError)
UNREADABLE += (zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError)


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


def one_line_of(error: BaseException) -> str:
    """Return an error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def disk_errors(
    path: str | os.PathLike, doing: str, remedy: str = "", kind: type[GNNScaleError] = GNNScaleError
) -> Iterator[None]:
    """Turn the system's errors of a block, which may name no file, into one line of a `GNNScaleError`.

    Args:
        path: the file or folder that the block is about, for errors that name no file.
        doing: what cannot be done to it: "written".
        remedy: what to do about it: "free space, or give another scratch=".
        kind: the error that is raised.

    Raises:
        GNNScaleError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        detail = error.strerror or one_line_of(error)
        raise kind(f"{error.filename or path}: cannot be {doing}: {detail}{'; ' + remedy if remedy else ''}") from error
