"""The expected cut of greedy streaming, with and without refinement: Armada's argument for refining, as a number.

Take a partition of the whole graph as the reference. Edges come in random order, in chunks of a share s of them; a
node is placed for good in the first chunk that meets it, with the part that most of its neighbours there belong to.
Let node v have d edges, d_b of them to reference part b. Each edge falls into one of the 1 / s chunks independently,
so the neighbours that v has seen when it is placed are those in its lowest chunk: a sample from (d_1, ..., d_p) of at
least one edge, about s d where that is many, all d where s = 1. With X_b of them in part b, v goes to B = argmax X_b
(ties at random), and d - d_B of its edges are cut. The expected share of cut edges, with v placed by the rule and all
others placed as in the reference, is

    sum over v of E[d - d_B(v)] / (2 num_edges)

Both ends of an edge are placed by the rule, so with P_v(b) the probability that v goes to b, and both independent,

    sum over edges (u, v) of 1 - sum over b of P_u(b) P_v(b), over num_edges

With refinement v is placed again in each chunk that meets it, and what it has seen is halved each time: after m chunks
with v the counts of the last one weigh 1/2, of the one before 1/4, of the first 2^(1 - m). v goes to the part with the
largest sum of weighted counts at the end. So it goes by few of its neighbours where chunks are small, but by more than
in the first chunk alone.

Assumed: neighbours are where the reference has them, all of them are placed already, and there is always space. None
of this is true while streaming (a misplaced node misleads those after it, and a small first chunk knows little of the
reference), so both are lower estimates; the measured cut exceeds them by the sum of these errors.
"""

import os

import numpy as np

from lightning_gnnscale.errors import check_number
from lightning_gnnscale.jit import kernel
from lightning_gnnscale.partitioner.graph_access.scratch import AUTO
from lightning_gnnscale.partitioner.graph_access.simple_graph import SimpleGraph, open_simple_graph
from lightning_gnnscale.partitioner.quality import check_parts
from lightning_gnnscale.rng import below, combine, fold, unit

_SALT = 0x45585043


def expected_greedy_cut(
    stream,
    part_id: np.ndarray,
    num_parts: int,
    chunk_edges_share: float,
    *,
    ends: int = 1,
    refine: bool = False,
    samples: int = 16,
    seed: int = 0,
    deduplicate: bool | None = None,
    scratch: str | os.PathLike | None = AUTO,
    progress=None,
    graph: SimpleGraph | None = None,
) -> float:
    """Return the expected share of cut edges of greedy streaming (GREM), neighbours assumed to be placed well.

    Args:
        stream: an EdgeStream.
        part_id: (num_nodes,) integers in [0, num_parts), the reference: a partition of the whole graph.
        num_parts: number of parts, >= 1.
        chunk_edges_share: edges a chunk as a share of all, in (0, 1].
        ends: 1 or 2, ends of an edge that are placed by the rule; see the module's text.
        refine: whether nodes are placed again in each chunk that meets them.
        samples: samples a node, >= 1; the chunks of its edges are sampled, the rest follows.
        seed: decides the samples.
        deduplicate, scratch, progress, graph: see `evaluate_partitioning`.

    Returns:
        The share, in [0, 1]; 0 without edges. Its standard error is at most
        sqrt(sum of squared degrees / samples) / (4 num_edges) with one end.

    Raises:
        ValueError: shapes or values that do not fit.

    Cost: one pass, two with both ends, and one more where the layout is not known; O(samples * num_edges) time, with
        refinement times the logarithm of a node's edges;
        4 * num_parts bytes a node, 8 with both ends.
    Source: after Waleffe et al., Armada, the analysis of greedy streaming; derived again here.
    """
    check_number("chunk_edges_share", chunk_edges_share, at_least=0)
    if not 0 < chunk_edges_share <= 1:
        raise ValueError(f"chunk_edges_share must be in (0, 1], got {chunk_edges_share!r}")
    check_number("samples", samples, at_least=1)
    if ends not in (1, 2):
        raise ValueError(f"ends must be 1 or 2, got {ends!r}")
    if graph is None:
        graph, _ = open_simple_graph(stream, None, deduplicate, scratch, progress)
    check_parts(graph.num_nodes, part_id, num_parts)
    if not graph.num_edges:
        return 0.0
    tally = np.zeros((graph.num_nodes, num_parts), np.int32)
    for src, dst in graph.one_pass("neighbours by part", progress):
        _count_neighbors(src, dst, part_id, tally)
    chosen = np.zeros((graph.num_nodes if ends == 2 else 0, num_parts), np.float32)
    key = np.uint64(fold(seed, _SALT))
    cut = _sample_placements(key, tally, chunk_edges_share, int(samples), chosen, refine)
    if ends == 1:
        return cut / (2 * graph.num_edges)
    together = sum(_expect_together(src, dst, chosen) for src, dst in graph.one_pass("both ends", progress))
    return 1 - together / graph.num_edges


@kernel
def _count_neighbors(src, dst, part_id, tally):
    for i in range(len(src)):
        u, v = src[i], dst[i]
        tally[u, part_id[v]] += 1
        tally[v, part_id[u]] += 1


@kernel
def _sample_placements(key, tally, share, samples, chosen, refine):
    """Return the mean number of cut edges, summed over nodes, and add each node's shares of parts to `chosen`."""
    num_parts = tally.shape[1]
    seen = np.zeros(num_parts)
    total = 0.0
    for v in range(len(tally)):
        degree = np.int64(0)
        for b in range(num_parts):
            degree += tally[v, b]
        if degree == 0:
            continue
        chunk, part = np.empty(degree, np.int64), np.empty(degree, np.int64)
        cut = np.int64(0)
        for sample in range(samples):
            draw_key = combine(combine(key, v), sample)
            edge = 0
            for b in range(num_parts):
                for _ in range(tally[v, b]):
                    chunk[edge] = np.int64(unit(combine(draw_key, edge)) / share)
                    part[edge] = b
                    edge += 1
            if refine:
                _weigh(chunk, part, seen)
            else:
                _first_chunk(chunk, part, seen)
            best = _most_seen(seen, combine(draw_key, edge))
            cut += degree - tally[v, best]
            if len(chosen):
                chosen[v, best] += np.float32(1 / samples)
        total += cut / samples
    return total


@kernel
def _first_chunk(chunk, part, seen):
    """Count the neighbours of the lowest chunk by part."""
    seen[:] = 0
    first = chunk.min()
    for i in range(len(chunk)):
        if chunk[i] == first:
            seen[part[i]] += 1


@kernel
def _weigh(chunk, part, seen):
    """Sum up the neighbours by part, chunk after chunk, what was there halved before each."""
    seen[:] = 0
    order, num_chunks = np.argsort(chunk), 1
    for i in range(len(order)):
        if i > 0 and chunk[order[i]] != chunk[order[i - 1]]:
            if num_chunks > 1:
                seen *= 0.5  # the newest counts hold twice their weight, as all do
            num_chunks += 1
        seen[part[order[i]]] += 1


@kernel
def _most_seen(seen, random):
    """Return the index of the largest count, one of several at random."""
    most, ties = seen.max(), 0
    for b in range(len(seen)):
        ties += seen[b] == most
    left = below(random, ties)
    for b in range(len(seen)):
        if seen[b] == most:
            if left == 0:
                return b
            left -= 1
    return 0


@kernel
def _expect_together(src, dst, chosen):
    """Sum up the probabilities that the two ends of an edge meet in one part."""
    total = 0.0
    for i in range(len(src)):
        for b in range(chosen.shape[1]):
            total += np.float64(chosen[src[i], b]) * np.float64(chosen[dst[i], b])
    return total
