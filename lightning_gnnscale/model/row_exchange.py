"""How a layer gets rows from the processes that hold them, and how gradients go back the same way.

The strategy gives each layer its exchange; a layer without one reads only its input.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


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
