"""Measured times of the tasks of batches, which a replay reads."""

import json
import os
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning_gnnscale.loader import TaskSource
from lightning_gnnscale.loader.batch_graph import BatchGraph, Task


class TaskTime(NamedTuple):
    """One task that ran.

    Attributes:
        kind: What the task did.
        dependencies: Indices of the tasks before it.
        cost: Cost as given to the scheduler.
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


class TracedSource(TaskSource):
    """A `TaskSource` whose tasks' times are recorded.

    Args:
        trace: Takes the times.
        task_clock: Gives seconds. On a machine that does other work too, `time.thread_time` leaves that out.
        given, options: Of `TaskSource`.
    """

    def __init__(self, *given, trace: TaskTrace, task_clock: Callable[[], float], **options):
        super().__init__(*given, **options)
        self.scheduler.make = traced(self.scheduler.make, trace, task_clock)


def traced(
    make: Callable[[int, Any], BatchGraph], trace: TaskTrace, task_clock: Callable[[], float]
) -> Callable[[int, Any], BatchGraph]:
    """Return a maker of the same task graphs whose times go to a trace; a remote task counts only sending its request.

    Args:
        make, task_clock: See `Scheduler` and `TracedSource`.
        trace: Takes the times of each batch when it is finished.
    """

    def timed(dag_id: int, key: Hashable) -> BatchGraph:
        started = task_clock()
        graph = make(dag_id, key)
        times = BatchTimes(task_clock() - started, [None] * len(graph.tasks), 0, 0)
        tasks = [
            Task(
                dag_id, each.number, each.kind, each.dependencies, partial(run, each, times), each.cost, each.is_remote
            )
            for each in graph.tasks
        ]
        return BatchGraph(tasks, partial(result, graph, times), graph.num_bytes)

    def run(task: Task, times: BatchTimes) -> Any:
        cost, started = task.cost(), task_clock()
        reply = task.run()
        times.tasks[task.number] = TaskTime(task.kind, task.dependencies, cost, task_clock() - started)
        return reply

    def result(graph: BatchGraph, times: BatchTimes) -> Any:
        batch = graph.result()
        times.num_seeds, times.num_bytes = _num_seeds(batch), graph.num_bytes()
        trace.batches.append(times)
        return batch

    return timed


def _num_seeds(batch: Any) -> int:
    """Seeds of a batch; with links only those for which a link is trained, not their other ends."""
    pairs = getattr(batch, "pairs", None)
    return getattr(batch, "batch_size", 1) if pairs is None else pairs.shape[1]
