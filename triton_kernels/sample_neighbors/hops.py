"""One batch sampled hop by hop; the caller does what must happen between two hops."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...graph import CSC
from ...jit import kernel
from ...rng import combine_int
from . import cpu
from .cpu import Workspace


class SplitRows(NamedTuple):
    """The rows of a CSC, neighbours in a set Q before the others; both groups keep their order.

    Attributes:
        indices: (num_edges,) as `csc.indices`, row v at its old place.
        num_inside: (num_rows,) int32, neighbours of each row that are in Q.
        position: (num_edges,) int32, where in its row each edge was; None where edge positions are not needed.
    """

    indices: np.ndarray
    num_inside: np.ndarray
    position: np.ndarray | None = None


def split_rows(csc: CSC, inside: np.ndarray, with_position: bool = False) -> SplitRows:
    """Split the rows of a graph in memory.

    Args:
        csc: the graph.
        inside: (num_nodes,) bool, the set Q.
        with_position: also keep where each edge was.

    Cost: two passes over the edges, about 5 ns each; 4 bytes an edge and a node, 4 bytes an edge more with positions.
    """
    indices = np.empty(csc.num_edges, csc.indices.dtype)
    position = np.empty(csc.num_edges if with_position else 0, np.int32)
    num_inside = np.empty(csc.num_rows, np.int32)
    split_range(csc.indptr, csc.indices, inside, 0, csc.num_rows, 0, indices, position, num_inside)
    return SplitRows(indices, num_inside, position if with_position else None)


@kernel
def split_range(indptr, indices, inside, begin, end, base, out_indices, out_position, out_inside):
    """Split the rows begin..end-1 of a CSC; edge e goes to e - base of the outputs, row v to v - begin.

    Args:
        out_indices, out_position, out_inside: filled; one of length 0 is left out.
    """
    for node in range(begin, end):
        first, last = indptr[node], indptr[node + 1]
        count = 0
        for edge in range(first, last):
            count += inside[indices[edge]]
        preferred = first - base
        other = preferred + count
        if len(out_inside):
            out_inside[node - begin] = count
        for edge in range(first, last):
            source = indices[edge]
            take = inside[source]
            to = preferred if take else other
            preferred += take
            other += not take
            if len(out_indices):
                out_indices[to] = source
            if len(out_position):
                out_position[to] = edge - first


class SampledNeighbors(NamedTuple):
    """A sampled computation graph in PyG's form.

    Attributes:
        n_id: (num_nodes,) int64, the graph's ids; seeds first, then new nodes hop by hop in order of appearance.
        edge_index: (2, num_edges) int64, source and target as positions in n_id, grouped by target.
        indptr: (num_targets + 1,) int64, the edges of each target; targets are the nodes of all hops but the last.
        e_id: (num_edges,) int64 positions in `csc.indices`, or None.
        num_sampled_nodes: seeds, then new nodes of each hop.
        num_sampled_edges: edges of each hop.
        edge_weight: (num_edges,) float32, 1 / (length of the row * probability of the edge), or None without a
            preference.
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
    if isinstance(fanouts, str) or not isinstance(fanouts, Iterable):
        raise ValueError(f"fanouts must be a list of integers like [15, 10, 5], got {fanouts!r}")
    fanouts = tuple(fanouts)
    if not fanouts:
        raise ValueError("fanouts must name at least one hop, got []")
    for hop, fanout in enumerate(fanouts):
        known = isinstance(fanout, int | float | np.number) and not isinstance(fanout, bool)
        if not known or fanout != fanout // 1 or fanout == 0 or fanout < -1:
            raise ValueError(f"fanouts[{hop}] must be an integer >= 1, or -1 for all neighbours, got {fanout}")
    return tuple(int(fanout) for fanout in fanouts)


def place_seeds(space: Workspace, seeds: np.ndarray, num_rows: int) -> int:
    """Begin a batch with its seeds; return how many they are.

    Raises:
        ValueError: they are not distinct integers in [0, num_rows); the workspace is free then.
    """
    seeds = np.ascontiguousarray(seeds)
    if seeds.ndim != 1 or (seeds.dtype.kind not in "iu" and len(seeds)):
        raise ValueError(f"seeds must be one-dimensional integers, got {seeds.dtype} of shape {seeds.shape}")
    if len(seeds) and not (seeds.min() >= 0 and seeds.max() < num_rows):
        raise ValueError(f"seeds must be in [0, {num_rows}), got {seeds.min()} to {seeds.max()}")
    space.reserve("indptr", 1)[0] = 0
    count = space.place(seeds if len(seeds) else seeds.astype(np.int64))
    if count != len(seeds):
        space.finish(count)
        raise ValueError(f"seeds must be distinct, got {len(seeds) - count} repeats among {len(seeds)}")
    return count


def fold_hop(key: int, hop: int) -> np.uint64:
    """Return the key of one hop: combine(key, hop)."""
    return np.uint64(combine_int(key, hop))


def checked_split(split, scale, csc, num_hops, replace, return_e_id) -> Sequence[SplitRows] | None:
    """Return the split rows of each hop, or None where nothing is preferred; see `sample_neighbors`."""
    if not (math.isfinite(scale) and scale >= 1):
        raise ValueError(f"scale must be >= 1 and finite, got {scale}")
    if split is None or scale == 1:
        return None
    if replace:
        raise ValueError("a preference needs samples without replacement: use replace=False, or scale=1")
    if len(split) != num_hops:
        raise ValueError(f"split must have rows for each of {num_hops} hops, got {len(split)}")
    for rows in split:
        shapes = (len(rows.indices), len(rows.num_inside), rows.indices.dtype)
        if shapes != (csc.num_edges, csc.num_rows, csc.indices.dtype):
            raise ValueError(
                f"split rows are of {shapes[1]} rows and {shapes[0]} edges of {shapes[2]}, the graph has "
                f"{csc.num_rows} and {csc.num_edges} of {csc.indices.dtype}"
            )
        if return_e_id and rows.position is None:
            raise ValueError("return_e_id needs the positions of split rows: split them with_position=True")
    return split


class HopSampling:
    """`sample_neighbors` in steps: `sample` once a hop, then `collect`; arguments and errors are its own.

    The workspace belongs to the batch until `collect` or `abandon`. Hops come one after the other, from any thread;
    one may be sampled by several threads side by side, by `sample_chunk` and `relabel` instead of `sample`. Between
    hops the rows of the next one are looked up already, so that `num_neighbors` costs nothing.
    """

    def __init__(
        self,
        csc: CSC,
        seeds: np.ndarray,
        fanouts: Sequence[int],
        key: int,
        *,
        workspace: Workspace,
        replace: bool = False,
        return_e_id: bool = False,
        split: Sequence[SplitRows] | None = None,
        scale: float = 1.0,
    ):
        self.fanouts = check_fanouts(fanouts)
        self._csc = CSC(np.asarray(csc.indptr), np.asarray(csc.indices))
        self._split = checked_split(split, scale, self._csc, len(self.fanouts), replace, return_e_id)
        self._key, self._replace, self._scale, self._return_e_id = key, replace, float(scale), return_e_id
        self._space = workspace
        if not workspace.fits(csc.num_rows, self._csc.indices.dtype):
            raise ValueError(
                f"workspace is for {workspace.num_nodes} nodes of {workspace.id_dtype}, the graph has {csc.num_rows} "
                f"of {self._csc.indices.dtype}"
            )
        self._count = place_seeds(workspace, seeds, csc.num_rows)
        self._nodes, self._edges = [self._count], []
        self._begin, self._first = 0, 0  # targets and edges of the hop to come
        self._or_freed(self._look_up)

    @property
    def hop(self) -> int:
        """Hops sampled so far."""
        return len(self._edges)

    @property
    def num_neighbors(self) -> int:
        """Neighbours that the targets of the next hop have in all, sampled or not; 0 after the last hop."""
        return 0 if self.hop == len(self.fanouts) else int(self._rows()[1].sum())

    @property
    def newest(self) -> np.ndarray:
        """(num_new,) ids found at the last hop, at first the seeds: a view that holds until `collect`."""
        return self._space.node[self._count - self._nodes[-1] : self._count]

    def sample(self) -> None:
        """Sample the next hop; where that fails (no memory), the workspace is free again."""
        self._or_freed(self._sample)

    def sample_chunk(self, chunk: int, num_chunks: int) -> None:
        """Sample the neighbours of some targets of the next hop. Sample each chunk once, in any order or concurrently.

        Args:
            chunk: Index of the chunk, in [0, num_chunks).
            num_chunks: Number of chunks that share the samples about evenly; a row is never split.
        """
        space, end = self._space, self._count
        edges = space.indptr[self._begin : end + 1]
        cuts = [self._first + (int(edges[-1]) - self._first) * number // num_chunks for number in (chunk, chunk + 1)]
        begin, stop = (self._begin + int(place) for place in np.searchsorted(edges, cuts))
        neighbor = space.neighbor[int(space.indptr[begin]) - self._first :]
        taken = np.zeros_like(space.taken)  # the others' chunks have theirs
        self._sample_rows(fold_hop(self._key, self.hop), begin, stop, neighbor, taken)

    def relabel(self) -> None:
        """Number the nodes that all chunks of `sample_chunk` found: the hop is sampled then; errors as of `sample`."""
        self._or_freed(self._relabel)

    def _sample(self) -> None:
        end = self._count
        self._sample_hop(fold_hop(self._key, self.hop), end, int(self._space.indptr[end]), self._space.neighbor)
        self._relabel()

    def _relabel(self) -> None:
        space, end, first = self._space, self._count, self._first
        last = int(space.indptr[end])
        local = space.reserve("local", last, keep=first)
        node = space.reserve("node", min(end + last - first, space.num_nodes) + 1, keep=end)
        self._count = cpu.relabel_hop(space.neighbor, first, last, space.base, space.label, node, end, local)
        self._nodes.append(self._count - end)
        self._edges.append(last - first)
        self._begin, self._first = end, last
        if self.hop < len(self.fanouts):
            self._look_up()

    def _sample_hop(self, hop_key: np.uint64, end: int, last: int, neighbor: np.ndarray) -> None:
        """Sample for the targets up to `end`: neighbours from the front of `neighbor`, their edges up to edge[last]."""
        self._sample_rows(hop_key, self._begin, end, neighbor, self._space.taken)

    def _sample_rows(self, hop_key: np.uint64, begin: int, end: int, neighbor: np.ndarray, taken: np.ndarray) -> None:
        """Sample for the targets begin..end-1, which have `neighbor` from its front on."""
        space, indptr, edge = self._space, self._space.indptr, self._space.edge
        row_start, row_degree = (rows[begin - self._begin :] for rows in self._rows())
        first, last = int(indptr[begin]), int(indptr[end])
        if self._split is None:
            cpu.pick_hop(
                hop_key, space.node, begin, end, self.fanouts[self.hop], self._replace, row_start, row_degree, indptr,
                taken, edge,
            )  # fmt: skip
            cpu.read_hop(self._csc.indices, edge, first, last, neighbor)
            return
        split = self._split[self.hop]
        cpu.pick_split_hop(
            hop_key, space.node, begin, end, self._scale, split.num_inside, row_start, row_degree, indptr, taken, edge,
            space.weight,
        )  # fmt: skip
        cpu.read_hop(split.indices, edge, first, last, neighbor)
        if self._return_e_id:
            cpu.unsplit_hop(split.position, row_start, indptr, begin, end, edge)

    def _or_freed(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException:
            self._space.finish(self._space.num_nodes)  # all labels that it gave are old now
            raise

    def collect(self, allocate: Callable[[tuple[int, ...], type], np.ndarray] = np.empty) -> SampledNeighbors:
        """Copy the batch out of the workspace, which is free then; called once, after the last hop."""
        try:
            return self._copy(allocate)
        finally:
            self.abandon()

    def _copy(self, allocate) -> SampledNeighbors:
        space, num_targets, num_edges = self._space, self._begin, self._first
        n_id = allocate((self._count,), np.int64)
        n_id[:] = space.node[: self._count]
        indptr = allocate((num_targets + 1,), np.int64)
        indptr[:] = space.indptr[: num_targets + 1]
        edge_index = allocate((2, num_edges), np.int64)
        cpu.emit_edges(space.local, indptr, edge_index)
        e_id = None
        if self._return_e_id:
            e_id = allocate((num_edges,), np.int64)
            e_id[:] = space.edge[:num_edges]
        edge_weight = None
        if self._split is not None:
            edge_weight = allocate((num_edges,), np.float32)
            edge_weight[:] = space.weight[:num_edges]
        return SampledNeighbors(n_id, edge_index, indptr, e_id, self._nodes, self._edges, edge_weight)

    def abandon(self) -> None:
        """Release the workspace without a result; not while a hop is being sampled."""
        self._space.finish(self._count)

    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        targets = self._count - self._begin
        return self._space.row_start[:targets], self._space.row_degree[:targets]

    def _look_up(self) -> None:
        """Look up the rows of the targets of the next hop, and make space for their samples."""
        space, begin, end = self._space, self._begin, self._count
        row_start, row_degree = space.reserve("row_start", end - begin), space.reserve("row_degree", end - begin)
        indptr = space.reserve("indptr", end + 1, keep=begin + 1)
        largest = cpu.count_hop(
            self._csc.indptr, space.node, begin, end, self.fanouts[self.hop], self._replace, row_start, row_degree,
            indptr,
        )  # fmt: skip
        words = (largest >> 6) + 1
        if len(space.taken) < words:
            space.taken = np.zeros(words + words // 4, np.uint64)
        last = int(indptr[end])
        space.reserve("edge", last, keep=self._first)
        space.reserve("neighbor", last - self._first)
        if self._split is not None:
            space.reserve("weight", last, keep=self._first)


def sample_hops(
    csc: CSC,
    seeds: np.ndarray,
    fanouts: Sequence[int],
    key: int,
    *,
    workspace: Workspace | None = None,
    allocate: Callable[[tuple[int, ...], type], np.ndarray] = np.empty,
    **options,
) -> SampledNeighbors:
    """Sample all hops of arrays on the CPU; arguments as for `sample_neighbors`, options those of `HopSampling`."""
    hops = HopSampling(
        csc, seeds, fanouts, key, workspace=workspace or Workspace(csc.num_rows, csc.indices.dtype), **options
    )
    for _ in hops.fanouts:
        hops.sample()
    return hops.collect(allocate)
