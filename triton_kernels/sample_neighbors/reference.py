"""Fan-out sampling in plain Python: slow, obvious, and equal to the compiled form bit for bit."""

import numpy as np

from ...rng import GOLDEN, combine_array, mix64_array
from .hops import SampledNeighbors, check_fanouts

_WORD = 1 << 64


def sample_neighbors_reference(
    csc, seeds, fanouts, key, *, replace=False, preferred=None, scale=1.0
) -> SampledNeighbors:
    """Sample as `sample_neighbors` does, with dictionaries and lists; arguments and result are its own.

    Args:
        preferred: for each hop (num_nodes,) bool, the set Q that `split` was made with; or None.

    Source: the loop of PyG's neighbour sampler, with Floyd's method (Bentley and Floyd, CACM 1987) over keyed samples.
    """
    fanouts = check_fanouts(fanouts)
    n_id = [int(seed) for seed in seeds]
    label = {node: i for i, node in enumerate(n_id)}
    sources, targets, e_id, indptr, weights = [], [], [], [0], []
    biased = preferred is not None and scale > 1
    nodes, edges = [len(n_id)], []
    begin = 0
    for hop, fanout in enumerate(fanouts):
        hop_key = int(combine_array(np.uint64(key), np.uint64(hop)))
        end, first = len(n_id), len(sources)
        for target in range(begin, end):
            node = n_id[target]
            start, degree = int(csc.indptr[node]), int(csc.indptr[node + 1] - csc.indptr[node])
            row_key = _mix((hop_key + node * int(GOLDEN)) % _WORD)
            if biased:
                inside = [bool(preferred[hop][u]) for u in csc.indices[start : start + degree]]
                positions, row_weights = pick_preferred(row_key, inside, fanout, scale)
                weights += row_weights
            else:
                positions = pick_positions(row_key, degree, fanout, replace)
            for position in positions:
                neighbor = int(csc.indices[start + position])
                if neighbor not in label:
                    label[neighbor] = len(n_id)
                    n_id.append(neighbor)
                sources.append(label[neighbor])
                targets.append(target)
                e_id.append(start + position)
            indptr.append(len(sources))
        nodes.append(len(n_id) - end)
        edges.append(len(sources) - first)
        begin = end
    edge_index = np.array([sources, targets], np.int64).reshape(2, -1)
    edge_weight = np.array(weights, np.float32) if biased else None
    return SampledNeighbors(
        np.array(n_id, np.int64), edge_index, np.array(indptr, np.int64), np.array(e_id, np.int64), nodes, edges,
        edge_weight,
    )  # fmt: skip


def pick_positions(row_key: int, degree: int, fanout: int, replace: bool) -> list[int]:
    """Return the positions sampled from one row.

    Args:
        row_key: mix64(hop key + node * GOLDEN).
        degree: length of the row.
        fanout: samples, or -1 for the whole row.
        replace: sample with replacement.

    Returns:
        All positions in order where the row is taken whole; ascending up to degree 64; else in the order of the
        samples.
    """
    if fanout < 0 or (degree <= fanout and not replace) or degree == 0:
        return list(range(degree))
    if replace:
        return [_sample(row_key, sample, degree) for sample in range(fanout)]
    if degree > 64:
        return _floyd(row_key, degree, fanout)
    few = min(fanout, degree - fanout)
    chosen = set(_floyd(row_key, degree, few))
    if few != fanout:
        chosen = set(range(degree)) - chosen
    return sorted(chosen)


def pick_preferred(row_key: int, inside: list[bool], fanout: int, scale: float) -> tuple[list[int], list[float]]:
    """Return the positions sampled from one row, those of preferred neighbours first, and the weights of the edges.

    Args:
        row_key: as for `pick_positions`.
        inside: which of the row's neighbours are preferred.
        fanout: samples, or -1 for the whole row.
        scale: s > 1.
    """
    degree = len(inside)
    first = [position for position in range(degree) if inside[position]]
    rest = [position for position in range(degree) if not inside[position]]
    if fanout < 0 or degree <= fanout:
        return first + rest, [1 / degree for _ in inside]
    other_key = _mix(row_key)
    total = scale * len(first) + len(rest)
    if scale * fanout > total:
        count = len(first)
        weights = 1 / degree, len(rest) / (float(fanout - len(first)) * degree)
    else:
        mean = scale * len(first) * fanout / total
        count = int(mean) + ((other_key >> 11) * 2.0**-53 < mean - int(mean))
        count = max(min(count, len(first), fanout), fanout - len(rest))
        weight = total / (float(fanout) * degree)
        weights = weight * (1.0 / scale), weight
    others = fanout - count
    sampled = [first[i] for i in pick_positions(row_key, len(first), count, False)]
    sampled += [rest[i] for i in pick_positions(other_key, len(rest), others, False)]
    return sampled, [weights[0]] * count + [weights[1]] * others


def _floyd(row_key, degree, count):
    chosen = []
    for sample in range(count):
        last = degree - count + sample
        position = _sample(row_key, sample, last + 1)
        chosen.append(last if position in chosen else position)
    return chosen


def _sample(row_key, sample, bound):
    """Map sample number `sample` of a row to [0, bound): two 32-bit samples a word, the upper half first."""
    word = _mix((row_key + (sample // 2 + 1) * int(GOLDEN)) % _WORD)
    bits = word >> 32 if sample % 2 == 0 else word & 0xFFFFFFFF
    return (bits * bound) >> 32


def _mix(value: int) -> int:
    return int(mix64_array(np.uint64(value)))
