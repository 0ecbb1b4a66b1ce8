"""Cache policies in plain Python, from their papers; each returns whether each read is a hit."""


def lru(trace, capacity):
    held, hits = [], []  # least recently read first
    for node in trace:
        hits.append(node in held)
        if node in held:
            held.remove(node)
        elif len(held) == capacity:
            held.pop(0)
        held.append(node)
    return hits


def sieve(trace, capacity):
    """Zhang et al., NSDI 2024, Algorithm 1."""
    queue, visited, hand, hits = [], set(), None, []  # newest first
    for node in trace:
        hits.append(node in queue)
        if node in queue:
            visited.add(node)
            continue
        if len(queue) == capacity:
            at = queue.index(hand) if hand is not None else len(queue) - 1
            while queue[at] in visited:
                visited.remove(queue[at])
                at = at - 1 if at > 0 else len(queue) - 1
            hand = queue[at - 1] if at > 0 else None
            queue.pop(at)
        queue.insert(0, node)
    return hits


def textbook_min(trace, capacity):
    """Belady's MIN: every missed row is taken, the one that is read again last goes."""
    held, hits = set(), []
    for time, node in enumerate(trace):
        hits.append(node in held)
        if node in held:
            continue
        if len(held) == capacity:
            later = trace[time + 1 :]
            held.remove(max(sorted(held), key=lambda other: later.index(other) if other in later else len(trace)))
        held.add(node)
    return hits


def most_hits(trace, capacity):
    """The most hits that any choice gives, by trying all of them; a missed row need not be taken."""
    best = {frozenset(): 0}
    for node in trace:
        after = {}
        for held, hits in best.items():
            if node in held:
                choices, hits = [held], hits + 1
            else:
                choices = [held, *([held | {node}] if len(held) < capacity else [])]
                choices += [(held - {other}) | {node} for other in held]
            for choice in choices:
                after[choice] = max(after.get(choice, -1), hits)
        best = after
    return max(best.values())
