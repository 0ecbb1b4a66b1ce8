"""ByteGNN's partitioner, with the points that its paper leaves open settled: slow and obvious.

Settled: blocks merge with the neighbour that they share most edges with while they hold at most 1 / (8 p) of the
labelled nodes, smallest first; score = (cross edges / size + 1 / |V|) * max(room, 0), ties to the smallest part, then
to the lowest; what no block reaches follows most of its neighbours under the cap, one hop a round.
"""

import math


def block_parts(edges, num_nodes, num_parts, masks, num_hops=2, weights=None, epsilon=0.03, max_rounds=32):
    """Return the part of each node.

    Args:
        edges: (u, v), each undirected edge once, no self-loops.
        masks: lists of bools, each with a True, in the order train, val, test.
        weights: one a mask; None: one over their number.
    """
    weights = weights or [1 / len(masks)] * len(masks)
    neighbors = [[] for _ in range(num_nodes)]
    for u, v in edges:
        neighbors[u].append(v)
        neighbors[v].append(u)
    block_of = grow(neighbors, masks, num_hops)
    blocks = merge(block_of, neighbors, masks, num_parts)
    part_of = assign(blocks, neighbors, masks, num_parts, weights)
    cap = math.floor(math.ceil(num_nodes / num_parts) * (1 + epsilon) * (1 + 1e-12))
    return place_leftovers(part_of, neighbors, num_parts, cap, max_rounds)


def labelled_in(nodes, masks):
    return sum(any(mask[v] for mask in masks) for v in nodes)


def grow(neighbors, masks, num_hops):
    """Return the centre of the block of every node that is reached."""
    block_of = {v: v for v in range(len(neighbors)) if any(mask[v] for mask in masks)}
    for _ in range(num_hops):
        arriving = {}
        for v in range(len(neighbors)):
            reached_by = [block_of[u] for u in neighbors[v] if u in block_of]
            if v not in block_of and reached_by:
                arriving[v] = min(reached_by)
        block_of.update(arriving)
    return block_of


def merge(block_of, neighbors, masks, num_parts):
    """Return the merged blocks as a dict from their lowest centre to their nodes."""
    blocks = {}
    for v, centre in block_of.items():
        blocks.setdefault(centre, set()).add(v)
    all_labelled = labelled_in(range(len(neighbors)), masks)
    waiting = set(blocks)
    while waiting:
        name = min(waiting, key=lambda name: (labelled_in(blocks[name], masks), name))
        waiting.remove(name)
        shared = {
            other: sum(u in blocks[other] for v in blocks[name] for u in neighbors[v])
            for other in blocks
            if other != name
            and (labelled_in(blocks[name], masks) + labelled_in(blocks[other], masks)) * 8 * num_parts <= all_labelled
        }
        shared = {other: count for other, count in shared.items() if count}
        if shared:
            target = min(shared, key=lambda other: (-shared[other], other))
            merged = blocks.pop(name) | blocks.pop(target)
            blocks[min(name, target)] = merged
            waiting.discard(target)
            waiting.add(min(name, target))
    return blocks


def assign(blocks, neighbors, masks, num_parts, weights):
    """Give the blocks to parts and return the part of every node in a block."""
    part_of, sizes = {}, [0] * num_parts
    load = [[0] * len(masks) for _ in range(num_parts)]
    mean = [sum(mask) / num_parts for mask in masks]

    def counts(name):
        return [sum(mask[v] for v in blocks[name]) for mask in masks]

    for name in sorted(blocks, key=lambda name: (-max(counts(name)), name)):
        scores = []
        for j in range(num_parts):
            cross = sum(part_of.get(u) == j for v in blocks[name] for u in neighbors[v])
            room = 1.0
            for m in range(len(masks)):
                room -= weights[m] * load[j][m] / mean[m]
            scores.append((cross / max(sizes[j], 1) + 1 / len(neighbors)) * max(room, 0.0))
        best = min(range(num_parts), key=lambda j: (-scores[j], sizes[j], j))
        for v in blocks[name]:
            part_of[v] = best
        sizes[best] += len(blocks[name])
        load[best] = [a + b for a, b in zip(load[best], counts(name), strict=True)]
    return part_of


def place_leftovers(part_of, neighbors, num_parts, cap, max_rounds):
    num_nodes = len(neighbors)
    sizes = [list(part_of.values()).count(j) for j in range(num_parts)]

    def place(v, where, counts):
        room = [j for j in range(num_parts) if sizes[j] < cap]
        where[v] = min(room, key=lambda j: (-counts[j], sizes[j], j))
        sizes[where[v]] += 1

    for _ in range(max_rounds):
        placed = {}
        for v in range(num_nodes):
            counts = [sum(part_of.get(u) == j for u in neighbors[v]) for j in range(num_parts)]
            if v not in part_of and any(counts):
                place(v, placed, counts)
        part_of.update(placed)
    for v in range(num_nodes):
        if v not in part_of:
            place(v, part_of, [0] * num_parts)
    return [part_of[v] for v in range(num_nodes)]
