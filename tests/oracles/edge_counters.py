"""Counters over edges in the order of their stream, edge after edge in plain Python: clusters and candidates."""

from lightning_gnnscale.rng import fold, mix64_array

MASK = (1 << 64) - 1


def mix(value):
    return int(mix64_array([value & MASK])[0])


def misra_gries(edges, held_by, num_slots=8):
    """Return {node: {what neighbours hold: count}}: exact for what the node holds itself, else by at most 7 counters.

    A slot whose count has fallen to zero still belongs to its value until another takes it; of free slots the last
    is taken.
    """
    slots = {v: [[held, 0]] + [[None, 0] for _ in range(num_slots - 1)] for v, held in enumerate(held_by)}

    def count(v, value):
        row = slots[v]
        for slot in row:
            if slot[0] == value:
                slot[1] += 1
                return
        free = [slot for slot in row[1:] if slot[1] == 0]
        if free:
            free[-1][:] = value, 1
        else:
            for slot in row[1:]:
                slot[1] -= 1

    for u, v in edges:
        count(u, held_by[v])
        count(v, held_by[u])
    return {v: {value: number for value, number in row if number > 0} for v, row in slots.items()}


class Clusters:
    """One list of labels, and what every cluster weighs."""

    def __init__(self, weights, limit):
        self.label = list(range(len(weights)))
        self.favourite = list(range(len(weights)))
        self.members = {v: [v] for v in range(len(weights))}
        self.weights, self.limit = weights, limit

    def moves(self, v, target):
        """Move a node where there is space and company; return whether it went."""
        inside = [sum(self.weights[u][d] for u in self.members[target]) for d in range(len(self.limit))]
        fits = all(w + more <= most for w, more, most in zip(inside, self.weights[v], self.limit, strict=True))
        if fits and any(inside):
            self.members[self.label[v]].remove(v)
            self.members[target].append(v)
            self.label[v] = target
            return True
        return False

    def begin(self, edges, key):
        first = list(range(len(self.label)))
        for u, v in edges:
            first[u] = min(first[u], v, key=lambda w: mix(key ^ w))
            first[v] = min(first[v], u, key=lambda w: mix(key ^ w))
        self.favourite = first
        for v, leader in enumerate(first):
            if leader != v:
                self.moves(v, leader)

    def propagate(self, edges, key, half):
        counted = misra_gries(edges, self.label)
        for v in range(half, len(self.label), 2):
            inside = counted[v].pop(self.label[v], 0)
            node_key = mix(key ^ v) | 1
            wishes = [c for c, number in counted[v].items() if number >= max(1, inside)]
            wishes.sort(key=lambda c: (counted[v][c], c * node_key & MASK), reverse=True)
            if wishes:
                self.favourite[v] = wishes[0]
            for c in wishes:
                if self.moves(v, c):
                    break


def cluster_key(seed, number, salt=0x45434C55):
    return fold(seed, salt, number)


def candidates(edges, part, resting, loss):
    """Return {node: (part it would go to, gain)}: proposed by counters, then counted exactly; lowest of equals."""
    counted, found = misra_gries(edges, part), {}
    for v, counts in counted.items():
        counts.pop(part[v], None)
        if v in resting or not counts:
            continue
        best = min(counts, key=lambda b: (-counts[b], b))
        ends = [part[b] for a, b in edges if a == v] + [part[a] for a, b in edges if b == v]
        inside = ends.count(part[v])
        gain = ends.count(best) - inside
        if gain >= 0 or -gain < loss * inside:
            found[v] = (best, gain)
    return found
