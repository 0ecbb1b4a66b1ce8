"""Attention over edges in plain torch: the oracle of the compiled forms, and the path of devices without one."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..aggregate import reference


def edge_attention(
    values: Tensor,
    src_score: Tensor,
    dst_score: Tensor | None,
    indptr: Tensor,
    indices: Tensor,
    edge_score: Tensor | None,
    edge_bias: Tensor | None,
    keep: Tensor | None,
    negative_slope: float,
) -> Tensor:
    """Return (num_dst, heads, channels); arguments as for `op.edge_attention`. Holds the messages."""
    if dst_score is None:
        scores = src_score.index_select(0, indices)
    else:
        scores = reference.edge_add(src_score, dst_score, indptr, indices)
    if edge_score is not None:
        scores = scores + edge_score
    scores = F.leaky_relu(scores, negative_slope)
    if edge_bias is not None:
        scores = scores + edge_bias.unsqueeze(-1)
    share = reference.edge_softmax(scores, indptr)
    return reference.aggregate(values, indptr, indices, share if keep is None else share * keep, False)


def group_by_source(indptr: Tensor, indices: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets, rows and edges of `op.EdgesBySource`."""
    edges = torch.argsort(indices, stable=True)
    counts = torch.bincount(indices, minlength=num_src)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return offsets, reference.row_of_edge(indptr, len(indices)).index_select(0, edges).to(indices.dtype), edges
