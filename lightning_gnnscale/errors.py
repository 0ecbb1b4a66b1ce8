"""The errors of this package. Bad arguments raise `ValueError`; everything else is a `GNNScaleError`."""

from numbers import Integral
from typing import Any


class GNNScaleError(Exception):
    """Base of every error that this package raises on its own account."""


class EdgeStreamError(GNNScaleError):
    """An edge source cannot be read as edges; the message names the path and the position."""


class PartitionStoreError(GNNScaleError):
    """A partition store is missing, incomplete, damaged or in use; the message says how to go on."""


class PlacementError(GNNScaleError):
    """A feature placement does not fit the store or the devices."""


class PlanError(GNNScaleError):
    """The graph, its parts or their training do not fit memory; the message says what is short and what would fit."""


class StrategyError(GNNScaleError):
    """The Trainer, the strategy and the DataModule do not fit together; the message names the remedy."""


def check_integer(name: str, value: Any, low: int) -> None:
    """Raise ValueError unless an argument is an integer of at least `low`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")


def check_count(name: str, value: Any) -> None:
    """Raise ValueError unless an argument is an integer of at least 1."""
    check_integer(name, value, 1)
