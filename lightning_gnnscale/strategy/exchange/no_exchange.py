"""No exchange: every process trains on what its parts and their halos hold."""

from .policy import ExchangePolicy


class NoExchange(ExchangePolicy):
    """Layers read nothing of other processes while they train.

    With `PartitionDataModule` what a part needs beyond itself stands in its halo. With `FullGraphDataModule` arcs
    between processes are dropped, and degrees are those of the arcs that are left; evaluation is exact.

    Source: Huang et al., SDT-GNN, training of local models.
    """
