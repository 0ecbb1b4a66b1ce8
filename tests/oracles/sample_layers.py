"""Layer-wise sampling in plain Python: slow, obvious, and equal to the compiled form bit for bit."""

import math

import numpy as np

from lightning_gnnscale.rng import combine_array
from lightning_gnnscale.triton_kernels.sample_layer.checks import fraction_bits
from lightning_gnnscale.triton_kernels.sample_neighbors import SampledNeighbors


def sample_layers_reference(csc, seeds, nodes_per_layer, key, *, preferred=None, scale=1.0) -> SampledNeighbors:
    """Sample as `sample_layers` does, with dictionaries and lists; arguments and result are its own.

    Source: Zou et al., LADIES, NeurIPS 2019, Algorithm 1, with Madow's systematic sampling (1949) for the samples.
    """
    n_id = [int(seed) for seed in seeds]
    sources, targets, weights, e_id, indptr = [], [], [], [], [0]
    nodes, edges = [len(n_id)], []
    begin = 0
    for hop, size in enumerate(nodes_per_layer):
        end, first = len(n_id), len(sources)
        rows = [range(int(csc.indptr[node]), int(csc.indptr[node + 1])) for node in n_id[begin:end]]
        importance, unit = {}, 1 << fraction_bits(end - begin, 1.0 if preferred is None else scale)
        for row in rows:
            for edge in row:
                candidate = int(csc.indices[edge])
                importance[candidate] = importance.get(candidate, 0) + max(unit // len(row) ** 2, 1)
        if preferred is not None and scale > 1:
            importance = {j: int(q * scale) if preferred[hop][j] else q for j, q in importance.items()}
        probability = inclusion_probabilities(importance, size)
        uniform = (int(combine_array(np.uint64(key), np.uint64(hop))) >> 11) * 2.0**-53
        entry = {}
        for node in systematic_sample(importance, probability, size, uniform):
            held = [i for i, other in enumerate(n_id[:end]) if other == node] if hop == len(nodes_per_layer) - 1 else []
            entry[node] = held[-1] if held else len(n_id)
            if not held:
                n_id.append(node)
        for target, row in enumerate(rows, begin):
            for edge in row:
                candidate = int(csc.indices[edge])
                if candidate in entry:
                    sources.append(entry[candidate])
                    targets.append(target)
                    weights.append((1.0 / len(row)) / probability[candidate])
                    e_id.append(edge)
            indptr.append(len(sources))
        nodes.append(len(n_id) - end)
        edges.append(len(sources) - first)
        begin = end
    edge_index = np.array([sources, targets], np.int64).reshape(2, -1)
    arrays = np.array(n_id, np.int64), edge_index, np.array(indptr, np.int64), np.array(e_id, np.int64)
    return SampledNeighbors(*arrays, nodes, edges, np.array(weights, np.float32))


def inclusion_probabilities(importance: dict[int, int], size: int) -> dict[int, float]:
    """Return min(1, c q) for each candidate, in their order, with c such that the sum is `size`; 1 for up to `size`."""
    if len(importance) <= size:
        return dict.fromkeys(importance, 1.0)
    certain = set()
    while True:
        left = size - len(certain)
        rest = sum(q for candidate, q in importance.items() if candidate not in certain)
        more = {j for j, q in importance.items() if j not in certain and left * q >= rest}
        if not more:
            return {j: 1.0 if j in certain else left / rest * q for j, q in importance.items()}
        certain |= more


def systematic_sample(
    importance: dict[int, int], probability: dict[int, float], size: int, uniform: float
) -> list[int]:
    """Return the candidates that are certain, and those whose stretch of the line holds uniform, uniform + 1, ..."""
    others = [j for j, p in probability.items() if p < 1]
    left, rest = size - (len(probability) - len(others)), sum(importance[j] for j in others)
    sampled, line, passed = [], 0, 0
    for candidate, p in probability.items():
        if p == 1:
            sampled.append(candidate)
            continue
        line += importance[candidate]
        reach = left if line == rest else min(math.ceil(line * (left / rest) - uniform), left)
        if reach > passed:
            sampled.append(candidate)
        passed = reach
    return sampled
