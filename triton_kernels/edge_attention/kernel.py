"""Attention over CSC rows in Triton: one program a row and head, EDGES edges under way at a time.

The forward keeps the largest score and the sum of powers of what it has seen, and scales its sums when the largest
grows: each value is read once, and no share of an edge is held. The backward goes along the edges of each source and
works the shares out again from a row's largest score and sum, so that it too reads each row of gradients once. Rows and
sources of more than LIMIT edges are shared out in chunks, as in `aggregate`, and merged in their order.
"""

import triton
import triton.language as tl

from ..aggregate.kernel import chunk_of_hub


@triton.jit
def _scores(
    source_score, row_score, edge_ptr, bias_ptr, edges, there, head, heads,
    SLOPE: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Return the scores of edges before the leaky ReLU, and after it with the bias; -inf where no edge is."""
    inner = source_score + row_score
    if HAS_EDGE:
        inner += tl.load(edge_ptr + edges * heads + head, mask=there, other=0.0).to(inner.dtype)
    score = tl.where(inner > 0, inner, inner * SLOPE)
    if HAS_BIAS:
        score += tl.load(bias_ptr + edges, mask=there, other=0.0).to(inner.dtype)
    return inner, tl.where(there, score, -float("inf"))


@triton.jit
def _attend(
    x_ptr, src_ptr, row_score, edge_ptr, bias_ptr, keep_ptr, indices_ptr, start, stop, head, heads, channels,
    SLOPE: tl.constexpr, total_type: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_KEEP: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest score of edges start to stop, the sum of their powers, and the (BLOCK,) weighted sum."""
    columns = tl.arange(0, BLOCK)
    inside = columns < channels
    top = tl.full((), -float("inf"), total_type)
    powers = tl.zeros((), total_type)
    total = tl.zeros((EDGES, BLOCK), total_type)
    for first in range(start, stop, EDGES):
        edges = first + tl.arange(0, EDGES)
        there = edges < stop
        source = tl.load(indices_ptr + edges, mask=there, other=0).to(tl.int64)
        mask = there[:, None] & inside[None, :]
        place = source[:, None] * (heads * channels) + head * channels + columns[None, :]
        value = tl.load(x_ptr + place, mask=mask, other=0.0).to(total_type)
        source_score = tl.load(src_ptr + source * heads + head, mask=there, other=0.0).to(total_type)
        _, score = _scores(
            source_score, row_score, edge_ptr, bias_ptr, edges, there, head, heads, SLOPE, HAS_EDGE, HAS_BIAS
        )
        before, top = top, tl.maximum(top, tl.max(score))
        base = tl.where(top == -float("inf"), 0.0, top)  # a row of -inf alone: all its powers are 0
        scale = tl.exp(before - base)
        power = tl.exp(score - base)
        powers = powers * scale + tl.sum(power)
        if HAS_KEEP:
            power *= tl.load(keep_ptr + edges * heads + head, mask=there, other=0.0).to(total_type)
        total = total * scale + power[:, None] * value
    return top, powers, tl.sum(total, axis=0)


@triton.jit
def attend_hubs_kernel(
    x_ptr, src_ptr, dst_ptr, edge_ptr, bias_ptr, keep_ptr, indptr_ptr, indices_ptr, sums_ptr, tops_ptr, num_rows,
    num_edges, heads, channels, SLOPE: tl.constexpr, HAS_DST: tl.constexpr, HAS_EDGE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, LIMIT: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what `_attend` returns of a chunk's edges of one hub.

    sums_ptr: (num_chunks, 2, heads, channels); tops_ptr: (num_chunks, 2, heads, 2), the largest score and the powers.
    """
    total_type: tl.constexpr = sums_ptr.dtype.element_ty
    chunk = tl.program_id(0).to(tl.int64) // heads
    head = (tl.program_id(0) % heads).to(tl.int64)
    side = tl.program_id(1)
    row, start, stop = chunk_of_hub(indptr_ptr, num_rows, num_edges, chunk, side, LIMIT)
    if stop > start:
        row_score = tl.zeros((), total_type)
        if HAS_DST:
            row_score = tl.load(dst_ptr + row * heads + head).to(total_type)
        top, powers, total = _attend(
            x_ptr, src_ptr, row_score, edge_ptr, bias_ptr, keep_ptr, indices_ptr, start, stop, head, heads, channels,
            SLOPE, total_type, HAS_EDGE, HAS_BIAS, HAS_KEEP, EDGES, BLOCK,
        )  # fmt: skip
        columns = tl.arange(0, BLOCK)
        place = (chunk * 2 + side) * heads + head
        tl.store(tops_ptr + place * 2, top)
        tl.store(tops_ptr + place * 2 + 1, powers)
        tl.store(sums_ptr + place * channels + columns, total, mask=columns < channels)


@triton.jit
def attend_kernel(
    x_ptr, src_ptr, dst_ptr, edge_ptr, bias_ptr, keep_ptr, indptr_ptr, indices_ptr, sums_ptr, tops_ptr, out_ptr,
    row_ptr, heads, channels, SLOPE: tl.constexpr, HAS_DST: tl.constexpr, HAS_EDGE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, LIMIT: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out[row, head] = the sum over the row's edges of share * keep * x[source, head].

    row_ptr: (num_rows, heads, 4); dst_score, the largest score (0 where there is none) and 1 / powers (0 of 0) are
    written, for the backward.
    """
    total_type: tl.constexpr = sums_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) // heads
    head = (tl.program_id(0) % heads).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < channels
    start = tl.load(indptr_ptr + row)
    stop = tl.load(indptr_ptr + row + 1)
    row_score = tl.zeros((), total_type)
    if HAS_DST:
        row_score = tl.load(dst_ptr + row * heads + head).to(total_type)
    if stop - start > LIMIT:
        top = tl.full((), -float("inf"), total_type)
        powers = tl.zeros((), total_type)
        total = tl.zeros((BLOCK,), total_type)
        for chunk in range(start // LIMIT, (stop - 1) // LIMIT + 1):
            side = tl.where(chunk * LIMIT < start, 1, 0)
            place = (chunk * 2 + side) * heads + head
            own = tl.load(tops_ptr + place * 2)
            before, top = top, tl.maximum(top, own)
            base = tl.where(top == -float("inf"), 0.0, top)
            scale = tl.exp(before - base)
            factor = tl.exp(own - base)
            powers = powers * scale + tl.load(tops_ptr + place * 2 + 1) * factor
            part = tl.load(sums_ptr + place * channels + columns, mask=inside, other=0.0)
            total = total * scale + part * factor
    else:
        top, powers, total = _attend(
            x_ptr, src_ptr, row_score, edge_ptr, bias_ptr, keep_ptr, indices_ptr, start, stop, head, heads, channels,
            SLOPE, total_type, HAS_EDGE, HAS_BIAS, HAS_KEEP, EDGES, BLOCK,
        )  # fmt: skip
    base = tl.where(top == -float("inf"), 0.0, top)
    inverse = tl.where(powers == 0.0, 0.0, 1.0 / tl.where(powers == 0.0, 1.0, powers))
    place = row * heads + head
    tl.store(row_ptr + place * 4, row_score)
    tl.store(row_ptr + place * 4 + 1, base)
    tl.store(row_ptr + place * 4 + 2, inverse)
    tl.store(out_ptr + place * channels + columns, (total * inverse).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _attend_back(
    grad_ptr, x_ptr, src_ptr, edge_ptr, bias_ptr, keep_ptr, row_ptr, rows_ptr, edges_ptr, score_grad_ptr,
    bias_grad_ptr, source, start, stop, head, heads, channels, SLOPE: tl.constexpr,
    total_type: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
    BIAS_GRAD: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a source's edges start to stop; return those of its value, (BLOCK,), and of its score."""
    columns = tl.arange(0, BLOCK)
    inside = columns < channels
    own = tl.load(x_ptr + (source * heads + head) * channels + columns, mask=inside, other=0.0).to(total_type)
    source_score = tl.load(src_ptr + source * heads + head).to(total_type)
    total = tl.zeros((EDGES, BLOCK), total_type)
    score_total = tl.zeros((EDGES,), total_type)
    for first in range(start, stop, EDGES):
        at = first + tl.arange(0, EDGES)
        there = at < stop
        row = tl.load(rows_ptr + at, mask=there, other=0).to(tl.int64)
        edges = tl.load(edges_ptr + at, mask=there, other=0).to(tl.int64)
        place = row * heads + head
        mask = there[:, None] & inside[None, :]
        given = tl.load(grad_ptr + place[:, None] * channels + columns[None, :], mask=mask, other=0.0).to(total_type)
        row_score = tl.load(row_ptr + place * 4, mask=there, other=0.0)
        base = tl.load(row_ptr + place * 4 + 1, mask=there, other=0.0)
        inverse = tl.load(row_ptr + place * 4 + 2, mask=there, other=0.0)
        product = tl.load(row_ptr + place * 4 + 3, mask=there, other=0.0)
        inner, score = _scores(
            source_score, row_score, edge_ptr, bias_ptr, edges, there, head, heads, SLOPE, HAS_EDGE, HAS_BIAS
        )
        share = tl.exp(score - base) * inverse
        dot = tl.sum(given * own[None, :], axis=1)
        kept = share
        if HAS_KEEP:
            keep = tl.load(keep_ptr + edges * heads + head, mask=there, other=0.0).to(total_type)
            kept = share * keep
            dot *= keep
        total += kept[:, None] * given
        bias_grad = share * (dot - product)
        score_grad = tl.where(inner > 0, bias_grad, bias_grad * SLOPE)
        score_total += tl.where(there, score_grad, 0.0)
        tl.store(score_grad_ptr + edges * heads + head, score_grad, mask=there)
        if BIAS_GRAD:
            tl.store(bias_grad_ptr + edges * heads + head, bias_grad, mask=there)
    return tl.sum(total, axis=0), tl.sum(score_total)


@triton.jit
def attend_back_hubs_kernel(
    grad_ptr, x_ptr, src_ptr, edge_ptr, bias_ptr, keep_ptr, row_ptr, offsets_ptr, rows_ptr, edges_ptr,
    score_grad_ptr, bias_grad_ptr, sums_ptr, num_src, num_edges, heads, channels,
    SLOPE: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
    BIAS_GRAD: tl.constexpr, LIMIT: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what `_attend_back` returns of a chunk's edges of one hub.

    sums_ptr: (num_chunks, 2, heads, channels + 1), the score's gradient last.
    """
    total_type: tl.constexpr = sums_ptr.dtype.element_ty
    chunk = tl.program_id(0).to(tl.int64) // heads
    head = (tl.program_id(0) % heads).to(tl.int64)
    side = tl.program_id(1)
    source, start, stop = chunk_of_hub(offsets_ptr, num_src, num_edges, chunk, side, LIMIT)
    if stop > start:
        total, score_total = _attend_back(
            grad_ptr, x_ptr, src_ptr, edge_ptr, bias_ptr, keep_ptr, row_ptr, rows_ptr, edges_ptr, score_grad_ptr,
            bias_grad_ptr, source, start, stop, head, heads, channels, SLOPE, total_type,
            HAS_EDGE, HAS_BIAS, HAS_KEEP, BIAS_GRAD, EDGES, BLOCK,
        )  # fmt: skip
        columns = tl.arange(0, BLOCK)
        sums_ptr += ((chunk * 2 + side) * heads + head) * (channels + 1)
        tl.store(sums_ptr + columns, total, mask=columns < channels)
        tl.store(sums_ptr + channels, score_total)


@triton.jit
def attend_back_kernel(
    grad_ptr, x_ptr, src_ptr, edge_ptr, bias_ptr, keep_ptr, row_ptr, offsets_ptr, rows_ptr, edges_ptr,
    score_grad_ptr, bias_grad_ptr, sums_ptr, x_grad_ptr, src_grad_ptr, heads, channels,
    SLOPE: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
    BIAS_GRAD: tl.constexpr, LIMIT: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a source's value and score, and of the scores of its edges.

    grad_ptr: (num_rows, heads, channels); row_ptr: as `attend_kernel` leaves it, with the product of gradient and
    output as the fourth number; score_grad_ptr, bias_grad_ptr: (num_edges, heads), before and after the leaky ReLU.
    """
    total_type: tl.constexpr = sums_ptr.dtype.element_ty
    source = tl.program_id(0).to(tl.int64) // heads
    head = (tl.program_id(0) % heads).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < channels
    start = tl.load(offsets_ptr + source)
    stop = tl.load(offsets_ptr + source + 1)
    if stop - start > LIMIT:
        total = tl.zeros((BLOCK,), total_type)
        score_total = tl.zeros((), total_type)
        for chunk in range(start // LIMIT, (stop - 1) // LIMIT + 1):
            side = tl.where(chunk * LIMIT < start, 1, 0)
            part_ptr = sums_ptr + ((chunk * 2 + side) * heads + head) * (channels + 1)
            total += tl.load(part_ptr + columns, mask=inside, other=0.0)
            score_total += tl.load(part_ptr + channels)
    else:
        total, score_total = _attend_back(
            grad_ptr, x_ptr, src_ptr, edge_ptr, bias_ptr, keep_ptr, row_ptr, rows_ptr, edges_ptr, score_grad_ptr,
            bias_grad_ptr, source, start, stop, head, heads, channels, SLOPE, total_type,
            HAS_EDGE, HAS_BIAS, HAS_KEEP, BIAS_GRAD, EDGES, BLOCK,
        )  # fmt: skip
    place = source * heads + head
    tl.store(x_grad_ptr + place * channels + columns, total.to(x_grad_ptr.dtype.element_ty), mask=inside)
    tl.store(src_grad_ptr + place, score_total.to(src_grad_ptr.dtype.element_ty))
