"""What the arguments of layer-wise sampling must be, on the CPU and on a device."""

import math
from collections.abc import Sequence

import numpy as np

MOST_SCALE = 2.0**24


def check_layer_sizes(nodes_per_layer: int | Sequence[int], num_layers: int | None = None) -> tuple[int, ...]:
    """Return the nodes to sample for each hop as a tuple of ints.

    Args:
        nodes_per_layer: one number for all hops, or one for each.
        num_layers: hops, where one number is given (None: 2); else None, or the length of the list.

    Raises:
        ValueError: a number below 1 or not an integer, none given, or a list of another length than num_layers.
    """
    if num_layers is not None and (not _is_integer(num_layers) or num_layers < 1):
        raise ValueError(f"num_layers must be an integer >= 1, got {num_layers!r}: one hop for each layer of the model")
    if isinstance(nodes_per_layer, str) or nodes_per_layer is None:
        raise ValueError(f"nodes_per_layer must be an integer >= 1 or a list of them, got {nodes_per_layer!r}")
    alike = not isinstance(nodes_per_layer, Sequence) and np.ndim(nodes_per_layer) == 0
    sizes = (nodes_per_layer,) * (2 if num_layers is None else num_layers) if alike else tuple(nodes_per_layer)
    if not sizes:
        raise ValueError("nodes_per_layer must name at least one hop, got []")
    for hop, size in enumerate(sizes):
        if not _is_integer(size) or size < 1:
            where = "nodes_per_layer" if alike else f"nodes_per_layer[{hop}]"
            raise ValueError(f"{where} must be an integer >= 1, got {size!r}: the nodes sampled for a layer")
    if num_layers is not None and len(sizes) != num_layers:
        raise ValueError(
            f"nodes_per_layer must name num_layers {num_layers} hops, got {len(sizes)}: leave num_layers out"
        )
    return tuple(int(size) for size in sizes)


def fraction_bits(num_rows: int, scale: float) -> int:
    """Return the bits behind the point of importance in a hop of so many rows: its sums stay below 2**61."""
    return 60 - int(num_rows).bit_length() - math.ceil(math.log2(min(scale, MOST_SCALE)))


def check_preferred(preferred, scale: float, num_hops: int, num_rows: int) -> None:
    """Raise ValueError unless preferred nodes and their scale fit; see `sample_layers`."""
    if not (math.isfinite(scale) and scale >= 1):
        raise ValueError(f"scale must be a finite number >= 1, got {scale}: 1 prefers no node")
    if preferred is None:
        return
    if len(preferred) != num_hops or any(mask.shape != (num_rows,) or mask.dtype != bool for mask in preferred):
        given = [f"{mask.dtype} {mask.shape}" for mask in preferred]
        raise ValueError(
            f"preferred must hold a bool array of shape ({num_rows},) for each of {num_hops} hops, got {given}"
        )


def _is_integer(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
