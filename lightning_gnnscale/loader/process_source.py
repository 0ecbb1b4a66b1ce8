"""Batches prepared by worker processes of this host, handed over in shared memory."""

import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from textwrap import shorten

from ..errors import GNNScaleError, check_seconds, short
from ..events import clock, record
from ..sampler.minibatch import MiniBatch
from .batch_maker import BatchMaker, BatchOrder, batch_error
from .batch_segments import SegmentQueue
from .batch_source import BatchKey
from .batch_worker import START_METHODS, Failed, Made, NeedsSpace, WorkerProcess
from .local_source import THREAD_NAME
from .shared_value import SharedValue
from .staged_part import PartCache, StagedPart
from .work_queue import START_LIMIT_S, Attempt, Job

START_ATTEMPTS = 3
_LOOK_S = 0.5  # between readings of the clock


class WorkerCrew:
    """Threads that each lead one worker process: a thread asks, waits for the answer, and replaces the worker.

    They are separate from `ProcessSource`, so that an abandoned one can be collected and ends them.

    Args:
        stage: part id to `StagedPart`.
        maker: a `BatchMaker`.
        order: the maker's, which says what batches are sampled from.
        num_workers, queue_bytes, start_method, timeout_s: see `ProcessSource`.

    Attributes:
        queue: requested batches, and those prepared and not taken.
        changed: guards the queue, and signals each change.
    """

    def __init__(
        self,
        stage: Callable[[int], StagedPart],
        maker: SharedValue,
        order: BatchOrder,
        num_workers: int,
        queue_bytes: int,
        start_method: str,
        timeout_s: float,
    ):
        self.queue, self.changed = SegmentQueue(queue_bytes, timeout_s / 2), threading.Condition()
        self._timeout_s, self._maker, self._start_method, self._owner = timeout_s, maker, start_method, os.getpid()
        self._cache = PartCache(lambda part: SharedValue(stage(part), f"part {part}"), order.parts_open)
        self._order = order
        self._stager = ThreadPoolExecutor(1, thread_name_prefix=f"{THREAD_NAME}-part")
        self._workers: set[WorkerProcess] = set()
        self._num_workers = self._able = num_workers
        self._threads: list[threading.Thread] = []
        self._broken: str | None = None  # the reason why no batch can be prepared
        self._closing = False  # no job is started any more
        self._silent_s = 0.0
        self._begin()

    def request(self, key: BatchKey) -> None:
        """See `BatchSource`, as for `expect_part`."""
        if self._broken is not None:
            self._broken, self._able = None, self._num_workers
            self._begin()
        staged = self._cache.request(self._order.unit(key), self._stager)
        with self.changed:
            self.queue.add(self.queue.line, key, staged)
            self.changed.notify_all()

    def expect_part(self, part: int) -> None:
        self._cache.request(part, self._stager)

    def take(self) -> tuple[BatchKey, MiniBatch]:
        """Return the next batch; `BatchSource.ready`."""
        with self.changed:
            self._silent_s = 0.0
            while not self.queue.line.head.is_done:  # no variable holds it: an error's frames would keep the part
                if self._broken is not None:
                    raise GNNScaleError(self._broken)
                if self._able > 1:
                    self._second_try()
                self._wait_for_answer()
            job, memory = self.queue.take_batch()
            self.changed.notify_all()
        made = job.outcome()
        clock.add_beside(made.times)
        return job.key, made.open(memory)

    def forget(self) -> None:
        """Drop all jobs; the results of running ones are discarded."""
        with self.changed:
            self.queue.forget(self.queue.line)
            self.changed.notify_all()

    def pids(self) -> list[int]:
        """Return the process ids of the workers that run."""
        with self.changed:
            return [worker.pid for worker in self._workers]

    def stop(self) -> None:
        """End workers and threads, and wait for them; a thread of theirs that runs this does not wait."""
        if os.getpid() != self._owner:
            return
        self.forget()
        with self.changed:
            self._closing = True
            for worker in self._workers:
                worker.kill()
            self.changed.notify_all()
        inside = threading.current_thread().name.startswith(THREAD_NAME)
        self._stager.shutdown(wait=not inside, cancel_futures=True)
        for thread in self._threads:
            if not inside:
                thread.join()
        self._cache.clear()
        self._maker.close()
        self.queue.pool.close()

    def _begin(self) -> None:
        self._threads = [
            threading.Thread(target=self._lead, name=f"{THREAD_NAME}-process-{number}", daemon=True)
            for number in range(self._num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def _wait_for_answer(self) -> None:
        """Wait for a change; GNNScaleError: no worker has answered for too long.

        Loading a part here keeps the workers waiting, so it does not count; starts have a limit of their own: while a
        worker has yet to begin its job, nobody is late. Each wait counts with its planned length: a process that was
        stopped together with its workers, and resumes with them, has not waited for them.
        """
        begun = time.monotonic()
        self.changed.wait(_LOOK_S)
        if any(attempt.begun_s is None for attempt in self.queue.under_way()):
            self._silent_s = 0.0
            return
        self._silent_s += min(time.monotonic() - begun, _LOOK_S)
        fresh = any(worker.is_fresh for worker in self._workers)  # they load kernels first
        limit_s = max(START_LIMIT_S, self._timeout_s) if fresh else self._timeout_s
        if self._silent_s >= limit_s:
            raise GNNScaleError(
                f"none of the worker processes has answered for timeout_s={limit_s:g} s: were they stopped "
                "(`kill -CONT` lets them go on), or does their disk not answer? Raise source.timeout_s where a batch "
                "takes longer, or resume from the last checkpoint with source=threads"
            )

    def _second_try(self) -> None:
        """Have the job that is waited for prepared by a second worker too if it takes long."""
        for attempt in set(self.queue.line.head.attempts) & set(self.queue.late()) - self.queue.short:
            if self.queue.double(attempt):
                self.changed.notify_all()

    def _lead(self) -> None:
        """Have one worker after the other prepare batches, until the crew is stopped."""
        worker = None
        while (attempt := self._next()) is not None:
            job = attempt.jobs[0]
            try:
                part = job.context.result()
            except Exception as error:
                self._finish(attempt, batch_error(job.key, f"{type(error).__name__}: {error}"))
                continue
            if worker is not None and not worker.is_alive:
                self._dismiss(worker)
                worker = None
            if worker is None:
                worker = self._hire()
            if worker is None:
                with self.changed:
                    self.queue.put_back(attempt)
                    self.changed.notify_all()
                break
            with self.changed:
                self.queue.begin(attempt)
            try:
                self._finish(attempt, self._answer(worker, attempt, part))
            except (EOFError, OSError):
                self._bereave(attempt, worker)
                worker = None
            del attempt, job, part  # a part is freed when its last batch is made
        if worker is not None:
            worker.kill()
            self._dismiss(worker)

    def _next(self) -> Attempt | None:
        """Start a job, once there is one; None where the crew is stopped."""
        with self.changed:
            while not self._closing:
                attempt = self.queue.start_next()
                if attempt is not None:
                    return attempt
                self.changed.wait()
            return None

    def _finish(self, attempt: Attempt, result: Made | GNNScaleError) -> None:
        with self.changed:
            self._silent_s = 0.0
            self.queue.finish(attempt, result)
            self.changed.notify_all()

    def _answer(self, worker: WorkerProcess, attempt: Attempt, part: SharedValue) -> Made | GNNScaleError:
        """Return what a worker makes of an attempt; EOFError and OSError: it ended."""
        answer = worker.ask((attempt.jobs[0].key, part.handle, attempt.space and attempt.space.handle))
        self._silent_s = 0.0
        if isinstance(answer, NeedsSpace):
            try:
                self._find_space(attempt, answer.num_bytes)
            except GNNScaleError as found:
                worker.ask(None)
                return GNNScaleError(str(found))  # its traceback would keep frames, and the part with them
            answer = worker.ask(attempt.space and attempt.space.handle)
        return GNNScaleError(answer.message) if isinstance(answer, Failed) else answer

    def _find_space(self, attempt: Attempt, num_bytes: int) -> None:
        """Lend an attempt a segment, once there is space or nobody needs it any more.

        Raises:
            GNNScaleError: there cannot be any.
        """
        key, cap = attempt.jobs[0].key, self.queue.pool.max_bytes
        if num_bytes > cap:
            raise batch_error(
                key,
                f"the batch needs {num_bytes} bytes of shared memory, queue_bytes caps it at {cap}: "
                f"set queue_bytes={num_bytes} or more, or a smaller batch_size",
            )
        with self.changed:
            self.queue.short.add(attempt)
            self.queue.largest, asked_s = max(self.queue.largest, num_bytes), time.monotonic()
            try:
                while attempt.needed and not (self._closing or self.queue.lend(attempt, num_bytes)):
                    self.changed.wait()
            except OSError as error:
                raise batch_error(
                    key,
                    f"no space for {num_bytes} bytes in shared memory ({error}): lower queue_bytes={cap}, "
                    "num_workers or batch_size",
                ) from None
            finally:
                self.queue.short.discard(attempt)
                attempt.begun_s += time.monotonic() - asked_s
                self.changed.notify_all()

    def _hire(self) -> WorkerProcess | None:
        """Return a started worker, or None where none can start."""
        for _ in range(START_ATTEMPTS):
            worker = None
            try:
                worker = WorkerProcess(self._maker.handle, self._start_method)
                with self.changed:
                    self._workers.add(worker)
                    if self._closing:
                        worker.kill()
                worker.wait_started(max(START_LIMIT_S, self._timeout_s))
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
        self._give_up(reason)
        return None

    def _give_up(self, reason: str) -> None:
        """Go on with one worker less; with none left, the waiting thread raises."""
        with self.changed:
            if self._closing:
                return
            self._able -= 1
            if self._able == 0:
                self._broken = (
                    f"none of {self._num_workers} worker processes could be started ({shorten(reason, 200)}): prepare "
                    "batches by threads, or guard the script by if __name__ == '__main__'"
                )
            self.changed.notify_all()
        record("worker_missing", reason=reason, left=self._able)

    def _bereave(self, attempt: Attempt, worker: WorkerProcess) -> None:
        """Put back the job of a worker that ended."""
        key, pid, ended = attempt.jobs[0].key, worker.pid, self._dismiss(worker)

        def hopeless(job: Job) -> GNNScaleError:
            what = f"{job.ends} worker processes ended while they prepared it, the last with {ended}"
            return batch_error(job.key, f"{what}: memory may be short, lower num_workers or batch_size")

        if not self._closing:
            record("worker_ended", worker=pid, how=ended, part=key.part, batch=key.batch)
        with self.changed:
            self.queue.lose(attempt, hopeless)
            self.changed.notify_all()

    def _dismiss(self, worker: WorkerProcess) -> str:
        """Release an ending worker, and return how it ended."""
        with self.changed:
            self._workers.discard(worker)
        return worker.join()


QUEUE_BYTES = 1 << 30
TIMEOUT_S = 300.0


class ProcessSource:
    """A `BatchSource` of worker processes, started at the first request and kept until `close`.

    No process has a copy of the graph: each worker maps what lies in files. A thread of this process loads a part once,
    into memory that all workers map; at most `maker.order.parts_open` are there at a time. A batch is written once,
    into shared memory without a name, and its tensors stay there. A process that is killed, this one included, leaves
    nothing behind. If a worker ends, another one prepares its batch, and a new worker is started in its place. A batch
    that takes several times as long as any before is given to a second worker as well; the first to finish counts.

    Args:
        stage: Maps a part id to its `StagedPart`, which must be picklable.
        maker: Makes the batches; must be picklable.
        num_workers: Number of worker processes, >= 1.
        queue_bytes: Upper bound on the bytes of batches that are prepared and not yet taken, > 0. Preparation stops
            when it is reached; a later batch makes space for an earlier one. In addition each worker holds what it
            samples of one batch, and keeps up to four segments mapped, some of which may have been released already.
        start_method: "forkserver" or "spawn".
        timeout_s: How long all workers may stay silent while one is waited for, seconds, > 0. The time that this
            process takes to load a part does not count.

    Raises:
        ValueError: an argument is out of range.

    Cost: a start of a worker takes tens of milliseconds after the first one, and loads its compiled kernels; a batch,
        two messages and a copy of all but its dense features, which are gathered in place.
    """

    def __init__(
        self,
        stage: Callable[[int], StagedPart],
        maker: BatchMaker,
        num_workers: int = 1,
        queue_bytes: int = QUEUE_BYTES,
        start_method: str = "forkserver",
        timeout_s: float = TIMEOUT_S,
    ):
        if num_workers < 1:
            raise ValueError(f"num_workers must be >= 1, got {num_workers}")
        if queue_bytes < 1:
            raise ValueError(f"queue_bytes must be >= 1, got {queue_bytes}")
        if start_method not in START_METHODS:
            raise ValueError(f"start_method must be one of {', '.join(START_METHODS)}, got {short(start_method)}")
        check_seconds("timeout_s", timeout_s)
        self._stage, self._maker = stage, maker
        self._options = (num_workers, queue_bytes, start_method, timeout_s)
        self._crew: WorkerCrew | None = None
        self._end: Callable[[], None] | None = None

    def begin(self) -> None:
        """Do nothing: the first request starts the processes."""

    def request(self, key: BatchKey) -> None:
        """Let the next free worker prepare a batch; starts them where none runs.

        Raises:
            GNNScaleError: the maker cannot be sent to a worker.
        """
        if self._crew is None:
            maker = SharedValue(self._maker, "what prepares batches")
            self._crew = WorkerCrew(self._stage, maker, self._maker.order, *self._options)
            self._end = weakref.finalize(self, self._crew.stop)
        self._crew.request(key)

    def ready(self) -> tuple[BatchKey, MiniBatch]:
        """Return the next batch; see `BatchSource`.

        Raises:
            GNNScaleError: also where no worker could be started, or none has answered for timeout_s.
        """
        if self._crew is None:
            raise ValueError("no batch is requested: call request(key) before ready()")
        return self._crew.take()

    def expect_part(self, part: int) -> None:
        """Load a part in the thread that does so, unless it is there."""
        if self._crew is not None:
            self._crew.expect_part(part)

    def forget(self) -> None:
        """Drop what was requested and not taken; the workers stay."""
        if self._crew is not None:
            self._crew.forget()

    def close(self) -> None:
        """End the workers; batches that were taken stay as they are. A request starts again."""
        if self._crew is not None:
            self._end()
            self._crew = None

    @property
    def queue_bytes(self) -> int:
        """Bytes of shared memory held for batches now, those that were taken left out."""
        return 0 if self._crew is None else self._crew.queue.pool.held_bytes

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [] if self._crew is None else self._crew.pids()
