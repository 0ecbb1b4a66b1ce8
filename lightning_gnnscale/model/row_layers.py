"""Layers over the rows of one process: own rows stay, rows of the halo come through the layer's exchange."""

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..triton_kernels.aggregate import aggregate
from .row_arcs import RowArcs
from .row_dropout import RowDropout
from .row_exchange import NO_HALO, RowExchange, SentRows
from .sparse_linear import SparseInput, head_rows, is_sparse, linear


class RowLayer:
    """Base of the layers that the strategy hands an exchange to.

    Attributes:
        exchange: how this layer reads rows of other processes.
        can_pull: the layer is linear in its neighbours, so that gradients may be pulled (`RowExchange.pulls`).
    """

    exchange: RowExchange = NO_HALO
    can_pull = False

    def first_rows(self, x: Tensor | SparseInput, arcs: RowArcs, drop: RowDropout) -> Tensor:
        """Compute the local rows of the model's first layer; features of the halo are given, not exchanged.

        Args:
            x: (num_local + num_halo, in_channels), dense or sparse.
            drop: dropout of the features.
        """
        raise NotImplementedError

    def rows(self, h: Tensor, arcs: RowArcs, drop: RowDropout) -> Tensor:
        """Compute the local rows of a later layer from the (num_local, in_channels) rows of the one before.

        Dropout comes after the exchange, so that what travels does not change with the mask.
        """
        raise NotImplementedError


class SummingLayer(RowLayer):
    """A layer that maps one weighted sum over its arcs: GCN, GraphSAGE.

    The sum comes before the linear map, and is kept for the backward: the gradient of the weights is then local.
    """

    can_pull = True

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

    def first_rows(self, x: Tensor | SparseInput, arcs: RowArcs, drop: RowDropout) -> Tensor:
        block = arcs.block
        if drop.active or is_sparse(x):
            return self(drop(x, arcs.node_ids), block)
        summed = arcs.keep("summed", lambda: aggregate(x, block.indptr, block.indices, block.edge_weight))
        return self.add_own(linear(summed, self.neighbor_weight), head_rows(x, arcs.num_local))

    def rows(self, h: Tensor, arcs: RowArcs, drop: RowDropout) -> Tensor:
        if self.training and self.exchange.pulls and not arcs.local_only:
            own = drop(h, arcs.own_ids)
            return self.add_own(_PulledSum.apply(own, self.neighbor_weight, h.detach(), arcs, self.exchange, drop), own)
        summed, own = sum_rows(self.exchange, h, arcs, drop, self.training)
        return self.add_own(linear(summed, self.neighbor_weight), own)


class Propagation(nn.Module, RowLayer):
    """One propagation without parameters: what SGC repeats."""


def sum_rows(
    exchange: RowExchange, h: Tensor, arcs: RowArcs, drop: RowDropout, training: bool
) -> tuple[Tensor, Tensor]:
    """Sum over the arcs of the local nodes while the rows of the halo are on their way.

    Returns:
        The (num_local, width) sums, and the local rows after dropout.
    """
    if arcs.local_only:
        own = drop(h, arcs.own_ids)
        return arcs.inner(own), own
    sent = SentRows(h, exchange, training)
    own = drop(sent.rows, arcs.own_ids)
    inner = arcs.inner(own)
    return inner + arcs.outer(drop(sent.halo(), arcs.halo_ids)), own


class _PulledSum(Function):
    """The linear map of a sum over [own; halo], whose gradient is summed from pulled gradients of the outputs.

    With A the weights of the arcs, T = A [own; halo] and Z = T W': dW = dZ' T is local, and the gradient of the own
    rows is (A' dZ) W, where dZ of the halo is what the processes that own it send.
    """

    @staticmethod
    def forward(ctx, own, weight, raw, arcs, exchange, drop):
        transfer = exchange.send(raw, True)
        summed = arcs.inner(own)
        summed += arcs.outer(drop(transfer.wait(), arcs.halo_ids))
        ctx.save_for_backward(summed, weight)
        ctx.arcs, ctx.exchange = arcs, exchange
        return summed @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        summed, weight = ctx.saved_tensors
        arcs, grad = ctx.arcs, grad.contiguous()
        transfer = ctx.exchange.pull(grad)
        weight_grad = grad.t() @ summed
        readers = arcs.inner.back(grad)
        halo = transfer.wait()
        if halo is not None:
            readers += arcs.outer_reverse(halo)
        return readers @ weight, weight_grad, None, None, None, None
