"""Which part owns a node when it is edges that were placed: by all the parts of its edges, slow and obvious."""

from lightning_gnnscale.rng import fold

SALT = 0x4D415354


def master_parts(placed, num_nodes, num_parts, rule="majority", seed=0):
    """Return the part of each node; `placed` are (u, v, part) in the order in which they were placed."""
    parts_of = [[] for _ in range(num_nodes)]
    for u, v, part in placed:
        parts_of[u].append(part)
        parts_of[v].append(part)
    part_of = [None] * num_nodes
    for node, parts in enumerate(parts_of):
        if not parts:
            continue
        if rule == "majority":
            part_of[node] = max(range(num_parts), key=lambda part: (parts.count(part), -part))
        elif rule == "last":
            part_of[node] = parts[-1]
        elif rule == "random":
            part_of[node] = min(set(parts), key=lambda part: fold(seed, SALT, node, part))
    for node in range(num_nodes):
        if part_of[node] is None:
            sizes = [part_of.count(part) for part in range(num_parts)]
            part_of[node] = sizes.index(min(sizes))
    return part_of
