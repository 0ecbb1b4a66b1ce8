"""Layers over the rows of one process, which get rows of the halo from the processes that hold them.

Gradients go back the same way. The strategy gives each layer its exchange; one without reads only its input.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..triton_kernels.aggregate import Transposed, aggregate, transpose
from .block import Block
from .dropout import RowDropout, mix64
from .layer_inputs import SparseInput, as_input, head_rows, is_sparse, linear


class Transfer(Protocol):
    """Rows on their way, and the gradients that come back for them."""

    def wait(self) -> Tensor:
        """Return the (num_halo, width) rows of the halo, in its order."""

    def send_back(self, grad: Tensor) -> None:
        """Start to send (num_halo, width) gradients to the owners of the rows; every process calls it."""

    def wait_back(self) -> Tensor | None:
        """Return the (num_local, width) sum of what the others sent back, or None: nothing comes back."""


class RowExchange(Protocol):
    """The exchange of one layer.

    Attributes:
        local_only: edges from other processes are left out while training.
        pulls: gradients are pulled in as rows of the layer's output, not sent back as rows of its input.
    """

    local_only: bool
    pulls: bool

    def send(self, rows: Tensor, training: bool) -> Transfer:
        """Start to send (num_local, width) rows to the processes that read them; exactly, outside of training."""

    def pull(self, grad: Tensor) -> Transfer:
        """Start to send (num_local, width) gradients of this layer's output; `wait` gives those of the halo."""


class NoHalo:
    """The exchange of a single process, and its transfers: the halo is empty, and nothing is sent."""

    local_only = pulls = False

    def __init__(self, rows: Tensor | None = None):
        self._empty = None if rows is None else rows.new_zeros((0, rows.shape[1]))

    def send(self, rows: Tensor, training: bool) -> Transfer:
        return NoHalo(rows)

    def pull(self, grad: Tensor) -> Transfer:
        return NoHalo(grad)

    def wait(self) -> Tensor:
        return self._empty

    def send_back(self, grad: Tensor) -> None:
        pass

    def wait_back(self) -> None:
        return None


NO_HALO = NoHalo()


class SentRows:
    """Rows that a layer has sent, and will receive in return: the differentiable form of a transfer.

    The backward pass starts to send gradients of the halo as soon as they are there. It waits for those that come back
    only once the gradient of the local rows is computed.

    Args:
        rows: (num_local, width), with gradient; the attribute `rows` is read in their place.
        training: False: rows are exchanged exactly, bypassing every cache.
    """

    def __init__(self, rows: Tensor, exchange: RowExchange, training: bool):
        self._transfer = exchange.send(rows.detach(), training)
        self.rows, self._token = _Depart.apply(rows, self._transfer)

    def halo(self) -> Tensor:
        """Wait for the (num_halo, width) rows of the halo."""
        return _Arrive.apply(self._token, self._transfer)


class _Depart(Function):
    @staticmethod
    def forward(ctx, rows, transfer):
        ctx.transfer = transfer
        return rows.view_as(rows), rows.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        returned = ctx.transfer.wait_back()
        return grad if returned is None else grad + returned, None


class _Arrive(Function):
    @staticmethod
    def forward(ctx, token, transfer):
        ctx.transfer = transfer
        return transfer.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.transfer.send_back(grad.contiguous())
        return torch.zeros((), dtype=grad.dtype, device=grad.device), None


class EdgeSums:
    """Weighted sums over fixed edges; the edges are grouped by source once, for all backward passes.

    Args:
        block: Edges with `edge_weight`, which needs no gradient.
        dtype: Dtype of the values that are summed.
    """

    def __init__(self, block: Block, dtype: torch.dtype):
        self.block, self.dtype = block, dtype

    @cached_property
    def transposed(self) -> Transposed:
        """The edges by source."""
        block = self.block
        return transpose(block.indptr, block.indices, block.edge_weight, block.num_sources, dtype=self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the (num_targets, width) sums of (num_sources, width) values."""
        block = self.block
        return aggregate(x, block.indptr, block.indices, block.edge_weight, transposed=self.transposed)

    def back(self, x: Tensor) -> Tensor:
        """Return the (num_sources, width) sums of (num_targets, width) values along the edges reversed."""
        return aggregate(x, *self.transposed)


@dataclass(frozen=True)
class RowEdges:
    """Edges into the local nodes; sources are the local nodes, then the halo.

    Attributes:
        block: The edges with the layers' weights: num_local targets, num_local + num_halo sources.
        node_ids: (num_local + num_halo,) int64; a node has the same number on every process.
        dtype: Dtype of the values that are summed.
        kept: Products of the input features that do not change, by name; filled by the layers.
        local_only: Whether edges from the halo were left out, so that no process is asked for halo rows.
        reverse_weight: (num_outer_edges,) weight of the reverse of each edge from the halo, in a graph where every edge
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
        """Rows that this process owns, the targets of the edges."""
        return self.block.num_targets

    @property
    def num_halo(self) -> int:
        """Rows of other processes that the edges read."""
        return self.block.num_sources - self.num_local

    @cached_property
    def own_ids(self) -> Tensor:
        """(num_local,) int64 store ids of the own rows."""
        return self.node_ids[: self.num_local].contiguous()

    @cached_property
    def halo_ids(self) -> Tensor:
        """(num_halo,) int64 store ids of the rows of other processes."""
        return self.node_ids[self.num_local :].contiguous()

    @cached_property
    def edge_ids(self) -> Tensor:
        """(num_edges,) int64: an edge has the same number on every process."""
        targets, sources = self.block.target_of_edges(), self.block.indices.long()
        return mix64(self.node_ids)[targets] + self.node_ids[sources]

    @cached_property
    def inner(self) -> EdgeSums:
        """Sums over edges between local nodes."""
        return EdgeSums(edges_from(self.block, 0, self.num_local), self.dtype)

    @cached_property
    def outer(self) -> EdgeSums:
        """Sums over edges from the halo; sources are its positions."""
        return EdgeSums(edges_from(self.block, self.num_local, self.num_halo), self.dtype)

    @cached_property
    def outer_reverse(self) -> EdgeSums:
        """Sums over edges from local nodes into the halo, by local node: where a pulled gradient is summed."""
        return EdgeSums(replace(self.outer.block, edge_weight=self.reverse_weight), self.dtype)

    def keep(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return what was computed under a name, computing it at the first call."""
        if name not in self.kept:
            self.kept[name] = compute()
        return self.kept[name]


def prepared_rows(backbone: Any, batch: Any, local_only: bool) -> tuple[Tensor | SparseInput, RowEdges]:
    """Return the features and the edges of a full-graph batch as `backbone.forward_rows` takes them.

    They are prepared once for a model and kept in `batch.memo`, which all batches of a DataModule share.
    """
    name = ("rows", local_only, backbone.dtype)
    kept = batch.memo.get(name)
    if kept is None or kept[0] is not backbone:
        x = as_input(batch.x_dense if batch.x_csr is None else batch.x_csr, backbone.reference)
        block = Block(batch.indptr, batch.indices, len(batch.n_id), batch.edge_weight, batch.degree)
        block = replace(block, self_weight=batch.self_weight)
        if local_only:
            x = head_rows(x, block.num_targets)
        kept = batch.memo[name] = backbone, x, backbone.row_edges(block, batch.n_id, {}, local_only)
    return kept[1:]


def edges_from(block: Block, first: int, count: int) -> Block:
    """Return the edges whose source is in [first, first + count), renumbered from 0; rows keep their order."""
    chosen = (block.indices >= first) & (block.indices < first + count)
    passed = torch.cat([block.indptr.new_zeros(1), chosen.cumsum(0)])
    degree = None if block.degree is None else block.degree[first : first + count]
    weight = None if block.edge_weight is None else block.edge_weight[chosen]
    return Block(passed[block.indptr], block.indices[chosen] - first, count, weight, degree)


class RowLayer:
    """Base of the layers that the strategy hands an exchange to.

    Attributes:
        exchange: how this layer reads rows of other processes.
        can_pull: the layer is linear in its neighbours, so that gradients may be pulled (`RowExchange.pulls`).
    """

    exchange: RowExchange = NO_HALO
    can_pull = False

    def first_rows(self, x: Tensor | SparseInput, edges: RowEdges, drop: RowDropout) -> Tensor:
        """Compute the first layer's local rows from (num_local + num_halo, in_channels) features, not exchanged."""
        raise NotImplementedError

    def rows(self, h: Tensor, edges: RowEdges, drop: RowDropout) -> Tensor:
        """Compute the local rows of a later layer from the (num_local, in_channels) rows of the one before.

        Dropout comes after the exchange, so that what travels does not change with the mask.
        """
        raise NotImplementedError


class SummingLayer(RowLayer):
    """A layer that maps one weighted sum over its edges: GCN, GraphSAGE.

    The sum comes before the linear map, and is kept for the backward: the gradient of the weights is then local.
    """

    can_pull = True
    adds_own = False  # whether a row adds more to its sum than a self-loop

    @property
    def neighbor_weight(self) -> Tensor:
        """(out_channels, in_channels), the map of the sum."""
        raise NotImplementedError

    def add_own(self, mapped: Tensor, own: Tensor | SparseInput) -> Tensor:
        """Return (num_local, out_channels): the mapped sum, with the node's own share and the bias."""
        raise NotImplementedError

    def from_sum(self, summed: Tensor, own: Tensor, projected: bool) -> Tensor:
        """Return (num_rows, out_channels) from the sums, see `Backbone.layer_from_sum`."""
        return self.add_own(summed if projected else linear(summed, self.neighbor_weight), own)

    def map_sources(self, x: Tensor | SparseInput) -> Tensor:
        """Return (num, out_channels), what sources give along their edges once they are mapped."""
        return linear(x, self.neighbor_weight)

    def map_own(self, own: Tensor | SparseInput) -> Tensor:
        """Return (num_rows, out_channels), what rows add to their sums of mapped sources; with `adds_own`."""
        raise NotImplementedError

    def from_total(self, total: Tensor) -> Tensor:
        """Return (num_rows, out_channels) from the sums of what was mapped, with what the rows add."""
        raise NotImplementedError

    def first_rows(self, x: Tensor | SparseInput, edges: RowEdges, drop: RowDropout) -> Tensor:
        block = edges.block
        if drop.active or is_sparse(x):
            return self(drop(x, edges.node_ids), block)
        summed = edges.keep("summed", lambda: aggregate(x, block.indptr, block.indices, block.edge_weight))
        return self.add_own(linear(summed, self.neighbor_weight), head_rows(x, edges.num_local))

    def rows(self, h: Tensor, edges: RowEdges, drop: RowDropout) -> Tensor:
        if self.training and self.exchange.pulls and not edges.local_only:
            own = drop(h, edges.own_ids)
            return self.add_own(
                _PulledSum.apply(own, self.neighbor_weight, h.detach(), edges, self.exchange, drop), own
            )
        summed, own = sum_rows(self.exchange, h, edges, drop, self.training)
        return self.add_own(linear(summed, self.neighbor_weight), own)


class Propagation(nn.Module, RowLayer):
    """One propagation without parameters: what SGC repeats."""


def sum_rows(
    exchange: RowExchange, h: Tensor, edges: RowEdges, drop: RowDropout, training: bool
) -> tuple[Tensor, Tensor]:
    """Return (num_local, width) sums of the local nodes' edges, made while halo rows come, and rows after dropout."""
    if edges.local_only:
        own = drop(h, edges.own_ids)
        return edges.inner(own), own
    sent = SentRows(h, exchange, training)
    own = drop(sent.rows, edges.own_ids)
    inner = edges.inner(own)
    return inner + edges.outer(drop(sent.halo(), edges.halo_ids)), own


class _PulledSum(Function):
    """The linear map of a sum over [own; halo], whose gradient is summed from pulled gradients of the outputs.

    With A the weights of the edges, T = A [own; halo] and Z = T W': dW = dZ' T is local, and the gradient of the own
    rows is (A' dZ) W, where dZ of the halo is what the processes that own it send.
    """

    @staticmethod
    def forward(ctx, own, weight, raw, edges, exchange, drop):
        transfer = exchange.send(raw, True)
        summed = edges.inner(own)
        summed += edges.outer(drop(transfer.wait(), edges.halo_ids))
        ctx.save_for_backward(summed, weight)
        ctx.edges, ctx.exchange = edges, exchange
        return summed @ weight.to(summed.dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        summed, weight = ctx.saved_tensors
        edges, grad = ctx.edges, grad.contiguous()
        transfer = ctx.exchange.pull(grad)
        grad = grad.to(summed.dtype)
        weight_grad = grad.t() @ summed
        readers = edges.inner.back(grad)
        halo = transfer.wait()
        if halo is not None:
            readers += edges.outer_reverse(halo)
        return readers @ weight.to(readers.dtype), weight_grad.to(weight.dtype), None, None, None, None
