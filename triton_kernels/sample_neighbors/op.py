"""Fan-out neighbour sampling: the checks, and the choice of the implementation."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...graph import CSC
from ...rng import combine_array
from . import cpu
from .cpu import Workspace
from .split_rows import SplitRows


class SampledNeighbors(NamedTuple):
    """A sampled computation graph in PyG's form.

    Attributes:
        n_id: (num_nodes,) int64, the graph's ids; seeds first, then new nodes hop by hop in order of appearance.
        edge_index: (2, num_arcs) int64, source and target as positions in n_id, grouped by target.
        indptr: (num_targets + 1,) int64, the arcs of each target; targets are the nodes of all hops but the last.
        e_id: (num_arcs,) int64 positions in `csc.indices`, or None.
        num_sampled_nodes: seeds, then new nodes of each hop.
        num_sampled_edges: arcs of each hop.
        edge_weight: (num_arcs,) float32, 1 / (length of the row * chance of the arc), or None without a preference.
    """

    n_id: np.ndarray
    edge_index: np.ndarray
    indptr: np.ndarray
    e_id: np.ndarray | None
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]
    edge_weight: np.ndarray | None = None


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
    split: Sequence[SplitRows] | None = None,
    scale: float = 1.0,
) -> SampledNeighbors:
    """Sample in-neighbours hop by hop, each node's row once, at the hop after it was found.

    Every choice is a hash of (key, hop, node, draw): the result does not depend on threads or on earlier calls. Without
    replacement a row of at most `fanout` neighbours is taken whole, in row order.

    With `split` and `scale` s > 1 a row prefers its neighbours in a set Q. Of its d neighbours a are in Q, b are not;
    f are drawn, f < d. With c = f / (s a + b) a neighbour in Q has the chance c s, another one c; where c s > 1, all
    of Q are taken and another one has the chance (f - a) / b. The number drawn from Q is its expectation, rounded at
    random to a neighbouring integer, and draws within a group are uniform: every row gives exactly f arcs, with exactly
    these chances. Arcs of a row come in the order of the split row.

    Args:
        csc: the graph; arrays or memory maps, indices int32 or int64; or tensors on one device, then so are seeds,
            `split` and the result (on CUDA drawn by Triton; `workspace` is then a `DeviceWorkspace`).
        seeds: (num_seeds,) integers in [0, num_rows), distinct.
        fanouts: neighbours a node for each hop, >= 1, or -1 for all.
        key: uint64, the batch's key.
        replace: draw with replacement (a row with neighbours then gives exactly `fanout` arcs).
        return_e_id: also return where each arc stands in the CSC.
        workspace: one thread's reusable memory; made for this call if None.
        allocate: gives memory for the results, called with (shape, dtype).
        split: for each hop the graph's rows with the preferred neighbours first, or None; with return_e_id they have
            their `position`.
        scale: how many times likelier a preferred neighbour is, >= 1; 1 draws what is drawn without `split`.

    Returns:
        SampledNeighbors.

    Raises:
        ValueError: a fan-out is 0 or below -1, a seed is out of range or repeated, the workspace or `split` does not
            fit, the scale is below 1, or a preference is to be drawn with replacement.

    Cost: O(sampled arcs + nodes); four bytes a node of the graph in the workspace.
    Source: Hamilton et al., GraphSAGE, NeurIPS 2017, with PyG's conventions for n_id and the order of arcs; the
        preference is equation (8) of Song and Jiang, ICS 2022, with chances capped at 1.
    """
    if isinstance(csc.indices, Tensor):
        from .device import sample_tensors  # imports this module

        return sample_tensors(
            csc, seeds, fanouts, key, replace=replace, return_e_id=return_e_id, workspace=workspace, split=split,
            scale=scale,
        )  # fmt: skip
    fanouts = check_fanouts(fanouts)
    csc = CSC(np.asarray(csc.indptr), np.asarray(csc.indices))
    split = checked_split(split, scale, csc, len(fanouts), replace, return_e_id)
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
        draws = _Draws(fanout, replace, fold_hop(key, hop), split[hop] if split else None, float(scale), return_e_id)
        last, count = _sample_hop(space, csc, begin, end, first, draws)
        nodes.append(count - end)
        arcs.append(last - first)
        begin, first = end, last
    space.finish(count)
    return _collect(space, count, begin, first, nodes, arcs, return_e_id, split is not None, allocate)


class _Draws(NamedTuple):
    """How one hop draws."""

    fanout: int
    replace: bool
    hop_key: np.uint64
    split: SplitRows | None
    scale: float
    return_e_id: bool


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


def checked_split(split, scale, csc, num_hops, replace, return_e_id) -> Sequence[SplitRows] | None:
    """Return the split rows of each hop, or None where nothing is preferred; see `sample_neighbors`."""
    if not (math.isfinite(scale) and scale >= 1):
        raise ValueError(f"scale must be >= 1 and finite, got {scale}")
    if split is None or scale == 1:
        return None
    if replace:
        raise ValueError("a preference needs draws without replacement: use replace=False, or scale=1")
    if len(split) != num_hops:
        raise ValueError(f"split must have rows for each of {num_hops} hops, got {len(split)}")
    for rows in split:
        shapes = (len(rows.indices), len(rows.num_inside), rows.indices.dtype)
        if shapes != (csc.num_arcs, csc.num_rows, csc.indices.dtype):
            raise ValueError(
                f"split rows are of {shapes[1]} rows and {shapes[0]} arcs of {shapes[2]}, the graph has {csc.num_rows} "
                f"and {csc.num_arcs} of {csc.indices.dtype}"
            )
        if return_e_id and rows.position is None:
            raise ValueError("return_e_id needs the positions of split rows: split them with_position=True")
    return split


def _sample_hop(space, csc, begin, end, first, draws):
    """Sample the rows of the nodes begin..end-1; return the number of arcs and of nodes after it."""
    fanout, replace, hop_key, split = draws.fanout, draws.replace, draws.hop_key, draws.split
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
    if split is None:
        cpu.pick_hop(hop_key, node, begin, end, fanout, replace, row_start, row_degree, indptr, space.taken, arc)
        cpu.read_hop(csc.indices, arc, first, last, neighbor)
    else:
        weight = space.reserve("weight", last, keep=first)
        cpu.pick_split_hop(
            hop_key, node, begin, end, draws.scale, split.num_inside, row_start, row_degree, indptr, space.taken, arc,
            weight,
        )  # fmt: skip
        cpu.read_hop(split.indices, arc, first, last, neighbor)
        if draws.return_e_id:
            cpu.unsplit_hop(split.position, row_start, indptr, begin, end, arc)
    return last, cpu.relabel_hop(neighbor, first, last, space.base, space.label, node, end, local)


def _collect(space, count, num_targets, num_arcs, nodes, arcs, return_e_id, weighted, allocate):
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
    edge_weight = None
    if weighted:
        edge_weight = allocate((num_arcs,), np.float32)
        edge_weight[:] = space.weight[:num_arcs]
    return SampledNeighbors(n_id, edge_index, indptr, e_id, nodes, arcs, edge_weight)
