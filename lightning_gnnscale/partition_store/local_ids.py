"""The local ids of a part's edges, and its halo with the rows that are a transpose, in passes that stay in the cache.

Edges from outside of the core are sorted by runs of store ids, some rows of the core at a time, in 4 bytes each: a row
among these, and a node within its run. Then the nodes of one run after the other are numbered, and their rows filled:
what is looked up in any order is of one run. At last the rows of the core take their edges' numbers from where they
were put, in the same order. A look-up in tables of the whole graph and of the halo costs several times as much.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..graph import CSC
from ..jit import kernel
from ..triton_kernels.intrinsics import popcount, prefetch, trailing_zeros

RUN_BITS = 17  # of a run of nodes: what is looked up of one takes some 100 KiB in a part of 25 million edges
ROW_BITS = 32 - RUN_BITS  # of a block of rows
_LINE = 16  # edges of a cache line


class OutsideEdges(NamedTuple):
    """The edges of a part from outside of its core, sorted by runs of store ids within blocks of rows.

    Attributes:
        bits, row_bits: A run is 2 ** bits nodes, a block 2 ** row_bits rows.
        starts: (num_blocks, num_runs + 1) int64, where the edges of each block and run begin in `edges`.
        edges: (num_edges or more,) uint32, row << bits | node; once nodes are numbered, their local ids.
    """

    bits: int
    row_bits: int
    starts: np.ndarray
    edges: np.ndarray

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return int(self.starts[-1, -1]) if len(self.starts) else 0


def outside_edges(
    indptr: np.ndarray,
    sources: np.ndarray,
    begin: int,
    end: int,
    num_nodes: int,
    bits: int = RUN_BITS,
    row_bits: int = ROW_BITS,
    allocate: Callable[..., np.ndarray] = np.empty,
) -> OutsideEdges | None:
    """Return the edges of core rows from outside of the core; None where a source is not a node of the graph.

    Args:
        indptr: (num_core + 1,) int64 from 0.
        sources: (num_edges,) store ids, ascending within a row.
        begin, end: Store ids that bound the core.
        num_nodes: Of the graph.
        bits, row_bits: Of a run of nodes and of a block of rows, together at most 32.
        allocate: Returns memory of a shape and dtype.

    Cost: two passes over the edges, some rows at a time; 4 bytes an edge from outside.
    """
    num_runs, num_blocks = -(-num_nodes >> bits), -(-(end - begin) >> row_bits)
    starts = np.zeros((num_blocks, num_runs + 1), np.int64)
    edges = allocate(len(sources), np.uint32)  # pages that are not written take no memory
    valid = _sort_by_runs(indptr, sources, begin, end, num_nodes, bits, row_bits, starts, edges)
    return OutsideEdges(bits, row_bits, starts, edges) if valid else None


def number_halo(outside: OutsideEdges, halo_nodes: np.ndarray, csc: CSC, num_core: int, transposes: bool) -> int:
    """Fill a part's halo in, and where its rows are a transpose of the core's, these; number its edges in place.

    Args:
        outside: The part's; its edges become the local ids of their sources.
        halo_nodes: (num_halo,) filled with store ids, ascending.
        csc: The part in local ids: offsets of its core rows, zeros behind; indices are not read.
        num_core: The number of core rows.
        transposes: Whether rows of the halo are filled with the core rows that name their nodes, ascending.

    Returns:
        The number of nodes in the halo; where that is not `num_halo`, what was filled in is of no use.

    Cost: three passes over the edges from outside, two without `transposes`; 24 KiB of memory.
    """
    num_words = -(-(1 << outside.bits) // 64)
    words, before = np.empty(num_words, np.uint64), np.empty(num_words, np.int32)
    return int(_number_halo(*outside, num_core, transposes, words, before, halo_nodes, *csc))


def localise(
    indptr: np.ndarray, sources: np.ndarray, begin: int, outside: OutsideEdges, indices: np.ndarray, places: np.ndarray
) -> None:
    """Translate core rows from store ids to local ids, ascending in a row again.

    Args:
        indptr: (num_core + 1,) int64 from 0.
        sources: (num_edges,) store ids; may be the memory of `indices`.
        begin: Store id of the first core node.
        outside: The edges from outside, numbered.
        indices: (num_edges or more,) int32; the first num_edges are filled with local ids.
        places: (num_edges or more,) int64; filled with where each source was; empty: they are not needed.

    Cost: a pass over the edges.
    """
    longest = int(np.diff(indptr).max(initial=0))
    row = np.empty(longest, np.int32), np.empty(longest if len(places) else 0, np.int64)
    _localise(indptr, sources, begin, *outside, *row, indices, places)


@kernel
def _sort_by_runs(indptr, sources, begin, end, num_nodes, bits, row_bits, starts, edges):
    num_core, block_rows, at = np.int64(len(indptr) - 1), np.int64(1) << row_bits, np.int64(0)
    cursor = np.empty(starts.shape[1], np.int64)
    for block in range(len(starts)):
        first = block * block_rows
        last = min(first + block_rows, num_core)
        count = starts[block]
        for i in range(indptr[first], indptr[last]):
            node = np.int64(sources[i])
            if begin <= node < end:
                continue
            if node < 0 or node >= num_nodes:
                return False
            count[(node >> bits) + 1] += 1
        count[0] = at
        for run in range(len(count) - 1):
            count[run + 1] += count[run]
            cursor[run] = count[run]
        at = count[len(count) - 1]
        for row in range(first, last):
            high = (row - first) << bits
            for i in range(indptr[row], indptr[row + 1]):
                node = np.int64(sources[i])
                if begin <= node < end:
                    continue
                run = node >> bits
                edges[cursor[run]] = high | (node - (run << bits))
                cursor[run] += 1
    return True


@kernel
def _number_halo(bits, row_bits, starts, edges, num_core, transposes, words, before, halo_nodes, indptr, indices):
    """Row h's cursor is at indptr[h + 1]: it begins where the row does and ends where the next one begins."""
    num_halo, size, mask = np.int64(len(halo_nodes)), np.int64(0), (np.int64(1) << bits) - 1
    num_blocks, num_runs = len(starts), starts.shape[1] - 1
    if transposes and num_halo > 0:
        indptr[num_core + 1] = indptr[num_core]
    for run in range(num_runs):
        words[:] = 0
        for block in range(num_blocks):
            for i in range(starts[block, run], starts[block, run + 1]):
                node = np.int64(edges[i]) & mask
                words[node >> 6] |= np.uint64(1) << np.uint64(node & 63)
        first = size
        for word in range(len(words)):
            before[word] = size - first
            size += np.int64(popcount(words[word]))
        if size > num_halo:
            continue
        at = first
        for word in range(len(words)):
            left = words[word]
            while left != np.uint64(0):
                halo_nodes[at] = (run << bits) + word * 64 + np.int64(trailing_zeros(left))
                at += 1
                left &= left - np.uint64(1)
        row = num_core + first
        if transposes:
            for block in range(num_blocks):
                for i in range(starts[block, run], starts[block, run + 1]):
                    node = np.int64(edges[i]) & mask
                    below = words[node >> 6] & ((np.uint64(1) << np.uint64(node & 63)) - np.uint64(1))
                    at = row + before[node >> 6] + np.int64(popcount(below)) + 2
                    if at < len(indptr):
                        indptr[at] += 1
            for at in range(row + 2, min(num_core + size + 2, len(indptr))):
                indptr[at] += indptr[at - 1]
        for block in range(num_blocks):
            for i in range(starts[block, run], starts[block, run + 1]):
                edge = np.int64(edges[i])
                node = edge & mask
                below = words[node >> 6] & ((np.uint64(1) << np.uint64(node & 63)) - np.uint64(1))
                local = row + before[node >> 6] + np.int64(popcount(below))
                edges[i] = local
                if transposes:
                    indices[indptr[local + 1]] = (block << row_bits) + (edge >> bits)
                    indptr[local + 1] += 1
    return size


@kernel
def _localise(indptr, sources, begin, bits, row_bits, starts, edges, row_indices, row_places, indices, places):
    num_core, block_rows = np.int64(len(indptr) - 1), np.int64(1) << row_bits
    with_places = len(places) > 0
    for block in range(len(starts)):
        cursor = starts[block].copy()
        first = block * block_rows
        for row in range(first, min(first + block_rows, num_core)):
            place, num = indptr[row], 0
            for i in range(indptr[row], indptr[row + 1]):
                node = np.int64(sources[i])
                if 0 <= node - begin < num_core:  # what is overwritten here has been read
                    indices[place] = node - begin
                    if with_places:
                        places[place] = i
                    place += 1
                else:
                    at = cursor[node >> bits]
                    prefetch(edges, at + _LINE)
                    row_indices[num] = edges[at]
                    cursor[node >> bits] = at + 1
                    if with_places:
                        row_places[num] = i
                    num += 1
            for i in range(num):
                indices[place] = row_indices[i]
                if with_places:
                    places[place] = row_places[i]
                place += 1
