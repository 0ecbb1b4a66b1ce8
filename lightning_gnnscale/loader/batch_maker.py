"""How the batch of a key is made from its part: what every source does, wherever it does it."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import numpy as np

from ..errors import GNNScaleError
from ..rng import batch_key
from ..sampler.minibatch import MiniBatch
from .batch_builder import BatchBuilder
from .batch_source import BatchKey
from .staged_part import StagedPart


@dataclass(frozen=True)
class BatchMaker:
    """Make batches of staged parts; may be called from several threads at once.

    Args:
        builder: draws batches and fills them.
        batch_size: targets a batch.
        shuffle, drop_last: of a pass over a part.
        gathers: False leaves out the features, for `builder.fill`.
        num_ranks: ranks that share each part's batches evenly; None: a part belongs to one rank.
        parts_open: parts that batches are asked for at a time.
        passes: over a part in one epoch, by which the epochs of keys are counted.
    """

    builder: BatchBuilder
    batch_size: int
    shuffle: bool = True
    drop_last: bool = False
    gathers: bool = True
    num_ranks: int | None = None
    parts_open: int = 2
    passes: int = 1

    def __getstate__(self) -> dict:
        if self.gathers:
            return vars(self)
        builder = copy(self.builder)
        builder.features = None  # they stay where they are
        return vars(self) | {"builder": builder}

    def make(self, key: BatchKey, staged: Callable[[], StagedPart]) -> MiniBatch:
        """Return the batch of a key.

        Args:
            key: of the batch.
            staged: returns the part; called once.

        Raises:
            GNNScaleError: whatever went wrong, with part, batch and epoch.
        """
        try:
            part = staged()
            prepare = self.builder.build if self.gathers else self.builder.draw
            return prepare(part, self.items(key, part), batch_key(*key))
        except Exception as error:
            raise batch_error(key, f"{type(error).__name__}: {error}") from error

    def items(self, key: BatchKey, part: StagedPart) -> np.ndarray:
        """Return what the batch of a key starts from."""
        order = (key.seed, key.epoch, self.shuffle, self.num_ranks)
        return part.items(self.builder.sampler, self.batch_size, self.drop_last, *order)[key.batch]


def batch_error(key: BatchKey, what: str) -> GNNScaleError:
    """Return the error of a batch that could not be prepared."""
    return GNNScaleError(f"part {key.part}, batch {key.batch} of epoch {key.epoch}: {what}")
