"""LDG as Stanton and Kliot tell it (KDD 2012), restreamed as Nishimura and Ugander do (KDD 2013): slow and obvious.

Settled: a node goes to the part with the largest `neighbours there * (1 - nodes there / capacity)`; ties go to the
least filled part, then to the lowest index. From the second pass on a neighbour that has not come yet counts where the
last pass put it, and parts start empty again.
"""


def ldg_parts(rows, num_parts, capacity, passes=1, order_of=None):
    """Return the part of each node.

    `rows` are the nodes' neighbours; `order_of(pass)` lists the nodes in the order in which they come.
    """

    def score(neighbors, size):
        return neighbors * (1.0 - size / capacity)

    return stream_nodes(rows, num_parts, capacity, score, passes, order_of)


def stream_nodes(rows, num_parts, capacity, score, passes, order_of):
    part_of = [None] * len(rows)
    for number in range(passes):
        size = [0] * num_parts
        for node in order_of(number) if order_of else range(len(rows)):
            neighbors = [sum(part_of[other] == part for other in rows[node]) for part in range(num_parts)]
            space = [part for part in range(num_parts) if size[part] < capacity]
            best = min(space, key=lambda part: (-score(neighbors[part], size[part]), size[part], part))
            part_of[node] = best
            size[best] += 1
    return part_of
