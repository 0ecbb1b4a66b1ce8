"""Sums over CSC rows in Triton: one program a row and block of columns, edges source rows under way at a time.

Sums are of float32 (float64 for float64) in an order that the launch alone decides: the same bits every time.
"""

import triton
import triton.language as tl


@triton.jit
def gather_sum_kernel(
    x_ptr, indptr_ptr, indices_ptr, weight_ptr, out_ptr, width, heads, channels,
    WEIGHTED: tl.constexpr, MEAN: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out[row] = sum over the row's edges of weight * x[source], over the number of edges where MEAN.

    x_ptr: (num_src, width), width = heads * channels; weight_ptr: (num_edges, heads), not read unless WEIGHTED.
    """
    total_type: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    start = tl.load(indptr_ptr + row)
    stop = tl.load(indptr_ptr + row + 1)
    total = tl.zeros((EDGES, BLOCK), total_type)
    for first in range(start, stop, EDGES):
        edges = first + tl.arange(0, EDGES)
        there = edges < stop
        source = tl.load(indices_ptr + edges, mask=there, other=0).to(tl.int64)
        mask = there[:, None] & inside[None, :]
        value = tl.load(x_ptr + source[:, None] * width + columns[None, :], mask=mask, other=0.0).to(total_type)
        if WEIGHTED:
            place = edges[:, None] * heads + (columns // channels)[None, :]
            value *= tl.load(weight_ptr + place, mask=mask, other=0.0).to(total_type)
        total += value
    result = tl.sum(total, axis=0)
    if MEAN:
        result = result / tl.maximum(stop - start, 1).to(total_type)
    tl.store(out_ptr + row * width + columns, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def edge_dot_kernel(
    grad_ptr, x_ptr, indptr_ptr, indices_ptr, out_ptr, heads, channels,
    MEAN: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out[edge, head] = dot(grad[row, head], x[source, head]) for the edges of a row, one head a program.

    grad_ptr: (num_rows, heads, channels); over the number of edges of the row where MEAN.
    """
    total_type: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    width = heads * channels
    start = tl.load(indptr_ptr + row)
    stop = tl.load(indptr_ptr + row + 1)
    grad_ptr += row * width + head * channels
    x_ptr += head * channels
    for first in range(start, stop, EDGES):
        edges = first + tl.arange(0, EDGES)
        there = edges < stop
        source = tl.load(indices_ptr + edges, mask=there, other=0).to(tl.int64)
        total = tl.zeros((EDGES, BLOCK), total_type)
        for begin in range(0, channels, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            inside = columns < channels
            grad = tl.load(grad_ptr + columns, mask=inside, other=0.0).to(total_type)
            mask = there[:, None] & inside[None, :]
            value = tl.load(x_ptr + source[:, None] * width + columns[None, :], mask=mask, other=0.0).to(total_type)
            total += value * grad[None, :]
        result = tl.sum(total, axis=1)
        if MEAN:
            result = result / tl.maximum(stop - start, 1).to(total_type)
        tl.store(out_ptr + edges * heads + head, result.to(out_ptr.dtype.element_ty), mask=there)
