"""Layer-wise sampling on the CPU: stages of one hop, each a plain loop over flat arrays."""

import numpy as np

from ...jit import kernel
from ...rng import unit
from ..intrinsics import prefetch

AHEAD = 32  # items between a prefetch and its use


@kernel
def read_rows(indices, row_start, row_degree, num_rows, neighbor):
    """Copy the rows one after the other into `neighbor`."""
    at = 0
    for row in range(num_rows):
        if row + AHEAD < num_rows and row_degree[row + AHEAD] > 0:
            prefetch(indices, row_start[row + AHEAD])
        start = row_start[row]
        for i in range(row_degree[row]):
            neighbor[at] = indices[start + i]
            at += 1


@kernel
def collect_candidates(neighbor, row_degree, num_rows, num_edges, bits, base, label, candidate, importance, local):
    """Number the distinct neighbours in order of appearance and add up their importance.

    Args:
        neighbor: (num_edges,) node ids, row after row.
        bits: Bits of the fraction that importance is counted in, see `fraction_bits`.
        base: labels below it are of earlier hops and batches.
        label: (num_nodes,) int32; candidate c of this hop gets base + c.
        candidate, importance: filled: node id, int64 sum over the rows that hold it.
        local: (num_edges,) int32, filled with the candidate of each edge.

    Returns:
        The number of candidates.
    """
    count = 0
    edge = 0
    for row in range(num_rows):
        degree = row_degree[row]
        if degree == 0:
            continue
        square = max((np.int64(1) << bits) // (degree * degree), 1)
        for _ in range(degree):
            if edge + AHEAD < num_edges:
                prefetch(label, np.int64(neighbor[edge + AHEAD]))
            name = neighbor[edge]
            known = np.int64(label[name]) - base
            if known < 0:
                known = count
                label[name] = base + count
                candidate[count] = name
                importance[count] = 0
                count += 1
            importance[known] += square
            local[edge] = known
            edge += 1
    return count


@kernel
def prefer(candidate, count, preferred, scale, importance):
    """Multiply the importance of preferred nodes by scale."""
    for c in range(count):
        if preferred[candidate[c]]:
            importance[c] = np.int64(np.float64(importance[c]) * scale)


@kernel
def include(importance, count, num_samples, probability):
    """Write min(1, c * importance) with c such that the sum is num_samples; 1 for all if there are no more than that.

    Each pass solves for c among those below 1 and puts those that reach it at 1, until none does: about as many passes
    as importance has powers of two at most. Whole numbers: which are at 1 does not depend on the order of candidates.

    Returns:
        How many samples those below 1 give, and the sum of their importance.
    """
    probability[:count] = 1.0 if count <= num_samples else 0.0
    if count <= num_samples:
        return 0, np.int64(0)
    left, rest, found = num_samples, np.int64(0), 1
    for c in range(count):
        rest += importance[c]
    while found:
        least, found, share = (rest + left - 1) // left, 0, np.int64(0)
        for c in range(count):
            if probability[c] < 1.0 and importance[c] >= least:
                probability[c] = 1.0
                share += importance[c]
                found += 1
        left -= found
        rest -= share
    factor = left / rest
    for c in range(count):
        if probability[c] < 1.0:
            probability[c] = factor * importance[c]
    return left, rest


@kernel
def sample(probability, importance, count, left, rest, key, position):
    """Take a candidate with its probability: position 0 where it is taken, -1 where not.

    Systematic: the probabilities below 1 lie end to end on a line, and those are taken that hold one of the points
    u, u + 1, ... with u the key as a number in [0, 1).

    Args:
        left, rest: What `include` returned: the length of the line, as a probability and as importance.
    """
    line, passed, point = np.int64(0), 0, unit(key)
    factor = left / max(rest, 1)
    for c in range(count):
        taken = probability[c] >= 1.0
        if not taken:
            line += importance[c]
            reach = left if line == rest else min(np.int64(np.ceil(line * factor - point)), left)
            taken, passed = reach > passed, reach
        position[c] = 0 if taken else -1


@kernel
def share_nodes(node, num_placed, base, label, position):
    """Map taken candidates of the last hop to nodes that the batch holds already (the last copy)."""
    for i in range(num_placed):
        c = np.int64(label[node[i]]) - base
        if c >= 0 and position[c] != -1:
            position[c] = -2 - i  # found; `append_nodes` turns it back


@kernel
def append_nodes(candidate, count, num_placed, node, position):
    """Append the candidates that were taken and not found to `node`; return the number of nodes after it."""
    for c in range(count):
        if position[c] == 0:
            node[num_placed] = candidate[c]
            position[c] = num_placed
            num_placed += 1
        elif position[c] < -1:
            position[c] = -2 - position[c]
    return num_placed


@kernel
def keep_edges(local, position, probability, row_start, row_degree, begin, end, first, indptr, source, weight, edge):
    """Write the edges from candidates that were taken: source position, (1 / degree) / probability, place in the CSC.

    Args:
        begin, end: the rows' positions; first: edges of earlier hops.
        indptr: filled from begin + 1 to end.

    Returns:
        The number of edges after it.
    """
    read = 0
    for i in range(begin, end):
        start, degree = row_start[i - begin], row_degree[i - begin]
        if degree:
            share = 1.0 / degree
            for offset in range(degree):
                c = local[read]
                read += 1
                if position[c] >= 0:
                    source[first] = position[c]
                    weight[first] = share / probability[c]
                    edge[first] = start + offset
                    first += 1
        indptr[i + 1] = first
    return first
