"""Which nodes are targets, and in which order a pass visits them."""

from collections.abc import Sequence

import numpy as np

from ..rng import fold


def core_targets(mask: np.ndarray, part_offsets: np.ndarray, part: int) -> np.ndarray:
    """Return the target nodes of a part: its core nodes inside a mask.

    Args:
        mask: (num_nodes,) bool in store order; only the part's own range is read.
        part_offsets: (num_parts + 1,) int64.
        part: part id.

    Returns:
        (num_targets,) int64 store ids, ascending.
    """
    start, end = int(part_offsets[part]), int(part_offsets[part + 1])
    return start + np.flatnonzero(mask[start:end])


def split_targets(targets: np.ndarray, world_size: int) -> list[np.ndarray]:
    """Give every rank the same number of targets, as contiguous ranges of their ids.

    Store ids go by parts, so the ranges follow the parts in order. Each range has ceil(num_targets / world_size)
    targets; where that is not even, a range shares one target with the next: none is left out, and no rank waits.

    Args:
        targets: (num_targets,) store ids, ascending.
        world_size: number of ranks, >= 1.

    Raises:
        ValueError: there are more ranks than targets.

    Source: DistDGL's two-level split of the training set. Differs: counts are exactly equal.
    """
    if not 1 <= world_size <= max(len(targets), 1):
        raise ValueError(f"world_size must be in [1, {len(targets)}], the number of targets, got {world_size}")
    share = -(-len(targets) // world_size)
    starts = [rank * len(targets) // world_size for rank in range(world_size)]
    return [targets[start : start + share] for start in starts]


def order_key(seed: int, epoch: int, part: int) -> int:
    """Return the key of the order in which a pass visits the targets of a part."""
    return fold(seed, epoch, part)


def longest_rank(batches_per_part: Sequence[int], world_size: int) -> int:
    """Return the batches of the rank that has most, with parts given to ranks cyclically: what `pad_to` takes."""
    return max(sum(batches_per_part[rank::world_size]) for rank in range(world_size))
