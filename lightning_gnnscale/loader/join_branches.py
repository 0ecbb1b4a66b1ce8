"""Several drawn neighbourhoods side by side in one subgraph, hop by hop."""

from collections.abc import Sequence

import numpy as np

from ..jit import kernel
from ..sampler.subgraph import Allocate, Subgraph


def join_branches(branches: Sequence[Subgraph], allocate: Allocate) -> Subgraph:
    """Return one subgraph of several, none of whose nodes or arcs are shared.

    Its nodes are the seeds of all branches, then their nodes of the first hop, and so on, so that targets come first.
    A node that two branches found stands twice. `row_scale`, `e_id` and `edge_weight` are joined where all have them.

    Args:
        branches: drawn with as many hops each, with nodes and arcs of each hop.
        allocate: gives memory for the results.

    Raises:
        ValueError: the numbers of hops differ.

    Cost: one pass over the arcs.
    """
    hops = {len(branch.num_sampled_nodes) for branch in branches}
    if len(hops) != 1:
        raise ValueError(f"branches must have as many hops each, got {sorted(hop - 1 for hop in hops)}")
    if len(branches) == 1:
        return branches[0]
    num_nodes = np.array([branch.num_sampled_nodes for branch in branches])
    counts = num_nodes.T.reshape(-1)  # of each hop and branch, in their order
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).reshape(num_nodes.T.shape)
    own = np.cumsum(num_nodes, axis=1) - num_nodes  # first node of each hop in its branch
    num_targets = int(num_nodes[:, :-1].sum())
    num_arcs = sum(branch.edge_index.shape[1] for branch in branches)
    n_id, indptr = allocate((int(num_nodes.sum()),), np.int64), allocate((num_targets + 1,), np.int64)
    edge_index = allocate((2, num_arcs), np.int64)
    places = [
        np.arange(len(branch.n_id)) + np.repeat(starts[:, number] - own[number], num_nodes[number])
        for number, branch in enumerate(branches)
    ]
    arrays = {name: _room(name, branches, num_targets, num_arcs, allocate) for name in _PER_ARC + _PER_TARGET}
    at, indptr[0] = 0, 0
    for hop in range(num_nodes.shape[1]):
        for number, branch in enumerate(branches):
            first, start, count = int(own[number, hop]), int(starts[hop, number]), int(num_nodes[number, hop])
            n_id[start : start + count] = branch.n_id[first : first + count]
            if hop + 1 == num_nodes.shape[1]:
                continue
            begin, end = (int(branch.indptr[row]) for row in (first, first + count))
            copy_arcs(branch.edge_index, begin, end, places[number], start - first, edge_index, at)
            indptr[start + 1 : start + count + 1] = branch.indptr[first + 1 : first + count + 1] + (at - begin)
            for name, array in arrays.items():
                if array is not None and name in _PER_ARC:
                    array[at : at + end - begin] = getattr(branch, name)[begin:end]
                elif array is not None:
                    array[start : start + count] = getattr(branch, name)[first : first + count]
            at += end - begin
    return Subgraph(
        n_id,
        edge_index,
        indptr,
        sum(branch.num_seeds for branch in branches),
        num_sampled_nodes=num_nodes.sum(0).tolist(),
        num_sampled_edges=np.sum([branch.num_sampled_edges for branch in branches], axis=0).tolist(),
        averaging_weights=all(branch.averaging_weights for branch in branches),
        **arrays,
    )


_PER_ARC, _PER_TARGET = ("e_id", "edge_weight"), ("row_scale",)


def _room(name: str, branches: Sequence[Subgraph], num_targets: int, num_arcs: int, allocate: Allocate):
    values = [getattr(branch, name) for branch in branches]
    if any(value is None for value in values):
        return None
    return allocate((num_arcs if name in _PER_ARC else num_targets,), values[0].dtype)


@kernel
def copy_arcs(edge_index, begin, end, place, shift, out, at):
    """Copy the arcs begin..end-1 to `at`: sources to their new places, targets shifted."""
    for i in range(begin, end):
        out[0, at + i - begin] = place[edge_index[0, i]]
        out[1, at + i - begin] = edge_index[1, i] + shift
