"""Requested batches in their order, and the shared memory that finished ones lie in until they are taken."""

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any

from ..errors import GNNScaleError
from .batch_builder import batch_error
from .batch_segments import Segment, SegmentPool
from .batch_source import BatchKey

SLOW_S = 5.0  # at least so long is a batch waited for before another worker tries it too
SLOW_TIMES = 4  # and so many times the longest preparation so far
START_LIMIT_S = 60.0  # at least: imports and the first batch's kernels take their time
_LOOK_S = 0.5  # between looks at the clock


class State(Enum):
    """Of a job; a finished one whose memory an earlier batch needs waits once more."""

    WAITING, RUNNING, DONE = range(3)


@dataclass(eq=False)
class QueuedBatch:
    """One requested batch.

    Attributes:
        staged: future of its part, a `SharedValue`; None once nobody waits for it.
        segment: where the batch is written, or lies.
        made: what tells its tensors in the segment.
        error: why there is none.
        ends: workers that ended over it.
        short_of_room: it is made, and waits for a segment.
        dropped: nobody waits for it.
        begun_s: when a worker began to prepare it, 0 before.
        twin: the same batch, given to a second worker because the first is slow.
    """

    key: BatchKey
    staged: Future | None
    state: State = State.WAITING
    segment: Segment | None = None
    made: Any = None
    error: GNNScaleError | None = None
    ends: int = 0
    short_of_room: bool = False
    dropped: bool = False
    begun_s: float = 0.0
    twin: "QueuedBatch | None" = None


class BatchQueue:
    """What one thread requests and takes, and several threads prepare.

    Args:
        max_bytes: most bytes of segments that belong to batches which are not taken.
        timeout_s: seconds for which no worker may answer while one is waited for, > 0.

    Attributes:
        broken: why no batch will ever be prepared, or None.
        closing: no job is given out any more.
        starting: workers that are about to start: nobody is late until they have.
        fresh: workers that have not made a batch yet, and load kernels first: `START_LIMIT_S` is allowed at least.
    """

    def __init__(self, max_bytes: int, timeout_s: float):
        self.pool, self._timeout_s = SegmentPool(max_bytes), timeout_s
        self.changed = threading.Condition()
        self.broken: str | None = None
        self.closing, self.starting, self.fresh = False, 0, 0
        self.order: deque[QueuedBatch] = deque()  # requested and not taken
        self.largest = 0  # bytes of a batch so far
        self._longest_s = self._silent_s = 0.0

    def add(self, key: BatchKey, staged: Future) -> None:
        """Append a batch."""
        with self.changed:
            self.order.append(QueuedBatch(key, staged))
            self.changed.notify_all()

    def take(self, helpers: bool) -> tuple[QueuedBatch, memoryview]:
        """Return the first job once it is done, and its memory.

        Args:
            helpers: whether a second worker can try what is slow.

        Raises:
            GNNScaleError: of the batch, or of the queue.
            ValueError: nothing is requested.
        """
        with self.changed:
            if not self.order:
                raise ValueError("no batch is requested: call request(key) before ready()")
            self._silent_s = 0.0
            while self.order[0].state is not State.DONE:
                if self.broken is not None:
                    raise GNNScaleError(self.broken)
                left = self._second_try() if helpers else None
                self._wait_for_answer(_LOOK_S if left is None else min(left, _LOOK_S))
            job = self.order.popleft()
            job.staged = job.twin = None
            self.changed.notify_all()
            if job.error is not None:
                raise job.error
            return job, self.pool.hand_out(job.segment)

    def heard(self) -> None:
        """Note a sign of life of a worker."""
        self._silent_s = 0.0

    def next(self) -> tuple[QueuedBatch, Future] | None:
        """Return a job to prepare and the future of its part, once there is one; None where the queue is closed."""
        with self.changed:
            while not self.closing:
                job = self._startable()
                if job is not None:
                    job.state, job.begun_s = State.RUNNING, 0.0
                    return job, job.staged
                self.changed.wait()
            return None

    def begin(self, job: QueuedBatch) -> None:
        """Note that a worker prepares a job from now on."""
        with self.changed:
            job.begun_s = time.monotonic()
            self.changed.notify_all()  # whoever waits for it looks at the clock

    def finish(self, job: QueuedBatch, made: Any = None, error: GNNScaleError | None = None) -> None:
        """Note the result of a job."""
        with self.changed:
            # A new error: that one's traceback would keep the frames of the thread, and the part with them.
            job.state, job.made, job.error = State.DONE, made, error and GNNScaleError(str(error))
            self.heard()
            if made is not None and job.twin is None and not job.dropped:  # what is slow is no measure of what is
                self._longest_s = max(self._longest_s, time.monotonic() - job.begun_s)
            if job.twin in self.order and job.twin.state is not State.DONE and made is not None:
                self.order[self.order.index(job.twin)] = job  # it was the faster one after all
                job.dropped = False
                self._drop(job.twin)
                job.twin = None
            if error is not None:
                self._release(job)
            if job.dropped:
                self._drop(job)
            self.changed.notify_all()

    def put_back(self, job: QueuedBatch) -> None:
        """Let another worker prepare a job."""
        with self.changed:
            self._release(job)
            job.state = State.WAITING
            if job.dropped:
                self._drop(job)
            self.changed.notify_all()

    def find_room(self, job: QueuedBatch, num_bytes: int) -> Segment | None:
        """Return a segment once there is room; the latest batches make room for the first. None: the job is dropped.

        Raises:
            GNNScaleError: there will be none.
        """
        if num_bytes > self.pool.max_bytes:
            raise batch_error(
                job.key,
                f"the batch needs {num_bytes} bytes of shared memory, queue_bytes caps it at {self.pool.max_bytes}: "
                f"set queue_bytes={num_bytes} or more, or a smaller batch_size",
            )
        with self.changed:
            self._release(job)
            job.short_of_room, self.largest = True, max(self.largest, num_bytes)
            asked_s = time.monotonic()
            try:
                while job.segment is None and not (job.dropped or self.closing):
                    job.segment = self.pool.lend(num_bytes)
                    if job.segment is None and not (job is self.order[0] and self._make_room()):
                        self.changed.wait()
            except OSError as error:
                raise batch_error(
                    job.key,
                    f"no room for {num_bytes} bytes in shared memory ({error}): lower queue_bytes="
                    f"{self.pool.max_bytes}, num_workers or batch_size",
                ) from None
            finally:
                job.short_of_room, job.begun_s = False, job.begun_s + time.monotonic() - asked_s
                self.changed.notify_all()
            return job.segment

    def forget(self) -> None:
        """Drop all jobs; those that run are done for nothing."""
        with self.changed:
            for job in self.order:
                self._drop(job)
            self.order.clear()
            self.changed.notify_all()

    def _startable(self) -> QueuedBatch | None:
        """Return the first job that waits, with a segment that fits it by all that is known, if there is room.

        Until a size is known jobs start without one: they are given room when they are made.
        """
        if not self.order or self.order[0].short_of_room:
            return None
        waiting = next((job for job in self.order if job.state is State.WAITING), None)
        if waiting is None or not self.largest:
            return waiting
        try:
            waiting.segment = self.pool.lend(self.largest)
        except OSError:
            waiting.segment = None
        return waiting if waiting.segment is not None or waiting is self.order[0] else None

    def _wait_for_answer(self, look_s: float) -> None:
        """Wait for a change; GNNScaleError: no worker has answered for too long.

        A part that is loaded here keeps the workers waiting, not the other way round; starts have a limit of their own.
        A look counts for what it should take: a process that was stopped together with its workers, and goes on with
        them, has not waited for them.
        """
        staged, begun = self.order[0].staged, time.monotonic()
        self.changed.wait(look_s)
        if self.starting or (staged is not None and not staged.done()):
            self._silent_s = 0.0
            return
        self._silent_s += min(time.monotonic() - begun, look_s)
        limit_s = max(START_LIMIT_S, self._timeout_s) if self.fresh else self._timeout_s
        if self._silent_s >= limit_s:
            raise GNNScaleError(
                f"none of the worker processes has answered for timeout_s={limit_s:g} s: were they stopped "
                "(`kill -CONT` lets them go on), or does their disk not answer? Raise source.timeout_s where a batch "
                "takes longer, or resume from the last checkpoint with source=threads"
            )

    def _second_try(self) -> float | None:
        """Have the first job prepared by a second worker too if it takes long; return seconds until it may be asked."""
        job = self.order[0]
        if job.state is not State.RUNNING or not job.begun_s or job.short_of_room or job.twin is not None:
            return None
        patience_s = min(max(SLOW_S, SLOW_TIMES * self._longest_s), self._timeout_s / 2)
        left = job.begun_s + patience_s - time.monotonic()
        if left > 0:
            return left
        job.twin = QueuedBatch(job.key, job.staged)
        job.twin.twin = job
        job.dropped, self.order[0] = True, job.twin
        self.changed.notify_all()
        return None

    def _make_room(self) -> bool:
        """Let the last finished batch be prepared again, later; whether there was one behind the first."""
        for job in reversed(list(islice(self.order, 1, None))):
            if job.state is State.DONE and job.segment is not None:
                self._release(job)
                job.state, job.made = State.WAITING, None
                return True
        return False

    def _drop(self, job: QueuedBatch) -> None:
        job.dropped, job.staged, job.twin = True, None, None
        if job.state is State.DONE:
            self._release(job)

    def _release(self, job: QueuedBatch) -> None:
        self.pool.give_back(job.segment)
        job.segment = None
