"""What moves cost and relieve: functions that are compiled into the steps over rows and those over edges."""

import numpy as np

from ...jit import kernel
from ...rng import combine


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
    relief = 0.0
    for d in range(node_weight.shape[1]):
        w = np.int64(node_weight[v, d])
        if w == 0:
            continue
        if load[own, d] > cap[own, d]:
            before = (load[own, d] - cap[own, d]) / cap[own, d]
            after = max(0, load[own, d] - w - cap[own, d]) / cap[own, d]
            relief += before * before - after * after
        if load[other, d] + w > cap[other, d]:
            before = max(0, load[other, d] - cap[other, d]) / cap[other, d]
            after = (load[other, d] + w - cap[other, d]) / cap[other, d]
            relief -= after * after - before * before
    return relief


@kernel
def has_room(v, part, load, cap, node_weight):
    for d in range(node_weight.shape[1]):  # noqa: SIM110 (compiled)
        if load[part, d] + node_weight[v, d] > cap[part, d]:
            return False
    return True


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
    for b in range(len(load)):
        if b == own or (strict and not has_room(row, b, load, cap, node_weight)):
            continue
        relief = relief_of(row, own, b, load, cap, node_weight)
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
