"""Exact layer-wise inference: a layer for all nodes that the next one needs, then the next, in bounded memory."""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..across_ranks import rank
from ..errors import StrategyError, short
from ..events import record
from ..jit import kernel
from ..memory import free_memory_bytes, keep_freed_memory, parse_bytes, pass_bytes, return_freed_memory, trim_heap
from ..triton_kernels.aggregate import add_edges
from .backbone import Backbone
from .block import Block
from .broadcast import Broadcast, bin_sizes
from .edge_bins import MOST_BINS, BinSizes, LayerSize, LayerWay, StreamedLayer, choose_way, row_bytes_of
from .layer_inputs import check_times, is_sparse
from .layer_source import LayerSource, LayerTables, NodeSet, RowBlock, join_blocks, split_block

MOST_BYTES, LEAST_BYTES = 512 << 20, 32 << 20  # what a pass holds, where it may choose
KEEPING_BYTES = 2 << 30  # of a pass that keeps what is freed: a block of edges and its columns are a small share
CHUNK_BYTES = 4 << 20  # of rows that are read, mapped or written at once
TABLE_DTYPES = {"float32": np.float32, "bfloat16": np.int16}  # numpy has no bfloat16: its bits are stored
_log = logging.getLogger("lightning.pytorch.evaluation")


class LayerwiseOutput(NamedTuple):
    """The model's outputs.

    Attributes:
        rows: (num_rows,) int64 store ids of this rank's nodes.
        table: (num_nodes, out_channels) float32, of a model in float64 float64, or a row for each held node. It is
            shared by the ranks, complete on return, and valid until the next pass over that source begins. None: the
            outputs are the source's features.
        held: nodes that have a row, in ascending order; None: all of them.
        source: the source of the pass; None: the table is a plain array.
    """

    rows: np.ndarray
    table: np.ndarray | None
    held: NodeSet | None = None
    source: LayerSource | None = None

    def read(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (..., out_channels) outputs of some nodes that are held; they are read in ascending order."""
        found, places = np.unique(np.asarray(nodes), return_inverse=True)
        rows = _rows_of(found, self.held)
        values = self.table[rows] if self.source is None else self.source.gather(rows, self.table)
        values = values.dense() if is_sparse(values) else values
        return np.asarray(values)[places.reshape(np.shape(nodes))]

    def chunks(self, chunk_rows: int = 1 << 18) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (nodes, outputs) of this rank's rows, a bounded chunk at a time."""
        for start in range(0, len(self.rows), chunk_rows):
            nodes = self.rows[start : start + chunk_rows]
            yield nodes, self.read(nodes) if self.table is None else np.asarray(self.table[_rows_of(nodes, self.held)])


@torch.no_grad()
def layerwise_inference(
    backbone: Backbone,
    source: LayerSource,
    block_edges: int | None = None,
    device: torch.device | str | None = None,
    needed: Sequence[NodeSet | None] | None = None,
    table_dtype: str = "float32",
    memory_bytes: int | str | None = None,
    num_local: int = 1,
    broadcast: bool | None = None,
    layers: LayerTables | None = None,
) -> LayerwiseOutput:
    """Compute a model's outputs for this rank's nodes from complete neighbourhoods, layer by layer.

    Equals the full-graph forward in eval mode, to the rounding of float32, or of float64 where the model is in that.
    Where a layer's linear map makes rows narrower (or its input is sparse), each node is mapped once into a separate
    table, which the edges read.

    A layer that is one sum over edges (GCN, GraphSAGE, NGNN, SGC) is computed by streaming its sources: memory holds
    the sums of as many rows as fit, and every source that one of them reads is read once, in the order of the
    file. A thread reads ahead. Where the edges of all rows do not fit beside the sums, they are grouped by source
    first, in a file, and sources are mapped as they are read (`Broadcast`; R-GCN too): more rows have their sums in
    memory, so that the sources are read fewer times. Of other layers (GAT) a block gathers the rows that it reads.

    Args:
        backbone: its layers; put into eval mode meanwhile.
        source: the graph, and the tables that ranks share.
        block_edges: edges of the rows computed at once (one row is never split); None: as memory allows.
        device: where linear maps, and layers that are no sums, are computed; None: where the parameters are.
        needed: which rows each layer must have, see `closure`; None: all rows.
        table_dtype: "float32", or "bfloat16", which halves the tables of hidden layers and rounds them to 8 bits. With
            "float32" those of a model in float64 are float64.
        memory_bytes: what the pass may hold, bytes or a text such as "2GiB"; None: `pass_bytes` of what is free, 32 to
            512 MiB; where memory does not hold the inputs of all nodes, and each group of sums reads them from the
            disk, without the upper limit.
        num_local: processes of this host that share what is free.
        broadcast: whether edges are grouped by source; None: where fewer bytes are read so. A layer whose rows and
            edges fit memory at once is computed without, unless this is True; so are all layers with block_edges.
        layers: Takes the outputs of hidden layers, to be kept, and has those of before; None: nothing is kept. Where it
            has such outputs a layer computes the rows that `needed` names, and reads all others from there.

    Returns:
        This rank's rows, and the table of outputs.

    Raises:
        ValueError: block_edges below 1, an unknown table_dtype, or a backbone that reads times.
        StrategyError: edge types that the backbone does not read.

    Cost: memory_bytes, 4 bytes a node, and the tables (num_nodes x width, on the disk of the source): two at a time,
    each as wide as a layer or as the linear map in it, and with `broadcast` 4 bytes an edge of a bucket. Time: each
    edge is read once a layer, and the layer's input once for each memory_bytes / 2 of sums.
    Source: the inference of Hamilton et al.'s GraphSAGE and of OGB's baselines; streamed sources: ATLAS (arXiv
    2605.09402). Differs: sums of a bounded number of rows replace messages on disk.
    """
    if block_edges is not None and block_edges < 1:
        raise ValueError(f"block_edges must be at least 1, got {block_edges}")
    if table_dtype not in TABLE_DTYPES:
        raise ValueError(f"table_dtype must be one of {', '.join(TABLE_DTYPES)}, got {short(table_dtype)}")
    check_times(type(backbone).__name__, backbone.time_channels)
    memory_bytes = parse_bytes(memory_bytes, "memory_bytes")
    if memory_bytes is None:
        free = free_memory_bytes()
        fits = 4 * source.num_nodes * backbone.layer_channels(0) <= free
        memory_bytes = min(MOST_BYTES if fits else free, max(LEAST_BYTES, pass_bytes(free) // num_local))
    reference, was_training = backbone.reference, backbone.training
    target = torch.device(device) if device is not None else reference.device
    backbone.eval().to(target)
    try:
        needed = [None] * (backbone.num_layers + 1) if needed is None else needed
        options = (needed, TABLE_DTYPES[table_dtype], memory_bytes, broadcast, layers)
        computed = _Pass(backbone, source, block_edges, target, *options)
        with closing(computed):
            return computed.run()
    finally:
        backbone.train(was_training).to(reference.device)


class _Pass:
    """One pass over the layers; holds the scratch array that numbers the sources of some rows."""

    def __init__(self, backbone, source, block_edges, device, needed, table_dtype, memory_bytes, broadcast, layers):
        self.backbone, self.source, self.block_edges, self.device = backbone, source, block_edges, device
        self.needed, self.memory_bytes = needed, memory_bytes
        self.broadcast, self.spool = broadcast, None
        self.local_nid = np.zeros(source.num_nodes, np.int32)  # 0 = not seen among these rows, else local id + 1
        self.dtype = torch.float64 if backbone.dtype == torch.float64 else torch.float32  # of sums
        # A model in float64 loses nothing between layers: tables are as its values.
        self.last_dtype = np.float64 if self.dtype == torch.float64 else np.float32
        self.table_dtype = self.last_dtype if table_dtype == np.float32 else table_dtype
        # Reused buffers: allocating them for each chunk would leave holes in the heap.
        self.sums = self.streamed = torch.empty(0, dtype=self.dtype)
        self.table: np.ndarray | None = None  # the layer's input; None: the features
        self.held: NodeSet | None = None  # nodes that have a row in it
        self.index, self.layers = 0, layers  # of the layer that is computed; what outlasts the pass
        self.has_earlier = layers is not None and layers.has_earlier
        self.tables_made = 0

    def close(self) -> None:
        if self.spool is not None:
            self.spool.close()
            return_freed_memory()
            trim_heap()

    def run(self) -> LayerwiseOutput:
        backbone, source, rows = self.backbone, self.source, []
        sparse = is_sparse(source.gather(np.zeros(min(1, source.num_nodes), np.int64)))
        streamed = self._streamed(0, False, sparse) if backbone.num_layers else None  # features as they are
        projected = streamed is None and self._project_features(sparse)
        for index in range(backbone.num_layers):
            streamed = streamed or self._streamed(index, projected, sparse and index == 0)
            targets, last = self.needed[index + 1], index == backbone.num_layers - 1
            # Each row that the next layer maps is mapped while it is here.
            following = None if last else backbone.projected_channels(index + 1, False)
            width = backbone.layer_channels(index + 1) if last else table_width(backbone, index + 1)
            table = self._new_table(width, targets, self.last_dtype if last else self.table_dtype)
            for nodes, values in self._layer(index, projected, targets, sparse and index == 0, streamed):
                self._write(table, targets, nodes, backbone.project(index + 1, values) if following else values)
                if last:
                    rows.append(nodes)
            source.barrier()
            self.table, self.held, projected, streamed = table, targets, bool(following), None
            self.index = index + 1
            if self.layers is not None and not last:
                self.layers.keep(index + 1, width, table.dtype, lambda nodes: self._stored(nodes).numpy())
        return LayerwiseOutput(np.concatenate([np.zeros(0, np.int64), *rows]), self.table, self.held, source)

    def _project_features(self, sparse: bool) -> bool:
        """Map the features of each node that is needed into a table, where that pays, and return whether it did."""
        backbone, inputs = self.backbone, self.needed[0]
        channels = backbone.projected_channels(0, sparse)
        if channels is None:
            return False
        table = self._new_table(channels, inputs, self.table_dtype)
        width = channels + (0 if sparse else backbone.layer_channels(0))
        limit = max(1, self.memory_bytes // (8 * width))
        for block in self.source.blocks():
            rows = np.asarray(block.rows, np.int64)
            rows = rows if inputs is None else rows[inputs.contains(rows)]
            for start in range(0, len(rows), limit):
                nodes = rows[start : start + limit]
                x = self.read(nodes)
                by_type = (self.node_types(nodes),) if backbone.reads_edge_types else ()
                self._write(table, inputs, nodes, backbone.project(0, x, *by_type))
        self.source.barrier()
        self.table, self.held = table, inputs
        return True

    def _streamed(self, index: int, projected: bool, sparse: bool) -> Broadcast | None:
        """Return the pass that computes a layer by broadcasting, the same on every rank; None: not so."""
        backbone = self.backbone
        streamed = backbone.streamed_layer(index, projected, sparse)
        if streamed is None or self.broadcast is False or (self.block_edges and not self.broadcast):
            return None
        sizes = bin_sizes(streamed, self.source.num_nodes, backbone.num_edge_types)
        if sizes.num_bins > MOST_BINS:
            return None
        way, size = self._way(index, projected, sparse, streamed, sizes)
        wanted = np.array([way.broadcasts or bool(self.broadcast)], np.uint8)
        self.source.union(wanted)  # a table more or less is every rank's
        if not wanted[0]:
            return None
        if rank() == 0:
            _log.info("Exact evaluation, %s", way.line(index + 1, size))
            sizes_told = {"num_rows": size.num_rows, "num_edges": size.num_edges}
            predicted = {"num_buckets": way.buckets.num_buckets, "predicted_bytes": int(way.broadcast_bytes)}
            record("broadcast_layer", layer=index, **sizes_told, **predicted)
        return Broadcast(self, index, streamed, sizes, way.buckets, self.memory_bytes)

    def _way(
        self, index: int, projected: bool, sparse: bool, streamed: StreamedLayer, sizes: BinSizes
    ) -> tuple[LayerWay, LayerSize]:
        """Return the way that reads fewer bytes, and the layer's size on this rank."""
        backbone, source = self.backbone, self.source
        num_rows, num_edges = source.counts(self.needed[index + 1])
        inputs = source.num_nodes if self.needed[index] is None else len(self.needed[index])
        if index and self.has_earlier:
            inputs = min(source.num_nodes, num_rows + num_edges)
        stored = source.row_bytes if self.table is None else self.table.itemsize * self.table.shape[1]
        mapped = None if projected else backbone.projected_channels(index, sparse)
        table_bytes = stored if mapped is None else np.dtype(self.table_dtype).itemsize * mapped
        channels = backbone.sum_channels(index, projected or mapped is not None)
        num_groups = self._num_groups(channels, backbone.layer_channels(index), num_rows, num_edges)
        edge_bytes = (4 if sizes.shift <= 16 else 6) + self.dtype.itemsize * (source.has_weights or streamed.by_type)
        mapping_bytes = 0 if mapped is None else inputs * (stored + table_bytes)
        size = LayerSize(num_rows, num_edges, inputs, stored, num_groups, table_bytes, mapping_bytes)
        row_bytes = row_bytes_of(streamed, self.dtype.itemsize)
        return choose_way(size, row_bytes, edge_bytes, self.memory_bytes), size

    def _num_groups(self, channels: int | None, width: int, num_rows: int, num_edges: int) -> int:
        """Return how many groups of rows read their sources one after the other, without broadcasting."""
        if channels is None:
            return max(1, -(-num_edges // self._block_edges(width)))
        most_rows, most_edges = self._group_limits(channels)
        return max(1, -(-num_rows // most_rows), -(-num_edges // most_edges))

    def _layer(
        self, index: int, projected: bool, targets: NodeSet | None, sparse: bool, broadcast: Broadcast | None
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Yield (nodes, outputs) of a layer for this rank's targets."""
        if broadcast is not None:
            everything = NodeSet.of_mask(np.ones(self.source.num_nodes, bool)) if targets is None else targets
            # Of blocks of edges, and of chunks in each thread's own heap: new memory costs as much as the work in it.
            (keep_freed_memory if self.memory_bytes >= KEEPING_BYTES else return_freed_memory)()
            self.spool = self.spool or self.source.spool()  # tables have been made in its folder
            # Rows that are asked for are read, not mapped.
            yield from broadcast.run(self._blocks(everything), self.spool)
            return
        channels = None if sparse and not projected else self.backbone.sum_channels(index, projected)
        width = self.backbone.projected_channels(index, sparse) if projected else self.backbone.layer_channels(index)
        if channels is None:
            yield from self._by_blocks(index, projected, targets, width)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="gnnscale-layer") as reader:
            for group in self._groups(targets, channels):
                yield from self._from_sums(index, projected, group, channels, width, reader)

    def _from_sums(
        self, index: int, projected: bool, group: RowBlock, channels: int, width: int, reader: ThreadPoolExecutor
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Yield (nodes, outputs) of a group of rows: their sums stay in memory while their sources are streamed."""
        backbone, rows = self.backbone, group.rows
        summed = self.sums[: len(rows) * channels].view(len(rows), channels).zero_()
        sources = _list_sources(group.indices, self.local_nid)
        sources.sort()
        _number_sources(sources, group.indices, self.local_nid)
        weight = None if group.edge_weight is None else torch.from_numpy(group.edge_weight).to(self.dtype)
        indptr, indices = torch.from_numpy(group.indptr), torch.from_numpy(group.indices)
        cursor = indptr[:-1].clone()
        row_bytes = self.dtype.itemsize * width
        step, few = max(1, self.memory_bytes // (16 * row_bytes)), max(1, CHUNK_BYTES // row_bytes)
        starts = range(0, len(sources), step)
        if len(self.streamed) < 2 * step * width:
            self.streamed = torch.empty(2 * step * width, dtype=self.dtype)
        buffers = self.streamed[: 2 * step * width].view(2, step, width)

        @torch.inference_mode()  # of the thread: the caller's own mode does not reach it
        def load(start: int) -> Tensor:
            """Read the sources from `start` on into the buffer that is not summed from at the time."""
            nodes = sources[start : start + step]
            x = buffers[start // step % 2][: len(nodes)]
            for first in range(0, len(nodes), few):
                chunk = nodes[first : first + few]
                x[first : first + few] = torch.as_tensor(self.read(chunk))
                if backbone.symmetric_sums:
                    x[first : first + few] *= self.scale(chunk, None, weight is not None)
            return x

        coming = reader.submit(load, 0) if starts else None
        for start in starts:
            x = coming.result()
            if start + step < len(sources):
                coming = reader.submit(load, start + step)
            add_edges(summed, x, start, indptr, indices, cursor, weight)
        for start in range(0, len(rows), few):
            chunk = slice(start, min(start + few, len(rows)))
            own, total = torch.as_tensor(self.read(rows[chunk])).to(self.dtype), summed[chunk]
            counts = np.diff(group.indptr[chunk.start : chunk.stop + 1])
            scale = self.scale(rows[chunk], counts, weight is not None)
            if backbone.symmetric_sums:
                added = self.self_weight(rows[chunk])
                total = total.addcmul_(own[:, :channels], scale if added is None else scale * added.unsqueeze(1))
            total = total if scale is None else total.mul_(scale)
            yield rows[chunk], backbone.layer_from_sum(index, total, own, projected)

    def scale(self, nodes: np.ndarray, counts: np.ndarray | None, weighted: bool) -> Tensor | None:
        """Return the (num, 1) factors of some nodes' sums; counts: how many edges each has."""
        degree = self.source.degree(nodes) if self.backbone.needs_degree else counts
        degree = torch.as_tensor(np.asarray(degree)).to(self.dtype)
        if self.backbone.symmetric_sums:
            added = self.self_weight(nodes)
            degree = degree + (1 if added is None else added)
        scale = self.backbone.row_scale(degree, weighted)
        return None if scale is None else scale.unsqueeze(1)

    def self_weight(self, nodes: np.ndarray) -> Tensor | None:
        """Return the (num,) weights of the self-loops that are added to some nodes; None: 1 for all."""
        weight = self.source.self_weight(nodes) if self.backbone.needs_degree else None
        return None if weight is None else torch.as_tensor(weight).to(self.dtype)

    def _groups(self, targets: NodeSet | None, channels: int) -> Iterator[RowBlock]:
        """Yield this rank's targets, as many at once as memory has space for their sums and their edges."""
        most_rows, most_edges = self._group_limits(channels)
        if len(self.sums) < most_rows * channels:
            self.sums = torch.empty(most_rows * channels, dtype=self.dtype)  # unused pages take no memory
        chunks: list[RowBlock] = []
        num_rows = num_edges = 0
        for block in self._blocks(targets):
            for chunk in split_block(block, min(most_rows, most_edges)):
                rows, edges = len(chunk.rows), len(chunk.indices)
                if chunks and (num_rows + rows > most_rows or num_edges + edges > most_edges):
                    yield join_blocks(chunks)
                    chunks, num_rows, num_edges = [], 0, 0
                chunks.append(chunk)
                num_rows, num_edges = num_rows + rows, num_edges + edges
        if chunks:
            yield join_blocks(chunks)

    def _group_limits(self, channels: int) -> tuple[int, int]:
        """Return how many rows and edges a group of sums has at most."""
        most_rows = max(1, self.memory_bytes * 5 // 8 // (channels * self.dtype.itemsize))
        return most_rows, self.block_edges or max(1, self.memory_bytes // 64)

    def _block_edges(self, width: int) -> int:
        """Return how many edges a block has at most, whose sources are gathered."""
        return self.block_edges or max(1, self.memory_bytes // (8 * max(1, self.backbone.values_of_edge(width))))

    def _by_blocks(
        self, index: int, projected: bool, targets: NodeSet | None, width: int
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Yield (nodes, outputs) of a layer, one block of targets with all their sources at a time."""
        compute = self.backbone.layer_projected if projected else self.backbone.layer
        limit = self._block_edges(width)
        for block in self._blocks(targets):
            for chunk in split_block(block, limit):
                nodes, local = self._localise(chunk)
                yield np.asarray(chunk.rows, np.int64), compute(index, self.read(nodes), local)

    def _blocks(self, targets: NodeSet | None) -> Iterator[RowBlock]:
        """Yield this rank's rows; edge types that the backbone does not read are refused."""
        for block in self.source.blocks(targets):
            if block.edge_type is not None and not self.backbone.reads_edge_types and np.any(block.edge_type):
                raise StrategyError(
                    f"{type(self.backbone).__name__} does not read edge types, and the graph has several: train RGCN, "
                    "RGAT or HGT"
                )
            yield block

    def node_types(self, nodes: np.ndarray) -> Tensor | None:
        """Return the (num,) int64 node types of some nodes, where the backbone reads them and there are several."""
        node_types = self.source.node_type(nodes) if self.backbone.reads_edge_types else None
        return None if node_types is None else self._tensor(np.asarray(node_types, np.int64))

    def _localise(self, block: RowBlock) -> tuple[np.ndarray, Block]:
        """Return the (num_sources,) nodes that a block reads, its own rows first, and the block in their ids."""
        rows, sources = np.ascontiguousarray(block.rows, np.int64), np.array(block.indices)
        others = np.sort(_number_rows_and_list_others(rows, sources, self.local_nid))
        nodes = np.concatenate([rows, others])
        indices = _localise_and_clear(nodes, len(rows), sources, self.local_nid)
        degree = self._tensor(self.source.degree(nodes)) if self.backbone.needs_degree else None
        added = self.source.self_weight(nodes) if self.backbone.needs_degree else None
        weight = None if block.edge_weight is None else self._tensor(np.array(block.edge_weight))
        attr = None if self.backbone.edge_dim is None else self._tensor(np.array(block.edge_attr))
        relations = None
        if self.backbone.reads_edge_types and block.edge_type is not None:
            relations = self._tensor(np.asarray(block.edge_type).astype(np.int64))
        indptr, node_types = self._tensor(block.indptr), self.node_types(nodes)
        edges = self._tensor(indices)
        return nodes, Block(
            indptr, edges, len(nodes), weight, degree, edge_attr=attr, edge_type=relations, node_type=node_types,
            self_weight=None if added is None else self._tensor(added),
        )  # fmt: skip

    def _new_table(self, width: int, held: NodeSet | None, dtype: type) -> np.ndarray:
        """Return the next table; only the last one is still read then, so two names serve in turn."""
        self.tables_made += 1
        return self.source.table(f"layerwise{self.tables_made % 2}", width, None if held is None else len(held), dtype)

    def read(self, nodes: np.ndarray) -> Any:
        """Return what the layer reads of some nodes."""
        if self.table is None:
            return self.source.gather(nodes)
        values = self._stored(nodes)
        return values.view(torch.bfloat16) if values.dtype == torch.int16 else values

    def expect(self, nodes: np.ndarray) -> None:
        """Have rows of some nodes read at once, which this thread reads next in this order, some at a time."""
        if self.table is None:
            self.source.expect(nodes)
        elif self.index == 0 or not self.has_earlier:
            self.source.expect(_rows_of(nodes, self.held), self.table)

    def _stored(self, nodes: np.ndarray) -> Tensor:
        """Return rows of the layer's input table, those that this pass has not computed from the kept ones."""
        if self.index == 0 or not self.has_earlier:
            return torch.as_tensor(self.source.gather(_rows_of(nodes, self.held), self.table))
        is_own = self.held.contains(nodes)
        if is_own.all():
            return torch.as_tensor(self.source.gather(self.held.positions(nodes), self.table))
        others = torch.as_tensor(self.layers.read(self.index, nodes[~is_own]))
        if not is_own.any():
            return others
        values, place = others.new_empty((len(nodes), others.shape[1])), torch.from_numpy(is_own)
        values[place] = torch.as_tensor(self.source.gather(self.held.positions(nodes[is_own]), self.table))
        values[~place] = others
        return values

    def _write(self, table: np.ndarray, held: NodeSet | None, nodes: np.ndarray, values: Tensor) -> None:
        if table.dtype == np.int16:
            stored = values.to(device="cpu", dtype=torch.bfloat16).view(torch.int16)
        else:
            stored = values.to(device="cpu", dtype=self.dtype)
        self.source.write(table, _rows_of(nodes, held), stored.numpy())

    def _tensor(self, array: np.ndarray | Tensor) -> Tensor:
        return torch.as_tensor(array).to(self.device)


def table_width(backbone: Backbone, layer: int) -> int:
    """Return the width of the rows that a layer >= 1 reads: of its inputs, or of what its linear map makes of them."""
    return backbone.projected_channels(layer, False) or backbone.layer_channels(layer)


def _rows_of(nodes: np.ndarray, held: NodeSet | None) -> np.ndarray:
    return nodes if held is None else held.positions(nodes)


@kernel
def _list_sources(indices, local_nid):
    """List each source of some edges once, and mark it with -1 in local_nid."""
    count = 0
    for e in range(len(indices)):
        if local_nid[indices[e]] == 0:
            local_nid[indices[e]] = -1
            count += 1
    out = np.empty(count, np.int64)
    count = 0
    for e in range(len(indices)):
        if local_nid[indices[e]] == -1:
            local_nid[indices[e]] = -2
            out[count] = indices[e]
            count += 1
    return out


@kernel
def _number_sources(sources, indices, local_nid):
    """Replace each of indices, in place, by its position in sources, and set local_nid back to 0."""
    for i in range(len(sources)):
        local_nid[sources[i]] = i + 1
    for e in range(len(indices)):
        indices[e] = local_nid[indices[e]] - 1
    for i in range(len(sources)):
        local_nid[sources[i]] = 0


@kernel
def _number_rows_and_list_others(rows, indices, local_nid):
    """Number the rows of a block from 1 in local_nid; mark every other source with -1 and list each once."""
    for i in range(len(rows)):
        local_nid[rows[i]] = i + 1
    return _list_sources(indices, local_nid)


@kernel
def _localise_and_clear(nodes, num_rows, indices, local_nid):
    """Return indices in local ids (positions in nodes), and set local_nid back to 0."""
    for i in range(num_rows, len(nodes)):
        local_nid[nodes[i]] = i + 1
    out = np.empty(len(indices), np.int32)
    for e in range(len(indices)):
        out[e] = local_nid[indices[e]] - 1
    for i in range(len(nodes)):
        local_nid[nodes[i]] = 0
    return out
