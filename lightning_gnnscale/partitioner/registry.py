"""Names of partitioners, and the checks that all of them share."""

import inspect
import math
from collections.abc import Callable, Mapping

import numpy as np

from ..errors import short
from .graph_access.scratch import AUTO

_PARTITIONERS: dict[str, Callable] = {}
_MEMORY: dict[str, Callable[..., float]] = {}
_PROMISED: dict[str, float | Callable[..., float | None]] = {}
SHARED = ("seed", "masks", "balance", "progress")
WITHOUT_EFFECT = ("checkpoint", "checkpoint_every", "num_threads")
_SCRATCH = "scratch"


def register_partitioner(
    name: str,
    memory: Callable[..., float] | None = None,
    slack: float | Callable[..., float | None] | None = None,
) -> Callable[[Callable], Callable]:
    """Register a partitioner under a name, for `partition(method=name)` and the Hydra group `partitioner`.

    Args:
        name: a name that no other partitioner has.
        memory: `memory(num_nodes, num_edges, num_parts, options)` returns the bytes that it holds at its peak, for the
            planner; `num_edges` are undirected, `options` complete. None: not known.
        slack: largest part over the mean, in nodes, that the method promises where no balance is given, or a function
            `slack(num_nodes, num_parts, options)`; `partition` warns where it is not met. None: it promises none.

    Returns:
        A decorator for `fn(stream, num_parts, *, seed=0, masks=None, balance=None, progress=None, **options)`, which
        returns (num_nodes,) integer part ids in [0, num_parts). Its further keyword arguments are its options; see
        `decisive_options` for the names that must not change the result.

    Raises:
        ValueError: the name is taken by another function.
    """

    def decorate(function: Callable) -> Callable:
        known = _PARTITIONERS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            raise ValueError(f"partitioner {name!r} is registered already, by {known.__module__}.{known.__qualname__}")
        _PARTITIONERS[name] = function
        if memory is not None:
            _MEMORY[name] = memory
        if slack is not None:
            _PROMISED[name] = slack
        return function

    return decorate


def available_partitioners() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_PARTITIONERS)


def get_partitioner(name: str) -> Callable:
    """Return the function registered under a name; ValueError, with the names that exist, where there is none."""
    if not isinstance(name, str) or name not in _PARTITIONERS:
        raise ValueError(f"partitioner {short(name)} is unknown; available: {', '.join(available_partitioners())}")
    return _PARTITIONERS[name]


def partition_bytes(name: str, num_nodes: int, num_edges: int, num_parts: int, options: Mapping) -> int | None:
    """Return the bytes that a method is predicted to hold at its peak, without chunks of the stream; None: not known.

    Edges are undirected; of the options, arguments of `partition`, those of the method count.
    """
    if name not in _MEMORY:
        return None
    defaults = complete_options(name, {})
    own = {key: value for key, value in options.items() if key in defaults}
    return int(_MEMORY[name](num_nodes, num_edges, num_parts, {**defaults, **own}))


def promised_slack(name: str, options: Mapping, num_nodes: int, num_parts: int) -> float | None:
    """Return the largest part over the mean, of nodes, that a method promises by itself; None: it promises none."""
    promised = _PROMISED.get(name)
    return promised(num_nodes, num_parts, options) if callable(promised) else promised


def complete_options(name: str, options: Mapping) -> dict:
    """Return the options of a partitioner with its defaults filled in; ValueError for one that it does not have."""
    parameters = list(inspect.signature(get_partitioner(name)).parameters.values())
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in SHARED}
    unknown = sorted(set(options) - set(own))
    if unknown and not takes_any:
        allowed = ", ".join(own) if own else "none"
        raise ValueError(f"partitioner {name!r} has no option {', '.join(unknown)}; allowed: {allowed}")
    defaults = {key: value for key, value in own.items() if value is not inspect.Parameter.empty}
    return {**defaults, **options}


def decisive_options(name: str, options: Mapping, defaults: bool = True) -> dict:
    """Return the options of a partitioner as far as they decide its result: what a store may depend on.

    `checkpoint`, `checkpoint_every` and `num_threads` decide nothing. Of `scratch` it only matters whether there is
    a folder, not which one. Every method uses these names, a user's own too.

    Args:
        name: the method's name.
        options: what was given, or what `complete_options` returned.
        defaults: options without effect are set to the method's defaults; False: they are left out.

    Raises:
        ValueError: there is no such method.
    """
    usual, kept = complete_options(name, {}), {}
    for key, value in options.items():
        has_folder = key == _SCRATCH and value is not None
        if key not in WITHOUT_EFFECT and not has_folder:
            kept[key] = value
        elif defaults and key in usual:
            kept[key] = AUTO if has_folder else usual[key]
        elif has_folder and usual.get(key, AUTO) != AUTO:  # to leave it out would say that there is none
            kept[key] = AUTO
    return kept


def check_number(name: str, value, at_least: float) -> None:
    """Raise ValueError unless the value is a finite number of at least `at_least`."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < at_least:
        raise ValueError(f"{name} must be a finite number >= {at_least}, got {short(value)}")


def refuse_balance(method: str, balance) -> None:
    """Raise ValueError where constraints are asked of a method that has none."""
    if balance:
        raise ValueError(f"partitioner {method!r} takes no balance constraints, got balance={dict(balance)}")
