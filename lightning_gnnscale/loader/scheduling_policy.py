"""Which task a free thread does next: decisions alone, without threads or a clock.

The threads of `task_source` are driven by them, and the simulated ones of the benchmarks' replay.
"""

import heapq
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from .batch_graph import BatchGraph, Task
from .work_queue import Attempt, Job, Line, WorkQueue

_NEWEST = 1 / 16  # least weight of the newest value in a running mean


class RunningMean:
    """A mean over all values so far, and from the sixteenth on one that forgets old ones."""

    def __init__(self):
        self.value: float | None = None
        self._num = 0

    def add(self, value: float) -> None:
        self._num += 1
        weight = max(1 / self._num, _NEWEST)
        self.value = value if self.value is None else self.value + weight * (value - self.value)


def launch_score(
    gap_s: float, sample_s: float | None, train_s: float | None, queue_size: int, busy_percent: float
) -> float:
    """Return the score for launching another batch: T_gap * f(C_util) * balance.

    T_gap is in training steps, so that the score has no unit; f(C) = 101 - e^(C / c), c = 100 / ln 101, falls from 100
    for idle cores to 0 for busy ones; balance = sample_s / (train_s * queue_size). A batch that takes many steps is
    launched while many wait: with idle cores and one launch a step the score is sigma where
    100 / sigma * sample_s / train_s of them do.

    Args:
        gap_s: seconds since the last launch.
        sample_s: average seconds from a batch's launch to its end, None: none has ended.
        train_s: average seconds of a training step, None: none has ended.
        queue_size: finished batches that wait for the trainer.
        busy_percent: use of the cores, in [0, 100].

    Returns:
        >= 0; infinite where the queue is empty, or training takes no time.

    Source: ByteGNN (Zheng et al., VLDB 2022), Algorithm 1, which gives T_gap no unit.
    """
    if queue_size == 0 or sample_s is None or not train_s:
        return math.inf
    idle = max(101 - math.exp(busy_percent * math.log(101) / 100), 0.0)
    return gap_s / train_s * idle * sample_s / (train_s * queue_size)


POLL_S = 0.005


class Run(NamedTuple):
    """Run a task of a batch."""

    dag_id: int
    task: Task


class Launch(NamedTuple):
    """Make the task graph of a key, and call `launched`."""

    dag_id: int
    key: Hashable


class Wait(NamedTuple):
    """Ask again after so many seconds, or (None) when something happened."""

    seconds: float | None


@dataclass
class _UnderWay:
    """A batch between its launch and its last task; without a graph until that is made."""

    attempt: Attempt
    launched_s: float
    graph: BatchGraph | None = None
    missing: list[int] = field(default_factory=list)  # unfinished dependencies of each task
    dependents: list[list[int]] = field(default_factory=list)
    left: int = 0


class Policy:
    """State that every policy keeps: a queue of batches, tasks of those under way, bytes and average times.

    Batches are launched in the order of their requests; the place of a request is its batch's `dag_id`. An attempt's
    space are the bytes of its finished batch.

    Attributes:
        num_threads: Number of threads that ask for work.
        queue, line: Requests, and finished batches that wait for the trainer.
        sample_s, train_s: Running means, in seconds, of a batch's time from launch to end and of a training step.
        held_bytes: Bytes of all finished batches that wait for the trainer.
        peak_bytes: Largest `held_bytes` since the policy was made.
        launchable: Whether a key's task graph can be made now; None: always.
        overlaps_replies: Whether threads do other work while a remote task is on its way.
    """

    overlaps_replies = True

    def __init__(self, num_threads: int):
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads
        self.sample_s, self.train_s, self.peak_bytes = RunningMean(), RunningMean(), 0
        self.launchable: Callable[[Hashable], bool] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget requests and batches; averages remain."""
        self.queue, self.line = WorkQueue(give_back=self._give_back), Line()
        self._under_way: dict[int, _UnderWay] = {}
        self._working: set[int] = set()
        self._last_launch_s = -math.inf
        self._step_begun_s: float | None = None  # or of the trainer's delay before its first step
        self.held_bytes = 0

    @property
    def queue_size(self) -> int:
        """Number of finished batches that the trainer can take: those before the first unfinished one."""
        return sum(1 for _ in takewhile(lambda job: job.is_done, self.line.order))

    @property
    def num_under_way(self) -> int:
        """Batches that are launched and not finished."""
        return len(self._under_way)

    @property
    def busy_percent(self) -> float:
        """Share of the threads that work, in percent."""
        return 100 * len(self._working) / self.num_threads

    def request(self, key: Hashable) -> int:
        """Record a wanted batch and return its dag_id."""
        return self.queue.add(self.line, key).place

    def step(self, thread: int, now: float) -> Run | Launch | Wait:
        """Return the next work of a thread that has finished its last.

        Args:
            thread: number of the thread, in [0, num_threads).
            now: seconds on any clock.
        """
        self._working.discard(thread)
        action = self._choose(thread, now)
        if not isinstance(action, Wait):
            self._working.add(thread)
        return action

    def launched(self, thread: int, dag_id: int, graph: BatchGraph) -> None:
        """Take the graph of a `Launch`."""
        batch = self._under_way[dag_id]
        batch.graph, batch.left, batch.dependents = graph, len(graph.tasks), [[] for _ in graph.tasks]
        for number, task in enumerate(graph.tasks):
            for other in task.dependencies:
                batch.dependents[other].append(number)
        batch.missing = [len(task.dependencies) for task in graph.tasks]
        for number, count in enumerate(batch.missing):
            if count == 0:
                self._ready(thread, dag_id, number)

    def done(self, thread: int, dag_id: int, task: Task, now: float) -> int | None:
        """Record that a task ran; return how many became ready, or None where the batch is finished."""
        batch = self._under_way.get(dag_id)
        if batch is None:  # another of its tasks failed
            return 0
        batch.left -= 1
        if batch.left == 0:
            result, num_bytes = batch.graph.result(), batch.graph.num_bytes()
            self.sample_s.add(now - batch.launched_s)
            self._step_begun_s = now if self._step_begun_s is None else self._step_begun_s
            self._finish(dag_id, num_bytes, result)
            return None
        count = 0
        for number in batch.dependents[task.number]:
            batch.missing[number] -= 1
            if batch.missing[number] == 0:
                self._ready(thread, dag_id, number)
                count += 1
        return count

    def failed(self, dag_id: int, error: Exception | None = None) -> bool:
        """Drop a batch whose launch or task raised; it stays in the queue, without bytes, until it is taken.

        Return whether it was under way: another of its tasks may have failed before.
        """
        if dag_id not in self._under_way:
            return False
        self._finish(dag_id, 0, error)
        return True

    def taken(self, dag_id: int, now: float) -> Job:
        """Record that the trainer has a batch and begins a step; return its job."""
        self._step_begun_s = now
        return self.queue.take(self.line)

    def trained(self, seconds: float) -> None:
        """Record the duration of a training step."""
        self.train_s.add(seconds)

    def _finish(self, dag_id: int, num_bytes: int, result: Any) -> None:
        attempt = self._under_way.pop(dag_id).attempt
        attempt.space = num_bytes
        self.queue.finish(attempt, result)
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _wanted(self) -> bool:
        """Return whether a batch is requested whose task graph can be made."""
        pending = self.queue.pending
        return bool(pending) and (self.launchable is None or self.launchable(pending[0].key))

    def _give_back(self, attempt: Attempt) -> None:
        self.held_bytes -= attempt.space

    def _launch(self, now: float) -> Launch:
        self._last_launch_s = now
        job = self.queue.pending[0]
        self._under_way[job.place] = _UnderWay(self.queue.start([job]), now)
        return Launch(job.place, job.key)

    def _choose(self, thread: int, now: float) -> Run | Launch | Wait:
        raise NotImplementedError

    def _ready(self, thread: int, dag_id: int, number: int) -> None:
        raise NotImplementedError


class TwoLevelPolicy(Policy):
    """ByteGNN's: remote tasks first, then those of older batches, then cheaper ones; batches by the score.

    A thread without a ready task takes the coarse step: it launches the next requested batch where `launch_score` is
    at least sigma and the batch would fit under the cap, else it asks again 5 ms later, or when something happened.

    Args:
        num_threads: threads that ask for work, >= 1.
        sigma: threshold, >= 0. While cores are idle, and a batch is launched a training step, 100 / sigma times as many
            batches wait as a batch takes steps from its launch to its end, where requests and the cap allow. In replays
            on 2 to 16 cores, with preparation half, 1.2 and 4 times as fast as training, 50 waits no longer than 0 does
            and holds 0.4 to 1 times its memory; 100 waits longer on 4 cores.
        queue_bytes: cap on the bytes of finished batches and of those under way, each of which counts as much as the
            largest one so far (a larger one may exceed the cap by the difference). One batch always fits; the first one
            is prepared alone. None: no cap.
        utilisation: gives the use of the cores in percent; None: the share of working threads, which has no
            delay and ignores other programs.

    Source: ByteGNN (Zheng et al., VLDB 2022), section 5, Algorithm 1.
    """

    def __init__(
        self,
        num_threads: int,
        sigma: float = 50.0,
        queue_bytes: int | None = None,
        utilisation: Callable[[], float] | None = None,
    ):
        if not sigma >= 0:
            raise ValueError(f"sigma must be >= 0, got {sigma}")
        if queue_bytes is not None and queue_bytes < 1:
            raise ValueError(f"queue_bytes must be at least 1, or None for no cap, got {queue_bytes}")
        self.sigma, self.queue_bytes, self.utilisation = sigma, queue_bytes, utilisation
        self.largest_bytes = 0
        super().__init__(num_threads)

    def clear(self) -> None:
        super().clear()
        self._heap: list[tuple[bool, int, float, int]] = []

    def _choose(self, thread: int, now: float) -> Run | Launch | Wait:
        while self._heap:
            _, dag_id, _, number = heapq.heappop(self._heap)
            if dag_id in self._under_way:  # has not failed meanwhile
                return Run(dag_id, self._under_way[dag_id].graph.tasks[number])
        if not self._wanted() or not self._fits():
            return Wait(None)
        busy = self.busy_percent if self.utilisation is None else self.utilisation()
        gap = now - self._last_launch_s
        train_s = self.train_s.value
        if train_s is None and self._step_begun_s is not None:
            train_s = now - self._step_begun_s  # the first step, as long as it has taken so far
        score = launch_score(gap, self.sample_s.value, train_s, self.queue_size, busy)
        return self._launch(now) if score >= self.sigma else Wait(POLL_S)

    def _fits(self) -> bool:
        if not self.queue.attempts or self.queue_bytes is None:
            return True
        if self.largest_bytes == 0:  # the first batch gives the size of the others
            return False
        return self.held_bytes + (self.num_under_way + 1) * self.largest_bytes <= self.queue_bytes

    def _finish(self, dag_id: int, num_bytes: int, result: Any) -> None:
        super()._finish(dag_id, num_bytes, result)
        self.largest_bytes = max(self.largest_bytes, num_bytes)

    def _ready(self, thread: int, dag_id: int, number: int) -> None:
        task = self._under_way[dag_id].graph.tasks[number]
        heapq.heappush(self._heap, (not task.is_remote, dag_id, task.cost(), number))
