"""The local ids of a part's edges, and its halo with the rows that are a transpose, in passes that stay in the cache.

Edges from outside of the core are sorted by runs of store ids, some rows of the core at a time, in 4 bytes each: a row
among these, and a node within its run. Then the nodes of one run after the other are numbered, and their rows filled:
what is looked up in any order is of one run. At last the rows of the core take their edges' numbers from where they
were put, in the same order. A look-up in tables of the whole graph and of the halo costs several times as much. Threads
take some blocks of rows, or some runs, each; what they give does not depend on how many there are.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..graph import CSC
from ..jit import kernel
from ..partitioner.multilevel.weighted_graph import RowThreads
from ..triton_kernels.intrinsics import popcount, prefetch, trailing_zeros

RUN_BITS = 17  # of a run of nodes: what is looked up of one takes some 100 KiB in a part of 25 million edges
ROW_BITS = 32 - RUN_BITS  # of a block of rows
_LINE = 16  # edges of a cache line
_ONE_THREAD = RowThreads(1)


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
    threads: RowThreads = _ONE_THREAD,
) -> OutsideEdges | None:
    """Return the edges of core rows from outside of the core; None where a source is not a node of the graph.

    Args:
        indptr: (num_core + 1,) int64 from 0.
        sources: (num_edges,) store ids, ascending within a row.
        begin, end: Store ids that bound the core.
        num_nodes: Of the graph.
        bits, row_bits: Of a run of nodes and of a block of rows, together at most 32.
        allocate: Returns memory of a shape and dtype.
        threads: Who takes blocks of rows.

    Cost: two passes over the edges; 4 bytes an edge from outside.
    """
    num_runs, num_blocks = -(-num_nodes >> bits), -(-(end - begin) >> row_bits)
    starts = np.zeros((num_blocks, num_runs + 1), np.int64)
    counts, edges = starts[:, 1:], allocate(len(sources), np.uint32)  # pages that are not written take no memory
    blocks, given = _block_offsets(indptr, row_bits), (indptr, sources, begin, end, bits, row_bits)
    if not all(threads.run(_count_by_runs, blocks, *given, num_nodes, counts)):
        return None
    counts[:] = np.cumsum(counts).reshape(counts.shape)
    starts[1:, 0] = starts[:-1, -1]
    threads.run(_sort_by_runs, blocks, *given, starts, edges)
    return OutsideEdges(bits, row_bits, starts, edges)


def number_halo(
    outside: OutsideEdges,
    halo_nodes: np.ndarray,
    csc: CSC,
    num_core: int,
    transposes: bool,
    threads: RowThreads = _ONE_THREAD,
) -> int:
    """Fill a part's halo in, and where its rows are a transpose of the core's, these; number its edges in place.

    Args:
        outside: The part's; its edges become the local ids of their sources.
        halo_nodes: (num_halo,) filled with store ids, ascending.
        csc: The part in local ids: offsets of its core rows, zeros behind; indices are not read.
        num_core: The number of core rows.
        transposes: Whether rows of the halo are filled with the core rows that name their nodes, ascending.
        threads: Who takes runs of nodes.

    Returns:
        The number of nodes in the halo; where that is not `num_halo`, what was filled in is of no use.

    Cost: two passes over the edges from outside, and a third over those of all threads' runs but the last one's; 1.5
        MiB of memory a thread.
    """
    edges = np.append(0, np.cumsum(np.diff(outside.starts, axis=1).sum(axis=0)))
    runs, rows_end = threads.ranges(edges), int(csc.indptr[num_core])
    firsts = np.cumsum([0, *threads.map(lambda some: _count_nodes(*some, *outside), runs[:-1])]).tolist()

    def number(at: int) -> int:
        """Number the nodes of some runs; return how many there are with those of the runs before."""
        some, before = runs[at], (firsts[at], rows_end + int(edges[runs[at][0]]))
        return _number_runs(*some, *outside, *before, num_core, transposes, halo_nodes, *csc)

    return int(threads.map(number, range(len(runs)))[-1])


def localise(
    indptr: np.ndarray,
    sources: np.ndarray,
    begin: int,
    outside: OutsideEdges,
    indices: np.ndarray,
    places: np.ndarray,
    threads: RowThreads = _ONE_THREAD,
) -> None:
    """Translate core rows from store ids to local ids, ascending in a row again.

    Args:
        indptr: (num_core + 1,) int64 from 0.
        sources: (num_edges,) store ids; may be the memory of `indices`, where they are int32.
        begin: Store id of the first core node.
        outside: The edges from outside, numbered.
        indices: (num_edges or more,) int32; the first num_edges are filled with local ids.
        places: (num_edges or more,) int64; filled with where each source was; empty: they are not needed.
        threads: Who takes blocks of rows.

    Cost: a pass over the edges.
    """
    longest, blocks = int(np.diff(indptr).max(initial=0)), _block_offsets(indptr, outside.row_bits)
    threads.run(_localise, blocks, indptr, sources, begin, *outside, longest, indices, places)


def _block_offsets(indptr: np.ndarray, row_bits: int) -> np.ndarray:
    """Return (num_blocks + 1,) int64, where the edges of each block of rows begin, and where the last one's end."""
    num_core = len(indptr) - 1
    return indptr[np.minimum(np.arange(-(-num_core >> row_bits) + 1) << row_bits, num_core)]


@kernel
def _count_by_runs(first_block, last_block, indptr, sources, begin, end, bits, row_bits, num_nodes, counts):
    """Count the edges from outside of some blocks by runs; return whether all sources are nodes."""
    num_core, block_rows = np.int64(len(indptr) - 1), np.int64(1) << row_bits
    for block in range(first_block, last_block):
        first = block * block_rows
        count = counts[block]
        for i in range(indptr[first], indptr[min(first + block_rows, num_core)]):
            node = np.int64(sources[i])
            if begin <= node < end:
                continue
            if node < 0 or node >= num_nodes:
                return False
            count[node >> bits] += 1
    return True


@kernel
def _sort_by_runs(first_block, last_block, indptr, sources, begin, end, bits, row_bits, starts, edges):
    num_core, block_rows = np.int64(len(indptr) - 1), np.int64(1) << row_bits
    for block in range(first_block, last_block):
        cursor, first = starts[block].copy(), block * block_rows
        for row in range(first, min(first + block_rows, num_core)):
            high = (row - first) << bits
            for i in range(indptr[row], indptr[row + 1]):
                node = np.int64(sources[i])
                if begin <= node < end:
                    continue
                run = node >> bits
                edges[cursor[run]] = high | (node - (run << bits))
                cursor[run] += 1


@kernel
def _count_nodes(first_run, last_run, bits, row_bits, starts, edges):
    """Return how many nodes the edges of some runs come from."""
    mask, size = (np.int64(1) << bits) - 1, np.int64(0)
    words = np.zeros((mask >> 6) + 1, np.uint64)
    for run in range(first_run, last_run):
        for block in range(len(starts)):
            for i in range(starts[block, run], starts[block, run + 1]):
                node = np.int64(edges[i]) & mask
                words[node >> 6] |= np.uint64(1) << np.uint64(node & 63)
        for word in range(len(words)):
            size += np.int64(popcount(words[word]))
            words[word] = 0
    return size


@kernel
def _number_runs(
    first_run, last_run, bits, row_bits, starts, edges, size, edge, num_core, transposes, halo_nodes, indptr, indices
):
    """Number the nodes of some runs, where so many nodes, and so many edges with the core's, are before them.

    A node's slot has how many edges come from it, then its number in the run.
    """
    num_halo, mask, num_blocks = np.int64(len(halo_nodes)), (np.int64(1) << bits) - 1, len(starts)
    words, slots = np.zeros((mask >> 6) + 1, np.uint64), np.zeros(mask + 1, np.int32)
    cursor = np.empty(mask + 1 if transposes else 0, np.int64)
    for run in range(first_run, last_run):
        for block in range(num_blocks):
            for i in range(starts[block, run], starts[block, run + 1]):
                node = np.int64(edges[i]) & mask
                words[node >> 6] |= np.uint64(1) << np.uint64(node & 63)
                slots[node] += 1
        first = size
        for word in range(len(words)):
            left = words[word]
            while left != np.uint64(0):
                node = word * 64 + np.int64(trailing_zeros(left))
                left &= left - np.uint64(1)
                if size < num_halo:
                    halo_nodes[size] = (run << bits) + node
                if transposes:
                    cursor[size - first] = edge
                edge += slots[node]
                slots[node] = size - first
                size += 1
        fits = size <= num_halo
        for block in range(num_blocks):
            for i in range(starts[block, run], starts[block, run + 1]):
                entry = np.int64(edges[i])
                number = np.int64(slots[entry & mask])
                if fits and transposes:
                    indices[cursor[number]] = (block << row_bits) + (entry >> bits)
                    cursor[number] += 1
                if fits:
                    edges[i] = num_core + first + number
        for word in range(len(words)):
            left = words[word]
            while left != np.uint64(0):
                slots[word * 64 + np.int64(trailing_zeros(left))] = 0
                left &= left - np.uint64(1)
            words[word] = 0
        if fits and transposes:
            for number in range(size - first):
                indptr[num_core + first + number + 1] = cursor[number]
    return size


@kernel
def _localise(
    first_block, last_block, indptr, sources, begin, bits, row_bits, starts, edges, longest, indices, places
):  # fmt: skip
    num_core, block_rows = np.int64(len(indptr) - 1), np.int64(1) << row_bits
    with_places = len(places) > 0
    row_indices, row_places = np.empty(longest, np.int32), np.empty(longest if with_places else 0, np.int64)
    for block in range(first_block, last_block):
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
