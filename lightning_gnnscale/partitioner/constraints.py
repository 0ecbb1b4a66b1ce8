"""Balance: how many nodes, how much volume and how many masked nodes a part may hold, and packing in order."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..errors import check_number
from ..jit import kernel
from ..traits import StreamTraits
from ..values import as_array, refuse_outside
from . import phases


def pack_in_order(sizes: np.ndarray, filled: np.ndarray) -> np.ndarray:
    """Give each item, in the order of the array, to the least filled part, the lowest of several.

    Args:
        sizes: (num_items,) int64, >= 0.
        filled: (num_parts,) int64, what the parts hold; added to in place.

    Returns:
        (num_items,) int32 part ids, in O(num_parts + num_items) log num_parts time.
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
    """Add a size to the least filled part, and return it; `heap` has the parts by (filled, part), and keeps them so."""
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


def balance_by_node_type(stream, masks: Mapping[str, np.ndarray] | None, balance: Mapping[str, float] | None) -> dict:
    """Return the masks, and those masks and counts of a heterogeneous graph that constraints name.

    Args:
        stream: An EdgeStream; only a `HeteroStream` has node types.
        masks: (num_nodes,) bool by name, or None.
        balance: Constraints by name. Besides nodes, volume and masks: a node type for its nodes; a mask and a node
            type, "train:paper", for the mask's nodes of that type; an edge type, "cites" or "paper,cites,paper", for
            its edges, each counted at its target.

    Raises:
        ValueError: a name that is none of these.

    Cost: a byte a node and node type; for edge types one pass over the edges and 4 bytes a node each.
    """
    found = {} if masks is None else dict(masks)
    schema = StreamTraits(stream).schema
    if schema is None or not balance:
        return found
    kind, relations = None, {}
    for name in balance:
        if name in ("nodes", "volume") or name in found:
            continue
        mask, _, of_node_type = name.rpartition(":")
        if of_node_type in schema.node_types and (not mask or mask in found):
            kind = stream.type_of(np.arange(stream.num_nodes)).astype(np.int16) if kind is None else kind
            chosen = kind == schema.node_types.index(of_node_type)
            found[name] = chosen & found[mask] if mask else chosen
            continue
        try:
            relations[name] = schema.edge_type_number(name)
        except ValueError:
            known = [*schema.node_types, *(f"{mask}:{schema.node_types[0]}" for mask in list(found)[:1])]
            known += [",".join(edge_type) for edge_type in schema.edge_types]
            raise ValueError(
                f"partitioner.balance.{name}: no node type, edge type or mask has this name; what can be balanced: "
                f"nodes, volume, {', '.join(known)}"
            ) from None
    if relations:
        found |= _edges_by_type(stream, relations)
    return found


def _edges_by_type(stream, relations: dict[str, int]) -> dict[str, np.ndarray]:
    """Return (num_nodes,) int32 counts by edge type: the edges that lead to each node."""
    counts = {name: np.zeros(stream.num_nodes, np.int32) for name in relations}
    stream.count()
    for chunk in stream.chunks():
        edges = np.arange(chunk.first_edge, chunk.first_edge + len(chunk.src))
        listed = stream.edge_type_of(edges)
        back = stream.edge_type_of(~edges) if stream.to_undirected else None
        for name, number in relations.items():
            np.add.at(counts[name], chunk.dst[listed == number], 1)
            if back is not None:
                reversed_too = (back == number) & ((chunk.src != chunk.dst) | (back != listed))
                np.add.at(counts[name], chunk.src[reversed_too], 1)
    return counts


def pack_several(weight: np.ndarray, num_parts: int) -> np.ndarray:
    """Give items to parts, the heaviest first, each where the fullest of its D dimensions stays least full.

    Args:
        weight: (num_items, D) integers >= 0.

    Returns:
        (num_items,) int32 part ids, in O(num_items * (num_parts * D + log num_items)) time.
    """
    share = weight / np.maximum(weight.sum(axis=0) / num_parts, 1)
    part = np.empty(len(weight), np.int32)
    _pack_several(share, np.argsort(-share.max(axis=1), kind="stable"), np.zeros((num_parts, weight.shape[1])), part)
    return part


@kernel
def _pack_several(share, order, filled, part):
    num_parts, num_dims = filled.shape
    for item in order:
        chosen, least, least_sum = 0, np.inf, np.inf
        for p in range(num_parts):
            most, total = 0.0, 0.0
            for d in range(num_dims):
                most = max(most, filled[p, d] + share[item, d])
                total += filled[p, d]
            if most < least or (most == least and total < least_sum):
                chosen, least, least_sum = p, most, total
        part[item] = chosen
        for d in range(num_dims):
            filled[chosen, d] += share[item, d]


@kernel(inline="always")
def _before(filled, a, b):
    """Whether part a is filled less than part b, or as much and lower."""
    return filled[a] < filled[b] or (filled[a] == filled[b] and a < b)


NODES, VOLUME, MASK, COUNT = range(4)  # what a dimension counts; the mask of dimension d is bit d of `flags`
MAX_DIMENSIONS = 8


class Constraints(NamedTuple):
    """Balance constraints as arrays, for compiled loops. There are D dimensions; each gives every node a weight.

    Attributes:
        names: Names of the dimensions: "nodes", "volume", or the name of a mask or of counts.
        slack: (D,) float64: largest allowed ratio of the heaviest part to the mean.
        kinds: (D,) int8: NODES, VOLUME, MASK or COUNT.
        flags: (num_nodes,) uint8: bit d is set for a node that counts in mask dimension d; shape (1,) without masks.
        counts: (D, num_nodes) int32 weights of count dimensions; shape (1, 1) without.
        total: (D,) int64: weight of all nodes together.
        cap: (D,) int64: largest allowed weight of a part: floor(slack * total / num_parts), but at least the mean
            rounded up.
    """

    names: tuple[str, ...]
    slack: np.ndarray
    kinds: np.ndarray
    flags: np.ndarray
    counts: np.ndarray
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
        masks: {"train": (num_nodes,) bool, ...}; of integers >= 0, how much each node counts.
        degree: (num_nodes,) of the undirected simple graph.
        num_parts: number of parts, >= 1.
        default_slack: see `balance`.

    Raises:
        ValueError: an unknown name, a slack below 1, a mask that is missing, has another shape or no nodes, or a node
            that is heavier than a part may be; the message says which.

    Cost: O(num_nodes * D) time; one byte a node where masks are balanced, 4 more a dimension where counts are.
    """
    balance = dict(balance) if balance else {"nodes": default_slack}
    if len(balance) > MAX_DIMENSIONS:
        raise ValueError(f"partitioner.balance takes at most {MAX_DIMENSIONS} constraints, got {len(balance)}")
    names, num_nodes = tuple(balance), len(degree)
    slack = np.array([_check_slack(name, balance[name]) for name in names])
    given = {name: _check_mask(name, masks, num_nodes) for name in names if name not in ("nodes", "volume")}
    counted = {name: MASK if mask.dtype == bool else COUNT for name, mask in given.items()}
    kinds = np.array([({"nodes": NODES, "volume": VOLUME} | counted)[name] for name in names], np.int8)
    flags = np.zeros(num_nodes if (kinds == MASK).any() else 1, np.uint8)
    counts = np.zeros((len(names), num_nodes) if (kinds == COUNT).any() else (1, 1), np.int32)
    for d, name in enumerate(names):
        if kinds[d] == MASK:
            flags |= given[name].astype(np.uint8) << np.uint8(d)
        elif kinds[d] == COUNT:
            counts[d] = given[name]
    total, heaviest = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    _weigh(degree, kinds, flags, counts, total, heaviest)
    cap = caps(slack, total, num_parts)
    constraints = Constraints(names, slack, kinds, flags, counts, total, cap)
    for d, name in enumerate(names):
        weight = node_weight(constraints, degree, int(heaviest[d]))[d]
        if weight > cap[d]:
            raise ValueError(
                f"partitioner.balance.{name}={slack[d]:g} cannot be met: node {heaviest[d]} alone weighs {weight}, and "
                f"a part may hold {cap[d]} of {total[d]}: take fewer parts, or a slack of at least "
                f"{weight * num_parts / total[d]:.3f}"
            )
    return constraints


def caps(slack: np.ndarray, total: np.ndarray, num_parts: int) -> np.ndarray:
    """Return (D,) int64: the largest allowed weight of a part, see `Constraints.cap`."""
    floor = np.floor(slack * total / num_parts * (1 + 1e-12)).astype(np.int64)
    return np.maximum(floor, -(-total // num_parts))


def node_weight(constraints: Constraints, degree: np.ndarray, node: int) -> list[int]:
    """Return the weight of one node in every dimension."""
    arrays = constraints.flags, constraints.counts
    return [int(weight_of(kind, degree[node], *arrays, d, node)) for d, kind in enumerate(constraints.kinds)]


def node_weights(constraints: Constraints, degree: np.ndarray, dtype) -> np.ndarray:
    """Return (num_nodes, D) weights of this dtype; or (1, 1) where nodes alone are balanced: each weighs one."""
    if constraints.kinds.tolist() == [NODES]:
        return np.ones((1, 1), dtype)
    weight = np.empty((len(degree), len(constraints.kinds)), dtype)
    _fill_weights(constraints.kinds, constraints.flags, constraints.counts, degree, weight)
    return weight


def part_loads(constraints: Constraints, degree: np.ndarray, part_id: np.ndarray, num_parts: int) -> np.ndarray:
    """Return (num_parts, D) int64: the weight of every part in every dimension."""
    loads = np.zeros((num_parts, len(constraints.names)), np.int64)
    _add_loads(degree, constraints.kinds, constraints.flags, constraints.counts, part_id, loads)
    return loads


def judge(constraints: Constraints, loads: np.ndarray) -> None:
    """Let `partition` judge the parts once they are final; a method that was called directly judges them at once."""
    if not phases.leave_judgement(constraints, loads):
        judge_now(constraints, loads)


def judge_now(constraints: Constraints, loads: np.ndarray) -> None:
    """Keep the balances in the record of the run, and warn of every constraint that is not met and by how much."""
    num_parts, largest = len(loads), loads.max(axis=0)
    over_mean = largest * num_parts / np.maximum(1, constraints.total)
    reached = dict(zip(constraints.names, over_mean.tolist(), strict=True))
    violated = {}
    for d, name in enumerate(constraints.names):
        over = int(largest[d] - constraints.cap[d])
        if over > 0:
            violated[name] = over
            enough = math.ceil(reached[name] * 1e4) / 1e4
            phases.warn(
                f"balance of {name} is {reached[name]:.4f}, above the {constraints.slack[d]:g} asked for or promised: "
                f"part {int(loads[:, d].argmax())} holds {largest[d]}, {over} more than its {constraints.cap[d]}: take "
                f"fewer parts than {num_parts}, or allow partitioner.balance.{name}={enough:g}"
            )
    phases.note(balance=reached, balance_violations=violated)


def _check_slack(name: str, value) -> float:
    check_number(f"partitioner.balance.{name}", value, at_least=1)
    return float(value)


def _check_mask(name: str, masks, num_nodes: int) -> np.ndarray:
    if not masks or masks.get(name) is None:
        have = ", ".join(("nodes", "volume", *(key for key in masks or {} if masks[key] is not None)))
        raise ValueError(f"partitioner.balance.{name}: there is no mask {name!r}; what can be balanced: {have}")
    mask = np.asarray(as_array(f"masks[{name!r}]", masks[name]))
    if mask.shape != (num_nodes,) or (mask.dtype != bool and mask.dtype.kind not in "iu"):
        raise ValueError(f"masks[{name!r}] must be ({num_nodes},) bool or counts, got {mask.shape} {mask.dtype}")
    if mask.dtype != bool:
        refuse_outside(f"masks[{name!r}]", mask, 0, np.iinfo(np.int32).max)
    if not mask.any():
        raise ValueError(f"partitioner.balance.{name}: masks[{name!r}] has no nodes to balance: leave it out")
    return mask


@kernel(inline="always")
def weight_of(kind, degree, flags, counts, dimension, node):
    """Return the weight of one node in one dimension."""
    if kind == NODES:
        return np.int64(1)
    if kind == VOLUME:
        return np.int64(degree)
    if kind == COUNT:
        return np.int64(counts[dimension, node])
    return np.int64((flags[node] >> dimension) & 1)


@kernel
def _weigh(degree, kinds, flags, counts, total, heaviest):
    """Add up each dimension, and find its heaviest node (the first of several)."""
    for d in range(len(kinds)):
        most = np.int64(-1)
        for v in range(len(degree)):
            weight = weight_of(kinds[d], degree[v], flags, counts, d, v)
            total[d] += weight
            if weight > most:
                most, heaviest[d] = weight, v


@kernel
def _fill_weights(kinds, flags, counts, degree, weight):
    for v in range(len(degree)):
        for d in range(len(kinds)):
            weight[v, d] = weight_of(kinds[d], degree[v], flags, counts, d, v)


@kernel
def _add_loads(degree, kinds, flags, counts, part_id, loads):
    for v in range(len(part_id)):
        for d in range(len(kinds)):
            loads[part_id[v], d] += weight_of(kinds[d], degree[v], flags, counts, d, v)
