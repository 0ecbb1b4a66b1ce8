"""PyG's neighbour sampler, written from its documented semantics: dictionaries, lists, and a pick that is handed in."""


def pyg_neighbor_sample(indptr, indices, seeds, fanouts, pick):
    """Return (n_id, row, col, e_id, nodes per hop, edges per hop) as plain lists.

    Each hop visits the nodes that the hop before it found, in order; an edge is recorded as (source, target) in the
    numbering of n_id; a node gets its number when it is first seen.

    Args:
        pick: (node, degree, fanout, hop) -> positions in the node's row.
    """
    n_id = [int(seed) for seed in seeds]
    number = {node: i for i, node in enumerate(n_id)}
    row, col, e_id = [], [], []
    nodes_per_hop, edges_per_hop = [len(n_id)], []
    begin = 0
    for hop, fanout in enumerate(fanouts):
        end, edges_before = len(n_id), len(row)
        for target in range(begin, end):
            first = int(indptr[n_id[target]])
            degree = int(indptr[n_id[target] + 1]) - first
            for position in pick(n_id[target], degree, fanout, hop):
                source = int(indices[first + position])
                if source not in number:
                    number[source] = len(n_id)
                    n_id.append(source)
                row.append(number[source])
                col.append(target)
                e_id.append(first + position)
        nodes_per_hop.append(len(n_id) - end)
        edges_per_hop.append(len(row) - edges_before)
        begin = end
    return n_id, row, col, e_id, nodes_per_hop, edges_per_hop
