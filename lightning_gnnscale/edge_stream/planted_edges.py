"""Edges of a degree-corrected planted partition, each sampled by its own number in O(1) from alias tables."""

from typing import NamedTuple

import numpy as np

from ..jit import kernel
from ..rng import below, combine, unit


def largest_weight(exponent: float, ratio: float) -> float:
    """Return the cap c at which c / E[min(w, c)] is a given ratio >= 1, for P(w > x) = x ** (1 - exponent)."""
    low, high = 1.0, 1e15
    for _ in range(200):
        middle = np.sqrt(low * high)
        slope = exponent - 2.0
        mean_weight = 1.0 + (1.0 - middle**-slope) / slope
        low, high = (middle, high) if middle / mean_weight < ratio else (low, middle)
    return float(low)


def mean_size(smallest: float, largest: float, exponent: float, num_communities: int = 4096) -> float:
    """Return the mean of sizes s in [smallest, largest] whose density falls as s ** -exponent."""
    return float(_quantiles(smallest, largest, exponent, num_communities).mean())


def community_sizes(num_nodes: int, num_communities: int, exponent: float, largest: float) -> np.ndarray:
    """Return the (num_communities,) int64 sizes, descending and >= 1, at equally spaced quantiles of a power law.

    Their density is s ** -exponent up to `largest`; they add up to num_nodes, but for rounding.
    """
    low, high = 1e-9, largest
    for _ in range(200):
        middle = np.sqrt(low * high)
        total = _quantiles(middle, largest, exponent, num_communities).sum()
        low, high = (middle, high) if total < num_nodes else (low, middle)
    sizes = np.rint(_quantiles(low, largest, exponent, num_communities)).astype(np.int64)
    return np.maximum(sizes, 1)[::-1].copy()


def _quantiles(smallest: float, largest: float, exponent: float, count: int) -> np.ndarray:
    share = (np.arange(count) + 0.5) / count
    if abs(exponent - 1.0) < 1e-9:
        return smallest * (largest / smallest) ** share
    power = 1.0 - exponent
    return largest * ((smallest / largest) ** power * (1.0 - share) + share) ** (1.0 / power)


@kernel
def settle(key, neighbors_inside, sizes, out):
    """Give each node a community with more nodes than it has neighbours inside, in proportion to the sizes.

    Args:
        neighbors_inside: (num_nodes,) float64, expected neighbours of a node in its own community.
        sizes: (num_communities,) int64, descending; they add up to less than 2**31.
        out: (num_nodes,) int32; a node for which no community is large enough goes to the largest one.
    """
    ends = np.cumsum(sizes)
    for v in range(len(out)):
        low, high = 1, len(sizes)
        while low < high:  # the last community of the front that is large enough
            middle = (low + high + 1) // 2
            if sizes[middle - 1] > neighbors_inside[v]:
                low = middle
            else:
                high = middle - 1
        out[v] = np.searchsorted(ends[:low], below(combine(key, v), ends[low - 1]), side="right")


SAMPLE_VERSION = 1  # raise it with any change that samples other edges: it is part of the fingerprint
_WEIGHT_ONE = 65536.0  # weights are whole multiples of 2**-16, so that a last bit of pow() changes nothing
_MAX_TRIES = 64
_STAGE_EDGES = 512
_WITHIN_SAMPLE, _COMMUNITY_SAMPLE, _SRC_SAMPLE, _OTHER_SAMPLE, _DST_SAMPLE = 0, 1, 2, 100, 200  # one number a sample
_LOW_32 = np.uint64(0xFFFFFFFF)


class SampleTables(NamedTuple):
    """The tables that edges are sampled from.

    Attributes:
        offsets: (num_communities + 1,) int64, where each community's nodes begin in `nodes`.
        nodes: (num_nodes, 3) uint32 alias slots: threshold, own node, other node.
        inside: (num_communities, 3) uint32 alias slots over the communities of two nodes or more.
        anywhere: (num_communities, 3) uint32 alias slots over all communities that have nodes.
        homophily: share of the edges inside; 1 where only one community has nodes.
    """

    offsets: np.ndarray
    nodes: np.ndarray
    inside: np.ndarray
    anywhere: np.ndarray
    homophily: float


def build_tables(community: np.ndarray, num_communities: int, weight: np.ndarray, homophily: float) -> SampleTables:
    """Return the tables for nodes with these communities and expected degrees.

    `weight` holds the latter up to a factor, >= 1; it is rounded in place to multiples of 2**-16.
    """
    np.rint(weight * _WEIGHT_ONE, out=weight)
    offsets, order = _group(community, num_communities)
    nodes = np.empty((len(community), 3), np.uint32)
    sums, sizes = np.zeros(num_communities), np.diff(offsets)
    for c in range(num_communities):
        members = order[offsets[c] : offsets[c + 1]]
        sums[c] = weight[members].sum()
        _alias(members, weight[members], nodes[offsets[c] : offsets[c + 1]])
    everyone = np.arange(num_communities, dtype=np.int32)
    inside, anywhere = (np.empty((num_communities, 3), np.uint32) for _ in range(2))
    _alias(everyone, np.where(sizes >= 2, sums, 0.0), inside)
    _alias(everyone, sums, anywhere)
    return SampleTables(offsets, nodes, inside, anywhere, 1.0 if (sizes > 0).sum() == 1 else float(homophily))


@kernel
def sample_edges(key, first_edge, offsets, nodes, inside, anywhere, homophily, out_src, out_dst):
    """Sample the edges first_edge, first_edge + 1, ... into two int32 arrays of one length.

    In stages, so that the reads of one stage do not wait for each other: positions, reads, resampling of
    self-loops.
    """
    slots = np.empty((2, _STAGE_EDGES), np.int64)
    randoms = np.empty((2, _STAGE_EDGES), np.uint64)
    for start in range(0, len(out_src), _STAGE_EDGES):
        stop = min(start + _STAGE_EDGES, len(out_src))
        for i in range(start, stop):
            edge = combine(key, first_edge + i)
            c, other = _communities(edge, offsets, inside, anywhere, homophily)
            randoms[0, i - start] = combine(edge, _SRC_SAMPLE)
            randoms[1, i - start] = combine(edge, _DST_SAMPLE)
            slots[0, i - start] = offsets[c] + below(randoms[0, i - start], offsets[c + 1] - offsets[c])
            slots[1, i - start] = offsets[other] + below(randoms[1, i - start], offsets[other + 1] - offsets[other])
        for i in range(start, stop):
            out_src[i] = _item(nodes, slots[0, i - start], randoms[0, i - start])
            out_dst[i] = _item(nodes, slots[1, i - start], randoms[1, i - start])
        for i in range(start, stop):
            if out_src[i] == out_dst[i]:
                edge = combine(key, first_edge + i)
                other = _communities(edge, offsets, inside, anywhere, homophily)[1]
                out_dst[i] = _other_than(np.int64(out_src[i]), edge, offsets[other], offsets[other + 1], nodes)


@kernel
def _communities(edge, offsets, inside, anywhere, homophily):
    """Return the communities of an edge's two ends."""
    num_communities = len(offsets) - 1
    if unit(combine(edge, _WITHIN_SAMPLE)) < homophily:
        random = combine(edge, _COMMUNITY_SAMPLE)
        c = _item(inside, below(random, num_communities), random)
        return c, c
    random = combine(edge, _COMMUNITY_SAMPLE)
    c = _item(anywhere, below(random, num_communities), random)
    other = c
    attempt = 0
    while other == c and attempt < _MAX_TRIES:
        random = combine(edge, _OTHER_SAMPLE + attempt)
        other = _item(anywhere, below(random, num_communities), random)
        attempt += 1
    while other == c or offsets[other] == offsets[other + 1]:
        other = (other + 1) % num_communities
    return c, other


@kernel
def _other_than(src, edge, first, last, nodes):
    """Sample the second end again until it is not the first; its community has two nodes or more."""
    for attempt in range(1, _MAX_TRIES):
        random = combine(edge, _DST_SAMPLE + attempt)
        dst = _item(nodes, first + below(random, last - first), random)
        if dst != src:
            return dst
    dst = np.int64(nodes[first, 1])
    return dst if dst != src else np.int64(nodes[first + 1, 1])


@kernel
def _item(slots, slot, random):
    """Return the own or the other item of a slot, as the lower bits of its random number say."""
    own_or_other = 1 + np.int64((random & _LOW_32) >= np.uint64(slots[slot, 0]))
    return np.int64(slots[slot, own_or_other])


@kernel
def _alias(items, weight, slots):
    """Fill the alias table of some items (Vose's two worklists, kept at the two ends of one array)."""
    size = len(items)
    if size == 0:
        return
    total = 0.0
    for i in range(size):
        total += weight[i]
    mean = total / size
    left = weight.copy()
    work = np.empty(size, np.int64)
    small, large = 0, size
    for i in range(size):
        slots[i, 0] = np.uint32(0xFFFFFFFF)
        slots[i, 1] = np.uint32(items[i])
        slots[i, 2] = np.uint32(items[i])
        if left[i] < mean:
            work[small] = i
            small += 1
        else:
            large -= 1
            work[large] = i
    while small > 0 and large < size:
        small -= 1
        i, j = work[small], work[large]
        slots[i, 0] = np.uint32(left[i] / mean * 4294967295.0)
        slots[i, 2] = np.uint32(items[j])
        left[j] -= mean - left[i]
        if left[j] < mean:
            large += 1
            work[small] = j
            small += 1


@kernel
def _group(community, num_communities):
    """Return (num_communities + 1,) offsets and the nodes by community, ascending within one."""
    offsets = np.zeros(num_communities + 1, np.int64)
    for v in range(len(community)):
        offsets[community[v] + 1] += 1
    for c in range(num_communities):
        offsets[c + 1] += offsets[c]
    cursor = offsets[:-1].copy()
    order = np.empty(len(community), np.int32)
    for v in range(len(community)):
        order[cursor[community[v]]] = v
        cursor[community[v]] += 1
    return offsets, order
