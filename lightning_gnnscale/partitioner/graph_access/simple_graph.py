"""The undirected simple graph behind an edge stream, read in blocks: what every partitioner and the quality see."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ...errors import EdgeStreamError
from ...graph import id_dtype
from ...jit import kernel
from ...rng import mix64
from .. import phases
from .first_copies import find_first_copies
from .layout import LayoutReport, ScanState, scan
from .scratch import AUTO, scratch_folder

BLOCK_EDGES = 1 << 16  # edges handed out at a time: their buffers stay in the processor's cache

_KEEP_ALL, _KEEP_ASCENDING, _KEEP_FIRST = range(3)
_SRC_FACTOR, _DST_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


@dataclass(frozen=True)
class SimpleGraph:
    """Every undirected edge once, self-loops left out, in the order of the stream.

    Attributes:
        stream: the EdgeStream behind it.
        report: what the first pass found.
        num_edges: undirected edges that a pass yields.
        first_copies: bits (ceil(num_listed / 8),) uint8 on scratch disk that mark the edges to keep; None where the
            layout alone tells.
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
        """Yield the simple edges of one chunk, at most BLOCK_EDGES at a time.

        Args:
            chunk: an EdgeChunk of the stream.
            seen: (2,) uint64, edges read and the sum of their hashes so far; changed in place.

        Yields:
            src, dst: (num_kept,) `id_dtype(num_nodes)`, overwritten by the next step.
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
        """Yield all simple edges once, in blocks, and check at the end that the stream has not changed.

        Args:
            what: the name under which progress is told.
            progress: called as progress(what, edges done, edges in all) once a chunk.
        """
        seen = np.zeros(2, np.uint64)
        for chunk in self.stream.chunks():
            yield from self.blocks(chunk, seen)
            if progress is not None:
                progress(what, int(seen[0]), self.report.num_listed)
        self.check(seen)

    def _block_buffers(self) -> tuple[np.ndarray, np.ndarray]:
        if not self._buffers:
            dtype = id_dtype(self.num_nodes)
            self._buffers.update(
                src=np.empty(BLOCK_EDGES, dtype), dst=np.empty(BLOCK_EDGES, dtype), no_bits=np.zeros(1, np.uint8)
            )
        return self._buffers["src"], self._buffers["dst"]


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
            warning tells.
        scratch: folder for the scratch files; "auto": the system's folder for temporary files; None: no scratch disk.
        progress, after_chunk: see `layout.scan`.

    Returns:
        The graph, and its (num_nodes,) degrees of `id_dtype(num_nodes)`.

    Raises:
        ValueError: the stream's layout is contradicted by its edges; `deduplicate` is no truth value, or True without
            scratch disk.
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
        deduplicate = report.layout == "directed" or (report.detected and report.has_repeats)
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
        raise ValueError(f"partitioner.deduplicate must be true, false or null, got {deduplicate!r}")


def graph_facts(graph: SimpleGraph) -> dict[str, np.ndarray]:
    """Return what `reopen_simple_graph` needs, as arrays for a checkpoint."""
    facts = {
        "report": graph.report._asdict(),
        "num_edges": graph.num_edges,
        "deduplicated": graph.first_copies is not None,
    }
    return {"graph": np.array(json.dumps(facts))}


def reopen_simple_graph(stream, facts: dict[str, np.ndarray], scratch=AUTO, progress=None) -> SimpleGraph:
    """Return the graph of an earlier process without its first pass; marks of first copies are made again.

    Args:
        stream: the same source.
        facts: what `graph_facts` returned.
        scratch, progress: see `open_simple_graph`.
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
    """Note what a graph was found to be, and warn of edges that count several times.

    Args:
        graph: kept for what comes after partitioning, unless its repeated edges were dropped without marks on it.
        num_edges: left of it.
        deduplicated: repeated edges were dropped.
    """
    report = graph.report
    phases.note(
        layout=report.layout, repeated_share=report.repeated_share, deduplicated=deduplicated, num_edges=num_edges
    )
    if not deduplicated or graph.first_copies is not None:
        phases.keep_graph(graph)
    if report.repeated_share and not deduplicated:
        phases.warn(
            f"{graph.stream.name}: about {report.repeated_share:.1%} of the edges are listed more often than layout "
            f"{report.layout!r} says, and count again each time; deduplicate=True drops them"
        )


@kernel
def _take_simple(src, dst, first_edge, rule, bits, out_src, out_dst, seen):
    """Copy the edges that the rule keeps to the front of the output; return how many."""
    checksum = np.uint64(0)
    for i in range(len(src)):
        checksum += mix64(np.uint64(src[i]) * _SRC_FACTOR + np.uint64(dst[i]) * _DST_FACTOR)
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
