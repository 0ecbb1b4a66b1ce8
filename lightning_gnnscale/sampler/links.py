"""Positive and negative samples of links: neighbours, ends of short random walks, nodes sampled by degree."""

from typing import NamedTuple

import numpy as np

from ..errors import short
from ..graph import CSC
from ..jit import kernel
from ..rng import below, combine, mix64, unit

MAX_NODES = 1 << 31  # of one sample: `rng.below` maps 32 bits
MAX_TRIES = 64  # samples of one negative before it is given up: the first end is joined to almost every node
CHOICES = ("end", "any")


class AliasTable(NamedTuple):
    """Weights over [0, num_nodes) in a form that is sampled from in constant time.

    Attributes:
        threshold: (num_nodes,) float64 in [0, 1], the probability with which a slot stands for itself.
        alias: (num_nodes,) int64, what it stands for otherwise.

    Source: Walker 1977, in Vose's form (IEEE Transactions on Software Engineering, 1991).
    """

    threshold: np.ndarray
    alias: np.ndarray

    @classmethod
    def of(cls, weights: np.ndarray) -> "AliasTable":
        """Build the table of some weights.

        Args:
            weights: (num_nodes,) real, >= 0 and finite, not all 0.

        Raises:
            ValueError: a weight is negative or not finite, or none is above 0.

        Cost: O(num_nodes) time, 32 bytes a node while it runs, 16 after.
        """
        weights = np.ascontiguousarray(weights, np.float64)
        if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
            raise ValueError("weights of negative samples must be finite, >= 0 and not all 0; use uniform negatives")
        return cls(*_build_alias(weights))


def sample_positives(csc: CSC, seeds: np.ndarray, key: int, walk_length: int = 1, choose: str = "end") -> np.ndarray:
    """Sample one positive for each seed: a uniform neighbour, or a node of a short random walk.

    A walk steps to a uniform in-neighbour; it ends early at a node that has none.

    Args:
        csc: rows of the graph; rows of seeds and of what a walk passes are read.
        seeds: (num,) integer row numbers.
        key: uint64; with a seed's place it decides its walk.
        walk_length: steps, >= 1; 1 samples a neighbour.
        choose: "end" of the walk, or "any": one of its nodes after the seed, each alike.

    Returns:
        (num,) int64. A seed without neighbours gets itself, and a walk may come back to it: no positive then.

    Raises:
        ValueError: walk_length or choose out of range.

    Cost: O(num * walk_length) random reads.
    Source: Hamilton et al., GraphSAGE, NeurIPS 2017, section 3.2 (v co-occurs near u on a fixed-length random walk).
    """
    if walk_length < 1:
        raise ValueError(f"walk_length must be at least 1, got {walk_length}")
    if choose not in CHOICES:
        raise ValueError(f"choose must be one of {', '.join(CHOICES)}, got {short(choose)}")
    out = np.empty(len(seeds), np.int64)
    seeds = np.ascontiguousarray(seeds, np.int64)
    _walk(np.asarray(csc.indptr), np.asarray(csc.indices), seeds, np.uint64(key), walk_length, choose == "any", out)
    return out


def sample_negatives(num_nodes: int, num: int, key: int, table: AliasTable | None = None) -> np.ndarray:
    """Sample nodes with replacement, uniformly or in proportion to a table's weights.

    Args:
        num_nodes: Number of nodes, in [1, 2**31]; nodes are sampled from [0, num_nodes).
        num: Number of samples, >= 0.
        key: uint64; each sample is a function of the key and the sample's index.
        table: Alias table of (num_nodes,) weights; None: uniform. GraphSAGE and word2vec use degree ** 0.75.

    Returns:
        (num,) int64. Neighbours of a seed may be among them, as in the source.

    Raises:
        ValueError: num_nodes out of range, or not that of the table.

    Cost: one hash a sample, two with a table and one random read.
    """
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"num_nodes of negative samples must be in [1, {MAX_NODES}], got {num_nodes}")
    if table is not None and len(table.alias) != num_nodes:
        raise ValueError(f"the table of negative samples must have {num_nodes} nodes, got {len(table.alias)}")
    out = np.empty(num, np.int64)
    if table is None:
        _sample_uniform(num_nodes, np.uint64(key), out)
    else:
        _sample_alias(table.threshold, table.alias, np.uint64(key), out)
    return out


def sample_link_negatives(
    csc: CSC,
    held: CSC,
    sources: np.ndarray,
    num: int,
    key: int,
    first: int = 0,
    store_nid: np.ndarray | None = None,
    among: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Sample false other ends for links that are evaluated: nodes that no known link joins to the first end.

    Args:
        csc: the graph that training sees; rows ascending.
        held: links held out of it, in both directions; rows ascending.
        sources: (num_links,) int64 first ends.
        num: negatives a link, >= 1, with replacement.
        key: uint64; with the number of a link and a sample's place it decides the sample.
        first: number of the first link: chunks of the links are sampled as the whole would be.
        store_nid: (num_nodes,) what a sampled number stands for, so that relabelled stores sample the same nodes; or
        None.
        among: (num_links,) int64 first number and how many follow, from which a link's negatives are sampled: those of
            a node type. None: all.

    Returns:
        (num_links, num) int64, -1 where `MAX_TRIES` samples in a row were the first end itself or joined to it.

    Cost: a few hashes and two binary searches a sample.
    Source: the filtered setting of Bordes et al., TransE, NeurIPS 2013.
    """
    out = np.empty((len(sources), num), np.int64)
    names = np.empty(0, np.int64) if store_nid is None else np.asarray(store_nid)
    graph = (np.asarray(csc.indptr), np.asarray(csc.indices), np.asarray(held.indptr), np.asarray(held.indices))
    if among is None:
        among = np.zeros(len(sources), np.int64), np.full(len(sources), csc.num_rows, np.int64)
    _sample_link_negatives(*graph, np.ascontiguousarray(sources, np.int64), np.uint64(key), first, names, *among, out)
    return out


def count_joined(csc: CSC, edges: np.ndarray) -> int:
    """Return how many of (2, num) pairs a graph with ascending rows joins, in one direction or the other."""
    edges = np.ascontiguousarray(edges, np.int64)
    return int(_count_joined(np.asarray(csc.indptr), np.asarray(csc.indices), edges))


def count_triples(csc: CSC, edge_type: np.ndarray, edges: np.ndarray, relation: np.ndarray) -> int:
    """Return how many of some triples are edges of a graph with ascending rows.

    Args:
        csc: The graph.
        edge_type: (num_edges,) edge type of each edge.
        edges: (2, num) heads and tails.
        relation: (num,) edge type of each.
    """
    edges, relation = np.ascontiguousarray(edges, np.int64), np.ascontiguousarray(relation, np.int64)
    return int(_count_triples(np.asarray(csc.indptr), np.asarray(csc.indices), np.asarray(edge_type), edges, relation))


@kernel
def _count_triples(indptr, indices, edge_type, edges, relation):
    count = 0
    for i in range(edges.shape[1]):
        head, tail = edges[0, i], edges[1, i]
        edge = _first_edge(indptr, indices, tail, head)
        while edge < indptr[tail + 1] and indices[edge] == head:
            if edge_type[edge] == relation[i]:
                count += 1
                break
            edge += 1
    return count


@kernel
def _first_edge(indptr, indices, row, other):
    """Return the first position in a row whose source is not below `other`; the row's end where there is none."""
    begin, end = indptr[row], indptr[row + 1]
    while begin < end:
        middle = (begin + end) // 2
        if indices[middle] < other:
            begin = middle + 1
        else:
            end = middle
    return begin


@kernel
def _joined(indptr, indices, one, other):
    begin = _first_edge(indptr, indices, one, other)
    return begin < indptr[one + 1] and indices[begin] == other


@kernel
def _count_joined(indptr, indices, edges):
    count = 0
    for i in range(edges.shape[1]):
        one, other = edges[0, i], edges[1, i]
        count += _joined(indptr, indices, one, other) or _joined(indptr, indices, other, one)
    return count


@kernel
def _sample_link_negatives(indptr, indices, held_indptr, held_indices, sources, key, first, names, low, size, out):
    for i in range(len(sources)):
        source = sources[i]
        mine = combine(key, first + i)
        for place in range(out.shape[1]):
            out[i, place] = -1
            for attempt in range(MAX_TRIES):
                node = low[i] + below(combine(combine(mine, place), attempt), size[i])
                if len(names):
                    node = np.int64(names[node])
                known = node == source or _joined(held_indptr, held_indices, source, node)
                if known or _joined(indptr, indices, source, node) or _joined(indptr, indices, node, source):
                    continue
                out[i, place] = node
                break


@kernel
def _walk(indptr, indices, seeds, key, walk_length, anywhere, out):
    for i in range(len(seeds)):
        node = seeds[i]
        mine = combine(key, i)
        # One of the nodes after the seed, each alike: the end of a walk whose length is sampled.
        steps = 1 + below(combine(mine, walk_length), walk_length) if anywhere else walk_length
        for step in range(steps):
            degree = indptr[node + 1] - indptr[node]
            if degree == 0:
                break
            node = np.int64(indices[indptr[node] + below(combine(mine, step), degree)])
        out[i] = node


@kernel
def _sample_uniform(num_nodes, key, out):
    for i in range(len(out)):
        out[i] = below(combine(key, i), num_nodes)


@kernel
def _sample_alias(threshold, alias, key, out):
    for i in range(len(out)):
        random = combine(key, i)
        slot = below(random, len(alias))
        out[i] = slot if unit(mix64(random)) < threshold[slot] else alias[slot]


@kernel
def _build_alias(weights):
    num = len(weights)
    total = 0.0
    for i in range(num):
        total += weights[i]
    threshold = np.empty(num, np.float64)
    alias = np.arange(num)
    # One stack grows from each end: slots below the mean, and the others.
    stack = np.empty(num, np.int64)
    small, large = 0, num
    for i in range(num):
        threshold[i] = weights[i] / total * num
        if threshold[i] < 1.0:
            stack[small] = i
            small += 1
        else:
            large -= 1
            stack[large] = i
    while small > 0 and large < num:
        small -= 1
        poor, rich = stack[small], stack[large]
        alias[poor] = rich
        threshold[rich] -= 1.0 - threshold[poor]
        if threshold[rich] < 1.0:
            large += 1
            stack[small] = rich
            small += 1
    for i in range(small):  # what rounding left over
        threshold[stack[i]] = 1.0
    for i in range(large, num):
        threshold[stack[i]] = 1.0
    return threshold, alias
