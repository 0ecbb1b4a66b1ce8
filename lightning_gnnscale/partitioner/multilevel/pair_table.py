"""How many edges run between any two clusters (or blocks): a hash table of pairs that grows, and its rows.

A pair of clusters is one number, its key: the lower cluster, shifted to the left, and the higher one.
"""

import numpy as np

from ...graph import id_dtype
from ...jit import kernel
from ...rng import combine, mix64, mix64_array
from ...triton_kernels.intrinsics import popcount, prefetch
from .weighted_graph import RowThreads, WeightedGraph

FIRST_BITS = 16  # slots of a new table, as a power of two
MAX_LOAD = 0.6  # of a table's slots

_EMPTY = np.int64(0)  # no pair has this key: its clusters differ
_ENTRIES_AHEAD, _KEYS_AHEAD = 32, 12
_HASH = np.uint64(0x9E3779B97F4A7C15)


class PairTable:
    """Weights by key, with open addressing; it grows as it fills.

    Args:
        shift: bits of a cluster in a key, at most 31.
        shard: 0 or 1: the table takes half of all keys, see `shard_of`, so that two threads fill two tables. None: it
            takes all that it is given.
        slots: (keys, weights) of an earlier table, to go on from.
        expected: keys that there is space for from the start, so that the table need not grow.

    Attributes:
        keys, weights: (num_slots,) int64; key 0: an empty slot.
        size: number of keys.
    """

    def __init__(
        self,
        shift: int,
        shard: int | None = None,
        slots: tuple[np.ndarray, np.ndarray] | None = None,
        expected: float = 0,
    ):
        self.shift, self._shard = shift, -1 if shard is None else shard
        self.keys, self.weights = np.zeros((2, table_bytes(expected) // 16), np.int64) if slots is None else slots
        self.size = int(np.count_nonzero(self.keys))

    @classmethod
    def of(cls, graph: WeightedGraph, shift: int, shard: int) -> "PairTable":
        """Return the edges of a graph whose keys belong to the shard."""
        size = _count_edges(graph.indptr, graph.indices, shift, shard)
        slots = np.zeros((2, table_bytes(size + 1) // 16), np.int64)
        _fill_slots(graph.indptr, graph.indices, graph.edge_weight, shift, shard, slots[0], slots[1])
        return cls(shift, shard, (slots[0], slots[1]))

    def add(self, keys: np.ndarray, ranges: list[tuple[int, int]]) -> None:
        """Add one to the weight of each key in ranges of `keys` that belongs to the table."""
        for position, stop in ranges:
            while position < stop:
                space = int(MAX_LOAD * len(self.keys)) - self.size
                position, added = _add_keys(keys, position, stop, self._shard, space, self.keys, self.weights)
                self.size += added
                if position < stop:
                    larger = np.zeros((2, 2 * len(self.keys)), np.int64)
                    _rehash(self.keys, self.weights, larger[0], larger[1])
                    self.keys, self.weights = larger[0], larger[1]

    def thin(self, key: int) -> None:
        """Keep each unit of weight with a probability of one half; pairs of which nothing is left go."""
        self.size = int(_thin(self.keys, self.weights, np.uint64(key)))
        smaller = np.zeros((2, table_bytes(self.size + 1) // 16), np.int64)
        _rehash(self.keys, self.weights, smaller[0], smaller[1])
        self.keys, self.weights = smaller[0], smaller[1]


class EdgeSample:
    """Which edges are counted: all of them, half of them by a hash of their ends, a quarter, and so on.

    Args:
        key: decides which.

    Attributes:
        bound: (2,) uint64, an edge counts where its hash is at most the first; the second is part of the hash.
    """

    def __init__(self, key: int):
        self.bound = np.array([np.iinfo(np.uint64).max, key], np.uint64)

    @property
    def rate(self) -> float:
        """The share of the edges that are counted."""
        return (int(self.bound[0]) + 1) / 2**64

    def halve(self, tables: list[PairTable], threads: RowThreads) -> None:
        """Count half of the edges from now on, and half of what the tables hold."""
        self.bound[0] >>= np.uint64(1)
        key = int(mix64_array(self.bound[1] ^ self.bound[0]))
        threads.map(lambda table: table.thin(key), tables)


def table_bytes(size: float) -> int:
    """Return the bytes of a table that holds so many keys."""
    bits = FIRST_BITS
    while MAX_LOAD * (1 << bits) < size:
        bits += 1
    return 16 << bits


def rows_of_pairs(
    tables: list[PairTable], num_clusters: int, weight_dtype, ascending: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pairs of all tables as rows of neighbours, each pair in both of its rows.

    Args:
        tables: emptied.
        num_clusters: number of rows.
        weight_dtype: dtype of the weights.
        ascending: whether neighbours are sorted; else they come in no order.

    Returns:
        (num_clusters + 1,) int64 offsets, (2 * num_pairs,) `id_dtype(num_clusters)` neighbours, and their weights.
    """
    indptr = np.zeros(num_clusters + 1, np.int64)
    for table in tables:
        _count_rows(table.keys, table.shift, indptr)
    np.cumsum(indptr, out=indptr)
    other, weight = np.empty(indptr[-1], id_dtype(num_clusters)), np.empty(indptr[-1], weight_dtype)
    cursor = indptr[:-1].copy()
    while tables:
        table = tables.pop()
        _fill_rows(table.keys, table.weights, table.shift, cursor, other, weight)
    return (indptr, *_transpose(indptr, other, weight)) if ascending else (indptr, other, weight)


@kernel
def edge_pairs(src, dst, coarse_of, shift, keys, bound):
    """Write the keys of edges between two clusters, those of cluster -1 left out; return how many there are.

    Args:
        bound: which edges count; see `EdgeSample`.
    """
    place, counts_all = 0, bound[0] == ~np.uint64(0)
    for i in range(len(src)):
        if i + _ENTRIES_AHEAD < len(src):
            prefetch(coarse_of, np.int64(src[i + _ENTRIES_AHEAD]))
            prefetch(coarse_of, np.int64(dst[i + _ENTRIES_AHEAD]))
        mine, other = np.int64(coarse_of[src[i]]), np.int64(coarse_of[dst[i]])
        keys[place] = (min(mine, other) << shift) + max(mine, other)
        place += (other != mine) & (min(mine, other) >= 0) & (counts_all or is_sampled(src[i], dst[i], bound))
    return place


@kernel(inline="always")
def is_sampled(u, v, bound):
    """Return whether the edge between two nodes counts; see `EdgeSample`."""
    low, high = min(np.uint64(u), np.uint64(v)), max(np.uint64(u), np.uint64(v))
    return mix64(bound[1] ^ mix64((low << np.uint64(32)) ^ high)) <= bound[0]


@kernel(inline="always")
def shard_of(key):
    """Return which of two shards a key belongs to."""
    return (np.uint64(key) * _HASH) >> np.uint64(63)


@kernel(inline="always")
def _belongs(mixed, shard):
    """Whether a key with this product belongs to a shard; -1: all keys do."""
    return (shard < 0) | (np.int64(mixed >> np.uint64(63)) == shard)  # no branch: it would be mispredicted


@kernel
def _add_keys(keys, position, stop, shard, space, table_keys, table_weights):
    """Add keys[position:stop]; stop before a new key when there is no space. Return where it stopped, new keys."""
    last, step = np.uint64(len(table_keys) - 1), np.uint64(1)
    place, end, ahead = np.uint64(position), np.uint64(stop), np.uint64(_KEYS_AHEAD)
    added = 0
    while place < end:
        key = keys[place]
        mixed = np.uint64(key) * _HASH
        if place + ahead < end:
            early = np.int64((np.uint64(keys[place + ahead]) * _HASH) >> np.uint64(20) & last)
            prefetch(table_keys, early)
            prefetch(table_weights, early)
        if _belongs(mixed, shard):
            slot = (mixed >> np.uint64(20)) & last  # unsigned: numba tests every signed index for a negative
            while table_keys[slot] != key:
                if table_keys[slot] == _EMPTY:
                    if added >= space:
                        return np.int64(place), added
                    table_keys[slot] = key
                    added += 1
                    break
                slot = (slot + step) & last
            table_weights[slot] += 1
        place += step
    return np.int64(place), added


@kernel(inline="always")
def _put(key, weight, table_keys, table_weights):
    """Put a key that the table does not hold yet into it; there is space."""
    last = np.int64(len(table_keys) - 1)
    slot = np.int64((np.uint64(key) * _HASH) >> np.uint64(20)) & last
    while table_keys[slot] != _EMPTY:
        slot = (slot + 1) & last
    table_keys[slot], table_weights[slot] = key, weight


@kernel
def _thin(keys, weights, key):
    """Keep each unit of weight or not, by a bit of a hash; return how many keys have any weight left."""
    left = 0
    for i in range(len(keys)):
        if keys[i] != _EMPTY:
            pair_key, units, kept = combine(key, keys[i]), weights[i], np.uint64(0)
            for word in range((units + 63) >> 6):
                bits = combine(pair_key, word)
                spare = max(0, 64 * (word + 1) - units)
                kept += popcount(bits >> np.uint64(spare))
            weights[i] = kept
            left += kept > 0
    return left


@kernel
def _rehash(old_keys, old_weights, table_keys, table_weights):
    """Put all keys that have a weight into an empty table."""
    for i in range(len(old_keys)):
        if old_keys[i] != _EMPTY and old_weights[i] > 0:
            _put(old_keys[i], old_weights[i], table_keys, table_weights)


@kernel
def _count_edges(indptr, indices, shift, shard):
    """Return how many edges of a graph belong to a shard by their keys."""
    count = 0
    for a in range(len(indptr) - 1):
        for e in range(indptr[a], indptr[a + 1]):
            key = (np.int64(a) << shift) + indices[e]
            count += a < indices[e] and _belongs(np.uint64(key) * _HASH, shard)
    return count


@kernel
def _fill_slots(indptr, indices, edge_weight, shift, shard, table_keys, table_weights):
    """Put the edges of a graph that belong to a shard into an empty table."""
    for a in range(len(indptr) - 1):
        for e in range(indptr[a], indptr[a + 1]):
            key = (np.int64(a) << shift) + indices[e]
            if a < indices[e] and _belongs(np.uint64(key) * _HASH, shard):
                _put(key, edge_weight[e], table_keys, table_weights)


@kernel
def _count_rows(keys, shift, indptr):
    high_bits = (np.int64(1) << shift) - 1
    for key in keys:
        if key != _EMPTY:
            indptr[(key >> shift) + 1] += 1
            indptr[(key & high_bits) + 1] += 1


@kernel
def _fill_rows(keys, weights, shift, cursor, other, weight):
    high_bits = (np.int64(1) << shift) - 1
    for i in range(len(keys)):
        if keys[i] != _EMPTY:
            a, b = keys[i] >> shift, keys[i] & high_bits
            other[cursor[a]], weight[cursor[a]] = b, weights[i]
            other[cursor[b]], weight[cursor[b]] = a, weights[i]
            cursor[a] += 1
            cursor[b] += 1


@kernel
def _transpose(indptr, other, weight):
    """Return the columns as rows: of a symmetric graph the same rows, with ascending neighbours."""
    cursor = indptr[:-1].copy()
    sorted_other, sorted_weight = np.empty_like(other), np.empty_like(weight)
    for row in range(len(indptr) - 1):
        for e in range(indptr[row], indptr[row + 1]):
            place = cursor[other[e]]
            sorted_other[place], sorted_weight[place] = row, weight[e]
            cursor[other[e]] += 1
    return sorted_other, sorted_weight
