"""The distinct ids of several lists, in order of first appearance, without a sort."""

import numpy as np

from ...jit import kernel
from ...rng import mix64
from ...triton_kernels.intrinsics import prefetch

_AHEAD = 32  # items between a prefetch and its use
_DIRECT = 8  # ids an item, up to which a table by id is cheaper than one by hash


def unite(ids: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the distinct ids in order of first appearance, and where in them each of the given ones is."""
    total = sum(len(own) for own in ids)
    largest = max((int(own.max()) for own in ids if len(own)), default=0)
    union = np.empty(total + 1, np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    positions = [np.empty(len(own), np.int32 if total <= np.iinfo(np.int32).max else np.int64) for own in ids]
    count = 0
    if largest < _DIRECT * max(total, 1):
        label = np.full(largest + 1, -1, np.int32 if total <= np.iinfo(np.int32).max else np.int64)
        for own, places in zip(ids, positions, strict=True):
            count = _unite_by_id(own, label, union, count, places)
    else:
        table = np.full(1 << (2 * total - 1).bit_length(), -1, np.int64)
        for own, places in zip(ids, positions, strict=True):
            count = _unite_by_hash(own, table, union, count, places)
    return union[:count].copy(), positions


@kernel
def _unite_by_id(ids, label, union, count, positions):
    """Number the ids, new ones with count, count + 1, ...; return the number of all. label: -1 for ids not met yet."""
    num = len(ids)
    for i in range(num):
        if i + _AHEAD < num:
            prefetch(label, ids[i + _AHEAD])
        known = label[ids[i]]
        fresh = known < 0
        mine = count if fresh else np.int64(known)
        union[count] = ids[i]
        label[ids[i]] = mine
        positions[i] = mine
        count += fresh
    return count


@kernel
def _unite_by_hash(ids, table, union, count, positions):
    """Do as `_unite_by_id`; table: positions in the union by hash, -1 for none, a power of two of them."""
    num, last = len(ids), np.uint64(len(table) - 1)
    for i in range(num):
        if i + _AHEAD < num:
            prefetch(table, np.int64(mix64(np.uint64(ids[i + _AHEAD])) & last))
        place = np.int64(mix64(np.uint64(ids[i])) & last)
        while table[place] >= 0 and union[table[place]] != ids[i]:
            place = np.int64(np.uint64(place + 1) & last)
        if table[place] < 0:
            table[place] = count
            union[count] = ids[i]
            count += 1
        positions[i] = table[place]
    return count
