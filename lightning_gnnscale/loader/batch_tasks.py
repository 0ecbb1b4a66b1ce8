"""The work of one batch's tasks."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import torch

from ..jit import kernel
from ..partition_store.features import stack_rows
from ..partition_store.packed_features import features_of_part
from ..rng import combine_int
from ..sampler.minibatch import MiniBatch, sparse_rows_to_torch
from ..sampler.protocol import Allocate, Subgraph
from .batch_columns import node_data, with_rows
from .batch_graph import LogicalTask
from .batch_maker import BatchMaker
from .buffer_pool import BufferPool
from .operators import FetchOperator, Operators
from .staged_part import StagedPart


class RowSize:
    """Rows of the largest batch so far: the initial capacity of the next one."""

    def __init__(self):
        self.largest = 0


class RowBuffer:
    """Capacity for the rows of a batch whose size is not known yet; several threads may gather chunks at once.

    Memory is taken at the first chunk, for as many rows as the largest batch so far had. A chunk that does not fit gets
    memory of its own, and the batch is then assembled in a copy; after the first batches this is rare.

    Args:
        fetch: Gathers rows.
        pool: Pool that the memory comes from.
        size: Largest size so far; shared by the batches of a workflow.
    """

    def __init__(self, fetch: FetchOperator, pool: BufferPool, size: RowSize):
        self._fetch, self._pool, self._size = fetch, pool, size
        self._rows: np.ndarray | None = None
        self._chunks: dict[tuple[int, int], object] = {}  # (first row, end): rows
        self._lock = threading.Lock()

    def gather(self, nodes: np.ndarray, first: int, total: int | None) -> Future | None:
        """Gather the rows first, first + 1, ... of the batch; return a future where some are still to come.

        Args:
            nodes: (num,) store ids.
            first: place of the first one in the batch.
            total: rows of the whole batch, None: not known yet.
        """
        end = first + len(nodes)
        if first == end or self._fetch.by_node_type:
            return None
        if self._fetch.is_sparse:
            return self._begin(nodes, None, (first, end))
        with self._lock:
            if self._rows is None:
                self._rows = self._take(max(end, self._size.largest) if total is None else total)
            space = self._rows[first:end] if end <= len(self._rows) else None
        if space is None:
            return self._begin(nodes, self._take(len(nodes)), (first, end))
        return self._begin(nodes, space)

    def _begin(self, nodes: np.ndarray, out: np.ndarray | None, place: tuple[int, int] | None = None) -> Future | None:
        """Read rows, and keep them as a chunk where a place is given; return a future if some are on their way."""
        rows = (self._fetch.read_async if "async" in self._fetch.supports else self._fetch.read)(nodes, out)
        if isinstance(rows, Future) and rows.done():
            rows = rows.result()
        if place is not None:
            self._chunks[place] = rows
        return rows if isinstance(rows, Future) else None

    def attach(self, batch: MiniBatch) -> None:
        """Give the batch its rows, all of which are gathered."""
        if self._fetch.by_node_type:  # in one chunk, since node types are gathered apart from each other
            with_rows(batch, self._fetch.read(batch.n_id.numpy(), self._pool.take))
            return
        total = batch.num_nodes
        self._size.largest = max(self._size.largest, total)
        if self._fetch.is_sparse:
            chunks = [_arrived(self._chunks[place]) for place in sorted(self._chunks)]
            batch.x_csr = sparse_rows_to_torch(stack_rows(chunks or [self._fetch.read(np.empty(0, np.int64))]))
            return
        rows = self._take(0) if self._rows is None else self._rows
        if self._chunks:
            rows = self._take(total)
            kept = min(self._chunks)[0]
            rows[:kept] = self._rows[:kept]
            for (first, end), chunk in self._chunks.items():
                rows[first:end] = _arrived(chunk)
        batch.x_dense = torch.from_numpy(rows[:total])

    def _take(self, num_rows: int) -> np.ndarray:
        return self._pool.take((num_rows, self._fetch.dim), self._fetch.dtype)


def _arrived(rows: Any) -> Any:
    return rows.result() if isinstance(rows, Future) else rows


def join_branches(branches: Sequence[Subgraph], allocate: Allocate) -> Subgraph:
    """Return one subgraph of several, none of whose nodes or edges are shared.

    Its nodes are the seeds of all branches, then their nodes of the first hop, and so on, so that targets come first.
    A node that two branches found appears twice. `row_scale`, `e_id`, `edge_weight` and `columns` are joined where all
    have them.

    Args:
        branches: sampled with as many hops each, with nodes and edges of each hop.
        allocate: gives memory for the results.

    Raises:
        ValueError: the numbers of hops differ.

    Cost: one pass over the edges.
    """
    hops = {len(branch.num_sampled_nodes) for branch in branches}
    if len(hops) != 1:
        raise ValueError(f"branches must have as many hops each, got {sorted(hop - 1 for hop in hops)}")
    if len(branches) == 1:
        return branches[0]
    num_nodes = np.array([branch.num_sampled_nodes for branch in branches])
    counts = num_nodes.T.reshape(-1)  # of each hop and branch, in their order
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).reshape(num_nodes.T.shape)
    own = np.cumsum(num_nodes, axis=1) - num_nodes  # first node of each hop in its branch
    num_targets = int(num_nodes[:, :-1].sum())
    num_edges = sum(branch.edge_index.shape[1] for branch in branches)
    n_id, indptr = allocate((int(num_nodes.sum()),), np.int64), allocate((num_targets + 1,), np.int64)
    edge_index = allocate((2, num_edges), np.int64)
    places = [
        np.arange(len(branch.n_id)) + np.repeat(starts[:, number] - own[number], num_nodes[number])
        for number, branch in enumerate(branches)
    ]
    arrays = {name: _space(name, branches, num_targets, num_edges, allocate) for name in _PER_EDGE + _PER_TARGET}
    at, indptr[0], runs = 0, 0, []
    for hop in range(num_nodes.shape[1]):
        for number, branch in enumerate(branches):
            first, start, count = int(own[number, hop]), int(starts[hop, number]), int(num_nodes[number, hop])
            n_id[start : start + count] = branch.n_id[first : first + count]
            if hop + 1 == num_nodes.shape[1]:
                continue
            begin, end = (int(branch.indptr[row]) for row in (first, first + count))
            copy_edges(branch.edge_index, begin, end, places[number], start - first, edge_index, at)
            indptr[start + 1 : start + count + 1] = branch.indptr[first + 1 : first + count + 1] + (at - begin)
            for name, array in arrays.items():
                if array is not None and name in _PER_EDGE:
                    array[at : at + end - begin] = getattr(branch, name)[begin:end]
                elif array is not None:
                    array[start : start + count] = getattr(branch, name)[first : first + count]
            runs.append((branch, begin, end))
            at += end - begin
    return Subgraph(
        n_id,
        edge_index,
        indptr,
        sum(branch.num_seeds for branch in branches),
        num_sampled_nodes=num_nodes.sum(0).tolist(),
        num_sampled_edges=np.sum([branch.num_sampled_edges for branch in branches], axis=0).tolist(),
        averaging_weights=all(branch.averaging_weights for branch in branches),
        columns=_joined_columns(branches, runs),
        **arrays,
    )


def _joined_columns(branches: Sequence[Subgraph], runs: Sequence[tuple]) -> dict[str, np.ndarray] | None:
    """Return the columns of edges that all branches have, of (branch, first edge, end) runs in their order."""
    if any(branch.columns is None for branch in branches):
        return None
    return {
        name: np.concatenate([values[:0], *(branch.columns[name][begin:end] for branch, begin, end in runs)])
        for name, values in branches[0].columns.items()
    }


_PER_EDGE, _PER_TARGET = ("e_id", "edge_weight"), ("row_scale",)


def _space(name: str, branches: Sequence[Subgraph], num_targets: int, num_edges: int, allocate: Allocate):
    values = [getattr(branch, name) for branch in branches]
    if any(value is None for value in values):
        return None
    return allocate((num_edges if name in _PER_EDGE else num_targets,), values[0].dtype)


@kernel
def copy_edges(edge_index, begin, end, place, shift, out, at):
    """Copy the edges begin..end-1 to `at`: sources to their new places, targets shifted."""
    for i in range(begin, end):
        out[0, at + i - begin] = place[edge_index[0, i]]
        out[1, at + i - begin] = edge_index[1, i] + shift


# Far above the hops of a batch: their keys are folded from the same one.
_FIRST_KEY = 1 << 41


class BatchWorkflow(Protocol):
    """What the tasks of a batch share with those of all others; see `Workflow`."""

    maker: BatchMaker
    operators: Operators | None
    fetch: FetchOperator | None  # None: no rows are gathered
    size: RowSize
    num_branches: int
    num_hops: int
    asks: bool  # whether others sample some of the neighbours

    def fetch_chunks(self, hop: int) -> int:
        """Return how many tasks fetch the rows of a hop."""

    def sample_chunks(self, hop: int) -> int:
        """Return how many tasks sample the neighbours of a hop."""


class BatchTasks:
    """One batch while its tasks run. Later tasks read what earlier tasks of the same branch and hop wrote.

    Args:
        workflow: Workflow that the tasks belong to.
        staged, items, key: Part, items and key of the batch; see `Workflow.instance`.
    """

    def __init__(self, workflow: BatchWorkflow, staged: StagedPart, items: np.ndarray, key: int):
        self._workflow, self._maker, self._operators = workflow, workflow.maker, workflow.operators
        self._staged, self._items, self._key = staged, items, key
        branches = range(workflow.num_branches)
        self._hoods: list = [None for _ in branches]
        self._spaces: list = [None for _ in branches]
        self._local: list[list[np.ndarray]] = [[] for _ in branches]  # local ids of each hop
        self._found: list[list[np.ndarray]] = [[] for _ in branches]  # their store ids
        self._neighbors: dict[tuple[int, int], int] = {}  # of the targets of a hop
        self._node_data: dict = {}
        self._ends: dict[int, np.ndarray] = {}  # seeds, positives and negatives of links
        self._links = None
        self._sampled: list[tuple] = [() for _ in branches]  # distinct local ids and the place of each sample in them
        self._rows = None
        if workflow.fetch is not None:
            table = staged.features or features_of_part(workflow.fetch, staged.graph.part)
            self._rows = RowBuffer(table, self._maker.pool, workflow.size)
        self._batch: MiniBatch | None = None

    def actions(self, task: LogicalTask):
        """Return a task's function, and the function of its cost."""
        kind, branch, hop = task.kind, task.branch, task.hop
        if kind == "neighborhood":
            return lambda: self._sample(branch, hop, task.chunk), lambda: self._hop_cost(branch, hop)
        if kind == "ask":
            return lambda: self._hoods[branch].ask(), lambda: self._hop_cost(branch, hop)
        if kind == "relabel":
            return lambda: self._relabel(branch), lambda: self._hop_cost(branch, hop)
        if kind == "fetch":
            return lambda: self._fetch(branch, hop, task.chunk), lambda: self._fetch_cost(branch, hop, task.chunk)
        if kind in ("block", "nodes"):
            run = self._block if kind == "block" else self._look_up
            return run, lambda: sum(len(nodes) for found in self._found for nodes in found)
        if kind == "end":
            return self._end, lambda: 0
        if kind == "sample":
            return self._sample_batch, lambda: len(self._items)
        if kind == "join":
            return self._join, lambda: sum(ends.size for ends in self._ends.values())
        if self._operators.links is not None:
            return lambda: self._sample_ends(branch), lambda: len(self._items)
        return lambda: self._start(branch), lambda: len(self._items)

    def result(self) -> MiniBatch:
        """Return the batch after all its tasks ran."""
        return self._batch

    def _sample_batch(self) -> None:
        """Sample all of it by the sampler."""
        self._batch = self._maker.sample(self._staged, self._items, self._key)
        self._found[0].append(self._batch.n_id.numpy())

    def _sample_ends(self, branch: int) -> None:
        """Sample the seeds, the positives or the negatives of links."""
        links, state, ends = self._operators.links, self._staged.state, self._ends
        if branch == 0:
            ends[0] = links.first_ends(state, self._items)
        elif branch == 1:
            ends[1] = links.other_ends(state, self._items, ends[0], self._key)
        else:
            ends[2] = links.negative_ends(state, self._items, self._key)

    def _join(self) -> None:
        """Begin the neighbourhood of the distinct ends of links."""
        space = self._maker.lend(self._staged.graph)
        ends = (self._ends[branch] for branch in range(3))
        self._links = self._operators.links.join(self._staged.state, self._items, *ends, space)
        self._begin(0, self._links.nodes, self._key, space)

    def _start(self, branch: int) -> None:
        """Sample the first nodes of a branch."""
        operators, staged = self._operators, self._staged
        key = self._key if branch == 0 else _stream(self._key, branch)
        if branch == 0:
            nodes = np.asarray(operators.seeds.sample(staged, self._items, _stream(key, 0)))
            self._sampled[0] = (nodes, None)
        else:
            seeds, operator = self._sampled[0][0], operators.positives if branch == 1 else operators.negatives
            samples = operator.sample(staged, seeds, _stream(key, 0))
            nodes, place = np.unique(samples, return_inverse=True)
            self._sampled[branch] = (nodes, place.reshape(np.shape(samples)))
        self._begin(branch, nodes, key, self._maker.lend(staged.graph))

    def _begin(self, branch: int, nodes: np.ndarray, key: int, space) -> None:
        self._spaces[branch] = space
        begin = self._operators.neighborhood.begin
        self._hoods[branch] = begin(self._staged, nodes, key, space, self._maker.asks_edges(self._staged))
        self._keep(branch)

    def _sample(self, branch: int, hop: int, chunk: int) -> None:
        chunks = self._workflow.sample_chunks(hop)
        if chunks > 1 or self._workflow.asks:
            self._hoods[branch].sample_chunk(chunk, chunks)
        else:
            self._hoods[branch].sample()
            self._keep(branch)

    def _relabel(self, branch: int) -> None:
        self._hoods[branch].relabel()
        self._keep(branch)

    def _hop_cost(self, branch: int, hop: int) -> int:
        if (branch, hop) not in self._neighbors:
            self._neighbors[branch, hop] = self._hoods[branch].num_neighbors
        return self._neighbors[branch, hop] // self._workflow.sample_chunks(hop)

    def _keep(self, branch: int) -> None:
        """Keep the store ids of the newest nodes: another batch has the workspace when they are fetched."""
        newest = self._hoods[branch].newest
        local = self._maker.pool.take(newest.shape, np.int64)
        local[:] = newest
        self._local[branch].append(local)
        self._found[branch].append(self._maker.store_ids(self._staged.graph, local))

    def _chunk(self, branch: int, hop: int, chunk: int) -> tuple[int, int]:
        num, chunks = len(self._found[branch][hop]), self._workflow.fetch_chunks(hop)
        return num * chunk // chunks, num * (chunk + 1) // chunks

    def _fetch_cost(self, branch: int, hop: int, chunk: int) -> int:
        begin, end = self._chunk(branch, hop, chunk)
        return (end - begin) * self._workflow.fetch.dim

    def _fetch(self, branch: int, hop: int, chunk: int) -> Future | None:
        found, total = self._found, None
        begin, end = self._chunk(branch, hop, chunk)
        first = sum(len(nodes[h]) for nodes in found for h in range(hop))
        first += sum(len(nodes[hop]) for nodes in found[:branch])
        if all(len(nodes) == self._workflow.num_hops + 1 for nodes in found):
            total = sum(len(nodes) for hops in found for nodes in hops)
        return self._rows.gather(found[branch][hop][begin:end], first + begin, total)

    def _block(self) -> None:
        """Put the edges of all branches together."""
        subgraphs = []
        for hood, space in zip(self._hoods, self._spaces, strict=True):
            subgraphs.append(hood.collect(self._maker.pool.take))
            self._maker.give_back(space)
        self._hoods, self._spaces = [], []
        joined = join_branches(subgraphs, self._maker.pool.take)
        if self._links is not None:
            joined = self._operators.links.attach(joined, self._links, self._maker.pool.take)
        elif len(subgraphs) > 1:
            joined = joined._replace(**self._branch_links())
        self._batch = self._maker.assemble(self._staged, joined, self._key, with_nodes=False)

    def _look_up(self) -> None:
        """Look up labels, masks and degrees of the nodes of all branches, hop by hop in the order of the batch."""
        nodes = [hops[hop] for hop in range(self._workflow.num_hops + 1) for hops in self._local]
        local = self._maker.pool.take((sum(len(some) for some in nodes),), np.int64)
        np.concatenate(nodes, out=local)
        self._node_data = node_data(self._staged, local, self._maker.pool.take)

    def _branch_links(self) -> dict[str, np.ndarray]:
        (seeds, _), (positives, positive), (_, negative) = self._sampled
        linked = positives[positive] != seeds
        places = np.stack([np.arange(len(seeds)), len(seeds) + positive])
        negatives = len(seeds) + len(positives) + negative
        return {"pairs": np.ascontiguousarray(places[:, linked]), "negatives": negatives[linked]}

    def _end(self) -> None:
        for name, values in self._node_data.items():
            setattr(self._batch, name, values)
        if self._rows is not None:
            self._rows.attach(self._batch)


def _stream(key: int, number: int) -> int:
    return combine_int(key, _FIRST_KEY + number)
