"""The walk of all ranks together over all parts, several of them open at a time."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..rng import fold, permutation
from .part_walk import Position

_WALK = 1 << 43  # the order of parts has keys of its own


class Interleave(NamedTuple):
    """How a rank takes part in an `InterleavedWalk`; see there."""

    rank: int = 0
    world_size: int = 1
    lanes: int = 4


@dataclass(frozen=True)
class InterleavedWalk:
    """One rank's batches of an epoch in which every step of all ranks is of one part, and parts take turns.

    `lanes` parts are open at a time, in a new order every epoch; one step of each is taken in turn, and where a part
    ends, the next one takes its lane. In a step rank r has batch step * world_size + r of the part, so that all ranks
    have as many batches, and those of one step share neighbours.

    Args:
        parts: all parts; those without batches are passed over.
        num_batches: steps of one pass over each part, in each of which every rank has one batch.
        rank, world_size: of this process.
        lanes: parts that are open at a time, >= 1.
        seed: of the order of parts.

    Source: Armada, mini-batches of disjoint sets of parts that workers prepare side by side.
    """

    parts: Sequence[int]
    num_batches: Mapping[int, int]
    rank: int
    world_size: int
    lanes: int
    seed: int

    def __len__(self) -> int:
        return sum(self.num_batches[part] for part in self.parts)

    @property
    def parts_open(self) -> int:
        """Parts that are in memory at a time: those that are open, and the next one."""
        return self.lanes + 1

    def positions(self, epoch: int, start: int = 0) -> Iterator[Position]:
        """Yield the batches of an epoch from position `start` on."""
        coming = deque(part for part in self._order(epoch) if self.num_batches[part])
        lanes = deque((coming.popleft(), 0) for _ in range(min(self.lanes, len(coming))))
        place = 0
        while lanes:
            part, step = lanes.popleft()
            if place >= start:
                following = coming[0] if coming else None
                yield Position(0, part, epoch, step * self.world_size + self.rank, following)
            place += 1
            if step + 1 < self.num_batches[part]:
                lanes.append((part, step + 1))
            elif coming:
                lanes.append((coming.popleft(), 0))

    def _order(self, epoch: int) -> list[int]:
        return [self.parts[place] for place in permutation(len(self.parts), fold(self.seed, epoch, _WALK))]


def even_slices(order: np.ndarray, num_slices: int) -> list[np.ndarray]:
    """Return consecutive pieces of (num_items,) whose lengths differ by one at most; with few items some come twice.

    Args:
        order: at least one item.
        num_slices: >= 1.
    """
    bounds = [number * len(order) // num_slices for number in range(num_slices + 1)]
    return [order[start : max(stop, start + 1)] for start, stop in pairwise(bounds)]
