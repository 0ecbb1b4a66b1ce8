"""Flows: the least cut between two parts through a corridor along their border, pair after pair.

Jet moves nodes that gain one by one; where nodes have few neighbours, a border that is longer than it need be has no
such nodes. The least cut between what lies on both sides of a corridor straightens it as a whole.
"""

import numpy as np

from ...jit import kernel
from .row_form import border_of
from .weighted_graph import WeightedGraph

WIDTH = 0.04  # of a part's cap: by how much it and what a corridor holds of the other may weigh more together
MOST_ARCS = 1 / 8  # of a graph's entries, in a corridor
MOST_BORDER = 1 / 2  # of the nodes: where more have a neighbour in another part, there are no borders to straighten


def straighten(graph: WeightedGraph, part: np.ndarray, load: np.ndarray, cap: np.ndarray, rounds: int) -> int:
    """Lower the cut between pairs of parts by flows; balance is kept.

    Between two parts lies a corridor: nodes of both, breadth first from their border. A flow from the rest of the one
    to the rest of the other tells the least cut; of several such cuts, one that is balanced well is taken if it keeps
    the caps.

    Args:
        graph: the graph.
        part: (num_nodes,) int16; changed in place.
        load: (num_parts, D) int64, weight of each part; kept up to date.
        cap: (num_parts, D) int64.
        rounds: How often all pairs are gone through, >= 0; from the second time on those with a part that changed.

    Returns:
        By how much the cut fell, >= 0.

    Cost: a pass over the border, and a flow for each pair, a round; by one thread. 6 bytes a node, and 3 an entry.
    Source: Sanders and Schulz, Engineering Multilevel Graph Partitioning Algorithms, ESA 2011; flows: Dinic, 1970.
        Differs: one width of corridor, somewhat more than is sure to keep the caps.
    """
    num_parts, gained, changed = len(cap), 0, np.ones(len(cap), np.bool_)
    place = np.full(graph.num_nodes if rounds > 0 else 0, -1, np.int32)
    for _ in range(rounds):
        active, changed = changed, np.zeros(num_parts, np.bool_)
        nodes = np.flatnonzero(border_of(graph, part)).astype(np.int32)
        if len(nodes) == 0 or len(nodes) > MOST_BORDER * graph.num_nodes:
            break
        keys, ends = _pairs_at(graph.indptr, graph.indices, nodes, part, num_parts)
        order = np.argsort(keys, kind="stable")
        keys, ends = keys[order], ends[order]
        pairs, first = np.unique(keys, return_index=True)
        for pair, of_pair in zip(pairs.tolist(), np.split(ends, first[1:]), strict=True):
            a, b = divmod(pair, num_parts)
            if active[a] or active[b]:
                fell = _flow(*graph, part, load, cap, a, b, of_pair, place)
                changed[[a, b]] |= fell > 0
                gained += fell
        if not changed.any():
            break
    return gained


@kernel
def _pairs_at(indptr, indices, nodes, part, num_parts):
    """Return for each node and each other part that it touches: the pair of parts, as a key, and the node."""
    seen = np.full(num_parts, -1, np.int64)
    size, keys, ends = 0, np.empty(2 * len(nodes) + 1, np.int64), np.empty(2 * len(nodes) + 1, np.int32)
    for v in nodes:
        for e in range(indptr[v], indptr[v + 1]):
            p = np.int64(part[indices[e]])
            if p == part[v] or seen[p] == v:
                continue
            seen[p] = v
            if size == len(keys):
                keys = np.concatenate((keys, np.empty(size, np.int64)))
                ends = np.concatenate((ends, np.empty(size, np.int32)))
            keys[size], ends[size] = min(p, part[v]) * num_parts + max(p, part[v]), v
            size += 1
    return keys[:size], ends[:size]


@kernel
def _corridor(indptr, indices, node_weight, part, load, cap, a, b, ends, place):
    """Return nodes of a, then of b, breadth first from `ends`, and write their places."""
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    nodes, size, room = np.empty(len(ends) + 1, np.int32), 0, np.empty(load.shape[1], np.int64)
    for own, other in ((a, b), (b, a)):
        arcs, full, head = np.int64(MOST_ARCS / 2 * len(indices)), False, size
        for d in range(len(room)):
            room[d] = np.int64((1.0 + WIDTH) * cap[other, d]) - load[other, d]
        near = ends  # the border, then the neighbours of one node after the other
        while True:
            for u in near:
                if part[u] != own or place[u] >= 0:
                    continue
                arcs -= indptr[u + 1] - indptr[u]
                full = full or arcs < 0
                for d in range(len(room)):
                    room[d] -= node_weight[u & every, d]
                    full = full or room[d] < 0
                if full:
                    break
                if size == len(nodes):
                    nodes = np.concatenate((nodes, np.empty(size, np.int32)))
                nodes[size], place[u] = u, size
                size += 1
            if full or head == size:
                break
            near = indices[indptr[nodes[head]] : indptr[nodes[head] + 1]]
            head += 1
    return nodes[:size]


@kernel
def _flow(indptr, indices, edge_weight, node_weight, part, load, cap, a, b, ends, place):
    """Move nodes of a corridor between parts a and b to their side of the least cut; return by how much the cut falls.

    `place` is -1 everywhere before and after.
    """
    each = np.int64(-1) if len(edge_weight) == len(indices) else np.int64(0)
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    nodes = _corridor(indptr, indices, node_weight, part, load, cap, a, b, ends, place)
    size = len(nodes)
    # Its network: arcs in both directions, what ties a node to the rest of a (source) and of b (sink).
    start = np.zeros(size + 1, np.int64)
    source, sink = np.zeros(size, np.int64), np.zeros(size, np.int64)
    before = np.int64(0)
    for i in range(size):
        v = nodes[i]
        for e in range(indptr[v], indptr[v + 1]):
            u = indices[e]
            w = np.int64(edge_weight[e & each])
            if place[u] >= 0:
                start[i + 1] += 1
                before += w * (part[u] != part[v] and place[u] < i)
            elif part[u] == a:
                source[i] += w
                before += w * (part[v] == b)
            elif part[u] == b:
                sink[i] += w
                before += w * (part[v] == a)
    for i in range(size):
        start[i + 1] += start[i]
    head_of, back, left = (
        np.empty(start[size], np.int32),
        np.empty(start[size], np.int64),
        np.empty(start[size], np.int64),
    )
    cursor = start[:-1].copy()
    for i in range(size):
        v = nodes[i]
        for e in range(indptr[v], indptr[v + 1]):
            j = place[indices[e]]
            if j > i:
                w = np.int64(edge_weight[e & each])
                x, y = cursor[i], cursor[j]
                head_of[x], head_of[y], back[x], back[y], left[x], left[y] = j, i, y, x, w, w
                cursor[i] += 1
                cursor[j] += 1
    for i in range(size):
        place[nodes[i]] = -1
    value, level, queue = _saturate(start, head_of, back, left, source, sink, before)
    if value >= before:
        return np.int64(0)
    goes_to_a = level >= 0
    _reach_back(start, head_of, back, left, sink, level, queue)
    fits = _even_out(start, head_of, left, goes_to_a, level, queue, nodes, node_weight, part, load, cap, a, b)
    if not fits:
        return np.int64(0)
    for i in range(size):
        v, to = nodes[i], a if goes_to_a[i] else b
        if part[v] != to:
            for d in range(load.shape[1]):
                load[part[v], d] -= node_weight[v & every, d]
                load[to, d] += node_weight[v & every, d]
            part[v] = to
    return before - value


@kernel
def _even_out(start, head_of, left, goes_to_a, level, queue, nodes, node_weight, part, load, cap, a, b):
    """Of all least cuts, go from that nearest to the source to one that is better balanced; return whether it fits.

    A node that does not reach the sink may go to part a too, with all that it reaches: the cut stays the same.
    """
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    size, num_dims, num_of_a = len(nodes), load.shape[1], 0
    loads = np.empty((2, num_dims), np.int64)
    loads[0], loads[1] = load[a], load[b]
    for i in range(size):
        num_of_a += part[nodes[i]] == a
        if goes_to_a[i] != (part[nodes[i]] == a):
            _shift(loads, nodes[i] & every, node_weight, 1 if goes_to_a[i] else -1)
    most = _fullest(loads, cap, a, b)
    for k in range(size):
        root = num_of_a - 1 - k if k < num_of_a else k  # from the far end of part a on
        if goes_to_a[root] or level[root] >= 0:
            continue
        num, taken = 1, 0
        queue[0], goes_to_a[root] = root, True
        while taken < num:
            i = queue[taken]
            taken += 1
            _shift(loads, nodes[i] & every, node_weight, 1)
            for x in range(start[i], start[i + 1]):
                j = head_of[x]
                if left[x] > 0 and not goes_to_a[j]:
                    goes_to_a[j], queue[num] = True, j
                    num += 1
        now = _fullest(loads, cap, a, b)
        if now > most:
            for i in queue[:num]:
                goes_to_a[i] = False
            break
        most = now
    return most <= 1.0


@kernel
def _shift(loads, v, node_weight, sign):
    for d in range(loads.shape[1]):
        loads[0, d] += sign * node_weight[v, d]
        loads[1, d] -= sign * node_weight[v, d]


@kernel
def _fullest(loads, cap, a, b):
    """Return the greatest load over its cap."""
    most = 0.0
    for d in range(loads.shape[1]):
        most = max(most, loads[0, d] / cap[a, d], loads[1, d] / cap[b, d])
    return most


@kernel
def _saturate(start, head_of, back, left, source, sink, enough):
    """Send flow until no more can be sent, or `enough` has been.

    Returns:
        The flow; (num_nodes,) int32 levels, >= 0 for what the source still reaches; and an array of that size to reuse.
    """
    size = len(source)
    level, queue, cursor, path = (
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        start[:-1].copy(),
        np.empty(size, np.int64),
    )
    value = np.int64(0)
    while True:
        level[:] = -1
        num = taken = 0
        for i in range(size):
            if source[i] > 0:
                level[i], queue[num] = 0, i
                num += 1
        reached, last = False, np.int32(size)  # no path is longer than the shortest one
        while taken < num and level[queue[taken]] <= last:
            i = queue[taken]
            taken += 1
            if sink[i] > 0 and not reached:
                reached, last = True, level[i]
            for x in range(start[i], start[i + 1]):
                j = head_of[x]
                if left[x] > 0 and level[j] < 0:
                    level[j], queue[num] = level[i] + 1, j
                    num += 1
        if not reached or value >= enough:
            return value, level, queue
        cursor[:] = start[:-1]
        for root in range(size):
            if source[root] <= 0:
                continue
            i, depth = np.int64(root), 0
            while True:
                if sink[i] > 0:  # a path: send what fits, go back to the first arc that is full
                    sent = min(source[root], sink[i])
                    for k in range(depth):
                        sent = min(sent, left[path[k]])
                    source[root] -= sent
                    sink[i] -= sent
                    value += sent
                    keep = depth
                    for k in range(depth - 1, -1, -1):
                        left[path[k]] -= sent
                        left[back[path[k]]] += sent
                        if left[path[k]] == 0:
                            keep = k
                    if source[root] == 0:
                        break
                    if keep < depth:
                        i, depth = np.int64(head_of[back[path[keep]]]), keep
                    continue
                advanced = False
                while cursor[i] < start[i + 1]:
                    x = cursor[i]
                    j = head_of[x]
                    if left[x] > 0 and level[j] == level[i] + 1:
                        path[depth] = x
                        depth += 1
                        i, advanced = np.int64(j), True
                        break
                    cursor[i] += 1
                if advanced:
                    continue
                if depth == 0:
                    break
                depth -= 1
                i = np.int64(head_of[back[path[depth]]])
                cursor[i] += 1
    return value, level, queue


@kernel
def _reach_back(start, head_of, back, left, sink, level, queue):
    """Write to `level` 0 for what reaches the sink, -1 for the rest."""
    level[:] = -1
    num = taken = 0
    for i in range(len(sink)):
        if sink[i] > 0:
            level[i], queue[num] = 0, i
            num += 1
    while taken < num:
        i = queue[taken]
        taken += 1
        for x in range(start[i], start[i + 1]):
            j = head_of[x]
            if left[back[x]] > 0 and level[j] < 0:
                level[j], queue[num] = 0, j
                num += 1
