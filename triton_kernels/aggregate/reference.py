"""The operations in plain torch: the oracle of the compiled forms, and the path of devices without one.

No kernel of this package finds the least or largest value over the in-edges: messages are gathered, and
`segment_max_csr` of torch-scatter, or plain torch in several passes, says which edge of each row is the extreme one.
"""

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor


def row_of_edge(indptr: Tensor, num_edges: int) -> Tensor:
    """Return (num_edges,) int64: the row that each edge belongs to."""
    rows = torch.arange(len(indptr) - 1, device=indptr.device)
    return torch.repeat_interleave(rows, indptr.diff(), output_size=num_edges)


def aggregate(x: Tensor, indptr: Tensor, indices: Tensor, weight: Tensor | None, mean: bool) -> Tensor:
    """Sum or average weight * x[source] over each row; shapes as in `op.aggregate`, with heads."""
    messages = x.index_select(0, indices)
    if weight is not None:
        messages = messages * weight.unsqueeze(-1)
    out = x.new_zeros((len(indptr) - 1, *x.shape[1:]))
    out = out.index_add(0, row_of_edge(indptr, len(indices)), messages)
    if mean:
        out = out / indptr.diff().clamp(min=1).to(x.dtype).view(-1, 1, 1)
    return out


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


@cache
def torch_scatter() -> ModuleType | None:
    """Return the package torch-scatter, or None where it is not installed."""
    if find_spec("torch_scatter") is None:
        return None
    import torch_scatter

    return torch_scatter


def extreme(x: Tensor, indptr: Tensor, indices: Tensor, largest: bool) -> Tensor:
    """Return the largest (or least) x[source] of each row, by head and channel; a row without edges gives 0.

    x is (num_src, heads, channels), and NaN comes out of a row that holds nothing else. The result is differentiable:
    the whole gradient goes to the first edge of a row among equals.

    Cost: holds the (num_edges, heads, channels) messages while it looks for the edges.
    """
    num_rows, flat = len(indptr) - 1, x.reshape(len(x), -1)
    if len(indices) == 0 or num_rows == 0 or flat.shape[1] == 0:
        return x.new_zeros((num_rows, *x.shape[1:])) + 0 * x.sum()
    messages = flat.detach().index_select(0, indices)
    package = torch_scatter()
    if package is None:
        edge = plain_edges(messages, indptr, largest)
    else:
        find = package.segment_max_csr if largest else package.segment_min_csr
        edge = find(messages, indptr)[1]
    start, stop = indptr[:-1].unsqueeze(1), indptr[1:].unsqueeze(1)
    edge = torch.where((edge >= start) & (edge < stop), edge, start)  # a row of NaN or infinities: its first edge
    source = indices.to(torch.int64)[edge.clamp(max=len(indices) - 1)]
    out = flat.gather(0, source)
    return torch.where(stop > start, out, out.new_zeros(())).view(num_rows, *x.shape[1:])


def plain_edges(messages: Tensor, indptr: Tensor, largest: bool) -> Tensor:
    """Return (num_rows, width) int64: the first edge of each row with the extreme message, or num_edges for none.

    Args:
        messages: (num_edges, width) floating, grouped by row; a NaN is beaten by every number.
    """
    num_rows, num_edges = len(indptr) - 1, len(messages)
    worst = -torch.inf if largest else torch.inf
    messages = messages.nan_to_num(worst, torch.inf, -torch.inf)
    row = row_of_edge(indptr, num_edges).unsqueeze(1).expand_as(messages)
    best = messages.new_full((num_rows, messages.shape[1]), worst)
    best = best.scatter_reduce(0, row, messages, "amax" if largest else "amin")
    place = torch.arange(num_edges, device=messages.device).unsqueeze(1).expand_as(messages)
    place = torch.where(messages == best.gather(0, row), place, num_edges)
    return place.new_full(best.shape, num_edges).scatter_reduce(0, row, place, "amin")
