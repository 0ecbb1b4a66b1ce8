"""Sums over CSC rows in Triton: one program a row and block of columns, edges source rows under way at a time.

A row of more than LIMIT edges, a hub, would keep one program busy long after the others: its edges are shared out in
chunks of LIMIT, counted from the first edge of all. A chunk meets two hubs at most, one at either end.

Sums are of float32 (float64 for float64) in an order that the edges alone decide: the same bits every time.
"""

import triton
import triton.language as tl


@triton.jit
def row_of(indptr_ptr, num_rows, edge):
    """Return the row of an edge: the last one that begins at or before it, and is not empty."""
    low, high = edge * 0, edge * 0 + num_rows
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(indptr_ptr + middle) <= edge
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def chunk_of_hub(indptr_ptr, num_rows, num_edges, chunk, side, LIMIT: tl.constexpr):
    """Return the row of the hub at the begin (side 0) or the end of a chunk, and its edges there; none: start = stop.

    The hub at the end is that at the begin where it began before the chunk.
    """
    begin = chunk * LIMIT
    end = tl.minimum(begin + LIMIT, num_edges)
    row = row_of(indptr_ptr, num_rows, tl.where(side == 0, begin, end - 1))
    start = tl.load(indptr_ptr + row)
    stop = tl.load(indptr_ptr + row + 1)
    ours = (stop - start > LIMIT) & ((side == 0) | (start > begin))
    start = tl.maximum(start, begin)
    return row, start, tl.where(ours, tl.minimum(stop, end), start)


@triton.jit
def _sum_edges(
    x_ptr, indices_ptr, weight_ptr, start, stop, columns, width, heads, channels, total_type: tl.constexpr,
    INDEXED: tl.constexpr, WEIGHTED: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the (BLOCK,) sums over edges start to stop of weight * x[source]; not INDEXED: of weight * x[edge]."""
    inside = columns < width
    total = tl.zeros((EDGES, BLOCK), total_type)
    for first in range(start, stop, EDGES):
        edges = first + tl.arange(0, EDGES)
        there = edges < stop
        source = edges.to(tl.int64)
        if INDEXED:
            source = tl.load(indices_ptr + edges, mask=there, other=0).to(tl.int64)
        mask = there[:, None] & inside[None, :]
        value = tl.load(x_ptr + source[:, None] * width + columns[None, :], mask=mask, other=0.0).to(total_type)
        if WEIGHTED:
            place = edges[:, None] * heads + (columns // channels)[None, :]
            value *= tl.load(weight_ptr + place, mask=mask, other=0.0).to(total_type)
        total += value
    return tl.sum(total, axis=0)


@triton.jit
def sum_hubs_kernel(
    x_ptr, indptr_ptr, indices_ptr, weight_ptr, partial_ptr, num_rows, num_edges, width, heads, channels,
    INDEXED: tl.constexpr, WEIGHTED: tl.constexpr, LIMIT: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sums of a chunk's edges of the hub at its begin (side 0) or at its end (side 1), if there is one.

    partial_ptr: (num_chunks, 2, width) float32 or float64; what belongs to no hub is left as it is.
    """
    chunk = tl.program_id(0).to(tl.int64)
    side = tl.program_id(2)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = chunk * LIMIT
    end = tl.minimum(begin + LIMIT, num_edges)
    row = row_of(indptr_ptr, num_rows, tl.where(side == 0, begin, end - 1))
    start = tl.load(indptr_ptr + row)
    stop = tl.load(indptr_ptr + row + 1)
    # The hub at the end is that at the begin where it began before the chunk.
    if (stop - start > LIMIT) & ((side == 0) | (start > begin)):
        result = _sum_edges(
            x_ptr, indices_ptr, weight_ptr, tl.maximum(start, begin), tl.minimum(stop, end), columns, width, heads,
            channels, partial_ptr.dtype.element_ty, INDEXED, WEIGHTED, EDGES, BLOCK,
        )  # fmt: skip
        tl.store(partial_ptr + (chunk * 2 + side) * width + columns, result, mask=columns < width)


@triton.jit
def gather_sum_kernel(
    x_ptr, indptr_ptr, indices_ptr, weight_ptr, partial_ptr, out_ptr, width, heads, channels,
    INDEXED: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, LIMIT: tl.constexpr, EDGES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out[row] = sum over the row's edges of weight * x[source], over the number of edges where MEAN.

    x_ptr: (num_src, width), width = heads * channels, or not INDEXED (num_edges, width): the values of the edges;
    weight_ptr: (num_edges, heads), not read unless WEIGHTED;
    partial_ptr: what `sum_hubs_kernel` has written, read for hubs.
    """
    total_type: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    start = tl.load(indptr_ptr + row)
    stop = tl.load(indptr_ptr + row + 1)
    if stop - start > LIMIT:
        result = tl.zeros((BLOCK,), total_type)
        for chunk in range(start // LIMIT, (stop - 1) // LIMIT + 1):
            side = tl.where(chunk * LIMIT < start, 1, 0)
            result += tl.load(partial_ptr + (chunk * 2 + side) * width + columns, mask=inside, other=0.0)
    else:
        result = _sum_edges(
            x_ptr, indices_ptr, weight_ptr, start, stop, columns, width, heads, channels, total_type,
            INDEXED, WEIGHTED, EDGES, BLOCK,
        )  # fmt: skip
    if MEAN:
        result = result / tl.maximum(stop - start, 1).to(total_type)
    tl.store(out_ptr + row * width + columns, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def edge_dot_kernel(
    grad_ptr, x_ptr, indptr_ptr, indices_ptr, out_ptr, num_rows, num_edges, heads, channels,
    MEAN: tl.constexpr, HUBS: tl.constexpr, LIMIT: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out[edge, head] = dot(grad[row, head], x[source, head]), one head a program.

    Of the edges of one row that is no hub; HUBS: of a chunk's edges of the hub at its begin or its end. grad_ptr:
    (num_rows, heads, channels); over the number of edges of the row where MEAN.
    """
    total_type: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    head = tl.program_id(1)
    width = heads * channels
    row = tl.program_id(0).to(tl.int64)
    if HUBS:
        side = tl.program_id(2)
        begin = row * LIMIT
        end = tl.minimum(begin + LIMIT, num_edges)
        row = row_of(indptr_ptr, num_rows, tl.where(side == 0, begin, end - 1))
        start = tl.load(indptr_ptr + row)
        stop = tl.load(indptr_ptr + row + 1)
        count = stop - start
        ours = (count > LIMIT) & ((side == 0) | (start > begin))
        start = tl.maximum(start, begin)
        stop = tl.where(ours, tl.minimum(stop, end), start)
    else:
        start = tl.load(indptr_ptr + row)
        stop = tl.load(indptr_ptr + row + 1)
        count = stop - start
        stop = tl.where(count > LIMIT, start, stop)
    grad_ptr += row * width + head * channels
    x_ptr += head * channels
    for first in range(start, stop, EDGES):
        edges = first + tl.arange(0, EDGES)
        there = edges < stop
        source = tl.load(indices_ptr + edges, mask=there, other=0).to(tl.int64)
        total = tl.zeros((EDGES, BLOCK), total_type)
        for begin_column in range(0, channels, BLOCK):
            columns = begin_column + tl.arange(0, BLOCK)
            inside = columns < channels
            grad = tl.load(grad_ptr + columns, mask=inside, other=0.0).to(total_type)
            mask = there[:, None] & inside[None, :]
            value = tl.load(x_ptr + source[:, None] * width + columns[None, :], mask=mask, other=0.0).to(total_type)
            total += value * grad[None, :]
        result = tl.sum(total, axis=1)
        if MEAN:
            result = result / tl.maximum(count, 1).to(total_type)
        tl.store(out_ptr + edges * heads + head, result.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _offsets(place_ptr, at, there, heads, PLACED: tl.constexpr, HEADS: tl.constexpr):
    """Return the (EDGES, HEADS) offsets of edges' numbers, and the mask of those that exist."""
    columns = tl.arange(0, HEADS)
    place = at.to(tl.int64)
    if PLACED:
        place = tl.load(place_ptr + at, mask=there, other=0).to(tl.int64)
    return place[:, None] * heads + columns[None, :], there[:, None] & (columns < heads)[None, :]


@triton.jit
def _row_numbers(
    value_ptr, grad_ptr, place_ptr, start, stop, heads, total_type: tl.constexpr,
    BACK: tl.constexpr, PLACED: tl.constexpr, EDGES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Return by head the largest logit and the sum of powers; BACK: zeros and the sum of share * gradient."""
    top = tl.full((HEADS,), 0.0 if BACK else -float("inf"), total_type)
    total = tl.zeros((HEADS,), total_type)
    for first in range(start, stop, EDGES):
        at = first + tl.arange(0, EDGES)
        offsets, mask = _offsets(place_ptr, at, at < stop, heads, PLACED, HEADS)
        if BACK:
            share = tl.load(value_ptr + offsets, mask=mask, other=0.0).to(total_type)
            total += tl.sum(share * tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(total_type), axis=0)
        else:
            logit = tl.load(value_ptr + offsets, mask=mask, other=-float("inf")).to(total_type)
            before = top
            top = tl.maximum(top, tl.max(logit, axis=0))
            base = tl.where(top == -float("inf"), 0.0, top)
            total = total * tl.exp(before - base) + tl.sum(tl.exp(logit - base[None, :]), axis=0)
    return top, total


@triton.jit
def _write(
    value_ptr, grad_ptr, place_ptr, out_ptr, top, total, start, stop, heads, total_type: tl.constexpr,
    BACK: tl.constexpr, PLACED: tl.constexpr, EDGES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write the shares of edges start to stop, or their gradients, from the numbers of their row."""
    base = tl.where(top == -float("inf"), 0.0, top)
    inverse = tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
    for first in range(start, stop, EDGES):
        at = first + tl.arange(0, EDGES)
        offsets, mask = _offsets(place_ptr, at, at < stop, heads, PLACED, HEADS)
        value = tl.load(value_ptr + offsets, mask=mask, other=0.0).to(total_type)
        if BACK:
            result = value * (tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(total_type) - total[None, :])
        else:
            result = tl.exp(value - base[None, :]) * inverse[None, :]
        tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_hubs_kernel(
    value_ptr, grad_ptr, place_ptr, indptr_ptr, out_ptr, partial_ptr, row_ptr, num_rows, num_edges, heads,
    WRITES: tl.constexpr, BACK: tl.constexpr, PLACED: tl.constexpr, LIMIT: tl.constexpr, EDGES: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Write the numbers of a chunk's edges of one hub; WRITES: what follows for them from the numbers of their row.

    partial_ptr: (num_chunks, 2, 2, heads), largest logit and sum; row_ptr: (num_rows, 2, heads), from `softmax_kernel`.
    """
    total_type: tl.constexpr = partial_ptr.dtype.element_ty
    chunk = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1)
    row, start, stop = chunk_of_hub(indptr_ptr, num_rows, num_edges, chunk, side, LIMIT)
    columns = tl.arange(0, HEADS)
    inside = columns < heads
    if stop > start:
        if WRITES:
            top = tl.load(row_ptr + row * 2 * heads + columns, mask=inside, other=0.0)
            total = tl.load(row_ptr + (row * 2 + 1) * heads + columns, mask=inside, other=0.0)
            _write(
                value_ptr, grad_ptr, place_ptr, out_ptr, top, total, start, stop, heads, total_type,
                BACK, PLACED, EDGES, HEADS,
            )  # fmt: skip
        else:
            top, total = _row_numbers(
                value_ptr, grad_ptr, place_ptr, start, stop, heads, total_type, BACK, PLACED, EDGES, HEADS
            )
            partial_ptr += (chunk * 2 + side) * 2 * heads
            tl.store(partial_ptr + columns, top, mask=inside)
            tl.store(partial_ptr + heads + columns, total, mask=inside)


@triton.jit
def softmax_kernel(
    value_ptr, grad_ptr, place_ptr, indptr_ptr, out_ptr, partial_ptr, row_ptr, heads,
    BACK: tl.constexpr, PLACED: tl.constexpr, LIMIT: tl.constexpr, EDGES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write the shares of a row's edges (BACK: the gradients of its logits); of a hub, the numbers of its row.

    value_ptr: (num_edges, heads) logits (BACK: shares); grad_ptr: gradients of the shares, read if BACK; place_ptr:
    (num_edges,) the position of each edge in these and in out, read if PLACED.
    """
    total_type: tl.constexpr = partial_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, HEADS)
    inside = columns < heads
    start = tl.load(indptr_ptr + row)
    stop = tl.load(indptr_ptr + row + 1)
    if stop - start > LIMIT:
        top = tl.full((HEADS,), 0.0 if BACK else -float("inf"), total_type)
        total = tl.zeros((HEADS,), total_type)
        for chunk in range(start // LIMIT, (stop - 1) // LIMIT + 1):
            side = tl.where(chunk * LIMIT < start, 1, 0)
            part_ptr = partial_ptr + (chunk * 2 + side) * 2 * heads
            own = tl.load(part_ptr + columns, mask=inside, other=0.0)
            part = tl.load(part_ptr + heads + columns, mask=inside, other=0.0)
            before = top
            top = tl.maximum(top, own)
            base = tl.where(top == -float("inf"), 0.0, top)
            total = total * tl.exp(before - base) + part * tl.exp(own - base)
        tl.store(row_ptr + row * 2 * heads + columns, top, mask=inside)
        tl.store(row_ptr + (row * 2 + 1) * heads + columns, total, mask=inside)
    else:
        top, total = _row_numbers(
            value_ptr, grad_ptr, place_ptr, start, stop, heads, total_type, BACK, PLACED, EDGES, HEADS
        )
        _write(
            value_ptr, grad_ptr, place_ptr, out_ptr, top, total, start, stop, heads, total_type,
            BACK, PLACED, EDGES, HEADS,
        )  # fmt: skip
