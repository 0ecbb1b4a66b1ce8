"""Store ids: a part is a contiguous range, and inside a part nodes keep their original order."""

from typing import NamedTuple

import numpy as np

from ..graph import id_dtype
from ..jit import kernel


class StoreIds(NamedTuple):
    """The two id spaces.

    Attributes:
        part_offsets: (num_parts + 1,) int64, part p owns the store ids [part_offsets[p], part_offsets[p + 1]).
        original_nid: (num_nodes,) original id of each store id.
        store_nid: (num_nodes,) store id of each original id.
    """

    part_offsets: np.ndarray
    original_nid: np.ndarray
    store_nid: np.ndarray


def relabel(part_id: np.ndarray, num_parts: int) -> StoreIds:
    """Number the nodes part by part.

    Args:
        part_id: (num_nodes,) int32 in [0, num_parts).
        num_parts: number of parts, some of which may be empty.

    Returns:
        StoreIds; the maps have `id_dtype(num_nodes)`.

    Cost: O(num_nodes + num_parts) time and two id arrays.
    """
    original_nid, part_offsets = group_by_part(part_id, num_parts, np.empty(len(part_id), id_dtype(len(part_id))))
    store_nid = np.empty_like(original_nid)
    _invert(original_nid, store_nid)
    return StoreIds(part_offsets, original_nid, store_nid)


@kernel
def group_by_part(part_id, num_parts, out):
    """Fill out with the positions of part_id sorted by part, stably; return it and the (num_parts + 1,) offsets."""
    offsets = np.zeros(num_parts + 1, np.int64)
    for i in range(len(part_id)):
        offsets[part_id[i] + 1] += 1
    for part in range(num_parts):
        offsets[part + 1] += offsets[part]
    cursor = offsets[:-1].copy()
    for i in range(len(part_id)):
        out[cursor[part_id[i]]] = i
        cursor[part_id[i]] += 1
    return out, offsets


@kernel
def _invert(original_nid, store_nid):
    for store_id in range(len(original_nid)):
        store_nid[original_nid[store_id]] = store_id
