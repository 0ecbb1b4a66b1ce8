"""2PS-L as its paper tells it. Mayer et al., ICDE 2022, Algorithms 1 and 2.

Settled, where the paper leaves it open: of two ends that may move u does; a cluster is named by the node that founded
it; ties of volume go to the lowest name, of scores and loads to the lowest part, of degrees to the lowest id.
"""

from lightning_gnnscale.rng import fold
from tests.oracles.dbh import hash_part

SALT = 0x3250534C


def place_two_phase(edges, num_nodes, num_parts, max_volume=None, alpha=1.05, seed=0):
    """Return (u, v, part) in the order of placing; `edges` are (u, v), each undirected edge once, no self-loops."""
    degree = [0] * num_nodes
    for u, v in edges:
        degree[u] += 1
        degree[v] += 1
    if max_volume is None:
        max_volume = 2 * len(edges) / num_parts
    cluster_of, volume = stream_clusters(edges, degree, max_volume)
    part_of = pack_clusters(volume, num_parts)
    capacity = max(int(alpha * len(edges) / num_parts), -(-len(edges) // num_parts))
    load = [0] * num_parts
    parts_of = [set() for _ in range(num_nodes)]
    placed = []

    def place(u, v, candidates):
        with_space = [part for part in candidates if load[part] < capacity]
        if with_space:
            part = max(with_space, key=lambda part: (score(u, v, part), -part))
        else:
            hub = min(u, v, key=lambda node: (-degree[node], node))
            part = hash_part(fold(seed, SALT, hub), num_parts)
            if load[part] >= capacity:
                part = load.index(min(load))
        load[part] += 1
        parts_of[u].add(part)
        parts_of[v].add(part)
        placed.append((u, v, part))

    def score(u, v, part):
        total = 0.0
        for node in (u, v):
            if part in parts_of[node]:
                total += 1.0 + (1.0 - degree[node] / (degree[u] + degree[v]))
        for node in (u, v):
            if part_of[cluster_of[node]] == part:
                total += volume[cluster_of[node]] / (volume[cluster_of[u]] + volume[cluster_of[v]])
        return total

    for u, v in edges:
        if part_of[cluster_of[u]] == part_of[cluster_of[v]]:
            place(u, v, [part_of[cluster_of[u]]])
    for u, v in edges:
        if part_of[cluster_of[u]] != part_of[cluster_of[v]]:
            place(u, v, [part_of[cluster_of[u]], part_of[cluster_of[v]]])
    return placed


def stream_clusters(edges, degree, max_volume):
    """Return the cluster of every node that an edge touches, and the volumes of the clusters."""
    cluster_of, volume = {}, {}
    for u, v in edges:
        for node in (u, v):
            if node not in cluster_of:
                cluster_of[node] = node
                volume[node] = degree[node]
        if cluster_of[u] == cluster_of[v]:
            continue
        beside_u = volume[cluster_of[u]] - degree[u]
        beside_v = volume[cluster_of[v]] - degree[v]
        small, large = (u, v) if beside_u <= beside_v else (v, u)
        if volume[cluster_of[large]] + degree[small] <= max_volume:
            volume[cluster_of[small]] -= degree[small]
            volume[cluster_of[large]] += degree[small]
            cluster_of[small] = cluster_of[large]
    return cluster_of, volume


def pack_clusters(volume, num_parts):
    """Return the part of each cluster: by descending volume, each to the part with the least."""
    part_of, filled = {}, [0] * num_parts
    for name in sorted(volume, key=lambda name: (-volume[name], name)):
        if volume[name]:
            part_of[name] = filled.index(min(filled))
            filled[part_of[name]] += volume[name]
    return part_of
