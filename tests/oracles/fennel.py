"""Fennel as Tsourakakis et al. tell it (WSDM 2014), restreamed like LDG: slow and obvious.

Settled: a part's price is the derivative of its cost, alpha * gamma * size ** (gamma - 1).
"""

from tests.oracles.ldg import stream_nodes


def fennel_parts(rows, num_parts, capacity, gamma=1.5, alpha=None, passes=1, order_of=None):
    """Return the part of each node; see `ldg_parts`."""
    if alpha is None:
        num_edges = sum(len(row) for row in rows) // 2
        alpha = num_edges * num_parts ** (gamma - 1.0) / len(rows) ** gamma

    def score(neighbors, size):
        return neighbors - (alpha * gamma) * float(size) ** (gamma - 1.0)

    return stream_nodes(rows, num_parts, capacity, score, passes, order_of)
