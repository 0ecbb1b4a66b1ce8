"""Compiled loops over CSC rows, and the threads among which rows are divided.

Each row is computed by one thread, in the order of its edges: the number of threads changes no bit. The threads are
Python's (`nogil` kernels), because numba's own parallel loops must not be entered from several Python threads.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ...jit import kernel
from ..intrinsics import LINE_BYTES, prefetch, prefetch_line

AHEAD = 8  # edges whose source rows are prefetched; 4 to 16 measured alike, none costs 25% to 50%
MIN_WORK = 1 << 17  # values a thread must have to be worth waking (about 50 microseconds)

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def run_rows(function, indptr: np.ndarray, width: int, *args) -> None:
    """Call `function(*args, first_row, last_row)` on slices of the rows, side by side.

    Args:
        function: a `nogil` kernel that writes only what belongs to rows [first_row, last_row).
        indptr: (num_rows + 1,) int64; slices hold about equal numbers of edges.
        width: values that one edge touches, to judge whether threads pay.
    """
    num_rows = len(indptr) - 1
    work = (int(indptr[-1]) + num_rows) * width
    num_threads = max(1, min(torch.get_num_threads(), work // MIN_WORK, num_rows))
    if num_threads == 1:
        function(*args, 0, num_rows)
        return
    cuts = np.searchsorted(indptr, np.arange(1, num_threads) * (int(indptr[-1]) / num_threads))
    bounds = [0, *cuts.tolist(), num_rows]
    pool = threads(num_threads - 1)
    waiting = [pool.submit(function, *args, bounds[i], bounds[i + 1]) for i in range(1, num_threads)]
    function(*args, bounds[0], bounds[1])
    for future in waiting:
        future.result()


def threads(num_workers: int) -> ThreadPoolExecutor:
    """Return this process's pool; a forked child has its parent's pools but not their threads, hence the pid."""
    key = (os.getpid(), num_workers)
    if key not in _pools:
        _pools.setdefault(key, ThreadPoolExecutor(num_workers, thread_name_prefix="aggregate"))
    return _pools[key]


def gather_sum(x: Tensor, weight: Tensor | None, indptr: Tensor, indices: Tensor, mean: bool) -> Tensor:
    """Return the sums over rows, (num_rows, heads, channels); see `device.gather_sum`."""
    rows, out = indptr.numpy(), x.new_empty((len(indptr) - 1, *x.shape[1:]))
    factors, weighted = _factors(weight, x), weight is not None
    values = x.detach().numpy(), rows, indices.numpy(), factors, weighted, mean, out.numpy()
    run_rows(gather_sum_kernel, rows, out[:1].numel(), *values)
    return out


def edge_dot(grad: Tensor, x: Tensor, indptr: Tensor, indices: Tensor, mean: bool, out: Tensor) -> None:
    """Write the products of each row's gradient with its sources' values; see `device.edge_dot`."""
    rows, values = indptr.numpy(), (grad.detach().numpy(), x.detach().numpy())
    run_rows(edge_dot_kernel, rows, x[:1].numel(), *values, rows, indices.numpy(), mean, out.numpy())


def transpose(
    indptr: Tensor, indices: Tensor, weight: Tensor | None, mean: bool, num_src: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Group edges by source; see `device.transpose`."""
    factors = _factors(weight, torch.empty((0, 1 if weight is None else weight.shape[1], 0), dtype=dtype))
    arrays = transpose_kernel(indptr.numpy(), indices.numpy(), factors, weight is not None, mean, num_src)
    offsets, rows, factors = (torch.from_numpy(array) for array in arrays)
    return factors if weight is not None or mean else None, offsets, rows


def softmax(values: Tensor, grad: Tensor | None, indptr: Tensor, place: Tensor | None) -> Tensor:
    """Return the softmax over rows, or with a `grad` its gradient; see `device.softmax`."""
    values, grad = (part if part is None or place is None else part.index_select(0, place) for part in (values, grad))
    out, rows, heads = torch.empty_like(values), indptr.numpy(), values.shape[1]
    if grad is None:
        run_rows(subtract_row_max, rows, heads, values.detach().numpy(), rows, out.numpy())
        out.exp_()
        run_rows(divide_by_row_sum, rows, heads, out.numpy(), rows)
    else:
        run_rows(softmax_gradient, rows, heads, grad.numpy(), values.numpy(), rows, out.numpy())
    return out if place is None else torch.empty_like(out).index_copy(0, place, out)


def _factors(weight: Tensor | None, x: Tensor) -> np.ndarray:
    """Return (num_edges, heads) weights as an array, or an empty one of the right type where there are none."""
    if weight is None:
        return x.new_empty((0, x.shape[1])).numpy()
    return weight.detach().expand(-1, x.shape[1]).contiguous().numpy()


@kernel(error_model="numpy", fastmath={"contract"})
def gather_sum_kernel(x, indptr, indices, weight, weighted, mean, out, first_row, last_row):
    """Write out[v, h] = sum of weight[e, h] * x[indices[e], h] over row v (mean: over its number of edges).

    Args:
        x: (num_src, heads, channels) contiguous; weight: (num_edges, heads), not read unless `weighted`.
        out: (num_rows, heads, channels), rows [first_row, last_row) are overwritten.
    """
    heads, channels = x.shape[1], x.shape[2]
    width = heads * channels
    flat = x.reshape(-1)
    line = LINE_BYTES // x.itemsize
    end = indptr[last_row]
    for v in range(first_row, last_row):
        start, stop = indptr[v], indptr[v + 1]
        row = out[v]
        row[:, :] = 0
        for e in range(start, stop):
            if e + AHEAD < end:
                ahead = np.int64(indices[e + AHEAD]) * width
                for c in range(0, width, line):
                    prefetch(flat, ahead + c)
            source = np.uint64(indices[e])
            for h in range(heads):
                values, total = x[source, h], row[h]
                if weighted:
                    factor = weight[e, h]
                    for c in range(channels):
                        total[c] += factor * values[c]
                else:
                    for c in range(channels):
                        total[c] += values[c]
        if mean and stop - start > 1:
            share = x.dtype.type(1) / x.dtype.type(stop - start)
            for h in range(heads):
                for c in range(channels):
                    row[h, c] *= share


@kernel(error_model="numpy", fastmath={"contract"})
def add_edges(x, first, indptr, indices, weight, weighted, cursor, out, first_row, last_row):
    """Add weight[e] * x[indices[e] - first] to out[v] for the next edges of row v whose source is among x.

    Args:
        x: (num, width) contiguous, sources first to first + num; their first out.shape[1] columns are read.
        indices: ascending within a row. weight: (num_edges,), not read unless `weighted`.
        cursor: (num_rows,) int64, the next edge of each row; moved on.
        out: (num_rows, channels), added to in rows [first_row, last_row).
    """
    channels, width, last = out.shape[1], x.shape[1], first + len(x)
    flat = x.reshape(-1)
    line = LINE_BYTES // x.itemsize
    end = indptr[last_row]
    for v in range(first_row, last_row):
        e, stop, total = cursor[v], indptr[v + 1], out[v]
        while e < stop and indices[e] < last:
            if e + AHEAD < end:
                source = np.int64(indices[e + AHEAD]) - first
                if 0 <= source < len(x):
                    for c in range(0, channels, line):
                        prefetch(flat, source * width + c)
            values = x[np.uint64(indices[e] - first)]
            if weighted:
                factor = weight[e]
                for c in range(channels):
                    total[c] += factor * values[c]
            else:
                for c in range(channels):
                    total[c] += values[c]
            e += 1
        cursor[v] = e


@kernel(error_model="numpy")
def transpose_kernel(indptr, indices, weight, weighted, mean, num_src):
    """Group the edges by source, in the order of their rows, with the weight that a gradient takes back along each.

    Returns:
        (num_src + 1,) int64 offsets; (num_edges,) rows; (num_edges, heads) weights (no rows where all would be 1).
    """
    offsets = np.zeros(num_src + 1, np.int64)
    for e in range(len(indices)):
        offsets[indices[e] + 1] += 1
    for s in range(num_src):
        offsets[s + 1] += offsets[s]
    cursor = np.empty(num_src, np.int64)
    for s in range(num_src):
        cursor[s] = offsets[s]
    rows = np.empty(len(indices), indices.dtype)
    heads = weight.shape[1]
    weights = np.empty((len(indices) if weighted or mean else 0, heads), weight.dtype)
    for v in range(len(indptr) - 1):
        share = weight.dtype.type(1)
        if mean:
            share = weight.dtype.type(1) / weight.dtype.type(max(1, indptr[v + 1] - indptr[v]))
        for e in range(indptr[v], indptr[v + 1]):
            position = cursor[indices[e]]
            cursor[indices[e]] += 1
            rows[position] = v
            if weighted:
                for h in range(heads):
                    weights[position, h] = weight[e, h] * share
            elif mean:
                for h in range(heads):
                    weights[position, h] = share
    return offsets, rows, weights


@kernel(error_model="numpy", fastmath={"contract", "reassoc"})
def edge_dot_kernel(grad, x, indptr, indices, mean, out, first_row, last_row):
    """Write out[e, h] = dot(grad[v, h], x[indices[e], h]) for the edges of row v: the gradient of the weights."""
    heads, channels = x.shape[1], x.shape[2]
    width = heads * channels
    flat = x.reshape(-1)
    line = LINE_BYTES // x.itemsize
    end = indptr[last_row]
    for v in range(first_row, last_row):
        share = x.dtype.type(1)
        if mean:
            share = x.dtype.type(1) / x.dtype.type(max(1, indptr[v + 1] - indptr[v]))
        for e in range(indptr[v], indptr[v + 1]):
            if e + AHEAD < end:
                ahead = np.int64(indices[e + AHEAD]) * width
                for c in range(0, width, line):
                    prefetch(flat, ahead + c)
            source = np.uint64(indices[e])
            for h in range(heads):
                left, right = grad[v, h], x[source, h]
                total = x.dtype.type(0)
                for c in range(channels):
                    total += left[c] * right[c]
                out[e, h] = total * share


@kernel(error_model="numpy")
def subtract_row_max(logits, indptr, out, first_row, last_row):
    """Write logits less the largest of their row and head; a row of -inf alone stays -inf."""
    for v in range(first_row, last_row):
        for h in range(logits.shape[1]):
            top = logits.dtype.type(-np.inf)
            for e in range(indptr[v], indptr[v + 1]):
                top = max(top, logits[e, h])
            if top == -np.inf:
                top = logits.dtype.type(0)
            for e in range(indptr[v], indptr[v + 1]):
                out[e, h] = logits[e, h] - top


@kernel(error_model="numpy")
def divide_by_row_sum(powers, indptr, first_row, last_row):
    """Divide powers, in place, by the sum of their row and head; a sum of 0 leaves them."""
    for v in range(first_row, last_row):
        for h in range(powers.shape[1]):
            total = powers.dtype.type(0)
            for e in range(indptr[v], indptr[v + 1]):
                total += powers[e, h]
            if total > 0:
                for e in range(indptr[v], indptr[v + 1]):
                    powers[e, h] /= total


@kernel(error_model="numpy")
def softmax_gradient(grad, probability, indptr, out, first_row, last_row):
    """Write probability * (grad - sum over the row of probability * grad)."""
    for v in range(first_row, last_row):
        for h in range(grad.shape[1]):
            total = grad.dtype.type(0)
            for e in range(indptr[v], indptr[v + 1]):
                total += probability[e, h] * grad[e, h]
            for e in range(indptr[v], indptr[v + 1]):
                out[e, h] = probability[e, h] * (grad[e, h] - total)


@kernel(error_model="numpy")
def add_ends(src_value, dst_value, indptr, indices, out, first_row, last_row):
    """Write out[e, h] = src_value[indices[e], h] + dst_value[v, h] for the edges of row v."""
    for v in range(first_row, last_row):
        for e in range(indptr[v], indptr[v + 1]):
            for h in range(out.shape[1]):
                out[e, h] = src_value[np.uint64(indices[e]), h] + dst_value[v, h]


@kernel(error_model="numpy")
def sum_to_ends(grad, indptr, indices, src_grad, dst_grad):
    """Add grad[e] to src_grad[indices[e]] and to dst_grad[v], edge after edge (one thread: sources repeat)."""
    for v in range(len(indptr) - 1):
        for e in range(indptr[v], indptr[v + 1]):
            source = np.uint64(indices[e])
            for h in range(grad.shape[1]):
                src_grad[source, h] += grad[e, h]
                dst_grad[v, h] += grad[e, h]


def add_placed_edges(
    out: Tensor,
    x: Tensor,
    rows: np.ndarray,
    local: np.ndarray,
    position: np.ndarray,
    factor: np.ndarray | None = None,
    weight: np.ndarray | None = None,
    num_threads: int | None = None,
) -> None:
    """Add factor[row] * weight * x[source] to out[row] for some edges, in the order given; on the CPU.

    Args:
        out: (num_dst, channels) float32 or float64, contiguous, added to in place.
        x: (num, channels) of the dtype of out, contiguous.
        rows: (num_edges,) int32 rows of out, ascending.
        local: (num_edges,) integers, entries of `position`.
        position: (chunk_nodes,) int32, the row of x of each source.
        factor: (num_dst,) of the dtype of out; None = 1.
        weight: (num_edges,) of the dtype of out; None = 1.
        num_threads: threads at most; None: as torch has them.

    Raises:
        ValueError: dtypes or shapes that do not fit.

    Each row is added by one thread, in the order of its edges: the number of threads changes no bit.
    """
    if x.dtype != out.dtype or x.shape[1] != out.shape[1] or not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError(
            f"x must be (num, {out.shape[1]}) {out.dtype}, contiguous as out, got {tuple(x.shape)} {x.dtype}"
        )
    none = np.empty(0, out.numpy().dtype)
    factor, weight = (none if given is None else given for given in (factor, weight))
    values = x.numpy(), rows, local, position, factor, weight, out.numpy()
    num_threads = max(1, min(num_threads or torch.get_num_threads(), len(rows) * x.shape[1] // MIN_WORK))
    bounds = _bounds(rows, num_threads)
    pool = threads(num_threads - 1) if num_threads > 1 else None
    waiting = [pool.submit(_add_edges, *values, bounds[i], bounds[i + 1]) for i in range(1, num_threads)]
    _add_edges(*values, bounds[0], bounds[1])
    for future in waiting:
        future.result()


def _bounds(rows: np.ndarray, num_threads: int) -> list[int]:
    """Return the edges at which threads begin: a row's edges are one thread's."""
    cuts = [0]
    for i in range(1, num_threads):
        row = rows[len(rows) * i // num_threads]
        cuts.append(max(cuts[-1], int(np.searchsorted(rows, row))))
    return [*cuts, len(rows)]


@kernel(error_model="numpy")
def _add_edges(x, rows, local, position, factor, weight, out, first, last):
    channels = out.shape[1]
    flat, sums = x.reshape(-1), out.reshape(-1)
    line = LINE_BYTES // x.itemsize
    one = x.dtype.type(1)
    for e in range(first, last):
        if e + AHEAD < last:
            source, target = np.int64(position[local[e + AHEAD]]) * channels, np.int64(rows[e + AHEAD]) * channels
            if len(factor):
                prefetch(factor, np.int64(rows[e + AHEAD]))
            for c in range(0, channels, line):
                prefetch_line(flat, source + c)
                prefetch_line(sums, target + c)  # few edges of a chunk share a row: sums come from memory
        row = rows[e]
        share = factor[row] if len(factor) else one
        if len(weight):
            share *= weight[e]
        values, total = x[np.uint64(position[local[e]])], out[np.uint64(row)]
        for c in range(channels):
            total[c] += share * values[c]
