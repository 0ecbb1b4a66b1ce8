"""Jet's rounds without balance, node after node in plain Python: candidates, the afterburner, resting nodes."""


def candidates(rows, part, resting, loss):
    """Return {node: (part it would go to, gain)}; of equally good parts the lowest."""
    found = {}
    for v, row in enumerate(rows):
        connection = {}
        for u, w in row:
            connection[part[u]] = connection.get(part[u], 0) + w
        inside = connection.pop(part[v], 0)
        if not connection or v in resting:
            continue
        best = min(connection, key=lambda b: (-connection[b], b))
        gain = connection[best] - inside
        if gain >= 0 or -gain < loss * inside:
            found[v] = (best, gain)
    return found


def afterburner(rows, part, found):
    """Return the candidates that do not lose when all that gain more (or as much, with a lower id) have moved."""
    moving = set()
    for v, (target, gain) in found.items():
        balance = 0
        for u, w in rows[v]:
            there = part[u]
            if u in found and (found[u][1] > gain or (found[u][1] == gain and u < v)):
                there = found[u][0]
            balance += w if there == target else -w if there == part[v] else 0
        if balance >= 0:
            moving.add(v)
    return moving


def cut_of(rows, part):
    return sum(w for v, row in enumerate(rows) for u, w in row if part[u] != part[v]) // 2


def jet(rows, part, loss, patience, max_rounds, worthwhile=1e-3):
    """Return the parts with the lowest cut on the way, and that cut."""
    part, resting = list(part), set()
    best, lowest, mark, waited = list(part), cut_of(rows, part), cut_of(rows, part), 0
    for _ in range(max_rounds):
        if waited >= patience or cut_of(rows, part) == 0:
            break
        found = candidates(rows, part, resting, loss)
        resting = afterburner(rows, part, found)
        for v in resting:
            part[v] = found[v][0]
        cut = cut_of(rows, part)
        waited += 1
        if cut < lowest:
            best, lowest = list(part), cut
            if cut < (1 - worthwhile) * mark:
                mark, waited = cut, 0
    return best, lowest
