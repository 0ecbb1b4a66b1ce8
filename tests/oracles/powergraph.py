"""PowerGraph's greedy vertex-cut. Gonzalez et al., OSDI 2012, section 4.2, in order; ties go to the lowest part."""


def place_powergraph(edges, num_nodes, num_parts):
    """Return (u, v, part) in order; `edges` are (u, v), each undirected edge once, no self-loops."""
    unassigned = [0] * num_nodes
    for u, v in edges:
        unassigned[u] += 1
        unassigned[v] += 1
    parts_of = [set() for _ in range(num_nodes)]
    load = [0] * num_parts
    placed = []
    for u, v in edges:
        if parts_of[u] & parts_of[v]:
            allowed = parts_of[u] & parts_of[v]
        elif parts_of[u] and parts_of[v]:
            if unassigned[u] > unassigned[v]:
                allowed = parts_of[u]
            elif unassigned[v] > unassigned[u]:
                allowed = parts_of[v]
            else:
                allowed = parts_of[u] | parts_of[v]
        elif parts_of[u] or parts_of[v]:
            allowed = parts_of[u] or parts_of[v]
        else:
            allowed = set(range(num_parts))
        part = min(allowed, key=lambda part: (load[part], part))
        placed.append((u, v, part))
        load[part] += 1
        for node in (u, v):
            parts_of[node].add(part)
            unassigned[node] -= 1
    return placed
