"""GREM as Armada's Algorithms 1 and 2 tell it, with the points that they leave open settled: slow and obvious.

Settled: a node is taken out of its part before space is looked for; among parts with space the best score wins, a tie
stays, then goes to the relatively lightest part, then to the lowest; scores are the mean of what was saved and what
the chunk shows, in float32, and are always saved; a bisection's sides may hold ceil(n share / p r) nodes. With several
weights a node each dimension has a cap; where no part has space, the node goes to the one that passes its caps least.
"""

import math

import numpy as np

from lightning_gnnscale.rng import combine_array, fold


def grem_parts(edges, num_nodes, num_parts, mode, refine, chunk_edges, epsilon, seed_parts, weights=None, slacks=None):
    """Return the part of each node.

    Args:
        edges: (u, v) in the order in which they are met.
        chunk_edges: edges a chunk.
        seed_parts: called as seed_parts(number of nodes, number of parts); the parts of the first chunk's nodes.
        weights: what each node weighs in each dimension; None: one, in one dimension that `epsilon` bounds.
        slacks: largest part over the mean in each dimension of the weights.
    """
    if weights is None:
        weights = [(1,)] * num_nodes
        cap = [math.floor(math.ceil(num_nodes / num_parts) * (1 + epsilon) * (1 + 1e-12))]
    else:
        totals = [sum(weight[d] for weight in weights) for d in range(len(slacks))]
        cap = [
            max(math.floor(slack * total / num_parts * (1 + 1e-12)), -(-total // num_parts))
            for slack, total in zip(slacks, totals, strict=True)
        ]
    if mode == "direct" or num_parts == 1:
        return stream_once(edges, weights, [1] * num_parts, [cap] * num_parts, refine, chunk_edges, seed_parts)
    part_of = [0] * num_nodes

    def divide(edges, nodes, first, num_parts):
        if num_parts == 1:
            for v in nodes:
                part_of[v] = first
            return
        share = [num_parts // 2, num_parts - num_parts // 2]
        totals = [sum(weights[v][d] for v in nodes) for d in range(len(cap))]
        caps = list(zip(*(side_caps(totals[d], share, cap[d]) for d in range(len(cap))), strict=True))
        number = {v: i for i, v in enumerate(nodes)}
        local = [(number[u], number[v]) for u, v in edges]
        side = stream_once(local, [weights[v] for v in nodes], share, caps, refine, chunk_edges, seed_parts)
        side_of = dict(zip(nodes, side, strict=True))
        for s, first_part in ((0, first), (1, first + share[0])):
            inner = [(u, v) for u, v in edges if side_of[u] == side_of[v] == s]
            divide(inner, [v for v in nodes if side_of[v] == s], first_part, share[s])

    divide(edges, list(range(num_nodes)), 0, num_parts)
    return part_of


def side_caps(total, share, cap):
    """What each side may hold; where there is more than all parts may hold, they hold no more than even shares."""
    num_parts = sum(share)
    cap = max(cap, math.ceil(total / num_parts))
    slack = (cap * num_parts / max(1, total)) ** (1 / math.ceil(math.log2(num_parts)))
    return [min(math.ceil(total * parts / num_parts * slack * (1 - 1e-12)), cap * parts) for parts in share]


def stream_once(edges, weights, share, caps, refine, chunk_edges, seed_parts):
    """Place all nodes into len(caps) parts in one pass over the edges."""
    part_of, saved, loads = {}, {}, Loads(weights, caps)
    for start in range(0, len(edges), chunk_edges):
        neighbors = {}
        for u, v in edges[start : start + chunk_edges]:
            neighbors.setdefault(u, []).append(v)
            neighbors.setdefault(v, []).append(u)
        if start == 0:
            take_seed(neighbors, share, part_of, loads, seed_parts)
        for v in sorted(neighbors):
            if v in part_of and (start == 0 or not refine):
                continue
            scores = local_counts(neighbors[v], part_of, len(caps))
            if v in part_of:
                loads.add(v, part_of[v], -1)
                scores = [(a + b) * np.float32(0.5) for a, b in zip(saved[v], scores, strict=True)]
            part_of[v] = loads.best_part(v, scores, part_of.get(v))
            loads.add(v, part_of[v], 1)
            saved[v] = scores
        if start == 0:
            for v in neighbors:
                saved[v] = local_counts(neighbors[v], part_of, len(caps))
    for v in range(len(weights)):
        if v not in part_of:
            part_of[v] = loads.best_part(v, [0] * len(caps), None)
            loads.add(v, part_of[v], 1)
    nothing = [np.float32(0)] * len(caps)
    relieve(part_of, {v: saved.get(v, nothing) if refine else nothing for v in part_of}, loads)
    return [part_of[v] for v in range(len(weights))]


class Loads:
    """What the parts hold in every dimension, and may hold."""

    def __init__(self, weights, caps):
        self.weights, self.caps = weights, caps
        self.held = [[0] * len(cap) for cap in caps]

    def add(self, v, part, times):
        for d, weight in enumerate(self.weights[v]):
            self.held[part][d] += times * weight

    def passed(self, part):
        """By how much the part passes its cap in each dimension."""
        return [max(0, held - cap) for held, cap in zip(self.held[part], self.caps[part], strict=True)]

    def excess(self, v, part):
        """By how much a part with this node in it passes its caps where the node weighs, as shares of them."""
        own = zip(self.weights[v], self.held[part], self.caps[part], strict=True)
        return sum(max(0.0, (held + weight - cap) / max(1, cap)) for weight, held, cap in own if weight)

    def fullness(self, v, part):
        own = zip(self.weights[v], self.held[part], self.caps[part], strict=True)
        return max(held / max(1, cap) for weight, held, cap in own if weight)

    def best_part(self, v, scores, own):
        """Return the best part with space, or the one that passes its caps least."""
        return min(
            range(len(self.caps)),
            key=lambda b: (self.excess(v, b), -scores[b], b != own, self.fullness(v, b), b),
        )


def relieve(part_of, saved, loads):
    """Move nodes out of parts that pass their caps while all parts together then pass them by less."""
    num_dims = len(loads.caps[0])
    penalty = [1.0] * num_dims

    def cheapest(v):
        choices = []
        for b in range(len(loads.caps)):
            if b == part_of[v]:
                continue
            relief = relief_of(loads, v, part_of[v], b, penalty)
            loss = float(saved[v][part_of[v]] - saved[v][b])
            if relief > 1e-12:
                choices.append((loss / relief if loss > 0 else loss * relief, b))
        return min(choices, default=None)

    for _ in range(40):
        over = [[b for b in range(len(loads.caps)) if loads.passed(b)[d]] for d in range(num_dims)]
        if not any(over):
            return
        full = set().union(*over)
        priced = [(cheapest(v), v) for v in sorted(part_of) if part_of[v] in full]
        moved = False
        for _, v in sorted(((found[0], v) for found, v in priced if found is not None)):
            found = cheapest(v)
            if found is not None:
                loads.add(v, part_of[v], -1)
                part_of[v] = found[1]
                loads.add(v, part_of[v], 1)
                moved = True
        if not moved:
            penalty = [2 * penalty[d] if over[d] else penalty[d] for d in range(num_dims)]


def relief_of(loads, v, source, target, penalty):
    """By how much less the two parts pass their caps, as shares of them, once a node has moved."""
    relief = 0.0
    before_source, before_target = loads.passed(source), loads.passed(target)
    loads.add(v, source, -1)
    loads.add(v, target, 1)
    for d in range(len(penalty)):
        less = (before_source[d] - loads.passed(source)[d]) / max(1, loads.caps[source][d])
        more = (loads.passed(target)[d] - before_target[d]) / max(1, loads.caps[target][d])
        relief += penalty[d] * (less - more)
    loads.add(v, source, 1)
    loads.add(v, target, -1)
    return relief


def take_seed(neighbors, share, part_of, loads, seed_parts):
    """Give the first chunk's nodes their seed parts, by ascending id, while there is space in them."""
    nodes = sorted(neighbors)
    even = len(set(share)) == 1
    num_parts = len(share) if even else sum(share)
    seed = list(range(len(nodes))) if len(nodes) < num_parts else seed_parts(len(nodes), num_parts)
    for v, part in zip(nodes, seed, strict=True):
        if not even:
            part = next(b for b in range(len(share)) if part < sum(share[: b + 1]))
        if loads.excess(v, part) == 0:
            part_of[v] = part
            loads.add(v, part, 1)


def local_counts(neighbors, part_of, num_parts):
    placed = [part_of[u] for u in neighbors if u in part_of]
    return [np.float32(placed.count(b)) for b in range(num_parts)]


def shuffled(edges, seed, bucket_edges=1 << 20, max_buckets=1024):
    """Return the edges in GREM's random order: spread over buckets, each permuted by Fisher and Yates' method."""
    num_buckets = min(max(1, math.ceil(len(edges) / bucket_edges)), max_buckets)
    buckets = [[] for _ in range(num_buckets)]
    for i, edge in enumerate(edges):
        buckets[sample(fold(seed, 0x4255434B), i, num_buckets)].append(edge)
    for b, bucket in enumerate(buckets):
        key = fold(seed, 0x5045524D, b)
        for i in range(len(bucket) - 1, 0, -1):
            j = sample(key, i, i + 1)
            bucket[i], bucket[j] = bucket[j], bucket[i]
    return [edge for bucket in buckets for edge in bucket]


def sample(key, value, bound):
    return ((int(combine_array(key, value)) >> 32) * bound) >> 32
