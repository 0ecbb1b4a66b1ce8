"""What moves cost and relieve; but for `potential`, functions compiled into the steps over rows and over edges."""

import numpy as np

from ...jit import kernel
from ...rng import combine


def potential(load: np.ndarray, cap: np.ndarray) -> float:
    """Return the sum over parts and dimensions of max(0, load / cap - 1)^2."""
    return float((np.maximum(0.0, load / cap - 1.0) ** 2).sum())


@kernel
def surcharge(v, own, other, price, node_weight):
    """Return what a node pays on top for going from one part to another; `v` is its row in `node_weight`."""
    total = 0.0
    for d in range(node_weight.shape[1]):
        total += (price[other, d] - price[own, d]) * node_weight[v, d]
    return total


@kernel
def relief_of(v, own, other, load, cap, node_weight):
    """Return by how much the potential falls if a node moves; `v` is its row in `node_weight`."""
    return _leaving(v, own, load, cap, node_weight) - _entering(v, other, load, cap, node_weight)


@kernel
def _leaving(v, own, load, cap, node_weight):
    """Return by how much the potential falls if a node leaves its part."""
    fall = 0.0
    for d in range(node_weight.shape[1]):
        w, over = np.int64(node_weight[v, d]), load[own, d] - cap[own, d]
        if over > 0:
            before, after = over / cap[own, d], max(0, over - w) / cap[own, d]
            fall += before * before - after * after
    return fall


@kernel
def _entering(v, other, load, cap, node_weight):
    """Return by how much the potential rises if a node enters a part."""
    rise = 0.0
    for d in range(node_weight.shape[1]):
        w, over = np.int64(node_weight[v, d]), load[other, d] - cap[other, d]
        if over + w > 0:
            before, after = max(0, over) / cap[other, d], (over + w) / cap[other, d]
            rise += after * after - before * before
    return rise


@kernel
def has_room(v, part, load, cap, node_weight):
    """Return whether a node fits a part in every dimension; `v` is its row in `node_weight`."""
    for d in range(node_weight.shape[1]):  # noqa: SIM110 (compiled)
        if load[part, d] + node_weight[v, d] > cap[part, d]:
            return False
    return True


@kernel
def is_over(part, load, cap):
    """Return whether a part weighs more than its cap in any dimension."""
    for d in range(load.shape[1]):  # noqa: SIM110 (compiled)
        if load[part, d] > cap[part, d]:
            return True
    return False


@kernel
def best_way_out(v, row, own, conn, node_weight, load, cap, strict, key):
    """Return the part that a node leaves to at the least loss per relief, and that ratio; -1 where there is none.

    Args:
        v, row: the node, and its row in `node_weight`.
        conn: (num_parts,) the edge weight that it shares with each part.
        strict: only parts with room count.
        key: decides ties.
    """
    best, best_ratio, best_tie = -1, -np.inf, np.uint64(0)
    fall = _leaving(row, own, load, cap, node_weight)
    if fall <= 0.0:
        return best, best_ratio
    for b in range(len(load)):
        if b == own or (strict and not has_room(row, b, load, cap, node_weight)):
            continue
        relief = fall - _entering(row, b, load, cap, node_weight)
        if relief <= 0.0:
            continue
        gain = conn[b] - conn[own]
        ratio = gain / relief if gain < 0 else gain * relief
        if ratio < best_ratio:
            continue
        tie = combine(key ^ np.uint64(v), b)
        if ratio > best_ratio or tie > best_tie:
            best, best_ratio, best_tie = b, ratio, tie
    return best, best_ratio
