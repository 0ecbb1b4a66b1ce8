"""A sampler that takes its time, for workers that import it."""

import time
from dataclasses import dataclass

from lightning_gnnscale.sampler import NeighborSampler


@dataclass(frozen=True)
class PacedSampler(NeighborSampler):
    """Draws what `NeighborSampler` does, and sleeps beside: as many workers as wanted fit on few cores."""

    seconds: float = 0.0

    def draw(self, *arguments, **options):
        time.sleep(self.seconds)
        return super().draw(*arguments, **options)
