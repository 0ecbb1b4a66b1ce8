"""Exact layer-wise inference: one layer for all nodes, then the next, in memory that a block bounds."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..jit import kernel
from .backbone import Backbone
from .block import Block
from .layer_source import LayerSource, RowBlock
from .sparse_linear import is_sparse

BLOCK_BYTES = 256 << 20  # of gathered rows, where block_arcs does not say


class LayerwiseOutput(NamedTuple):
    """What the model gives for each node.

    Attributes:
        rows: (num_rows,) int64 store ids of this rank's nodes.
        table: (num_nodes, out_channels) float32, shared by the ranks and complete on return. It is the source's, and
            stands until the next pass over that source begins.
    """

    rows: np.ndarray
    table: np.ndarray

    def chunks(self, chunk_rows: int = 1 << 18) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (nodes, outputs) of this rank's rows, a bounded piece at a time."""
        for start in range(0, len(self.rows), chunk_rows):
            nodes = self.rows[start : start + chunk_rows]
            yield nodes, np.asarray(self.table[nodes])


@torch.no_grad()
def layerwise_inference(
    backbone: Backbone, source: LayerSource, block_arcs: int | None = None, device: torch.device | str | None = None
) -> LayerwiseOutput:
    """Compute a model's outputs for this rank's nodes from complete neighbourhoods, layer by layer.

    Equals the full-graph forward in eval mode, to the rounding of float32. Where a layer's linear map makes rows
    narrower (or its input is sparse), each node is mapped once into a table of its own, and the arcs read that.

    Args:
        backbone: its layers; put into eval mode meanwhile.
        source: the graph, and the tables that ranks share.
        block_arcs: arcs of the rows computed at once (one row is never split); None: as many as keep the gathered
            rows under 256 MiB.
        device: where to compute; None: where the parameters are.

    Returns:
        This rank's rows, and the table of outputs.

    Raises:
        ValueError: block_arcs below 1.

    Cost: a block's arcs and gathered rows, 4 bytes a node, and the tables (num_nodes x width float32, as memory
    maps): two at a time, each as wide as a layer or as the linear map in it. Time: each arc is read once a layer.
    Source: the inference of Hamilton et al.'s GraphSAGE and of OGB's baselines; the mapping of each node before its
    arcs are read is ours.
    """
    if block_arcs is not None and block_arcs < 1:
        raise ValueError(f"block_arcs must be at least 1, got {block_arcs}")
    reference, was_training = backbone.reference, backbone.training
    target = torch.device(device) if device is not None else reference.device
    backbone.eval().to(target)
    try:
        return _Pass(backbone, source, block_arcs, target).run()
    finally:
        backbone.train(was_training).to(reference.device)


class _Pass:
    """One pass over the layers; holds the scratch array that numbers a block's sources."""

    def __init__(self, backbone: Backbone, source: LayerSource, block_arcs: int | None, device: torch.device):
        self.backbone, self.source, self.block_arcs, self.device = backbone, source, block_arcs, device
        self.local_nid = np.zeros(source.num_nodes, np.int32)  # 0 = not seen in this block, else local id + 1
        self.tables_made = 0

    def run(self) -> LayerwiseOutput:
        backbone, source = self.backbone, self.source
        read, table = source.gather, None
        sparse = is_sparse(source.gather(np.zeros(min(1, source.num_nodes), np.int64)))
        rows: list[np.ndarray] = []
        for index in range(backbone.num_layers):
            width, compute = backbone.layer_channels(index), backbone.layer
            projected_channels = backbone.projected_channels(index, sparse)
            if projected_channels is not None:
                table = self._table(projected_channels)
                for block in self._blocks(projected_channels + (0 if sparse and index == 0 else width)):
                    table[block.rows] = _to_array(backbone.project(index, read(block.rows)))
                source.barrier()
                read, width, compute = _reader(table), projected_channels, backbone.layer_projected
            table = self._table(backbone.layer_channels(index + 1))
            rows.clear()
            for block in self._blocks(width):
                rows.append(np.asarray(block.rows, np.int64))
                nodes, local = self._localise(block)
                table[block.rows] = _to_array(compute(index, read(nodes), local))
            source.barrier()
            read = _reader(table)
        return LayerwiseOutput(np.concatenate([np.zeros(0, np.int64), *rows]), table)

    def _table(self, width: int) -> np.ndarray:
        """Return the next table; only the last one is still read then, so two names serve in turn."""
        self.tables_made += 1
        return self.source.table(f"layerwise{self.tables_made % 2}", width)

    def _blocks(self, width: int) -> Iterator[RowBlock]:
        limit = self.block_arcs or max(1, BLOCK_BYTES // (4 * max(1, width)))
        for block in self.source.blocks():
            yield from split_block(block, limit)

    def _localise(self, block: RowBlock) -> tuple[np.ndarray, Block]:
        """Return the (num_sources,) nodes that a block reads, its own rows first, and the block in their ids."""
        rows, sources = np.ascontiguousarray(block.rows, np.int64), np.array(block.indices)
        others = np.sort(_number_rows_and_list_others(rows, sources, self.local_nid))
        nodes = np.concatenate([rows, others])
        indices = _localise_and_clear(nodes, len(rows), sources, self.local_nid)
        degree = self._tensor(self.source.degree(nodes)) if self.backbone.needs_degree else None
        weight = None if block.edge_weight is None else self._tensor(np.array(block.edge_weight))
        return nodes, Block(self._tensor(block.indptr), self._tensor(indices), len(nodes), weight, degree)

    def _tensor(self, array: np.ndarray | Tensor) -> Tensor:
        return torch.as_tensor(array).to(self.device)


def split_block(block: RowBlock, block_arcs: int) -> Iterator[RowBlock]:
    """Split rows into pieces of at most block_arcs arcs and as many rows; a row with more arcs stands alone."""
    start, num_rows, offset = 0, len(block.rows), np.asarray(block.indptr, np.int64)
    while start < num_rows:
        stop = int(np.searchsorted(offset, offset[start] + block_arcs, side="right")) - 1
        stop = min(max(stop, start + 1), start + block_arcs, num_rows)
        arcs = slice(int(offset[start]), int(offset[stop]))
        weight = None if block.edge_weight is None else block.edge_weight[arcs]
        yield RowBlock(
            np.asarray(block.rows[start:stop]), offset[start : stop + 1] - offset[start], block.indices[arcs], weight
        )
        start = stop


def _reader(table: np.ndarray) -> Callable[[np.ndarray], Tensor]:
    return lambda nodes: torch.from_numpy(np.asarray(table[nodes]))


def _to_array(values: Tensor) -> np.ndarray:
    return values.to(device="cpu", dtype=torch.float32).numpy()


@kernel
def _number_rows_and_list_others(rows, indices, local_nid):
    """Number the rows of a block from 1 in local_nid; mark every other source with -1 and list each once."""
    for i in range(len(rows)):
        local_nid[rows[i]] = i + 1
    count = 0
    for e in range(len(indices)):
        if local_nid[indices[e]] == 0:
            local_nid[indices[e]] = -1
            count += 1
    others = np.empty(count, np.int64)
    count = 0
    for e in range(len(indices)):
        if local_nid[indices[e]] == -1:
            local_nid[indices[e]] = -2
            others[count] = indices[e]
            count += 1
    return others


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
