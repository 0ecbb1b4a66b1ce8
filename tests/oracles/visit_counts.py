"""PinSAGE's neighbours of one node, by plain walks."""

from collections import Counter

import numpy as np

from lightning_gnnscale.rng import GOLDEN, combine_array, mix64_array


def visited_most(csc, node: int, hop_key, num_walks: int, walk_length: int, num_kept: int) -> list[tuple[int, float]]:
    """Return the nodes visited most with their shares of the visits of the nodes kept."""
    visits: Counter[int] = Counter()
    with np.errstate(over="ignore"):
        row_key = mix64_array(np.uint64(hop_key) + np.uint64(node) * GOLDEN)
    for walk in range(num_walks):
        walk_key = combine_array(row_key, np.uint64(walk))
        place = node
        for step in range(walk_length):
            row = csc.indices[csc.indptr[place] : csc.indptr[place + 1]]
            if len(row) == 0:
                break
            place = int(row[(int(combine_array(walk_key, np.uint64(step))) >> 32) * len(row) >> 32])
            if place != node:
                visits[place] += 1
    kept = sorted(visits.items(), key=lambda item: (-item[1], item[0]))[:num_kept]
    total = sum(count for _, count in kept)
    return [(other, count / total) for other, count in kept]
