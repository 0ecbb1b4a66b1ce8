"""Fan-out sampling on the CPU: one hop at a time, each stage a plain loop over flat arrays with software prefetch."""

import numpy as np

from ...jit import kernel
from ...rng import GOLDEN, mix64, unit
from ..intrinsics import prefetch, trailing_zeros

AHEAD = 128  # items between a prefetch and its use; 32 costs an eighth of a batch where labels exceed the caches
MASK_DEGREE = 64  # rows up to this degree are sampled in one register

_LOW_32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_LAST_LABEL = np.iinfo(np.int32).max
EVERY_ROW = np.empty(0, np.bool_)


class Workspace:
    """What one thread needs to sample from graphs of up to `num_nodes` nodes; reused from batch to batch.

    Args:
        num_nodes: nodes of the graph, >= 0.
        id_dtype: int32 or int64, the dtype of the graph's `indices`.

    Cost: 4 bytes a node for relabelling, plus arrays as large as the largest batch so far.
    """

    def __init__(self, num_nodes: int, id_dtype: np.dtype):
        self.num_nodes = num_nodes
        self.id_dtype = np.dtype(id_dtype)
        self.label = np.full(num_nodes, -1, np.int32)
        self.base = 0
        self.node = np.empty(0, self.id_dtype)
        self.neighbor = np.empty(0, self.id_dtype)
        self.local = np.empty(0, np.int32)
        self.edge = np.empty(0, np.int64)
        self.row_start = np.empty(0, np.int64)
        self.row_degree = np.empty(0, np.int64)
        self.indptr = np.empty(0, np.int64)
        self.weight = np.empty(0, np.float32)
        self.taken = np.zeros(0, np.uint64)
        self.owner = np.empty(0, np.int32)
        self._others: dict[int, Workspace] = {}

    def of_relation(self, number: int) -> "Workspace":
        """Return memory for the edges of one edge type: this workspace for the first, one more for each other."""
        if number == 0:
            return self
        if number not in self._others:
            self._others[number] = Workspace(0, self.id_dtype)
        return self._others[number]

    def fits(self, num_nodes: int, id_dtype: np.dtype) -> bool:
        """Return whether graphs of this size and index dtype can be sampled with it."""
        return num_nodes <= self.num_nodes and self.id_dtype == id_dtype

    def place(self, nodes: np.ndarray) -> int:
        """Begin a batch with these nodes, labelled 0, 1, ... in `label` above `base`; return how many were distinct.

        The labels of the last batch need no clearing: `finish` moved `base` past them.
        """
        if self.base + self.num_nodes > _LAST_LABEL:
            self.label.fill(-1)
            self.base = 0
        return place_nodes(nodes, self.base, self.label, self.reserve("node", len(nodes) + 1))

    def finish(self, num_labels: int) -> None:
        """End a batch that used this many labels."""
        self.base += num_labels

    def ids(self, name: str, count: int, allocate=np.empty) -> np.ndarray:
        """Return a copy of the first `count` nodes or owners, int64."""
        found = allocate((count,), np.int64)
        found[:] = getattr(self, name)[:count]
        return found

    def reserve(self, name: str, size: int, keep: int = 0) -> np.ndarray:
        """Return the named array with space for `size` items, its first `keep` items kept."""
        array = getattr(self, name)
        if len(array) < size:
            grown = np.empty(size + size // 4 + 64, array.dtype)
            grown[:keep] = array[:keep]
            setattr(self, name, grown)
            array = grown
        return array


@kernel
def place_nodes(nodes, base, label, node):
    """Give the nodes the labels base, base + 1, ...; return how many were distinct."""
    count = 0
    for i in range(len(nodes)):
        name = nodes[i]
        node[count] = name
        if label[name] < base:
            label[name] = base + count
            count += 1
    return count


@kernel
def count_hop(indptr, node, begin, end, fanout, replace, own, row_start, row_degree, block_indptr):
    """Look up the rows of the targets node[begin:end] and lay out their samples.

    Args:
        fanout: samples a row, -1 for all neighbours.
        own: (end - begin,) whether a target has a row, which is not read otherwise; `EVERY_ROW`: all have one.
        row_start, row_degree: (end - begin,) int64, filled.
        block_indptr: filled from begin + 1 to end; block_indptr[begin] is given.

    Returns:
        The largest degree.
    """
    largest = 0
    total, all_own = block_indptr[begin], len(own) == 0
    most = np.int64(fanout) if fanout >= 0 else np.int64(np.iinfo(np.int64).max)
    for i in range(begin, end):
        if i + AHEAD < end and (all_own or own[i + AHEAD - begin]):
            prefetch(indptr, np.int64(node[i + AHEAD]))
        start, degree = np.int64(0), np.int64(0)
        if all_own or own[i - begin]:
            start = indptr[np.uint64(node[i])]
            degree = indptr[np.uint64(node[i] + 1)] - start
        row_start[i - begin] = start
        row_degree[i - begin] = degree
        largest = max(largest, degree)
        if replace and fanout >= 0:
            degree *= fanout  # any row that is not empty gives exactly `fanout`
        total += min(degree, most)
        block_indptr[i + 1] = total
    return largest


@kernel(inline="always")
def _sample_32(row_key, sample, word):
    """Return (32 random bits as uint64, the word they come from): two samples a word, the upper half first."""
    if sample & 1 == 0:
        word = mix64(row_key + np.uint64((sample >> 1) + 1) * GOLDEN)
        return word >> _32, word
    return word & _LOW_32, word


@kernel(inline="always")
def _pick_in_register(row_key, start, degree, take, edge, at):
    """Floyd's method in a 64-bit mask, on the smaller of the set and its complement; ascending positions."""
    few = min(take, degree - take)
    mask = _ZERO
    word = _ZERO
    for sample in range(few):
        bits, word = _sample_32(row_key, sample, word)
        last = np.uint64(degree - few + sample)
        bit = _ONE << ((bits * (last + _ONE)) >> _32)
        mask |= (_ONE << last) if mask & bit else bit
    if few != take:
        mask = ~mask & (_ALL >> np.uint64(MASK_DEGREE - degree))
    for i in range(take):
        edge[at + i] = start + np.int64(trailing_zeros(mask))
        mask &= mask - _ONE


@kernel(inline="always")
def _pick_with_filter(row_key, start, degree, take, taken, edge, at):
    """Floyd's method with one bit a position; positions in the order of the samples. `taken` is zero again after it."""
    word = _ZERO
    for sample in range(take):
        bits, word = _sample_32(row_key, sample, word)
        last = degree - take + sample
        position = np.int64((bits * np.uint64(last + 1)) >> _32)
        if taken[position >> 6] & (_ONE << np.uint64(position & 63)):
            position = last
        taken[position >> 6] |= _ONE << np.uint64(position & 63)
        edge[at + sample] = start + position
    for i in range(take):
        taken[(edge[at + i] - start) >> 6] = _ZERO


@kernel
def pick_hop(hop_key, node, begin, end, fanout, replace, row_start, row_degree, block_indptr, taken, edge):
    """Sample positions in the CSC for the targets node[begin:end]; edge[block_indptr[i]:block_indptr[i + 1]] for i.

    Args:
        hop_key: uint64, combine(key, hop).
        taken: zeros, one bit for each position of the largest row sampled from.
    """
    for i in range(begin, end):
        start = row_start[i - begin]
        degree = row_degree[i - begin]
        at = block_indptr[i]
        take = block_indptr[i + 1] - at
        if take == degree and not (replace and fanout >= 0):
            for j in range(take):
                edge[at + j] = start + j
            continue
        row_key = mix64(hop_key + np.uint64(node[i]) * GOLDEN)
        if replace:
            word = _ZERO
            for sample in range(take):
                bits, word = _sample_32(row_key, sample, word)
                edge[at + sample] = start + np.int64((bits * np.uint64(degree)) >> _32)
        elif degree <= MASK_DEGREE:
            _pick_in_register(row_key, start, degree, take, edge, at)
        else:
            _pick_with_filter(row_key, start, degree, take, taken, edge, at)


@kernel(inline="always")
def _share_samples(scale, fanout, degree, inside, word):
    """Divide the samples of one row between its two groups: equation (8) in closed form.

    Args:
        scale: s, float64. fanout, degree, inside: samples, neighbours, and how many of them are in Q, fanout < degree.
        word: uint64 that rounds the first group's share.

    Returns:
        Samples from Q, and the weights 1 / (degree * probability) of edges from Q and of the others.
    """
    preferred, others = np.float64(inside), np.float64(degree - inside)
    samples, length = np.float64(fanout), np.float64(degree)
    total = scale * preferred + others
    if scale * samples > total:  # a preferred neighbour would be sampled more than once: all of them are taken
        return np.int64(inside), 1.0 / length, others / ((samples - preferred) * length)
    mean = scale * preferred * samples / total
    count = np.int64(mean)
    count += unit(word) < mean - count
    count = max(min(count, np.int64(inside), fanout), fanout - (degree - inside))  # the last digit of mean is rounded
    weight = total / (samples * length)
    return count, weight * (1.0 / scale), weight


@kernel(inline="always")
def _pick_group(key, start, degree, take, taken, edge, at):
    """Sample `take` of the positions start .. start + degree - 1."""
    if take == degree:
        for j in range(take):
            edge[at + j] = start + j
    elif degree <= MASK_DEGREE:
        _pick_in_register(key, start, degree, take, edge, at)
    else:
        _pick_with_filter(key, start, degree, take, taken, edge, at)


@kernel
def pick_split_hop(
    hop_key, node, begin, end, scale, num_inside, row_start, row_degree, block_indptr, taken, edge, weight
):
    """Sample positions in rows that have their preferred neighbours first, and weigh them; see `pick_hop`.

    Args:
        scale: s > 1.
        num_inside: (num_rows,) int32, preferred neighbours of each row.
        weight: as long as edge, float32; filled with 1 / (degree * probability of being sampled).
    """
    for i in range(begin, end):
        if i + AHEAD < end:
            prefetch(num_inside, np.int64(node[i + AHEAD]))
        start = row_start[i - begin]
        degree = row_degree[i - begin]
        at = block_indptr[i]
        take = block_indptr[i + 1] - at
        if take == degree:
            for j in range(take):
                edge[at + j] = start + j
                weight[at + j] = 1.0 / degree
            continue
        row_key = mix64(hop_key + np.uint64(node[i]) * GOLDEN)
        other_key = mix64(row_key)
        inside = np.int64(num_inside[node[i]])
        count, preferred, other = _share_samples(scale, take, degree, inside, other_key)
        _pick_group(row_key, start, inside, count, taken, edge, at)
        _pick_group(other_key, start + inside, degree - inside, take - count, taken, edge, at + count)
        for j in range(take):
            weight[at + j] = preferred if j < count else other


@kernel
def unsplit_hop(position, row_start, block_indptr, begin, end, edge):
    """Turn sampled positions in split rows into positions in the CSC; position: (num_edges,) int32 within the row."""
    last = block_indptr[end]
    for i in range(begin, end):
        for j in range(block_indptr[i], block_indptr[i + 1]):
            if j + AHEAD < last:
                prefetch(position, edge[j + AHEAD])
            edge[j] = row_start[i - begin] + position[edge[j]]


@kernel
def read_hop(indices, edge, first, last, neighbor):
    """Read the neighbours at the sampled positions first..last-1 into neighbor[0:last - first]."""
    for i in range(first, last):
        if i + AHEAD < last:
            prefetch(indices, edge[i + AHEAD])
        neighbor[i - first] = indices[np.uint64(edge[i])]


@kernel
def relabel_hop(neighbor, first, last, base, label, node, count, local):
    """Label the neighbours, new ones with count, count + 1, ...; return the number of labels.

    Args:
        label: labels of this batch are at least `base`, all others are older; updated.
        node: (at least the final count + 1,) node of each label; extended.
        local: labels of positions first..last-1; filled.
    """
    num = last - first
    for i in range(num):
        if i + AHEAD < num:
            prefetch(label, np.int64(neighbor[i + AHEAD]))
        name = neighbor[i]
        known = label[np.uint64(name)]
        fresh = known < base
        mine = np.int32(base + count) if fresh else known
        node[np.uint64(count)] = name
        label[np.uint64(name)] = mine
        local[np.uint64(first + i)] = mine - base
        count += fresh
    return count


@kernel
def emit_edges(local, indptr, edge_index):
    """Write (2, num_edges) int64: sources from `local`, targets 0, 1, ... repeated by their rows."""
    target, num = edge_index[1], indptr[-1]
    for i in range(num):
        edge_index[0, i], target[i] = local[i], 0
    for row in range(1, len(indptr) - 1):  # count the rows that begin at an edge, then add up: no branch by row
        if indptr[row] < num:
            target[indptr[row]] += 1
    row = 0
    for i in range(num):
        row += target[i]
        target[i] = row
