"""The threads that lead the worker processes of a `ProcessSource`: who prepares what, and where it finds room."""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum

from ..errors import GNNScaleError
from ..events import record
from ..sampler.minibatch import MiniBatch
from .batch_maker import batch_error
from .batch_segments import Segment, SegmentPool
from .batch_source import BatchKey
from .batch_worker import Failed, Made, NeedsRoom, WorkerProcess
from .local_source import THREAD_NAME
from .shared_value import SharedValue, unpack
from .staged_part import PartShelf, StagedPart

START_ATTEMPTS = 3
MOST_ENDS = 5  # workers that may end over one batch


class _State(Enum):
    WAITING, RUNNING, DONE = range(3)


@dataclass(eq=False)
class _Job:
    """One requested batch."""

    key: BatchKey
    staged: Future | None
    state: _State = _State.WAITING
    segment: Segment | None = None
    made: Made | None = None
    error: GNNScaleError | None = None
    ends: int = 0
    short_of_room: bool = False
    dropped: bool = False


class WorkerCrew:
    """Threads that each lead one worker process: a thread asks, waits for the answer, and starts a new worker.

    They are no part of `ProcessSource`, so that one that is forgotten can be collected, and ends them.

    Args:
        stage: part id to `StagedPart`.
        maker: a `BatchMaker`.
        num_workers, queue_bytes, start_method: see `ProcessSource`.

    Attributes:
        pool: the memory of batches.
    """

    def __init__(
        self,
        stage: Callable[[int], StagedPart],
        maker: SharedValue,
        num_workers: int,
        queue_bytes: int,
        start_method: str,
    ):
        self._maker, self._start_method, self._owner = maker, start_method, os.getpid()
        self._shelf = PartShelf(lambda part: SharedValue(stage(part), f"part {part}"))
        self._stager = ThreadPoolExecutor(1, thread_name_prefix=f"{THREAD_NAME}-part")
        self.pool = SegmentPool(queue_bytes)
        self._changed = threading.Condition()
        self._order: deque[_Job] = deque()  # requested and not taken
        self._workers: set[WorkerProcess] = set()
        self._largest = 0  # bytes of a batch so far
        self._closing = False
        self._num_workers = self._able = num_workers
        self._reason = ""
        self._threads: list[threading.Thread] = []
        self._begin()

    def request(self, key: BatchKey) -> None:
        """See `BatchSource`, as for `expect_part` and `forget`."""
        job = _Job(key, self._shelf.request(key.part, self._stager))
        with self._changed:
            if self._able == 0:
                self._able = self._num_workers
                self._begin()
            self._order.append(job)
            self._changed.notify_all()

    def expect_part(self, part: int) -> None:
        self._shelf.request(part, self._stager)

    def take(self) -> tuple[BatchKey, MiniBatch]:
        """Return the next batch; `BatchSource.ready`."""
        with self._changed:
            if not self._order:
                raise ValueError("no batch is requested: call request(key) before ready()")
            job = self._order[0]
            while job.state is not _State.DONE:
                if self._able == 0:
                    raise GNNScaleError(
                        f"none of {self._num_workers} worker processes could be started ({self._reason}): prepare "
                        "batches by threads, or guard the script by if __name__ == '__main__'"
                    )
                self._changed.wait()
            self._order.popleft()
            job.staged = None
            self._changed.notify_all()
            if job.error is not None:
                raise job.error
            memory = self.pool.hand_out(job.segment)
        return job.key, unpack(job.made.meta, job.made.spans, memory)

    def forget(self) -> None:
        with self._changed:
            for job in self._order:
                job.dropped = True
                job.staged = None
                if job.state is _State.DONE:
                    self._release(job)
            self._order.clear()
            self._changed.notify_all()

    def pids(self) -> list[int]:
        """Return the process ids of the workers that run."""
        with self._changed:
            return [worker.pid for worker in self._workers]

    def stop(self) -> None:
        """End workers and threads, and wait for them; a thread of theirs that runs this does not wait."""
        if os.getpid() != self._owner:
            return
        self.forget()
        with self._changed:
            self._closing = True
            for worker in self._workers:
                worker.kill()
            self._changed.notify_all()
        inside = threading.current_thread().name.startswith(THREAD_NAME)
        self._stager.shutdown(wait=not inside, cancel_futures=True)
        for thread in self._threads:
            if not inside:
                thread.join()
        self._shelf.clear()
        self._maker.close()
        self.pool.close()

    def _begin(self) -> None:
        self._threads = [
            threading.Thread(target=self._lead, name=f"{THREAD_NAME}-process-{number}", daemon=True)
            for number in range(self._num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def _lead(self) -> None:
        """Have one worker after the other prepare batches, until the crew is stopped."""
        worker = None
        while (coming := self._next_job()) is not None:
            job, staged = coming
            try:
                part = staged.result()
            except Exception as error:
                self._finish(job, error=batch_error(job.key, f"{type(error).__name__}: {error}"))
                continue
            if worker is not None and not worker.is_alive:
                self._dismiss(worker)
                worker = None
            worker = worker or self._hire()
            if worker is None:
                self._put_back(job)
                break
            try:
                self._prepare(worker, job, part)
            except (EOFError, OSError):
                self._bereave(job, worker)
                worker = None
            del coming, job, staged, part  # a part goes when its last batch is made
        if worker is not None:
            worker.kill()
            self._dismiss(worker)

    def _next_job(self) -> tuple[_Job, Future] | None:
        with self._changed:
            while not self._closing:
                job = self._startable()
                if job is not None:
                    job.state = _State.RUNNING
                    return job, job.staged
                self._changed.wait()
            return None

    def _startable(self) -> _Job | None:
        """Return the first job that waits, with a segment that fits it by all that is known, if there is room.

        The first of all starts without one: it is given room when it is made.
        """
        if not self._order or self._order[0].short_of_room:
            return None
        waiting = next((job for job in self._order if job.state is _State.WAITING), None)
        if waiting is None or not self._largest:
            return waiting
        try:
            waiting.segment = self.pool.lend(self._largest)
        except OSError:
            waiting.segment = None
        return waiting if waiting.segment is not None or waiting is self._order[0] else None

    def _prepare(self, worker: WorkerProcess, job: _Job, part: SharedValue) -> None:
        answer = worker.ask((job.key, part.ticket, job.segment and job.segment.ticket))
        if isinstance(answer, NeedsRoom):
            try:
                segment = self._find_room(job, answer.num_bytes)
            except GNNScaleError as error:
                self._finish(job, error=error)
                segment = None
            answer = worker.ask(segment and segment.ticket)
            if segment is None:
                self._finish(job, error=job.error)
                return
        if isinstance(answer, Failed):
            self._finish(job, error=GNNScaleError(answer.message))
        else:
            self._finish(job, made=answer)

    def _find_room(self, job: _Job, num_bytes: int) -> Segment | None:
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
        with self._changed:
            self.pool.give_back(job.segment)
            job.segment, job.short_of_room = None, True
            self._largest = max(self._largest, num_bytes)
            try:
                while job.segment is None and not (job.dropped or self._closing):
                    job.segment = self.pool.lend(num_bytes)
                    if job.segment is None and not (job is self._order[0] and self._make_room()):
                        self._changed.wait()
            except OSError as error:
                raise batch_error(
                    job.key,
                    f"no room for {num_bytes} bytes in shared memory ({error}): lower queue_bytes="
                    f"{self.pool.max_bytes}, num_workers or batch_size",
                ) from None
            finally:
                job.short_of_room = False
                self._changed.notify_all()
            return job.segment

    def _make_room(self) -> bool:
        """Prepare the last finished batch again, later; whether there was one behind the first."""
        for job in reversed(self._order):
            if job.state is _State.DONE and job is not self._order[0] and job.segment is not None:
                self._release(job)
                job.state, job.made = _State.WAITING, None
                return True
        return False

    def _finish(self, job: _Job, made: Made | None = None, error: GNNScaleError | None = None) -> None:
        with self._changed:
            # A new error: that one's traceback would keep the frames of the thread, and the part with them.
            job.state, job.made, job.error = _State.DONE, made, error and GNNScaleError(str(error))
            if made is not None:
                self._largest = max(self._largest, made.spans[-1][1] if made.spans else 0)
            if error is not None or job.dropped:
                self._release(job)
            self._changed.notify_all()

    def _release(self, job: _Job) -> None:
        self.pool.give_back(job.segment)
        job.segment = None

    def _put_back(self, job: _Job) -> None:
        with self._changed:
            self._release(job)
            job.state = _State.WAITING
            self._changed.notify_all()

    def _hire(self) -> WorkerProcess | None:
        """Return a worker that has started, None where there is none to be had."""
        for _ in range(START_ATTEMPTS):
            worker = None
            try:
                worker = WorkerProcess(self._maker.ticket, self._start_method)
                with self._changed:
                    self._workers.add(worker)
                    if self._closing:
                        worker.kill()
                worker.wait_started()
                return worker
            except GNNScaleError as error:
                reason, final = str(error), True
            except Exception as error:
                reason, final = f"{type(error).__name__}: {error}", False
            if worker is not None:
                ended = self._dismiss(worker)
                reason = reason if final else f"it ended with {ended} while it started"
            if final or self._closing:
                break
        with self._changed:
            self._able, self._reason = self._able - 1, reason
            self._changed.notify_all()
        if not self._closing:
            record("worker_missing", reason=reason, left=self._able)
        return None

    def _bereave(self, job: _Job, worker: WorkerProcess) -> None:
        """Put back the job of a worker that ended."""
        pid, ended = worker.pid, self._dismiss(worker)
        job.ends += 1
        if self._closing:
            return
        record("worker_ended", worker=pid, how=ended, part=job.key.part, batch=job.key.batch)
        if job.ends < MOST_ENDS:
            self._put_back(job)
            return
        what = f"{job.ends} worker processes ended while they prepared it, the last with {ended}"
        self._finish(job, error=batch_error(job.key, f"{what}: memory may be short, lower num_workers or batch_size"))

    def _dismiss(self, worker: WorkerProcess) -> str:
        """Let go of a worker that ends, and return how it ended."""
        with self._changed:
            self._workers.discard(worker)
        return worker.join()
