"""Parts of a graph with hubs and without communities: the nodes with most neighbours make one of them.

Clusters of such a graph are hardly more than trees, however many edges there are, and their graph tells little. Where
edges join nodes by their degrees alone, the share of edges that is not cut is the sum over parts of their share of all
ends squared: greatest where one part has as many ends as it can.
"""

import numpy as np

from ...jit import kernel
from ...rng import below, combine, fold
from .weighted_graph import PART_DTYPE, BlockGraph, WeightedGraph, part_loads

TREELIKE = 1.1  # edges inside clusters for a node, of clusters that tell nothing
MIN_SHARE = 0.5  # of all edges, times the number of parts: fewer between hubs are no reason to put them together
MOST_DEARER = 1.03  # what parts with hubs may cut at first, over clusters that are given parts at random
MOST_LOAD = 1.2  # of a part's cap, that the part of the hubs may weigh: sweeps let some go
SAMPLED_ROWS = 8  # of so many rows one is counted

_SALT = 0x48554253  # separates this use of the seed from all others


def hub_parts(graph: WeightedGraph | BlockGraph, label: np.ndarray, cap: np.ndarray, seed: int) -> np.ndarray | None:
    """Return parts to begin with, the hubs in part 0, the clusters of the rest in the others at random.

    Args:
        graph: the graph; its edges weigh one each.
        label: (num_nodes,) clusters, each the id of a node.
        cap: (num_parts, D) int64, what each part may weigh.
        seed: decides where clusters go.

    Returns:
        (num_nodes,) int16; None where clusters tell more, there are no hubs, or they do not fit a part.

    Cost: O(num_nodes) time, 12 bytes a node, and a look at an eighth of the first block.
    Source: ours.
    """
    degree, num_parts = graph.degree, len(cap)
    num_hubs = len(degree) // num_parts
    if num_parts < 2 or num_hubs == 0:
        return None
    least = np.partition(degree, len(degree) - num_hubs)[len(degree) - num_hubs]
    hubs = degree > least
    share = degree[hubs].sum(dtype=np.int64) / max(1, degree.sum(dtype=np.int64))
    if share**2 * num_parts < MIN_SHARE:
        return None
    part, key = np.empty(len(degree), PART_DTYPE), np.uint64(fold(seed, _SALT))
    _give_parts(label, hubs, num_parts, key, part)
    block = next(graph.blocks())
    nodes, inside, cut, cut_at_random = _count_sample(
        block.first_node, block.indptr, block.indices, label, part, key, num_parts
    )
    if inside > 2 * TREELIKE * nodes or cut > MOST_DEARER * cut_at_random:
        return None
    return None if (part_loads(graph.node_weight, part, num_parts) > MOST_LOAD * cap).any() else part


@kernel
def _give_parts(label, hubs, num_parts, key, part):
    for v in range(len(part)):
        part[v] = 0 if hubs[v] else 1 + below(combine(key, label[v]), num_parts - 1)


@kernel
def _count_sample(first_node, indptr, indices, label, part, key, num_parts):
    """Return some rows' nodes, entries inside clusters, entries cut by the parts, and by clusters' parts at random."""
    nodes, inside, cut, cut_at_random = 0, 0, 0, 0
    for row in range(0, len(indptr) - 1, SAMPLED_ROWS):
        v = first_node + row
        own = below(combine(key, label[v]), num_parts)
        nodes += indptr[row + 1] > indptr[row]
        for e in range(indptr[row], indptr[row + 1]):
            u = indices[e]
            inside += label[u] == label[v]
            cut += part[u] != part[v]
            cut_at_random += below(combine(key, label[u]), num_parts) != own
    return nodes, inside, cut, cut_at_random
