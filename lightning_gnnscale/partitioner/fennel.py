"""Fennel: each node goes to the part with most of its neighbours, less a price that grows with the part."""

import numpy as np

from .graph_access.external_csc import BLOCK_EDGES, ExternalCSC
from .graph_input import GraphInput, graph_partitioner
from .ldg import POWER, SizeRule, stream_nodes
from .registry import check_number


@graph_partitioner("fennel", memory=lambda num_nodes, *_: 6 * num_nodes)
def fennel(
    graph: GraphInput,
    num_parts: int,
    *,
    gamma: float = 1.5,
    alpha: float | None = None,
    passes: int = 1,
    order: str = "given",
    block_edges: int = BLOCK_EDGES,
) -> np.ndarray:
    """Partition by Fennel's greedy rule over a stream of nodes with their neighbours.

    Args:
        graph: see `ldg`.
        graph.balance: see `ldg`. None: a slack of 1.1, the paper's nu.
        num_parts: in [1, num_nodes].
        gamma: exponent of the cost alpha * size ** gamma of a part, >= 1.
        alpha: its factor, >= 0. None: num_edges * num_parts ** (gamma - 1) / num_nodes ** gamma, the paper's.
        passes, order, block_edges: see `ldg`.

    Returns:
        (num_nodes,) int32 part ids.

    Raises:
        ValueError: an option outside its range, another constraint, or a layout that the edges contradict.
        GNNScaleError: not enough scratch disk.
        EdgeStreamError: the edges changed between the passes.

    Cost: see `ldg`.
    Source: Tsourakakis et al., WSDM 2014; restreamed: Nishimura and Ugander, KDD 2013. Differs: the price of a part is
        the derivative alpha * gamma * size ** (gamma - 1), which stays exact for large parts; ties go to the least
        filled part, then to the lowest index; alpha is the same in every pass.
    """
    check_number("partitioner.gamma", gamma, at_least=1)
    if alpha is not None:
        check_number("partitioner.alpha", alpha, at_least=0)

    def rule(csc: ExternalCSC, cap: int) -> SizeRule:
        factor = default_alpha(csc.num_nodes, csc.num_edges, num_parts, gamma) if alpha is None else float(alpha)
        return SizeRule(POWER, cap, factor * gamma, float(gamma) - 1.0)

    return stream_nodes(graph, num_parts, rule, 1.1, passes, order, block_edges)


def default_alpha(num_nodes: int, num_edges: int, num_parts: int, gamma: float) -> float:
    """Return the paper's alpha, sqrt(num_parts) * num_edges / num_nodes**1.5 at gamma 1.5."""
    return num_edges * num_parts ** (gamma - 1.0) / num_nodes**gamma
