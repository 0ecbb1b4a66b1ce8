"""Edges on scratch disk in a fixed order: as streamed, or in a random one made with bounded memory."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...graph import id_dtype
from ...jit import kernel
from ...rng import below, combine, fold
from .scratch import nameless_file, read_at, write_at
from .simple_graph import SimpleGraph

BUCKET_EDGES = 1 << 20  # what is permuted in memory at a time, up to MAX_BUCKETS of them
MAX_BUCKETS = 1024
STEP_EDGES = 1 << 18  # edges sorted by bucket before they are written
SLICE_EDGES = 1 << 16  # edges read at a time: they stay in the processor's cache

_BUCKET_SALT, _PERMUTE_SALT = 0x4255434B, 0x5045524D


class EdgeFile:
    """A file of edges without a name, all ids of one dtype; the system frees it when it is closed."""

    def __init__(self, folder: Path, dtype: np.dtype):
        self.folder = folder
        self.dtype = np.dtype(dtype)
        self.num_edges = 0
        self._file = nameless_file(folder)

    def append(self, pairs: np.ndarray) -> None:
        """Write (num_pairs, 2) ids, contiguous and of the file's dtype, at the end."""
        self.write(self.num_edges, pairs)
        self.num_edges += len(pairs)

    def write(self, first_edge: int, pairs: np.ndarray) -> None:
        """Write (num_pairs, 2) ids over the edges from `first_edge` on; `num_edges` stays as it is."""
        write_at(self._file, pairs, first_edge * 2 * self.dtype.itemsize)

    def read(self, first_edge: int, pairs: np.ndarray) -> None:
        """Fill (num_pairs, 2) `pairs` with the edges from `first_edge` on."""
        read_at(self._file, pairs, first_edge * 2 * self.dtype.itemsize)

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Yield the edges [start, stop) as (num_pairs, 2) arrays, overwritten by the next step."""
        stop = self.num_edges if stop is None else stop
        buffer = np.empty((min(SLICE_EDGES, max(0, stop - start)), 2), self.dtype)
        while start < stop:
            piece = buffer[: min(SLICE_EDGES, stop - start)]
            self.read(start, piece)
            yield piece
            start += len(piece)

    def close(self) -> None:
        self._file.close()


def shuffle_edges(graph: SimpleGraph, folder: Path, seed: int, progress=None) -> EdgeFile:
    """Write the simple edges to scratch disk in a random order that is a function of (edges in their order, seed).

    Each edge goes to a bucket by a hash of its position; then each bucket is permuted in memory.

    Cost: one pass, and each edge written twice and read once (2 ids an edge); about STEP_EDGES and one bucket of
        memory: 2**20 edges, or num_edges / 1024 where that is more.
    Source: ours; a two-level version of the usual external shuffle.
    """
    num_buckets = int(np.clip(-(-graph.num_edges // BUCKET_EDGES), 1, MAX_BUCKETS))
    key = np.uint64(fold(seed, _BUCKET_SALT))
    offsets = np.zeros(num_buckets + 1, np.int64)
    _count_buckets(key, graph.num_edges, offsets)
    edges = EdgeFile(folder, id_dtype(graph.num_nodes))
    edges.num_edges = graph.num_edges
    cursor, first_edge = offsets[:-1].copy(), 0
    step = np.empty((STEP_EDGES, 2), edges.dtype)
    ordered, spans = np.empty_like(step), np.empty(num_buckets + 1, np.int64)
    for filled in _steps(graph, step, "shuffle", progress):
        _sort_by_bucket(key, first_edge, step[:filled], ordered, spans)
        for bucket in np.flatnonzero(np.diff(spans)):
            low, high = spans[bucket], spans[bucket + 1]
            edges.write(int(cursor[bucket]), ordered[low:high])
            cursor[bucket] += high - low
        first_edge += filled
    del step, ordered
    for bucket in range(num_buckets):
        pairs = np.empty((int(offsets[bucket + 1] - offsets[bucket]), 2), edges.dtype)
        edges.read(int(offsets[bucket]), pairs)
        _permute(np.uint64(fold(seed, _PERMUTE_SALT, bucket)), pairs)
        edges.write(int(offsets[bucket]), pairs)
    return edges


def copy_edges(graph: SimpleGraph, folder: Path, progress=None) -> EdgeFile:
    """Write the simple edges to scratch disk in the order of the stream; see `shuffle_edges`."""
    edges = EdgeFile(folder, id_dtype(graph.num_nodes))
    step = np.empty((STEP_EDGES, 2), edges.dtype)
    for filled in _steps(graph, step, "copy edges", progress):
        edges.append(step[:filled])
    return edges


def _steps(graph: SimpleGraph, step: np.ndarray, what: str, progress) -> Iterator[int]:
    """Fill `step` over and over from one pass over the graph, and yield how many edges it holds."""
    filled = 0
    for src, dst in graph.one_pass(what, progress):
        done = 0
        while done < len(src):
            take = min(len(src) - done, len(step) - filled)
            step[filled : filled + take, 0] = src[done : done + take]
            step[filled : filled + take, 1] = dst[done : done + take]
            done, filled = done + take, filled + take
            if filled == len(step):
                yield filled
                filled = 0
    if filled:
        yield filled


@kernel
def _count_buckets(key, num_edges, offsets):
    """Turn zeros into the (num_buckets + 1,) offsets of the buckets."""
    num_buckets = len(offsets) - 1
    for i in range(num_edges):
        offsets[below(combine(key, i), num_buckets) + 1] += 1
    for b in range(num_buckets):
        offsets[b + 1] += offsets[b]


@kernel
def _sort_by_bucket(key, first_edge, pairs, ordered, spans):
    """Order some consecutive edges by their bucket; bucket b is ordered[spans[b]:spans[b + 1]]."""
    num_buckets = len(spans) - 1
    spans[:] = 0
    for i in range(len(pairs)):
        spans[below(combine(key, first_edge + i), num_buckets) + 1] += 1
    for b in range(num_buckets):
        spans[b + 1] += spans[b]
    cursor = spans.copy()
    for i in range(len(pairs)):
        b = below(combine(key, first_edge + i), num_buckets)
        ordered[cursor[b], 0], ordered[cursor[b], 1] = pairs[i, 0], pairs[i, 1]
        cursor[b] += 1


@kernel
def _permute(key, pairs):
    """Fisher and Yates' shuffle."""
    for i in range(len(pairs) - 1, 0, -1):
        j = below(combine(key, i), i + 1)
        src, dst = pairs[i, 0], pairs[i, 1]
        pairs[i, 0], pairs[i, 1] = pairs[j, 0], pairs[j, 1]
        pairs[j, 0], pairs[j, 1] = src, dst
