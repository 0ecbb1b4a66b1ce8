"""Softmax over rows on a CUDA device: the Triton kernels behind one differentiable function."""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

LIMIT = 1024  # edges of a row that one program reads
TILE = 512  # numbers that a program has under way


class EdgeSoftmax(Function):
    """`op.edge_softmax` by the kernels: logits (num_edges, heads), indptr, and the place of each edge or None.

    The shares are held for the backward: an array of the size of the logits, which need not be.
    """

    @staticmethod
    def forward(ctx, logits, indptr, place):
        indptr = indptr.contiguous()
        shares = softmax(logits.contiguous(), None, indptr, place)
        ctx.save_for_backward(shares, indptr, place)
        return shares

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        shares, indptr, place = ctx.saved_tensors
        return softmax(shares, grad.contiguous(), indptr, place), None, None


def softmax(values: Tensor, grad: Tensor | None, indptr: Tensor, place: Tensor | None) -> Tensor:
    """Launch the softmax of logits, or with the gradients of shares the gradients of logits.

    Args:
        values: (num_edges, heads) logits, or shares where there is a `grad`, contiguous.
        grad: (num_edges, heads), contiguous, or None.
        indptr: (num_rows + 1,) int64.
        place: (num_edges,) integers, the position in `values` of each edge of the rows; None: its own number.

    Returns:
        (num_edges, heads), each number in the place of what it comes from.
    """
    num_edges, heads = values.shape
    num_rows, out = len(indptr) - 1, torch.empty_like(values)
    if out.numel() == 0:
        return out
    padded = 1 << (heads - 1).bit_length()
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    chunks = -(-num_edges // LIMIT) if num_edges > LIMIT else 0
    partial = torch.empty((chunks, 2, 2, heads), dtype=dtype, device=values.device)
    rows = torch.empty((num_rows if chunks else 0, 2, heads), dtype=dtype, device=values.device)
    options = {"BACK": grad is not None, "PLACED": place is not None, "LIMIT": LIMIT}
    options |= {"EDGES": max(1, TILE // padded), "HEADS": padded, "num_warps": 4}
    shared = (
        values, values if grad is None else grad, indptr if place is None else place.contiguous(), indptr, out,
        partial, rows,
    )  # fmt: skip
    kernels = _triton_kernels()
    if chunks:
        kernels.softmax_hubs_kernel[(chunks, 2)](*shared, num_rows, num_edges, heads, WRITES=False, **options)
    kernels.softmax_kernel[(num_rows,)](*shared, heads, **options)
    if chunks:
        kernels.softmax_hubs_kernel[(chunks, 2)](*shared, num_rows, num_edges, heads, WRITES=True, **options)
    return out


@cache
def _triton_kernels() -> ModuleType:
    """Return the module of kernels, imported when first needed."""
    from . import softmax_kernel

    return softmax_kernel
