"""Positive and negative samples in plain Python, from their definitions: lists, integers and floats alone."""

MASK = (1 << 64) - 1


def mix64(value):
    """The finaliser of SplitMix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def combine(key, value):
    return mix64(key ^ mix64((value + 0x9E3779B97F4A7C15) & MASK))


def below(random, bound):
    return ((random >> 32) * bound) >> 32


def unit(random):
    return (random >> 11) / float(1 << 53)


def positives(rows, seeds, key, walk_length, choose):
    """One walk a seed; `rows` lists each node's in-neighbours."""
    found = []
    for place, node in enumerate(seeds):
        own = combine(key, place)
        steps = walk_length if choose == "end" else 1 + below(combine(own, walk_length), walk_length)
        for step in range(steps):
            if not rows[node]:
                break
            node = rows[node][below(combine(own, step), len(rows[node]))]
        found.append(node)
    return found


def alias_table(weights):
    """Vose's table: the poorest slot on the stack is filled up by the richest one."""
    total = 0.0
    for weight in weights:
        total += weight
    threshold = [weight / total * len(weights) for weight in weights]
    alias = list(range(len(weights)))
    small = [i for i, value in enumerate(threshold) if value < 1.0]
    large = [i for i, value in enumerate(threshold) if value >= 1.0]
    while small and large:
        poor, rich = small.pop(), large[-1]
        alias[poor] = rich
        threshold[rich] -= 1.0 - threshold[poor]
        if threshold[rich] < 1.0:
            small.append(large.pop())
    for i in small + large:
        threshold[i] = 1.0
    return threshold, alias


def negatives(num_nodes, num, key, table=None):
    """Samples with replacement."""
    found = []
    for place in range(num):
        random = combine(key, place)
        slot = below(random, num_nodes)
        if table is not None and not unit(mix64(random)) < table[0][slot]:
            slot = table[1][slot]
        found.append(slot)
    return found
