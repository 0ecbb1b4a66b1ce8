"""Layer-wise importance sampling: the checks, and the loop over hops."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from ...graph import CSC
from ..sample_neighbors import SampledNeighbors, Workspace
from ..sample_neighbors.cpu import EVERY_ROW, count_hop
from ..sample_neighbors.edge_types import join_edges
from ..sample_neighbors.hops import place_seeds
from ..sample_neighbors.rows import fold_hop
from . import cpu
from .checks import MOST_SCALE, check_layer_sizes, check_preferred, fraction_bits
from .device import sample_layers_on_device


def sample_layers(
    csc: CSC,
    seeds: np.ndarray,
    nodes_per_layer: Sequence[int],
    key: int,
    *,
    preferred: Sequence[np.ndarray] | None = None,
    scale: float = 1.0,
    return_e_id: bool = False,
    workspace: Workspace | None = None,
    allocate: Callable[[tuple[int, ...], type], np.ndarray] = np.empty,
    read_rows: Callable[[CSC, np.ndarray, np.ndarray], None] | None = None,
) -> SampledNeighbors:
    """Sample `nodes_per_layer[h]` of the in-neighbours of all nodes that hop h - 1 sampled, by importance.

    A candidate j has the importance q_j, the sum of (1 / degree)^2 over the rows that list it (the squared norm of its
    column in the averaging matrix of these rows); times `scale` where it is preferred. Sums are of whole multiples of
    2^-`fraction_bits`, at least one a row, so that no order of adding changes a sample. It is sampled with the
    probability pi_j = min(1, c q_j), c such that these add up to the nodes of the layer; where there are no more
    candidates, all are sampled. All edges from sampled candidates into the rows are kept, so a sum with `edge_weight`
    has the mean over the whole row as its expectation.

    Samples are systematic, from one hash of (key, hop) and with the candidates in the order in which the rows list
    them: each is sampled with exactly its pi, and exactly as many as asked for. Which ones come together is not
    independent (neighbours in that order seldom do), but no sum over one row multiplies two samples of a hop: its mean
    is exact, and the spread of the samples over the rows lowers its variance.

    Rows and copies. Every entry of n_id has its row sampled once, at the hop after it was found. A node that two hops
    sample has an entry for each, so that layers that multiply use samples of their own: a path of edges seed, j, k then
    crosses one sample a hop, and a stack of linear layers is unbiased as a whole. (With one entry it would be biased
    where seeds are neighbours.) The last hop's nodes have no rows: there a node takes the entry it has, if any. One CSC
    thus holds all layers, and PyG's trimming by hops applies unchanged.

    Args:
        csc: the graph; arrays or memory maps, indices int32 or int64; or tensors that a device reads, then so are
            `preferred` and the result, and the workspace is a `DeviceWorkspace`: see `sample_layers_on_device`.
        seeds: (num_seeds,) integers in [0, num_rows), distinct.
        nodes_per_layer: nodes sampled for each hop, >= 1.
        key: uint64, the batch's key.
        preferred: for each hop (num_rows,) bool, or None: no node is.
        scale: how much more important preferred nodes are, finite and >= 1; more than 2**24 counts as that.
        return_e_id: also return the position of each edge in the CSC.
        workspace: one thread's reusable memory; made for this call if None.
        allocate: gives memory for the results, called with (shape, dtype).
        read_rows: fills an array with the rows of nodes, where `csc.indices` has not all of them: called with the
            graph, nodes and the array.

    Returns:
        SampledNeighbors; a node that several hops sample is in n_id once for each. edge_weight is 1 / (length of the
        target's row * probability that the source was sampled).

    Raises:
        ValueError: a number of nodes below 1, a scale below 1, a seed out of range or repeated, preferred of another
            shape, a workspace that does not fit.

    Cost: O(edges of the rows) time and memory; four bytes a node of the graph in the workspace.
    Source: Zou et al., Layer-dependent importance sampling (LADIES), NeurIPS 2019, section 3.2; eq. (8) of Song and
        Jiang, ICS 2022, for the scale. Differs: sampled without replacement with exact probabilities (LADIES normalises
        the rows of what it sampled, a biased ratio), and hop h has the rows of hop h - 1's nodes alone.
    """
    if isinstance(csc.indices, Tensor):
        given = {"preferred": preferred, "scale": scale, "return_e_id": return_e_id}
        return sample_layers_on_device(csc, seeds, nodes_per_layer, key, workspace, **given)
    sizes = check_layer_sizes(nodes_per_layer)
    csc = CSC(np.asarray(csc.indptr), np.asarray(csc.indices))
    check_preferred(preferred, scale, len(sizes), csc.num_rows)
    space = workspace or Workspace(csc.num_rows, csc.indices.dtype)
    if not space.fits(csc.num_rows, csc.indices.dtype):
        raise ValueError(
            f"workspace is for {space.num_nodes} nodes of {space.id_dtype}, the graph has {csc.num_rows} of "
            f"{csc.indices.dtype}: make Workspace(num_rows, indices.dtype)"
        )
    space.reserve("indptr", 1)[0] = 0
    count = place_seeds(space, seeds, csc.num_rows)
    space.finish(count)
    nodes, edges = [count], []
    begin, first = 0, 0
    for hop, size in enumerate(sizes):
        end, before, is_last = count, first, hop == len(sizes) - 1
        mask = None if preferred is None or scale == 1 else preferred[hop]
        candidates = _collect(space, csc, begin, end, mask, scale, read_rows)
        count = _sample(space, candidates, size, end, is_last, fold_hop(key, hop))
        first = _keep(space, begin, end, first)
        space.finish(candidates)
        nodes.append(count - end)
        edges.append(first - before)
        begin = end
    n_id = allocate((count,), np.int64)
    n_id[:] = space.node[:count]
    part = space.source, space.indptr[: begin + 1], space.edge[:first], space.weight[:first]
    edge_index, indptr, e_id, weight, _ = join_edges([part], begin, return_e_id, True, None, allocate)
    return SampledNeighbors(n_id, edge_index, indptr, e_id, nodes, edges, weight)


def _collect(
    space: Workspace, csc: CSC, begin: int, end: int, mask: np.ndarray | None, scale: float, read_rows: Callable | None
) -> int:
    """Find the candidates of the rows node[begin:end] and their importance; return how many there are."""
    start, degree = space.reserve("row_start", end - begin), space.reserve("row_degree", end - begin)
    indptr = space.reserve("indptr", end + 1, keep=begin + 1)
    count_hop(csc.indptr, space.node, begin, end, -1, False, EVERY_ROW, start, degree, indptr)
    num_edges = int(indptr[end] - indptr[begin])
    neighbor, local = space.reserve("neighbor", num_edges), space.reserve("local", num_edges)
    most = min(num_edges, space.num_nodes)
    candidate = _array(space, "candidate", space.id_dtype, most)
    importance = _array(space, "importance", np.int64, most)
    if read_rows is None:
        cpu.read_rows(csc.indices, start, degree, end - begin, neighbor)
    else:
        read_rows(csc, space.node[begin:end], neighbor)
    space.place(neighbor[:0])  # labels of this hop begin above those of the last
    bits = fraction_bits(end - begin, 1.0 if mask is None else scale)
    count = cpu.collect_candidates(
        neighbor, degree, end - begin, num_edges, bits, space.base, space.label, candidate, importance, local
    )
    if mask is not None:
        cpu.prefer(candidate, count, mask, min(scale, MOST_SCALE), importance)
    return count


def _sample(space: Workspace, num_candidates: int, size: int, num_placed: int, is_last: bool, key: np.uint64) -> int:
    """Sample candidates and append those that need an entry; return the number of entries."""
    probability = _array(space, "probability", np.float64, num_candidates)
    position = _array(space, "position", np.int32, num_candidates)
    left, rest = cpu.include(space.importance, num_candidates, size, probability)
    cpu.sample(probability, space.importance, num_candidates, left, rest, key, position)
    if is_last:
        cpu.share_nodes(space.node, num_placed, space.base, space.label, position)
    node = space.reserve("node", num_placed + min(num_candidates, size + 1) + 1, keep=num_placed)
    return cpu.append_nodes(space.candidate, num_candidates, num_placed, node, position)


def _keep(space: Workspace, begin: int, end: int, first: int) -> int:
    """Keep the edges from sampled candidates, after `first` of earlier hops; return how many there are then."""
    most = first + int(space.row_degree[: end - begin].sum())
    edge = space.reserve("edge", most, keep=first)
    source = _array(space, "source", np.int32, most, keep=first)
    weight = space.reserve("weight", most, keep=first)
    return cpu.keep_edges(
        space.local, space.position, space.probability, space.row_start, space.row_degree,
        begin, end, first, space.indptr, source, weight, edge,
    )  # fmt: skip


def _array(space: Workspace, name: str, dtype: np.dtype, size: int, keep: int = 0) -> np.ndarray:
    """Return a named array of the workspace that neighbour sampling does not have; made at its first use."""
    if not hasattr(space, name):
        setattr(space, name, np.empty(0, dtype))
    return space.reserve(name, size, keep)
