"""Layer-wise importance sampling: the checks, and the loop over hops."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from ...errors import is_integer
from ...graph import CSC
from ...jit import kernel
from ...rng import unit
from ..intrinsics import prefetch
from ..sample_neighbors import SampledNeighbors, Workspace
from ..sample_neighbors.cpu import EVERY_ROW, count_hop
from ..sample_neighbors.edge_types import join_edges
from ..sample_neighbors.hops import place_seeds
from ..sample_neighbors.rows import fold_hop


def check_layer_sizes(nodes_per_layer: int | Sequence[int], num_layers: int | None = None) -> tuple[int, ...]:
    """Return the nodes to sample for each hop as a tuple of ints.

    Args:
        nodes_per_layer: one number >= 1 for all hops, or one for each.
        num_layers: hops, where one number is given (None: 2); else None, or the length of the list.
    """
    if num_layers is not None and (not is_integer(num_layers) or num_layers < 1):
        raise ValueError(f"num_layers must be an integer >= 1, got {num_layers!r}: one hop for each layer of the model")
    if isinstance(nodes_per_layer, str) or nodes_per_layer is None:
        raise ValueError(f"nodes_per_layer must be an integer >= 1 or a list of them, got {nodes_per_layer!r}")
    alike = not isinstance(nodes_per_layer, Sequence) and np.ndim(nodes_per_layer) == 0
    sizes = (nodes_per_layer,) * (2 if num_layers is None else num_layers) if alike else tuple(nodes_per_layer)
    if not sizes:
        raise ValueError("nodes_per_layer must name at least one hop, got []")
    for hop, size in enumerate(sizes):
        if not is_integer(size) or size < 1:
            where = "nodes_per_layer" if alike else f"nodes_per_layer[{hop}]"
            raise ValueError(f"{where} must be an integer >= 1, got {size!r}: the nodes sampled for a layer")
    if num_layers is not None and len(sizes) != num_layers:
        raise ValueError(
            f"nodes_per_layer must name num_layers {num_layers} hops, got {len(sizes)}: leave num_layers out"
        )
    return tuple(int(size) for size in sizes)


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
    column in the averaging matrix of these rows); times `scale` where it is preferred. It is sampled with the
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
        csc: the graph; arrays or memory maps, indices int32 or int64.
        seeds: (num_seeds,) integers in [0, num_rows), distinct.
        nodes_per_layer: nodes sampled for each hop, >= 1.
        key: uint64, the batch's key.
        preferred: for each hop (num_rows,) bool, or None: no node is.
        scale: how much more important preferred nodes are, finite and >= 1.
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
    sizes = check_layer_sizes(nodes_per_layer)
    csc = CSC(np.asarray(csc.indptr), np.asarray(csc.indices))
    _check_preferred(preferred, scale, len(sizes), csc.num_rows)
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
    importance = _array(space, "importance", np.float64, most)
    if read_rows is None:
        list_rows(csc.indices, start, degree, end - begin, neighbor)
    else:
        read_rows(csc, space.node[begin:end], neighbor)
    space.place(neighbor[:0])  # labels of this hop begin above those of the last
    count = collect_candidates(
        neighbor, degree, end - begin, num_edges, space.base, space.label, candidate, importance, local
    )
    if mask is not None:
        prefer_nodes(candidate, count, mask, scale, importance)
    return count


def _sample(space: Workspace, num_candidates: int, size: int, num_placed: int, is_last: bool, key: np.uint64) -> int:
    """Sample candidates and append those that need an entry; return the number of entries."""
    probability = _array(space, "probability", np.float64, num_candidates)
    position = _array(space, "position", np.int32, num_candidates)
    include(space.importance, num_candidates, size, probability)
    take(probability, num_candidates, key, position)
    if is_last:
        share_nodes(space.node, num_placed, space.base, space.label, position)
    node = space.reserve("node", num_placed + min(num_candidates, size + 1) + 1, keep=num_placed)
    return append_nodes(space.candidate, num_candidates, num_placed, node, position)


def _keep(space: Workspace, begin: int, end: int, first: int) -> int:
    """Keep the edges from sampled candidates, after `first` of earlier hops; return how many there are then."""
    most = first + int(space.row_degree[: end - begin].sum())
    edge = space.reserve("edge", most, keep=first)
    source = _array(space, "source", np.int32, most, keep=first)
    weight = space.reserve("weight", most, keep=first)
    return keep_edges(
        space.local, space.position, space.probability, space.row_start, space.row_degree,
        begin, end, first, space.indptr, source, weight, edge,
    )  # fmt: skip


def _array(space: Workspace, name: str, dtype: np.dtype, size: int, keep: int = 0) -> np.ndarray:
    """Return a named array of the workspace that neighbour sampling does not have; made at its first use."""
    if not hasattr(space, name):
        setattr(space, name, np.empty(0, dtype))
    return space.reserve(name, size, keep)


def _check_preferred(preferred, scale: float, num_hops: int, num_rows: int) -> None:
    if not (math.isfinite(scale) and scale >= 1):
        raise ValueError(f"scale must be a finite number >= 1, got {scale}: 1 prefers no node")
    if preferred is None:
        return
    if len(preferred) != num_hops or any(mask.shape != (num_rows,) or mask.dtype != bool for mask in preferred):
        given = [f"{mask.dtype} {mask.shape}" for mask in preferred]
        raise ValueError(
            f"preferred must hold a bool array of shape ({num_rows},) for each of {num_hops} hops, got {given}"
        )


AHEAD = 32  # items between a prefetch and its use


@kernel
def list_rows(indices, row_start, row_degree, num_rows, neighbor):
    """Copy the rows one after the other into `neighbor`."""
    at = 0
    for row in range(num_rows):
        if row + AHEAD < num_rows and row_degree[row + AHEAD] > 0:
            prefetch(indices, row_start[row + AHEAD])
        start = row_start[row]
        for i in range(row_degree[row]):
            neighbor[at] = indices[start + i]
            at += 1


@kernel
def collect_candidates(neighbor, row_degree, num_rows, num_edges, base, label, candidate, importance, local):
    """Number the distinct neighbours in order of appearance and add up their importance.

    Args:
        neighbor: (num_edges,) node ids, row after row.
        base: labels below it are of earlier hops and batches.
        label: (num_nodes,) int32; candidate c of this hop gets base + c.
        candidate, importance: filled: node id, sum of (1 / degree)^2 over the rows that hold it.
        local: (num_edges,) int32, filled with the candidate of each edge.

    Returns:
        The number of candidates.
    """
    count = 0
    edge = 0
    for row in range(num_rows):
        if row_degree[row] == 0:
            continue
        share = 1.0 / row_degree[row]
        square = share * share
        for _ in range(row_degree[row]):
            if edge + AHEAD < num_edges:
                prefetch(label, np.int64(neighbor[edge + AHEAD]))
            name = neighbor[edge]
            known = np.int64(label[name]) - base
            if known < 0:
                known = count
                label[name] = base + count
                candidate[count] = name
                importance[count] = 0.0
                count += 1
            importance[known] += square
            local[edge] = known
            edge += 1
    return count


@kernel
def prefer_nodes(candidate, count, preferred, scale, importance):
    """Multiply the importance of preferred nodes by scale."""
    for c in range(count):
        if preferred[candidate[c]]:
            importance[c] *= scale


@kernel
def include(importance, count, num_samples, probability):
    """Write min(1, c * importance) with c such that the sum is num_samples; 1 for all if there are no more than that.

    Each pass solves for c among those below 1 and puts those that reach it at 1, until none does: about as many passes
    as importance has powers of two at most.
    """
    probability[:count] = 1.0 if count <= num_samples else 0.0
    if count <= num_samples:
        return
    left, capped = num_samples, 1
    factor = 0.0
    while capped:
        left_importance = 0.0
        for c in range(count):
            if probability[c] < 1.0:
                left_importance += importance[c]
        factor = left / left_importance
        capped = 0
        for c in range(count):
            if probability[c] < 1.0 and factor * importance[c] >= 1.0:
                probability[c] = 1.0
                capped += 1
        left -= capped
    for c in range(count):
        if probability[c] < 1.0:
            probability[c] = factor * importance[c]


@kernel
def take(probability, count, key, position):
    """Take a candidate with its probability: position 0 where it is taken, -1 where not.

    Systematic: the probabilities below 1 lie end to end on a line, and those are taken that hold one of the points
    u, u + 1, ... with u the key as a number in [0, 1).
    """
    line, point = 0.0, unit(key)
    for c in range(count):
        taken = probability[c] >= 1.0
        if not taken:
            line += probability[c]
            if line > point:
                taken = True
                point += 1.0
        position[c] = 0 if taken else -1


@kernel
def share_nodes(node, num_placed, base, label, position):
    """Map taken candidates of the last hop to nodes that the batch holds already (the last copy)."""
    for i in range(num_placed):
        c = np.int64(label[node[i]]) - base
        if c >= 0 and position[c] != -1:
            position[c] = -2 - i  # found; `append_nodes` turns it back


@kernel
def append_nodes(candidate, count, num_placed, node, position):
    """Append the candidates that were taken and not found to `node`; return the number of nodes after it."""
    for c in range(count):
        if position[c] == 0:
            node[num_placed] = candidate[c]
            position[c] = num_placed
            num_placed += 1
        elif position[c] < -1:
            position[c] = -2 - position[c]
    return num_placed


@kernel
def keep_edges(local, position, probability, row_start, row_degree, begin, end, first, indptr, source, weight, edge):
    """Write the edges from candidates that were taken: source position, (1 / degree) / probability, place in the CSC.

    Args:
        begin, end: the rows' positions; first: edges of earlier hops.
        indptr: filled from begin + 1 to end.

    Returns:
        The number of edges after it.
    """
    read = 0
    for i in range(begin, end):
        start, degree = row_start[i - begin], row_degree[i - begin]
        if degree:
            share = 1.0 / degree
            for offset in range(degree):
                c = local[read]
                read += 1
                if position[c] >= 0:
                    source[first] = position[c]
                    weight[first] = share / probability[c]
                    edge[first] = start + offset
                    first += 1
        indptr[i + 1] = first
    return first
