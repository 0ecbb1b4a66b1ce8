"""The arcs of one process, as block-row layers read them: prepared once, kept for the whole run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..triton_kernels.aggregate import Transposed, aggregate, transpose
from .block import Block
from .row_dropout import mix64
from .sparse_linear import SparseInput, as_input, head_rows


class ArcSums:
    """Weighted sums over fixed arcs; the arcs are grouped by source once, for all backward passes.

    Args:
        block: Arcs with `edge_weight`, which needs no gradient.
        dtype: Dtype of the values that are summed.
    """

    def __init__(self, block: Block, dtype: torch.dtype):
        self.block, self.dtype = block, dtype

    @cached_property
    def transposed(self) -> Transposed | None:
        """The arcs by source; None on devices whose kernels do not read it."""
        block = self.block
        if block.indptr.device.type != "cpu":
            return None
        return transpose(block.indptr, block.indices, block.edge_weight, block.num_sources, dtype=self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the (num_targets, width) sums of (num_sources, width) values."""
        block = self.block
        return aggregate(x, block.indptr, block.indices, block.edge_weight, transposed=self.transposed)

    def back(self, x: Tensor) -> Tensor:
        """Return the (num_sources, width) sums of (num_targets, width) values along the arcs reversed."""
        if self.transposed is not None:
            return aggregate(x, *self.transposed)
        out = x.new_zeros((self.block.num_sources, x.shape[1]))
        messages = x.index_select(0, self.block.target_of_arcs()) * self.block.edge_weight.unsqueeze(1)
        return out.index_add(0, self.block.indices.long(), messages)


@dataclass(frozen=True)
class RowArcs:
    """Arcs into the local nodes; sources are the local nodes, then the halo.

    Attributes:
        block: The arcs with the layers' weights: num_local targets, num_local + num_halo sources.
        node_ids: (num_local + num_halo,) int64; a node has the same number on every process.
        dtype: Dtype of the values that are summed.
        kept: Products of the input features that do not change, by name; filled by the layers.
        local_only: Whether arcs from the halo were left out, so that no process is asked for halo rows.
        reverse_weight: (num_outer_arcs,) weight of the reverse of each arc from the halo, in a graph where every arc
            has its reverse (in other graphs it is not used). None with edge weights.
    """

    block: Block
    node_ids: Tensor
    dtype: torch.dtype
    kept: dict
    local_only: bool = False
    reverse_weight: Tensor | None = None

    @property
    def num_local(self) -> int:
        return self.block.num_targets

    @property
    def num_halo(self) -> int:
        return self.block.num_sources - self.num_local

    @cached_property
    def own_ids(self) -> Tensor:
        return self.node_ids[: self.num_local].contiguous()

    @cached_property
    def halo_ids(self) -> Tensor:
        return self.node_ids[self.num_local :].contiguous()

    @cached_property
    def arc_ids(self) -> Tensor:
        """(num_arcs,) int64: an arc has the same number on every process."""
        targets, sources = self.block.target_of_arcs(), self.block.indices.long()
        return mix64(self.node_ids)[targets] + self.node_ids[sources]

    @cached_property
    def inner(self) -> ArcSums:
        """Sums over arcs between local nodes."""
        return ArcSums(arcs_from(self.block, 0, self.num_local), self.dtype)

    @cached_property
    def outer(self) -> ArcSums:
        """Sums over arcs from the halo; sources are its positions."""
        return ArcSums(arcs_from(self.block, self.num_local, self.num_halo), self.dtype)

    @cached_property
    def outer_reverse(self) -> ArcSums:
        """Sums over arcs from local nodes into the halo, by local node: where a pulled gradient is summed."""
        return ArcSums(replace(self.outer.block, edge_weight=self.reverse_weight), self.dtype)

    def keep(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return what was computed under a name, computing it at the first call."""
        if name not in self.kept:
            self.kept[name] = compute()
        return self.kept[name]


def prepared_rows(backbone: Any, batch: Any, local_only: bool) -> tuple[Tensor | SparseInput, RowArcs]:
    """Return the features and the arcs of a full-graph batch as `backbone.forward_rows` takes them.

    They are prepared once for a model and kept in `batch.memo`, which all batches of a DataModule share.

    Args:
        backbone: gives `row_arcs` and `reference`.
        batch: a full-graph batch: `x_csr` or `x_dense`, `indptr`, `indices`, `edge_weight`, `degree`, `n_id`, `memo`.
        local_only: leave the halo out.
    """
    name = ("rows", local_only, backbone.dtype)
    kept = batch.memo.get(name)
    if kept is None or kept[0] is not backbone:
        x = as_input(batch.x_dense if batch.x_csr is None else batch.x_csr, backbone.reference)
        block = Block(batch.indptr, batch.indices, len(batch.n_id), batch.edge_weight, batch.degree)
        if local_only:
            x = head_rows(x, block.num_targets)
        kept = batch.memo[name] = backbone, x, backbone.row_arcs(block, batch.n_id, {}, local_only)
    return kept[1:]


def arcs_from(block: Block, first: int, count: int) -> Block:
    """Return the arcs whose source is in [first, first + count), renumbered from 0; rows keep their order."""
    chosen = (block.indices >= first) & (block.indices < first + count)
    passed = torch.cat([block.indptr.new_zeros(1), chosen.cumsum(0)])
    degree = None if block.degree is None else block.degree[first : first + count]
    weight = None if block.edge_weight is None else block.edge_weight[chosen]
    return Block(passed[block.indptr], block.indices[chosen] - first, count, weight, degree)
