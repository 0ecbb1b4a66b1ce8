"""No exchange: every process trains on what its parts and their halos hold."""

from .policy import ExchangePolicy


class NoExchange(ExchangePolicy):
    """Layers read nothing of other processes; what a part needs beyond itself stands in its halo.

    Source: Huang et al., SDT-GNN, training of local models.
    """
