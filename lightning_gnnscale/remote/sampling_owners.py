"""Sampling across the memories of several workers: rows of others are asked for first, own ones sampled meanwhile.

What is sampled for a node is a hash of (key, hop, node): every holder of the row samples the same, so that a batch is
bit for bit the one that is sampled from the `WholeGraph`. A worker holds CSC rows (`HeldRows`) of its
parts and of replicated nodes. What it must know of all nodes it reads from the store's files, O(nodes): `indptr`,
which says how many edges a row has and where they are; degrees, labels, masks and times, which the `StagedPart` of the
`WholeGraph` has. The edges of the store's files are not read. Where the degree of a node and the key decide what is
sampled, answers are neighbours alone; by edge type, time or weight they also say how many each node has, and where.
With the neighbours come the columns of the edges that lead from them, which lie with the rows of their targets.

`sampler_of_owners` gives a sampler that can be used wherever the one it samples like can. `ask` is the transport's:
(owner, requests) to something with `result()`; an owner answers with `held.sample` of each request.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

import numpy as np

from ..dataset.columns import EDGE_COLUMNS
from ..errors import GNNScaleError, short
from ..graph import CSC
from ..jit import kernel
from ..rng import below, combine
from ..sampler.layerwise import LayerState, LayerwiseSampler
from ..sampler.link_sampler import LinkSampler, LinkState
from ..sampler.neighbor import NeighborSampler, NeighborState
from ..sampler.protocol import Allocate, BatchSampler, Subgraph, edges_between
from ..triton_kernels.sample_neighbors import HopSampling, SampleOptions, Workspace
from ..triton_kernels.sample_neighbors.rows import SampledRows
from .held_rows import ANSWERS, HeldRows, HopRequest, Neighbors, PartOwners, batch_columns


class Sampling(Protocol):
    """Answers on their way; every `concurrent.futures.Future` is one."""

    def result(self) -> Sequence[Neighbors]:
        """Return the answer to each request, in their order; waits for them."""


Ask = Callable[[Hashable, Sequence[HopRequest]], Sampling]


@dataclass(frozen=True)
class OwnedGraph:
    """The rows of the whole graph as one worker reads them.

    Args:
        held: The rows that this worker holds.
        owners: Which worker owns each part.
        ask: Sends requests to an owner as one message, and returns at once.
        columns: Columns of the edges that owners hold, see `owned_columns`.
    """

    held: HeldRows
    owners: PartOwners
    ask: Ask
    columns: tuple[str, ...] = ()

    def begin(self, requests: Sequence[HopRequest]) -> "Answers":
        """Send what other owners must answer, one message to each of them."""
        answers, messages = Answers(self.held, requests), {}
        for number, (request, held) in enumerate(zip(requests, answers.rows, strict=True)):
            foreign = np.flatnonzero(held < 0)
            for owner, chosen in self.owners.group(request.nodes[foreign]):
                places = foreign[chosen]
                messages.setdefault(owner, []).append((number, places, request.at(places)))
        for owner, parts in messages.items():
            sampling = self.ask(owner, [request for _, _, request in parts])
            answers.asked.append((owner, [(number, places) for number, places, _ in parts], sampling))
        return answers

    def read(
        self, nodes: np.ndarray, indptr: np.ndarray, columns: tuple[str, ...] = ()
    ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Return whole rows as a CSC of their own: (num + 1,) offsets, the neighbours of each node, and columns."""
        nodes = np.asarray(nodes)
        degree = indptr[nodes + 1] - indptr[nodes]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(degree)])
        return offsets, *self._placed(HopRequest(nodes, 0, -1, columns=columns), offsets)

    def entries(
        self, nodes: np.ndarray, places: np.ndarray, columns: tuple[str, ...] = ()
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return (num,) int64, one neighbour of each node by its place in the row, and columns of the edge from it."""
        request = HopRequest(np.asarray(nodes), 0, 1, places=np.asarray(places, np.int64), columns=columns)
        neighbor, found = self._placed(request, np.arange(len(nodes) + 1))
        return neighbor.astype(np.int64), found

    def with_columns(self, sampled: Subgraph, indptr: np.ndarray) -> Subgraph:
        """Return a subgraph that has the columns of its edges, asked for by their positions: one message an owner."""
        names = batch_columns(self.columns)
        if sampled.e_id is None or not names:
            return sampled
        targets = sampled.n_id[sampled.edge_index[1]]
        return sampled._replace(columns=named_in_batch(self.entries(targets, sampled.e_id - indptr[targets], names)[1]))

    def _placed(self, request: HopRequest, offsets: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        answers = self.begin([request])
        answers.sample_own()
        neighbor, found = np.empty(int(offsets[-1]), self.held.id_dtype), answers.of(0)
        for owner, places, answer in found:
            check_answer(owner, request, places, answer, offsets)
            _place_rows(places, offsets, answer.neighbor, neighbor)
        return neighbor, _join_columns(request, found, offsets) if request.columns else {}


class Answers:
    """What was asked for at a time, and what came.

    Attributes:
        rows: For each request (num,) row numbers of its nodes, -1 for one that others hold.
        asked: Owner, (request, positions of its nodes) of a message, and its answers on their way.
    """

    def __init__(self, held: HeldRows, requests: Sequence[HopRequest]):
        self._held, self._requests = held, requests
        self.rows = [held.nodes.find(request.nodes) for request in requests]
        self.asked: list[tuple[Hashable, list[tuple[int, np.ndarray]], Sampling]] = []
        self._own: list[tuple[np.ndarray, Neighbors]] = []
        self._came: list[Sequence[Neighbors]] | None = None

    def sample_own(self) -> None:
        """Sample the rows that are here."""
        for request, rows in zip(self._requests, self.rows, strict=True):
            own = np.flatnonzero(rows >= 0)
            self._own.append((own, self._held.sample(request.at(own), rows[own])))

    def wait(self) -> None:
        """Wait for the answers of others."""
        if self._came is None:
            self._came = [sampling.result() for _, _, sampling in self.asked]

    def of(self, number: int) -> list[tuple[Hashable, np.ndarray, Neighbors]]:
        """Return (owner, positions of nodes, what it answered) for one request; waits, after `sample_own`."""
        self.wait()
        found = [("this machine", *self._own[number])]
        for (owner, parts, _), came in zip(self.asked, self._came, strict=True):
            if len(came) != len(parts):
                raise GNNScaleError(
                    f"machine {owner} was asked {len(parts)} requests and sent {len(came)} answers{_OTHER_STORE}"
                )
            found += [(owner, places, one) for (of, places), one in zip(parts, came, strict=True) if of == number]
        return found


def sampler_of_owners(sampler: BatchSampler, rows: OwnedGraph) -> BatchSampler:
    """Return a sampler that samples the same, bit for bit, from rows that several workers hold.

    Raises:
        ValueError: `why_not_owned` says why there is none.
        GNNScaleError: while sampling, an owner answers with more or fewer neighbours than were asked for; and whatever
            `result()` of an answer raises.
    """
    why = why_not_owned(sampler)
    if why is not None:
        raise ValueError(why)
    own = {one.name: getattr(sampler, one.name) for one in fields(sampler)} | {"rows": rows}
    if isinstance(sampler, LinkSampler):
        return DistributedLinkSampler(**own | {"sampler": sampler_of_owners(sampler.sampler, rows)})
    return (DistributedNeighborSampler if isinstance(sampler, NeighborSampler) else DistributedLayerwiseSampler)(**own)


def why_not_owned(sampler: Any) -> str | None:
    """Return the line that refuses a sampler whose rows owners cannot give; None: they can."""
    inner = sampler.sampler if isinstance(sampler, LinkSampler) else sampler
    if not isinstance(inner, NeighborSampler | LayerwiseSampler):
        return (
            "rows=owners asks the owners of rows for what NeighborSampler, LayerwiseSampler and LinkSampler sample, "
            f"got {type(sampler).__name__}: use rows=auto"
        )
    if inner.direction != "in":
        return (
            f"rows=owners takes direction='in', got {short(inner.direction)}: write the store with to_undirected=True"
        )
    if inner.locality is not None:
        return "rows=owners takes no locality: use rows=auto, or leave it out"
    return None


@dataclass(frozen=True)
class DistributedNeighborSampler(NeighborSampler):
    """A `NeighborSampler` over rows that several workers hold; see `sampler_of_owners`.

    Args:
        rows: Where they are.
    """

    rows: OwnedGraph = field(default=None, compare=False, repr=False)  # has no default, whatever comes before it has
    asks: ClassVar[bool] = True  # of task graphs: a hop is asked for in a task of its own

    def sample(
        self, state: NeighborState, items: np.ndarray, key: int, workspace: Workspace, allocate: Allocate,
        return_e_id: bool, *given: Any, **options: Any,
    ) -> Subgraph:  # fmt: skip
        sampled = super().sample(state, items, key, workspace, allocate, return_e_id, *given, **options)
        beside = return_e_id and not self.hop_by_hop
        return self.rows.with_columns(sampled, state.csc.indptr) if beside else sampled

    def begin(
        self,
        state: NeighborState,
        seeds: np.ndarray,
        key: int,
        workspace: Workspace,
        return_e_id: bool,
        with_row_scale: bool = True,
        times: np.ndarray | None = None,
    ) -> "DistributedHops":
        options, times = self.options_of(state, seeds, return_e_id, with_row_scale, times)
        wanted = return_e_id and self.hop_by_hop
        columns = batch_columns(self.rows.columns, self.has_edge_types) if wanted else ()
        return DistributedHops(self.rows, state, seeds, key, workspace, options, times, self, columns)

    def finish(
        self, state: NeighborState, hops: "DistributedHops", allocate: Allocate, with_row_scale: bool = True
    ) -> Subgraph:
        columns = hops.columns()  # before the workspace is another batch's
        return super().finish(state, hops, allocate, with_row_scale)._replace(columns=columns)

    def induced(
        self, state: NeighborState, nodes: np.ndarray, num_seeds: int, workspace: Workspace, allocate: Allocate,
        return_e_id: bool,
    ) -> Subgraph:  # fmt: skip
        offsets, neighbor, _ = self.rows.read(nodes, state.csc.indptr)
        count, every = workspace.place(nodes), np.arange(len(nodes))
        edge_index, indptr, edge = edges_between(offsets, neighbor, every, workspace, allocate, return_e_id)
        workspace.finish(count)
        if return_e_id:
            edge += np.repeat(state.csc.indptr[nodes] - offsets[:-1], np.diff(indptr))
        n_id = allocate((len(nodes),), np.int64)
        n_id[:] = nodes
        return Subgraph(n_id, edge_index, indptr, num_seeds, edge)


@dataclass(frozen=True)
class DistributedLayerwiseSampler(LayerwiseSampler):
    """A `LayerwiseSampler` over rows that several workers hold; see `sampler_of_owners`.

    Args:
        rows: Where they are.
    """

    rows: OwnedGraph = field(default=None, compare=False, repr=False)

    def sample(self, state: LayerState, *given: Any, **options: Any) -> Subgraph:
        return self.rows.with_columns(super().sample(state, *given, **options), state.csc.indptr)

    def read_rows(self, csc: CSC, nodes: np.ndarray, neighbor: np.ndarray) -> None:
        """Fill `neighbor` with the rows of nodes, one after the other."""
        _, found, _ = self.rows.read(nodes, csc.indptr)
        neighbor[: len(found)] = found


@dataclass(frozen=True)
class DistributedLinkSampler(LinkSampler):
    """A `LinkSampler` over rows that several workers hold; see `sampler_of_owners`.

    Args:
        rows: Where they are.
    """

    rows: OwnedGraph = field(default=None, compare=False, repr=False)

    def sources_at(self, csc: CSC, targets: np.ndarray, edges: np.ndarray) -> np.ndarray:
        return self.rows.entries(targets, edges - csc.indptr[targets])[0]

    def columns_at(self, state: LinkState, targets: np.ndarray, edges: np.ndarray) -> dict[str, np.ndarray]:
        counts = {"edge_time": state.edge_time is not None, "edge_type": state.edge_type is not None}
        counts |= {"edge_label": self.labelled, "edge_features": self.labelled}
        names = tuple(name for name in self.rows.columns if counts.get(name))
        return self.rows.entries(targets, edges - state.inner.csc.indptr[targets], names)[1] if names else {}

    def edges_to_sample(
        self,
        indptr: np.ndarray,
        targets: np.ndarray,
        chosen: np.ndarray | None,
        edge_type: np.ndarray | None,
        edge_time: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        counts = {"edge_type": chosen is not None, "edge_time": edge_time is not None}
        names = tuple(name for name, does in counts.items() if does)
        if not names:
            return super().edges_to_sample(indptr, targets, None, None, None)
        offsets, _, found = self.rows.read(targets, indptr, names)
        columns = (found.get("edge_type"), found.get("edge_time"))
        lengths, edges = super().edges_to_sample(offsets, np.arange(len(targets)), chosen, *columns)
        return lengths, edges if edges is None else edges + np.repeat(indptr[targets] - offsets[:-1], lengths)

    def walk(self, csc: CSC, seeds: np.ndarray, key: int, length: int) -> np.ndarray:
        return walk_by_entries(np.asarray(csc.indptr), self.rows.entries, seeds, key, length)


class DistributedHops(HopSampling):
    """`HopSampling` whose rows have several owners: a hop is asked for as soon as its targets are known.

    Args:
        graph: Where the rows are.
        state, seeds, key, workspace: As `NeighborSampler.begin` has them.
        options, times: As `HopSampling` has them.
        sampler: What edges are sampled by.
        columns: Columns of the edges that come with them.
    """

    def __init__(
        self,
        graph: OwnedGraph,
        state: NeighborState,
        seeds: np.ndarray,
        key: int,
        workspace: Workspace,
        options: SampleOptions,
        times: np.ndarray | None,
        sampler: NeighborSampler,
        columns: tuple[str, ...] = (),
    ):
        self._graph, self._sampler, self._wanted = graph, sampler, []
        self._names, self._columns = columns, [{name: [] for name in columns} for _ in state.relations]
        self._is_named = "edge_types" in sampler.requires
        # What decides which edges are sampled is with the owners: here a degree bounds how many there are.
        relations = [one._replace(time=None, weight=None, edge_type=None) for one in state.relations]
        super().__init__(
            relations, [(0, seeds)], state.fanouts, key, [workspace], options, times=times, type_of=state.type_of
        )

    def ask(self) -> Future | None:
        """Return the future of the next hop's answers, or None where all its rows are here."""
        return ANSWERS.submit(self._answers.wait) if self._answers.asked else None

    def sample_chunk(self, chunk: int, num_chunks: int) -> None:
        """Sample the rows that are here, in one chunk."""
        if chunk == 0:
            self._answers.sample_own()

    def columns(self) -> dict[str, np.ndarray] | None:
        """Return the columns of the edges in their order in `collect`, which comes after it; None: none are asked for.

        Edges of an edge type are there by target, so that those of all are put in the order of their targets, stably.
        """
        if not self._names:
            return None
        joined = {name: np.concatenate([chunk for own in self._columns for chunk in own[name]]) for name in self._names}
        if len(self._rows) > 1:
            lengths = [np.diff(rows.space.indptr[: rows.begin + 1]) for rows in self._rows]
            targets = np.concatenate([np.repeat(np.arange(len(one)), one) for one in lengths])
            order = np.argsort(targets, kind="stable")
            joined = {name: values[order] for name, values in joined.items()}
        return named_in_batch(joined)

    def _look_up(self) -> None:
        super()._look_up()
        self._wanted = [np.flatnonzero(np.diff(rows.space.indptr[rows.begin : rows.end + 1])) for rows in self._rows]
        self._requests = [self._request(*one) for one in zip(self._rows, self._wanted, strict=True)]
        self._answers = self._graph.begin(self._requests)

    def _request(self, rows: SampledRows, wanted: np.ndarray) -> HopRequest:
        options, begin, end = self._options, rows.begin, rows.end
        names = rows.names(begin, end)[wanted] if options.disjoint else None
        until = None if self.times is None else self.times[rows.targets.owner[begin:end]][wanted]
        number = rows.relation.number if self._is_named else None
        request = HopRequest(
            rows.targets.node[begin:end][wanted], int(rows.hop_key), rows.fanouts[self.hop], options.replace, names,
            until, number, self._sampler.weighted, options.latest, options.strict, columns=self._names,
        )  # fmt: skip
        if request.is_plain:
            return request
        return request._replace(with_place=options.return_e_id, with_weight=options.with_weight)

    def _sample(self) -> None:
        self._answers.sample_own()
        self._relabel()

    def _relabel(self) -> None:
        for number, rows in enumerate(self._rows):
            self._place_answers(number, rows, self._wanted[number], self._answers.of(number))
        super()._relabel()

    def _place_answers(self, number: int, rows: SampledRows, wanted: np.ndarray, answers: list) -> None:
        """Write what was sampled to where sampling from the whole graph has it."""
        request = self._requests[number]
        space, first, indptr = rows.space, rows.first, rows.space.indptr[rows.begin : rows.end + 1]
        if any(answer.count is not None for _, _, answer in answers):
            most, count = np.diff(indptr), np.zeros(rows.end - rows.begin, np.int64)
            for owner, places, answer in answers:
                check_counts(owner, request, most[wanted[places]], answer)
                count[wanted[places]] = answer.count
            np.cumsum(count, out=indptr[1:])
            indptr[1:] += first
            rows.last = int(indptr[-1])
        for owner, places, answer in answers:
            places = wanted[places]
            check_answer(owner, request, places, answer, indptr)
            _place_rows(places, indptr, answer.neighbor, space.neighbor)
            if answer.place is not None:
                count = indptr[places + 1] - indptr[places]
                edge = answer.place + np.repeat(space.row_start[places], count)
                _place_rows(places, indptr, edge, space.edge[first:])
            if answer.weight is not None:
                _place_rows(places, indptr, answer.weight, space.weight[first:])
        if request.columns:
            placed = [(owner, wanted[places], answer) for owner, places, answer in answers]
            for name, values in _join_columns(request, placed, indptr - first).items():
                self._columns[number][name].append(values)
        known = all(answer.count is None for _, _, answer in answers)
        if known and rows.last > first and (self._options.return_e_id or self._options.with_weight):
            rows.pick(rows.begin, rows.end, space.taken)  # the key says which: that needs no owner


def walk_by_entries(
    indptr: np.ndarray,
    entries: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, Any]],
    seeds: np.ndarray,
    key: int,
    length: int,
) -> np.ndarray:
    """Return what `sample_positives(choose="any")` samples, by reading one entry a step of the rows that walks pass.

    Args:
        indptr: (num_nodes + 1,) row offsets of the whole graph.
        entries: Maps nodes and places in their rows to neighbours, and whatever else.
        seeds, key, length: As `sample_positives` has them.
    """
    node = np.array(seeds, np.int64)
    steps = _walk_steps(np.uint64(key), len(node), length)
    for step in range(length):
        degree = indptr[node + 1] - indptr[node]
        goes = np.flatnonzero((steps > step) & (degree > 0))
        places = _walk_places(np.uint64(key), goes, step, degree[goes])
        node[goes], _ = entries(node[goes], places)
    return node


def named_in_batch(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return columns of edges by their names in a batch."""
    return {EDGE_COLUMNS[name].in_batch if name in EDGE_COLUMNS else name: one for name, one in columns.items()}


_OTHER_STORE = ": do all machines read the same store, with the same release?"


def check_counts(owner: Hashable, request: HopRequest, most: np.ndarray, answer: Neighbors) -> None:
    """Refuse an answer that does not say of each node how many neighbours were sampled.

    Args:
        owner: Who answered.
        request: What was asked, of all nodes.
        most: (num_asked,) neighbours that may be sampled for each node that it was asked for: there is memory for them.
        answer: What came.

    Raises:
        GNNScaleError: counts are missing, negative or larger.
    """
    num = 0 if answer.count is None else len(answer.count)
    if num != len(most):
        raise _unfit(owner, request, len(most), f"{num} counts of neighbours for {len(most)} nodes")
    wrong = np.flatnonzero((answer.count < 0) | (answer.count > most)) if num else ()
    if len(wrong):
        told = f"{answer.count[wrong[0]]} neighbours for a node that has {most[wrong[0]]} to sample"
        raise _unfit(owner, request, len(most), told)


def check_answer(
    owner: Hashable, request: HopRequest, places: np.ndarray, answer: Neighbors, indptr: np.ndarray
) -> None:
    """Refuse an answer of another length than was asked for, or without something of it.

    Args:
        owner: Who answered.
        request: What was asked, of all nodes.
        places: (num_asked,) positions in the request of those that it was asked for.
        answer: What came.
        indptr: (num_nodes + 1,) where the samples of each node of the request go.

    Raises:
        GNNScaleError: one is missing, too short or too long.
    """
    expected = int((indptr[places + 1] - indptr[places]).sum())
    given = {"neighbours": answer.neighbor} | {name: (answer.columns or {}).get(name) for name in request.columns}
    given["places"] = answer.place if request.with_place else answer.neighbor
    given["weights"] = answer.weight if request.with_weight else answer.neighbor
    for name, values in given.items():
        num = 0 if values is None else len(values)
        if num != expected or values is None:
            raise _unfit(owner, request, len(places), f"{num} {name} instead of {expected}")


def _unfit(owner: Hashable, request: HopRequest, num_nodes: int, what: str) -> GNNScaleError:
    asked = "all neighbours" if request.fanout < 0 else f"up to {request.fanout} neighbours"
    asked = asked if request.places is None else "one neighbour"
    along = "" if request.number is None else f" along edge type {request.number}"
    named = owner if owner == "this machine" else f"machine {owner}"
    return GNNScaleError(
        f"{named} was asked for {asked} of each of {num_nodes} nodes{along}, and sent {what}{_OTHER_STORE}"
    )


def _join_columns(
    request: HopRequest, answers: Sequence[tuple[Hashable, np.ndarray, Neighbors]], indptr: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the columns of a request's edges, of (owner, positions of nodes, answer), this machine's first."""
    order = []
    for _, places, answer in answers:
        order.append(np.empty(len(answer.neighbor), np.int64))
        _edges_of(places, indptr, order[-1])
    joined = {}
    for name in request.columns:
        like = answers[0][2].columns[name]
        joined[name] = np.empty((int(indptr[-1]), *like.shape[1:]), like.dtype)
        for at, (owner, places, answer) in zip(order, answers, strict=True):
            values = answer.columns[name]
            if (values.shape[1:], values.dtype) != (like.shape[1:], like.dtype):
                told = (f"{one.dtype} of shape {one.shape[1:]}" for one in (values, like))
                raise _unfit(owner, request, len(places), "{} as {} of an edge instead of {}".format(name, *told))
            joined[name][at] = values
    return joined


@kernel
def _place_rows(places, indptr, sampled, out):
    at, first = 0, indptr[0]
    for i in range(len(places)):
        for k in range(indptr[places[i]] - first, indptr[places[i] + 1] - first):
            out[k] = sampled[at]
            at += 1


@kernel
def _edges_of(places, indptr, out):
    at = 0
    for i in range(len(places)):
        for k in range(indptr[places[i]], indptr[places[i] + 1]):
            out[at] = k
            at += 1


@kernel
def _walk_steps(key, num, length):
    steps = np.empty(num, np.int64)
    for i in range(num):
        steps[i] = 1 + below(combine(combine(key, i), length), length)
    return steps


@kernel
def _walk_places(key, walks, step, degree):
    places = np.empty(len(walks), np.int64)
    for i in range(len(walks)):
        places[i] = below(combine(combine(key, walks[i]), step), degree[i])
    return places
