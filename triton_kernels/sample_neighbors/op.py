"""Fan-out neighbour sampling: the checks, and the choice of the implementation."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from ...graph import CSC
from .choice import SplitRows
from .cpu import Workspace
from .device import sample_tensors
from .hops import SampledNeighbors, sample_hops
from .rows import SampleOptions


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

    Every choice is a hash of (key, hop, node, sample): the result does not depend on threads or on earlier calls.
    Without replacement a row of at most `fanout` neighbours is taken whole, in row order.

    With `split` and `scale` s > 1 a row prefers its neighbours in a set Q. Of its d neighbours a are in Q, b are not;
    f are sampled, f < d. With c = f / (s a + b) a neighbour in Q has the probability c s, another one c; where c s >
    1, all of Q are taken and another one has the probability (f - a) / b. The number sampled from Q is its
    expectation, rounded at random to a neighbouring integer, and samples within a group are uniform: every row gives
    exactly f edges, with exactly these probabilities. Edges of a row come in the order of the split row.

    Args:
        csc: the graph; arrays or memory maps, indices int32 or int64; or tensors on one device, then so are seeds,
            `split` and the result (on CUDA sampled by Triton; `workspace` is then a `DeviceWorkspace`).
        seeds: (num_seeds,) integers in [0, num_rows), distinct.
        fanouts: neighbours a node for each hop, >= 1, or -1 for all.
        key: uint64, the batch's key.
        replace: sample with replacement (a row with neighbours then gives exactly `fanout` edges).
        return_e_id: also return the position of each edge in the CSC.
        workspace: one thread's reusable memory; made for this call if None.
        allocate: gives memory for the results, called with (shape, dtype).
        split: for each hop the graph's rows with the preferred neighbours first, or None; with return_e_id they have
            their `position`.
        scale: how many times likelier a preferred neighbour is, >= 1; 1 samples the same as without `split`.

    Returns:
        SampledNeighbors.

    Raises:
        ValueError: a fan-out is 0 or below -1, a seed is out of range or repeated, the workspace or `split` does not
            fit, the scale is below 1, or a preference is to be sampled with replacement.

    Cost: O(sampled edges + nodes); four bytes a node of the graph in the workspace.
    Source: Hamilton et al., GraphSAGE, NeurIPS 2017, with PyG's conventions for n_id and the order of edges; the
        preference is equation (8) of Song and Jiang, ICS 2022, with probabilities capped at 1.
    """
    if isinstance(csc.indices, Tensor):
        return sample_tensors(
            csc, seeds, fanouts, key, replace=replace, return_e_id=return_e_id, workspace=workspace, split=split,
            scale=scale,
        )  # fmt: skip
    options = SampleOptions(replace, return_e_id, float(scale))
    return sample_hops(csc, seeds, fanouts, key, options, workspace=workspace, allocate=allocate, split=split)
