"""Which way a layer of exact evaluation is computed, by the bytes that each way reads."""

import math
from typing import NamedTuple

from .row_layers import StreamedLayer

FIXED_BYTES = 64 << 20  # of chunks of sources, and blocks of edges that are read and sorted, whatever memory is
GAP_BYTES = 64 << 10  # of the file between rows that are read together, as of `datamodule.layer_source`


class LayerSize(NamedTuple):
    """What a layer reads and computes on this process.

    Attributes:
        num_rows, num_edges: rows that are computed, and their edges.
        num_sources: nodes that have a row in what is read.
        source_bytes: bytes of such a row where it lies.
        num_groups: groups that the rows are computed in without broadcasting, each with its edges in memory.
        group_source_bytes: bytes of a source as groups read it.
        mapping_bytes: read and written before, so that groups find it so.
    """

    num_rows: int
    num_edges: int
    num_sources: int
    source_bytes: float
    num_groups: int
    group_source_bytes: float
    mapping_bytes: float


class BucketPlan(NamedTuple):
    """How the rows of a layer are divided so that their sums fit memory.

    Attributes:
        num_buckets: buckets of rows; the sources are read once for each.
        most_rows: rows of a bucket.
        keep_bytes: Bytes of a bucket's edges that stay in memory; the others lie in a file.
    """

    num_buckets: int
    most_rows: int
    keep_bytes: int


class LayerWay(NamedTuple):
    """The way of a layer, and what was predicted.

    Attributes:
        broadcasts: whether it is computed by broadcasting.
        buckets: how its rows are divided then.
        group_bytes, broadcast_bytes: predicted bytes read of sources, and of edges a second time, by each way.
    """

    broadcasts: bool
    buckets: BucketPlan
    group_bytes: float
    broadcast_bytes: float

    def line(self, layer: int, size: LayerSize) -> str:
        """Return one line that says how often a layer's inputs are read by broadcasting, and why it is chosen."""
        times, groups = self.buckets.num_buckets, size.num_groups
        return (
            f"layer {layer}: {size.num_rows:,} nodes of {size.num_edges:,} edges by broadcasting, its inputs read "
            f"{times:,} time{'s' * (times != 1)} (about {self.broadcast_bytes / 1e9:.3g} GB; in {groups:,} "
            f"group{'s' * (groups != 1)} of rows {self.group_bytes / 1e9:.3g} GB)"
        )


def row_bytes_of(streamed: StreamedLayer, itemsize: int) -> int:
    """Return the bytes of a row while sources stream past: its sums, its factor, itself where it is kept, its id."""
    return (streamed.row_channels + 1) * itemsize + 8


def plan_buckets(num_rows: int, num_edges: int, row_bytes: int, edge_bytes: int, memory_bytes: int) -> BucketPlan:
    """Divide rows into as few buckets as memory has space for.

    Of memory_bytes three sixteenths, or `FIXED_BYTES`, are left to chunks of sources and to edges being sorted, but at
    most three quarters. row_bytes, edge_bytes: of a row's sums, and of an edge.
    """
    space = max(1, memory_bytes // 4, min(memory_bytes * 13 // 16, memory_bytes - FIXED_BYTES))
    num_buckets = max(1, min(num_rows, -(-num_rows * row_bytes // space)))
    most_rows = max(1, -(-num_rows // num_buckets))
    return BucketPlan(num_buckets, most_rows, max(0, space - most_rows * row_bytes))


def choose_way(size: LayerSize, row_bytes: int, edge_bytes: int, memory_bytes: int) -> LayerWay:
    """Choose the way that reads fewer bytes; what fits memory at once stays with groups of rows.

    Args:
        row_bytes, edge_bytes: Bytes of a row while sources stream past, and of an edge, grouped by source.
        memory_bytes: what the pass may hold.
    """
    buckets = plan_buckets(size.num_rows, size.num_edges, row_bytes, edge_bytes, memory_bytes)
    spooled = max(0, size.num_edges * edge_bytes - buckets.num_buckets * buckets.keep_bytes)
    by_groups = bytes_read(size, size.group_source_bytes, size.num_groups) + size.mapping_bytes
    by_groups += size.num_rows * size.group_source_bytes  # the rows themselves
    by_buckets = bytes_read(size, size.source_bytes, buckets.num_buckets) + spooled
    broadcasts = size.num_groups > 1 and by_buckets < by_groups
    return LayerWay(broadcasts, buckets, by_groups, by_buckets)


def bytes_read(size: LayerSize, row_bytes: float, num_groups: int) -> float:
    """Return the bytes of sources that so many groups of rows read, where edges come from anywhere.

    Where sources lie near each other, what lies between them is read too: up to `GAP_BYTES` a source.
    """
    if not size.num_sources:
        return 0.0
    found = size.num_sources * -math.expm1(-size.num_edges / num_groups / size.num_sources)
    return num_groups * min(size.num_sources * row_bytes, found * (row_bytes + GAP_BYTES))
