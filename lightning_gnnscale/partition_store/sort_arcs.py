"""Sort the arcs of a range of rows by (row, source, edge id): the inner loops of the store's external sort."""

import numpy as np

from ..jit import kernel
from ..rng import combine

_DIGIT_BITS = 11


class SortBuffer:
    """Two sets of columns between which a radix sort moves arcs back and forth. They grow when a longer row comes.

    Args:
        capacity: Number of arcs that there is room for at first.
        id_dtype: Dtype of the source ids.
        with_edge: Whether edge ids are sorted along.
    """

    def __init__(self, capacity: int, id_dtype: np.dtype, with_edge: bool):
        self._id_dtype, self._with_edge = id_dtype, with_edge
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        edges = capacity if self._with_edge else 0
        self.capacity = capacity
        self.sides = [
            (np.empty(capacity, np.int32), np.empty(capacity, self._id_dtype), np.empty(edges, np.int64))
            for _ in range(2)
        ]

    def columns(self, num_arcs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (row, src, edge) to fill with num_arcs arcs."""
        if num_arcs > self.capacity:
            self._allocate(num_arcs)
        return self._cut(0, num_arcs)

    def sort(self, num_arcs: int, num_rows: int, num_nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sort what stands in `columns`, stably by (row, src).

        Returns:
            (num_rows + 1,) int64 offsets, (num_arcs,) sources, (num_arcs,) edge ids (or none).
        """
        bits = max(1, (num_nodes - 1).bit_length())
        passes = -(-bits // _DIGIT_BITS)
        here, there = self._cut(0, num_arcs), self._cut(1, num_arcs)
        digit_bits = -(-bits // passes)
        for digit in range(passes):
            _sort_digit(*here, *there, digit * digit_bits, digit_bits)
            here, there = there, here
        return _sort_rows(*here, there[1], there[2], num_rows), there[1], there[2]

    def _cut(self, side: int, num_arcs: int):
        row, src, edge = self.sides[side]
        return row[:num_arcs], src[:num_arcs], edge[:num_arcs]


@kernel
def select_rows(row, src, edge, first_row, last_row, out_row, out_src, out_edge, position):
    """Append the arcs whose row is in [first_row, last_row) from `position` on; return the position behind them."""
    with_edge = len(edge) > 0
    for i in range(len(row)):
        if first_row <= row[i] < last_row:
            out_row[position] = row[i] - first_row
            out_src[position] = src[i]
            if with_edge:
                out_edge[position] = edge[i]
            position += 1
    return position


@kernel
def count_rows(row, counts):
    """Add the number of arcs of each row to counts."""
    for i in range(len(row)):
        counts[row[i]] += 1


@kernel
def _sort_digit(row, src, edge, out_row, out_src, out_edge, shift, bits):
    mask = (1 << bits) - 1
    cursor = np.zeros((1 << bits) + 1, np.int64)
    with_edge = len(edge) > 0
    for i in range(len(src)):
        cursor[((src[i] >> shift) & mask) + 1] += 1
    for digit in range(1 << bits):
        cursor[digit + 1] += cursor[digit]
    for i in range(len(src)):
        digit = (src[i] >> shift) & mask
        place = cursor[digit]
        cursor[digit] += 1
        out_row[place] = row[i]
        out_src[place] = src[i]
        if with_edge:
            out_edge[place] = edge[i]


@kernel
def _sort_rows(row, src, edge, out_src, out_edge, num_rows):
    offsets = np.zeros(num_rows + 1, np.int64)
    with_edge = len(edge) > 0
    for i in range(len(row)):
        offsets[row[i] + 1] += 1
    for r in range(num_rows):
        offsets[r + 1] += offsets[r]
    cursor = offsets[:-1].copy()
    for i in range(len(row)):
        place = cursor[row[i]]
        cursor[row[i]] += 1
        out_src[place] = src[i]
        if with_edge:
            out_edge[place] = edge[i]
    return offsets


@kernel
def drop_repeats(offsets, src, edge):
    """Keep one of equal sources in each row, in place: the first that is listed, else the first added reverse.

    offsets are moved along, and edge ids stored as complements (see `buckets`) come out plain. Return the arcs left.
    """
    with_edge = len(edge) > 0
    count = 0
    begin = offsets[0]
    for row in range(len(offsets) - 1):
        end = offsets[row + 1]
        for i in range(begin, end):
            if i == begin or src[i] != src[count - 1]:
                src[count] = src[i]
                if with_edge:
                    edge[count] = edge[i]
                count += 1
            elif with_edge and edge[count - 1] < 0 <= edge[i]:
                edge[count - 1] = edge[i]
        begin = end
        offsets[row + 1] = count
    if with_edge:
        for i in range(count):
            edge[i] = max(edge[i], ~edge[i])
    return count


@kernel
def direction_sums(first_row, offsets, src):
    """Return the sums, modulo 2**64, of hash(u, v) and of hash(v, u) over the arcs u -> v, u != v, repeats included.

    The sums over a whole graph are equal if every arc has its reverse as often as it stands, and otherwise only by a
    chance of 2**-64.
    """
    forward, backward = np.uint64(0), np.uint64(0)
    for row in range(len(offsets) - 1):
        v = first_row + row
        for i in range(offsets[row], offsets[row + 1]):
            if src[i] != v:
                forward += combine(combine(np.uint64(0), src[i]), v)
                backward += combine(combine(np.uint64(0), v), src[i])
    return forward, backward
