"""Batch preparation as a graph of small tasks: the logical one is made once, a physical one for each batch."""

import numpy as np

from ..sampler.link_sampler import LinkSampler
from ..sampler.neighbor import NeighborSampler
from ..sampler.protocol import BatchSampler
from .batch_graph import BatchGraph, LogicalTask, Task
from .batch_maker import BatchMaker
from .batch_tasks import BatchTasks, RowSize
from .operators import FanoutNeighborhood, Operators
from .staged_part import StagedPart

BRANCHES = ("seeds", "positives", "negatives")


def operators_of(sampler: BatchSampler) -> Operators | None:
    """Return the operators that give a sampler's samples, bit for bit, or None where there are none."""
    if not (sampler.sampler or sampler).hop_by_hop:
        return None
    if isinstance(sampler, NeighborSampler) or sampler.asks:
        return Operators(FanoutNeighborhood(sampler))
    inner = sampler.sampler
    if isinstance(sampler, LinkSampler) and isinstance(inner, NeighborSampler) and sampler.neighborhoods:
        return None if inner.by_edge_type else Operators(FanoutNeighborhood(inner), links=sampler)
    return None


class Workflow:
    """The logical task graph of all batches.

    Supervised: seeds, their neighbourhood hop by hop, its rows. With `operators.links` the ends of links are sampled
    side by side first, and their distinct nodes are the seeds. Without operators the maker's sampler samples a batch
    in one task. All three give the batches of `BatchMaker.make`, bit for bit.

    With positives and negatives, three branches are joined at the end, as in the source: a batch has the distinct nodes
    of each branch as seeds, [seeds | positives | negatives], and each branch's neighbourhood beside the others': a node
    that two branches found appears twice. `pairs` and `negatives` name the links among the seeds; a seed without a
    positive has itself.

    A hop's rows are fetched as soon as the hop is sampled in every branch up to its own: its place in the batch is
    known then, and nothing is copied when branches are joined.

    Args:
        maker: Gives memory and puts batches together; without operators it samples them itself.
        operators: Operators that the tasks run; None: the maker's sampler makes a batch in one task.
        chunks: Number of tasks that share a large hop, >= 1: the neighbours of all hops but the first of several, and
            the rows of the last. That many threads can work on one batch.

    Source: ByteGNN (Zheng et al., VLDB 2022), section 4. Differs: there a hop is sampled and fetched in one task each.
    """

    def __init__(self, maker: BatchMaker, operators: Operators | None, chunks: int = 1):
        self.maker, self.operators, self.chunks = maker, operators, chunks
        self.fetch = None
        if maker.gathers:
            own = None if operators is None else operators.fetch
            self.fetch = maker.features if own is None else own
        self.num_branches = 1 if operators is None or operators.positives is None else 3
        self.num_hops = 0 if operators is None else operators.neighborhood.num_hops
        self.asks = operators is not None and getattr(operators.neighborhood, "asks", False)
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
        batch = BatchTasks(self, staged, items, key)
        tasks = []
        for number, logical in enumerate(self.tasks):
            run, cost = batch.actions(logical)
            away = logical.kind == "ask" or (logical.kind == "fetch" and "async" in self.fetch.supports)
            tasks.append(Task(dag_id, number, logical.kind, logical.dependencies, run, cost, away))
        return BatchGraph(tasks, batch.result)

    def _plan(self) -> list[LogicalTask]:
        if self.operators is None:
            tasks = [LogicalTask("sample", 0, 0, 0, ())]
            sampled, end = {(0, 0): 0}, [0]
        else:
            tasks, sampled = self._first_nodes()
            for hop in range(1, self.num_hops + 1):
                for branch in range(self.num_branches):
                    tasks += self._hop(hop, branch, sampled[hop - 1, branch], len(tasks))
                    sampled[hop, branch] = len(tasks) - 1
            last = tuple(sampled[self.num_hops, branch] for branch in range(self.num_branches))
            end = [len(tasks), len(tasks) + 1]
            tasks += [LogicalTask(kind, 0, self.num_hops, 0, last) for kind in ("block", "nodes")]
        if self.fetch is not None:
            fetches = list(self._fetches(sampled))
            end += range(len(tasks), len(tasks) + len(fetches))
            tasks += fetches
        tasks.append(LogicalTask("end", 0, self.num_hops, 0, tuple(end)))
        return tasks

    def _hop(self, hop: int, branch: int, before: int, number: int) -> list[LogicalTask]:
        """Return the tasks that sample a hop of a branch, the first of which has this number."""
        chunks = range(self.sample_chunks(hop))
        tasks = [LogicalTask("ask", branch, hop, 0, (before,))] if self.asks else []
        tasks += [LogicalTask("neighborhood", branch, hop, chunk, (before,)) for chunk in chunks]
        if len(tasks) > 1:
            tasks.append(LogicalTask("relabel", branch, hop, 0, tuple(range(number, number + len(tasks)))))
        return tasks

    def _first_nodes(self) -> tuple[list[LogicalTask], dict[tuple[int, int], int]]:
        """Return the first tasks, and the number of the task that has the first nodes of (hop 0, branch)."""
        if self.operators.links is not None:
            tasks = [LogicalTask(kind, i, 0, 0, (0,) * (i > 0)) for i, kind in enumerate(BRANCHES)]
            return [*tasks, LogicalTask("join", 0, 0, 0, (1, 2))], {(0, 0): 3}
        kinds = BRANCHES[: self.num_branches]
        tasks = [LogicalTask(kind, branch, 0, 0, (0,) * (branch > 0)) for branch, kind in enumerate(kinds)]
        return tasks, {(0, branch): branch for branch in range(self.num_branches)}

    def _fetches(self, sampled: dict[tuple[int, int], int]):
        for hop in range(self.num_hops + 1):
            for branch in range(self.num_branches):
                known = [sampled[hop, other] for other in range(branch + 1)]
                known += [sampled[hop - 1, other] for other in range(branch + 1, self.num_branches) if hop]
                for chunk in range(self.fetch_chunks(hop)):
                    yield LogicalTask("fetch", branch, hop, chunk, tuple(known))

    def fetch_chunks(self, hop: int) -> int:
        """Return how many tasks fetch the rows of a hop: the last one has most of them."""
        return self.chunks if hop == self.num_hops else 1

    def sample_chunks(self, hop: int) -> int:
        """Return how many tasks sample the neighbours of a hop: the first of several has few of them."""
        shared = hop > 1 or hop == self.num_hops
        return self.chunks if shared and getattr(self.operators.neighborhood, "in_chunks", False) else 1
