"""How well links rank before false ones: reciprocal ranks and hits, added up over batches and processes."""

import torch
from torch import Tensor
from torchmetrics import Metric


def link_ranks(positive: Tensor, negative: Tensor) -> Tensor:
    """Return the rank of each link among its negatives, 1 the best; with ties the mean of best and worst.

    Args:
        positive: (num_links,) scores.
        negative: (num_links, num_negatives) scores, -inf where there is none.

    Returns:
        (num_links,) float64, multiples of a half.
    """
    above = (negative > positive[:, None]).sum(dim=1)
    beside = ((negative == positive[:, None]) & negative.isfinite()).sum(dim=1)
    return 1 + above.double() + beside.double() / 2


class LinkMetric(Metric):
    """Base: the mean of a value of the rank over all links of all processes; a link counts alike on each of them."""

    full_state_update = False

    def __init__(self, **options):
        super().__init__(**options)
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def value(self, ranks: Tensor) -> Tensor:
        """Return what a link of this rank adds, (num_links,)."""
        raise NotImplementedError

    def update(self, ranks: Tensor) -> None:
        """Add links by their (num_links,) ranks; none are fine."""
        self.total += self.value(ranks).double().sum()
        self.count += len(ranks)

    def compute(self) -> Tensor:
        """Return the mean as float32; 0 without links."""
        return (self.total / self.count.clamp(min=1)).float()


class MeanReciprocalRank(LinkMetric):
    """The mean of 1 / rank."""

    def value(self, ranks: Tensor) -> Tensor:
        return ranks.reciprocal()


class HitsAt(LinkMetric):
    """The share of links whose rank is at most k.

    Args:
        k: >= 1.

    Raises:
        ValueError: k below 1.
    """

    def __init__(self, k: int, **options):
        super().__init__(**options)
        if k < 1:
            raise ValueError(f"hits must be at least 1, got {k}")
        self.k = k

    def value(self, ranks: Tensor) -> Tensor:
        return ranks <= self.k
