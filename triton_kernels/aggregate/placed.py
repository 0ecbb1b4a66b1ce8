"""Sums over edges that come in groups of their sources, not row by row: each group is added to sums in memory."""

import numpy as np
import torch
from torch import Tensor

from ...jit import kernel
from ..intrinsics import LINE_BYTES, prefetch
from . import cpu


def add_placed_edges(
    out: Tensor,
    x: Tensor,
    rows: np.ndarray,
    local: np.ndarray,
    position: np.ndarray,
    factor: np.ndarray | None = None,
    weight: np.ndarray | None = None,
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
    num_threads = max(1, min(torch.get_num_threads(), len(rows) * x.shape[1] // cpu.MIN_WORK))
    bounds = _bounds(rows, num_threads)
    pool = cpu.threads(num_threads - 1) if num_threads > 1 else None
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
    flat = x.reshape(-1)
    line = LINE_BYTES // x.itemsize
    one = x.dtype.type(1)
    for e in range(first, last):
        if e + cpu.AHEAD < last:
            source = np.int64(position[local[e + cpu.AHEAD]])
            for c in range(0, channels, line):
                prefetch(flat, source * channels + c)
        row = rows[e]
        share = factor[row] if len(factor) else one
        if len(weight):
            share *= weight[e]
        values, total = x[np.uint64(position[local[e]])], out[np.uint64(row)]
        for c in range(channels):
            total[c] += share * values[c]
