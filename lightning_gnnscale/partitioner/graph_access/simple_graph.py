"""The undirected simple graph behind an edge stream, in blocks, as partitioners and quality measures read it."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ...errors import EdgeStreamError, short
from ...graph import CSC, id_dtype
from ...jit import kernel
from ...scratch import nameless_file, read_at, write_at
from ...triton_kernels.intrinsics import prefetch
from .. import phases
from .layout import LayoutReport, ScanState, edge_hash, scan
from .scratch import AUTO, nameless_map, reserve, scratch_folder

BLOCK_EDGES = 1 << 16  # edges returned at a time: their buffers stay in the processor's cache
SHARE_EDGES = 1 << 17  # edges that a thread reads before it waits for the others
BUCKET_BYTES = 1 << 25  # records of one bucket of pairs: what is held in memory at a time while repeats are found
MAX_BUCKETS = 256  # open files

_KEEP_ALL, _KEEP_ASCENDING, _KEEP_FIRST = range(3)
_HALF = np.uint64(32)


@dataclass(frozen=True)
class SimpleGraph:
    """Every undirected edge once, self-loops left out, in the order of the stream.

    Attributes:
        stream: the EdgeStream behind it.
        report: what the first pass found.
        num_edges: undirected edges that a pass yields.
        first_copies: bits (ceil(num_listed / 8),) uint8 on scratch disk that mark the edges to keep; None where the
            layout alone decides.
    """

    stream: object
    report: LayoutReport
    num_edges: int
    first_copies: np.ndarray | None = None
    _buffers: dict = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_nodes(self) -> int:
        return self.stream.num_nodes

    def blocks(self, chunk, seen: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (src, dst) of the simple edges of one chunk, at most BLOCK_EDGES at a time, in buffers that are reused.

        `seen` is changed in place: (2,) uint64, edges read and the sum of their hashes so far.
        """
        src, dst = self._block_buffers()
        rule = _KEEP_ASCENDING if self.report.layout == "both_ways" else _KEEP_ALL
        bits = self._buffers["no_bits"]
        if self.first_copies is not None:
            rule, bits = _KEEP_FIRST, self.first_copies
        for start in range(0, len(chunk.src), BLOCK_EDGES):
            stop = min(start + BLOCK_EDGES, len(chunk.src))
            kept = _take_simple(
                chunk.src[start:stop], chunk.dst[start:stop], chunk.first_edge + start, rule, bits, src, dst, seen
            )
            yield src[:kept], dst[:kept]

    def check(self, seen: np.ndarray) -> None:
        """Raise EdgeStreamError if a whole pass saw other edges than the first one did."""
        if (int(seen[0]), int(seen[1])) != (self.report.num_listed, self.report.checksum):
            first = f"{self.report.num_listed} edges with checksum {self.report.checksum:016x} in the first pass"
            raise EdgeStreamError(
                f"{self.stream.name}: the edges changed while they were partitioned: {first}, "
                f"{int(seen[0])} with {int(seen[1]):016x} now"
            )

    def one_pass(self, what: str, progress=None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield all simple edges once, in blocks, and check at the end that the stream has not changed."""
        for shares in self.shared_pass(what, 1, progress):
            yield from shares[0]

    def shared_pass(self, what: str, num_shares: int, progress=None) -> Iterator[list[Iterator]]:
        """Do what `one_pass` does, with iterators over blocks that are read side by side, each by one thread.

        Yields lists of up to num_shares iterators. Their edges follow each other, at most SHARE_EDGES each; the edges
        of the next list follow those of the last one.
        """
        seen = np.zeros((num_shares, 2), np.uint64)
        readers = [self, *(replace(self, _buffers={}) for _ in range(1, num_shares))]  # each with its own buffers
        for chunk in self.stream.chunks():
            starts = range(0, len(chunk.src), SHARE_EDGES)
            for first in range(0, len(starts), num_shares):
                pieces = [_piece(chunk, start, start + SHARE_EDGES) for start in starts[first : first + num_shares]]
                yield [reader.blocks(*given) for reader, *given in zip(readers, pieces, seen, strict=False)]
            if progress is not None:
                progress(what, int(seen[:, 0].sum()), self.report.num_listed)
        self.check(seen.sum(axis=0))

    def _block_buffers(self) -> tuple[np.ndarray, np.ndarray]:
        if not self._buffers:
            dtype = id_dtype(self.num_nodes)
            self._buffers.update(
                src=np.empty(BLOCK_EDGES, dtype), dst=np.empty(BLOCK_EDGES, dtype), no_bits=np.zeros(1, np.uint8)
            )
        return self._buffers["src"], self._buffers["dst"]


def _piece(chunk, start: int, stop: int):
    """Return a range of a chunk's edges as a chunk."""
    return chunk._replace(src=chunk.src[start:stop], dst=chunk.dst[start:stop], first_edge=chunk.first_edge + start)


def open_simple_graph(
    stream,
    state: ScanState | None = None,
    deduplicate: bool | None = None,
    scratch: str | os.PathLike | None = AUTO,
    progress=None,
    after_chunk=None,
) -> tuple[SimpleGraph, np.ndarray]:
    """Read the stream once and return the undirected simple graph behind it, with its degrees.

    Args:
        stream: an EdgeStream.
        state: a first pass to go on with (see `layout.scan`).
        deduplicate: drop repeated edges with the help of scratch disk. None: where the layout is "directed", or
            where it was detected and at least 1% of the pairs repeat; without scratch disk repeats stay, and a
            warning says so.
        scratch: folder for the scratch files; "auto": the system's folder for temporary files; None: no scratch disk.
        progress, after_chunk: see `layout.scan`.

    Returns:
        The graph, and its (num_nodes,) degrees of `id_dtype(num_nodes)`.

    Raises:
        ValueError: the stream's layout is contradicted by its edges; `deduplicate` is not a bool or None, or it is
            True without scratch disk.
        GNNScaleError: not enough free space in `scratch`, before anything is written.

    Cost: one pass; with repeats to drop, two passes and (8 + 2 ids + 1/8) bytes an edge of scratch disk, which is
        freed by the system however the process ends.
    """
    if stream.num_nodes is None:
        stream.count()
    _check_deduplicate(deduplicate)
    folder = scratch_folder(scratch)
    if deduplicate and folder is None:
        raise ValueError("deduplicate=True needs scratch disk: give scratch=<a folder> or scratch=auto")
    report, degree = scan(stream, state, progress, after_chunk)
    if deduplicate is None and folder is not None:
        deduplicate = report.asks_for_deduplication
    num_edges = report.num_listed - report.num_self_loops
    if deduplicate and num_edges:
        degree[:] = 0
        bits = find_first_copies(stream, report, folder, degree, progress)
        graph = SimpleGraph(stream, report, int(degree.sum(dtype=np.int64)) // 2, bits)
    else:
        if report.layout == "both_ways":
            np.floor_divide(degree, 2, out=degree)
            num_edges //= 2
        graph = SimpleGraph(stream, report, num_edges)
    tell_graph(graph, graph.num_edges, graph.first_copies is not None)
    return graph, degree


def _check_deduplicate(deduplicate) -> None:
    """Raise ValueError unless the option is True, False or None: a word such as "no" would mean yes."""
    if not isinstance(deduplicate, bool | np.bool_ | None):
        raise ValueError(f"partitioner.deduplicate must be true, false or null, got {short(deduplicate)}")


def graph_facts(graph: SimpleGraph) -> dict[str, np.ndarray]:
    """Return what `reopen_simple_graph` needs, as arrays for a checkpoint."""
    facts = {
        "report": graph.report._asdict(),
        "num_edges": graph.num_edges,
        "deduplicated": graph.first_copies is not None,
    }
    return {"graph": np.array(json.dumps(facts))}


def reopen_simple_graph(stream, facts: dict[str, np.ndarray], scratch=AUTO, progress=None) -> SimpleGraph:
    """Return the graph of an earlier process by its `graph_facts`, without its first pass.

    Marks of copies are made again.
    """
    saved = json.loads(str(facts["graph"]))
    report = LayoutReport(**saved["report"])
    bits = None
    if saved["deduplicated"]:
        degree = np.zeros(stream.num_nodes, id_dtype(stream.num_nodes))
        bits = find_first_copies(stream, report, scratch_folder(scratch), degree, progress)
    graph = SimpleGraph(stream, report, saved["num_edges"], bits)
    tell_graph(graph, graph.num_edges, graph.first_copies is not None)
    return graph


def tell_graph(graph: SimpleGraph, num_edges: int, deduplicated: bool) -> None:
    """Note what was found out about a graph, and warn of edges that count several times.

    The graph is kept for what comes after partitioning, unless its repeated edges were dropped without marks on it.
    """
    report = graph.report
    phases.note(
        layout=report.layout, repeated_share=report.repeated_share, deduplicated=deduplicated, num_edges=num_edges
    )
    if not deduplicated or graph.first_copies is not None:
        phases.keep_graph(graph)
    if report.repeated_share and not deduplicated and phases.cuts():
        share = f"about {report.repeated_share:.1%}" if report.repeated_share >= 0.0005 else "less than 0.1%"
        kept = "one edge of each type between two nodes, all where edges have times"
        phases.warn(
            f"{graph.stream.name}: {share} of the edges are listed more often than layout "
            f"{report.layout!r} says, several between the same two nodes, and each time count again in the "
            "partitioner's cut; partitioner.deduplicate=true counts them once. This concerns the cut alone: a store of "
            "these edges keeps "
            f"{kept if graph.stream.to_undirected else 'every listed edge'}"
        )


@kernel
def _take_simple(src, dst, first_edge, rule, bits, out_src, out_dst, seen):
    """Copy the edges that the rule keeps to the front of the output; return how many."""
    checksum = np.uint64(0)
    for i in range(len(src)):
        checksum += edge_hash(src[i], dst[i])
    seen[0] += np.uint64(len(src))
    seen[1] += checksum
    kept = 0
    if rule == _KEEP_FIRST:
        for i in range(len(src)):
            position = first_edge + i
            if (bits[position >> 3] >> (position & 7)) & 1:
                out_src[kept], out_dst[kept] = src[i], dst[i]
                kept += 1
    elif rule == _KEEP_ASCENDING:
        for i in range(len(src)):
            out_src[kept], out_dst[kept] = src[i], dst[i]
            kept += src[i] < dst[i]
    else:
        for i in range(len(src)):
            out_src[kept], out_dst[kept] = src[i], dst[i]
            kept += src[i] != dst[i]
    return kept


def scratch_bytes_needed(num_listed: int, num_nodes: int) -> int:
    """Return the scratch disk, in bytes, that dropping the repeats of `num_listed` edges takes."""
    return num_listed * (8 + 2 * id_dtype(num_nodes).itemsize) + (num_listed + 7) // 8


def find_first_copies(stream, report: LayoutReport, folder: Path, degree: np.ndarray, progress=None):
    """Mark the first copy of every pair, in the order of the stream, and add the kept edges to `degree`.

    Pairs are spread by hash over bucket files, each small enough for a hash table in memory. The files have no
    name: the system frees them when the process ends, however it ends. With layout "both_ways" only copies with
    src < dst are considered.

    Returns:
        (ceil(num_listed / 8),) uint8 bits by position in the source, memory-mapped from scratch disk.

    Cost: one pass; 16 bytes an edge written and read once (24 with int64 ids); about 1.5 BUCKET_BYTES of memory.
    Source: ours; replaces an external sort by (min, max) followed by one back to the stream's order.
    """
    needed = scratch_bytes_needed(report.num_listed, stream.num_nodes)
    reserve(folder, needed, f"dropping the repeats of {report.num_listed} edges")
    ids = id_dtype(stream.num_nodes)
    record = np.dtype([("position", np.int64), ("low", ids), ("high", ids)])
    num_buckets = int(np.clip(-(-report.num_listed * record.itemsize // BUCKET_BYTES), 1, MAX_BUCKETS))
    bits = nameless_map(folder, ((report.num_listed + 7) // 8,), np.uint8)
    buckets = [nameless_file(folder) for _ in range(num_buckets)]
    try:
        _fill_buckets(stream, report.layout == "both_ways", buckets, record, progress)
        for bucket in buckets:
            _mark_bucket(bucket, record, bits, degree)
    finally:
        for bucket in buckets:
            bucket.close()
    return np.asarray(bits)


def _fill_buckets(stream, ascending_only: bool, buckets: list, record: np.dtype, progress) -> None:
    step = 1 << 18
    records = np.empty(step, record)
    offsets = np.empty(len(buckets) + 1, np.int64)
    written = np.zeros(len(buckets), np.int64)
    for chunk in stream.chunks():
        for start in range(0, len(chunk.src), step):
            stop = min(start + step, len(chunk.src))
            src, dst = chunk.src[start:stop], chunk.dst[start:stop]
            _sort_into_buckets(src, dst, chunk.first_edge + start, ascending_only, records, offsets)
            for number in np.flatnonzero(np.diff(offsets)):
                low, high = offsets[number : number + 2]
                write_at(buckets[number], records[low:high].view(np.uint8), int(written[number]) * record.itemsize)
                written[number] += high - low
        if progress is not None:
            progress("first copies", chunk.first_edge + len(chunk.src), stream.num_edges)


def _mark_bucket(bucket, record: np.dtype, bits: np.ndarray, degree: np.ndarray) -> None:
    records = np.empty(os.fstat(bucket.fileno()).st_size // record.itemsize, record)
    read_at(bucket, records.view(np.uint8), 0)
    size = 1 << max(4, int(len(records) * 1.5).bit_length())
    _mark_first(records["low"], records["high"], records["position"], np.zeros(size, np.int64), bits, degree)


@kernel
def _sort_into_buckets(src, dst, first_edge, ascending_only, records, offsets):
    """Order one step's edges by the bucket of their pair; bucket b is records[offsets[b]:offsets[b + 1]]."""
    num_buckets = np.uint64(len(offsets) - 1)
    offsets[:] = 0
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u < v or (u > v and not ascending_only):
            b = ((edge_hash(min(u, v), max(u, v)) >> _HALF) * num_buckets) >> _HALF
            offsets[np.int64(b) + 1] += 1
    for b in range(len(offsets) - 1):
        offsets[b + 1] += offsets[b]
    cursor = offsets.copy()
    low, high, position = records["low"], records["high"], records["position"]
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u < v or (u > v and not ascending_only):
            b = np.int64(((edge_hash(min(u, v), max(u, v)) >> _HALF) * num_buckets) >> _HALF)
            low[cursor[b]], high[cursor[b]], position[cursor[b]] = min(u, v), max(u, v), first_edge + i
            cursor[b] += 1


@kernel
def _mark_first(low, high, position, table, bits, degree):
    """Set the bit of the first record of every pair; the table holds record numbers, 0 is empty."""
    slots = np.uint64(len(table) - 1)
    for i in range(len(low)):
        slot = edge_hash(low[i], high[i]) & slots
        while table[slot] and (low[table[slot] - 1] != low[i] or high[table[slot] - 1] != high[i]):
            slot = (slot + np.uint64(1)) & slots
        if table[slot] == 0:
            table[slot] = i + 1
            bits[position[i] >> 3] |= np.uint8(1 << (position[i] & 7))
            degree[low[i]] += 1
            degree[high[i]] += 1


def symmetric_adjacency(
    graph: SimpleGraph, degree: np.ndarray, dtype: np.dtype, progress=None, what: str = "adjacency"
) -> CSC:
    """Return both directions of every edge of a simple graph, rows in stream order, for methods that need it in memory.

    Args:
        graph, degree: what `open_simple_graph` returned.
        dtype: int32 or int64, of the neighbours' ids.
        progress: called as progress(what, edges done, edges in all) once a chunk.

    Raises:
        EdgeStreamError: the edges changed since they were counted.

    Cost: one pass; two ids an edge, and an id a node besides the result.
    """
    indptr = np.zeros(graph.num_nodes + 1, np.int64)
    np.cumsum(degree, out=indptr[1:])
    indices = np.empty(indptr[-1], dtype)
    cursor = indptr[:-1].astype(id_dtype(int(indptr[-1])))
    for src, dst in graph.one_pass(what, progress):
        _fill_rows(src, dst, cursor, indices)
    if not np.array_equal(cursor, indptr[1:]):
        raise EdgeStreamError(f"{graph.stream.name}: the edges changed while they were partitioned")
    return CSC(indptr, indices)


@kernel
def _fill_rows(src, dst, cursor, indices):
    """Put both entries of edges behind those that their rows have already."""
    near, far, num_edges, size = np.uint64(8), np.uint64(24), np.uint64(len(src)), len(indices)
    # Unsigned indices: numba tests every signed one for a negative. A place is fetched once its cursor has come.
    for i in range(num_edges):
        if i + far < num_edges:
            prefetch(cursor, np.int64(src[i + far]))
            prefetch(cursor, np.int64(dst[i + far]))
            prefetch(indices, np.int64(cursor[np.uint64(src[i + near])]))
            prefetch(indices, np.int64(cursor[np.uint64(dst[i + near])]))
        u, v = np.uint64(src[i]), np.uint64(dst[i])
        place, other = cursor[u], cursor[v]
        if place < size and other < size:  # else the edges changed since the first pass
            indices[np.uint64(place)], indices[np.uint64(other)] = v, u
        cursor[u] += 1
        cursor[v] += 1
