"""Size-constrained label propagation, one node after the other in plain Python: what `cluster_nodes` does."""

from lightning_gnnscale.rng import fold, mix64_array

SALT = 0x434C5553
MASK = (1 << 64) - 1
WINDOW = 1 << 14
NODE_WORK = 8
HASH = 0x9E3779B97F4A7C15


def mix(value):
    return int(mix64_array(value & MASK))


def visiting_order(degrees, key):
    """Windows of rows; in each from low to high bit length of the degree, among equals by an affine permutation."""
    factor, shift = (mix(key) & ~7) | 5, mix(key ^ 1)
    inverse = pow(factor, -1, WINDOW)

    def rank(row):
        return row // WINDOW, int(degrees[row]).bit_length(), (row % WINDOW - shift) * inverse % WINDOW

    return sorted(range(len(degrees)), key=rank)


def _batches(rows, first, last, key, sample, batch_work):
    """A row whose work, added to all before in its block, reaches a multiple of batch_work begins a new batch."""
    degrees = [len(row) for row in rows[first:last]]
    batches, reached = [[]], 0
    for row in visiting_order(degrees, key):
        before, reached = reached, reached + NODE_WORK + min(sample, degrees[row])
        if batches[-1] and before // batch_work != reached // batch_work:
            batches.append([])
        batches[-1].append(first + row)
    return batches


def label_propagation(rows, starts, node_weight, limit, seed, passes, batch_work, samples, label=None, group=None):
    """Return the label of every node.

    Args:
        rows: for every node the list of (neighbour, edge weight).
        starts: first nodes of the blocks; one block is done after the other.
        node_weight: for every node the list of its weights.
        limit: what a cluster may weigh.
        batch_work: of a batch: NODE_WORK a node and one an entry that is looked at.
        samples: neighbours that a node looks at in the first pass of fresh clusters, and later.
    """
    num_nodes, fresh = len(rows), label is None
    label = list(range(num_nodes)) if fresh else list(label)
    group = [0] * num_nodes if group is None else group
    weight = [[0] * len(limit) for _ in range(num_nodes)]
    for v, c in enumerate(label):
        weight[c] = [a + b for a, b in zip(weight[c], node_weight[v], strict=True)]
    favourite = list(label)
    blocks = list(zip(starts, [*starts[1:], num_nodes], strict=True))

    def fits(v, cluster):
        return all(a + b <= most for a, b, most in zip(weight[cluster], node_weight[v], limit, strict=True))

    for i in range(passes):
        key = fold(seed, SALT, i)
        sample = samples[0] if fresh and i == 0 else samples[1]
        moved = 0
        for batch in (batch for block in blocks for batch in _batches(rows, *block, key, sample, batch_work)):
            choices = []
            for v in batch:
                choice, favourite[v] = _choose(v, rows[v], label, group, fits, key, sample)
                choices.append(choice)
            for v, target in zip(batch, choices, strict=True):
                if target != label[v] and fits(v, target) and any(weight[target]):
                    weight[label[v]] = [a - b for a, b in zip(weight[label[v]], node_weight[v], strict=True)]
                    weight[target] = [a + b for a, b in zip(weight[target], node_weight[v], strict=True)]
                    label[v] = target
                    moved += 1
        if moved * 100 < num_nodes:
            break
    _join_two_hops(label, group, favourite, weight, node_weight, fits)
    return label


def _choose(v, row, label, group, fits, key, sample):
    stride = 1 + max(0, len(row) - 1) // sample
    looked_at = row[::stride]
    bits = max(4, (2 * len(looked_at) - 1).bit_length())
    table = {}  # by slot: the label and its rating; of two labels that meet in a slot the heavier stays
    for u, w in looked_at:
        if group[u] == group[v]:
            slot = (label[u] * HASH & MASK) >> (63 - bits)
            held, rating = table.get(slot, (label[u], 0))
            if held == label[u]:
                table[slot] = (held, rating + w)
            elif w > rating:
                table[slot] = (label[u], w)
    rating = dict(table.values())
    own_rating = rating.pop(label[v], 0)
    node_key = mix(key ^ v) | 1
    liked = sorted(rating, key=lambda c: (rating[c], c * node_key & MASK), reverse=True)
    open_to_it = [c for c in liked if rating[c] >= own_rating and fits(v, c)]
    return open_to_it[0] if open_to_it else label[v], liked[0] if liked else label[v]


def _join_two_hops(label, group, favourite, weight, node_weight, fits):
    alone = [v for v, c in enumerate(label) if label.count(v) == 1 and c == v]
    waiting = {}
    for v in alone:
        slot = ("lonely", group[v] % 256) if favourite[v] == v else favourite[v]
        other = waiting.get(slot)
        if other is not None and group[other] == group[v] and fits(v, other):
            weight[other] = [a + b for a, b in zip(weight[other], node_weight[v], strict=True)]
            label[v] = other
        else:
            waiting[slot] = v
