"""The quotient graph of blocks: how many edges run between any two of them, summed in a growing hash table."""

from typing import NamedTuple

import numpy as np

from ..graph import id_dtype
from ..jit import kernel
from ..rng import mix64
from ..triton_kernels.intrinsics import prefetch

START_SLOTS = 1 << 12  # a power of two

_HALF, _ONE = np.uint64(32), np.uint64(1)
_LOW_HALF = np.uint64((1 << 32) - 1)
_BLOCKS_AHEAD, _SLOTS_AHEAD = 32, 16  # edges; a slot is asked for once the blocks of the edge's ends have come


class QuotientTable(NamedTuple):
    """Pairs of blocks and the edges between them, by open addressing; at most half full.

    Attributes:
        slots: (num_slots, 2) uint64: a pair, the lower block in its upper half and the higher one in its lower half
            (0: empty), and its edges. One slot is one cache access.
        num_pairs: (1,) int64.
    """

    slots: np.ndarray
    num_pairs: np.ndarray

    @classmethod
    def empty(cls, num_slots: int | None = None) -> "QuotientTable":
        return cls(np.zeros((num_slots or START_SLOTS, 2), np.uint64), np.zeros(1, np.int64))


class Quotient(NamedTuple):
    """The quotient graph as rows, in no order; each pair stands in both of its rows.

    Attributes:
        indptr: (num_blocks + 1,) int64.
        other: (2 * num_pairs,) `id_dtype(num_blocks)`, neighbouring blocks.
        weight: (2 * num_pairs,) int64, edges between the two.
    """

    indptr: np.ndarray
    other: np.ndarray
    weight: np.ndarray


def add_edges(table: QuotientTable, src: np.ndarray, dst: np.ndarray, block: np.ndarray) -> QuotientTable:
    """Count some edges, and return the table, or a larger one that takes its place.

    Args:
        table: changed in place as far as it has room.
        src, dst: (num_edges,) node ids.
        block: (num_nodes,) blocks in [0, 2**32); edges inside a block, or at a node of block -1, do not count.
    """
    done = 0
    while True:
        done = _add_edges(src, dst, block, done, table.slots, table.num_pairs)
        if done == len(src):
            return table
        larger = QuotientTable.empty(2 * len(table.slots))
        _move(table.slots, larger.slots)
        table = larger._replace(num_pairs=table.num_pairs)


def quotient_rows(table: QuotientTable, num_blocks: int) -> Quotient:
    """Return the table as rows."""
    num_entries = 2 * int(table.num_pairs[0])
    indptr = np.zeros(num_blocks + 1, np.int64)
    other, weight = np.empty(num_entries, id_dtype(num_blocks)), np.empty(num_entries, np.int64)
    _count_rows(table.slots, indptr)
    np.cumsum(indptr, out=indptr)
    _fill_rows(table.slots, indptr[:-1].copy(), other, weight)
    return Quotient(indptr, other, weight)


@kernel
def _pair_of(a, b):
    return (np.uint64(min(a, b)) << _HALF) | np.uint64(max(a, b))


@kernel
def _slot_of(pair, slots):
    """Return where a pair stands, or the empty slot where it belongs."""
    last = np.uint64(len(slots) - 1)
    slot = mix64(pair) & last
    while slots[slot, 0] != 0 and slots[slot, 0] != pair:
        slot = (slot + _ONE) & last
    return slot


@kernel
def _add_edges(src, dst, block, done, slots, num_pairs):
    """Count edges from `done` on; return where it stopped: at the end, or where the table is half full."""
    length, last = len(src), np.uint64(len(slots) - 1)
    flat = slots.reshape(-1)
    for i in range(done, length):
        if i + _BLOCKS_AHEAD < length:
            prefetch(block, np.int64(src[i + _BLOCKS_AHEAD]))
            prefetch(block, np.int64(dst[i + _BLOCKS_AHEAD]))
            pair = _pair_of(block[src[i + _SLOTS_AHEAD]], block[dst[i + _SLOTS_AHEAD]])
            prefetch(flat, 2 * np.int64(mix64(pair) & last))
        a, b = block[src[i]], block[dst[i]]
        if a < 0 or b < 0 or a == b:
            continue
        if 2 * num_pairs[0] >= len(slots):
            return i
        pair = _pair_of(a, b)
        slot = _slot_of(pair, slots)
        if slots[slot, 0] == 0:
            slots[slot, 0] = pair
            num_pairs[0] += 1
        slots[slot, 1] += _ONE
    return length


@kernel
def _move(slots, new_slots):
    for slot in range(len(slots)):
        if slots[slot, 0] != 0:
            new = _slot_of(slots[slot, 0], new_slots)
            new_slots[new, 0], new_slots[new, 1] = slots[slot, 0], slots[slot, 1]


@kernel
def _count_rows(slots, indptr):
    for slot in range(len(slots)):
        if slots[slot, 0] != 0:
            indptr[np.int64(slots[slot, 0] >> _HALF) + 1] += 1
            indptr[np.int64(slots[slot, 0] & _LOW_HALF) + 1] += 1


@kernel
def _fill_rows(slots, cursor, other, weight):
    for slot in range(len(slots)):
        if slots[slot, 0] != 0:
            a, b = np.int64(slots[slot, 0] >> _HALF), np.int64(slots[slot, 0] & _LOW_HALF)
            other[cursor[a]], weight[cursor[a]] = b, np.int64(slots[slot, 1])
            other[cursor[b]], weight[cursor[b]] = a, np.int64(slots[slot, 1])
            cursor[a] += 1
            cursor[b] += 1
