"""A graph where a device samples it: in its memory where there is space, else in pinned host memory read in place."""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...graph import CSC
from ...jit import kernel
from .edge_types import Relation

ROWS = 256  # that one program looks up
SHARE = 0.5  # of a device's free memory that edges may take: activations and batches need the rest


class DeviceRelation(NamedTuple):
    """One edge type as a device samples it: `Relation` with tensors, its rows of this edge type alone.

    Attributes:
        source, target, indptr, indices, time, time_by_edge, number, position: As `Relation` has them; time int64.
        weight: (num_edges,) floats >= 0, None: uniform samples.
        running: (num_edges,) float64 sums of a row's weights up to each edge, added in the order of the row; so that
            samples by weight are those of the CPU, bit for bit.
        positive: (num_edges + 1,) int64 edges of a weight above 0 before each.
        steps: Halvings that find an edge in the longest row.
    """

    source: int
    target: int
    indptr: Tensor
    indices: Tensor
    time: Tensor | None = None
    time_by_edge: bool = False
    number: int = 0
    position: Tensor | None = None
    weight: Tensor | None = None
    running: Tensor | None = None
    positive: Tensor | None = None
    steps: int = 64

    @classmethod
    def of(cls, csc: CSC) -> "DeviceRelation":
        """Return the one edge type of a homogeneous graph that is tensors."""
        return cls(0, 0, csc.indptr, csc.indices)

    @classmethod
    def put(cls, relation: Relation, put: Callable[[np.ndarray], Tensor]) -> "DeviceRelation":
        """Return an edge type of the host on a device.

        Args:
            relation: Its rows hold edges of one type.
            put: Copies an array to where the device reads it.

        Raises:
            ValueError: a weight is not >= 0 and finite.

        Cost: with weights 16 bytes an edge more.
        """
        indptr, longest = np.asarray(relation.indptr), 0
        running = positive = None
        if relation.weight is not None:
            running, positive = np.empty(len(relation.indices)), np.zeros(len(relation.indices) + 1, np.int64)
            if not _add_up(indptr, relation.weight, running, positive):
                raise ValueError("weights by which edges are sampled must be >= 0 and finite, got one that is not")
        if len(indptr) > 1:
            longest = int(np.diff(indptr).max())
        arrays = {"weight": relation.weight, "running": running, "positive": positive, "position": relation.position}
        if relation.time is not None:
            arrays["time"] = np.asarray(relation.time, np.int64)
        return cls(
            relation.source,
            relation.target,
            put(indptr),
            put(np.asarray(relation.indices)),
            time_by_edge=relation.time_by_edge,
            number=relation.number,
            steps=longest.bit_length(),
            **{name: None if values is None else put(np.asarray(values)) for name, values in arrays.items()},
        )

    def named(self, edge: Tensor) -> Tensor:
        """Return (num,) int64 what edges at these positions are called."""
        return edge if self.position is None else read_at(self.position, edge).long()


def relation_bytes(relation: Relation) -> int:
    """Return bytes of an edge type on a device."""
    arrays = relation.indptr, relation.indices, relation.weight, relation.position
    held = sum(array.nbytes for array in arrays if array is not None)
    held += 0 if relation.time is None else 8 * len(relation.time)
    return held + (0 if relation.weight is None else 16 * len(relation.weight))


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a device; of the CPU, more than any graph has."""
    if device.type != "cuda":
        return 1 << 62
    # What torch holds and no tensor has, such as the memory of the part before, is free for the next one.
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def fits_on_device(num_bytes: int, free_bytes: int) -> bool:
    """Whether edges of so many bytes belong into the memory of a device that has so many bytes free."""
    return num_bytes <= SHARE * free_bytes


def placing(device: torch.device, in_device: bool) -> Callable[[np.ndarray], Tensor]:
    """Return what copies arrays to where a device reads them.

    Args:
        device: A CUDA device; or the CPU, where both places are the same.
        in_device: Whether they fit into its memory; else they are pinned on the host, and read in place.
    """

    def put(array: np.ndarray) -> Tensor:
        array = np.ascontiguousarray(array)
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        if device.type == "cpu":
            return tensor
        return tensor.to(device) if in_device else tensor.pin_memory()

    return put


def has_triton() -> bool:
    """Whether Triton is installed."""
    return triton_kernels() is not None


@cache
def triton_kernels() -> ModuleType | None:
    """Return the module of kernels that sample, or None where Triton is missing; imported when first needed."""
    try:
        from . import kernel
    except ImportError:
        return None
    return kernel


def read_at(values: Tensor, index: Tensor) -> Tensor:
    """Return values[index], on the device of the index."""
    if values.device == index.device:
        return values[index]
    out = torch.empty(len(index), dtype=values.dtype, device=index.device)
    if len(index):
        triton_kernels().read_kernel[(-(-len(index) // ROWS),)](values, index, out, len(index), BLOCK=ROWS)
    return out


@kernel
def _add_up(indptr, weight, running, positive):
    """Add up the weights of each row in its order, and count those above 0; return whether all are valid."""
    right = True
    for row in range(len(indptr) - 1):
        total = 0.0
        for edge in range(indptr[row], indptr[row + 1]):
            right &= 0 <= weight[edge] < np.inf
            total += weight[edge]
            running[edge] = total
            positive[edge + 1] = positive[edge] + (weight[edge] > 0)
    return right
