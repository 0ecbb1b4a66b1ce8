"""HDRF as its paper tells it: every part is scored for every edge. Petroni et al., CIKM 2015, section 4.

Degrees are partial: those of the edges seen so far, this one included. Ties go to the lowest part.
"""


def place_hdrf(edges, num_nodes, num_parts, balance_weight=1.0, epsilon=1.0):
    """Return (u, v, part) in order; `edges` are (u, v), each undirected edge once, no self-loops."""
    degree = [0] * num_nodes
    parts_of = [set() for _ in range(num_nodes)]
    load = [0] * num_parts
    placed = []
    for u, v in edges:
        degree[u] += 1
        degree[v] += 1
        theta_u = degree[u] / (degree[u] + degree[v])
        theta_v = 1.0 - theta_u
        largest, smallest = max(load), min(load)
        best_part, best_score = None, -1.0
        for part in range(num_parts):
            g_u = 1.0 + (1.0 - theta_u) if part in parts_of[u] else 0.0
            g_v = 1.0 + (1.0 - theta_v) if part in parts_of[v] else 0.0
            balance = (largest - load[part]) / (epsilon + (largest - smallest))
            score = g_u + g_v + balance_weight * balance
            if score > best_score:
                best_part, best_score = part, score
        placed.append((u, v, best_part))
        load[best_part] += 1
        parts_of[u].add(best_part)
        parts_of[v].add(best_part)
    return placed
