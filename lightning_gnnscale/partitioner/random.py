"""Random parts of equal size: the floor that every other method is measured against."""

import numpy as np

from ..rng import fold, permutation
from . import phases
from .registry import refuse_balance, register_partitioner

_SALT = 0x52414E44  # keeps this use of the seed apart from all others


@register_partitioner("random", memory=lambda num_nodes, *_: 5 * num_nodes)
def random(stream, num_parts: int, *, seed: int = 0, masks=None, balance=None, progress=None) -> np.ndarray:
    """Deal the nodes out in an order that is a hash of (seed, node id); part sizes differ by at most one.

    Args:
        stream: an EdgeStream; only its number of nodes is used.
        num_parts: in [1, num_nodes].
        seed: decides the order.
        masks, progress: not used.
        balance: must be None.

    Returns:
        (num_nodes,) int32 part ids.

    Cost: O(num_nodes log num_nodes) time; about 32 bytes a node.
    """
    refuse_balance("random", balance)
    if stream.num_nodes is None:
        stream.count()
    with phases.phase("assignment"):
        part_id = np.empty(stream.num_nodes, np.int32)
        part_id[permutation(stream.num_nodes, fold(seed, _SALT))] = np.arange(stream.num_nodes) % num_parts
    return part_id
