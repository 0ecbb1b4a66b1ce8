"""Sampling across the memories of several workers: rows of others are asked for first, own ones sampled meanwhile.

What is sampled for a node is a hash of (key, hop, node): every holder of the row samples the same, so that a batch is
bit for bit the one that `NeighborSampler` samples from the `WholeGraph`. A worker holds CSC rows (`HeldRows`) of its
parts and of replicated nodes. What it must know of all nodes it reads from the store's files, O(nodes): `indptr`,
which says how many edges a row gives and where they are, so that answers are neighbours alone; degrees, labels and
masks, which the `StagedPart` of the `WholeGraph` has. The edges of the store's files are not read.

Such a sampler can be used wherever a `NeighborSampler` can: `BatchMaker(sampler=...)`, or
`FanoutNeighborhood(...)` for task graphs. `ask` is the transport's: (owner, HopRequest) to something with `result()`;
an owner answers with `held.sample(request)`.
"""

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from ..errors import GNNScaleError
from ..jit import kernel
from ..sampler.neighbor import NeighborSampler, NeighborState
from ..sampler.protocol import Allocate, BatchSampler, Subgraph
from ..triton_kernels.sample_neighbors import HopSampling, SampleOptions, Workspace
from ..triton_kernels.sample_neighbors.rows import SampledRows, fold_hop
from .held_rows import ANSWERS, HeldRows, HopRequest, PartOwners


class Sampling(Protocol):
    """Samples on their way; every `concurrent.futures.Future` is one."""

    def result(self) -> np.ndarray:
        """Return the (num_sampled,) neighbours of a request's nodes, in its order; waits for them."""


Ask = Callable[[Hashable, HopRequest], Sampling]


@dataclass(frozen=True)
class DistributedNeighborSampler(BatchSampler):
    """A `NeighborSampler` over rows that several workers hold. Its samples equal those of the sampler bit for bit.

    Args:
        sampler: Sampler that samples along "in" edges, without locality.
        held: The rows that this worker holds.
        owners: Which worker owns each part.
        ask: Sends a request to an owner, and returns at once.

    Raises:
        ValueError: the sampler is of another class.
        GNNScaleError: while sampling, an owner answers with more or fewer neighbours than were asked for; and whatever
            `result()` raises.
    """

    sampler: NeighborSampler = field()  # has no default, whatever `BatchSampler` has
    held: HeldRows
    owners: PartOwners
    ask: Ask
    asks: ClassVar[bool] = True  # of task graphs: a hop is asked for in a task of its own

    def __post_init__(self):
        sampler = self.sampler
        if not isinstance(sampler, NeighborSampler):
            raise ValueError(f"rows=owners takes a NeighborSampler, got {type(sampler).__name__}: use rows=auto")
        if sampler.direction != "in":
            raise ValueError(
                f"rows=owners takes direction='in', got {sampler.direction!r}: write the store with to_undirected=True"
            )
        if sampler.locality is not None:
            raise ValueError("rows=owners takes no locality: use rows=auto, or leave it out")

    @property
    def num_hops(self) -> int:
        return self.sampler.num_hops

    @property
    def direction(self) -> str:
        return self.sampler.direction

    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        return self.sampler.num_batches(num_targets, batch_size, drop_last)

    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> NeighborState:
        return self.sampler.prepare(part, targets, seed)

    def items(self, state: NeighborState, batch_size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
        return self.sampler.items(state, batch_size, drop_last, order_key)

    def sample(
        self,
        state: NeighborState,
        items: np.ndarray,
        key: int,
        workspace: Workspace,
        allocate: Allocate,
        return_e_id: bool,
    ) -> Subgraph:
        hops = self.begin(state, items, key, workspace, return_e_id)
        for _ in range(hops.num_hops):
            hops.sample()
        return self.finish(state, hops, allocate)

    def begin(
        self, state: NeighborState, seeds: np.ndarray, key: int, workspace: Workspace, return_e_id: bool
    ) -> "DistributedHops":
        """Return a batch to be sampled one hop at a time; arguments as for `sample`."""
        return DistributedHops(self, state, seeds, key, workspace, return_e_id)

    def finish(self, state: NeighborState, hops: "DistributedHops", allocate: Allocate) -> Subgraph:
        """Return what the hops of `begin` sampled, all of which are sampled."""
        return self.sampler.finish(state, hops, allocate)


class DistributedHops(HopSampling):
    """`HopSampling` whose rows have several owners; arguments as for `DistributedNeighborSampler.begin`."""

    def __init__(
        self,
        sampler: DistributedNeighborSampler,
        state: NeighborState,
        seeds: np.ndarray,
        key: int,
        workspace: Workspace,
        return_e_id: bool,
    ):
        self._sampler, self._answers, self._asked = sampler, [], False
        options = SampleOptions(sampler.sampler.replace, return_e_id)
        super().__init__(state.relations, [(0, seeds)], state.fanouts, key, [workspace], options)

    def ask(self) -> Future | None:
        """Send the requests of the next hop; return the future of their answers, or None where all rows are here.

        `sample` samples the rows that are here meanwhile, and `relabel` has both.
        """
        self._answers = []
        self._asked = True
        (rows,) = self._rows
        asked = self._ask_foreign(rows, rows.begin, rows.end)
        return ANSWERS.submit(self._wait, asked) if asked else None

    def sample_chunk(self, chunk: int, num_chunks: int) -> None:
        """Sample neighbours, see `HopSampling`; after `ask` those of the rows that are here, in one chunk."""
        if not self._asked:
            return super().sample_chunk(chunk, num_chunks)
        (rows,) = self._rows
        self._sample_own(rows, rows.begin, rows.end, rows.space.neighbor, rows.space.taken)

    def relabel(self) -> None:
        (rows,) = self._rows
        for owner, places, sampled in self._answers:
            indptr = rows.space.indptr[rows.begin : rows.end + 1]
            self._place_answer(owner, places, sampled, indptr, rows.space.neighbor)
        self._answers, self._asked = [], False
        super().relabel()

    def _wait(self, asked: list[tuple[Hashable, np.ndarray, Sampling]]) -> None:
        self._answers = [(owner, places, sampling.result()) for owner, places, sampling in asked]

    def _sample_rows(self, rows: SampledRows, begin: int, end: int, neighbor: np.ndarray, taken: np.ndarray) -> None:
        """Sample for the targets begin..end-1, of whom only this worker's rows are here."""
        asked = self._ask_foreign(rows, begin, end)
        self._sample_own(rows, begin, end, neighbor, taken)
        for owner, places, sampling in asked:
            self._place_answer(owner, places, sampling.result(), rows.space.indptr[begin : end + 1], neighbor)

    def _request(self, rows: SampledRows, begin: int, end: int) -> HopRequest:
        key, replace = int(fold_hop(rows.key, self.hop)), self._options.replace
        return HopRequest(rows.targets.node[begin:end], key, rows.fanouts[self.hop], replace)

    def _ask_foreign(self, rows: SampledRows, begin: int, end: int) -> list[tuple[Hashable, np.ndarray, Sampling]]:
        request, indptr = self._request(rows, begin, end), rows.space.indptr[begin : end + 1]
        held = self._sampler.held.nodes.find(request.nodes)
        return self._ask(np.flatnonzero((held < 0) & (indptr[1:] > indptr[:-1])), request)

    def _sample_own(self, rows: SampledRows, begin: int, end: int, neighbor: np.ndarray, taken: np.ndarray) -> None:
        """Sample the rows that are here, and the positions of all edges."""
        request, held = self._request(rows, begin, end), self._sampler.held
        places, indptr = held.nodes.find(request.nodes), rows.space.indptr[begin : end + 1]
        own = np.flatnonzero(places >= 0)
        sampled = held.sample(request._replace(nodes=request.nodes[own]), places[own])
        self._place_answer("this worker", own, sampled, indptr, neighbor)
        if self._options.return_e_id:  # positions of edges follow from `indptr` and the key: that needs no owner
            rows.pick(begin, end, taken)

    def _ask(self, foreign: np.ndarray, request: HopRequest) -> list[tuple[Hashable, np.ndarray, Sampling]]:
        """Send the requests of a hop's foreign targets; return (owner, positions of its targets, its samples)."""
        nodes = request.nodes[foreign]
        return [
            (owner, foreign[chosen], self._sampler.ask(owner, request._replace(nodes=nodes[chosen])))
            for owner, chosen in self._sampler.owners.group(nodes)
        ]

    def _place_answer(
        self, owner, places: np.ndarray, sampled: np.ndarray, indptr: np.ndarray, neighbor: np.ndarray
    ) -> None:
        """Write the neighbours of some targets to where sampling from the whole graph has them."""
        expected = int((indptr[places + 1] - indptr[places]).sum())
        if len(sampled) != expected:
            raise GNNScaleError(
                f"{owner} sampled {len(sampled)} neighbours of {len(places)} nodes, but {expected} were asked for: "
                f"do all workers read the same store?"
            )
        _place_rows(places, indptr, sampled, neighbor)


@kernel
def _place_rows(places, indptr, sampled, neighbor):
    at, first = 0, indptr[0]
    for i in range(len(places)):
        for k in range(indptr[places[i]] - first, indptr[places[i] + 1] - first):
            neighbor[k] = sampled[at]
            at += 1
