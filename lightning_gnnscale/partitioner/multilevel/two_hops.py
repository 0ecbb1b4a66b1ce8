"""Two-hop clustering: nodes without a neighbour to join join one another, or coarsening would stall at hubs."""

import numpy as np

from ...jit import kernel


@kernel
def join_two_hops(node_weight, limit, group, label, weight, favourite):
    """Let nodes that stayed alone join one another where they like the same cluster; `favourite` is used up.

    A node without neighbours likes itself; all of those count as liking one cluster.
    """
    num_nodes, num_dims = len(label), node_weight.shape[1]
    every = np.int64(-1) if len(node_weight) == num_nodes else np.int64(0)
    by_group = np.int64(-1) if len(group) == num_nodes else np.int64(0)
    shared = np.zeros(num_nodes, np.bool_)
    for v in range(num_nodes):
        if label[v] != v:
            shared[v] = shared[label[v]] = True
    waiting = np.full(num_nodes, -1, label.dtype)
    lonely = np.full(256, -1, label.dtype)
    for v in range(num_nodes):
        if shared[v]:
            continue
        g, liked = group[v & by_group], favourite[v]
        other = lonely[g & 255] if liked == v else waiting[liked]
        if other >= 0 and group[other & by_group] == g:
            fits = True
            for d in range(num_dims):
                fits = fits and np.int64(weight[other, d]) + node_weight[v & every, d] <= limit[d]
            if fits:
                for d in range(num_dims):
                    weight[other, d] += node_weight[v & every, d]
                label[v] = other
                continue
        if liked == v:
            lonely[g & 255] = v
        else:
            waiting[liked] = v
