"""Checked, differentiable entry points; the device of the values decides which form runs."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..aggregate.cpu import run_rows
from ..aggregate.op import check_rows
from . import cpu, device, reference


class EdgesBySource(NamedTuple):
    """Edges grouped by source, for the gradients of fixed edges: made once, read by every backward.

    Attributes:
        indptr: (num_src + 1,) int64. rows: (num_edges,) the row of each edge. edges: (num_edges,) int64, its position.
    """

    indptr: Tensor
    rows: Tensor
    edges: Tensor


def group_by_source(indptr: Tensor, indices: Tensor, num_src: int) -> EdgesBySource:
    """Group edges by their source, in the order of their rows.

    Args:
        indptr, indices: CSC rows, as in `aggregate`.
        num_src: Number of sources.

    Cost: O(num_src + num_edges) on the CPU, a sort on a device; an id and an int64 an edge.
    """
    if indptr.device.type != "cpu":
        return EdgesBySource(*device.group_edges(indptr, indices, num_src))
    check_rows(indptr, indices, num_src)
    arrays = cpu.group_by_source(indptr.numpy(), indices.numpy(), num_src)
    return EdgesBySource(*(torch.from_numpy(array) for array in arrays))


def edge_attention(
    values: Tensor,
    src_score: Tensor,
    dst_score: Tensor | None,
    indptr: Tensor,
    indices: Tensor,
    edge_score: Tensor | None = None,
    edge_bias: Tensor | None = None,
    keep: Tensor | None = None,
    negative_slope: float = 0.2,
    by_source: EdgesBySource | None = None,
) -> Tensor:
    """Sum source values over the in-edges of each node, weighed by a softmax of additive scores; differentiable.

    score[e, h] = leaky_relu(src_score[indices[e], h] + dst_score[v, h] + edge_score[e, h]) + edge_bias[e] for the edges
    e of row v; out[v, h, :] = sum over them of softmax(score)[e, h] * keep[e, h] * values[indices[e], h, :]. A score of
    -inf gives an edge the share 0; a row without edges, or of such edges alone, gives 0.

    Args:
        values: (num_src, heads, channels) floating; float16 and bfloat16 are summed in float32.
        src_score: (num_src, heads) floating.
        dst_score: (num_dst, heads), or None for 0.
        indptr: (num_dst + 1,) int64, from 0 to num_edges.
        indices: (num_edges,) int32 or int64 in [0, num_src).
        edge_score: (num_edges, heads), or None for 0.
        edge_bias: (num_edges,), or None for 0.
        keep: (num_edges, heads) factors of the shares, without gradient: dropout of the attention. None: 1.
        negative_slope: Slope of the leaky ReLU below 0.
        by_source: `group_by_source` of the same edges, for num_src sources or more; None: the backward makes it.

    Returns:
        (num_dst, heads, channels), the dtype of values.

    Raises:
        ValueError: shapes or ids that do not fit (ids are checked on the CPU only).

    Cost: reads num_edges rows of values, the backward as many rows of gradients. Nothing of num_edges * channels is
        held. On CUDA the forward holds nothing of an edge, the backward (num_edges, heads) gradients of scores; on the
        CPU the shares are held from the forward to the backward. Sums are in a fixed order, the same bits every time.
    Source: the running softmax of Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; shares
        are worked out again in the backward as in Dao et al., FlashAttention, NeurIPS 2022.
    """
    check_rows(indptr, indices, values.shape[0])
    _check_shapes(values, src_score, dst_score, len(indptr) - 1, len(indices), edge_score, edge_bias, keep)
    slope, by_source = float(negative_slope), _of_sources(by_source, len(values), len(indices))
    if device.is_available(values):
        with torch.cuda.device(values.device):
            return device.EdgeAttention.apply(
                values, src_score, dst_score, edge_score, edge_bias, keep, indptr, indices, slope, by_source
            )
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    terms = [None if part is None else part.to(dtype) for part in (src_score, dst_score, edge_score, edge_bias, keep)]
    if values.device.type == "cpu":
        out = _EdgeAttention.apply(values.to(dtype), *terms, indptr, indices, slope, by_source)
    else:
        out = reference.edge_attention(values.to(dtype), *terms[:2], indptr, indices, *terms[2:], slope)
    return out.to(values.dtype)


class _EdgeAttention(Function):
    @staticmethod
    def forward(ctx, values, src_score, dst_score, edge_score, edge_bias, keep, indptr, indices, slope, by_source):
        values, src_score = values.contiguous(), src_score.contiguous()
        rows, sources = indptr.numpy(), indices.numpy()
        heads = values.shape[1]
        share = values.new_empty((len(indices), heads))
        scores = [_array(part, src_score) for part in (dst_score, edge_score, keep)]
        bias = src_score.new_empty(0) if edge_bias is None else edge_bias.detach().contiguous()
        factor = values.numpy().dtype.type(slope)
        run_rows(
            cpu.scores_less_top, rows, heads,
            src_score.detach().numpy(), *scores[:2], bias.numpy(), factor, rows, sources, dst_score is not None,
            edge_score is not None, edge_bias is not None, share.numpy(),
        )  # fmt: skip
        share.exp_()
        out = values.new_empty((len(indptr) - 1, *values.shape[1:]))
        run_rows(
            cpu.attend, rows, values[:1].numel(),
            values.detach().numpy(), rows, sources, share.numpy(), scores[2], keep is not None, out.numpy(),
        )  # fmt: skip
        ctx.save_for_backward(values, src_score, dst_score, edge_score, edge_bias, keep, indptr, indices, share, out)
        ctx.slope, ctx.by_source = factor, by_source
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        values, src_score, dst_score, edge_score, _, keep, indptr, indices, share, out = ctx.saved_tensors
        grad, rows, heads = grad.contiguous(), indptr.numpy(), values.shape[1]
        by_source = ctx.by_source or group_by_source(indptr, indices, len(values))
        product = (grad * out).sum(dim=-1)
        own = torch.zeros_like(product) if dst_score is None else dst_score
        needs_bias = ctx.needs_input_grad[4]
        x_grad, src_grad, score_grad = torch.empty_like(values), torch.empty_like(src_score), torch.empty_like(share)
        inner_grad = torch.empty_like(share) if needs_bias else share.new_empty((0, heads))
        offsets, targets, edges = (part.numpy() for part in by_source)
        run_rows(
            cpu.attend_back, offsets, values[:1].numel(),
            grad.numpy(), values.numpy(), src_score.numpy(), torch.cat([own, product], 1).numpy(),
            _array(edge_score, src_score), share.numpy(), _array(keep, src_score), ctx.slope, offsets, targets, edges,
            edge_score is not None, keep is not None, x_grad.numpy(), src_grad.numpy(), score_grad.numpy(),
            inner_grad.numpy(), needs_bias,
        )  # fmt: skip
        dst_grad = None
        if dst_score is not None:
            dst_grad = torch.empty_like(product)
            run_rows(cpu.sum_rows, rows, heads, score_grad.numpy(), rows, dst_grad.numpy())
        edge_grad = None if edge_score is None else score_grad
        bias_grad = inner_grad.sum(dim=1) if needs_bias else None
        return x_grad, src_grad, dst_grad, edge_grad, bias_grad, None, None, None, None, None


def _array(scores: Tensor | None, like: Tensor):
    """Return (num, heads) scores as an array, or an empty one of the right type where there are none."""
    return (like.new_empty((0, like.shape[1])) if scores is None else scores.contiguous()).detach().numpy()


def _of_sources(by_source: EdgesBySource | None, num_src: int, num_edges: int) -> EdgesBySource | None:
    """Return the groups of the first num_src sources: layers that compute fewer nodes share a block's groups."""
    if by_source is None:
        return None
    if len(by_source.indptr) - 1 < num_src or len(by_source.edges) != num_edges:
        given = (len(by_source.indptr) - 1, len(by_source.edges))
        raise ValueError(f"by_source must be of {num_src} sources or more and of {num_edges} edges, got {given}")
    return by_source._replace(indptr=by_source.indptr[: num_src + 1])


def _check_shapes(values, src_score, dst_score, num_dst, num_edges, edge_score, edge_bias, keep) -> None:
    if values.dim() != 3 or not values.is_floating_point():
        raise ValueError(f"values must be floating, 3-D, got {tuple(values.shape)} {values.dtype}")
    num_src, heads = values.shape[:2]
    wanted = {
        "src_score": (src_score, (num_src, heads)), "dst_score": (dst_score, (num_dst, heads)),
        "edge_score": (edge_score, (num_edges, heads)), "edge_bias": (edge_bias, (num_edges,)),
        "keep": (keep, (num_edges, heads)),
    }  # fmt: skip
    for name, (given, shape) in wanted.items():
        if given is not None and tuple(given.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(given.shape)}")
