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
_LOOKED_AT = 16  # epochs


class Interleave(NamedTuple):
    """How a rank takes part in an `InterleavedWalk`; see there."""

    rank: int = 0
    world_size: int = 1
    lanes: int = 4


@dataclass(frozen=True)
class InterleavedWalk:
    """One rank's pieces of batches in an epoch in which parts take turns.

    `lanes` parts are open at a time, in a new order every epoch. One piece of each is taken in turn; where a part ends,
    the next one takes its lane. A run of `lanes` pieces makes a batch (`mixed_batches`): parts of a low cut have few
    classes each, so batches of a single part would pull the weights to and fro. In each turn of a part every rank takes
    one piece: rank r takes piece turn * world_size + r. So all ranks get equally many, and the pieces of a turn share
    neighbours.

    Args:
        parts: All parts; those without batches are skipped.
        num_batches: Number of turns in one pass over each part; every rank takes one piece per turn.
        rank, world_size: Rank of this process, and number of processes.
        lanes: Parts that are open at a time, and pieces per batch, >= 1.
        seed: Seed of the order of parts.
        shuffle: Whether parts come in a new order every epoch; False: in the order of `parts`.

    Source: Chiang et al., Cluster-GCN, KDD 2019, stochastic multiple partitions; Armada, mini-batches of disjoint sets
    of parts that workers prepare side by side.
    """

    parts: Sequence[int]
    num_batches: Mapping[int, int]
    rank: int
    world_size: int
    lanes: int
    seed: int
    shuffle: bool = True

    def __len__(self) -> int:
        return sum(self.num_batches[part] for part in self.parts)

    @property
    def parts_open(self) -> int:
        """Parts that are in memory at a time: those that are open, and the next one."""
        return self.lanes + 1

    def most_held(self, sizes: np.ndarray, parts_held: int) -> int:
        """Return the largest sum over parts that are in memory together, of the first epochs; see `PartWalk`.

        Sizes of parts differ, and the largest of them meet in few of the orders that are drawn.
        """
        size, most = dict(zip(self.parts, np.asarray(sizes).tolist(), strict=True)), 0
        held: dict[int, None] = {}  # the last one is the latest that was asked for; parts stay from epoch to epoch
        for epoch in range(_LOOKED_AT if self.shuffle else 1):
            for position in self.positions(epoch):
                for part in (position.part, position.following):
                    if part is None or next(reversed(held), None) == part:
                        continue
                    held.pop(part, None)
                    held[part] = None
                    if len(held) > parts_held:
                        del held[next(iter(held))]
                most = max(most, sum(size[part] for part in held))
        return most

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
        if not self.shuffle:
            return list(self.parts)
        return [self.parts[place] for place in permutation(len(self.parts), fold(self.seed, epoch, _WALK))]


def even_slices(order: np.ndarray, num_slices: int) -> list[np.ndarray]:
    """Return consecutive pieces of (num_items,) whose lengths differ by one at most; with few items some come twice.

    Args:
        order: at least one item.
        num_slices: >= 1.
    """
    bounds = [number * len(order) // num_slices for number in range(num_slices + 1)]
    return [order[start : max(stop, start + 1)] for start, stop in pairwise(bounds)]
