"""The least or largest value over the in-edges of each node: torch-scatter finds it where that is installed.

No kernel of this package does: messages are gathered, and `segment_max_csr` of torch-scatter, or plain torch in several
passes, says which edge of each row is the extreme one. Value and gradient then follow that edge alone.
"""

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from .reference import row_of_edge


@cache
def torch_scatter() -> ModuleType | None:
    """Return the package torch-scatter, or None where it is not installed."""
    if find_spec("torch_scatter") is None:
        return None
    import torch_scatter

    return torch_scatter


def extreme(x: Tensor, indptr: Tensor, indices: Tensor, largest: bool) -> Tensor:
    """Return the largest (or least) x[source] of each row, by head and channel; a row without edges gives 0.

    Args:
        x: (num_src, heads, channels) floating. NaN comes out of a row that holds nothing else.
        indptr, indices: CSC rows, (num_dst + 1,) int64 and (num_edges,) integer.

    Returns:
        (num_dst, heads, channels), differentiable in x: the whole gradient goes to the first edge of a row among
            equals.

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
