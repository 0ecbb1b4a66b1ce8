"""Batch preparation as a graph of small tasks: the logical one is made once, a physical one for each batch."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..rng import combine_array
from ..sampler.minibatch import MiniBatch
from .batch_builder import BatchBuilder
from .batch_graph import BatchGraph, Task
from .join_branches import join_branches
from .operators import BatchSeeds, FetchOperator, NegativeOperator, NeighborhoodOperator, PositiveOperator, SeedOperator
from .row_buffer import RowBuffer, RowSize
from .staged_part import StagedPart

BRANCHES = ("seeds", "positives", "negatives")
# Far above the hops of a batch, whose keys are folded from the same one.
_FIRST_KEY = 1 << 41


class LogicalTask(NamedTuple):
    """One task of every batch.

    Attributes:
        kind: "seeds", "positives", "negatives": what draws the first nodes of a branch; "neighborhood" and "fetch": of
            one hop and branch; "block": arcs, labels and masks of all branches; "end".
        branch: 0 seeds, 1 positives, 2 negatives.
        hop: 0 are the first nodes.
        dependencies: numbers of earlier tasks.
    """

    kind: str
    branch: int
    hop: int
    dependencies: tuple[int, ...]


@dataclass(frozen=True)
class Operators:
    """What a workflow is made of; any of them may be a user's own.

    Args:
        neighborhood: draws neighbourhoods, one hop at a time.
        seeds: draws the seeds.
        positives, negatives: of the seeds, both or none; with them a batch has links to train on.
        fetch: gathers feature rows; None: the builder's features.

    Raises:
        ValueError: positives without negatives, or negatives without positives.
    """

    neighborhood: NeighborhoodOperator
    seeds: SeedOperator = field(default_factory=BatchSeeds)
    positives: PositiveOperator | None = None
    negatives: NegativeOperator | None = None
    fetch: FetchOperator | None = None

    def __post_init__(self):
        if (self.positives is None) != (self.negatives is None):
            missing = "positives" if self.positives is None else "negatives"
            raise ValueError(f"positives and negatives must be given together, got {missing}=None")


class Workflow:
    """The logical task graph: supervised without positives and negatives, else three branches joined at the end.

    A supervised batch of `FanoutNeighborhood` equals that of `BatchBuilder.build`, bit for bit. A batch with links has
    the distinct nodes of each branch as seeds, [seeds | positives | negatives], and each branch's neighbourhood beside
    the others': a node that two branches found stands twice. `pairs` and `negatives` name the links among the seeds;
    a seed that is its own positive has none.

    A hop's rows are fetched as soon as the hop is drawn in every branch up to its own: its place in the batch is known
    then, and nothing is copied when branches are joined.

    Args:
        builder: gives memory and puts batches together; its sampler is not asked.
        operators: of the tasks.

    Source: ByteGNN (Zheng et al., VLDB 2022), section 4.
    """

    def __init__(self, builder: BatchBuilder, operators: Operators):
        self.builder, self.operators = builder, operators
        self.fetch = builder.features if operators.fetch is None else operators.fetch
        self.num_branches = 1 if operators.positives is None else 3
        self.size = RowSize()
        self.tasks = tuple(self._plan())

    def instance(self, dag_id: int, key: int, staged: StagedPart, items: np.ndarray) -> BatchGraph:
        """Return the physical task graph of one batch.

        Args:
            dag_id: number of the batch for the scheduler; earlier ones go first.
            key: uint64, see `rng.batch_key`.
            staged: the part.
            items: what the batch starts from, for example its seeds.
        """
        batch = _Preparation(self, staged, items, key)
        tasks = []
        for number, (kind, branch, hop, dependencies) in enumerate(self.tasks):
            run, cost = batch.actions(kind, branch, hop)
            tasks.append(Task(dag_id, number, kind, dependencies, run, cost))
        return BatchGraph(tasks, batch.result)

    def _plan(self) -> list[LogicalTask]:
        num_hops, branches = self.operators.neighborhood.num_hops, range(self.num_branches)
        tasks: list[LogicalTask] = []
        drawn: dict[tuple[int, int], int] = {}  # number of the task that drew the nodes of a hop and branch
        for hop in range(num_hops + 1):
            for branch in branches:
                before = [drawn[hop - 1, branch]] if hop else [drawn[0, 0]] if branch else []
                drawn[hop, branch] = len(tasks)
                tasks.append(LogicalTask("neighborhood" if hop else BRANCHES[branch], branch, hop, tuple(before)))
        last = [drawn[num_hops, branch] for branch in branches]
        end = [len(tasks)]
        tasks.append(LogicalTask("block", 0, num_hops, tuple(last)))
        if self.fetch is not None:
            for hop in range(num_hops + 1):
                for branch in branches:
                    known = [drawn[hop, other] for other in range(branch + 1)]
                    known += [drawn[hop - 1, other] for other in range(branch + 1, self.num_branches) if hop]
                    end.append(len(tasks))
                    tasks.append(LogicalTask("fetch", branch, hop, tuple(known)))
        tasks.append(LogicalTask("end", 0, num_hops, tuple(end)))
        return tasks


class _Preparation:
    """One batch while its tasks run; tasks of one branch and hop write what later ones read."""

    def __init__(self, workflow: Workflow, staged: StagedPart, items: np.ndarray, key: int):
        self._workflow, self._builder, self._operators = workflow, workflow.builder, workflow.operators
        self._staged, self._items, self._key = staged, items, key
        branches = range(workflow.num_branches)
        self._hoods: list = [None for _ in branches]
        self._spaces: list = [None for _ in branches]
        self._found: list[list[np.ndarray]] = [[] for _ in branches]  # store ids of each hop
        self._drawn: list[tuple] = [() for _ in branches]  # distinct local ids and the place of each draw in them
        self._rows = None
        if workflow.fetch is not None:
            self._rows = RowBuffer(workflow.fetch, self._builder.pool, workflow.size)
        self._batch: MiniBatch | None = None

    def actions(self, kind: str, branch: int, hop: int):
        """Return what runs a task, and what gives its cost."""
        if kind == "neighborhood":
            return lambda: self._sample(branch), lambda: self._hoods[branch].num_neighbors
        if kind == "fetch":
            dim = self._workflow.fetch.dim
            return lambda: self._fetch(branch, hop), lambda: len(self._found[branch][hop]) * dim
        if kind == "block":
            return self._block, lambda: sum(len(nodes) for found in self._found for nodes in found)
        if kind == "end":
            return self._end, lambda: 0
        return lambda: self._start(branch), lambda: len(self._items)

    def result(self) -> MiniBatch:
        return self._batch

    def _start(self, branch: int) -> None:
        """Draw the first nodes of a branch, and lend it a workspace."""
        operators, staged = self._operators, self._staged
        key = self._key if branch == 0 else _stream(self._key, branch)
        if branch == 0:
            nodes = np.asarray(operators.seeds.draw(staged, self._items, _stream(key, 0)))
            self._drawn[0] = (nodes, None)
        else:
            seeds, operator = self._drawn[0][0], operators.positives if branch == 1 else operators.negatives
            draws = operator.draw(staged, seeds, _stream(key, 0))
            nodes, place = np.unique(draws, return_inverse=True)
            self._drawn[branch] = (nodes, place.reshape(np.shape(draws)))
        self._spaces[branch] = space = self._builder.lend(staged.graph)
        self._hoods[branch] = operators.neighborhood.begin(staged, nodes, key, space, self._builder.with_arcs)
        self._keep(branch)

    def _sample(self, branch: int) -> None:
        self._hoods[branch].sample()
        self._keep(branch)

    def _keep(self, branch: int) -> None:
        """Keep the store ids of the newest nodes: the workspace is another batch's when they are fetched."""
        newest = self._hoods[branch].newest
        local = self._builder.pool.take(newest.shape, np.int64)
        local[:] = newest
        self._found[branch].append(self._builder.store_ids(self._staged.graph, local))

    def _fetch(self, branch: int, hop: int) -> None:
        found, total = self._found, None
        first = sum(len(nodes[h]) for nodes in found for h in range(hop))
        first += sum(len(nodes[hop]) for nodes in found[:branch])
        if all(len(nodes) == self._operators.neighborhood.num_hops + 1 for nodes in found):
            total = sum(len(nodes) for hops in found for nodes in hops)
        self._rows.gather(found[branch][hop], first, total)

    def _block(self) -> None:
        """Put the arcs of all branches together, and look up labels, masks and degrees."""
        subgraphs = []
        for hood, space in zip(self._hoods, self._spaces, strict=True):
            subgraphs.append(hood.collect(self._builder.pool.take))
            self._builder.give_back(space)
        self._hoods, self._spaces = [], []
        joined = join_branches(subgraphs, self._builder.pool.take)
        if len(subgraphs) > 1:
            joined = joined._replace(**self._links())
        self._batch = self._builder.assemble(self._staged, joined, self._key)

    def _links(self) -> dict[str, np.ndarray]:
        (seeds, _), (positives, positive), (_, negative) = self._drawn
        linked = positives[positive] != seeds
        places = np.stack([np.arange(len(seeds)), len(seeds) + positive])
        negatives = len(seeds) + len(positives) + negative
        return {"pairs": np.ascontiguousarray(places[:, linked]), "negatives": negatives[linked]}

    def _end(self) -> None:
        if self._rows is not None:
            self._rows.attach(self._batch)


def _stream(key: int, number: int) -> int:
    return int(combine_array(np.uint64(key), np.uint64(_FIRST_KEY + number)))
