"""Edges placed one after the other: HDRF, PowerGraph's greedy rules, and DBH, a hash of the end with fewer edges.

HDRF and PowerGraph share replica sets and loads, and the questions asked of them: which is the least loaded part held
by both ends, by one end alone, by any part. A replica set is a bitmask, and so is the set of the least loaded parts,
which answers most of these questions at once.
"""

import functools
from collections import namedtuple
from typing import NamedTuple

import numpy as np

from ..errors import GNNScaleError, check_number
from ..jit import kernel
from ..rng import below, combine, fold
from ..triton_kernels.intrinsics import prefetch, trailing_zeros
from .graph_input import GraphInput, graph_partitioner
from .vertex_cut import EdgePass, place_edges

ROWS_AHEAD = 16  # edges
_WORD_BITS, _WORD_SHIFT = 32, 5
SMALLEST, LARGEST, NUM_LEAST = range(3)  # positions in ReplicaState.limits
_ONE, _NONE, _ALL = np.uint64(1), np.uint64(0), np.uint64(0xFFFFFFFFFFFFFFFF)
# What the other end's replica set is combined with, so that `and` leaves the parts that it shares, or does not.
SHARED, _ALONE = _NONE, _ALL
_NO_LOAD = np.iinfo(np.int64).max


class ReplicaState(NamedTuple):
    """How far a placing pass has come.

    Attributes:
        rows: (num_nodes, 1 + num_words) uint32: a number of edges (HDRF: placed so far; PowerGraph: not placed yet),
            then the replica set, part 0 in the lowest bit of the first word.
        load: (num_parts,) int64, edges placed; all 0 where they do not count.
        least: (num_words,) uint64, the parts with the smallest load.
        limits: (3,) int64: the smallest load, the largest, and how many parts have the smallest.
    """

    rows: np.ndarray
    load: np.ndarray
    least: np.ndarray
    limits: np.ndarray

    @classmethod
    def empty(cls, degree: np.ndarray, num_parts: int) -> "ReplicaState":
        """Return the state before the first edge, all numbers of edges 0; 4 + 4 * ceil(num_parts / 32) bytes a node."""
        if degree.itemsize > 4 and degree.max(initial=0) > np.iinfo(np.uint32).max:
            raise GNNScaleError(
                f"a node has {degree.max()} edges, more than the {np.iinfo(np.uint32).max} counted here"
            )
        num_words = -(-num_parts // _WORD_BITS)
        least = [(1 << min(_WORD_BITS, num_parts - _WORD_BITS * word)) - 1 for word in range(num_words)]
        rows = np.zeros((len(degree), 1 + num_words), np.uint32)
        return cls(rows, np.zeros(num_parts, np.int64), np.array(least, np.uint64), np.array([0, 0, num_parts]))


@graph_partitioner("hdrf")
def hdrf(
    graph: GraphInput,
    num_parts: int,
    *,
    balance_weight: float = 1.0,
    epsilon: float = 1.0,
    masters: str = "majority",
) -> np.ndarray:
    """Place each edge (u, v) in the part with the largest score, and give each node a master among its parts.

    With A(v) the parts that hold an edge of v, and degrees counted as the edges come, this one included:

        score(part) = g(u, part) + g(v, part) + balance_weight * (largest - load(part)) / (epsilon + largest - smallest)
        g(u, part) = 1 + (1 - theta_u) if part in A(u) else 0
        theta_u = degree(u) / (degree(u) + degree(v)) = 1 - theta_v

    Args:
        graph: the graph, without `balance`: HDRF balances edges. Its seed decides masters="random" alone.
        balance_weight: lambda, dimensionless, >= 0; up to 1 it only breaks ties between parts that hold as much.
        epsilon: in the balance term, in edges, > 0.
        masters: "majority": the part with most of a node's edges, the lowest of several; "last": the part of its
            last edge; "random": one of its parts, by a hash of (seed, node).

    Returns:
        (num_nodes,) int32 part ids. Nodes without an edge go to the parts with the fewest nodes.

    Cost: two passes; time grows with the parts that hold an edge's ends, not with num_parts. Memory a node:
        4 + 4 * ceil(num_parts / 32) bytes, and the masters': 4 bytes; for "majority" num_parts bytes with up to 16
        parts, 4 + min(degree, num_parts) with more.
    Source: Petroni et al., HDRF, CIKM 2015. Differs: ties go to the lowest part; between parts that are held by the
        same ends it is the loads that are compared, which is the score without its rounding.
    """
    check_number("partitioner.balance_weight", balance_weight, at_least=0)
    check_number("partitioner.epsilon", epsilon, at_least=1e-9)

    def place(src, dst, state: ReplicaState, part) -> int:
        _place_by_score(src, dst, *state, float(balance_weight), float(epsilon), part)
        return len(src)

    start = functools.partial(ReplicaState.empty, num_parts=num_parts)
    return place_edges(graph, num_parts, masters, ReplicaState, start, [EdgePass("placing", place)])


@kernel
def _place_by_score(src, dst, rows, load, least, limits, balance_weight, epsilon, part):
    """Place a block of edges by HDRF; writes `part`, changes the state."""
    flat, width, length = rows.reshape(-1), rows.shape[1], len(src)
    smallest, largest, num_least = limits[SMALLEST], limits[LARGEST], limits[NUM_LEAST]
    step = 1 if balance_weight > 0 else 0  # a load that does not count stays 0, so that ties go to the lowest part
    for i in range(length):
        if i + ROWS_AHEAD < length:
            prefetch(flat, width * np.int64(src[i + ROWS_AHEAD]))
            prefetch(flat, width * np.int64(dst[i + ROWS_AHEAD]))
        u, v = src[i], dst[i]
        rows[u, 0] += 1
        rows[v, 0] += 1
        chosen = _best_score(rows, u, v, load, least, smallest, largest, balance_weight, epsilon)
        part[i] = chosen
        hold(rows, u, v, chosen)
        load[chosen] += step
        largest = max(largest, load[chosen])
        num_least -= leave(least, chosen, step)
        if num_least == 0:
            smallest += 1
            num_least = find_least(load, smallest, least)
    limits[SMALLEST], limits[LARGEST], limits[NUM_LEAST] = smallest, largest, num_least


@kernel(inline="always")
def _best_score(rows, u, v, load, least, smallest, largest, balance_weight, epsilon):
    """Return the part with the largest HDRF score, the lowest of several.

    C_REP depends only on a part's kind (held by both ends, by u alone, by v alone, by neither), and C_BAL falls with
    the load. So for each kind only the least loaded part, the lowest one on a tie, can win. Of the parts that neither
    end holds, only the least loaded part of all can win: if an end holds that one, it has the same load and a C_REP of
    at least 1 in addition. With weights up to 1 the kind alone decides: C_BAL < 1, so a part of both ends, with C_REP =
    3, beats one of u alone, with 2 - theta_u.
    """
    both = least_loaded(rows, u, v, SHARED, load, least)
    if both >= 0 and balance_weight <= 1:
        return both
    u_alone = least_loaded(rows, u, v, _ALONE, load, least)
    v_alone = least_loaded(rows, v, u, _ALONE, load, least)
    chosen = first_part(least)
    if both < 0 and u_alone < 0 and v_alone < 0:
        return chosen
    spread = epsilon + (largest - smallest)
    degree_u, degree_v = np.int64(rows[u, 0]), np.int64(rows[v, 0])
    theta_u = degree_u / (degree_u + degree_v)
    gain_u, gain_v = 1.0 + (1.0 - theta_u), 1.0 + (1.0 - (1.0 - theta_u))
    best = balance_weight * ((largest - load[chosen]) / spread)
    if both >= 0:
        score = (gain_u + gain_v) + balance_weight * ((largest - load[both]) / spread)
        if score > best or (score == best and both < chosen):
            chosen, best = both, score
    if u_alone >= 0:
        score = gain_u + balance_weight * ((largest - load[u_alone]) / spread)
        if score > best or (score == best and u_alone < chosen):
            chosen, best = u_alone, score
    if v_alone >= 0:
        score = gain_v + balance_weight * ((largest - load[v_alone]) / spread)
        if score > best or (score == best and v_alone < chosen):
            chosen, best = v_alone, score
    return chosen


@kernel(inline="always")
def least_loaded(rows, u, v, flip, load, least):
    """Return u's least loaded part that v has too (SHARED) or has not (_ALONE), the lowest of several; -1: none."""
    chosen, fewest = -1, _NO_LOAD
    for word in range(len(least)):
        kind = np.uint64(rows[u, 1 + word]) & (np.uint64(rows[v, 1 + word]) ^ flip)
        # Of the least loaded parts the first will do. Not a branch: it would be guessed wrongly every other time.
        found = kind & least[word]
        kind = found & (~found + _ONE) if found else kind
        while kind:
            part = (word << _WORD_SHIFT) + np.int64(trailing_zeros(kind))
            kind &= kind - _ONE
            if load[part] < fewest:
                chosen, fewest = part, load[part]
    return chosen


@kernel(inline="always")
def first_part(least):
    """Return the lowest of the least loaded parts."""
    word = 0
    while least[word] == _NONE:
        word += 1
    return (word << _WORD_SHIFT) + np.int64(trailing_zeros(least[word]))


@kernel(inline="always")
def hold(rows, u, v, part):
    """Add the part to the replica sets of both ends."""
    word, bit = part >> _WORD_SHIFT, _ONE << np.uint64(part & (_WORD_BITS - 1))
    rows[u, 1 + word] = np.uint64(rows[u, 1 + word]) | bit
    rows[v, 1 + word] = np.uint64(rows[v, 1 + word]) | bit


@kernel(inline="always")
def leave(least, part, step):
    """Take a part whose load has grown by `step` out of the least loaded ones; return 1 if it was there, else 0."""
    word, place = part >> _WORD_SHIFT, np.uint64(part & (_WORD_BITS - 1))
    was_least = (least[word] >> place) & np.uint64(step)
    least[word] &= ~(was_least << place)
    return np.int64(was_least)


@kernel
def find_least(load, smallest, least):
    """Mark the parts with the smallest load, none being marked; return how many there are."""
    found = 0
    for part in range(len(load)):
        if load[part] == smallest:
            least[part >> _WORD_SHIFT] |= _ONE << np.uint64(part & (_WORD_BITS - 1))
            found += 1
    return found


_SALT = 0x444248  # separates this use of the seed from all others
_DEGREES_AHEAD = 24  # edges


_Degrees = namedtuple("_Degrees", "degree")  # (num_nodes,): placing changes nothing


@graph_partitioner("dbh")
def dbh(graph: GraphInput, num_parts: int, *, masters: str = "majority") -> np.ndarray:
    """Place each edge by a hash of its end with the lower degree, and give each node a master among its parts.

    Args:
        graph: the graph, without `balance`: edges are balanced by probability. Its seed is that of the hash, and of
            masters="random".
        masters: "majority": the part with most of a node's edges, the lowest of several; "last": the part of its
            last edge; "random": one of its parts, by a hash of (seed, node).

    Returns:
        (num_nodes,) int32 part ids. Nodes without an edge go to the parts with the fewest nodes.

    Cost: two passes. Memory a node: one id, and the masters': 4 bytes; for "majority" num_parts bytes with up to 16
        parts, 4 + min(degree, num_parts) with more.
    Source: Xie et al., Distributed Power-law Graph Computing, NIPS 2014, with the degrees of the whole graph.
        Differs: of two ends with one degree the lower id is hashed.
    """
    key = np.uint64(fold(graph.seed, _SALT))

    def place(src, dst, state: _Degrees, part) -> int:
        _place_by_hash(src, dst, state.degree, key, num_parts, part)
        return len(src)

    return place_edges(graph, num_parts, masters, _Degrees, _Degrees, [EdgePass("placing", place)])


@kernel
def _place_by_hash(src, dst, degree, key, num_parts, part):
    length = len(src)
    for i in range(length):
        if i + _DEGREES_AHEAD < length:
            prefetch(degree, np.int64(src[i + _DEGREES_AHEAD]))
            prefetch(degree, np.int64(dst[i + _DEGREES_AHEAD]))
        u, v = src[i], dst[i]
        u_lower = degree[u] < degree[v] or (degree[u] == degree[v] and u < v)
        part[i] = below(combine(key, u if u_lower else v), num_parts)


@graph_partitioner("powergraph")
def powergraph(graph: GraphInput, num_parts: int, *, masters: str = "majority") -> np.ndarray:
    """Place each edge (u, v) by the greedy rules, and give each node a master among its parts.

    With A(v) the parts that hold an edge of v, the edge goes to the least loaded part

    1. of A(u) and A(v) in common, where there is one;
    2. else, where neither is empty, of the end with more edges still to be placed, of either where these are equal;
    3. of the one that is not empty;
    4. of all, where both are empty.

    Args:
        graph: the graph, without `balance`: the rules balance edges. Its seed decides masters="random"
            alone.
        masters: "majority": the part with most of a node's edges, the lowest of several; "last": the part of its
            last edge; "random": one of its parts, by a hash of (seed, node).

    Returns:
        (num_nodes,) int32 part ids. Nodes without an edge go to the parts with the fewest nodes.

    Cost: two passes; time grows with the parts that hold an edge's ends, not with num_parts. Memory a node:
        4 + 4 * ceil(num_parts / 32) bytes, and the masters': 4 bytes; for "majority" num_parts bytes with up to 16
        parts, 4 + min(degree, num_parts) with more.
    Source: Gonzalez et al., PowerGraph, OSDI 2012, section 4.2, run in order on one machine ("coordinated"). Differs:
        of several least loaded parts the lowest is taken.
    """

    def start(degree) -> ReplicaState:
        state = ReplicaState.empty(degree, num_parts)
        state.rows[:, 0] = degree
        return state

    def place(src, dst, state: ReplicaState, part) -> int:
        _place_by_cases(src, dst, *state, part)
        return len(src)

    return place_edges(graph, num_parts, masters, ReplicaState, start, [EdgePass("placing", place)])


@kernel
def _place_by_cases(src, dst, rows, load, least, limits, part):
    """Place a block of edges by PowerGraph's four cases; writes `part`, changes the state."""
    flat, width, length = rows.reshape(-1), rows.shape[1], len(src)
    smallest, num_least = limits[SMALLEST], limits[NUM_LEAST]
    for i in range(length):
        if i + ROWS_AHEAD < length:
            prefetch(flat, width * np.int64(src[i + ROWS_AHEAD]))
            prefetch(flat, width * np.int64(dst[i + ROWS_AHEAD]))
        u, v = src[i], dst[i]
        chosen = _by_cases(rows, u, v, load, least)
        part[i] = chosen
        rows[u, 0] -= 1
        rows[v, 0] -= 1
        hold(rows, u, v, chosen)
        load[chosen] += 1
        num_least -= leave(least, chosen, 1)
        if num_least == 0:
            smallest += 1
            num_least = find_least(load, smallest, least)
    limits[SMALLEST], limits[NUM_LEAST] = smallest, num_least


@kernel(inline="always")
def _by_cases(rows, u, v, load, least):
    """Return the part that the greedy rules choose, the lowest of several."""
    both = least_loaded(rows, u, v, SHARED, load, least)
    if both >= 0:
        return both
    of_u, of_v = least_loaded(rows, u, u, SHARED, load, least), least_loaded(rows, v, v, SHARED, load, least)
    if of_u < 0 and of_v < 0:
        return first_part(least)
    if of_v < 0 or (of_u >= 0 and rows[u, 0] > rows[v, 0]):
        return of_u
    if of_u < 0 or rows[v, 0] > rows[u, 0]:
        return of_v
    u_first = load[of_u] < load[of_v] or (load[of_u] == load[of_v] and of_u < of_v)
    return of_u if u_first else of_v
