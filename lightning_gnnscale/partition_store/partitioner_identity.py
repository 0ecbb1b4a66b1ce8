"""What identifies a partitioner: stores are made again when it changes."""

import functools
import json
import types
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from ..edge_stream import EdgeStream
from ..errors import check_integer
from ..partitioner import Partitioning, partition
from ..partitioner.partition import DEFAULT_METHOD
from ..partitioner.registry import decisive_options
from .inputs import identity

_PLAIN = bool | int | float | str | None
_CANNOT = (
    "{}, so a store could be taken for that of another; use a function of a module's top level, or a partial of one "
    "with plain arguments, or give it a text as attribute fingerprint"
)


def describe_partitioner(partitioner: str | Callable) -> Any:
    """Return plain values that identify a partitioner by what decides its result.

    A function that holds no variables of another one counts by its name, a partial also by its arguments (one of
    `gs.partition` by those that decide the result), an object by its type and attributes. A text as attribute
    `fingerprint` replaces all of this: change the text when you change the function's code.

    Raises:
        ValueError: something in it cannot be distinguished from another of its kind.
    """
    if isinstance(partitioner, str):
        return partitioner
    try:
        return _plain("partitioner", _decisive(partitioner))
    except RecursionError:
        raise ValueError(_CANNOT.format(f"partitioner: {type(partitioner).__name__} holds itself")) from None


def _decisive(partitioner: Callable) -> Callable:
    """Return a partial of `gs.partition` without options that only decide where, how fast or how visibly it works."""
    if not isinstance(partitioner, functools.partial) or partitioner.func is not partition or partitioner.args:
        return partitioner
    given = {key: value for key, value in partitioner.keywords.items() if key not in ("progress", "evaluate")}
    return functools.partial(partition, **decisive_options(given.get("method", DEFAULT_METHOD), given, defaults=False))


def registered_method(partitioner: str | Callable) -> tuple[str, dict] | None:
    """Return the registered method that a partitioner is, and its options; None of a callable of the user's own."""
    if isinstance(partitioner, str):
        return partitioner, {}
    if isinstance(partitioner, functools.partial) and partitioner.func is partition and not partitioner.args:
        return partitioner.keywords.get("method", DEFAULT_METHOD), dict(partitioner.keywords)
    return None


def made_for_machines(partitioner: str | Callable) -> int:
    """Return the number of machines that a registered method makes parts for; 1: for any."""
    return (registered_method(partitioner) or ("", {}))[1].get("num_machines") or 1


def with_machines(partitioner: str | Callable, num_machines: int) -> Callable:
    """Return a partitioner that makes parts for so many machines.

    Raises:
        ValueError: it is a callable of the user's own.
    """
    check_integer("num_machines", num_machines, 1)
    known = registered_method(partitioner)
    if known is None:
        raise ValueError(
            f"num_machines={num_machines} goes with a registered method, got partitioner={method_name(partitioner)}: "
            "register it by gs.register_partitioner, or let it give num_machines to gs.partition"
        )
    return functools.partial(partition, **{"method": known[0], **known[1], "num_machines": num_machines})


def method_name(partitioner: str | Callable | None) -> str:
    """Return a partitioner's name for messages: a method's, or that of a callable."""
    if partitioner is None or isinstance(partitioner, str):
        return partitioner or ""
    method = getattr(partitioner, "keywords", {}).get("method")
    return method or getattr(partitioner, "__name__", type(partitioner).__name__)


def _plain(name: str, value: Any) -> Any:
    """Return JSON that is equal for two values only where they are alike."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(getattr(value, "fingerprint", None), str):
        return ["fingerprint", value.fingerprint]
    if isinstance(value, EdgeStream):
        return ["stream", value.fingerprint()]
    if isinstance(value, Partitioning):  # its seconds differ from run to run, and decide nothing
        return ["partitioning", identity(value.part_id), value.num_parts, value.method, value.seed]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "fciub":
        return ["array", identity(value)]
    if isinstance(value, Mapping):
        pairs = [[_plain(name, key), _plain(f"{name}[{key!r}]", item)] for key, item in value.items()]
        return ["mapping", *sorted(pairs, key=json.dumps)]
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray):
        items = [_plain(name, item) for item in value]
        return ["sequence", *items] if isinstance(value, Sequence) else ["set", *sorted(items, key=json.dumps)]
    if isinstance(value, functools.partial):
        return ["partial", *(_plain(name, part) for part in (value.func, value.args, value.keywords))]
    if isinstance(value, types.MethodType):
        return ["method", value.__name__, _plain(name, value.__self__)]
    named = getattr(value, "__qualname__", None)
    if named is None and type(value).__module__ != "builtins" and hasattr(value, "__dict__"):
        return ["object", _name_of(type(value)), _plain(name, vars(value))]
    if named is None or "<lambda>" in named or getattr(value, "__closure__", None):  # which holds what no name shows
        what = f"{name}: two objects of type {_name_of(type(value))}" if named is None else f"{name}: two {named}"
        raise ValueError(_CANNOT.format(f"{what} cannot be distinguished"))
    return ["name", _name_of(value)]


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
