"""SPRING as its paper's Algorithm 1 tells it, with the points that it leaves open settled: slow and obvious.

Huang et al., SDT-GNN, Algorithm 1. Settled: a cluster is named by the node that founded it while edges stream, and by
its lowest node from then on; all ties go to the lowest id or name.
"""


def simple_edges(edges, layout):
    """Return the undirected simple graph's edges in stream order, as a layout lists them."""
    kept, seen = [], set()
    for u, v in edges:
        if u == v or (layout == "both_ways" and u > v):
            continue
        pair = (min(u, v), max(u, v))
        if pair not in seen:
            seen.add(pair)
            kept.append((u, v))
    return kept


def spring_parts(edges, num_nodes, num_parts, tau_vol=None, beta=1.05):
    """Return the part of each node; `edges` are (u, v), each undirected edge once, no self-loops."""
    degree = [0] * num_nodes
    for u, v in edges:
        degree[u] += 1
        degree[v] += 1
    if tau_vol is None:
        tau_vol = 0.1 * 2 * len(edges) / num_parts
    cluster_of, richest = stream_clusters(edges, degree, tau_vol)
    clusters = merge_clusters(cluster_of, richest, degree, beta * num_nodes / num_parts)
    return assign(clusters, num_nodes, num_parts)


def stream_clusters(edges, degree, tau_vol):
    """Return the cluster and the richest neighbour of every node that an edge touches."""
    cluster_of, volume, richest = {}, {}, {}
    for u, v in edges:
        for node in (u, v):
            if node not in cluster_of:
                cluster_of[node] = node
                volume[node] = degree[node]
        a, b = cluster_of[u], cluster_of[v]
        if a != b and volume[a] <= tau_vol and volume[b] <= tau_vol:
            if volume[a] <= volume[b]:
                cluster_of[u] = b
                volume[a] -= degree[u]
                volume[b] += degree[u]
            else:
                cluster_of[v] = a
                volume[b] -= degree[v]
                volume[a] += degree[v]
        for node, other in ((u, v), (v, u)):
            if node not in richest or degree[other] > degree[richest[node]]:
                richest[node] = other
    return cluster_of, richest


def merge_clusters(cluster_of, richest, degree, max_size):
    """Return the merged clusters as a dict from name to set of nodes."""
    founded = {}
    for node, cluster in cluster_of.items():
        founded.setdefault(cluster, set()).add(node)
    clusters = {min(nodes): nodes for nodes in founded.values()}
    waiting = set(clusters)
    while waiting:
        name = min(waiting, key=lambda name: (len(clusters[name]), name))
        waiting.remove(name)
        representative = min(clusters[name], key=lambda node: (-degree[richest[node]], node))
        target = next(other for other in clusters if richest[representative] in clusters[other])
        if target != name and len(clusters[name]) + len(clusters[target]) <= max_size:
            clusters[target] |= clusters.pop(name)
            waiting.add(target)  # larger now: it is ranked again
    return clusters


def assign(clusters, num_nodes, num_parts):
    """Give clusters, largest first, then nodes without edges, to the least filled part."""
    part_of, filled = [None] * num_nodes, [0] * num_parts
    for name in sorted(clusters, key=lambda name: (-len(clusters[name]), name)):
        part = filled.index(min(filled))
        filled[part] += len(clusters[name])
        for node in clusters[name]:
            part_of[node] = part
    for node in range(num_nodes):
        if part_of[node] is None:
            part = filled.index(min(filled))
            filled[part] += 1
            part_of[node] = part
    return part_of
