"""Exact exchange of the rows that are read."""

from .policy import BACKWARDS, ExchangePlan, ExchangePolicy


class HaloExchange(ExchangePolicy):
    """Send each process exactly the rows that its arcs read; the result equals that of one process.

    Args:
        backward: "push": gradients of halo rows go back to their owners and are added there; "pull": each process
            reads the gradients of its readers' outputs, which are narrower in the last layer and zero for nodes
            without a label; "auto": pull in undirected, unweighted graphs for layers that are linear in their
            neighbours (GCN, GraphSAGE), push elsewhere.

    Raises:
        ValueError: an unknown backward.

    Cost: forward, per layer but the first: halo rows x width x 4 bytes; pushed back the same.
    """

    def __init__(self, backward: str = "push") -> None:
        if backward not in BACKWARDS:
            raise ValueError(f"exchange.backward must be one of {', '.join(BACKWARDS)}, got {backward!r}")
        self.backward = backward

    def plan(self) -> ExchangePlan:
        return ExchangePlan(backward=self.backward)
