"""GREM as Armada's Algorithms 1 and 2 tell it, with the points that they leave open settled: slow and obvious.

Settled: a node is taken out of its part before room is looked for; among parts with room the best score wins, a tie
stays, then goes to the relatively lightest part, then to the lowest; scores are the mean of what was saved and what
the chunk shows, in float32, and are always saved; a bisection's sides may hold ceil(n share / p r) nodes.
"""

import math

import numpy as np

from lightning_gnnscale.rng import combine_array, fold


def grem_parts(edges, num_nodes, num_parts, mode, refine, chunk_edges, epsilon, seed_parts):
    """Return the part of each node.

    Args:
        edges: (u, v) in the order in which they are met.
        chunk_edges: edges a chunk.
        seed_parts: called as seed_parts(number of nodes, number of parts); the parts of the first chunk's nodes.
    """
    cap = math.floor(math.ceil(num_nodes / num_parts) * (1 + epsilon) * (1 + 1e-12))
    if mode == "direct" or num_parts == 1:
        return stream_once(edges, num_nodes, [1] * num_parts, [cap] * num_parts, refine, chunk_edges, seed_parts)
    part_of = [0] * num_nodes

    def divide(edges, nodes, first, num_parts):
        if num_parts == 1:
            for v in nodes:
                part_of[v] = first
            return
        share = [num_parts // 2, num_parts - num_parts // 2]
        slack = (cap * num_parts / max(1, len(nodes))) ** (1 / math.ceil(math.log2(num_parts)))
        caps = [min(math.ceil(len(nodes) * parts / num_parts * slack * (1 - 1e-12)), cap * parts) for parts in share]
        number = {v: i for i, v in enumerate(nodes)}
        local = [(number[u], number[v]) for u, v in edges]
        side = stream_once(local, len(nodes), share, caps, refine, chunk_edges, seed_parts)
        side_of = dict(zip(nodes, side, strict=True))
        for s, first_part in ((0, first), (1, first + share[0])):
            inner = [(u, v) for u, v in edges if side_of[u] == side_of[v] == s]
            divide(inner, [v for v in nodes if side_of[v] == s], first_part, share[s])

    divide(edges, list(range(num_nodes)), 0, num_parts)
    return part_of


def stream_once(edges, num_nodes, share, caps, refine, chunk_edges, seed_parts):
    """Place all nodes into len(caps) parts in one pass over the edges."""
    part_of, saved, sizes = {}, {}, [0] * len(caps)
    for start in range(0, len(edges), chunk_edges):
        neighbors = {}
        for u, v in edges[start : start + chunk_edges]:
            neighbors.setdefault(u, []).append(v)
            neighbors.setdefault(v, []).append(u)
        if start == 0:
            take_seed(neighbors, share, caps, part_of, sizes, seed_parts)
        for v in sorted(neighbors):
            if v in part_of and (start == 0 or not refine):
                continue
            scores = local_counts(neighbors[v], part_of, len(caps))
            if v in part_of:
                sizes[part_of[v]] -= 1
                scores = [(a + b) * np.float32(0.5) for a, b in zip(saved[v], scores, strict=True)]
            part_of[v] = best_part(scores, sizes, caps, part_of.get(v))
            sizes[part_of[v]] += 1
            saved[v] = scores
        if start == 0:
            for v in neighbors:
                saved[v] = local_counts(neighbors[v], part_of, len(caps))
    for v in range(num_nodes):
        if v not in part_of:
            part_of[v] = best_part([0] * len(caps), sizes, caps, None)
            sizes[part_of[v]] += 1
    return [part_of[v] for v in range(num_nodes)]


def take_seed(neighbors, share, caps, part_of, sizes, seed_parts):
    """Give the first chunk's nodes their seed parts, by ascending id, while there is room in them."""
    nodes = sorted(neighbors)
    even = len(set(share)) == 1
    num_parts = len(share) if even else sum(share)
    seed = list(range(len(nodes))) if len(nodes) < num_parts else seed_parts(len(nodes), num_parts)
    for v, part in zip(nodes, seed, strict=True):
        if not even:
            part = next(b for b in range(len(share)) if part < sum(share[: b + 1]))
        if sizes[part] < caps[part]:
            part_of[v] = part
            sizes[part] += 1


def local_counts(neighbors, part_of, num_parts):
    placed = [part_of[u] for u in neighbors if u in part_of]
    return [np.float32(placed.count(b)) for b in range(num_parts)]


def best_part(scores, sizes, caps, own):
    """Return the best part with room."""
    room = [b for b in range(len(caps)) if sizes[b] < caps[b]]
    return min(room, key=lambda b: (-scores[b], b != own, sizes[b] / caps[b], b))


def shuffled(edges, seed, bucket_edges=1 << 20, max_buckets=1024):
    """Return the edges in GREM's random order: spread over buckets, each permuted by Fisher and Yates' method."""
    num_buckets = min(max(1, math.ceil(len(edges) / bucket_edges)), max_buckets)
    buckets = [[] for _ in range(num_buckets)]
    for i, edge in enumerate(edges):
        buckets[draw(fold(seed, 0x4255434B), i, num_buckets)].append(edge)
    for b, bucket in enumerate(buckets):
        key = fold(seed, 0x5045524D, b)
        for i in range(len(bucket) - 1, 0, -1):
            j = draw(key, i, i + 1)
            bucket[i], bucket[j] = bucket[j], bucket[i]
    return [edge for bucket in buckets for edge in bucket]


def draw(key, value, bound):
    return ((int(combine_array(key, value)) >> 32) * bound) >> 32
