"""The tasks of one batch, as a scheduler sees them, and their measured times, which a replay reads."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..sampler.minibatch import MiniBatch, RowsByKind, SparseFeatures


class TaskTime(NamedTuple):
    """One task that ran.

    Attributes:
        kind: What the task did.
        dependencies: Indices of the tasks before it.
        cost: Cost that the scheduler was told.
        seconds: Time that the task took, seconds.
    """

    kind: str
    dependencies: tuple[int, ...]
    cost: float
    seconds: float


@dataclass
class BatchTimes:
    """Times of one batch that was prepared.

    Attributes:
        launch_s: Time in which its task graph was made, seconds.
        tasks: Times of its tasks, in the order of the graph.
        num_seeds, num_bytes: Number of seeds in the batch, and its size in bytes.
    """

    launch_s: float
    tasks: list[TaskTime]
    num_seeds: int
    num_bytes: int


@dataclass
class TaskTrace:
    """Measured times, in the order in which batches were finished.

    Attributes:
        batches: Times of the batches that were prepared.
        train_s: Times between the trainer's getting a batch and asking for the next, seconds.
        overhead_s: Cost of scheduling per task, seconds in the interpreter; 0: unknown.
    """

    batches: list[BatchTimes] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    overhead_s: float = 0.0

    def save(self, path: str | os.PathLike) -> None:
        """Write the trace as JSON."""
        Path(path).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "TaskTrace":
        """Read what `save` wrote."""
        read = json.loads(Path(path).read_text())
        batches = []
        for batch in read["batches"]:
            tasks = [TaskTime(kind, tuple(before), cost, seconds) for kind, before, cost, seconds in batch["tasks"]]
            batches.append(BatchTimes(batch["launch_s"], tasks, batch["num_seeds"], batch["num_bytes"]))
        return cls(batches, read["train_s"], read["overhead_s"])


class Task:
    """One piece of a batch's preparation.

    Args:
        dag_id: Number of the batch that the task belongs to.
        number: The task's index among the batch's tasks.
        kind: What the task does, for example "neighborhood" or "fetch".
        dependencies: Indices of the tasks that must be done before it.
        run: Does the task; called once. A remote task's `run` sends a request. If it returns a
            `concurrent.futures.Future`, the task is done when the future is, and threads do other work meanwhile.
        cost: Returns what the task will cost, in the units of its kind; called when all dependencies are done.
        is_remote: Whether others do the work. Such a task begins before all tasks that are not remote.
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
    """A physical task graph: the tasks of one batch, each behind those it depends on.

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
    values += [part for value in values if isinstance(value, RowsByKind) for part in value.tables]
    values += [part for value in values if isinstance(value, SparseFeatures) for part in value]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
