"""Fan-out neighbour sampling: the checks, and the choice of the implementation."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...graph import CSC
from ...rng import combine_array
from . import cpu
from .cpu import Workspace


class SampledNeighbors(NamedTuple):
    """A sampled computation graph in PyG's form.

    Attributes:
        n_id: (num_nodes,) int64, the graph's ids; seeds first, then new nodes hop by hop in order of appearance.
        edge_index: (2, num_arcs) int64, source and target as positions in n_id, grouped by target.
        indptr: (num_targets + 1,) int64, the arcs of each target; targets are the nodes of all hops but the last.
        e_id: (num_arcs,) int64 positions in `csc.indices`, or None.
        num_sampled_nodes: seeds, then new nodes of each hop.
        num_sampled_edges: arcs of each hop.
    """

    n_id: np.ndarray
    edge_index: np.ndarray
    indptr: np.ndarray
    e_id: np.ndarray | None
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]


def check_fanouts(fanouts: Sequence[int]) -> tuple[int, ...]:
    """Return the fan-outs as a tuple of ints.

    Raises:
        ValueError: none given, or one is 0, below -1 or not an integer.
    """
    if isinstance(fanouts, str):
        raise ValueError(f"fanouts must be a list of integers like [15, 10, 5], got {fanouts!r}")
    fanouts = tuple(fanouts)
    if not fanouts:
        raise ValueError("fanouts must name at least one hop, got []")
    for hop, fanout in enumerate(fanouts):
        if isinstance(fanout, bool) or int(fanout) != fanout or fanout == 0 or fanout < -1:
            raise ValueError(f"fanouts[{hop}] must be an integer >= 1, or -1 for all neighbours, got {fanout}")
    return tuple(int(fanout) for fanout in fanouts)


def sample_neighbors(
    csc: CSC,
    seeds: np.ndarray,
    fanouts: Sequence[int],
    key: int,
    *,
    replace: bool = False,
    return_e_id: bool = False,
    workspace: Workspace | None = None,
    allocate: Callable[[tuple[int, ...], type], np.ndarray] = np.empty,
) -> SampledNeighbors:
    """Sample in-neighbours hop by hop, each node's row once, at the hop after it was found.

    Every choice is a hash of (key, hop, node, draw): the result does not depend on threads or on earlier calls. Without
    replacement a row of at most `fanout` neighbours is taken whole, in row order.

    Args:
        csc: the graph; arrays or memory maps, indices int32 or int64.
        seeds: (num_seeds,) integers in [0, num_rows), distinct.
        fanouts: neighbours a node for each hop, >= 1, or -1 for all.
        key: uint64, the batch's key.
        replace: draw with replacement (a row with neighbours then gives exactly `fanout` arcs).
        return_e_id: also return where each arc stands in the CSC.
        workspace: one thread's reusable memory; made for this call if None.
        allocate: gives memory for the results, called with (shape, dtype).

    Returns:
        SampledNeighbors.

    Raises:
        ValueError: a fan-out is 0 or below -1, a seed is out of range or repeated, the workspace does not fit.

    Cost: O(sampled arcs + nodes); four bytes a node of the graph in the workspace.
    Source: Hamilton et al., GraphSAGE, NeurIPS 2017, with PyG's conventions for n_id and the order of arcs.
    """
    fanouts = check_fanouts(fanouts)
    csc = CSC(np.asarray(csc.indptr), np.asarray(csc.indices))
    seeds = np.ascontiguousarray(seeds)
    space = workspace or Workspace(csc.num_rows, csc.indices.dtype)
    if not space.fits(csc.num_rows, csc.indices.dtype):
        raise ValueError(
            f"workspace is for {space.num_nodes} nodes of {space.id_dtype}, the graph has {csc.num_rows} of "
            f"{csc.indices.dtype}"
        )
    count = _place(space, seeds, csc.num_rows)
    nodes, arcs = [count], []
    begin, first = 0, 0
    for hop, fanout in enumerate(fanouts):
        end = count
        last, count = _sample_hop(space, csc, begin, end, first, fanout, replace, fold_hop(key, hop))
        nodes.append(count - end)
        arcs.append(last - first)
        begin, first = end, last
    space.finish(count)
    return _collect(space, count, begin, first, nodes, arcs, return_e_id, allocate)


def fold_hop(key: int, hop: int) -> np.uint64:
    """Return the key of one hop: combine(key, hop)."""
    return np.uint64(combine_array(np.uint64(key), np.uint64(hop)))


def _place(space: Workspace, seeds: np.ndarray, num_rows: int) -> int:
    if len(seeds) and not (seeds.min() >= 0 and seeds.max() < num_rows):
        raise ValueError(f"seeds must be in [0, {num_rows}), got {seeds.min()} to {seeds.max()}")
    space.reserve("indptr", 1)[0] = 0
    count = space.place(seeds)
    if count != len(seeds):
        space.finish(count)
        raise ValueError(f"seeds must be distinct, got {len(seeds) - count} repeats among {len(seeds)}")
    return count


def _sample_hop(space, csc, begin, end, first, fanout, replace, hop_key):
    """Sample the rows of the nodes begin..end-1; return the number of arcs and of nodes after it."""
    row_start, row_degree = space.reserve("row_start", end - begin), space.reserve("row_degree", end - begin)
    indptr = space.reserve("indptr", end + 1, keep=begin + 1)
    node = space.node
    largest = cpu.count_hop(csc.indptr, node, begin, end, fanout, replace, row_start, row_degree, indptr)
    last = int(indptr[end])
    arc = space.reserve("arc", last, keep=first)
    neighbor, local = space.reserve("neighbor", last - first), space.reserve("local", last, keep=first)
    node = space.reserve("node", min(end + last - first, space.num_nodes) + 1, keep=end)
    words = (largest >> 6) + 1
    if len(space.taken) < words:
        space.taken = np.zeros(words + words // 4, np.uint64)
    cpu.pick_hop(hop_key, node, begin, end, fanout, replace, row_start, row_degree, indptr, space.taken, arc)
    cpu.read_hop(csc.indices, arc, first, last, neighbor)
    return last, cpu.relabel_hop(neighbor, first, last, space.base, space.label, node, end, local)


def _collect(space, count, num_targets, num_arcs, nodes, arcs, return_e_id, allocate):
    """Copy the batch out of the workspace."""
    n_id = allocate((count,), np.int64)
    n_id[:] = space.node[:count]
    indptr = allocate((num_targets + 1,), np.int64)
    indptr[:] = space.indptr[: num_targets + 1]
    edge_index = allocate((2, num_arcs), np.int64)
    cpu.emit_edges(space.local, indptr, edge_index)
    e_id = None
    if return_e_id:
        e_id = allocate((num_arcs,), np.int64)
        e_id[:] = space.arc[:num_arcs]
    return SampledNeighbors(n_id, edge_index, indptr, e_id, nodes, arcs)
