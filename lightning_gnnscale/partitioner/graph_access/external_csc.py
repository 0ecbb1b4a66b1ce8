"""The undirected simple graph as rows of neighbours on scratch disk, read block by block, for node streams."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...edge_stream.read_ahead import read_ahead
from ...errors import check_number
from ...graph import CSC
from ...jit import kernel
from ...scratch import nameless_file, read_at
from .. import phases
from .entry_buckets import MAX_ROUNDS, EntryBuckets, cut_ranges, num_spreaders, sum_ranges, without_repeats
from .layout import LayoutReport, ScanState, scan
from .scratch import AUTO, reserve, scratch_folder
from .simple_graph import SimpleGraph, symmetric_adjacency, tell_graph

BLOCK_EDGES = 1 << 21


class AdjacencyBlock(NamedTuple):
    """The rows of consecutive nodes; the arrays may be overwritten when the next block is asked for.

    Attributes:
        first_node: row r holds the neighbours of node first_node + r.
        indptr: (num_rows + 1,) int64, row r is indices[indptr[r]:indptr[r + 1]].
        indices: (num_entries,) `id_dtype(num_nodes)`, each row in the order of the stream.
    """

    first_node: int
    indptr: np.ndarray
    indices: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.indptr) - 1


class ExternalCSC:
    """The symmetric adjacency of an undirected simple graph, in a scratch file without a name, or held in memory.

    Args:
        file: the rows, one after the other; None: they are held.
        degree, report: see below.
        block_edges: entries, and rows, of a block at most.
        held: offsets and neighbours of all rows, which then are one block.

    Attributes:
        num_nodes, num_edges: nodes, and undirected edges; each edge is an entry of two rows.
        degree: (num_nodes,) `id_dtype(num_nodes)`, entries a row.
        report: what the first pass over the stream found.
        held: whether the rows are in memory.
        block_start: (num_blocks + 1,) int64, block b has the rows from block_start[b] to block_start[b + 1]: at most
            block_edges rows and entries, or a single row. Depends on the graph and block_edges alone.
    """

    def __init__(self, file, degree: np.ndarray, report: LayoutReport, block_edges: int, held: CSC | None = None):
        self.degree, self.report, self._held = degree, report, held
        self.num_edges = int(degree.sum(dtype=np.int64)) // 2
        most = block_edges if held is None else max(block_edges, len(degree), 2 * self.num_edges)
        self.block_start = cut_ranges(degree, most, most)
        self._first_entry = np.zeros(self.num_blocks + 1, np.int64)
        sum_ranges(degree, self.block_start, self._first_entry[1:])
        np.cumsum(self._first_entry, out=self._first_entry)
        self._file = file
        self._spare: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def num_nodes(self) -> int:
        return len(self.degree)

    @property
    def held(self) -> bool:
        return self._held is not None

    @property
    def num_blocks(self) -> int:
        return len(self.block_start) - 1

    def blocks(self, first_block: int = 0, backwards: bool = False) -> Iterator[AdjacencyBlock]:
        """Iterate over the blocks in order, the next one already being read by a thread.

        Args:
            first_block: blocks to leave out, in [0, num_blocks].
            backwards: from the last block on. Passes that turn round find what the one before read last in the page
                cache: as much of the graph as memory has left.

        Cost: O(num_nodes + num_edges) time; two blocks of memory, kept for the next call.
        """
        numbers = range(first_block, self.num_blocks)
        if self._held is not None:
            return iter([AdjacencyBlock(0, *self._held)][: len(numbers)])
        numbers = numbers[::-1] if backwards else numbers
        if len(numbers) <= 1:
            return self._read(numbers, None)
        return read_ahead(lambda stop: self._read(numbers, stop))

    def close(self) -> None:
        """Give the scratch disk and the buffers back."""
        if self._file is not None:
            self._file.close()
        self._held = None
        self._spare.clear()

    def __enter__(self) -> "ExternalCSC":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _read(self, numbers: range, stop) -> Iterator[AdjacencyBlock]:
        buffers = [self._buffers(), self._buffers()] if len(numbers) > 1 else [self._buffers()]
        try:
            for block in numbers:
                if stop is not None and stop.is_set():
                    return
                offsets, entries = buffers[block % len(buffers)]
                first, last = int(self.block_start[block]), int(self.block_start[block + 1])
                indptr = offsets[: last - first + 1]
                indices = entries[: self._first_entry[block + 1] - self._first_entry[block]]
                _row_offsets(self.degree[first:last], indptr)
                read_at(self._file, indices, int(self._first_entry[block]) * indices.itemsize)
                yield AdjacencyBlock(first, indptr, indices)
        finally:
            self._spare += buffers

    def _buffers(self) -> tuple[np.ndarray, np.ndarray]:
        if self._spare:
            return self._spare.pop()
        rows = int(np.diff(self.block_start).max(initial=0))
        entries = int(np.diff(self._first_entry).max(initial=0))
        return np.empty(rows + 1, np.int64), np.empty(entries, self.degree.dtype)


def open_external_csc(
    stream,
    scratch: str | os.PathLike | None = AUTO,
    block_edges: int = BLOCK_EDGES,
    deduplicate: bool | None = None,
    progress=None,
    state: ScanState | None = None,
    after_chunk=None,
    threads=None,
    held_blocks: int = 0,
) -> ExternalCSC:
    """Read a stream twice and put the rows of its undirected simple graph onto scratch disk.

    Close the result to free it.

    Args:
        stream, scratch, deduplicate, progress, state, after_chunk: see `open_simple_graph`; here scratch disk is
            needed.
        block_edges: entries, and rows, of a block at most (a longer row is a block of its own), >= 1.
        threads: `RowThreads` that count, spread and sort; None: one thread.
        held_blocks: hold the rows in memory where, with all repeats, they are no more than so many blocks: no scratch
            disk is used. Two blocks are what is held while they are read.

    Cost: two passes, O(num_nodes + num_edges) time; an id a node and 5 to 40 MB of memory; 12 bytes an edge of scratch
        disk (20 with int64 ids) until it returns, 8 (16) from then on. Where 12 bytes are not free, a third and perhaps
        a fourth pass bring them down to 9 or 8.3 (16.7 or 16.1). Repeats count as long as they are not dropped.
    """
    check_number("partitioner.block_edges", block_edges, at_least=1)
    folder = scratch_folder(scratch)
    if folder is None:
        raise ValueError("the rows of the graph need scratch disk: give scratch=<a folder> or scratch=auto")
    if stream.num_nodes is None:
        stream.count()
    with phases.phase("degrees"):
        report, degree = scan(stream, state, progress, after_chunk, threads)
    with phases.phase("adjacency"):
        if report.layout == "both_ways":
            np.floor_divide(degree, 2, out=degree)
        if deduplicate is None:
            deduplicate = report.asks_for_deduplication
        graph = SimpleGraph(stream, report, int(degree.sum(dtype=np.int64)) // 2)
        if max(len(degree), 2 * graph.num_edges) <= held_blocks * block_edges:
            held = symmetric_adjacency(graph, degree, degree.dtype, progress)
            held = without_repeats(held, degree) if deduplicate else held
            csc = ExternalCSC(None, degree, report, int(block_edges), held)
            tell_graph(graph, csc.num_edges, deduplicate)
            return csc
        buckets = _fitting_buckets(degree, stream.name, folder)
        reserve(folder, buckets.file_bytes, f"sorting the neighbours of {graph.num_edges} edges")
        file = nameless_file(folder)
        try:
            for number in range(buckets.num_rounds):
                pieces = graph.shared_pass("adjacency", num_spreaders(threads), progress)
                buckets.spread(file, pieces, number, threads)
                buckets.sort(file, deduplicate, progress, number, threads)
            csc = ExternalCSC(file, degree, report, int(block_edges))
        except BaseException:
            file.close()
            raise
    tell_graph(graph, csc.num_edges, deduplicate)
    return csc


def _fitting_buckets(degree: np.ndarray, name: str, folder: Path) -> EntryBuckets:
    """Return the buckets with as few rounds as the free space allows."""
    free = shutil.disk_usage(folder).free
    buckets = EntryBuckets(degree, name)
    for num_rounds in range(2, MAX_ROUNDS + 1):
        if buckets.file_bytes > free:
            buckets = EntryBuckets(degree, name, num_rounds)
    return buckets


@kernel
def _row_offsets(degree, indptr):
    indptr[0] = 0
    for row in range(len(degree)):
        indptr[row + 1] = indptr[row] + degree[row]
