"""Which edges of a stream are the first copy of their pair: duplicates dropped with scratch disk, order kept."""

import os
from pathlib import Path

import numpy as np

from ...graph import id_dtype
from ...jit import kernel
from ...rng import mix64
from .layout import LayoutReport
from .scratch import nameless_file, nameless_map, read_at, reserve, write_at

BUCKET_BYTES = 1 << 25  # records of one bucket: what is held in memory at a time
MAX_BUCKETS = 256  # open files

_LOW_FACTOR, _HIGH_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_HALF = np.uint64(32)


def scratch_bytes_needed(num_listed: int, num_nodes: int) -> int:
    """Return the scratch disk, in bytes, that dropping the repeats of `num_listed` edges takes."""
    return num_listed * (8 + 2 * id_dtype(num_nodes).itemsize) + (num_listed + 7) // 8


def find_first_copies(stream, report: LayoutReport, folder: Path, degree: np.ndarray, progress=None):
    """Mark the first copy of every pair, in the order of the stream.

    Pairs are spread by hash over bucket files, each small enough for a hash table in memory. The files have no
    name: the system frees them when the process ends, however it ends.

    Args:
        stream: an EdgeStream of `report.num_listed` edges.
        report: what the first pass found; with layout "both_ways" only copies with src < dst are considered.
        folder: where the scratch files lie.
        degree: (num_nodes,), the edges of each node that are kept; added to in place.

    Returns:
        (ceil(num_listed / 8),) uint8 bits by position in the source, memory-mapped from scratch disk.

    Raises:
        GNNScaleError: too little free space in `folder`.

    Cost: one pass; 16 bytes an edge written and read once (24 with int64 ids); about 1.5 BUCKET_BYTES of memory.
    Source: ours; takes the place of an external sort by (min, max) followed by one back to the stream's order.
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
def _pair_hash(low, high):
    return mix64(np.uint64(low) * _LOW_FACTOR + np.uint64(high) * _HIGH_FACTOR)


@kernel
def _sort_into_buckets(src, dst, first_edge, ascending_only, records, offsets):
    """Order one step's edges by the bucket of their pair; bucket b is records[offsets[b]:offsets[b + 1]]."""
    num_buckets = np.uint64(len(offsets) - 1)
    offsets[:] = 0
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u < v or (u > v and not ascending_only):
            b = ((_pair_hash(min(u, v), max(u, v)) >> _HALF) * num_buckets) >> _HALF
            offsets[np.int64(b) + 1] += 1
    for b in range(len(offsets) - 1):
        offsets[b + 1] += offsets[b]
    cursor = offsets.copy()
    low, high, position = records["low"], records["high"], records["position"]
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u < v or (u > v and not ascending_only):
            b = np.int64(((_pair_hash(min(u, v), max(u, v)) >> _HALF) * num_buckets) >> _HALF)
            low[cursor[b]], high[cursor[b]], position[cursor[b]] = min(u, v), max(u, v), first_edge + i
            cursor[b] += 1


@kernel
def _mark_first(low, high, position, table, bits, degree):
    """Set the bit of the first record of every pair; the table holds record numbers, 0 is empty."""
    slots = np.uint64(len(table) - 1)
    for i in range(len(low)):
        slot = _pair_hash(low[i], high[i]) & slots
        while table[slot] and (low[table[slot] - 1] != low[i] or high[table[slot] - 1] != high[i]):
            slot = (slot + np.uint64(1)) & slots
        if table[slot] == 0:
            table[slot] = i + 1
            bits[position[i] >> 3] |= np.uint8(1 << (position[i] & 7))
            degree[low[i]] += 1
            degree[high[i]] += 1
