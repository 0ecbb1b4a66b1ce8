"""How strongly sampling prefers near rows, from epoch to epoch: Algorithm 2 as a value."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LocalityScale:
    """The scale s of `LocalityBias` and what Algorithm 2 remembers; `after_epoch` gives the next value.

    Args:
        lower, upper: shares of an epoch's time spent on loading, 0 <= lower <= upper <= 1; between them s is kept.
        max_scale: largest s, finite and >= 1.
        scale: s, in [1, max_scale].
        previous: s before the last doubling.
        fixed: s stays for good.

    Raises:
        ValueError: a value out of range.

    Source: Song and Jiang, Rethinking graph data placement for GNN training on multiple GPUs, ICS 2022, Algorithm 2.
    Differs: a doubling ends at max_scale where that is no power of two.
    """

    lower: float = 0.15
    upper: float = 0.20
    max_scale: float = 8.0
    scale: float = 1.0
    previous: float = 1.0
    fixed: bool = False

    def __post_init__(self):
        if not 0 <= self.lower <= self.upper <= 1:
            raise ValueError(
                f"lower and upper must be shares of time with 0 <= lower <= upper <= 1, got {self.lower} and "
                f"{self.upper}: the defaults are 0.15 and 0.2"
            )
        if not (math.isfinite(self.max_scale) and self.max_scale >= 1):
            raise ValueError(f"max_scale must be a finite number >= 1, got {self.max_scale}: the default is 8")
        for name in ("scale", "previous"):
            if not 1 <= getattr(self, name) <= self.max_scale:
                raise ValueError(
                    f"{name} must be in [1, max_scale {self.max_scale}], got {getattr(self, name)}: start at 1"
                )

    def after_epoch(self, loading_share: float) -> "LocalityScale":
        """Return the value for the next epoch.

        Args:
            loading_share: loading time over epoch time, in [0, 1].

        Raises:
            ValueError: loading_share is outside [0, 1], or NaN.
        """
        if not 0 <= loading_share <= 1:
            raise ValueError(f"loading_share must be in [0, 1], got {loading_share}: loading time over epoch time")
        if self.fixed:
            return self
        if self.scale >= self.max_scale:
            return replace(self, fixed=True)
        if loading_share > self.upper:
            return replace(self, previous=self.scale, scale=min(2 * self.scale, self.max_scale))
        if loading_share < self.lower and self.scale != 1:
            return replace(self, scale=(self.scale + self.previous) / 2)
        return replace(self, fixed=True)
