"""What decides, besides random numbers, which edges of a row are sampled: a preference for some nodes, times, weights.

In kernels, rows are given by `start` and `degree`, (num_rows,) int64, and the edges sampled from row i are
edge[indptr[i]:indptr[i + 1]]. A `weight` of no entries stands for equal weights.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...graph import CSC
from ...jit import kernel
from ...rng import GOLDEN, mix64, unit

# Of a logarithm by operations that every processor rounds alike, which those of C libraries and of GPUs are not.
ROOT_HALF_BITS = 0x3FE6A09E667F3BCD  # sqrt(1/2) as float64
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
LOG_TERMS = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
_L1, _L2, _L3, _L4, _L5, _L6, _L7 = LOG_TERMS
_ABOVE_ROUNDING = 1.0 + 1e-12
_ROOT_HALF, _52 = np.int64(ROOT_HALF_BITS), np.int64(52)


class SplitRows(NamedTuple):
    """The rows of a CSC, neighbours in a set Q before the others; both groups keep their order.

    Attributes:
        indices: (num_edges,) as `csc.indices`, row v at its old place.
        num_inside: (num_rows,) int32, neighbours of each row that are in Q.
        position: (num_edges,) int32, where in its row each edge was; None where edge positions are not needed.
    """

    indices: np.ndarray
    num_inside: np.ndarray
    position: np.ndarray | None = None


def split_rows(csc: CSC, inside: np.ndarray, with_position: bool = False) -> SplitRows:
    """Split the rows of a graph in memory.

    Args:
        csc: the graph.
        inside: (num_nodes,) bool, the set Q.
        with_position: also keep where each edge was.

    Cost: two passes over the edges, about 5 ns each; 4 bytes an edge and a node, 4 bytes an edge more with positions.
    """
    indices = np.empty(csc.num_edges, csc.indices.dtype)
    position = np.empty(csc.num_edges if with_position else 0, np.int32)
    num_inside = np.empty(csc.num_rows, np.int32)
    split_range(csc.indptr, csc.indices, inside, 0, csc.num_rows, 0, indices, position, num_inside)
    return SplitRows(indices, num_inside, position if with_position else None)


@kernel
def split_range(indptr, indices, inside, begin, end, base, out_indices, out_position, out_inside):
    """Split the rows begin..end-1 of a CSC; edge e goes to e - base of the outputs, row v to v - begin.

    Args:
        out_indices, out_position, out_inside: filled; one of length 0 is left out.
    """
    for node in range(begin, end):
        first, last = indptr[node], indptr[node + 1]
        count = 0
        for edge in range(first, last):
            count += inside[indices[edge]]
        preferred = first - base
        other = preferred + count
        if len(out_inside):
            out_inside[node - begin] = count
        for edge in range(first, last):
            source = indices[edge]
            take = inside[source]
            to = preferred if take else other
            preferred += take
            other += not take
            if len(out_indices):
                out_indices[to] = source
            if len(out_position):
                out_position[to] = edge - first


def checked_split(split, scale, csc, num_hops, replace, return_e_id) -> Sequence[SplitRows] | None:
    """Return the split rows of each hop, or None where nothing is preferred; see `sample_neighbors`."""
    if not (math.isfinite(scale) and scale >= 1):
        raise ValueError(f"scale must be >= 1 and finite, got {scale}")
    if split is None or scale == 1:
        return None
    if replace:
        raise ValueError("a preference needs samples without replacement: use replace=False, or scale=1")
    if len(split) != num_hops:
        raise ValueError(f"split must have rows for each of {num_hops} hops, got {len(split)}")
    for rows in split:
        shapes = (len(rows.indices), len(rows.num_inside), rows.indices.dtype)
        if shapes != (csc.num_edges, csc.num_rows, csc.indices.dtype):
            raise ValueError(
                f"split rows are of {shapes[1]} rows and {shapes[0]} edges of {shapes[2]}, the graph has "
                f"{csc.num_rows} and {csc.num_edges} of {csc.indices.dtype}"
            )
        if return_e_id and rows.position is None:
            raise ValueError("return_e_id needs the positions of split rows: split them with_position=True")
    return split


@kernel
def until(time, indices, by_edge, seed_time, owner, strict, start, degree):
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
def lay_out(weight, start, degree, fanout, replace, indptr):
    """Fill indptr[1:] from indptr[0] on; return whether all weights are valid. Edges of weight 0 are not sampled."""
    right = True
    for i in range(len(degree)):
        there = degree[i]
        if len(weight):
            there = 0
            for edge in range(start[i], start[i] + degree[i]):
                there += weight[edge] > 0
                right &= 0 <= weight[edge] < np.inf
        if fanout >= 0:
            there = (fanout if there else 0) if replace else min(fanout, there)
        indptr[i + 1] = indptr[i] + there
    return right


@kernel
def weigh(weight, start, degree, fanout, replace, indptr, edge, out):
    """Give edges the length of the row over samples; by weight the sum of weights over samples and the edge's own."""
    for i in range(len(degree)):
        total, taken = 0.0, indptr[i + 1] - indptr[i]
        if len(weight) == 0 or (not replace and degree[i] <= fanout):
            # Of a row by weight all that could be sampled was.
            out[indptr[i] : indptr[i + 1]] = 1.0 if len(weight) else degree[i] / max(taken, 1)
            continue
        for place in range(start[i], start[i] + degree[i]):
            total += weight[place]
        for place in range(indptr[i], indptr[i + 1]):
            out[place] = total / (taken * weight[edge[place]])


@kernel
def pick_latest(weight, start, degree, indptr, edge):
    """Take the last edges of each row, none of weight 0."""
    for i in range(len(start)):
        place, at = start[i] + degree[i], indptr[i + 1]
        while at > indptr[i]:
            place -= 1
            if len(weight) == 0 or weight[place] > 0:
                at -= 1
                edge[at] = place


@kernel
def pick_weighted(hop_key, name, weight, fanout, replace, start, degree, indptr, edge):
    """Sample edges by weight: with replacement by the sum of weights, without by the smallest exponential clocks.

    Source: Efraimidis and Spirakis, Information Processing Letters 2006.
    """
    largest = 0
    for i in range(len(degree)):
        largest = max(largest, degree[i])
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
                share = unit(mix64(row_key + np.uint64(j + 1) * GOLDEN))
                if count == take and share > value[edge[at] - first] * weight[first + j] * _ABOVE_ROUNDING:
                    continue  # -log(1 - share) is at least the share: most edges need no logarithm
                clock = minus_log(1.0 - share) / weight[first + j]
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
def minus_log(x):
    """Return -log(x) of a float64 in (0, 1], within one unit in the last place; the same bits on every machine.

    Source: `e_log.c` of FreeBSD's msun (Sun Microsystems, 1993).
    """
    bits = np.float64(x).view(np.int64)
    power = (bits - _ROOT_HALF) >> _52
    f = np.int64(bits - (power << _52)).view(np.float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (_L2 + w * (_L4 + w * _L6))
    odd = z * (_L1 + w * (_L3 + w * (_L5 + w * _L7)))
    half = 0.5 * f * f
    k = np.float64(power)
    return ((half - (s * (half + (odd + even)) + k * LN2_LOW)) - f) - k * LN2_HIGH


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
