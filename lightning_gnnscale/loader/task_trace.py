"""Measured times of preparation and training: what a scheduler records, and what a replay reads."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple


class TaskTime(NamedTuple):
    """One task that ran.

    Attributes:
        kind: what it did.
        dependencies: numbers of the tasks before it.
        cost: as it was told to the scheduler.
        seconds: that it took.
    """

    kind: str
    dependencies: tuple[int, ...]
    cost: float
    seconds: float


@dataclass
class BatchTimes:
    """One batch that was prepared.

    Attributes:
        launch_s: seconds in which its task graph was made.
        tasks: in the order of the graph.
        num_seeds, num_bytes: of the batch.
    """

    launch_s: float
    tasks: list[TaskTime]
    num_seeds: int
    num_bytes: int


@dataclass
class TaskTrace:
    """Measured times, in the order in which batches were finished.

    Attributes:
        batches: that were prepared.
        train_s: seconds of the trainer between one batch and its asking for the next.
        overhead_s: that scheduling cost for each task, in the interpreter; 0: not known.
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
