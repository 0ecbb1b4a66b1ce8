"""ByteGNN's operators: seeds, positives, negatives, neighbourhoods; a `FeatureTable` fetches rows itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..sampler.link_sampler import LinkState
from ..sampler.neighbor import NeighborSampler
from ..sampler.protocol import Allocate, Subgraph
from ..triton_kernels.sample_neighbors import HopSampling, Workspace
from .staged_part import StagedPart


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
    """Gathers rows; every `FeatureTable` is one, and an own one derives from it for what it leaves out."""

    dim: int
    dtype: np.dtype
    is_sparse: bool
    by_kind: bool
    gather_later: Callable | None

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
        self.asks = self.asks or sampler.asks
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
        if sampler.asks:
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
