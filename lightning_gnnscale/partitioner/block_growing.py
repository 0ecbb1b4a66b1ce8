"""Breadth-first search from many centres at once, and nodes that follow their neighbours, by whole passes of edges."""

from ..jit import kernel


@kernel
def reach_neighbors(src, dst, block, arriving):
    """Note for every unreached node (block -1) the lowest block that one edge leads from."""
    for i in range(len(src)):
        u, v = src[i], dst[i]
        a, b = block[u], block[v]
        if a >= 0 and b < 0:
            if arriving[v] < 0 or a < arriving[v]:
                arriving[v] = a
        elif b >= 0 and a < 0 and (arriving[u] < 0 or b < arriving[u]):
            arriving[u] = b


@kernel
def arrive(block, arriving):
    """Let the nodes that were reached join their blocks; return how many there are."""
    count = 0
    for v in range(len(block)):
        if block[v] < 0 and arriving[v] >= 0:
            block[v] = arriving[v]
            count += 1
    return count


@kernel
def number_unplaced(part, first_node, max_rows, row):
    """Number the nodes from `first_node` on that have no part (-1), at most `max_rows` of them.

    Args:
        part: (num_nodes,) int32; below -1: placed in this round.
        row: (num_nodes,) becomes the number of a node, -1 for all others.

    Returns:
        How many were numbered, and the node after the last one that was looked at.
    """
    count = 0
    row[:] = -1
    for v in range(first_node, len(part)):
        if part[v] == -1:
            if count == max_rows:
                return count, v
            row[v] = count
            count += 1
    return count, len(part)


@kernel
def count_placed_neighbors(src, dst, part, row, counts):
    """Add to counts[row[v], q] for every edge from a numbered node v to a node that part q had before this round."""
    for i in range(len(src)):
        u, v = src[i], dst[i]
        p, q = part[u], part[v]
        if p >= 0 and row[v] >= 0:
            counts[row[v], p] += 1
        elif q >= 0 and row[u] >= 0:
            counts[row[u], q] += 1


@kernel
def follow_neighbors(row, counts, cap, part, sizes):
    """Place the numbered nodes that have placed neighbours, by ascending id, as -2 - part; return how many."""
    placed = 0
    for v in range(len(part)):
        if row[v] < 0:
            continue
        best, met = -1, False
        for q in range(len(sizes)):
            count = counts[row[v], q]
            met = met or count > 0
            if sizes[q] >= cap:
                continue
            if best >= 0:
                most = counts[row[v], best]
                if count < most or (count == most and sizes[q] >= sizes[best]):
                    continue
            best = q
        if met:
            part[v] = -2 - best
            sizes[best] += 1
            placed += 1
    return placed


@kernel
def settle(part):
    """End a round: what was placed in it counts as placed."""
    for v in range(len(part)):
        if part[v] < -1:
            part[v] = -2 - part[v]


@kernel
def place_least_filled(part, cap, sizes):
    """Give the nodes that are left to the least filled part."""
    for v in range(len(part)):
        if part[v] < 0:
            best = -1
            for q in range(len(sizes)):
                if sizes[q] < cap and (best < 0 or sizes[q] < sizes[best]):
                    best = q
            part[v] = best
            sizes[best] += 1
