"""Sampled batches that wait for their feature rows, in a fraction of their bytes: ids in as few bits as they need."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from ..jit import kernel
from ..sampler.minibatch import MiniBatch

_NARROW = tuple(np.dtype(name) for name in ("uint8", "int8", "uint16", "int16", "int32"))
Take = Callable[[tuple[int, ...], np.dtype], np.ndarray]


@dataclass(frozen=True, eq=False)
class WaitingBatch:
    """A batch without features, whose `batch` is the one that it was made `of`, bit for bit.

    Attributes:
        nodes: (num_nodes,) store ids, int32 where they fit.
        part: The batch's.
        rest: Its other fields: what is no tensor as it is, tensors as `_packed` gives them.
        nbytes: Bytes of all arrays.
    """

    nodes: np.ndarray
    part: int
    rest: Mapping[str, Any]
    nbytes: int

    @classmethod
    def of(cls, batch: MiniBatch) -> "WaitingBatch":
        """Return a batch in few bytes, none of which is memory of the batch.

        Cost: two passes over its tensors.
        """
        rest = {one.name: getattr(batch, one.name) for one in fields(batch) if one.name not in ("n_id", "part")}
        edge_index, indptr = batch.edge_index.numpy(), batch.indptr.numpy()
        if _is_grouped(edge_index[1], indptr):
            rest["edge_index"] = edge_index[0]  # the targets follow from indptr
        rest = {
            name: _packed(value if isinstance(value, np.ndarray) else value.numpy())
            if isinstance(value, np.ndarray | torch.Tensor)
            else value
            for name, value in rest.items()
        }
        n_id = batch.n_id.numpy()
        nodes = n_id.astype(np.int32 if len(n_id) == 0 or n_id.max() < 1 << 31 else np.int64)
        packed = [value for value in rest.values() if isinstance(value, _Packed)]
        return cls(nodes, batch.part, rest, nodes.nbytes + sum(value.values.nbytes for value in packed))

    def batch(self, take: Take) -> MiniBatch:
        """Return the batch.

        Args:
            take: Allocates (shape, dtype), as `BufferPool.take` does.
        """
        found = {
            name: _unpacked(value, take) if isinstance(value, _Packed) else value for name, value in self.rest.items()
        }
        if found["edge_index"].ndim == 1:
            source, indptr = found["edge_index"].numpy(), found["indptr"].numpy()
            edge_index = take((2, len(source)), source.dtype)
            edge_index[0] = source
            _targets(indptr, edge_index[1])
            found["edge_index"] = torch.from_numpy(edge_index)
        n_id = take(self.nodes.shape, np.dtype(np.int64))
        n_id[:] = self.nodes
        return MiniBatch(n_id=torch.from_numpy(n_id), part=self.part, **found)


@dataclass(frozen=True, eq=False, slots=True)
class _Packed:
    """An array in few bytes: `values` has one value where all are that, a bit each where they are booleans."""

    values: np.ndarray
    shape: tuple[int, ...]
    dtype: np.dtype


def _packed(array: np.ndarray) -> _Packed:
    shape, dtype = array.shape, array.dtype
    if array.size == 0:
        return _Packed(np.empty(0, dtype), shape, dtype)
    if dtype == np.bool_:
        return _Packed(np.packbits(array.reshape(-1)), shape, dtype)
    if dtype.kind not in "iu":
        flat = np.ascontiguousarray(array).reshape(-1).view(np.dtype(f"V{dtype.itemsize}"))
        bits = flat.view(np.dtype(f"u{dtype.itemsize}")) if dtype.itemsize in (1, 2, 4, 8) else None
        is_one = bits is not None and bits[0] == bits[-1] and bool((bits == bits[0]).all())
        return _Packed(np.array(array.reshape(-1)[:1] if is_one else array.reshape(-1)), shape, dtype)
    low, high = int(array.min()), int(array.max())
    if low == high:
        return _Packed(np.array([low], dtype), shape, dtype)
    narrow = next((one for one in _NARROW if np.iinfo(one).min <= low and high <= np.iinfo(one).max), dtype)
    return _Packed(array.reshape(-1).astype(min(narrow, dtype, key=lambda one: one.itemsize)), shape, dtype)


def _unpacked(packed: _Packed, take: Take) -> torch.Tensor:
    out = take(packed.shape, packed.dtype)
    if packed.dtype == np.bool_ and out.size:
        out.reshape(-1)[:] = np.unpackbits(packed.values, count=out.size)
    elif out.size:
        out.reshape(-1)[:] = packed.values
    return torch.from_numpy(out)


@kernel
def _is_grouped(targets, indptr):
    """Whether the edges of target i are those in [indptr[i], indptr[i + 1])."""
    if indptr[0] != 0 or indptr[-1] != len(targets):
        return False
    for row in range(len(indptr) - 1):
        for edge in range(indptr[row], indptr[row + 1]):
            if targets[edge] != row:
                return False
    return True


@kernel
def _targets(indptr, out):
    for row in range(len(indptr) - 1):
        for edge in range(indptr[row], indptr[row + 1]):
            out[edge] = row
