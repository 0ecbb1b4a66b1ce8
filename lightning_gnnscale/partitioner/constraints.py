"""Balance: what a part may hold of nodes, volume and masked nodes, whether that can be met, and packing in order."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..jit import kernel
from . import phases
from .registry import check_number


def pack_in_order(sizes: np.ndarray, filled: np.ndarray) -> np.ndarray:
    """Give each item, in the order of the array, to the least filled part, the lowest of several.

    Args:
        sizes: (num_items,) int64, >= 0.
        filled: (num_parts,) int64, what the parts hold; added to in place.

    Returns:
        (num_items,) int32 part ids.

    Cost: O(num_parts + num_items) log num_parts time; 4 bytes an item.
    """
    part = np.empty(len(sizes), np.int32)
    heap = np.lexsort((np.arange(len(filled)), filled))  # sorted, hence a heap
    _pack(sizes, filled, heap, part)
    return part


@kernel
def _pack(sizes, filled, heap, part):
    for item in range(len(sizes)):
        part[item] = fill_least(filled, heap, sizes[item])


@kernel
def fill_least(filled, heap, size):
    """Add a size to the least filled part, the lowest of several, and return it.

    Args:
        filled: (num_parts,) int64, what the parts hold.
        heap: (num_parts,) the parts as a binary heap by (filled, part); kept as one.
        size: to add, >= 0.
    """
    chosen = heap[0]
    filled[chosen] += size
    slot = 0
    while True:
        child = 2 * slot + 1
        if child >= len(heap):
            break
        if child + 1 < len(heap) and _before(filled, heap[child + 1], heap[child]):
            child += 1
        if not _before(filled, heap[child], chosen):
            break
        heap[slot] = heap[child]
        slot = child
    heap[slot] = chosen
    return chosen


@kernel(inline="always")
def _before(filled, a, b):
    """Whether part a is filled less than part b, or as much and lower."""
    return filled[a] < filled[b] or (filled[a] == filled[b] and a < b)


NODES, VOLUME, MASK = range(3)  # what a dimension counts; the mask of dimension d is bit d of `flags`
MAX_DIMENSIONS = 8


class Constraints(NamedTuple):
    """Balance constraints as arrays, for compiled loops. There are D dimensions; each gives every node a weight.

    Attributes:
        names: Names of the dimensions: "nodes", "volume", or the name of a mask.
        slack: (D,) float64: largest allowed ratio of the heaviest part to the mean.
        kinds: (D,) int8: NODES, VOLUME or MASK.
        flags: (num_nodes,) uint8: bit d is set for a node that counts in mask dimension d; shape (1,) without masks.
        total: (D,) int64: weight of all nodes together.
        cap: (D,) int64: largest allowed weight of a part: floor(slack * total / num_parts), but at least the mean
            rounded up.
    """

    names: tuple[str, ...]
    slack: np.ndarray
    kinds: np.ndarray
    flags: np.ndarray
    total: np.ndarray
    cap: np.ndarray


def resolve_constraints(
    balance: Mapping[str, float] | None,
    masks: Mapping[str, np.ndarray] | None,
    degree: np.ndarray,
    num_parts: int,
    default_slack: float = 1.03,
) -> Constraints:
    """Check what was asked for and turn it into caps.

    Args:
        balance: {"nodes": 1.05, "volume": 1.10, "train": 1.05}, any of them; None: nodes at `default_slack`.
        masks: {"train": (num_nodes,) bool, ...}.
        degree: (num_nodes,) of the undirected simple graph.
        num_parts: number of parts, >= 1.
        default_slack: see `balance`.

    Raises:
        ValueError: an unknown name, a slack below 1, a mask that is missing, has another shape or no nodes, or a node
            that is heavier than a part may be; the message says which.

    Cost: O(num_nodes * D) time; one byte a node where masks are balanced.
    """
    balance = dict(balance) if balance else {"nodes": default_slack}
    if len(balance) > MAX_DIMENSIONS:
        raise ValueError(f"partitioner.balance takes at most {MAX_DIMENSIONS} constraints, got {len(balance)}")
    names, num_nodes = tuple(balance), len(degree)
    slack = np.array([_check_slack(name, balance[name]) for name in names])
    kinds = np.array([{"nodes": NODES, "volume": VOLUME}.get(name, MASK) for name in names], np.int8)
    flags = np.zeros(num_nodes if (kinds == MASK).any() else 1, np.uint8)
    for d, name in enumerate(names):
        if kinds[d] == MASK:
            flags |= _check_mask(name, masks, num_nodes).astype(np.uint8) << np.uint8(d)
    total, heaviest = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    _weigh(degree, kinds, flags, total, heaviest)
    floor = np.floor(slack * total / num_parts * (1 + 1e-12)).astype(np.int64)
    cap = np.maximum(floor, -(-total // num_parts))
    constraints = Constraints(names, slack, kinds, flags, total, cap)
    for d, name in enumerate(names):
        weight = node_weight(constraints, degree, int(heaviest[d]))[d]
        if weight > cap[d]:
            raise ValueError(
                f"partitioner.balance.{name}={slack[d]:g} cannot be met: node {heaviest[d]} alone weighs {weight}, and "
                f"a part may hold {cap[d]} of {total[d]}: take fewer parts, or a slack of at least "
                f"{weight * num_parts / total[d]:.3f}"
            )
    return constraints


def node_weight(constraints: Constraints, degree: np.ndarray, node: int) -> list[int]:
    """Return the weight of one node in every dimension."""
    return [int(weight_of(kind, degree[node], constraints.flags, d, node)) for d, kind in enumerate(constraints.kinds)]


def node_weights(constraints: Constraints, degree: np.ndarray, dtype) -> np.ndarray:
    """Return (num_nodes, D) weights of this dtype; or (1, 1) where nodes alone are balanced: each weighs one."""
    if constraints.kinds.tolist() == [NODES]:
        return np.ones((1, 1), dtype)
    weight = np.empty((len(degree), len(constraints.kinds)), dtype)
    _fill_weights(constraints.kinds, constraints.flags, degree, weight)
    return weight


def part_loads(constraints: Constraints, degree: np.ndarray, part_id: np.ndarray, num_parts: int) -> np.ndarray:
    """Return (num_parts, D) int64: the weight of every part in every dimension."""
    loads = np.zeros((num_parts, len(constraints.names)), np.int64)
    _add_loads(degree, constraints.kinds, constraints.flags, part_id, loads)
    return loads


def judge(constraints: Constraints, loads: np.ndarray) -> None:
    """Keep the balances in the record of the run, and warn of every constraint that is not met, with its size."""
    num_parts, largest = len(loads), loads.max(axis=0)
    over_mean = largest * num_parts / np.maximum(1, constraints.total)
    reached = dict(zip(constraints.names, over_mean.tolist(), strict=True))
    violated = {}
    for d, name in enumerate(constraints.names):
        over = int(largest[d] - constraints.cap[d])
        if over > 0:
            violated[name] = over
            phases.warn(
                f"balance of {name} is {reached[name]:.4f}, above the {constraints.slack[d]:g} asked for: part "
                f"{int(loads[:, d].argmax())} holds {largest[d]}, {over} more than its {constraints.cap[d]}"
            )
    phases.note(balance=reached, balance_violations=violated)


def _check_slack(name: str, value) -> float:
    check_number(f"partitioner.balance.{name}", value, at_least=1)
    return float(value)


def _check_mask(name: str, masks, num_nodes: int) -> np.ndarray:
    if not masks or masks.get(name) is None:
        have = ", ".join(("nodes", "volume", *(key for key in masks or {} if masks[key] is not None)))
        raise ValueError(f"partitioner.balance.{name}: there is no mask {name!r}; what can be balanced: {have}")
    mask = np.asarray(masks[name])
    if mask.shape != (num_nodes,) or mask.dtype != bool:
        raise ValueError(f"masks[{name!r}] must be ({num_nodes},) bool, got {mask.shape} {mask.dtype}")
    if not mask.any():
        raise ValueError(f"partitioner.balance.{name}: masks[{name!r}] has no nodes to balance: leave it out")
    return mask


@kernel(inline="always")
def weight_of(kind, degree, flags, dimension, node):
    """Return the weight of one node in one dimension."""
    if kind == NODES:
        return np.int64(1)
    if kind == VOLUME:
        return np.int64(degree)
    return np.int64((flags[node] >> dimension) & 1)


@kernel
def _weigh(degree, kinds, flags, total, heaviest):
    """Add up each dimension, and find its heaviest node (the first of several)."""
    for d in range(len(kinds)):
        most = np.int64(-1)
        for v in range(len(degree)):
            weight = weight_of(kinds[d], degree[v], flags, d, v)
            total[d] += weight
            if weight > most:
                most, heaviest[d] = weight, v


@kernel
def _fill_weights(kinds, flags, degree, weight):
    for v in range(len(degree)):
        for d in range(len(kinds)):
            weight[v, d] = weight_of(kinds[d], degree[v], flags, d, v)


@kernel
def _add_loads(degree, kinds, flags, part_id, loads):
    for v in range(len(part_id)):
        for d in range(len(kinds)):
            loads[part_id[v], d] += weight_of(kinds[d], degree[v], flags, d, v)
