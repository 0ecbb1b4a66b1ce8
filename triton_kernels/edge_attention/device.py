"""Attention over edges on a CUDA device: the Triton kernels behind one differentiable function."""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..aggregate.device import DTYPES, by_source, gather_sum

TILE = 1024  # values that a program has under way
LIMIT = 1024  # edges of a row, or of a source, that one program adds up


class EdgeAttention(Function):
    """`op.edge_attention` by the kernels; arguments as there, `by_source` a tuple of three tensors or None.

    Held for the backward are the arguments, the output and 4 numbers a row and head; no number of an edge.
    """

    @staticmethod
    def forward(ctx, values, src_score, dst_score, edge_score, edge_bias, keep, indptr, indices, slope, grouped):
        given = [None if part is None else part.contiguous() for part in (values, src_score, dst_score)]
        terms = [None if part is None else part.contiguous() for part in (edge_score, edge_bias, keep)]
        indptr, indices = indptr.contiguous(), indices.contiguous()
        out, rows = attend(*given, *terms, indptr, indices, slope)
        ctx.save_for_backward(*given, *terms, indptr, indices, out, rows)
        ctx.slope, ctx.grouped = slope, grouped
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        values, src_score, dst_score, edge_score, edge_bias, keep, indptr, indices, out, rows = ctx.saved_tensors
        grad = grad.contiguous()
        rows = rows.clone()  # the graph may be kept for another backward
        rows[:, :, 3] = (grad.to(rows.dtype) * out.to(rows.dtype)).sum(dim=-1)
        grouped = group_edges(indptr, indices, len(values)) if ctx.grouped is None else ctx.grouped
        terms, needs_bias = (edge_score, edge_bias, keep), ctx.needs_input_grad[4]
        x_grad, src_grad, score_grad, bias_grad = attend_back(
            grad, values, src_score, *terms, rows, grouped, ctx.slope, needs_bias
        )
        dst_grad = None
        if dst_score is not None:
            dst_grad = gather_sum(score_grad.unsqueeze(2), None, indptr, None, False).squeeze(2).to(dst_score.dtype)
        edge_grad = None if edge_score is None else score_grad.to(edge_score.dtype)
        bias_grad = bias_grad.sum(dim=1).to(edge_bias.dtype) if needs_bias else None
        return x_grad, src_grad, dst_grad, edge_grad, bias_grad, None, None, None, None, None


def attend(
    values: Tensor, src_score: Tensor, dst_score: Tensor | None, edge_score: Tensor | None, edge_bias: Tensor | None,
    keep: Tensor | None, indptr: Tensor, indices: Tensor, slope: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the forward; contiguous arguments as in `op.edge_attention`.

    Returns:
        (num_dst, heads, channels) of the dtype of values; (num_dst, heads, 4) float32 or float64: dst_score, the
        largest score, 1 / the sum of powers, and space for the backward.

    Cost: where there are more than LIMIT edges, 2 * num_edges / LIMIT rows of sums of hubs, written and read.
    """
    heads, channels = values.shape[1:]
    num_rows, num_edges = len(indptr) - 1, len(indices)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    out = values.new_empty((num_rows, heads, channels))
    rows = torch.empty((num_rows, heads, 4), dtype=dtype, device=values.device)
    if rows.numel() == 0 or channels == 0:
        return out, rows.zero_()
    sizes = _sizes(channels)
    terms = {"HAS_DST": dst_score is not None, **_terms(edge_score, edge_bias, keep)}
    options = {"SLOPE": slope, **terms, **sizes, "num_warps": 4, "enable_fp_fusion": True}
    pointers = [src_score, *(src_score if part is None else part for part in (dst_score, edge_score, edge_bias, keep))]
    chunks = -(-num_edges // LIMIT) if num_edges > LIMIT else 0
    sums = torch.empty((chunks, 2, heads, channels), dtype=dtype, device=values.device)
    tops = torch.empty((chunks, 2, heads, 2), dtype=dtype, device=values.device)
    shared = (values, *pointers, indptr, indices, sums, tops)
    if chunks:
        _triton_kernels().attend_hubs_kernel[(chunks * heads, 2)](
            *shared, num_rows, num_edges, heads, channels, **options
        )
    _triton_kernels().attend_kernel[(num_rows * heads,)](*shared, out, rows, heads, channels, **options)
    return out, rows


def attend_back(
    grad: Tensor, values: Tensor, src_score: Tensor, edge_score: Tensor | None, edge_bias: Tensor | None,
    keep: Tensor | None, rows: Tensor, grouped: tuple[Tensor, Tensor, Tensor], slope: float, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Launch the backward, once along the edges of each source.

    Returns:
        The gradients of values and src_score; (num_edges, heads) those of the scores of the edges before the leaky
        ReLU, and after it or None.

    Cost: reads num_edges rows of `grad`. The gradients of scores are held, (num_edges, heads), for the sums over rows:
        to work them out again there would be to read a row of values for each edge once more.
    """
    heads, channels = values.shape[1:]
    num_src, num_edges = len(values), len(grouped[1])
    x_grad, src_grad = torch.empty_like(values), torch.empty_like(src_score)
    score_grad = torch.empty((num_edges, heads), dtype=rows.dtype, device=values.device)
    bias_grad = torch.empty_like(score_grad) if needs_bias else None
    if src_grad.numel() == 0 or channels == 0:
        return x_grad, src_grad.zero_(), score_grad.zero_(), None if bias_grad is None else bias_grad.zero_()
    options = {"SLOPE": slope, **_terms(edge_score, edge_bias, keep), "BIAS_GRAD": needs_bias, **_sizes(channels)}
    options |= {"num_warps": 4, "enable_fp_fusion": True}
    terms = [src_score if part is None else part for part in (edge_score, edge_bias, keep)]
    grads = (score_grad, score_grad if bias_grad is None else bias_grad)
    chunks = -(-num_edges // LIMIT) if num_edges > LIMIT else 0
    sums = torch.empty((chunks, 2, heads, channels + 1), dtype=rows.dtype, device=values.device)
    shared = (grad, values, src_score, *terms, rows, *grouped, *grads, sums)
    if chunks:
        _triton_kernels().attend_back_hubs_kernel[(chunks * heads, 2)](
            *shared, num_src, num_edges, heads, channels, **options
        )
    _triton_kernels().attend_back_kernel[(num_src * heads,)](*shared, x_grad, src_grad, heads, channels, **options)
    return x_grad, src_grad, score_grad, bias_grad


def group_edges(indptr: Tensor, indices: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the offsets, the rows and the edges of the edges by source, on their device."""
    places = torch.arange(len(indices), device=indices.device)
    edges, offsets, rows = by_source(indptr, indices, places, num_src)
    return offsets, rows, edges


def is_available(values: Tensor) -> bool:
    """Whether `EdgeAttention` takes values: on CUDA, of DTYPES, with Triton installed."""
    return values.device.type == "cuda" and values.dtype in DTYPES and _triton_kernels() is not None


def _terms(edge_score: Tensor | None, edge_bias: Tensor | None, keep: Tensor | None) -> dict[str, bool]:
    return {"HAS_EDGE": edge_score is not None, "HAS_BIAS": edge_bias is not None, "HAS_KEEP": keep is not None}


def _sizes(channels: int) -> dict[str, int]:
    block = max(16, 1 << (channels - 1).bit_length())
    return {"LIMIT": LIMIT, "EDGES": max(1, TILE // block), "BLOCK": block}


@cache
def _triton_kernels() -> ModuleType | None:
    """Return the module of kernels, or None where Triton is missing; imported when first needed."""
    try:
        from . import kernel
    except ImportError:
        return None
    return kernel
