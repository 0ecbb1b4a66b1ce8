"""What tells one partitioner from another: stores are made again when it changes."""

import functools
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from ..edge_stream import EdgeStream
from ..partition_store.inputs import identity
from ..partitioner import Partitioning, partition
from ..partitioner.partition import DEFAULT_METHOD
from ..partitioner.registry import decisive_options

_PLAIN = bool | int | float | str | None


def describe_partitioner(partitioner: str | Callable) -> Any:
    """Return plain values that tell a partitioner from others by what decides its result.

    A function counts by name, code, defaults, closure and the plain globals that it reads (one of this package by
    name alone, so that an upgrade keeps stores); a partial also by its arguments, one of `gs.partition` by those that
    decide the result; an object by its type and what a pickle would hold. A text as attribute `fingerprint` stands
    for all of this. The functions that it calls are not followed.

    Raises:
        ValueError: something in it cannot be told from another of its kind.
    """
    return partitioner if isinstance(partitioner, str) else _plain("partitioner", _decisive(partitioner), ())


def _decisive(partitioner: Callable) -> Callable:
    """Return a partial of `gs.partition` without what only says where, how fast or how visibly it works."""
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


def method_name(partitioner: str | Callable | None) -> str:
    """Return a partitioner's name for people: a method's, or that of a callable."""
    if partitioner is None or isinstance(partitioner, str):
        return partitioner or ""
    method = getattr(partitioner, "keywords", {}).get("method")
    return method or getattr(partitioner, "__name__", type(partitioner).__name__)


def _plain(name: str, value: Any, above: tuple[int, ...]) -> Any:
    """Return JSON that two values share only where they are alike; `above` holds the ids of what contains this one."""
    if isinstance(value, _PLAIN):
        return value
    if id(value) in above:
        return ["itself", len(above) - above.index(id(value))]
    above = (*above, id(value))
    if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
        return _type_name(value)
    if isinstance(getattr(value, "fingerprint", None), str):
        return ["fingerprint", value.fingerprint]
    if isinstance(value, EdgeStream):
        return ["stream", value.fingerprint()]
    if isinstance(value, Partitioning):  # its seconds differ from run to run, and decide nothing
        return ["partitioning", identity(value.part_id), value.num_parts, value.method, value.seed]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "fciub":
        return ["array", identity(value)]
    if isinstance(value, types.FunctionType):
        return _plain_function(name, value, above)
    if isinstance(value, Mapping):
        pairs = [[_plain(name, key, above), _plain(f"{name}[{key!r}]", item, above)] for key, item in value.items()]
        return ["mapping", *sorted(pairs, key=json.dumps)]
    if isinstance(value, Sequence | Set):
        items = [_plain(name, item, above) for item in value]
        return ["sequence", *items] if isinstance(value, Sequence) else ["set", *sorted(items, key=json.dumps)]
    return _plain_object(name, value, above)


def _plain_function(name: str, function: types.FunctionType, above: tuple[int, ...]) -> list:
    if (function.__module__ or "").startswith(__package__.split(".")[0] + ".") and "<" not in function.__qualname__:
        return ["function", _type_name(function)]
    code, scope = function.__code__, function.__globals__
    read = {key: scope[key] for key in _names(code) if key in scope and isinstance(scope[key], _PLAIN)}
    cells = dict(zip(code.co_freevars, (_contents(cell) for cell in function.__closure__ or ()), strict=True))
    state = [function.__defaults__, function.__kwdefaults__, cells, read]
    return ["function", _type_name(function), _plain_code(name, code), _plain(name, state, above)]


def _plain_code(name: str, code: types.CodeType) -> list:
    constants = [_plain_code(name, c) if isinstance(c, types.CodeType) else _plain(name, c, ()) for c in code.co_consts]
    return [code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]


def _names(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is bound later
        return None


def _plain_object(name: str, value: Any, above: tuple[int, ...]) -> list:
    if isinstance(value, types.MethodType):
        return ["method", _plain(name, value.__func__, above), _plain(name, value.__self__, above)]
    try:
        parts = value.__reduce_ex__(2)  # what a pickle would hold; nothing is pickled
    except (TypeError, RuntimeError, AttributeError, ValueError):
        raise ValueError(
            f"{name}: two objects of type {_type_name(type(value))} cannot be told apart, so a store could be taken for"
            " that of another; give the object a text as attribute fingerprint, or a partial with plain arguments"
        ) from None
    if isinstance(parts, tuple):
        parts = [list(part) if isinstance(part, Iterator) else part for part in parts]
    elif hasattr(value, "__wrapped__"):  # a cache around a function pickles as no more than its name
        parts = value.__wrapped__
    calls = (vars(base).get("__call__") for base in type(value).__mro__)
    call = next((call for call in calls if isinstance(call, types.FunctionType)), None)
    return ["object", _type_name(type(value)), _plain(name, call, above), _plain(name, parts, above)]


def _type_name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', getattr(value, '__name__', ''))}"
