"""The steps of the multilevel method over rows: a node's row holds all its neighbours, so that one look settles it."""

from collections.abc import Iterator

import numpy as np

from ...jit import kernel
from ...rng import combine, fold
from ...triton_kernels.intrinsics import prefetch
from .clustering import cluster_nodes
from .weighted_graph import BlockGraph, RowThreads, WeightedGraph

_CLUSTER_SALT = 0x464C4147  # separates this use of the seed from all others
_ENTRIES_AHEAD, _STEP = np.uint64(32), np.uint64(1)
_NODES_AHEAD, _FEW = 8, 8
_ROUNDED = 1 + 2.0**-40  # sums of prices come in another order
_EVERYWHERE = np.ones(1, np.bool_)  # a border that all nodes are on
_ALL = np.empty(0, np.int64)  # no list of nodes: all rows are read


def potential(load: np.ndarray, cap: np.ndarray) -> float:
    """Return the sum over parts and dimensions of max(0, load / cap - 1)^2."""
    return float((np.maximum(0.0, load / cap - 1.0) ** 2).sum())


@kernel
def surcharge(v, own, other, price, node_weight):
    """Return what a node pays on top for going from one part to another; `v` is its row in `node_weight`.

    A call, not inlined: four times as fast in `_reconsider`, whose loop over entries then has no branches.
    """
    total = 0.0
    for d in range(node_weight.shape[1]):
        total += (price[other, d] - price[own, d]) * node_weight[v, d]
    return total


@kernel(inline="always")
def relief_of(v, own, other, load, cap, node_weight):
    """Return by how much the potential falls if a node moves; `v` is its row in `node_weight`."""
    return _leaving(v, own, load, cap, node_weight) - _entering(v, other, load, cap, node_weight)


@kernel(inline="always")
def _leaving(v, own, load, cap, node_weight):
    """Return by how much the potential falls if a node leaves its part."""
    fall = 0.0
    for d in range(node_weight.shape[1]):
        w, over = np.int64(node_weight[v, d]), load[own, d] - cap[own, d]
        if over > 0:
            before, after = over / cap[own, d], max(0, over - w) / cap[own, d]
            fall += before * before - after * after
    return fall


@kernel(inline="always")
def _entering(v, other, load, cap, node_weight):
    """Return by how much the potential rises if a node enters a part."""
    rise = 0.0
    for d in range(node_weight.shape[1]):
        w, over = np.int64(node_weight[v, d]), load[other, d] - cap[other, d]
        if over + w > 0:
            before, after = max(0, over) / cap[other, d], (over + w) / cap[other, d]
            rise += after * after - before * before
    return rise


@kernel(inline="always")
def has_space(v, part, load, cap, node_weight):
    """Return whether a node fits a part in every dimension; `v` is its row in `node_weight`."""
    for d in range(node_weight.shape[1]):  # noqa: SIM110 (compiled)
        if load[part, d] + node_weight[v, d] > cap[part, d]:
            return False
    return True


@kernel(inline="always")
def is_over(part, load, cap):
    """Return whether a part weighs more than its cap in any dimension."""
    for d in range(load.shape[1]):  # noqa: SIM110 (compiled)
        if load[part, d] > cap[part, d]:
            return True
    return False


@kernel(inline="always")
def best_way_out(v, row, own, near, conn, node_weight, load, cap, strict, key):
    """Return the part that a node leaves to at the least loss per relief, and that ratio; -1 where there is none.

    Args:
        v, row: the node, and its row in `node_weight`.
        near: (num,) the parts that it shares edges with, each once.
        conn: (num_parts,) the edge weight that it shares with each part.
        strict: only parts with space count.
        key: decides ties.

    Cost: The parts that are near, and all of them only where one that is not could be as good.
    """
    best, best_ratio, best_tie, least = np.int64(-1), -np.inf, np.uint64(0), -np.inf
    fall = _leaving(row, own, load, cap, node_weight)
    if fall <= 0.0:
        return best, best_ratio
    for i in range(len(near) + len(load)):
        if i == len(near) and -conn[own] < least:
            break  # no part that is not near is as good
        b = np.int64(near[i]) if i < len(near) else i - len(near)
        gain = conn[b] - conn[own]
        # The relief is at most the fall.
        if b == own or gain < least or (strict and not has_space(row, b, load, cap, node_weight)):
            continue
        relief = fall - _entering(row, b, load, cap, node_weight)
        if relief <= 0.0:
            continue
        ratio = gain / relief if gain < 0 else gain * relief
        if ratio < best_ratio:
            continue
        tie = combine(key ^ np.uint64(v), b)
        if ratio > best_ratio or tie > best_tie:
            best, best_ratio, best_tie = b, ratio, tie
            least = min(0.0, ratio * fall * _ROUNDED)
    return best, best_ratio


class RowClusters:
    """Clusters of a graph in rows; see `EdgeClusters` for what the methods do. A step is a pass of `cluster_nodes`."""

    def __init__(self, graph: BlockGraph, seed: int, threads: RowThreads, saved: dict | None = None, sample=None):
        self.graph, self.seed, self.threads, self.sample = graph, seed, threads, sample
        self.label = saved["label"] if saved else None

    @staticmethod
    def steps_of(rounds: int) -> int:
        return rounds

    def step(self, number: int, limit: np.ndarray) -> None:
        key = fold(self.seed, _CLUSTER_SALT, number)
        given = {"label": self.label, "sample": self.sample}
        self.label = cluster_nodes(self.graph, limit, key, self.threads, passes=1, **given)

    def arrays(self) -> dict[str, np.ndarray]:
        return {"label": self.label}


class RowSteps:
    """What refinement and rebalancing read from a graph in rows.

    Of a graph in memory only the rows of a border are read again: of nodes that had a neighbour in another part, or of
    which a neighbour has moved since. Where most nodes are on it, all rows are read.

    Args:
        graph: the graph.
        threads: their number does not change what is found.
        border: (num_nodes,) bool, true of all nodes that have a neighbour in another part; changed in place. None: not
            known.
        part: (num_nodes,) int16, the parts that the border is one of.

    Cost: 3 bytes a node of a graph in memory, from the first `select` on, and 8 for those that are read.
    """

    def __init__(self, graph: WeightedGraph | BlockGraph, threads: RowThreads, border=None, part=None):
        self.graph, self.threads = graph, threads
        # Parts at the last look; None: all rows are read.
        self._seen: np.ndarray | None = None if border is None else part.copy()
        self._border = _EVERYWHERE if border is None else border

    def select(self, part, price, loss: float, target, gain, moved) -> int:
        """Find the candidates: where each would go (-1: it stays), and what it gains; return the cut.

        Args:
            part: (num_nodes,) int16.
            price: (num_parts, D) float64, of a unit of weight.
            loss: share of the inner connection that a candidate may lose.
            target, gain: (num_nodes,) int16 and float64, overwritten.
            moved: (num_nodes,) bool, nodes that rest.
        """
        across, weight, in_memory = 0, self.graph.node_weight, isinstance(self.graph, WeightedGraph)
        first = in_memory and self._seen is None and self._border is _EVERYWHERE
        if first:
            self._border = np.ones(len(part), np.bool_)
        self._follow(part)
        if self._seen is not None:
            target[:] = -1
        for some in self._rows_of(self._border):
            state = (*some, weight, part, price, loss, target, gain, moved, self._border)
            across += sum(self.threads.run(_find_candidates, *state))
        if first and 2 * np.count_nonzero(self._border) < len(part):
            self._seen = part.copy()
        elif first:
            self._border = np.ones(1, np.bool_)
        return across // 2

    def _rows_of(self, chosen) -> Iterator[tuple]:
        """Yield what `RowThreads.run` divides, and nodes and block for a kernel: all rows, or those that are chosen."""
        for block in self.graph.blocks():
            if self._seen is None:
                yield block.indptr, _ALL, *block
            else:
                nodes = np.flatnonzero(chosen)
                yield range(len(nodes) + 1), nodes, *block

    def _follow(self, part) -> None:
        """Extend the border by the nodes that have moved since the last look, and their neighbours."""
        if self._seen is not None:
            nodes = np.flatnonzero(part != self._seen)
            self._seen[nodes] = part[nodes]
            self.threads.run(_extend_border, range(len(nodes) + 1), nodes, *self.graph[:2], self._border)

    def cut(self, part) -> int:
        """Return what `select` returns, and choose nothing."""
        self._follow(part)
        return sum(sum(self.threads.run(_weigh_cut, *some, part)) for some in self._rows_of(self._border)) // 2

    def reconsider(self, part, price, target, gain, moved) -> None:
        """Mark in `moved` the candidates that do not lose once all better candidates have moved, and no others."""
        moved[:] = False
        for some in self._rows_of(target >= 0):
            self.threads.run(_reconsider, *some, self.graph.node_weight, part, price, target, gain, moved)

    def find_ways_out(self, part, load, cap, over, strict: bool, key, target, ratio) -> None:
        """For the nodes of overfull parts: the part to leave to (-1: none), and what to compare moves by.

        Args:
            part: (num_nodes,) int16.
            load, cap: (num_parts, D) int64.
            over: (num_parts,) bool, parts that nodes leave.
            strict: only parts with space are entered.
            key: uint64, decides ties.
            target, ratio: (num_nodes,) int16 and float64, overwritten; the latter only where there is a way.
        """
        target[:] = -1
        state = (self.graph.node_weight, part, load, cap, over, strict, key, target, ratio)
        for block in self.graph.blocks():
            self.threads.run(_find_way_out, block.indptr, *block, *state)


@kernel
def _find_candidates(
    start,
    stop,
    nodes,
    first_node,
    indptr,
    indices,
    edge_weight,
    node_weight,
    part,
    price,
    loss,
    target,
    gain,
    moved,
    border,
):
    """Write target and gain of rows [start, stop), or of so many of some nodes; return the weight of edges across.

    Those that are no longer on the border are taken off it.
    """
    some, bordered = len(nodes) > 0, len(border) == len(part)
    each = ~np.uint64(0) if len(edge_weight) == len(indices) else np.uint64(0)
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    num_parts = len(price)
    conn = np.zeros(num_parts, np.int64)
    across, last = np.int64(0), np.uint64(len(indices))
    # Unsigned indices: numba tests every signed one for a negative.
    for i in range(start, stop):
        if some:
            _fetch_ahead(i, nodes, indptr, indices, part)
        row = np.uint64(nodes[i]) if some else np.uint64(i)
        v = np.uint64(first_node) + row
        own, target[v] = part[v], -1
        low, high = np.uint64(indptr[row]), np.uint64(indptr[row + _STEP])
        total = inner = np.int64(0)
        for e in range(low, high):
            if not some and e + _ENTRIES_AHEAD < last:
                prefetch(part, np.int64(indices[e + _ENTRIES_AHEAD]))
            w = np.int64(edge_weight[e & each])
            total += w
            inner += w * np.int64(part[np.uint64(indices[e])] == own)
        if bordered:
            border[v] = total > inner
        across += total - inner
        if total == inner or moved[v]:
            continue
        inside, rent, at = np.float64(inner), 0.0, np.int64(v) & every
        for d in range(node_weight.shape[1]):
            rent += price[own, d] * node_weight[at, d]
        # Prices are not negative: where all edges across lead to one part, and it costs nothing, this is the gain.
        if np.float64(total - inner) + rent * _ROUNDED - inside < -loss * inside:
            continue
        for e in range(low, high):
            conn[np.uint64(part[np.uint64(indices[e])])] += np.int64(edge_weight[e & each])
        best, most = np.int64(-1), -np.inf
        few = np.int64(high - low) < num_parts  # the parts of its entries are looked at, some again and again
        for i in range(np.int64(high - low) if few else num_parts):
            b = np.int64(part[np.uint64(indices[low + np.uint64(i)])]) if few else i
            if b != own and conn[b] > 0 and conn[b] + rent * _ROUNDED >= most:
                score = conn[b] - surcharge(at, np.int64(own), b, price, node_weight)
                if score > most or (score == most and b < best):
                    best, most = b, score
        g = most - inside
        if best >= 0 and (g >= 0 or -g < loss * inside):
            target[v], gain[v] = best, g
        if few:
            for e in range(low, high):
                conn[np.uint64(part[np.uint64(indices[e])])] = 0
        else:
            conn[:] = 0
    return across


@kernel(inline="always")
def _fetch_ahead(i, nodes, indptr, indices, part):
    """Fetch what rows of a graph in memory need that come after the i-th of some nodes, which lie apart."""
    if i + 3 * _NODES_AHEAD < len(nodes):
        prefetch(indptr, nodes[i + 3 * _NODES_AHEAD])
        prefetch(indices, indptr[nodes[i + 2 * _NODES_AHEAD]])
        near = nodes[i + _NODES_AHEAD]
        for e in range(indptr[near], min(indptr[near] + _FEW, indptr[near + 1])):
            prefetch(part, np.int64(indices[e]))


def border_of(graph: WeightedGraph, part: np.ndarray) -> np.ndarray:
    """Return (num_nodes,) bool: which nodes have a neighbour in another part; one pass over the graph in memory."""
    border = np.empty(graph.num_nodes, np.bool_)
    _find_border(graph.indptr, graph.indices, part, border)
    return border


@kernel
def _find_border(indptr, indices, part, border):
    last = np.uint64(len(indices))
    for v in range(np.uint64(len(border))):
        across = False
        for e in range(np.uint64(indptr[v]), np.uint64(indptr[v + _STEP])):
            if e + _ENTRIES_AHEAD < last:
                prefetch(part, np.int64(indices[e + _ENTRIES_AHEAD]))
            across |= part[np.uint64(indices[e])] != part[v]
        border[v] = across


@kernel
def _extend_border(start, stop, nodes, indptr, indices, border):
    """Put nodes[start:stop] and their neighbours on the border."""
    for i in range(start, stop):
        v = nodes[i]
        border[v] = True
        for e in range(indptr[v], indptr[v + 1]):
            border[indices[e]] = True


@kernel
def _weigh_cut(start, stop, nodes, first_node, indptr, indices, edge_weight, part):
    """Return the weight of the edges of rows [start, stop), or of so many of some nodes, to other parts."""
    some, each = len(nodes) > 0, ~np.uint64(0) if len(edge_weight) == len(indices) else np.uint64(0)
    across, last = np.int64(0), np.uint64(len(indices))
    for i in range(start, stop):
        if some:
            _fetch_ahead(i, nodes, indptr, indices, part)
        row = np.uint64(nodes[i]) if some else np.uint64(i)
        own = part[np.uint64(first_node) + row]
        for e in range(np.uint64(indptr[row]), np.uint64(indptr[row + _STEP])):
            if not some and e + _ENTRIES_AHEAD < last:
                prefetch(part, np.int64(indices[e + _ENTRIES_AHEAD]))
            across += edge_weight[e & each] * np.int64(part[np.uint64(indices[e])] != own)
    return across


@kernel
def _reconsider(
    start, stop, nodes, first_node, indptr, indices, edge_weight, node_weight, part, price, target, gain, moved
):
    """Mark the candidates among rows [start, stop), or among so many of some nodes, that are to move."""
    some, each = len(nodes) > 0, ~np.uint64(0) if len(edge_weight) == len(indices) else np.uint64(0)
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    for i in range(start, stop):
        if some:
            _fetch_ahead(i, nodes, indptr, indices, part)
        row = np.uint64(nodes[i]) if some else np.uint64(i)
        v = np.uint64(first_node) + row
        mine = target[v]
        if mine < 0:
            continue
        own, my_gain = part[v], gain[v]
        difference = np.int64(0)
        for e in range(np.uint64(indptr[row]), np.uint64(indptr[row + _STEP])):
            u = np.uint64(indices[e])
            b = part[u]
            if target[u] >= 0 and (gain[u] > my_gain or (gain[u] == my_gain and u < v)):
                b = target[u]
            if b == mine:
                difference += edge_weight[e & each]
            elif b == own:
                difference -= edge_weight[e & each]
        moved[v] = difference >= surcharge(np.int64(v) & every, np.int64(own), np.int64(mine), price, node_weight)


@kernel
def _find_way_out(
    start,
    stop,
    first_node,
    indptr,
    indices,
    edge_weight,
    node_weight,
    part,
    load,
    cap,
    over,
    strict,
    key,
    target,
    ratio,
):
    each = ~np.uint64(0) if len(edge_weight) == len(indices) else np.uint64(0)
    every = np.int64(-1) if len(node_weight) == len(part) else np.int64(0)
    conn, near = np.zeros(len(load), np.int64), np.empty(len(load), part.dtype)
    last = np.uint64(indptr[stop])
    for row in range(np.uint64(start), np.uint64(stop)):
        v = np.uint64(first_node) + row
        own = part[v]
        if not over[own]:
            continue
        num_near = 0
        for e in range(np.uint64(indptr[row]), np.uint64(indptr[row + _STEP])):
            if e + _ENTRIES_AHEAD < last:
                prefetch(part, np.int64(indices[e + _ENTRIES_AHEAD]))
            p = part[np.uint64(indices[e])]
            if conn[np.uint64(p)] == 0:
                near[num_near] = p
                num_near += 1
            conn[np.uint64(p)] += edge_weight[e & each]
        at = np.int64(v)
        some = near[:num_near]
        best, best_ratio = best_way_out(at, at & every, own, some, conn, node_weight, load, cap, strict, key)
        if best >= 0:
            target[v], ratio[v] = best, best_ratio
        for i in range(num_near):
            conn[near[i]] = 0
