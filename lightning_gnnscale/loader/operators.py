"""ByteGNN's operators: seeds, positives, negatives, neighbourhoods; a `FeatureTable` fetches rows itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..graph import CSC
from ..jit import kernel
from ..rng import GOLDEN, below, combine, combine_int, mix64
from ..sampler.link_sampler import LinkState
from ..sampler.neighbor import NeighborSampler
from ..sampler.protocol import Allocate, Subgraph
from ..triton_kernels.sample_neighbors import HopSampling, Workspace
from ..triton_kernels.sample_neighbors.cpu import emit_edges, relabel_hop
from .staged_part import StagedPart


class PinSageNeighborhood:
    """Give each node the `num_neighbors` nodes that random walks from it visit most often.

    A walk steps to a uniform in-neighbour and ends early at a node that has none. Arcs weigh their share of the visits
    of the nodes kept, so that a weighted sum is PinSAGE's importance-pooled mean. Ties go to the lower id; the node
    itself is not its neighbour.

    Args:
        num_neighbors: nodes kept, >= 1.
        num_hops: layers of the model, >= 1.
        num_walks, walk_length: walks from each node, and steps of each, >= 1.

    Raises:
        ValueError: an argument is below 1.

    Cost: O(num_walks * walk_length) random reads a node.
    Source: Ying et al., PinSAGE, KDD 2018, section 3.1. Differs: walks of a fixed number of steps, without restarts.
    """

    def __init__(self, num_neighbors: int = 10, num_hops: int = 2, num_walks: int = 10, walk_length: int = 3):
        for name, value in (
            ("num_neighbors", num_neighbors),
            ("num_hops", num_hops),
            ("num_walks", num_walks),
            ("walk_length", walk_length),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_neighbors, self.num_hops = num_neighbors, num_hops
        self.num_walks, self.walk_length = num_walks, walk_length

    def begin(
        self, staged: StagedPart, seeds: np.ndarray, key: int, workspace: Workspace, return_e_id: bool
    ) -> "_Walks":
        """Return the neighbourhood of a batch before its first hop; see `NeighborhoodOperator`.

        Raises:
            ValueError: positions of arcs are asked for, which these neighbours have none of; or seeds are repeated.
        """
        if return_e_id:
            raise ValueError(
                "neighbours by walks are no arcs of the store: use return_e_id=False, and a store without edge_weight "
                "and edge_features"
            )
        return _Walks(self, staged.graph.csc, seeds, key, workspace)


class _Walks:
    def __init__(self, options: PinSageNeighborhood, csc: CSC, seeds: np.ndarray, key: int, space: Workspace):
        self._options, self._key, self._space = options, key, space
        self._indptr, self._indices = np.asarray(csc.indptr), np.asarray(csc.indices)
        self._count = space.place(seeds)
        if self._count != len(seeds):
            space.finish(self._count)
            raise ValueError(f"seeds must be distinct, got {len(seeds) - self._count} repeats among {len(seeds)}")
        space.reserve("indptr", 1)[0] = 0
        self._begin, self._nodes, self._arcs = 0, [self._count], [0]

    @property
    def num_neighbors(self) -> int:
        """Steps of the walks of the next hop."""
        return (self._count - self._begin) * self._options.num_walks * self._options.walk_length

    @property
    def newest(self) -> np.ndarray:
        return self._space.node[self._count - self._nodes[-1] : self._count]

    def sample(self) -> None:
        """Walk from the nodes of the last hop, and keep those visited most."""
        options, space, begin, end, first = self._options, self._space, self._begin, self._count, self._arcs[-1]
        most = (end - begin) * options.num_neighbors
        indptr = space.reserve("indptr", end + 1, keep=begin + 1)
        neighbor, weight = space.reserve("neighbor", most), space.reserve("weight", first + most, keep=first)
        local = space.reserve("local", first + most, keep=first)
        node = space.reserve("node", min(end + most, space.num_nodes) + 1, keep=end)
        hop_key = np.uint64(combine_int(self._key, len(self._arcs) - 1))
        count_visits(
            self._indptr, self._indices, hop_key, node, begin, end, options.num_walks, options.walk_length,
            options.num_neighbors, indptr, neighbor, weight,
        )  # fmt: skip
        last = int(indptr[end])
        self._count = relabel_hop(neighbor, first, last, space.base, space.label, node, end, local)
        self._nodes.append(self._count - end)
        self._arcs.append(last)
        self._begin = end

    def collect(self, allocate: Callable) -> Subgraph:
        """Copy the batch out of the workspace, which is free then."""
        space, num_targets, num_arcs = self._space, self._begin, self._arcs[-1]
        n_id, indptr = allocate((self._count,), np.int64), allocate((num_targets + 1,), np.int64)
        n_id[:], indptr[:] = space.node[: self._count], space.indptr[: num_targets + 1]
        edge_index, weight = allocate((2, num_arcs), np.int64), allocate((num_arcs,), np.float32)
        emit_edges(space.local, indptr, edge_index)
        weight[:] = space.weight[:num_arcs]
        space.finish(self._count)
        return Subgraph(
            n_id, edge_index, indptr, self._nodes[0], None, self._nodes, np.diff(self._arcs).tolist(),
            edge_weight=weight, averaging_weights=True,
        )  # fmt: skip


@kernel
def count_visits(
    indptr, indices, hop_key, node, begin, end, num_walks, walk_length, num_kept, block_indptr, neighbor, weight
):
    """Walk from the targets node[begin:end] and keep the nodes visited most.

    Args:
        block_indptr: filled from begin + 1 to end; block_indptr[begin] is given.
        neighbor: filled from 0 on with the nodes kept, most visits first, then by id.
        weight: filled from block_indptr[begin] on with their shares of the visits of the nodes kept.
    """
    visited = np.empty(num_walks * walk_length, np.int64)
    found = np.empty(num_walks * walk_length, np.int64)
    visits = np.empty(num_walks * walk_length, np.int64)
    first = block_indptr[begin]
    at = first
    for i in range(begin, end):
        target = np.int64(node[i])
        row_key = mix64(hop_key + np.uint64(target) * GOLDEN)
        count = 0
        for walk in range(num_walks):
            walk_key = combine(row_key, walk)
            place = target
            for step in range(walk_length):
                degree = indptr[place + 1] - indptr[place]
                if degree == 0:
                    break
                place = np.int64(indices[indptr[place] + below(combine(walk_key, step), degree)])
                if place != target:
                    visited[count] = place
                    count += 1
        visited[:count].sort()
        distinct = 0
        for j in range(count):
            if j == 0 or visited[j] != visited[j - 1]:
                found[distinct] = visited[j]
                visits[distinct] = 0
                distinct += 1
            visits[distinct - 1] += 1
        kept = min(distinct, num_kept)
        total = 0
        for rank in range(kept):
            best = rank
            for j in range(rank + 1, distinct):
                if visits[j] > visits[best] or (visits[j] == visits[best] and found[j] < found[best]):
                    best = j
            found[rank], found[best] = found[best], found[rank]
            visits[rank], visits[best] = visits[best], visits[rank]
            total += visits[rank]
        for rank in range(kept):
            neighbor[at - first + rank] = found[rank]
            weight[at + rank] = visits[rank] / total
        at += kept
        block_indptr[i + 1] = at


class Neighborhood(Protocol):
    """The neighbourhood of one batch while it is drawn, one hop after the other."""

    num_neighbors: int  # in all, of the nodes whose neighbours the next hop draws: what the hop costs
    newest: np.ndarray  # (num_new,) local ids found at the last hop, at first the seeds; a view

    def sample(self) -> None:
        """Draw the next hop."""

    def collect(self, allocate: Allocate) -> Subgraph:
        """Return what was drawn, with the nodes and arcs of each hop; the workspace is free then."""


class NeighborhoodOperator(Protocol):
    """Draws neighbourhoods; has no state of a batch.

    One that has an attribute `in_pieces`, which is true, gives neighbourhoods whose hop may be drawn by several tasks
    side by side, `draw(piece, num_pieces)` for each, and then `relabel()`, in place of `sample()`.

    One that has an attribute `asks`, which is true, gives neighbourhoods some of whose rows lie elsewhere: `ask()`
    sends the requests of a hop and returns a `concurrent.futures.Future` of their replies, or None; `draw` draws the
    rows that are here, side by side with it, and `relabel` has both.
    """

    num_hops: int

    def begin(
        self, staged: StagedPart, seeds: np.ndarray, key: int, workspace: Workspace, return_e_id: bool
    ) -> Neighborhood:
        """Return the neighbourhood of a batch before its first hop.

        Args:
            staged: the part.
            seeds: (num_seeds,) distinct local ids.
            key: uint64, of this operator and batch.
            workspace: the batch's own until `collect`.
            return_e_id: whether positions of arcs are asked for.
        """


class FetchOperator(Protocol):
    """Gathers rows; every `FeatureTable` and `FeatureBuffer` is one."""

    dim: int
    dtype: np.dtype
    is_sparse: bool

    def gather(self, nodes: np.ndarray, out: np.ndarray | None = None):
        """Return the rows of (num,) store ids, in `out` where they are dense; called by several threads at once."""


class FanoutNeighborhood:
    """The draws of a `NeighborSampler`, in steps: the same subgraphs, bit for bit.

    Args:
        sampler: the one that parts are staged for, or that their `LinkSampler` wraps; or one that asks other machines
            for their rows, in tasks of their own.
    """

    asks = False

    def __init__(self, sampler: NeighborSampler):
        self.asks = self.asks or getattr(sampler, "asks", False)
        self.sampler, self.num_hops = sampler, len(sampler.fanouts)
        self.in_pieces = type(sampler) is NeighborSampler  # rows of another kind may lie elsewhere

    def begin(
        self, staged: StagedPart, seeds: np.ndarray, key: int, workspace: Workspace, return_e_id: bool
    ) -> "_FanoutHops":
        """Return the neighbourhood of a batch before its first hop; see `NeighborhoodOperator`."""
        state = staged.state.inner if isinstance(staged.state, LinkState) else staged.state
        return _FanoutHops(self.sampler, state, self.sampler.begin(state, seeds, key, workspace, return_e_id))


class _FanoutHops:
    def __init__(self, sampler: NeighborSampler, state, hops: HopSampling):
        self._sampler, self._state, self._hops = sampler, state, hops
        self.sample, self.draw, self.relabel = hops.sample, hops.draw, hops.relabel
        if hasattr(hops, "ask"):
            self.ask = hops.ask

    @property
    def num_neighbors(self) -> int:
        return self._hops.num_neighbors

    @property
    def newest(self) -> np.ndarray:
        return self._hops.newest

    def collect(self, allocate: Allocate) -> Subgraph:
        return self._sampler.finish(self._state, self._hops, allocate)


class SeedOperator(Protocol):
    """Draws the seeds of a batch."""

    def draw(self, staged: StagedPart, items: np.ndarray, key: int) -> np.ndarray:
        """Return (num_seeds,) distinct local ids.

        Args:
            staged: the part.
            items: what the batch starts from, of the sampler that the part was staged for.
            key: uint64, of this operator and batch.
        """


class PositiveOperator(Protocol):
    """Draws a positive for each seed."""

    def draw(self, staged: StagedPart, seeds: np.ndarray, key: int) -> np.ndarray:
        """Return (num_seeds,) local ids; a seed itself means that it has none. Arguments as for seeds."""


class NegativeOperator(Protocol):
    """Draws negatives for each seed."""

    def draw(self, staged: StagedPart, seeds: np.ndarray, key: int) -> np.ndarray:
        """Return (num_seeds, num_negatives) local ids; arguments as for seeds."""


@dataclass(frozen=True)
class BatchSeeds:
    """The items are the seeds, as `NeighborSampler` makes them."""

    def draw(self, staged: StagedPart, items: np.ndarray, key: int) -> np.ndarray:
        return np.asarray(items)


@dataclass(frozen=True)
class LinkPositives:
    """Draw positives by a function of (csc, seeds, key) over the part's rows, such as `sampler.draw_positives`."""

    draws: Callable[..., np.ndarray]

    def draw(self, staged: StagedPart, seeds: np.ndarray, key: int) -> np.ndarray:
        return self.draws(staged.graph.csc, seeds, key)


@dataclass(frozen=True)
class LinkNegatives:
    """Draw negatives from the core of the part by a function of (num_nodes, num, key), such as `draw_negatives`.

    Args:
        draws: The function.
        num_negatives: Negatives per seed, >= 1.
    """

    draws: Callable[..., np.ndarray]
    num_negatives: int = 5

    def __post_init__(self):
        if self.num_negatives < 1:
            raise ValueError(f"num_negatives must be at least 1, got {self.num_negatives}")

    def draw(self, staged: StagedPart, seeds: np.ndarray, key: int) -> np.ndarray:
        drawn = self.draws(staged.graph.num_core, len(seeds) * self.num_negatives, key)
        return drawn.reshape(len(seeds), self.num_negatives)
