"""Fan-out sampling of heterogeneous graphs on the CPU, one edge type at a time.

A node type numbers its own nodes. An edge type has its own CSC, whose rows are targets of one node type and whose
indices are sources of another. With one node type and one edge type the samples are those of `sample_neighbors`.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...graph import CSC
from ...jit import kernel
from ...rng import GOLDEN, combine_int, mix64, unit
from . import cpu
from .cpu import Workspace
from .hops import fold_hop

_EMPTY = np.int64(-1)


class Relation(NamedTuple):
    """One edge type, as samples read it.

    Attributes:
        source, target: Numbers of the node types that edges come from and lead to.
        indptr: (num_targets + 1,) int64.
        indices: (num_edges,) int32 or int64, sources of the edges into each target.
        time: When edges may be sampled, ascending within a row: (num_edges,) by edge where `time_by_edge`, else by
            source, (num_sources,); None: always.
        weight: (num_edges,) floats >= 0, by which edges are sampled, those of 0 only by a fan-out of -1; None:
            uniformly.
        time_by_edge: See `time`.
        edge_type: (num_edges,) integers where the rows hold edges of several types: those of `number` are picked out
            of a row when it is sampled from. None: all edges are of this type.
        number: See `edge_type`.
        rows_of: Type of the nodes that have rows, where several node types share ids and `type_of` of
            `sample_edge_types` gives their types; rows of others are not read. -1: every node may have a row.
    """

    source: int
    target: int
    indptr: np.ndarray
    indices: np.ndarray
    time: np.ndarray | None = None
    weight: np.ndarray | None = None
    time_by_edge: bool = False
    edge_type: np.ndarray | None = None
    number: int = 0
    rows_of: int = -1


class SampledEdgeTypes(NamedTuple):
    """A sampled heterogeneous graph.

    Attributes:
        n_id: By node type, (num_nodes,) int64 ids: seeds first, then new nodes hop by hop in order of appearance.
        row, col: By edge type, (num_edges,) int64 sources and targets as positions in n_id of their node types.
        e_id: By edge type, (num_edges,) int64 positions in its indices.
        batch: By node type, (num_nodes,) int64 seed that a node was found for; None where seeds share nodes.
        num_sampled_nodes: By node type, seeds, then new nodes of each hop.
        num_sampled_edges: By edge type, edges of each hop.
        scale: By edge type, (num_edges,) float32 edges that could be sampled over edges sampled from the row, or None.
            Where edges are sampled by weight: the mean over the samples of the row's sum of weights, over the edge's
            weight.
    """

    n_id: list[np.ndarray]
    row: list[np.ndarray]
    col: list[np.ndarray]
    e_id: list[np.ndarray]
    batch: list[np.ndarray] | None
    num_sampled_nodes: list[list[int]]
    num_sampled_edges: list[list[int]]
    scale: list[np.ndarray] | None = None


class SampleOptions(NamedTuple):
    """How edges of a row are sampled.

    Attributes:
        replace: With replacement.
        disjoint: Each seed has a tree of its own: a node that two of them find is in it twice.
        latest: The last ones of the edges that may be sampled, instead of a uniform sample.
        strict: Edges of a seed's own time may not be sampled.
        with_scale: See `SampledEdgeTypes.scale`.
    """

    replace: bool = False
    disjoint: bool = False
    latest: bool = False
    strict: bool = False
    with_scale: bool = False


def sample_edge_types(
    relations: Sequence[Relation],
    seeds: Sequence[tuple[int, np.ndarray]],
    fanouts: Sequence[Sequence[int]],
    key: int,
    spaces: Sequence[Workspace],
    options: SampleOptions,
    times: np.ndarray | None = None,
    type_of: Callable[[np.ndarray], np.ndarray] | None = None,
) -> SampledEdgeTypes:
    """Sample hop by hop, in each hop edge type by edge type; a node's rows once, at the hop after it was found.

    Every choice is a hash of (key, edge type, hop, node, sample), and of the seed where they are disjoint. A row of no
    more edges than the fan-out is taken whole, in its order.

    Args:
        relations: What is sampled, in this order.
        seeds: Node types, each once, with (num_seeds,) ids; distinct unless disjoint, when they are numbered in this
            order.
        fanouts: By edge type, edges a row for each hop, >= 0, or -1 for all.
        key: uint64.
        spaces: By node type, a workspace of at least its nodes and int64 ids.
        times: The time of each seed, all in one; edges that are later are not sampled. Only with `disjoint`.
        type_of: Gives (num,) int64 node types of ids, where `rows_of` of an edge type names one; without it rows of
            all nodes are read, and the result is the same.

    Raises:
        ValueError: seeds that are repeated, without `disjoint`; a weight below 0 in a row that is sampled from.

    Cost: as `sample_neighbors`, and a few microseconds a hop and edge type; of a row that is sampled by weight all
    weights are read, and of one that holds several edge types the edge type of every edge.
    Source: `hetero_neighbor_sample` of pyg-lib, whose order of nodes and edges it has.
    """
    sample = _Sample(relations, seeds, fanouts, key, spaces, options, times, type_of)
    try:
        for hop in range(len(fanouts[0]) if fanouts else 0):
            sample.hop(hop)
        return sample.collect()
    finally:
        sample.free()


class _Sample:
    """One call of `sample_edge_types`: by node type the nodes so far, where the last hop's begin, and their seeds."""

    def __init__(self, relations, seeds, fanouts, key, spaces, options, times, type_of):
        self.relations, self.fanouts, self.key, self.options, self.spaces = relations, fanouts, key, options, spaces
        num_node_types, given = len(spaces), dict(seeds)
        self.placed, self.time, self.type_of = 0, times, type_of
        self.count, self.begin = [0] * num_node_types, [0] * num_node_types
        self.owner = [np.empty(0, np.int32) for _ in spaces]
        self.table = [_new_table(64) for _ in spaces]
        self.nodes = [[len(given.get(node_type, ()))] for node_type in range(num_node_types)]
        self.edges: list[list] = [[] for _ in relations]
        self.sizes: list[list[int]] = [[] for _ in relations]
        if options.disjoint:
            first = 0
            for node_type, ids in seeds:
                self._find(
                    node_type, np.ascontiguousarray(ids, np.int64), np.arange(first, first + len(ids), dtype=np.int32)
                )
                first += len(ids)
            return
        for node_type, space in enumerate(spaces):
            ids = np.ascontiguousarray(given.get(node_type, ()), np.int64)
            self.count[node_type] = space.place(ids)
            self.placed = node_type + 1
            if self.count[node_type] < len(ids):
                self.free()
                raise ValueError("seeds must be distinct: pass torch.unique(seeds), or disjoint=True")

    def hop(self, hop: int) -> None:
        ends, own = list(self.count), {}
        for number, relation in enumerate(self.relations):
            fanout = self.fanouts[number][hop]
            begin, end = self.begin[relation.target], ends[relation.target]
            if fanout == 0 or begin == end:
                self.sizes[number].append(0)
                continue
            key = fold_hop(combine_int(self.key, number) if number else self.key, hop)
            if self.type_of is not None and not own:
                node_types = self.type_of(self.spaces[relation.target].node[begin:end])
                named = {one.rows_of for one in self.relations} - {-1}
                own = {node_type: begin + np.flatnonzero(node_types == node_type) for node_type in named}
            places = own.get(relation.rows_of)
            self._sample(number, relation, fanout, np.arange(begin, end) if places is None else places, key)
        for node_type, end in enumerate(ends):
            self.nodes[node_type].append(self.count[node_type] - end)
        self.begin = ends

    def _sample(self, number: int, relation: Relation, fanout: int, places: np.ndarray, key: np.uint64) -> None:
        options, num_rows = self.options, len(places)
        timed = self.time is not None or relation.edge_type is None
        latest = options.latest and relation.time is not None and timed
        if latest:  # there is nothing to repeat
            options = options._replace(replace=False)
        node = self.spaces[relation.target].node[places]
        owner = self.owner[relation.target][places] if options.disjoint else None
        start, degree = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
        indptr = np.zeros(num_rows + 1, np.int64)
        largest = cpu.count_hop(relation.indptr, node, 0, num_rows, fanout, options.replace, start, degree, indptr)
        picked = None
        if relation.edge_type is not None:
            relation, picked, largest = _picked_rows(relation, start, degree, self.time is not None)
            _lay_out(degree, fanout, options.replace, indptr)
        if relation.time is not None and self.time is not None:
            largest = _until(
                relation.time, relation.indices, relation.time_by_edge, self.time, owner, options.strict, start, degree
            )
            _lay_out(degree, fanout, options.replace, indptr)
        if relation.weight is not None and fanout >= 0:
            _lay_out_weighted(relation.weight, start, degree, fanout, options.replace, indptr)
            if indptr[-1] < 0:
                raise ValueError("weights by which edges are sampled must be >= 0 and finite, got one that is not")
        edge = np.empty(int(indptr[-1]), np.int64)
        name = node if owner is None else node + owner.astype(np.int64) * (len(relation.indptr) - 1)
        if latest and (relation.weight is None or fanout < 0):
            _pick_latest(start, degree, indptr, edge)
        elif latest:
            _pick_latest_weighted(relation.weight, start, degree, indptr, edge)
        elif relation.weight is not None and fanout >= 0:
            _pick_weighted(key, name, relation.weight, fanout, options.replace, start, degree, indptr, largest, edge)
        else:
            taken = np.zeros((largest >> 6) + 1, np.uint64)
            cpu.pick_hop(key, name, 0, num_rows, fanout, options.replace, start, degree, indptr, taken, edge)
        scale = None
        if options.with_scale:
            taken = np.diff(indptr)
            scale = np.repeat((degree / np.maximum(taken, 1)).astype(np.float32), taken)
            if relation.weight is not None and fanout >= 0:
                _scale_by_weight(relation.weight, start, degree, fanout, options.replace, indptr, edge, scale)
        if picked is not None:
            edge = picked[edge]
        neighbor = np.empty(len(edge), np.int64)
        cpu.read_hop(relation.indices, edge, 0, len(edge), neighbor)
        target = np.repeat(places, np.diff(indptr))
        owners = None if owner is None else np.repeat(owner, np.diff(indptr))
        sampled = [self._find(relation.source, neighbor, owners), target, edge]
        if scale is not None:
            sampled.append(scale)
        self.edges[number].append(sampled)
        self.sizes[number].append(len(edge))

    def _find(self, node_type: int, ids: np.ndarray, owner: np.ndarray | None) -> np.ndarray:
        """Return (num,) positions of nodes in the node type's list, which new ones extend."""
        space, count = self.spaces[node_type], self.count[node_type]
        most = count + len(ids)
        local = np.empty(len(ids), np.int32)
        if owner is None:
            node = space.reserve("node", min(most, space.num_nodes) + 1, keep=count)
            self.count[node_type] = cpu.relabel_hop(ids, 0, len(ids), space.base, space.label, node, count, local)
            return local
        node = space.reserve("node", most + 1, keep=count)
        if len(self.owner[node_type]) < most + 1:
            self.owner[node_type] = np.concatenate(
                [self.owner[node_type][:count], np.empty(most + most // 4 + 64, np.int32)]
            )
        if 2 * most > len(self.table[node_type]):
            self.table[node_type] = _new_table(4 * most)
            _fill_table(node, self.owner[node_type], count, space.num_nodes, self.table[node_type])
        self.count[node_type] = _relabel_disjoint(
            ids, owner, space.num_nodes, self.table[node_type], node, self.owner[node_type], count, local
        )
        return local

    def collect(self) -> SampledEdgeTypes:
        """Return what all hops sampled, hop after hop."""
        chunks = [
            [np.concatenate([hop[part] for hop in hops]) if hops else np.empty(0, np.int64) for hops in self.edges]
            for part in range(3 + self.options.with_scale)
        ]
        row, col, e_id = ([one.astype(np.int64, copy=False) for one in part] for part in chunks[:3])
        node_types = list(zip(self.spaces, self.count, strict=True))
        n_id = [space.node[:count].astype(np.int64) for space, count in node_types]
        batch = None
        if self.options.disjoint:
            batch = [owner[:count].astype(np.int64) for owner, count in zip(self.owner, self.count, strict=True)]
        scale = [one.astype(np.float32) for one in chunks[3]] if self.options.with_scale else None
        return SampledEdgeTypes(n_id, row, col, e_id, batch, self.nodes, self.sizes, scale)

    def free(self) -> None:
        if not self.options.disjoint:
            for space, count in list(zip(self.spaces, self.count, strict=True))[: self.placed]:
                space.finish(count)


def _picked_rows(relation: Relation, start: np.ndarray, degree: np.ndarray, timed: bool) -> tuple:
    """Pick the edges of one type out of rows of several types.

    Args:
        start, degree: (num_rows,) int64 of the rows; replaced by those of what is picked.
        timed: Whether times count: edges of a row are then put in the order of their times.

    Returns:
        The edge type over the picked edges, their (num_picked,) int64 positions, the largest number in a row.
    """
    picked = np.empty(_count_picked(relation.edge_type, relation.number, start, degree), np.int64)
    largest = _pick_rows(relation.edge_type, relation.number, start, degree, picked)
    time, weight = relation.time, relation.weight
    if time is not None and timed:
        time = time[picked] if relation.time_by_edge else time[relation.indices[picked]]
        _sort_runs(time, picked, start, degree)
    weight = None if weight is None else weight[picked]
    return relation._replace(time=time if timed else None, weight=weight, time_by_edge=True), picked, largest


def _new_table(least: int) -> np.ndarray:
    return np.full(1 << max(int(least - 1).bit_length(), 6), _EMPTY, np.int64)


@kernel
def _count_picked(edge_type, number, start, degree):
    count = 0
    for i in range(len(start)):
        for edge in range(start[i], start[i] + degree[i]):
            count += edge_type[edge] == number
    return count


@kernel
def _pick_rows(edge_type, number, start, degree, picked):
    count, largest = 0, 0
    for i in range(len(start)):
        first = count
        for edge in range(start[i], start[i] + degree[i]):
            if edge_type[edge] == number:
                picked[count] = edge
                count += 1
        start[i], degree[i] = first, count - first
        largest = max(largest, count - first)
    return largest


@kernel
def _sort_runs(time, position, start, degree):
    """Sort runs by time, stably, and positions along."""
    for i in range(len(start)):
        first, last = start[i], start[i] + degree[i]
        rising = True
        for j in range(first + 1, last):
            rising = rising and time[j] >= time[j - 1]
        if not rising:
            order = np.argsort(time[first:last], kind="mergesort")
            time[first:last] = time[first:last][order]
            position[first:last] = position[first:last][order]


def group_edge_types(
    csc: CSC,
    edge_type: np.ndarray,
    num_relations: int,
    time: np.ndarray | None = None,
    time_by_edge: bool = False,
    weight: np.ndarray | None = None,
) -> tuple[list[Relation], np.ndarray, np.ndarray]:
    """Return the edges of a graph in memory by edge type, over its own ids, as `sample_edge_types` takes them.

    Args:
        csc: The graph.
        edge_type: (num_edges,) edge type of each edge.
        num_relations: Number of edge types.
        time: (num_edges,) times where `time_by_edge`, else (num_nodes,); None: no times. Edges of a row of an edge
            type are put in their order.
        weight: (num_edges,) weights by which edges are sampled; None: uniformly.

    Returns:
        The edge types; the (num_edges,) position in the CSC of each of their edges, edge type by edge type; and the
        (num_relations + 1,) int64 places where each begins.

    Cost: 12 bytes an edge (16 from 2**31 edges on), and its weight, 8 bytes a node and edge type; three passes over the
        edges.
    """
    offsets = np.zeros((num_relations, csc.num_rows + 1), np.int64)
    order = np.empty(csc.num_edges, np.int32 if csc.num_edges < 2**31 else np.int64)
    indptr, indices = np.asarray(csc.indptr), np.asarray(csc.indices)
    _group(indptr, edge_type, offsets, order)
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(offsets[:, -1])])
    by_edge = None
    if time is not None:
        by_edge = time[order] if time_by_edge else time[indices[order]]
        for relation in range(num_relations):
            begin, end = first[relation : relation + 2]
            starts, lengths = offsets[relation, :-1].copy(), np.diff(offsets[relation])
            _sort_runs(by_edge[begin:end], order[begin:end], starts, lengths)
    grouped, weights = indices[order], None if weight is None else weight[order]
    relations = [
        Relation(
            0,
            0,
            offsets[r],
            grouped[a:b],
            None if by_edge is None else by_edge[a:b],
            None if weights is None else weights[a:b],
            True,
        )
        for r, (a, b) in enumerate(pairwise(first.tolist()))
    ]
    return relations, order, first


@kernel
def _group(indptr, edge_type, offsets, order):
    num_relations, num_rows = offsets.shape[0], len(indptr) - 1
    for row in range(num_rows):
        for edge in range(indptr[row], indptr[row + 1]):
            offsets[edge_type[edge], row + 1] += 1
    for relation in range(num_relations):
        for row in range(num_rows):
            offsets[relation, row + 1] += offsets[relation, row]
    cursor = np.zeros(num_relations, np.int64)
    for relation in range(1, num_relations):
        cursor[relation] = cursor[relation - 1] + offsets[relation - 1, num_rows]
    for row in range(num_rows):  # rows come in order, so that an edge type's edges do
        for edge in range(indptr[row], indptr[row + 1]):
            relation = edge_type[edge]
            order[cursor[relation]] = edge
            cursor[relation] += 1


def join_edge_types(
    sampled: SampledEdgeTypes,
    allocate: Callable[[tuple[int, ...], type], np.ndarray],
    numbers: Sequence[int] | None = None,
    with_e_id: bool = True,
) -> tuple:
    """Return a sampled graph of one node type as one graph, edges by target and then by edge type.

    Args:
        sampled: As `sample_edge_types` returns it; e_id are positions that count in all edge types together.
        allocate: Gives memory for the results, called with (shape, dtype).
        numbers: Numbers of the edge types; None: the types of edges are not wanted.
        with_e_id: Whether positions are wanted.

    Returns:
        (2, num_edges) int64 edge_index, (num_targets + 1,) int64 indptr, (num_edges,) int64 e_id, (num_edges,) float32
        scale where there is one, and (num_edges,) int64 edge types; what is not wanted is (0,). Targets are the nodes
        of all hops but the last.
    """
    num_targets = sum(sampled.num_sampled_nodes[0][:-1])
    num_edges = sum(len(row) for row in sampled.row)
    indptr, edge_index = allocate((num_targets + 1,), np.int64), allocate((2, num_edges), np.int64)
    e_id = allocate((num_edges if with_e_id else 0,), np.int64)
    edge_type = allocate((0 if numbers is None else num_edges,), np.int64)
    scale = allocate((0 if sampled.scale is None else num_edges,), np.float32)
    none = np.empty(0, np.float32)
    indptr[:] = 0
    for col in sampled.col:
        _count_targets(col, indptr)
    np.cumsum(indptr, out=indptr)
    cursor = indptr[:-1].copy()
    for at, (row, col, edge) in enumerate(zip(sampled.row, sampled.col, sampled.e_id, strict=True)):
        number = 0 if numbers is None else numbers[at]
        share = none if sampled.scale is None else sampled.scale[at]
        _place_edges(row, col, edge, share, number, cursor, edge_index, e_id, scale, edge_type)
    return edge_index, indptr, e_id, scale, edge_type


@kernel
def _count_targets(col, indptr):
    for target in col:
        indptr[target + 1] += 1


@kernel
def _place_edges(row, col, edge, scale, number, cursor, edge_index, e_id, out_scale, edge_type):
    for i in range(len(col)):
        place = cursor[col[i]]
        cursor[col[i]] += 1
        edge_index[0, place], edge_index[1, place] = row[i], col[i]
        if len(e_id):
            e_id[place] = edge[i]
        if len(edge_type):
            edge_type[place] = number
        if len(scale):
            out_scale[place] = scale[i]


@kernel
def _until(time, indices, by_edge, seed_time, owner, strict, start, degree):
    """Shorten rows to the edges that are not later than their seed, which come first; return the largest degree."""
    largest = 0
    for i in range(len(start)):
        limit = seed_time[owner[i]]
        low, high = start[i], start[i] + degree[i]
        while low < high:
            middle = (low + high) >> 1
            when = time[middle] if by_edge else time[indices[middle]]
            if when < limit or (when == limit and not strict):
                low = middle + 1
            else:
                high = middle
        degree[i] = low - start[i]
        largest = max(largest, degree[i])
    return largest


@kernel
def _lay_out(degree, fanout, replace, indptr):
    for i in range(len(degree)):
        take = degree[i]
        if fanout >= 0:
            take = (fanout if degree[i] > 0 else 0) if replace else min(fanout, degree[i])
        indptr[i + 1] = indptr[i] + take


@kernel
def _lay_out_weighted(weight, start, degree, fanout, replace, indptr):
    """As `_lay_out`, where edges of weight 0 are not sampled; it ends in -1 where a weight is invalid."""
    wrong = False
    for i in range(len(degree)):
        positive = 0
        for edge in range(start[i], start[i] + degree[i]):
            positive += weight[edge] > 0
            wrong |= not 0 <= weight[edge] < np.inf
        indptr[i + 1] = indptr[i] + ((fanout if positive else 0) if replace else min(fanout, positive))
    if wrong:
        indptr[-1] = -1


@kernel
def _scale_by_weight(weight, start, degree, fanout, replace, indptr, edge, scale):
    """Give edges that were sampled by weight the row's sum of weights over samples and the edge's own weight."""
    for i in range(len(degree)):
        total, taken = 0.0, indptr[i + 1] - indptr[i]
        if not replace and degree[i] <= fanout:
            scale[indptr[i] : indptr[i + 1]] = 1.0  # all that could be sampled
            continue
        for place in range(start[i], start[i] + degree[i]):
            total += weight[place]
        for place in range(indptr[i], indptr[i + 1]):
            scale[place] = total / (taken * weight[edge[place]])


@kernel
def _pick_latest(start, degree, indptr, edge):
    for i in range(len(start)):
        take = indptr[i + 1] - indptr[i]
        for j in range(take):
            edge[indptr[i] + j] = start[i] + degree[i] - take + j


@kernel
def _pick_latest_weighted(weight, start, degree, indptr, edge):
    """As `_pick_latest`, without edges of weight 0."""
    for i in range(len(start)):
        place, at = start[i] + degree[i], indptr[i + 1]
        while at > indptr[i]:
            place -= 1
            if weight[place] > 0:
                at -= 1
                edge[at] = place


@kernel
def _pick_weighted(hop_key, name, weight, fanout, replace, start, degree, indptr, largest, edge):
    """Sample edges by weight: with replacement by the sum of weights, without by the smallest exponential clocks.

    Source: Efraimidis and Spirakis, Information Processing Letters 2006.
    """
    value = np.empty(largest, np.float64)
    for i in range(len(start)):
        at, take, first, length = indptr[i], indptr[i + 1] - indptr[i], start[i], degree[i]
        row_key = mix64(hop_key + np.uint64(name[i]) * GOLDEN)
        if replace:
            if take == 0:
                continue
            total = 0.0
            for j in range(length):
                total += weight[first + j]
                value[j] = total
            for sample in range(take):
                aim = unit(mix64(row_key + np.uint64(sample + 1) * GOLDEN)) * total
                low, high = 0, length - 1
                while low < high:
                    middle = (low + high) >> 1
                    if value[middle] > aim:
                        high = middle
                    else:
                        low = middle + 1
                edge[at + sample] = first + low
        elif length <= fanout:
            count = 0
            for j in range(length):
                if weight[first + j] > 0:
                    edge[at + count] = first + j
                    count += 1
        else:
            # The first `take` of edge are a heap, the largest clock on top, until they are sorted by position.
            count = 0
            for j in range(length):
                if not weight[first + j] > 0:
                    continue
                clock = -np.log(1.0 - unit(mix64(row_key + np.uint64(j + 1) * GOLDEN))) / weight[first + j]
                value[j] = clock
                if count < take:
                    edge[at + count] = first + j
                    _sift_up(value, edge, at, count, first)
                    count += 1
                elif clock < value[edge[at] - first]:
                    edge[at] = first + j
                    _sift_down(value, edge, at, take, first)
            edge[at : at + take].sort()


@kernel(inline="always")
def _sift_up(value, edge, at, place, first):
    while place > 0:
        above = (place - 1) >> 1
        if value[edge[at + above] - first] >= value[edge[at + place] - first]:
            break
        edge[at + above], edge[at + place] = edge[at + place], edge[at + above]
        place = above


@kernel(inline="always")
def _sift_down(value, edge, at, num, first):
    place = 0
    while True:
        below = 2 * place + 1
        if below >= num:
            break
        if below + 1 < num and value[edge[at + below + 1] - first] > value[edge[at + below] - first]:
            below += 1
        if value[edge[at + place] - first] >= value[edge[at + below] - first]:
            break
        edge[at + place], edge[at + below] = edge[at + below], edge[at + place]
        place = below


@kernel
def _fill_table(node, owner, count, num_nodes, table):
    """Enter the positions of the first `count` nodes, which are distinct."""
    mask = len(table) - 1
    for i in range(count):
        slot = np.int64(mix64(np.uint64(owner[i]) * np.uint64(num_nodes) + np.uint64(node[i]))) & mask
        while table[slot] >= 0:
            slot = (slot + 1) & mask
        table[slot] = i


@kernel
def _relabel_disjoint(ids, owners, num_nodes, table, node, owner, count, local):
    """Find nodes of each seed in a table of positions, new ones at its end; return the number of nodes."""
    mask = len(table) - 1
    for i in range(len(ids)):
        slot = np.int64(mix64(np.uint64(owners[i]) * np.uint64(num_nodes) + np.uint64(ids[i]))) & mask
        while True:
            found = table[slot]
            if found < 0:
                table[slot] = found = count
                node[count] = ids[i]
                owner[count] = owners[i]
                count += 1
                break
            if node[found] == ids[i] and owner[found] == owners[i]:
                break
            slot = (slot + 1) & mask
        local[i] = found
    return count
