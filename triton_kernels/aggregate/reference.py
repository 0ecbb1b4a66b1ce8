"""The operations in plain torch: the oracle of the compiled forms, and the path of devices without one."""

import torch
from torch import Tensor


def row_of_edge(indptr: Tensor, num_edges: int) -> Tensor:
    """Return (num_edges,) int64: the row that each edge belongs to."""
    rows = torch.arange(len(indptr) - 1, device=indptr.device)
    return torch.repeat_interleave(rows, indptr.diff(), output_size=num_edges)


def aggregate(x: Tensor, indptr: Tensor, indices: Tensor, weight: Tensor | None, mean: bool) -> Tensor:
    """Sum or average weight * x[source] over each row.

    Args:
        x: (num_src, heads, channels) floating.
        indptr, indices: CSC rows, (num_dst + 1,) int64 and (num_edges,) integer.
        weight: (num_edges, heads) or None.
        mean: divide each row by its number of edges.

    Returns:
        (num_dst, heads, channels), the dtype of x.
    """
    messages = x.index_select(0, indices)
    if weight is not None:
        messages = messages * weight.unsqueeze(-1)
    out = x.new_zeros((len(indptr) - 1, *x.shape[1:]))
    out = out.index_add(0, row_of_edge(indptr, len(indices)), messages)
    if mean:
        out = out / indptr.diff().clamp(min=1).to(x.dtype).view(-1, 1, 1)
    return out


def x_gradient(
    grad: Tensor, indptr: Tensor, indices: Tensor, weight: Tensor | None, mean: bool, num_src: int
) -> Tensor:
    """Return the gradient of x, (num_src, heads, channels): what each row's gradient gives back along its edges.

    Args:
        grad: (num_dst, heads, channels).
        indptr, indices, weight, mean: as in `aggregate`.
    """
    messages = share_of_rows(grad, indptr, mean).index_select(0, row_of_edge(indptr, len(indices)))
    if weight is not None:
        messages = messages * weight.unsqueeze(-1)
    return grad.new_zeros((num_src, *grad.shape[1:])).index_add(0, indices, messages)


def weight_gradient(grad: Tensor, x: Tensor, indptr: Tensor, indices: Tensor, mean: bool) -> Tensor:
    """Return the gradient of the weights, (num_edges, heads): products of a row's gradient with the source's value."""
    rows = share_of_rows(grad, indptr, mean).index_select(0, row_of_edge(indptr, len(indices)))
    return (rows * x.index_select(0, indices)).sum(dim=-1)


def share_of_rows(grad: Tensor, indptr: Tensor, mean: bool) -> Tensor:
    """Return (num_dst, ...) gradients of sums: those of means are divided by the edges of their row."""
    if not mean:
        return grad
    return grad / indptr.diff().clamp(min=1).to(grad.dtype).view(-1, 1, 1)


def edge_softmax(logits: Tensor, indptr: Tensor) -> Tensor:
    """Softmax of (num_edges, heads) logits over the edges of each row."""
    num_rows, row = len(indptr) - 1, row_of_edge(indptr, len(logits))
    index = row.unsqueeze(-1).expand_as(logits)
    top = logits.detach().new_full((num_rows, logits.shape[1]), -torch.inf)
    top = top.scatter_reduce(0, index, logits.detach(), "amax", include_self=False)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    powers = (logits - top.index_select(0, row)).exp()
    total = logits.new_zeros((num_rows, logits.shape[1])).index_add(0, row, powers)
    return powers / torch.where(total > 0, total, torch.ones_like(total)).index_select(0, row)


def edge_add(src_value: Tensor, dst_value: Tensor, indptr: Tensor, indices: Tensor) -> Tensor:
    """Return src_value[source] + dst_value[row] for each edge, (num_edges, heads)."""
    return src_value.index_select(0, indices) + dst_value.index_select(0, row_of_edge(indptr, len(indices)))


def edge_dot(dst_value: Tensor, src_value: Tensor, indptr: Tensor, indices: Tensor) -> Tensor:
    """Return the (num_edges, heads) products of each row's (heads, channels) value with its sources' values."""
    rows = dst_value.index_select(0, row_of_edge(indptr, len(indices)))
    return (rows * src_value.index_select(0, indices)).sum(dim=-1)


def add_placed_edges(
    out: Tensor, x: Tensor, rows: Tensor, sources: Tensor, factor: Tensor | None = None, weight: Tensor | None = None
) -> Tensor:
    """Return out with factor[row] * weight * x[source] added to its rows, edge after edge.

    Args:
        out: (num_dst, channels).
        x: (num, channels).
        rows, sources: (num_edges,) int64, a row of out and one of x.
        factor: (num_dst,) or None.
        weight: (num_edges,) or None.
    """
    shares = out.new_ones(len(rows)) if factor is None else factor[rows]
    shares = shares if weight is None else shares * weight
    return out.index_add(0, rows, shares.unsqueeze(1) * x[sources])
