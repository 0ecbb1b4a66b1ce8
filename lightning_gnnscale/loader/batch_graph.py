"""The tasks of one batch, as a scheduler sees them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..sampler.minibatch import MiniBatch, RowsByNodeType, SparseFeatures


class LogicalTask(NamedTuple):
    """One task of every batch.

    Attributes:
        kind: What the task does. "seeds", "positives", "negatives": samples the first nodes of a branch, or the ends of
            links, which "join" puts into one branch. "ask": requests the neighbours of one hop and branch that others
            sample. "neighborhood": samples the rest here, in chunks where "relabel" follows, which numbers the nodes
            they found. "sample": runs a sampler that has no operator. "block": writes the edges of all branches.
            "nodes": writes their labels, masks and degrees. "fetch": gathers the rows of one hop and branch. "end":
            finishes the batch.
        branch: 0 seeds, 1 positives, 2 negatives.
        hop: Hop number; 0 stands for the first nodes.
        chunk: Which chunk of the hop: of the rows that "fetch" gathers, or of the neighbours that "neighborhood"
        samples.
        dependencies: Indices of earlier tasks.
    """

    kind: str
    branch: int
    hop: int
    chunk: int
    dependencies: tuple[int, ...]


class Task:
    """One chunk of a batch's preparation.

    Args:
        dag_id: Number of the batch that the task belongs to.
        number: The task's index among the batch's tasks.
        kind: What the task does, for example "neighborhood" or "fetch".
        dependencies: Indices of the tasks that must be done before it.
        run: Does the task; called once. A remote task's `run` sends a request. If it returns a
            `concurrent.futures.Future`, the task is done when the future is, and threads do other work meanwhile.
        cost: Returns what the task will cost, in the units of its `kind`; called when all dependencies are done.
        is_remote: Whether others do the work. Remote tasks begin before all others.
    """

    __slots__ = ("cost", "dag_id", "dependencies", "is_remote", "kind", "number", "run")

    def __init__(
        self,
        dag_id: int,
        number: int,
        kind: str,
        dependencies: Sequence[int],
        run: Callable[[], Any],
        cost: Callable[[], float],
        is_remote: bool = False,
    ):
        self.dag_id, self.number, self.kind, self.is_remote = dag_id, number, kind, is_remote
        self.dependencies, self.run, self.cost = tuple(dependencies), run, cost


class BatchGraph:
    """A physical task graph: the tasks of one batch, each after those it depends on.

    Args:
        tasks: in an order in which they may run one after the other.
        result: gives the batch when all of them ran.
        num_bytes: gives the bytes of the batch; None: those of its tensors.

    Raises:
        ValueError: there is no task, or one depends on itself or a later one.
    """

    def __init__(self, tasks: Sequence[Task], result: Callable[[], Any], num_bytes: Callable[[], int] | None = None):
        if not tasks:
            raise ValueError("a task graph must have at least one task, got none")
        for number, task in enumerate(tasks):
            if task.number != number or not all(0 <= other < number for other in task.dependencies):
                raise ValueError(
                    f"task {number} ({task.kind}) must depend on tasks before it, got number {task.number} and "
                    f"dependencies {list(task.dependencies)}"
                )
        self.tasks, self.result = list(tasks), result
        self.num_bytes = num_bytes or (lambda: batch_bytes(result()))


def batch_bytes(batch: MiniBatch) -> int:
    """Return the bytes of a batch's tensors."""
    values = list(vars(batch).values())
    values += [part for value in values if isinstance(value, RowsByNodeType) for part in value.tables]
    values += [part for value in values if isinstance(value, SparseFeatures) for part in value]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
