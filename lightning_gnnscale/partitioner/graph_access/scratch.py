"""Scratch disk: which folder, whether it has space, files that vanish with the process, and edges in a fixed order
on it.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ... import events
from ...errors import GNNScaleError, disk_errors
from ...graph import id_dtype
from ...jit import kernel
from ...rng import below, combine, fold
from ...scratch import MAKE_SPACE, EdgeFile, nameless_file
from ...system import preallocate
from .. import phases

AUTO = "auto"


def scratch_folder(scratch: str | os.PathLike | None) -> Path | None:
    """Return the folder for scratch files; "auto": the system's for temporary files; None: there is to be none.

    Raises:
        GNNScaleError: the folder does not exist or cannot be written to.
    """
    if scratch is None:
        return None
    folder = Path(tempfile.gettempdir() if scratch == AUTO else scratch)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise GNNScaleError(f"scratch must be a folder that can be written to, got {folder}: make it, or give another")
    return folder


def reserve(folder: Path, needed: int, what: str) -> None:
    """Report how many bytes of scratch disk `what` will take, and check that they are free before anything is written.

    Raises:
        GNNScaleError: too little free space; the message says how much is missing, and where.
    """
    free = shutil.disk_usage(folder).free
    phases.note(scratch_bytes=needed)
    events.record("scratch", what=what, folder=str(folder), bytes=needed, free_bytes=free)
    if needed > free:
        raise GNNScaleError(
            f"{what} needs {needed} bytes of scratch disk, but {folder} has {free} free, {needed - free} too few: "
            "give scratch=<another folder>"
        )


def nameless_map(folder: Path, shape: tuple[int, ...], dtype) -> np.memmap:
    """Return an array of zeros on scratch disk that is freed with its last user."""
    file, num_bytes = nameless_file(folder), max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize)
    with disk_errors(folder, f"given {num_bytes} bytes of scratch files", MAKE_SPACE):
        file.truncate(num_bytes)
        preallocate(file.fileno(), num_bytes)
    return np.memmap(file, dtype, "r+", shape=shape)


BUCKET_EDGES = 1 << 20  # what is permuted in memory at a time, up to MAX_BUCKETS of them
MAX_BUCKETS = 1024
STEP_EDGES = 1 << 18  # edges sorted by bucket before they are written

_BUCKET_SALT, _PERMUTE_SALT = 0x4255434B, 0x5045524D


def shuffle_edges(graph, folder: Path, seed: int, progress=None) -> EdgeFile:
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


def copy_edges(graph, folder: Path, progress=None) -> EdgeFile:
    """Write the simple edges to scratch disk in the order of the stream; see `shuffle_edges`."""
    edges = EdgeFile(folder, id_dtype(graph.num_nodes))
    step = np.empty((STEP_EDGES, 2), edges.dtype)
    for filled in _steps(graph, step, "copy edges", progress):
        edges.append(step[:filled])
    return edges


def _steps(graph, step: np.ndarray, what: str, progress) -> Iterator[int]:
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
