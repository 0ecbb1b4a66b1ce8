"""Counts that a plan can be made from."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any


def check_integer(name: str, value: Any, low: int) -> None:
    """Raise ValueError unless an argument is an integer of at least `low`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")


def check_fanouts(fanouts: Any) -> None:
    """Raise ValueError unless fan-outs are integers of at least 1, or -1 for all neighbours, one a hop."""
    if not isinstance(fanouts, Sequence) or isinstance(fanouts, str):
        raise ValueError(f"fanouts must be a list like [25, 10], one a hop, got {fanouts!r}")
    for fanout in fanouts:
        if not isinstance(fanout, Integral) or isinstance(fanout, bool) or (fanout < 1 and fanout != -1):
            raise ValueError(
                f"fanouts must be integers of at least 1, or -1 for all, got {fanout!r} in {list(fanouts)}"
            )
