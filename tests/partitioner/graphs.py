"""Graphs that the partitioner tests share."""

import numpy as np
from hypothesis import strategies as st

from lightning_gnnscale.edge_stream import open_edge_stream


@st.composite
def simple_graphs(draw, max_nodes=24):
    """(num_nodes, list of (u, v)): each undirected edge once, in any order and direction, no self-loops."""
    num_nodes = draw(st.integers(1, max_nodes))
    pairs = [(u, v) for u in range(num_nodes) for v in range(u + 1, num_nodes)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=60)) if pairs else []
    flips = draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
    return num_nodes, [(v, u) if flip else (u, v) for (u, v), flip in zip(chosen, flips, strict=True)]


def listed(edges, layout, seed=0):
    """The same graph as a source of another layout lists it: an edge list in an order sampled from the seed."""
    rng = np.random.default_rng(seed)
    edges = list(edges)
    if layout == "both_ways":
        edges += [(v, u) for u, v in edges]
    elif layout == "directed":
        edges += [(v, u) for u, v in edges if rng.random() < 0.4]
        edges += [(u, v) for u, v in edges if rng.random() < 0.1]
    return [edges[i] for i in rng.permutation(len(edges))]


def stream_of(edges, num_nodes, dtype=np.int32, **options):
    array = np.asarray(edges, dtype).reshape(-1, 2).T
    return open_edge_stream(np.ascontiguousarray(array), num_nodes=num_nodes, **options)


ODD = {
    "no_edges": (5, []),
    "one_node": (1, []),
    "isolated": (9, [(0, 1), (4, 5)]),
    "self_loops": (4, [(0, 0), (1, 2), (3, 3), (3, 3), (2, 3)]),
    "only_self_loops": (3, [(0, 0), (2, 2)]),
    "duplicates": (5, [(0, 1), (1, 0), (0, 1), (2, 3), (2, 3), (3, 4)]),
    "star": (20, [(0, v) for v in range(1, 20)]),
    "hub": (40, [(7, v) for v in range(40) if v != 7] + [(v, v + 1) for v in range(10, 14)]),
    "path": (30, [(v, v + 1) for v in range(29)]),
    "clique": (12, [(u, v) for u in range(12) for v in range(u)]),
    "two_components": (20, [(u, v) for u in range(10) for v in range(u)] + [(v, v + 1) for v in range(10, 19)]),
}
