"""Checked, differentiable entry points; the device of `x` decides which form runs."""

from contextlib import nullcontext
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import cpu, device, reference
from .reference import extreme


class Transposed(NamedTuple):
    """Edges grouped by source: what the gradient of `aggregate` walks along.

    Attributes:
        indptr: (num_src + 1,) int64. indices: (num_edges,) rows that read each source, of the dtype of the ids.
        weight: (num_edges, heads), or (0, heads) where all are 1.
    """

    indptr: Tensor
    indices: Tensor
    weight: Tensor


def transpose(
    indptr: Tensor, indices: Tensor, weight: Tensor | None, num_src: int, reduce: str = "sum", dtype=torch.float32
) -> Transposed:
    """Group edges by their source, once for edges and weights that many backward passes share.

    Args:
        indptr, indices, weight, reduce: As in `aggregate`.
        num_src: Number of sources.
        dtype: Dtype of the values that are summed.

    Cost: O(num_src + num_edges), and as many ids and weights again.
    """
    check_rows(indptr, indices, num_src)
    if weight is not None:
        weight = weight.detach().to(dtype)
        weight = weight.unsqueeze(1) if weight.dim() == 1 else weight
        weight = weight if len(weight) else None
    form = cpu if indptr.device.type == "cpu" else device
    factors, offsets, rows = form.transpose(indptr, indices, weight, reduce == "mean", num_src, dtype)
    return Transposed(offsets, rows, indptr.new_empty((0, 1), dtype=dtype) if factors is None else factors)


def aggregate(
    x: Tensor,
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor | None = None,
    reduce: str = "sum",
    transposed: Transposed | None = None,
) -> Tensor:
    """Sum or average weighted source values over the in-edges of each node; differentiable in x and weight.

    out[v, h, :] = sum over edges e of row v of weight[e, h] * x[indices[e], h, :], divided by the number of edges of
    the row for "mean"; for "min" and "max" the least and the largest x[indices[e], h, c] of each channel, with a
    gradient that goes to the first edge among equals. A row without edges gives 0.

    Args:
        x: (num_src, heads, channels) or (num_src, channels), floating; float16 and bfloat16 are summed in float32.
        indptr: (num_dst + 1,) int64, from 0 to num_edges.
        indices: (num_edges,) int32 or int64 in [0, num_src).
        weight: (num_edges, heads) or (num_edges,) for all heads alike, floating; None = 1. Not for "min" and "max".
        reduce: "sum", "mean", "min" or "max".
        transposed: `transpose` of the same edges and weights, for one head; None: the backward makes it.

    Returns:
        (num_dst, heads, channels) or (num_dst, channels), the dtype of x.

    Raises:
        ValueError: shapes, dtypes or ids that do not fit (ids are checked on the CPU only).

    Cost: reads num_edges * heads * channels values. The gradient of x regroups the edges by source (one int and one
    weight an edge) and reads as much again, without races and in a fixed order; on the CPU the number of threads
    changes no bit of any result. On CUDA Triton kernels run: no message is held in memory. "min" and "max" have no
    kernel: messages are held, and torch-scatter finds the edges where it is installed, plain torch elsewhere.
    """
    check_rows(indptr, indices, x.shape[0])
    if reduce not in ("sum", "mean", "min", "max"):
        raise ValueError(f"reduce must be 'sum', 'mean', 'min' or 'max', got {reduce!r}")
    if x.dim() not in (2, 3) or not x.is_floating_point():
        raise ValueError(f"x must be floating, 2-D or 3-D, got {tuple(x.shape)} {x.dtype}")
    values = x if x.dim() == 3 else x.unsqueeze(1)
    if reduce in ("min", "max"):
        if weight is not None:
            raise ValueError(f"reduce={reduce!r} takes no weight: multiply x by it, or say reduce='sum'")
        return extreme(values, indptr, indices, reduce == "max").view(len(indptr) - 1, *x.shape[1:])
    if weight is not None:
        if weight.shape[0] != len(indices) or (weight.dim() == 2 and weight.shape[1] != values.shape[1]):
            expected = (len(indices), values.shape[1])
            raise ValueError(f"weight must be {expected} or {expected[:1]}, got {tuple(weight.shape)}")
        weight = weight if weight.dim() == 2 else weight.unsqueeze(1)
        weight = weight.to(_working_dtype(x))
    out = _aggregate(values, weight, indptr, indices, reduce == "mean", transposed)
    return out.view(len(indptr) - 1, *x.shape[1:])


def add_edges(
    out: Tensor, x: Tensor, first: int, indptr: Tensor, indices: Tensor, cursor: Tensor, weight: Tensor | None = None
) -> None:
    """Add the edges from some sources, which come in ascending chunks, to the sums of `aggregate`; on the CPU.

    Once every source has come, out equals the result of `aggregate` over all of them bit for bit: a row's edges are
    added in their order.

    Args:
        out: (num_dst, channels) float32 or float64, added to in place.
        x: (num, width) of the dtype of out, width >= channels: sources first to first + num. The first `channels`
            columns are read.
        first: the first source of this chunk; chunks come in ascending order.
        indptr: (num_dst + 1,) int64, from 0 to num_edges.
        indices: (num_edges,) int32 or int64, ascending within a row.
        cursor: (num_dst,) int64, the next edge of each row, indptr[:-1] before the first chunk; moved on in place.
        weight: (num_edges,) of the dtype of out; None = 1.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if x.dtype != out.dtype or x.shape[1] < out.shape[1] or len(out) != len(indptr) - 1 or len(cursor) != len(out):
        raise ValueError(
            f"x must be (num, at least {out.shape[1]}) {out.dtype}, indptr and cursor of {len(out)} rows, got "
            f"{tuple(x.shape)} {x.dtype}, {len(indptr) - 1} and {len(cursor)} rows"
        )
    factors = (out.new_empty(0) if weight is None else weight).numpy()
    rows = indptr.numpy()
    cpu.run_rows(
        cpu.add_edges, rows, out.shape[1],
        x.numpy(), first, rows, indices.numpy(), factors, weight is not None, cursor.numpy(), out.numpy(),
    )  # fmt: skip


def _aggregate(values, weight, indptr, indices, mean, transposed) -> Tensor:
    """Run the form of the device; (num_edges, 1) weights are those of all heads."""
    form, dtype = _form(values), _working_dtype(values)
    if form is device:
        return SegmentSum.apply(form, values, weight, indptr, indices, mean, transposed)
    if weight is not None:
        weight = weight.expand(-1, values.shape[1])
    if form is None:
        return reference.aggregate(values.to(dtype), indptr, indices, weight, mean).to(values.dtype)
    return SegmentSum.apply(form, values.to(dtype), weight, indptr, indices, mean, transposed).to(values.dtype)


def edge_softmax(logits: Tensor, indptr: Tensor, place: Tensor | None = None) -> Tensor:
    """Softmax over the in-edges of each node, head by head; differentiable.

    Args:
        logits: (num_edges, heads) or (num_edges,) floating, grouped by row; -inf gives an edge the share 0.
        indptr: (num_dst + 1,) int64.
        place: (num_edges,) int64, a permutation: where in `logits`, and in what is returned, each edge of the rows is.
            None: they are grouped by row.

    Returns:
        The shape and dtype of logits; each row that has a finite logit sums to 1.

    Raises:
        ValueError: indptr does not end at num_edges.
    """
    check_rows(indptr, logits, None)
    values = (logits if logits.dim() == 2 else logits.unsqueeze(1)).to(_working_dtype(logits))
    form = _form(values)
    if form is not None:
        return EdgeSoftmax.apply(form, values, indptr, place).to(logits.dtype).view(logits.shape)
    values = values if place is None else values.index_select(0, place)
    out = reference.edge_softmax(values, indptr)
    out = out if place is None else torch.empty_like(out).index_copy(0, place, out)
    return out.to(logits.dtype).view(logits.shape)


def edge_add(src_value: Tensor, dst_value: Tensor, indptr: Tensor, indices: Tensor) -> Tensor:
    """Return src_value[indices[e]] + dst_value[v] for each edge e of each row v; differentiable in both.

    Args:
        src_value: (num_src, heads) floating.
        dst_value: (num_dst, heads) floating, the same dtype.
        indptr, indices: CSC rows, as in `aggregate`.

    Returns:
        (num_edges, heads).

    Raises:
        ValueError: shapes or ids that do not fit.
    """
    check_rows(indptr, indices, src_value.shape[0])
    if src_value.shape[1:] != dst_value.shape[1:] or dst_value.shape[0] != len(indptr) - 1:
        expected = (len(indptr) - 1, *src_value.shape[1:])
        raise ValueError(f"dst_value must be {expected}, got {tuple(dst_value.shape)}")
    if src_value.device.type != "cpu":
        return reference.edge_add(src_value, dst_value, indptr, indices)
    dtype = _working_dtype(src_value)
    return _EdgeAdd.apply(src_value.to(dtype), dst_value.to(dtype), indptr, indices).to(src_value.dtype)


def edge_dot(dst_value: Tensor, src_value: Tensor, indptr: Tensor, indices: Tensor) -> Tensor:
    """Return the product of dst_value[v] and src_value[indices[e]] for each edge e of each row v; differentiable.

    Args:
        dst_value: (num_dst, heads, channels) floating.
        src_value: (num_src, heads, channels), the same dtype; sums are in float32, or in float64 where that is given.
        indptr, indices: CSC rows, as in `aggregate`.

    Returns:
        (num_edges, heads) sums over the channels.

    Raises:
        ValueError: shapes or ids that do not fit.

    Cost: reads num_edges * heads * channels values, and twice as many for the gradients; no row is held for an edge.
    """
    check_rows(indptr, indices, src_value.shape[0])
    if src_value.dim() != 3 or dst_value.shape != (len(indptr) - 1, *src_value.shape[1:]):
        expected = (len(indptr) - 1, *src_value.shape[1:])
        raise ValueError(f"dst_value must be {expected}, 3-D as src_value is, got {tuple(dst_value.shape)}")
    dtype = _working_dtype(src_value)
    left, right = dst_value.to(dtype), src_value.to(dtype)
    form = _form(right)
    if form is None:
        out = reference.edge_dot(left, right, indptr, indices)
    else:
        out = _EdgeDot.apply(form, left, right, indptr, indices)
    return out.to(src_value.dtype)


def take_rows(x: Tensor, indices: Tensor, offsets: Tensor, edges: Tensor) -> Tensor:
    """Return x[indices], with a gradient that is summed in a fixed order; differentiable in x.

    Args:
        x: (num_rows, channels) floating.
        indices: (num_edges,) int32 or int64 in [0, num_rows).
        offsets, edges: (num_rows + 1,) int64, or more, and (num_edges,): positions in `indices`, grouped by the row
            that they name.

    Returns:
        (num_edges, channels).
    """
    if len(offsets) <= len(x) or len(edges) != len(indices):
        given = (len(offsets) - 1, len(edges))
        raise ValueError(f"groups must be of {len(x)} rows or more and of {len(indices)} edges, got {given}")
    return _TakeRows.apply(x, indices, offsets[: len(x) + 1], edges)


class _TakeRows(Function):
    @staticmethod
    def forward(ctx, x, indices, offsets, edges):
        ctx.save_for_backward(offsets, edges)
        return x.index_select(0, indices)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        offsets, edges = ctx.saved_tensors
        return _aggregate(grad.unsqueeze(1), None, offsets, edges, False, None).squeeze(1), None, None, None


class _EdgeDot(Function):
    @staticmethod
    def forward(ctx, form, dst_value, src_value, indptr, indices):
        dst_value, src_value = dst_value.contiguous(), src_value.contiguous()
        ctx.save_for_backward(dst_value, src_value, indptr, indices)
        out = src_value.new_empty((len(indices), src_value.shape[1]))
        with _on(out):
            form.edge_dot(dst_value, src_value, indptr, indices.contiguous(), False, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        dst_value, src_value, indptr, indices = ctx.saved_tensors
        with torch.enable_grad():  # both are sums of `aggregate`: of the sources by row, and of the rows by source
            right = src_value.detach().requires_grad_(ctx.needs_input_grad[2])
            summed = _aggregate(right, grad.contiguous(), indptr, indices, False, None)
        src_grad = torch.autograd.grad(summed, right, dst_value)[0] if ctx.needs_input_grad[2] else None
        return None, summed.detach(), src_grad, None, None


class SegmentSum(Function):
    """Weighted sums or means over rows by the kernels of `form`, the module `cpu` or `device`."""

    @staticmethod
    def forward(ctx, form, x, weight, indptr, indices, mean, transposed):
        x, indptr, indices = x.contiguous(), indptr.contiguous(), indices.contiguous()
        weight = None if weight is None else weight.contiguous()
        needs_weight_grad = weight is not None and ctx.needs_input_grad[2]
        ctx.save_for_backward(x if needs_weight_grad else None, weight, indptr, indices)
        ctx.form, ctx.mean, ctx.num_src, ctx.transposed = form, mean, x.shape[0], transposed
        with _on(x):
            return form.gather_sum(x, weight, indptr, indices, mean)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, indptr, indices = ctx.saved_tensors
        grad, form, x_grad, weight_grad = grad.contiguous(), ctx.form, None, None
        if ctx.needs_input_grad[1]:
            if ctx.transposed is None:
                by_source = form.transpose(indptr, indices, weight, ctx.mean, ctx.num_src, grad.dtype)
            else:
                offsets, rows, factors = ctx.transposed
                by_source = factors if len(factors) else None, offsets, rows
            x_grad = form.gather_sum(grad, *by_source, False)
        if ctx.needs_input_grad[2]:
            weight_grad = torch.empty_like(weight)
            form.edge_dot(grad, x, indptr, indices, ctx.mean, weight_grad)
        return None, x_grad, weight_grad, None, None, None, None


class EdgeSoftmax(Function):
    """Softmax over rows by the kernels of `form`; the shares are held for the backward, not the logits."""

    @staticmethod
    def forward(ctx, form, logits, indptr, place):
        indptr = indptr.contiguous()
        with _on(logits):
            shares = form.softmax(logits.contiguous(), None, indptr, place)
        ctx.save_for_backward(shares, indptr, place)
        ctx.form = form
        return shares

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        shares, indptr, place = ctx.saved_tensors
        return None, ctx.form.softmax(shares, grad.contiguous(), indptr, place), None, None


class _EdgeAdd(Function):
    @staticmethod
    def forward(ctx, src_value, dst_value, indptr, indices):
        ctx.save_for_backward(indptr, indices)
        ctx.num_src, rows = src_value.shape[0], indptr.numpy()
        out = src_value.new_empty((len(indices), src_value.shape[1]))
        src, dst = src_value.detach().contiguous().numpy(), dst_value.detach().contiguous().numpy()
        cpu.run_rows(cpu.add_ends, rows, out.shape[1], src, dst, rows, indices.numpy(), out.numpy())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        indptr, indices = ctx.saved_tensors
        src_grad = grad.new_zeros((ctx.num_src, grad.shape[1]))
        dst_grad = grad.new_zeros((len(indptr) - 1, grad.shape[1]))
        cpu.sum_to_ends(grad.contiguous().numpy(), indptr.numpy(), indices.numpy(), src_grad.numpy(), dst_grad.numpy())
        return src_grad, dst_grad, None, None


def _form(values: Tensor) -> ModuleType | None:
    """Return the module whose kernels take these values; None: plain torch does."""
    if values.device.type == "cpu":
        return cpu
    return device if device.is_available(values) else None


def _on(values: Tensor):
    """Return a context in which kernels are launched on the device of the values."""
    return torch.cuda.device(values.device) if values.is_cuda else nullcontext()


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_rows(indptr: Tensor, edges: Tensor, num_src: int | None) -> None:
    """Refuse pointers or ids that would read outside their arrays; on the CPU only, as a device would have to wait."""
    if indptr.dim() != 1 or len(indptr) == 0 or indptr.dtype != torch.int64:
        raise ValueError(f"indptr must be 1-D int64 with at least one entry, got {tuple(indptr.shape)} {indptr.dtype}")
    if indptr.device.type != "cpu":
        return
    num_edges = edges.shape[0]
    if int(indptr[0]) != 0 or int(indptr[-1]) != num_edges or bool((indptr.diff() < 0).any()):
        raise ValueError(f"indptr must rise from 0 to num_edges {num_edges}, got {int(indptr[0])} to {int(indptr[-1])}")
    if num_src is None or num_edges == 0:
        return
    if edges.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"indices must be int32 or int64, got {edges.dtype}")
    least, most = (int(value) for value in torch.aminmax(edges))
    if least < 0 or most >= num_src:
        raise ValueError(f"indices must be in [0, {num_src}), got {least} to {most}")
