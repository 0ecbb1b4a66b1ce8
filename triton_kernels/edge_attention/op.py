"""Checked, differentiable entry points; the device of the values decides which form runs."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..aggregate.op import aggregate, check_rows, edge_add, edge_softmax, take_rows
from . import cpu, device


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
    drop: Callable[[Tensor], Tensor] | None = None,
    negative_slope: float = 0.2,
    by_source: EdgesBySource | None = None,
) -> Tensor:
    """Sum source values over the in-edges of each node, weighed by a softmax of additive scores; differentiable.

    score[e, h] = leaky_relu(src_score[indices[e], h] + dst_score[v, h] + edge_score[e, h]) + edge_bias[e] for the edges
    e of row v; out[v, h, :] = sum over them of softmax(score)[e, h] * values[indices[e], h, :]. A score of
    -inf gives an edge the share 0; a row without edges, or of such edges alone, gives 0.

    Args:
        values: (num_src, heads, channels) floating; float16 and bfloat16 are summed in float32.
        src_score: (num_src, heads) floating.
        dst_score: (num_dst, heads), or None for 0.
        indptr: (num_dst + 1,) int64, from 0 to num_edges.
        indices: (num_edges,) int32 or int64 in [0, num_src).
        edge_score: (num_edges, heads), or None for 0.
        edge_bias: (num_edges,), or None for 0.
        drop: Dropout of the shares, (num_edges, heads): multiplies each by a factor that does not depend on it. None:
            they stay. On CUDA the factors are held.
        negative_slope: Slope of the leaky ReLU below 0.
        by_source: `group_by_source` of the same edges, for num_src sources or more; None: the backward makes it.

    Returns:
        (num_dst, heads, channels), the dtype of values.

    Raises:
        ValueError: shapes or ids that do not fit (ids are checked on the CPU only).

    Cost: reads num_edges rows of values, the backward as many rows of gradients. Nothing of num_edges * channels is
        held. On CUDA the forward holds nothing of an edge without dropout, the backward (num_edges, heads) gradients of
        scores; elsewhere scores and shares are held. Sums are in a fixed order, the same bits every time.
    Source: the running softmax of Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; shares
        are worked out again in the backward as in Dao et al., FlashAttention, NeurIPS 2022.
    """
    check_rows(indptr, indices, values.shape[0])
    _check_shapes(values, src_score, dst_score, len(indptr) - 1, len(indices), edge_score, edge_bias)
    slope, by_source = float(negative_slope), _of_sources(by_source, len(values), len(indices))
    if device.is_available(values):
        keep = None
        if drop is not None:
            dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
            keep = drop(torch.ones((len(indices), values.shape[1]), dtype=dtype, device=values.device))
        with torch.cuda.device(values.device):
            return device.EdgeAttention.apply(
                values, src_score, dst_score, edge_score, edge_bias, keep, indptr, indices, slope, by_source
            )
    return _in_steps(values, src_score, dst_score, indptr, indices, edge_score, edge_bias, drop, slope, by_source)


def _in_steps(values, src_score, dst_score, indptr, indices, edge_score, edge_bias, drop, slope, by_source) -> Tensor:
    """Compute the attention from sums and softmaxes over edges: the path of the CPU.

    There the one pass was tried and taken back: 1.1 times the seconds of these steps forward, 1.5 with the backward
    (one core, 200,000 edges, 4 heads of 32 channels), since torch's exponential is vectorised and a source's edges lie
    apart in memory.
    """
    if dst_score is not None:
        scores = edge_add(src_score, dst_score, indptr, indices)
    elif by_source is not None:
        scores = take_rows(src_score, indices, by_source.indptr, by_source.edges)
    else:
        scores = src_score.index_select(0, indices)
    if edge_score is not None:
        scores = scores + edge_score
    scores = F.leaky_relu(scores, slope)
    if edge_bias is not None:
        scores = scores + edge_bias.unsqueeze(-1)
    share = edge_softmax(scores, indptr)
    return aggregate(values, indptr, indices, share if drop is None else drop(share))


def _of_sources(by_source: EdgesBySource | None, num_src: int, num_edges: int) -> EdgesBySource | None:
    """Return the groups of the first num_src sources: layers that compute fewer nodes share a block's groups."""
    if by_source is None:
        return None
    if len(by_source.indptr) - 1 < num_src or len(by_source.edges) != num_edges:
        given = (len(by_source.indptr) - 1, len(by_source.edges))
        raise ValueError(f"by_source must be of {num_src} sources or more and of {num_edges} edges, got {given}")
    return by_source._replace(indptr=by_source.indptr[: num_src + 1])


def _check_shapes(values, src_score, dst_score, num_dst, num_edges, edge_score, edge_bias) -> None:
    if values.dim() != 3 or not values.is_floating_point():
        raise ValueError(f"values must be floating, 3-D, got {tuple(values.shape)} {values.dtype}")
    num_src, heads = values.shape[:2]
    wanted = {
        "src_score": (src_score, (num_src, heads)), "dst_score": (dst_score, (num_dst, heads)),
        "edge_score": (edge_score, (num_edges, heads)), "edge_bias": (edge_bias, (num_edges,)),
    }  # fmt: skip
    for name, (given, shape) in wanted.items():
        if given is not None and tuple(given.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(given.shape)}")
