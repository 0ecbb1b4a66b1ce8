"""How a layer of exact evaluation is divided so that it fits memory: rows into buckets, edges into bins by source."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np

from ..jit import kernel
from ..memory import FIXED_BYTES, sums_bytes
from .layer_source import RowBlock, Spool

MOST_BINS = 1 << 18  # their starts are held for each sorted block
BLOCK_ROWS = 1 << 16  # of a sorted block: targets are told apart by 16 bits


class BinSizes(NamedTuple):
    """How edges are assigned to bins: chunk of consecutive sources, then edge type.

    Attributes:
        shift: a chunk holds 2 ** shift nodes.
        num_chunks: chunks of the graph.
        num_types: edge types, 1 where they are not told apart.
    """

    shift: int
    num_chunks: int
    num_types: int = 1

    @property
    def num_bins(self) -> int:
        return self.num_chunks * self.num_types


class BinnedEdges(NamedTuple):
    """The edges of a bin, by target, in the order of the graph.

    Attributes:
        slots: (num_edges,) int32, targets.
        local: (num_edges,) uint16 or uint32, sources from the chunk's first on.
        weight: (num_edges,) or None.
    """

    slots: np.ndarray
    local: np.ndarray
    weight: np.ndarray | None


class _Window(NamedTuple):
    """Consecutive bins [first, last) in memory.

    Attributes:
        places: (num_blocks, last - first + 1) int64, where the bins of each block begin in the columns.
        columns: Columns of the edges, block after block.
    """

    first: int
    last: int
    places: np.ndarray
    columns: list[np.ndarray]


_NO_WINDOW = _Window(0, 0, np.zeros((0, 1), np.int64), [])


class EdgeBins:
    """Edges by bin, kept as blocks that are sorted one by one; a bin is read as its share of each block.

    Args:
        sizes: the bins.
        weight_dtype: dtype of the edges' weights; None: they have none.
        keep_bytes: Bytes of edges, and of where bins begin, that stay in memory; blocks beyond go to the spool.
        window_bytes: Bytes of edges that are read from the spool at once, and that are held of a bin. Two such windows
            are in memory.
        spool: None: all edges stay in memory.
        submit: Runs a function beside and returns its future, as an executor does: the next window is read so. None:
            windows are read when they are needed.

    Cost: an edge takes 4 bytes (6 with chunks of more than 65,536 nodes), and its weight; 4 bytes a bin a block. A bin
        of more than window_bytes, of hubs or of many edges a node, is read twice.
    """

    def __init__(
        self,
        sizes: BinSizes,
        weight_dtype: np.dtype | None,
        keep_bytes: int,
        window_bytes: int,
        spool: Spool | None,
        submit: Callable[..., Future] | None = None,
    ):
        self.sizes, self.weight_dtype, self.spool, self.submit = sizes, weight_dtype, spool, submit
        self.keep_bytes, self.window_bytes = keep_bytes, window_bytes
        self.dtypes = [np.dtype(np.uint16), np.dtype(np.uint16 if sizes.shift <= 16 else np.uint32)]
        self.dtypes += [] if weight_dtype is None else [np.dtype(weight_dtype)]
        self.counts = np.zeros(sizes.num_bins, np.int64)
        self._first_slots: list[int] = []  # of each block: its targets are numbered from there
        self._starts: list[np.ndarray | int] = []  # of the bins of each block, likewise in memory or in the spool
        self._blocks: list[list[np.ndarray | int]] = []  # columns in memory, or where they begin in the spool
        self._kept_bytes = 0
        self._window, self._coming = _NO_WINDOW, None

    @property
    def edge_bytes(self) -> int:
        """Bytes that an edge takes."""
        return sum(dtype.itemsize for dtype in self.dtypes)

    def add(self, block: RowBlock, first_slot: int, weight: np.ndarray | None = None, side_by_side=map) -> None:
        """Add the edges of rows that follow those added before, from `first_slot` on; weight replaces the block's.

        They are sorted some at a time, those of one row too: a row of very many takes no more memory than others.
        side_by_side: applies a function to several such pieces at once, and gives the results in their order.
        """
        block = block if weight is None else block._replace(edge_weight=weight)
        pieces = list(self._pieces_of(block))
        slots = [first_slot + begin for begin, _ in pieces]
        sort = partial(_sorted_edges, sizes=self.sizes, dtypes=self.dtypes)
        for slot, (starts, *columns) in zip(slots, side_by_side(sort, (piece for _, piece in pieces)), strict=True):
            self._add(slot, starts, columns)

    def _pieces_of(self, block: RowBlock) -> Iterator[tuple[int, RowBlock]]:
        """Yield the edges of rows as blocks that are sorted at once, each with the number of its first row."""
        most, first = max(1, 4 * self.window_bytes // self.edge_bytes), 0
        while first < len(block.indices):
            begin = int(np.searchsorted(block.indptr, first, side="right")) - 1
            behind = int(block.indptr[min(begin + BLOCK_ROWS, len(block.rows))])
            last = min(first + most, behind)
            end = int(np.searchsorted(block.indptr, last, side="left"))
            indptr = np.clip(block.indptr[begin : end + 1], first, last) - first
            edges = [None if column is None else column[first:last] for column in block[2:]]
            yield begin, RowBlock(block.rows[begin:end], indptr, *edges)
            first = last

    def _add(self, first_slot: int, starts: np.ndarray, columns: list[np.ndarray]) -> None:
        self.counts += np.diff(starts)
        num_bytes = self.edge_bytes * len(columns[0]) + starts.nbytes
        if self.spool is not None and self._kept_bytes + num_bytes > self.keep_bytes:
            starts, *columns = (self.spool.append(column) for column in (starts, *columns))
        else:
            self._kept_bytes += num_bytes
        self._first_slots.append(first_slot)
        self._starts.append(starts)
        self._blocks.append(columns)

    def read(self, number: int) -> Iterable[BinnedEdges]:
        """Return the edges of a bin, in one piece or more, which may be gone through again; bins are read ascending."""
        if self.counts[number] * self.edge_bytes > self.window_bytes:
            return _LargeBin(self, number)
        return [self._read(number)]

    def pieces(self, number: int) -> Iterator[BinnedEdges]:
        """Yield the edges of a bin, as many at a time as a window holds; any thread may read any bin."""
        most = max(1, self.window_bytes // self.edge_bytes)
        for block, columns in enumerate(self._blocks):
            begin, end = self._bounds(block, number, number + 1).tolist()
            for first in range(begin, end, most):
                last = min(first + most, end)
                held = [self._column(*one, first, last) for one in zip(columns, self.dtypes, strict=True)]
                slots = held[0].astype(np.int32)
                slots += self._first_slots[block]
                yield BinnedEdges(slots, held[1], held[2] if len(held) > 2 else None)

    def _read(self, number: int) -> BinnedEdges:
        if not self._window.first <= number < self._window.last:
            self._next_window(number)
        window, count = self._window, int(self.counts[number])
        out = [np.empty(count, dtype) for dtype in (np.dtype(np.int32), *self.dtypes[1:])]
        none = [] if len(window.columns) > 2 else [np.empty(0, np.float32)]  # no weights
        firsts = np.array(self._first_slots, np.int64)
        _join_bin(window.places, number - window.first, firsts, *window.columns, *none, *out, *none)
        return BinnedEdges(out[0], out[1], out[2] if out[2:] else None)

    def _next_window(self, number: int) -> None:
        """Go on to the window that begins with a bin, and have the one behind it loaded where this one was."""
        spare, coming = self._window.columns, self._coming
        window = _NO_WINDOW if coming is None else coming.result()
        if not window.first <= number < window.last:
            window, spare = self._load(number, spare), window.columns
        self._window, self._coming = window, None
        sizes = self.counts[window.last :] * self.edge_bytes
        others = np.flatnonzero((sizes > 0) & (sizes <= self.window_bytes))
        if self.submit is not None and len(others):
            self._coming = self.submit(self._load, window.last + int(others[0]), spare)

    def _load(self, first: int, spare: list[np.ndarray]) -> "_Window":
        """Bring the bins from `first` on into memory, as many as a window holds; into that of another where it fits."""
        behind = np.cumsum(self.counts[first:]) * self.edge_bytes
        most = self.window_bytes // (8 * max(1, len(self._blocks)))  # where a bin begins in each block counts too
        last = first + max(1, min(most, int(np.searchsorted(behind, self.window_bytes, side="right"))))
        num_edges, place = int(self.counts[first:last].sum()), 0
        fits = bool(spare) and len(spare[0]) >= num_edges
        held = spare if fits else [np.empty(num_edges, dtype) for dtype in self.dtypes]
        places = np.empty((len(self._blocks), last - first + 1), np.int64)
        for block, columns in enumerate(self._blocks):
            starts = self._bounds(block, first, last)
            begin, end = int(starts[0]), int(starts[-1])
            for column, values in zip(columns, held, strict=True):
                self._fill(column, begin, values[place : place + end - begin])
            places[block] = starts
            places[block] += place - begin
            place += end - begin
        return _Window(first, last, places, held)

    def _bounds(self, block: int, first: int, last: int) -> np.ndarray:
        """Return where bins [first, last) of a block begin, and where the last one ends."""
        return self._column(self._starts[block], np.dtype(np.int32), first, last + 1)

    def _column(self, column: np.ndarray | int, dtype: np.dtype, begin: int, end: int) -> np.ndarray:
        """Return entries of a column, which lies in memory or begins at a byte of the spool."""
        if isinstance(column, np.ndarray):
            return column[begin:end]
        found = np.empty(end - begin, dtype)
        self._fill(column, begin, found)
        return found

    def _fill(self, column: np.ndarray | int, begin: int, out: np.ndarray) -> None:
        """Fill an array with the entries of a column from `begin` on."""
        if isinstance(column, np.ndarray):
            out[:] = column[begin : begin + len(out)]
        elif len(out):
            self.spool.read(column + begin * out.itemsize, out)

    def clear(self) -> None:
        """Forget all edges."""
        self.counts[:] = 0
        self._first_slots, self._starts, self._blocks = [], [], []
        self._window, self._coming, self._kept_bytes = _NO_WINDOW, None, 0
        if self.spool is not None:
            self.spool.clear()


class _LargeBin:
    """The edges of a bin that is more than a window, read again each time that they are gone through."""

    def __init__(self, bins: EdgeBins, number: int):
        self._bins, self._number = bins, number

    def __iter__(self) -> Iterator[BinnedEdges]:
        return self._bins.pieces(self._number)


def _sorted_edges(block: RowBlock, sizes: BinSizes, dtypes: Sequence[np.dtype]) -> list[np.ndarray]:
    """Return (num_bins + 1,) int32 starts of the bins, then the columns of a block's edges by bin."""
    weight = block.edge_weight if len(dtypes) > 2 else None
    indices = np.ascontiguousarray(block.indices)
    types = np.empty(0, np.uint8) if sizes.num_types == 1 else np.ascontiguousarray(block.edge_type)
    starts = _count_bins(indices, types, sizes.shift, sizes.num_types, sizes.num_bins)
    columns = [np.empty(len(indices), dtype) for dtype in dtypes]
    given = np.empty(0, np.float32) if weight is None else np.ascontiguousarray(weight, dtypes[2])
    sorted_weight = columns[2] if weight is not None else given
    indptr = np.ascontiguousarray(block.indptr, np.int64)
    _place_edges(
        indptr, indices, types, given, sizes.shift, sizes.num_types, starts[:-1].copy(),
        columns[0], columns[1], sorted_weight,
    )  # fmt: skip
    return [starts, *columns]


@kernel
def _count_bins(indices, types, shift, num_types, num_bins):
    starts = np.zeros(num_bins + 1, np.int32)
    for e in range(len(indices)):
        bin_number = (indices[e] >> shift) * num_types
        if num_types > 1:
            bin_number += types[e]
        starts[bin_number + 1] += 1
    for b in range(num_bins):
        starts[b + 1] += starts[b]
    return starts


@kernel
def _place_edges(indptr, indices, types, weight, shift, num_types, cursor, slots, local, sorted_weight):
    mask = (1 << shift) - 1
    for v in range(len(indptr) - 1):
        for e in range(indptr[v], indptr[v + 1]):
            bin_number = (indices[e] >> shift) * num_types
            if num_types > 1:
                bin_number += types[e]
            place = cursor[bin_number]
            cursor[bin_number] = place + 1
            slots[place] = v
            local[place] = indices[e] & mask
            if len(weight):
                sorted_weight[place] = weight[e]


@kernel
def _join_bin(places, number, first_slots, slots, local, weight, out_slots, out_local, out_weight):
    """Write the edges of a bin of the window, block after block, with their targets in the bucket."""
    count = 0
    for block in range(len(first_slots)):
        for e in range(places[block, number], places[block, number + 1]):
            out_slots[count] = first_slots[block] + slots[e]
            out_local[count] = local[e]
            if len(weight):
                out_weight[count] = weight[e]
            count += 1


@kernel
def mark_sources(local, position):
    """Set (chunk_nodes,) int32 positions to 0 where sources are; -1 elsewhere."""
    for e in range(len(local)):
        position[local[e]] = 0


@kernel
def number_sources(position):
    """Number the marked nodes of a chunk in ascending order, in place, and return them, (num,) int64."""
    count = 0
    for i in range(len(position)):
        if position[i] >= 0:
            position[i] = count
            count += 1
    out = np.empty(count, np.int64)
    for i in range(len(position)):
        if position[i] >= 0:
            out[position[i]] = i
    return out


@kernel
def edge_shares(indptr, types, weight, num_types, out):
    """Write each edge's share of the weights (or of the number) of its row's edges of its type."""
    totals = np.zeros(num_types, np.float64)
    for v in range(len(indptr) - 1):
        for e in range(indptr[v], indptr[v + 1]):
            totals[types[e]] += weight[e] if len(weight) else 1.0
        for e in range(indptr[v], indptr[v + 1]):
            total = totals[types[e]]
            out[e] = (weight[e] if len(weight) else 1.0) / (total if total > 0 else 1.0)
        for e in range(indptr[v], indptr[v + 1]):
            totals[types[e]] = 0.0


GAP_BYTES = 64 << 10  # of the file between rows that are read together, as of `datamodule.layer_source`


class StreamedLayer(NamedTuple):
    """How a layer is made from sources that stream past, chunk by chunk, while sums of its rows lie in memory.

    Attributes:
        channels: columns of a sum.
        width: columns of what is read of a source.
        form: "map": sources are mapped as they are read, by `Backbone.map_sources`; "projected": what is read has been
            mapped, by `Backbone.project`; "rows": the sums are mapped, once they are complete.
        adds_own: whether the outputs depend on the rows themselves, beside their sums.
        by_type: whether each edge type has a map of its own; the sum is then one of means, a mean an edge type.
    """

    channels: int
    width: int
    form: str
    adds_own: bool
    by_type: bool = False

    @property
    def keeps_own(self) -> bool:
        """Whether the rows themselves are kept beside their sums; else what they add is added to the sums."""
        return self.form == "rows" and self.adds_own

    @property
    def row_channels(self) -> int:
        """Values that a row takes while sources stream past."""
        return self.channels + self.width * self.keeps_own


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

    row_bytes, edge_bytes: bytes of a row's sums, and of an edge; memory_bytes: see `sums_bytes`.
    """
    space = sums_bytes(memory_bytes, FIXED_BYTES)
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
