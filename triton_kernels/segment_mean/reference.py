"""Sums over rows and their gradients in plain torch: the oracle of the kernels. Messages are held in memory."""

from torch import Tensor

from ..aggregate.reference import aggregate, row_of_arc


def segment_mean(x: Tensor, indptr: Tensor, indices: Tensor) -> Tensor:
    """Average x over the arcs of each row; arguments as for `op.segment_mean`, x of any number of dimensions."""
    values = x.reshape(x.shape[0], 1, -1)
    return aggregate(values, indptr, indices, None, True).view(len(indptr) - 1, *x.shape[1:])


def x_gradient(
    grad: Tensor, indptr: Tensor, indices: Tensor, weight: Tensor | None, mean: bool, num_src: int
) -> Tensor:
    """Return the gradient of x, (num_src, heads, channels): what each row's gradient gives back along its arcs.

    Args:
        grad: (num_dst, heads, channels).
        indptr, indices, weight, mean: as in `aggregate`.
    """
    messages = share_of_rows(grad, indptr, mean).index_select(0, row_of_arc(indptr, len(indices)))
    if weight is not None:
        messages = messages * weight.unsqueeze(-1)
    return grad.new_zeros((num_src, *grad.shape[1:])).index_add(0, indices, messages)


def weight_gradient(grad: Tensor, x: Tensor, indptr: Tensor, indices: Tensor, mean: bool) -> Tensor:
    """Return the gradient of the weights, (num_arcs, heads): products of a row's gradient with the source's value."""
    rows = share_of_rows(grad, indptr, mean).index_select(0, row_of_arc(indptr, len(indices)))
    return (rows * x.index_select(0, indices)).sum(dim=-1)


def share_of_rows(grad: Tensor, indptr: Tensor, mean: bool) -> Tensor:
    """Return (num_dst, ...) gradients of sums: those of means are divided by the arcs of their row."""
    if not mean:
        return grad
    return grad / indptr.diff().clamp(min=1).to(grad.dtype).view(-1, 1, 1)
