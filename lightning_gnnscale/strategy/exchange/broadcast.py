"""Exact exchange of whole blocks: CAGNET's 1-D algorithm."""

from .policy import ExchangePlan, ExchangePolicy


class BroadcastExchange(ExchangePolicy):
    """Send every process all rows of every other, in every layer but the first, forward and backward.

    Cost: num_nodes x (world_size - 1) x width x 4 bytes a layer and direction, over all processes.
    Source: Tripathy et al., Reducing communication in graph neural network training (CAGNET), SC 2020, 1-D; the
    baseline of SANCUS.
    """

    def plan(self) -> ExchangePlan:
        return ExchangePlan(whole_blocks=True, backward="push")
