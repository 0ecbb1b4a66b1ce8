"""Sums, means and softmax over rows on a CUDA device: how the Triton kernels are launched."""

from types import ModuleType

import torch
from torch import Tensor

from .. import triton_kernels_of
from .reference import row_of_edge

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TILE = 1024  # values that a program has under way
LIMIT = 1024  # edges of a row that one program adds up


def gather_sum(x: Tensor, weight: Tensor | None, indptr: Tensor, indices: Tensor | None, mean: bool) -> Tensor:
    """Launch the sum over rows; returns (num_rows, heads, channels).

    Args:
        x: (num_src, heads, channels) of DTYPES, or without indices (num_edges, heads, channels), a value for each edge.
        weight: (num_edges, heads), or (num_edges, 1) for all heads alike, floating; None = 1. All are contiguous.

    Cost: where there are more than LIMIT edges, 2 * num_edges / LIMIT rows of sums of hubs, written and read.
    """
    indexed = indices is not None
    indices = indices if indexed else indptr
    num_rows, num_edges, width = len(indptr) - 1, len(indices) if indexed else len(x), x.shape[1] * x.shape[2]
    out = x.new_empty((num_rows, *x.shape[1:]))
    if num_edges == 0:
        return out.zero_()
    if out.numel():
        kernels, factors = _triton_kernels(), x if weight is None else weight
        heads = 1 if weight is None else weight.shape[1]
        block = _block(width)
        columns, sizes = -(-width // block), {"EDGES": TILE // block, "BLOCK": block, "LIMIT": LIMIT}
        options = {**sizes, "INDEXED": indexed, "WEIGHTED": weight is not None}
        options |= {"num_warps": 4, "enable_fp_fusion": True}
        chunks = -(-num_edges // LIMIT) if num_edges > LIMIT else 0
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        partial = torch.empty((chunks, 2, width), dtype=dtype, device=x.device)
        if chunks:
            kernels.sum_hubs_kernel[(chunks, columns, 2)](
                x, indptr, indices, factors, partial, num_rows, num_edges, width, heads, width // heads, **options
            )
        kernels.gather_sum_kernel[(num_rows, columns)](
            x, indptr, indices, factors, partial, out, width, heads, width // heads, MEAN=mean, **options
        )
    return out


def edge_dot(grad: Tensor, x: Tensor, indptr: Tensor, indices: Tensor, mean: bool, out: Tensor) -> None:
    """Launch the products of each row's gradient with its sources' values, a sum over channels (and heads).

    Args:
        grad: (num_rows, heads, channels). x: (num_src, heads, channels).
        out: (num_edges, heads) or (num_edges, 1), filled.
    """
    heads, num_rows, num_edges = out.shape[1], len(indptr) - 1, len(indices)
    channels = x.shape[1] * x.shape[2] // max(1, heads)
    if channels == 0:
        out.zero_()
    elif out.numel():
        block = _block(channels)
        options = {"MEAN": mean, "LIMIT": LIMIT, "EDGES": TILE // block, "BLOCK": block, "num_warps": 4}
        grids = {False: (num_rows, heads)}
        if num_edges > LIMIT:
            grids[True] = (-(-num_edges // LIMIT), heads, 2)
        for hubs, grid in grids.items():
            _triton_kernels().edge_dot_kernel[grid](
                grad, x, indptr, indices, out, num_rows, num_edges, heads, channels,
                HUBS=hubs, enable_fp_fusion=True, **options,
            )  # fmt: skip


def by_source(
    indptr: Tensor, indices: Tensor, factors: Tensor | None, num_src: int
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Group edges by source on their device, in the order of their rows.

    Returns:
        (num_edges, heads) factors or None, (num_src + 1,) int64 offsets, (num_edges,) int64 rows.
    """
    ordered, order = torch.sort(indices, stable=True)
    bounds = torch.arange(num_src + 1, device=indices.device, dtype=indices.dtype)
    offsets = torch.searchsorted(ordered, bounds)
    rows = row_of_edge(indptr, len(indices)).index_select(0, order)
    return None if factors is None else factors.index_select(0, order), offsets, rows


def transpose(
    indptr: Tensor, indices: Tensor, weight: Tensor | None, mean: bool, num_src: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Group edges by source, with the factors by which gradients of this dtype go back along them; see `by_source`."""
    return by_source(indptr, indices, edge_factors(weight, indptr, len(indices), mean, dtype), num_src)


def _triton_kernels() -> ModuleType | None:
    return triton_kernels_of(__package__)


def is_available(x: Tensor) -> bool:
    """Whether the kernels take x: on CUDA, of DTYPES, with Triton installed."""
    return x.device.type == "cuda" and x.dtype in DTYPES and _triton_kernels() is not None


def edge_factors(
    weight: Tensor | None, indptr: Tensor, num_edges: int, mean: bool, dtype: torch.dtype
) -> Tensor | None:
    """Return (num_edges, heads or 1) by which a row's gradient goes back along each edge, or None where all are 1."""
    if not mean:
        return weight
    share = indptr.diff().clamp(min=1).to(torch.float64 if dtype == torch.float64 else torch.float32).reciprocal()
    share = share.index_select(0, row_of_edge(indptr, num_edges)).unsqueeze(1)
    return share if weight is None else weight * share


def _block(width: int) -> int:
    return min(256, max(16, 1 << (width - 1).bit_length()))


SOFTMAX_TILE = 512  # numbers that a program has under way


def softmax(values: Tensor, grad: Tensor | None, indptr: Tensor, place: Tensor | None) -> Tensor:
    """Launch the softmax of logits, or with the gradients of shares the gradients of logits; all are contiguous.

    Args:
        values: (num_edges, heads) logits, or shares where there is a `grad` of the same shape.
        place: (num_edges,) integers, the position in `values` and in what is returned of each edge of the rows; None:
            its own number.
    """
    num_edges, heads = values.shape
    num_rows, out = len(indptr) - 1, torch.empty_like(values)
    if out.numel() == 0:
        return out
    padded = 1 << (heads - 1).bit_length()
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    chunks = -(-num_edges // LIMIT) if num_edges > LIMIT else 0
    partial = torch.empty((chunks, 2, 2, heads), dtype=dtype, device=values.device)
    rows = torch.empty((num_rows if chunks else 0, 2, heads), dtype=dtype, device=values.device)
    options = {"BACK": grad is not None, "PLACED": place is not None, "LIMIT": LIMIT}
    options |= {"EDGES": max(1, SOFTMAX_TILE // padded), "HEADS": padded, "num_warps": 4}
    shared = (
        values, values if grad is None else grad, indptr if place is None else place.contiguous(), indptr, out,
        partial, rows,
    )  # fmt: skip
    kernels = _triton_kernels()
    if chunks:
        kernels.softmax_hubs_kernel[(chunks, 2)](*shared, num_rows, num_edges, heads, WRITES=False, **options)
    kernels.softmax_kernel[(num_rows,)](*shared, heads, **options)
    if chunks:
        kernels.softmax_hubs_kernel[(chunks, 2)](*shared, num_rows, num_edges, heads, WRITES=True, **options)
    return out
