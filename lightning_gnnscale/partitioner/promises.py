"""What every partitioner must deliver, a user's own too: no empty part, and the promised balance or a warning."""

import heapq
from collections.abc import Mapping

import numpy as np

from . import phases
from .constraints import COUNT, NODES, VOLUME, Constraints, caps, judge_now
from .registry import promised_slack


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
