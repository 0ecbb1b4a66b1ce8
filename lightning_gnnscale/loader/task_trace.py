"""Measured times of preparation and training: what a scheduler records, and what a replay reads."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple


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
