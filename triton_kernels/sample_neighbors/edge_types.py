"""Edges by edge type: what is sampled of each, rows that hold several, and one graph of what was sampled."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...graph import CSC
from ...jit import kernel
from . import cpu

_NO_WEIGHT = np.empty(0, np.float32)
_NONE = np.empty(0, np.int64)


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
        number: See `edge_type`; what a joint graph calls this edge type.
        rows_of: Type of the nodes that have rows, where several node types share ids and `type_of` of
            `HopSampling` gives their types; rows of others are not read. -1: every node may have a row.
        sources_of: Type of the nodes that edges come from, likewise.
        position: (num_edges,) int32 or int64, what each edge is called in results; None: its position in indices.
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
    sources_of: int = -1
    position: np.ndarray | None = None

    @classmethod
    def of(cls, csc: CSC) -> "Relation":
        """Return the one edge type of a homogeneous graph."""
        return cls(0, 0, np.asarray(csc.indptr), np.asarray(csc.indices))

    def named(self, edge: np.ndarray) -> np.ndarray:
        """Return (num,) int64 what edges at these positions are called."""
        if self.position is None:
            return edge
        called = np.empty(len(edge), np.int64)
        cpu.read_hop(self.position, edge, 0, len(edge), called)
        return called


def picked_rows(relation: Relation, start: np.ndarray, degree: np.ndarray, timed: bool) -> tuple:
    """Pick the edges of one type out of rows of several types.

    Args:
        start, degree: (num_rows,) int64 of the rows; replaced by those of what is picked.
        timed: Whether times count: edges of a row are then put in the order of their times.

    Returns:
        The edge type over the picked edges, their (num_picked,) int64 positions, the largest number in a row.
    """
    picked = np.empty(int(degree.sum()), np.int64)
    count, largest = _pick_rows(relation.edge_type, relation.number, start, degree, picked)
    picked = picked[:count]
    time, weight = relation.time, relation.weight
    if time is not None and timed:
        time = time[picked] if relation.time_by_edge else time[relation.indices[picked]]
        _sort_runs(time, picked, start, degree)
    weight = None if weight is None else weight[picked]
    return relation._replace(time=time if timed else None, weight=weight, time_by_edge=True), picked, largest


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
    return count, largest


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
) -> list[Relation]:
    """Return the edges of a graph in memory by edge type, over its own ids, as `HopSampling` takes them.

    Args:
        csc: The graph.
        edge_type: (num_edges,) edge type of each edge.
        num_relations: Number of edge types.
        time: (num_edges,) times where `time_by_edge`, else (num_nodes,); None: no times. Edges of a row of an edge
            type are put in their order.
        weight: (num_edges,) weights by which edges are sampled; None: uniformly.

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
    return [
        Relation(
            0,
            0,
            offsets[number],
            grouped[a:b],
            None if by_edge is None else by_edge[a:b],
            None if weights is None else weights[a:b],
            True,
            number=number,
            position=order[a:b],
        )
        for number, (a, b) in enumerate(pairwise(first.tolist()))
    ]


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


def join_edges(
    parts: Sequence[tuple],
    num_targets: int,
    with_e_id: bool,
    with_weight: bool,
    numbers: Sequence[int] | None,
    allocate: Callable[[tuple[int, ...], type], np.ndarray],
) -> tuple:
    """Return sampled edges of several types as one graph, by target and then by edge type.

    Args:
        parts: By edge type local positions of sources, (num_targets + 1,) indptr, (num_edges,) positions and weights.
        num_targets: Number of rows.
        with_e_id, with_weight: Whether positions and weights are wanted.
        numbers: Numbers of the edge types; None: the types of edges are not wanted.
        allocate: Gives memory for the results, called with (shape, dtype).

    Returns:
        edge_index, indptr, e_id, weight and edge type as `SampledNeighbors` has them.
    """
    num_edges = sum([len(edge) for _, _, edge, _ in parts])
    indptr, edge_index = allocate((num_targets + 1,), np.int64), allocate((2, num_edges), np.int64)
    e_id = allocate((num_edges,), np.int64) if with_e_id else None
    weight = allocate((num_edges,), np.float32) if with_weight else None
    edge_type = None if numbers is None else allocate((num_edges,), np.int64)
    if len(parts) == 1:
        ((local, indptr[:], edge, own),) = parts
        cpu.emit_edges(local, indptr, edge_index)
        for out, values in ((e_id, edge), (weight, own), (edge_type, numbers)):
            if out is not None:
                out[:] = values
        return edge_index, indptr, e_id, weight, edge_type
    indptr[:] = 0
    for _, rows, _, _ in parts:
        indptr += rows
    cursor = indptr[:-1].copy()
    outs = (
        _NONE if e_id is None else e_id,
        _NO_WEIGHT if weight is None else weight,
        _NONE if edge_type is None else edge_type,
    )
    for at, (local, rows, edge, own) in enumerate(parts):
        number = 0 if numbers is None else numbers[at]
        _place_edges(local, rows, edge, own, number, cursor, edge_index, *outs)
    return edge_index, indptr, e_id, weight, edge_type


@kernel
def _place_edges(local, indptr, edge, weight, number, cursor, edge_index, e_id, out_weight, edge_type):
    for target in range(len(cursor)):
        place = cursor[target]
        for i in range(indptr[target], indptr[target + 1]):
            edge_index[0, place], edge_index[1, place] = local[i], target
            if len(e_id):
                e_id[place] = edge[i]
            if len(out_weight):
                out_weight[place] = weight[i]
            if len(edge_type):
                edge_type[place] = number
            place += 1
        cursor[target] = place
