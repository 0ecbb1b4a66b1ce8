"""The blocks of ByteGNN's partitioner, with a size at which they are full: slow and obvious."""


def grow(edges, num_nodes, labelled, most, max_hops=32):
    """Return the block of each node; nodes that no labelled one has a path to make blocks by their ids.

    Args:
        edges: (u, v), each undirected edge once, no self-loops.
        labelled: Bools, one of them True; the labelled nodes are the first of blocks 0, 1, ...
        most: Nodes of a full block. One that is full goes on as another, the next number that is free.
    """
    neighbors = [[] for _ in range(num_nodes)]
    for u, v in edges:
        neighbors[u].append(v)
        neighbors[v].append(u)
    blocks = [[v] for v in range(num_nodes) if labelled[v]]
    block_of, goes_on = {nodes[0]: number for number, nodes in enumerate(blocks)}, {}
    for _ in range(max_hops):
        arriving = {}
        for v in range(num_nodes):
            reached_by = [block_of[u] for u in neighbors[v] if u in block_of]
            if v not in block_of and reached_by:
                arriving[v] = min(reached_by)
        for v, number in arriving.items():
            if len(blocks[number]) >= most:
                if number not in goes_on or len(blocks[goes_on[number]]) >= most:
                    goes_on[number] = len(blocks)
                    blocks.append([])
                number = goes_on[number]
            blocks[number].append(v)
            block_of[v] = number
        if not arriving:
            break
    apart = [v for v in range(num_nodes) if v not in block_of]
    return [block_of[v] if v in block_of else len(blocks) + apart.index(v) // most for v in range(num_nodes)]
