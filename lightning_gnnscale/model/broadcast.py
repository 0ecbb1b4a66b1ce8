"""A layer by broadcasting: its sources stream past once in the order of the file, and add to sums in memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..triton_kernels.aggregate import add_placed_edges
from .edge_bins import (
    BinnedEdges,
    BinSizes,
    BucketPlan,
    EdgeBins,
    StreamedLayer,
    edge_shares,
    mark_sources,
    number_sources,
)
from .layer_inputs import is_sparse
from .layer_source import RowBlock, Spool, join_blocks, split_block

CHUNK_BYTES = 4 << 20  # of values that the sources of a chunk give; it decides the order of sums, so memory does not
READ_BYTES = 960 << 10  # of values that are read and mapped at once: memory of 1 MiB would be new each time
STEPS_READ = 9  # that are read from the disk at once: a chunk of features of 8 bits
WINDOW_BYTES, MOST_WINDOW_BYTES = 1 << 19, 32 << 20  # of edges that are read at once, at least and at most
MOST_EDGES = 4 << 20  # that are read and sorted at once
AHEAD, MOST_AHEAD = 2, 8  # chunks that are read and mapped while one is added: one a thread
MAPPED_BESIDE = 1.3  # rows that are mapped for each one that is wanted, at most
# BLAS computes the rows of a product beyond a multiple of its own step by other code, with other roundings.
STEP_ROWS = 64


def bin_sizes(streamed: StreamedLayer, num_nodes: int, num_types: int) -> BinSizes:
    """Return the chunks of a layer's sources: a function of the model and the graph alone."""
    columns = max(streamed.channels, streamed.width if streamed.by_type else 1)
    shift = int(np.clip(int(CHUNK_BYTES // (4 * columns) or 1).bit_length() - 1, 0, 16))
    return BinSizes(shift, -(-num_nodes // (1 << shift)), num_types if streamed.by_type else 1)


# The passes of this process that have torch on one thread, and how many it had.
_one_thread = SimpleNamespace(passes=0, num_threads=1, lock=Lock())

# The sources of a chunk as they are added: for each part its edges, (chunk_nodes,) int32 positions of sources, and
# their (num, channels) values; then the rows that lie in the chunk themselves, and the (num_own, ...) values that are
# added to their sums, or kept beside them, or None.
_Loaded = tuple[list[tuple[Iterable[BinnedEdges], np.ndarray, Tensor]], slice | np.ndarray, Tensor | None]


@dataclass
class Broadcast:
    """One layer's pass over its sources, for each bucket of rows.

    Args:
        reader: the pass over all layers, which reads tables and features, and knows rows' scales.
        index: the layer.
        streamed: how it is made.
        sizes: chunks of its sources.
        plan: buckets of rows.
        memory_bytes: Bytes of everything.

    Cost: each source that a bucket needs is read once a bucket; each edge is read once, and those beyond memory are
        written and read once more. Sums are added in the order of the file, chunk after chunk, whatever memory is.
    Source: ATLAS (arXiv 2605.09402). Differs: a bounded number of rows have their sums in memory and the sources are
        read once more for each such bucket, where ATLAS writes messages; edges are grouped by source beforehand.
    """

    reader: Any
    index: int
    streamed: StreamedLayer
    sizes: BinSizes
    plan: BucketPlan
    memory_bytes: int
    spool: Spool | None = None
    _bins: EdgeBins | None = None
    _rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    _order: np.ndarray | None = None
    _factor: np.ndarray | None = None
    _weighted: bool = False
    _spare: list[Tensor] = field(default_factory=list)  # memory of chunks that have been added: new memory is zeroed
    _num_threads: int = 1
    _ahead: int = AHEAD

    def run(self, blocks: Iterator[RowBlock], spool: Spool | None) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Yield (nodes, outputs) of the rows of blocks; a bucket's edges lie in the spool, or with None in memory."""
        self.spool = spool
        shape = (self.plan.most_rows, self.streamed.channels)
        # Edges reach rows all over the sums. Numpy asks for large pages, torch does not: with small ones nearly each
        # row is a miss of the processor's table of pages too.
        sums = torch.from_numpy(np.empty(shape, self._numpy_dtype))
        kept = None
        if self.streamed.keeps_own:
            kept = torch.empty((self.plan.most_rows, self.streamed.width), dtype=self.reader.dtype)
        with _one_thread_of_torch() as self._num_threads:
            self._ahead = min(max(AHEAD, self._num_threads + 1), MOST_AHEAD)  # one of them waits for the disk
            yield from self._run(blocks, sums, kept)

    def _run(
        self, blocks: Iterator[RowBlock], sums: Tensor, kept: Tensor | None
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        with ThreadPoolExecutor(self._ahead, thread_name_prefix="gnnscale-layer") as pool:
            zeroed = pool.submit(sums.zero_)  # new memory takes seconds: while the first edges are sorted
            for rows, factor in self._buckets(blocks, pool):
                self._rows, self._factor = rows, factor
                self._order = None if bool((rows[1:] > rows[:-1]).all()) else np.argsort(rows, kind="stable")
                zeroed.result()
                self._stream(sums[: len(rows)], kept, pool)
                self._bins.clear()
                yield from self._finish(sums, kept, pool)
                zeroed = pool.submit(sums.zero_)

    def _buckets(
        self, blocks: Iterator[RowBlock], pool: ThreadPoolExecutor
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Bring the edges of one bucket after the other into bins; yield (rows, factors of their sums)."""
        rows: list[np.ndarray] = []
        factors: list[np.ndarray | None] = []
        count, most = 0, self.plan.most_rows
        for block in self._joined_blocks(blocks, pool):
            start = 0
            while start < len(block.rows):
                stop = min(len(block.rows), start + most - count)
                chosen = _rows_between(block, start, stop)
                rows.append(chosen.rows)
                factors.append(self._add(chosen, count, pool))
                count, start = count + len(chosen.rows), stop
                if count == most:
                    bucket = np.concatenate(rows), _joined(factors)
                    rows, factors, count = [], [], 0  # not held twice while sources stream past
                    yield bucket
        if count:
            yield np.concatenate(rows), _joined(factors)

    def _joined_blocks(self, blocks: Iterator[RowBlock], pool: ThreadPoolExecutor) -> Iterator[RowBlock]:
        """Yield blocks of about as many edges as may be sorted at once; the next is read meanwhile.

        A row of more edges comes alone, without a copy of them.
        """
        limit, large = max(1, min(self.memory_bytes // 256, MOST_EDGES)), []

        def read() -> RowBlock | None:
            found, count = [], 0
            while count < limit:
                block = large.pop() if large else next(chunks, None)
                if block is None:
                    break
                if found and len(block.indices) > limit:
                    large.append(block)
                    break
                found.append(block)
                count += len(block.indices) + len(block.rows)
            return join_blocks(found) if found[1:] else next(iter(found), None)

        chunks = (chunk for block in blocks for chunk in split_block(block, limit))
        coming = pool.submit(read)
        while (block := coming.result()) is not None:
            coming = pool.submit(read)
            yield block

    def _add(self, block: RowBlock, first_slot: int, pool: ThreadPoolExecutor) -> np.ndarray | None:
        """Put the edges of rows into bins and return the factors of the rows' sums; None: all are 1."""
        dtype = self._numpy_dtype
        self._weighted, weight = block.edge_weight is not None, None
        if self.streamed.by_type:
            weight = np.empty(len(block.indices), dtype)
            self.reader.backbone.check_edge_types(block.edge_type)
            types = np.zeros(len(block.indices), np.uint8) if block.edge_type is None else block.edge_type
            given = np.empty(0, np.float32) if block.edge_weight is None else block.edge_weight
            edge_shares(block.indptr, types, given, self.sizes.num_types, weight)
        if self._bins is None:
            weight_dtype = dtype if self._weighted or weight is not None else None
            window = max(WINDOW_BYTES, min(self.memory_bytes // 64, MOST_WINDOW_BYTES))
            self._bins = EdgeBins(self.sizes, weight_dtype, self.plan.keep_bytes, window, self.spool, pool.submit)
        self._bins.add(block, first_slot, weight, pool.map)
        if self.streamed.by_type:
            return None
        scale = self.reader.scale(block.rows, np.diff(block.indptr), self._weighted)
        return None if scale is None else scale.reshape(-1).numpy().astype(dtype, copy=False)

    def _stream(self, sums: Tensor, kept: Tensor | None, pool: ThreadPoolExecutor) -> None:
        """Read the sources of a bucket's edges, a chunk at a time, and add them to the sums."""
        order = self._order  # None: rows ascend
        starts = np.arange(self.sizes.num_chunks + 1) << self.sizes.shift
        places = np.searchsorted(self._rows, starts, sorter=order)
        has_edges = self._bins.counts.reshape(self.sizes.num_chunks, -1).sum(axis=1) > 0
        coming = deque()
        for chunk in np.flatnonzero(has_edges | (np.diff(places) > 0)).tolist():
            first = chunk * self.sizes.num_types
            edges = [self._bins.read(first + kind) for kind in range(self.sizes.num_types)]
            slots = slice(int(places[chunk]), int(places[chunk + 1]))
            slots = slots if order is None else order[slots]
            coming.append(pool.submit(self._load, int(starts[chunk]), edges, slots))
            if len(coming) > self._ahead:
                self._take(sums, kept, *coming.popleft().result())
        while coming:
            self._take(sums, kept, *coming.popleft().result())

    def _chunk_values(self) -> Tensor:
        with suppress(IndexError):
            return self._spare.pop()
        return torch.empty((1 << self.sizes.shift, self.streamed.channels), dtype=self.reader.dtype)

    def _take(self, sums: Tensor, kept: Tensor | None, parts: list, slots: slice | np.ndarray, own: Any) -> None:
        """Add a chunk to the sums: its edges, then what its rows add of themselves."""
        for pieces, position, values in parts:
            for edges in pieces:
                given = (edges.slots, edges.local, position, self._factor, edges.weight)
                add_placed_edges(sums, values, *given, num_threads=self._num_threads)
        if own is not None and kept is None:
            sums[slots] += own
        elif own is not None:
            kept[slots] = own
        if not self.streamed.by_type:
            self._spare += [values for _, _, values in parts]

    @torch.no_grad()
    def _load(self, first_node: int, edges: list[Iterable[BinnedEdges]], slots: slice | np.ndarray) -> _Loaded:
        """Read the sources of a chunk and map them; a thread of its own runs it."""
        own_local = self._rows[slots] - first_node
        position = np.full(1 << self.sizes.shift, -1, np.int32)
        for part in edges:
            _mark(part, position)
        if self._takes_own:
            position[own_local] = 0
        local = number_sources(position)
        if self.streamed.by_type:
            return self._load_by_type(first_node, local, edges, position, slots, own_local)
        values = self._chunk_values()
        own_width = self.streamed.width if self.streamed.keeps_own else self.streamed.channels
        own = torch.empty((len(own_local), own_width), dtype=self.reader.dtype) if self._takes_own else None
        step = _rows_of_bytes(READ_BYTES, self.streamed.width)
        for start in range(0, len(local), step):
            some = local[start : start + step]
            if start % (STEPS_READ * step) == 0:
                self.reader.expect(local[start : start + STEPS_READ * step] + first_node)
            chosen = slice(*np.searchsorted(own_local, [some[0], some[-1] + 1])) if self._takes_own else slice(0, 0)
            x = self.reader.read(some + first_node)
            self._map(x, some + first_node, values[start : start + len(some)])
            if own is not None and chosen.start < chosen.stop:
                places = torch.from_numpy(position[own_local[chosen]].astype(np.int64))
                self._own_values(x, places - start, own_local[chosen] + first_node, own[chosen])
        if self.reader.backbone.symmetric_sums:
            own = self._symmetric_own(values[torch.from_numpy(position[own_local].astype(np.int64))], slots)
        return [(edges[0], position, values)], slots, own

    @property
    def _numpy_dtype(self) -> np.dtype:
        return torch.empty(0, dtype=self.reader.dtype).numpy().dtype

    @property
    def _takes_own(self) -> bool:
        return self.streamed.adds_own or self.reader.backbone.symmetric_sums

    def _map(self, x: Any, nodes: np.ndarray, out: Tensor) -> None:
        """Fill (num, channels) with what sources give along their edges."""
        backbone, channels = self.reader.backbone, self.streamed.channels
        if self.streamed.form == "map":
            in_steps(lambda rows: backbone.map_sources(self.index, rows), x, out)
        else:
            out.copy_(torch.as_tensor(x)[:, :channels])
        if backbone.symmetric_sums:
            out *= self.reader.scale(nodes, None, self._weighted)

    def _own_values(self, x: Any, places: Tensor, nodes: np.ndarray, out: Tensor) -> None:
        """Fill (num_own, ...) with what some rows add to their own sums, or what is kept of them."""
        if self.reader.backbone.symmetric_sums:
            return
        if self.streamed.form == "map":
            self._map_own(x, places, nodes, out)
        elif self.streamed.form == "projected":
            out.copy_(torch.as_tensor(x)[places, self.streamed.channels :])
        else:
            out.copy_(torch.as_tensor(x)[places])

    def _map_own(self, x: Any, places: Tensor, nodes: np.ndarray, out: Tensor) -> None:
        """Fill (num_own, channels) with what the map of own rows gives for some rows, in ascending places."""

        def map_own(rows: Any) -> Tensor:
            return self.reader.backbone.map_own(self.index, rows)

        first, last = int(places[0]), int(places[-1]) + 1
        if is_sparse(x):
            in_steps(map_own, self.reader.read(nodes), out)
        elif last - first == len(places):
            in_steps(map_own, torch.as_tensor(x)[first:last], out)
        elif last - first < MAPPED_BESIDE * len(places):  # what is picked afterwards is narrower
            mapped = out.new_empty((last - first, out.shape[1]))
            in_steps(map_own, torch.as_tensor(x)[first:last], mapped)
            torch.index_select(mapped, 0, places - first, out=out)
        else:
            in_steps(map_own, torch.as_tensor(x)[places], out)

    def _symmetric_own(self, values: Tensor, slots: slice | np.ndarray) -> Tensor:
        """Return what rows' self-loops add to their sums: their scaled values, scaled as targets and weighted."""
        added = self.reader.self_weight(self._rows[slots])
        factor = torch.from_numpy(self._factor[slots]).unsqueeze(1)
        return values.mul_(factor if added is None else factor * added.unsqueeze(1))

    def _load_by_type(
        self,
        first_node: int,
        local: np.ndarray,
        edges: list[Iterable[BinnedEdges]],
        position: np.ndarray,
        slots: slice | np.ndarray,
        own_local: np.ndarray,
    ) -> _Loaded:
        """Read the sources of a chunk, and map those of each edge type by its map."""
        backbone, channels = self.reader.backbone, self.streamed.channels
        x = torch.as_tensor(self.reader.read(local + first_node))
        parts = []
        for kind, part in enumerate(edges):
            placed = np.full(len(position), -1, np.int32)
            _mark(part, placed)
            sources = number_sources(placed)
            if not len(sources):
                continue
            rows = x[torch.from_numpy(position[sources].astype(np.int64))]
            values = torch.empty((len(rows), channels), dtype=self.reader.dtype)
            in_steps(lambda some, kind=kind: backbone.map_sources(self.index, some, kind), rows, values)
            parts.append((part, placed, values))
        own = torch.empty((len(own_local), channels), dtype=self.reader.dtype)
        chosen = x[torch.from_numpy(position[own_local].astype(np.int64))]
        types = self.reader.node_types(own_local + first_node)
        in_steps(lambda some, of=None: backbone.map_own(self.index, some, of), chosen, own, types)
        return parts, slots, own

    def _finish(
        self, sums: Tensor, kept: Tensor | None, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Yield (nodes, outputs) of the bucket whose sums are complete; the next ones are computed meanwhile."""
        width = max(sums.shape[1], self.reader.backbone.layer_channels(self.index + 1))
        few, num_rows, coming = _rows_of_bytes(READ_BYTES, width), len(self._rows), deque()
        for start in range(0, num_rows, few):
            chunk = slice(start, min(start + few, num_rows))
            coming.append((self._rows[chunk], pool.submit(self._outputs, chunk, sums, kept)))
            if len(coming) > self._ahead:
                nodes, values = coming.popleft()
                yield nodes, values.result()
        while coming:
            nodes, values = coming.popleft()
            yield nodes, values.result()

    @torch.no_grad()
    def _outputs(self, chunk: slice, sums: Tensor, kept: Tensor | None) -> Tensor:
        """Return the outputs of some rows of the bucket; a thread of its own runs it."""
        backbone, total = self.reader.backbone, _padded(sums[chunk])
        if self.streamed.form == "rows":
            own = total[:, :0] if kept is None else _padded(kept[chunk])
            out = backbone.layer_from_sum(self.index, total, own, False)
        else:
            out = backbone.layer_from_total(self.index, total)
        return out[: chunk.stop - chunk.start]


@contextmanager
def _one_thread_of_torch() -> Iterator[int]:
    """Let torch compute on one thread, as chunks are mapped side by side; yield how many it had.

    Its threads wait for each other in each product, and spin meanwhile: beside other work a product on two threads
    takes up to ten times the processor seconds of one.
    """
    with _one_thread.lock:
        if not _one_thread.passes:
            _one_thread.num_threads = torch.get_num_threads()
        _one_thread.passes += 1
        torch.set_num_threads(1)
    try:
        yield _one_thread.num_threads
    finally:
        with _one_thread.lock:
            _one_thread.passes -= 1
            if not _one_thread.passes:
                torch.set_num_threads(_one_thread.num_threads)


def _mark(pieces: Iterable[BinnedEdges], position: np.ndarray) -> None:
    """Mark the sources of a bin's edges, see `mark_sources`."""
    for edges in pieces:
        mark_sources(edges.local, position)


def in_steps(function: Callable[..., Tensor], x: Any, out: Tensor, beside: Tensor | None = None) -> None:
    """Fill `out` with a map of rows; rows beyond the last whole step are computed in a step of their own.

    A row's result is then the same to the bit whatever rows come with it. (BLAS alone does not promise that.)

    Args:
        function: maps (num, width) rows, and with `beside` those entries of it too.
        x: (num, width), or sparse rows, which are mapped one by one anyway.
        out: (num, channels).
        beside: (num,) what belongs to rows, or None.
    """
    if is_sparse(x):
        out.copy_(function(x))
        return
    whole = len(x) // STEP_ROWS * STEP_ROWS
    for first, last in ((0, whole), (whole, len(x))):
        if first < last:
            given = () if beside is None else (_padded(beside[first:last]),)
            out[first:last] = function(_padded(torch.as_tensor(x[first:last])), *given)[: last - first]


def _padded(rows: Tensor) -> Tensor:
    """Return rows with rows of zeros behind them, up to a whole number of steps."""
    missing = -len(rows) % STEP_ROWS
    return rows if not missing else torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


def _rows_of_bytes(num_bytes: int, width: int) -> int:
    """Return how many rows of float32 take so many bytes, in whole steps."""
    return max(1, num_bytes // (4 * max(1, width)) // STEP_ROWS) * STEP_ROWS


def _rows_between(block: RowBlock, start: int, stop: int) -> RowBlock:
    """Return the rows [start, stop) of a block."""
    first, last = int(block.indptr[start]), int(block.indptr[stop])
    edges = [None if column is None else column[first:last] for column in block[2:]]
    return RowBlock(block.rows[start:stop], block.indptr[start : stop + 1] - first, *edges)


def _joined(factors: list[np.ndarray | None]) -> np.ndarray | None:
    return None if factors[0] is None else np.concatenate(factors)
