"""What a sampler prepared of a part, put where a device reads it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..triton_kernels.sample_neighbors import Relation, SplitRows
from ..triton_kernels.sample_neighbors.device_graph import DeviceRelation, placing, relation_bytes
from .links_on_device import TypePools
from .locality_index import PreferredRows

_STAYS = ("host", "targets", "seed_time", "nodes", "offsets", "is_target")  # of a state, what the host reads


class DeviceSplits:
    """Rows with preferred neighbours first, copied to a device when first asked for; see `PreferredRows`."""

    def __init__(self, preferred, put: Callable[[np.ndarray], torch.Tensor]):
        self._preferred, self._put, self._host, self._there = preferred, put, None, []

    def split(self, with_position: bool) -> list[SplitRows]:
        """Return the rows of each hop as tensors."""
        rows = self._preferred.split(with_position)
        if rows is not self._host:
            there = [SplitRows(*(None if a is None else self._put(np.asarray(a)) for a in hop)) for hop in rows]
            self._host, self._there = rows, there
        return self._there


def put_on_device(value: Any, device: torch.device, in_device: bool, memo: dict | None = None) -> Any:
    """Return a state with tensors in place of the arrays that a device reads, each put once; see `placing`."""
    memo, put = {} if memo is None else memo, placing(device, in_device or isinstance(value, TypePools))

    def once(array: np.ndarray) -> torch.Tensor:
        place = array.ctypes.data, array.dtype, array.shape, array.strides
        if place not in memo:
            memo[place] = array, put(array)  # which keeps the array, so that no other takes its place
        return memo[place][1]

    if isinstance(value, np.ndarray):
        return once(value)
    if isinstance(value, Relation):
        return DeviceRelation.put(value, once)
    if isinstance(value, PreferredRows):
        return DeviceSplits(value, put)
    if isinstance(value, TypePools):  # searched by its starts, which torch does on the device alone
        return value._replace(
            **{name: once(one) for name, one in value._asdict().items() if isinstance(one, np.ndarray)}
        )
    if isinstance(value, tuple) and type(value) is not tuple:
        fields = {name: one for name, one in value._asdict().items() if name not in _STAYS}
        return value._replace(**{name: put_on_device(one, device, in_device, memo) for name, one in fields.items()})
    if isinstance(value, list | tuple):
        return type(value)(put_on_device(one, device, in_device, memo) for one in value)
    return value


def held_bytes(value: Any, seen: set | None = None) -> int:
    """Return bytes of what `put_on_device` puts of a state at once."""
    seen = set() if seen is None else seen
    if isinstance(value, np.ndarray):
        is_new = value.ctypes.data not in seen
        seen.add(value.ctypes.data)
        return value.nbytes if is_new else 0
    if isinstance(value, Relation):
        seen.update(array.ctypes.data for array in (value.indptr, value.indices))
        return relation_bytes(value)
    if isinstance(value, tuple) and type(value) is not tuple:
        value = [one for name, one in reversed(value._asdict().items()) if name not in _STAYS]
    return sum(held_bytes(one, seen) for one in value) if isinstance(value, list | tuple) else 0
