"""Neighbours of a store, coded: the difference of each to the one before, in as few bits as it takes.

The format of `csc_code.npy`, uint8, and `csc_code_offsets.npy`, int64, which take the place of `csc_indices.npy` where
the manifest says `edge_storage: delta`. The neighbours of all rows, one row after the other, are cut into blocks of
256; block i is bytes [offsets[i], offsets[i + 1]) of the code. A block of n neighbours has three parts:

1. 4 bytes: four widths in bits, ascending, chosen so that the block is as short as it can be.
2. ceil(n / 4) bytes: which of the widths each value has, two bits each, the first in the lowest.
3. the values, one behind the other, lowest bit first, and zeros up to a whole byte.

A value is the neighbour less the one before it in the block (-1 before the first) less 1, modulo 2 ** b, where b is how
many bits the largest id takes: where a row begins, and where a neighbour repeats, the difference wraps. Rows ascend,
and the nodes of a part have neighbouring ids, so that most values are small. Any neighbours are read by their
positions: those of a part, of a run of rows, or of one node, with at most 255 before and behind them.

Source: widths apart from values, as in Stream VByte (Lemire, Kurz and Rupp, IPL 2018). Differs: widths in bits, chosen
for each block, and blocks that are found by an offset.
"""

import numpy as np

from ..jit import kernel
from ..triton_kernels.intrinsics import word_at

BLOCK = 256  # neighbours
_HEAD_BYTES = 4
_WORD_BYTES = 8  # that a value is read with: it may have 56 bits
PADDING = _HEAD_BYTES + BLOCK // 4 + BLOCK * _WORD_BYTES + _WORD_BYTES  # behind a code, whatever its widths say


def id_bits(num_nodes: int) -> int:
    """Return how many bits the largest id takes, at least 1."""
    return max(1, (num_nodes - 1).bit_length())


def encode(ids: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Code neighbours that begin at a block.

    Args:
        ids: (num,) integers in [0, 2 ** bits).
        bits: `id_bits` of the graph.

    Returns:
        (num_bytes,) uint8; (ceil(num / 256),) int64 bytes of each block.
    """
    num_blocks = -(-len(ids) // BLOCK)
    code = np.zeros(num_blocks * (_HEAD_BYTES + BLOCK // 4 + BLOCK * bits // 8 + _WORD_BYTES), np.uint8)
    sizes = np.empty(num_blocks, np.int64)
    return code[: _encode(ids, bits, code, sizes)], sizes


def decode(code: np.ndarray, offsets: np.ndarray, bits: int, out: np.ndarray) -> bool:
    """Decode blocks, all whole but the last of a graph.

    Args:
        code: (num_bytes + `PADDING`,) uint8.
        offsets: (num_blocks + 1,) int64 where each block begins in `code`.
        bits: See `encode`.
        out: (num,) integers, filled.

    Returns:
        Whether each block was as long as its offsets say.

    Cost: 2 to 3 GB/s of 4-byte ids a core.
    """
    return bool(_decode(code, offsets, bits, out))


@kernel
def _choose_widths(counts, bits, cost, split):
    """Return four ascending widths, a byte each, for which values of these widths take the fewest bits together.

    Args:
        counts: (bits + 1,) values by their width.
        cost, split: (4, bits + 1), overwritten: the bits of all values up to a width where this many widths are chosen,
            the largest of which it is; and the width chosen before it.
    """
    for width in range(bits + 1):
        cost[0, width], split[0, width] = 0, 0
        for lower in range(width + 1):
            cost[0, width] += counts[lower] * width
    for number in range(1, 4):
        for width in range(bits + 1):
            cost[number, width], split[number, width] = cost[number - 1, width], width
            between = 0
            for lower in range(width - 1, -1, -1):
                between += counts[lower + 1]
                whole = cost[number - 1, lower] + between * width
                if whole < cost[number, width]:
                    cost[number, width], split[number, width] = whole, lower
    width, widths = bits, np.uint64(0)
    for number in range(3, -1, -1):
        widths |= np.uint64(width) << np.uint64(8 * number)
        width = split[number, width]
    return widths


@kernel
def _encode(ids, bits, code, sizes):
    mask, one = (np.uint64(1) << np.uint64(bits)) - np.uint64(1), np.uint64(1)
    values, lengths = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.int64)
    counts = np.empty(bits + 1, np.int64)
    cost, split = np.empty((4, bits + 1), np.int64), np.empty((4, bits + 1), np.int64)
    begin = 0
    for block in range(len(sizes)):
        num = min(BLOCK, len(ids) - block * BLOCK)
        before, most = mask, 0
        counts[:] = 0
        for i in range(num):
            own = np.uint64(ids[block * BLOCK + i])
            value, length = (own - before - one) & mask, 0
            before = own
            values[i] = value
            while value:
                value >>= one
                length += 1
            lengths[i] = length
            counts[length] += 1
            most = max(most, length)
        widths = _choose_widths(counts, most, cost, split)
        for i in range(_HEAD_BYTES):
            code[begin + i] = np.uint8((widths >> np.uint64(8 * i)) & np.uint64(255))
        at, held, num_held = begin + _HEAD_BYTES + (num + 3) // 4, np.uint64(0), 0
        for i in range(num):
            number = 0
            while np.int64((widths >> np.uint64(8 * number)) & np.uint64(255)) < lengths[i]:
                number += 1
            code[begin + _HEAD_BYTES + i // 4] |= np.uint8(number << (2 * (i & 3)))
            held |= values[i] << np.uint64(num_held)
            num_held += np.int64((widths >> np.uint64(8 * number)) & np.uint64(255))
            while num_held >= 8:
                code[at] = np.uint8(held & np.uint64(255))
                held >>= np.uint64(8)
                num_held -= 8
                at += 1
        if num_held:
            code[at] = np.uint8(held)
            at += 1
        sizes[block] = at - begin
        begin = at
    return begin


@kernel
def _decode(code, offsets, bits, out):
    one = np.uint64(1)
    mask = (one << np.uint64(bits)) - one
    for block in range(len(offsets) - 1):
        first, last = block * BLOCK, min((block + 1) * BLOCK, len(out))
        begin = offsets[block]
        widths = word_at(code, begin)
        chosen = begin + _HEAD_BYTES
        at = np.uint64(chosen + (last - first + 3) // 4) << np.uint64(3)
        before, i = mask, first
        while i < last:
            four = np.uint64(code[chosen])
            chosen += 1
            for _ in range(min(4, last - i)):
                width = (widths >> ((four & np.uint64(3)) << np.uint64(3))) & np.uint64(63)
                four >>= np.uint64(2)
                value = (word_at(code, np.int64(at >> np.uint64(3))) >> (at & np.uint64(7))) & ((one << width) - one)
                before = (before + one + value) & mask
                at += width
                out[i] = before
                i += 1
        if np.int64((at + np.uint64(7)) >> np.uint64(3)) != offsets[block + 1]:
            return False
    return True
