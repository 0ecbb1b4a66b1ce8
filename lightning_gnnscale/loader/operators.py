"""ByteGNN's operators: seeds, positives, negatives, neighbourhoods; a `Column` fetches rows itself."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..sampler.link_sampler import LinkSampler, LinkState
from ..sampler.neighbor import NeighborSampler
from ..sampler.protocol import Allocate, Subgraph
from ..triton_kernels.sample_neighbors import HopSampling, Workspace
from .staged_part import StagedPart


class Neighborhood(Protocol):
    """The neighbourhood of one batch while it is sampled, one hop after the other."""

    num_neighbors: int  # of all nodes that the next hop samples from: the hop's cost
    newest: np.ndarray  # (num_new,) local ids found at the last hop, at first the seeds; a view

    def sample(self) -> None:
        """Sample the next hop."""

    def collect(self, allocate: Allocate) -> Subgraph:
        """Return what was sampled, with the nodes and edges of each hop; the workspace is free then."""


class NeighborhoodOperator(Protocol):
    """Samples neighbourhoods; holds no state of a batch.

    One that has an attribute `in_chunks`, which is true, gives neighbourhoods whose hop may be sampled by several tasks
    side by side, `sample(chunk, num_chunks)` for each, and then `relabel()`, instead of `sample()`.

    One that has an attribute `asks`, which is true, gives neighbourhoods with some rows on other machines: `ask()`
    sends the requests of a hop and returns a `concurrent.futures.Future` of their replies, or None; `sample` samples
    the rows that are here, side by side with it, and `relabel` has both.
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
            return_e_id: whether positions of edges are asked for.
        """


class FetchOperator(Protocol):
    """Gathers rows; every `Column` is one, and an own one derives from it for what it leaves out."""

    dim: int
    dtype: np.dtype
    is_sparse: bool
    by_node_type: bool
    supports: frozenset[str]

    def read(self, ids: np.ndarray, out: Any = None) -> Any:
        """Return the rows of (num,) store ids, see `Column.read`; called by several threads at once."""

    def read_async(self, ids: np.ndarray, out: Any = None) -> Future:
        """Return a future of the rows, see `Column.read_async`."""


class FanoutNeighborhood:
    """The samples of a `NeighborSampler`, in steps: the same subgraphs, bit for bit.

    Args:
        sampler: the one that parts are staged for, or that their `LinkSampler` wraps; or one that asks other machines
            for their rows, in tasks of their own.
    """

    asks = False

    def __init__(self, sampler: NeighborSampler):
        self.asks = self.asks or sampler.asks
        self.sampler, self.num_hops = sampler, sampler.num_hops
        self.in_chunks = type(sampler) is NeighborSampler  # other samplers' rows may be on other machines

    def begin(
        self, staged: StagedPart, seeds: np.ndarray, key: int, workspace: Workspace, return_e_id: bool
    ) -> "_FanoutHops":
        """Return the neighbourhood of a batch before its first hop; see `NeighborhoodOperator`."""
        state = staged.state.inner if isinstance(staged.state, LinkState) else staged.state
        return _FanoutHops(self.sampler, state, self.sampler.begin(state, seeds, key, workspace, return_e_id))


class _FanoutHops:
    def __init__(self, sampler: NeighborSampler, state, hops: HopSampling):
        self._sampler, self._state, self._hops = sampler, state, hops
        self.sample, self.sample_chunk, self.relabel = hops.sample, hops.sample_chunk, hops.relabel
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
    """Samples the seeds of a batch."""

    def sample(self, staged: StagedPart, items: np.ndarray, key: int) -> np.ndarray:
        """Return (num_seeds,) distinct local ids.

        Args:
            staged: the part.
            items: what the batch starts from, of the sampler that the part was staged for.
            key: uint64, of this operator and batch.
        """


class PositiveOperator(Protocol):
    """Samples a positive for each seed."""

    def sample(self, staged: StagedPart, seeds: np.ndarray, key: int) -> np.ndarray:
        """Return (num_seeds,) local ids; a seed without one gets itself. Arguments as for seeds."""


class NegativeOperator(Protocol):
    """Samples negatives for each seed."""

    def sample(self, staged: StagedPart, seeds: np.ndarray, key: int) -> np.ndarray:
        """Return (num_seeds, num_negatives) local ids; arguments as for seeds."""


@dataclass(frozen=True)
class BatchSeeds:
    """The items are the seeds, as `NeighborSampler` makes them."""

    def sample(self, staged: StagedPart, items: np.ndarray, key: int) -> np.ndarray:
        return np.asarray(items)


@dataclass(frozen=True)
class LinkPositives:
    """Sample positives by a function of (csc, seeds, key) over the part's rows, such as `sampler.sample_positives`."""

    samples: Callable[..., np.ndarray]

    def sample(self, staged: StagedPart, seeds: np.ndarray, key: int) -> np.ndarray:
        return self.samples(staged.graph.csc, seeds, key)


@dataclass(frozen=True)
class LinkNegatives:
    """Sample negatives from the core of the part by a function of (num_nodes, num, key), such as `sample_negatives`.

    Args:
        samples: The function.
        num_negatives: Negatives per seed, >= 1.
    """

    samples: Callable[..., np.ndarray]
    num_negatives: int = 5

    def __post_init__(self):
        if self.num_negatives < 1:
            raise ValueError(f"num_negatives must be at least 1, got {self.num_negatives}")

    def sample(self, staged: StagedPart, seeds: np.ndarray, key: int) -> np.ndarray:
        sampled = self.samples(staged.graph.num_core, len(seeds) * self.num_negatives, key)
        return sampled.reshape(len(seeds), self.num_negatives)


@dataclass(frozen=True)
class Operators:
    """The operators of a workflow; any of them may be a user's own.

    Args:
        neighborhood: Samples neighbourhoods, one hop at a time.
        seeds: Samples the seeds.
        positives, negatives: Sample positives and negatives of the seeds; give both or neither. With them a batch has
            links to train on, in three branches.
        links: Samples seeds, positives and negatives whose distinct nodes have one neighbourhood, instead of the other
            three.
        fetch: Gathers feature rows; None: the maker's features.

    Raises:
        ValueError: positives without negatives, or negatives without positives, or either beside links.
    """

    neighborhood: NeighborhoodOperator
    seeds: SeedOperator = field(default_factory=BatchSeeds)
    positives: PositiveOperator | None = None
    negatives: NegativeOperator | None = None
    links: LinkSampler | None = None
    fetch: FetchOperator | None = None

    def __post_init__(self):
        if (self.positives is None) != (self.negatives is None):
            missing = "positives" if self.positives is None else "negatives"
            raise ValueError(f"positives and negatives must be given together, got {missing}=None")
        if self.links is not None and self.positives is not None:
            raise ValueError("links samples positives and negatives itself, got both: leave out one of them")
