"""The cluster that each node of a batch would join: the one that it shares most edge weight with, of those with space.

Nodes are taken in groups, and a group stage by stage, so that a stage's loops wait for memory once for many nodes:
labels of neighbours are gathered; per node the one that comes most often is found, by comparing all with all where they
are few, else in a small table; then its weight is looked at, which has been fetched meanwhile.
"""

import numpy as np

from ...jit import kernel
from ...rng import mix64
from ...triton_kernels.intrinsics import EQUAL_ITEMS, equal_items, popcount, prefetch

_GROUP, _GATHER = 1 << 9, 1 << 12  # nodes, and labels, of a group at most
_ROWS_AHEAD = 16
_MIN_LOG_SLOTS = 5
_HASH = np.uint64(0x9E3779B97F4A7C15)
_COMPARED = 2 * EQUAL_ITEMS  # labels of a node that are compared all with all; more go to a table
_BIT, _SCORE_SHIFT = np.uint64(1), np.uint64(56)


@kernel
def choose_clusters(
    start,
    stop,
    batch,
    choice,
    first_node,
    indptr,
    indices,
    edge_weight,
    node_weight,
    limit,
    group,
    label,
    weight,
    key,
    sample,
):
    """Write the cluster that each node of batch[start:stop] would join, and the one it prefers even if it has no space.

    Both are written at the node's position in the batch: threads that wrote by node id would share cache lines.

    Args:
        batch: (num,) rows of a block.
        choice: (2, num) labels; written in place.
        first_node, indptr, indices, edge_weight: First node, rows and edge weights of the block.
        sample: Number of neighbours that a node looks at, a power of two in [8, 256]. The other arguments are as for
            `cluster_nodes`.
    """
    every = np.int64(-1) if len(node_weight) == len(label) else np.int64(0)
    plain = len(edge_weight) == 1 and len(group) == 1
    table_labels, table_ratings = np.empty(4 * sample, label.dtype), np.zeros(4 * sample, np.int64)
    touched, shifts = np.empty(sample + 1, np.int32), _hash_shifts(sample)
    # Of a group: gathered labels; a node's clusters with their ratings replace them.
    near, ratings = np.empty(_GATHER + _COMPARED, label.dtype), np.empty(_GATHER, np.int64)
    ends, own_ratings = np.zeros(_GROUP + 1, np.int64), np.empty(_GROUP, np.int64)
    found, flat_weight = np.empty(_GROUP, np.int64), weight.reshape(-1)
    table_labels[:] = -1
    near[:] = -1
    while start < stop:
        taken = _gather(start, stop, batch, indptr, indices, label, sample, near, ends)
        for i in range(taken):
            row, first, last = np.int64(batch[start + i]), ends[i], ends[i + 1]
            v, shift = first_node + row, shifts[last - first]
            own, node_key = label[v], _node_key(key, v)
            if plain and last - first <= _COMPARED:
                liked, most, own_rating = _compare(own, node_key, near, first, last)
                found[i], most, own_rating = -1, most * edge_weight[0], own_rating * edge_weight[0]
            else:
                if plain:
                    count = _rate_plain(near, first, last, edge_weight, table_labels, table_ratings, touched, shift)
                else:
                    edge, step = indptr[row], _stride(indptr[row + 1] - indptr[row], sample)
                    count = _rate(
                        v,
                        near,
                        first,
                        last,
                        edge,
                        step,
                        indices,
                        edge_weight,
                        group,
                        table_labels,
                        table_ratings,
                        touched,
                        shift,
                    )
                slot = (np.uint64(own) * _HASH) >> shift
                own_rating = table_ratings[slot] if table_labels[slot] == own else np.int64(0)
                liked, most = _take_out(
                    own, node_key, near, ratings, first, count, table_labels, table_ratings, touched
                )
                found[i] = count
            own_ratings[i] = own_rating
            choice[0, start + i], choice[1, start + i] = liked if most >= own_rating else own, liked
            prefetch(flat_weight, np.int64(liked) * node_weight.shape[1])
        for i in range(taken):
            v, best = first_node + np.int64(batch[start + i]), choice[0, start + i]
            own = label[v]
            if best != own and not _fits(best, v & every, node_weight, weight, limit):
                first, last, node_key = ends[i], ends[i + 1], _node_key(key, v)
                if found[i] < 0:  # its clusters have not been added up yet
                    shift = shifts[last - first]
                    found[i] = _rate_plain(near, first, last, edge_weight, table_labels, table_ratings, touched, shift)
                    _take_out(own, node_key, near, ratings, first, found[i], table_labels, table_ratings, touched)
                last = first + found[i]
                choice[0, start + i] = _best_with_space(
                    own, own_ratings[i], near, ratings, first, last, node_key, v & every, node_weight, weight, limit
                )
        start += taken


@kernel
def _compare(own, node_key, near, first, last):
    """Return the label of near[first:last] that comes most often but `own`, and how often the two come.

    Every label is compared with all others at once; at most _COMPARED of them, and as many can be read behind them.
    """
    num = np.uint64(last - first)
    here, many = ~np.uint64(0) if num == _COMPARED else (_BIT << num) - _BIT, num > EQUAL_ITEMS
    liked, most = own, np.uint64(0)
    for k in range(first, last):
        c = near[k]
        count = popcount(_equal_labels(near, first, c, many) & here)
        score = _score(count, c, node_key) if c != own else np.uint64(0)
        liked, most = c if score > most else liked, max(score, most)
    return liked, np.int64(most >> _SCORE_SHIFT), np.int64(popcount(_equal_labels(near, first, own, many) & here))


@kernel(inline="always")
def _score(count, label, node_key):
    """Return a number by which labels are compared: how often they come, then a hash."""
    return (count << _SCORE_SHIFT) | ((np.uint64(label) * node_key) >> (np.uint64(64) - _SCORE_SHIFT))


@kernel(inline="always")
def _equal_labels(near, first, label, many):
    """Return a mask of the EQUAL_ITEMS labels from `first` on that equal one, or of twice as many."""
    mask = equal_items(near, first, label)
    if many:
        mask |= equal_items(near, first + EQUAL_ITEMS, label) << np.uint64(EQUAL_ITEMS)
    return mask


@kernel(inline="always")
def _best_with_space(own, own_rating, near, ratings, first, last, node_key, node, node_weight, weight, limit):
    """Return the best of near[first:last] that has space, or `own`, which always has."""
    best, best_rating, best_tie = own, own_rating, np.uint64(0)
    for t in range(first, last):
        c, r = near[t], ratings[t]
        tie = np.uint64(c) * node_key
        if c == own or r < best_rating or (best != own and r == best_rating and tie <= best_tie):
            continue
        if _fits(c, node, node_weight, weight, limit):
            best, best_rating, best_tie = c, r, tie
    return best


@kernel(inline="always")
def _fits(cluster, node, node_weight, weight, limit):
    """Return whether a node has space in a cluster; `node` is the row of its weights."""
    for d in range(len(limit)):  # noqa: SIM110 (compiled)
        if np.int64(weight[cluster, d]) + node_weight[node, d] > limit[d]:
            return False
    return True


@kernel
def _gather(start, stop, batch, indptr, indices, label, sample, near, ends):
    """Write the labels of neighbours, node after node, as many nodes as there is space for; return how many.

    Args:
        near: where labels go; the last _COMPARED places stay free.
        ends: (at least nodes + 1,), where each node's labels end; the first is 0.
    """
    filled, i, space = np.uint64(0), start, np.uint64(len(near) - _COMPARED)
    most = np.uint64(sample)
    # Unsigned indices: numba tests every signed one for a negative.
    while i < min(stop, start + len(ends) - 1):
        if i + _ROWS_AHEAD < stop:
            prefetch(indices, indptr[np.uint64(batch[i + _ROWS_AHEAD])])
        row = np.uint64(batch[i])
        first = np.uint64(indptr[row])
        degree = np.uint64(indptr[row + _BIT]) - first
        if filled + min(degree, most) > space:
            break
        if degree <= most:
            for k in range(degree):
                near[filled + k] = label[np.uint64(indices[first + k])]
            filled += degree
        else:
            for e in range(first, first + degree, np.uint64(_stride(np.int64(degree), sample))):
                near[filled] = label[np.uint64(indices[e])]
                filled += _BIT
        i += 1
        ends[i - start] = filled
    return i - start


@kernel
def _rate_plain(near, first, last, edge_weight, table_labels, table_ratings, touched, shift):
    """Do what `_rate` does where all edges weigh the same, and all nodes are of one group."""
    w, count = np.int64(edge_weight[0]), np.uint64(0)
    for k in range(first, last):
        c = near[k]
        slot = (np.uint64(c) * _HASH) >> shift
        held = table_labels[slot]
        touched[count] = slot
        count += np.uint64(held < 0)
        table_ratings[slot] += w if (held < 0) | (held == c) else np.int64(0)
        table_labels[slot] = c if held < 0 else held
    return np.int64(count)


@kernel
def _rate(v, near, first, last, edge, step, indices, edge_weight, group, table_labels, table_ratings, touched, shift):
    """Add up the weight of a node's edges by the label at their end; return how many slots of the table are taken.

    One slot a label and no probing, without a branch: of two labels that meet, the heavier stays.

    Args:
        v: the node.
        near: its labels are near[first:last], of every step-th entry from `edge` on.
    """
    one_group, each = len(group) == 1, np.int64(0) if len(edge_weight) == 1 else np.int64(-1)
    count = 0
    for k in range(first, last):
        e, c = edge + (k - first) * step, near[k]
        if one_group or group[indices[e]] == group[v]:
            slot = (np.uint64(c) * _HASH) >> shift
            held, r, w = table_labels[slot], table_ratings[slot], np.int64(edge_weight[e & each])
            touched[count] = slot
            count += held < 0
            table_ratings[slot] = r + w if held == c else max(r, w)
            table_labels[slot] = c if held == c or w > r else held
    return count


@kernel
def _take_out(own, node_key, near, ratings, first, count, table_labels, table_ratings, touched):
    """Empty the table into near[first:] and ratings[first:]; return the best label but `own`, and its rating.

    Without a branch; `own` and 0 where there is no other label.
    """
    liked, most, liked_tie = own, np.int64(0), np.uint64(0)
    for t in range(count):
        slot = np.uint64(touched[t])
        c, r = table_labels[slot], table_ratings[slot]
        table_labels[slot], table_ratings[slot] = -1, 0
        near[first + t], ratings[first + t] = c, r
        tie = np.uint64(c) * node_key
        better = (c != own) & ((r > most) | ((r == most) & (tie > liked_tie)))
        liked, most = c if better else liked, r if better else most
        liked_tie = tie if better else liked_tie
    return liked, most


@kernel(inline="always")
def _stride(degree, sample):
    return 1 + max(0, degree - 1) // sample


@kernel(inline="always")
def _node_key(key, v):
    return mix64(key ^ np.uint64(v)) | np.uint64(1)


@kernel(inline="always")
def _hash_shifts(sample):
    """Return (sample + 1,) uint64: how far a hash of 64 bits is shifted to a slot, by the number of labels."""
    shifts = np.empty(sample + 1, np.uint64)
    log_slots = _MIN_LOG_SLOTS
    for count in range(sample + 1):
        if 1 << log_slots < 4 * count:
            log_slots += 1
        shifts[count] = 64 - log_slots
    return shifts
