"""Attention over edges as compiled loops; each row is computed by one thread, in the order of its edges.

The exponential between the two loops of the forward is torch's, which is vectorised. Shares, (num_edges, heads), are
kept for the backward: to work them out again would cost that exponential, and reading them does not.
"""

import numpy as np

from ...jit import kernel
from ..intrinsics import LINE_BYTES, prefetch

AHEAD = 8  # edges whose rows are prefetched, as in `aggregate`


@kernel(error_model="numpy")
def scores_less_top(
    src_score, dst_score, edge_score, edge_bias, slope, indptr, indices, has_dst, has_edge, has_bias, out,
    first_row, last_row,
):  # fmt: skip
    """Write each edge's score less the largest of its row and head; a row of -inf alone stays -inf.

    Args:
        src_score, dst_score, edge_score: (num_src, heads), (num_dst, heads), (num_edges, heads); the last two are not
            read unless `has_dst`, `has_edge`.
        edge_bias: (num_edges,), not read unless `has_bias`.
        out: (num_edges, heads), filled for rows [first_row, last_row).
    """
    heads = src_score.shape[1]
    zero = src_score.dtype.type(0)
    top = np.empty(heads, src_score.dtype)
    for v in range(first_row, last_row):
        start, stop = indptr[v], indptr[v + 1]
        top[:] = -np.inf
        for e in range(start, stop):
            source = np.uint64(indices[e])
            for h in range(heads):
                score = src_score[source, h]
                if has_dst:
                    score += dst_score[v, h]
                if has_edge:
                    score += edge_score[e, h]
                score = score if score > zero else score * slope
                if has_bias:
                    score += edge_bias[e]
                out[e, h] = score
                top[h] = max(top[h], score)
        for h in range(heads):
            if top[h] == -np.inf:
                top[h] = zero
        for e in range(start, stop):
            for h in range(heads):
                out[e, h] -= top[h]


@kernel(error_model="numpy", fastmath={"contract"})
def attend(x, indptr, indices, share, keep, has_keep, out, first_row, last_row):
    """Divide shares by the sum of their row and head, in place, and write the sums of share * keep * x[source].

    Args:
        x: (num_src, heads, channels). share: (num_edges, heads); a sum of 0 leaves them.
        keep: (num_edges, heads), not read unless `has_keep`.
        out: (num_rows, heads, channels), rows [first_row, last_row) are overwritten.
    """
    heads, channels = x.shape[1], x.shape[2]
    width = heads * channels
    flat = x.reshape(-1)
    line = LINE_BYTES // x.itemsize
    end = indptr[last_row]
    for v in range(first_row, last_row):
        start, stop = indptr[v], indptr[v + 1]
        for h in range(heads):
            total = share.dtype.type(0)
            for e in range(start, stop):
                total += share[e, h]
            if total > 0:
                for e in range(start, stop):
                    share[e, h] /= total
        row = out[v]
        row[:, :] = 0
        for e in range(start, stop):
            if e + AHEAD < end:
                ahead = np.int64(indices[e + AHEAD]) * width
                for c in range(0, width, line):
                    prefetch(flat, ahead + c)
            source = np.uint64(indices[e])
            for h in range(heads):
                values, total_row = x[source, h], row[h]
                factor = share[e, h]
                if has_keep:
                    factor *= keep[e, h]
                for c in range(channels):
                    total_row[c] += factor * values[c]


@kernel(error_model="numpy", fastmath={"contract", "reassoc"})
def attend_back(
    grad, x, src_score, row_values, edge_score, share, keep, slope, offsets, rows, edges, has_edge, has_keep,
    x_grad, src_grad, score_grad, inner_grad, has_inner, first_src, last_src,
):  # fmt: skip
    """Go once along the edges of each source: gradients of its value, of its score, and of each edge's score.

    Args:
        grad: (num_dst, heads, channels), the gradient of the output.
        row_values: (num_dst, 2 * heads): by head dst_score, then the product of `grad` and the output.
        share, keep: (num_edges, heads), of the forward; keep is not read unless `has_keep`.
        offsets, rows, edges: the edges by source.
        x_grad, src_grad: (num_src, heads, channels) and (num_src, heads), filled for sources [first_src, last_src).
        score_grad: (num_edges, heads), the gradient before the leaky ReLU, filled.
        inner_grad: the same after it, filled if `has_inner`.
    """
    heads, channels = x.shape[1], x.shape[2]
    width = heads * channels
    flat = grad.reshape(-1)
    line = LINE_BYTES // x.itemsize
    end = offsets[last_src]
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for u in range(first_src, last_src):
        x_grad[u, :, :] = 0
        src_grad[u, :] = 0
        for i in range(offsets[u], offsets[u + 1]):
            if i + AHEAD < end:
                ahead = np.int64(rows[i + AHEAD]) * width
                for c in range(0, width, line):
                    prefetch(flat, ahead + c)
            v, e = np.uint64(rows[i]), np.uint64(edges[i])
            for h in range(heads):
                given, values, total = grad[v, h], x[u, h], x_grad[u, h]
                kept = keep[e, h] if has_keep else one
                factor = share[e, h] * kept
                dot = zero
                for c in range(channels):
                    dot += given[c] * values[c]
                for c in range(channels):
                    total[c] += factor * given[c]
                inner = share[e, h] * (kept * dot - row_values[v, heads + h])
                score = src_score[u, h] + row_values[v, h]
                if has_edge:
                    score += edge_score[e, h]
                outer = inner if score > zero else inner * slope
                if has_inner:
                    inner_grad[e, h] = inner
                score_grad[e, h] = outer
                src_grad[u, h] += outer


@kernel(error_model="numpy")
def sum_rows(values, indptr, out, first_row, last_row):
    """Write out[v] = the sum of values[e] over the edges of row v; values: (num_edges, heads)."""
    for v in range(first_row, last_row):
        out[v, :] = 0
        for e in range(indptr[v], indptr[v + 1]):
            for h in range(values.shape[1]):
                out[v, h] += values[e, h]


@kernel(error_model="numpy")
def group_by_source(indptr, indices, num_src):
    """Return the offsets, rows and edges of the edges by source, in the order of their rows."""
    offsets = np.zeros(num_src + 1, np.int64)
    for e in range(len(indices)):
        offsets[indices[e] + 1] += 1
    for s in range(num_src):
        offsets[s + 1] += offsets[s]
    cursor = offsets[:-1].copy()
    rows, edges = np.empty(len(indices), indices.dtype), np.empty(len(indices), np.int64)
    for v in range(len(indptr) - 1):
        for e in range(indptr[v], indptr[v + 1]):
            position = cursor[indices[e]]
            cursor[indices[e]] += 1
            rows[position] = v
            edges[position] = e
    return offsets, rows, edges
