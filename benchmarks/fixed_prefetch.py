"""The baseline of two-level scheduling: threads that prepare whole batches, a fixed number of them ahead."""

import heapq
from dataclasses import dataclass

from lightning_gnnscale.loader import TaskGraphs
from lightning_gnnscale.loader.scheduling_policy import Launch, Policy, Run, Wait


class FixedPrefetchPolicy(Policy):
    """The baseline: a thread prepares a whole batch; at most `depth` batches are under way or wait for the trainer.

    The thread waits for replies to its remote tasks.

    Args:
        num_threads: threads that ask for work, >= 1.
        depth: batches, >= 1.
    """

    overlaps_replies = False

    def __init__(self, num_threads: int, depth: int):
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.depth = depth
        super().__init__(num_threads)

    def clear(self) -> None:
        super().clear()
        self._own: dict[int, tuple[int, list[int]]] = {}

    def _choose(self, thread: int, now: float) -> Run | Launch | Wait:
        dag_id, ready = self._own.get(thread, (-1, []))
        if ready and dag_id in self._under_way:
            return Run(dag_id, self._under_way[dag_id].graph.tasks[heapq.heappop(ready)])
        if len(self.queue.attempts) < self.depth and self._wanted():
            return self._launch(now)
        return Wait(None)

    def _ready(self, thread: int, dag_id: int, number: int) -> None:
        if self._own.get(thread, (-1, []))[0] != dag_id:
            self._own[thread] = (dag_id, [])
        heapq.heappush(self._own[thread][1], number)


@dataclass(frozen=True)
class FixedPrefetch(TaskGraphs):
    """The tasks of `TaskGraphs`, each batch's in one thread; sigma and queue_bytes are not its settings.

    Args:
        depth: batches that are ready or under way, >= 1; None: num_threads.
        chunks: 1, since threads share nothing, unless times of tasks are recorded.
    """

    chunks: int | None = 1
    depth: int | None = None

    @property
    def batches_ahead(self) -> int:
        """Batches requested ahead of their use; one of them is the trainer's."""
        return self.prefetch_batches or (self.depth or self.num_threads) + 1

    def policy(self) -> Policy:
        """Return a fresh policy."""
        return FixedPrefetchPolicy(self.num_threads, self.num_threads if self.depth is None else self.depth)
