"""What a batch starts from: seeds, and for losses over links their positives and negatives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..staged_part import StagedPart


class SeedOperator(Protocol):
    """Draws the seeds of a batch."""

    def draw(self, staged: StagedPart, items: np.ndarray, key: int) -> np.ndarray:
        """Return (num_seeds,) distinct local ids.

        Args:
            staged: the part.
            items: what the batch starts from, of the sampler that the part was staged for.
            key: uint64, of this operator and batch.
        """


class PositiveOperator(Protocol):
    """Draws a positive for each seed."""

    def draw(self, staged: StagedPart, seeds: np.ndarray, key: int) -> np.ndarray:
        """Return (num_seeds,) local ids; a seed itself means that it has none. Arguments as for seeds."""


class NegativeOperator(Protocol):
    """Draws negatives for each seed."""

    def draw(self, staged: StagedPart, seeds: np.ndarray, key: int) -> np.ndarray:
        """Return (num_seeds, num_negatives) local ids; arguments as for seeds."""


@dataclass(frozen=True)
class BatchSeeds:
    """The items are the seeds, as `NeighborSampler` makes them."""

    def draw(self, staged: StagedPart, items: np.ndarray, key: int) -> np.ndarray:
        return np.asarray(items)


@dataclass(frozen=True)
class LinkPositives:
    """Draw positives by a function of (csc, seeds, key) over the part's rows, such as `sampler.draw_positives`."""

    draws: Callable[..., np.ndarray]

    def draw(self, staged: StagedPart, seeds: np.ndarray, key: int) -> np.ndarray:
        return self.draws(staged.graph.csc, seeds, key)


@dataclass(frozen=True)
class LinkNegatives:
    """Draw negatives from the core of the part by a function of (num_nodes, num, key), such as `draw_negatives`.

    Args:
        draws: The function.
        num_negatives: Negatives per seed, >= 1.
    """

    draws: Callable[..., np.ndarray]
    num_negatives: int = 5

    def __post_init__(self):
        if self.num_negatives < 1:
            raise ValueError(f"num_negatives must be at least 1, got {self.num_negatives}")

    def draw(self, staged: StagedPart, seeds: np.ndarray, key: int) -> np.ndarray:
        drawn = self.draws(staged.graph.num_core, len(seeds) * self.num_negatives, key)
        return drawn.reshape(len(seeds), self.num_negatives)
