"""Softmax over CSC rows in Triton, and its gradient: one program a row, all heads, hubs shared out as in `kernel`."""

import triton
import triton.language as tl

from .kernel import chunk_of_hub


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
