"""Names of partitioners, and what each must deliver, a user's own too: no empty part, and the promised balance."""

import heapq
import inspect
from collections.abc import Callable, Mapping

import numpy as np

from ..errors import short
from . import phases
from .constraints import COUNT, NODES, VOLUME, Constraints, caps, judge_now
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


def usual_balance(name: str) -> dict[str, float] | None:
    """Return the balance of nodes that a method promises whatever its options, as it takes it; None: there is none."""
    promised = _PROMISED.get(name)
    return None if promised is None or callable(promised) else {"nodes": promised}


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


def check_ids(method: str, part_id, num_nodes: int, num_parts: int) -> np.ndarray:
    """Return the part ids that a method returned as int32; ValueError where they are none."""
    part_id = np.asarray(part_id)
    if part_id.shape != (num_nodes,) or part_id.dtype.kind not in "iu":
        raise ValueError(
            f"partitioner {method!r} returned {part_id.shape} {part_id.dtype}, not ({num_nodes},) integers"
        )
    if int(part_id.min()) < 0 or int(part_id.max()) >= num_parts:
        raise ValueError(f"partitioner {method!r} returned part ids {part_id.min()} to {part_id.max()}")
    return part_id.astype(np.int32, copy=False)


def fill_empty_parts(part_id: np.ndarray, num_parts: int) -> np.ndarray:
    """Give every part without nodes one node of the part that is the largest then, its last by id.

    No part grows beyond what some part held, in nodes, volume or masks: a part that was empty gets one node.

    Args:
        part_id: (num_nodes,) int32 in [0, num_parts), not changed, and returned where no part is empty.
        num_parts: at most num_nodes.

    Cost: one count of the parts; where some are empty 17 bytes a node of the parts that give nodes, and 5 of all.
    """
    sizes = np.bincount(part_id, minlength=num_parts)
    empty = np.flatnonzero(sizes == 0)
    if not len(empty):
        return part_id
    largest = [(-int(size), part) for part, size in enumerate(sizes) if size]
    heapq.heapify(largest)
    gives = np.zeros(num_parts, np.int64)
    for _ in empty:
        size, part = largest[0]
        gives[part] += 1
        heapq.heapreplace(largest, (size + 1, part))
    nodes = np.flatnonzero((gives > 0)[part_id])
    nodes = nodes[np.argsort(part_id[nodes], kind="stable")]
    donors = np.flatnonzero(gives)
    ends = np.cumsum(sizes[donors])
    moved = [nodes[end - gives[part] : end] for part, end in zip(donors, ends, strict=True)]
    filled = part_id.copy()
    filled[np.concatenate(moved)] = empty
    phases.note(parts_filled=len(empty))
    return filled


def settle_balance(
    method: str, options: Mapping, part_id: np.ndarray, num_parts: int, balance: Mapping | None, masks: Mapping
) -> None:
    """Note the balances that were asked for or promised, and warn of each that is not met.

    What the method itself had judged is judged again on the final parts. Volumes are known to the method alone: after
    empty parts were filled they are at most what it found; those of a method that judged none are in the notes,
    `balance_unchecked`. Without a `balance` the method's own promise counts.
    """
    judged = phases.take_judgement()
    if judged is not None and _is_of(judged[0], judged[1], len(part_id), num_parts):
        constraints, loads = judged[0], judged[1].copy()
        for d, kind in enumerate(constraints.kinds):
            if kind != VOLUME:
                loads[:, d] = _count(part_id, num_parts, _weight(constraints, d))
        judge_now(constraints, loads)
        return
    slack = promised_slack(method, options, len(part_id), num_parts)
    asked = dict(balance) if balance else {} if slack is None else {"nodes": slack}
    names = [name for name in asked if name == "nodes" or name in masks]
    if len(names) < len(asked):
        phases.note(balance_unchecked=sorted(set(asked) - set(names)))
    if not names:
        return
    loads = [_count(part_id, num_parts, None if name == "nodes" else masks[name]) for name in names]
    loads, slacks = np.stack(loads, axis=1), np.array([float(asked[name]) for name in names])
    total, nothing = loads.sum(axis=0), np.zeros((1, 1), np.int32)
    kinds = np.array([NODES if name == "nodes" else COUNT for name in names], np.int8)
    cap = caps(slacks, total, num_parts)
    judge_now(Constraints(tuple(names), slacks, kinds, nothing[0], nothing, total, cap), loads)


def _is_of(constraints: Constraints, loads: np.ndarray, num_nodes: int, num_parts: int) -> bool:
    """Whether a judgement is of these parts; a user's method may have called another one on a graph of its own."""
    lengths = {len(constraints.flags), constraints.counts.shape[1]} <= {1, num_nodes}
    nodes = constraints.total[constraints.kinds == NODES]
    return len(loads) == num_parts and lengths and bool((nodes == num_nodes).all())


def _weight(constraints: Constraints, d: int) -> np.ndarray | None:
    if constraints.kinds[d] == NODES:
        return None
    return constraints.counts[d] if constraints.kinds[d] == COUNT else (constraints.flags >> d) & 1


def _count(part_id: np.ndarray, num_parts: int, weight) -> np.ndarray:
    return np.bincount(part_id, None if weight is None else np.asarray(weight), num_parts).astype(np.int64)
