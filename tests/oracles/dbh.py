"""Degree-based hashing as its paper tells it. Xie et al., NIPS 2014, Algorithm 1; ties go to the lowest id."""

from lightning_gnnscale.rng import fold

SALT = 0x444248


def place_dbh(edges, num_nodes, num_parts, seed=0):
    """Return (u, v, part) in order; `edges` are (u, v), each undirected edge once, no self-loops."""
    degree = [0] * num_nodes
    for u, v in edges:
        degree[u] += 1
        degree[v] += 1
    placed = []
    for u, v in edges:
        cut_last = min(u, v, key=lambda node: (degree[node], node))
        placed.append((u, v, hash_part(fold(seed, SALT, cut_last), num_parts)))
    return placed


def hash_part(random, num_parts):
    """Return the upper 32 bits of a 64-bit hash, scaled to [0, num_parts)."""
    return ((random >> 32) * num_parts) >> 32
