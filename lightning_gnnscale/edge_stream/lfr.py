"""The LFR benchmark at any size: power laws of degrees and of community sizes, and a share of edges that leave."""

import math

from .options import checked_integer, checked_number
from .planted_edges import mean_size
from .synthetic import SyntheticGraph


def lfr_graph(
    num_nodes: int,
    num_edges: int,
    mixing: float = 0.3,
    exponent: float = 2.5,
    community_exponent: float = 1.5,
    min_community: float = 50,
    max_community: float | None = None,
    max_degree: float | None = None,
    seed: int = 0,
) -> SyntheticGraph:
    """Return a generated graph by the parameters of the LFR benchmark; its edges are never held.

    Args:
        num_nodes, num_edges, exponent, max_degree, seed: see `SyntheticGraph`.
        mixing: mu, the share of the edges that leave their community, in [0, 1].
        community_exponent: density(s) ~ s ** -community_exponent of the sizes of communities, in [1, 100].
        min_community, max_community: their range, nodes; max_community None: a tenth of the nodes, but at least twice
            min_community.

    Raises:
        ValueError: a parameter is outside of its range.

    Source: Lancichinetti, Fortunato and Radicchi, Benchmark graphs for testing community detection algorithms, Phys.
        Rev. E 78, 2008. Differs: edges are drawn independently, so mixing, degrees and sizes spread around what is
        asked for, and a few percent of the edges repeat; repeats left out, the share that leaves is a little higher.
    """
    checked_integer("lfr.num_nodes", num_nodes, 4, 2**31 - 1)
    checked_number("lfr.mixing", mixing, 0, 1)
    checked_number("lfr.community_exponent", community_exponent, 1, 100)
    checked_number("lfr.min_community", min_community, 2, num_nodes)
    if max_community is None:
        max_community = min(num_nodes, max(num_nodes / 10, 2 * min_community))
    checked_number("lfr.max_community", max_community, min_community, num_nodes)
    mean = mean_size(min_community, max_community, community_exponent)
    num_communities = max(round(num_nodes / mean), math.ceil(num_nodes / max_community))
    return SyntheticGraph(
        num_nodes,
        num_edges,
        num_communities=min(num_communities, num_nodes // 2),
        homophily=1.0 - mixing,
        exponent=exponent,
        max_degree=max_degree,
        seed=seed,
        community_exponent=community_exponent,
        max_community=max_community,
    )
