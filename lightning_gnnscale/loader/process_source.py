"""Batches prepared by worker processes of this host, handed over in shared memory."""

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from textwrap import shorten

from ..errors import GNNScaleError, check_seconds
from ..events import record
from ..sampler.minibatch import MiniBatch
from .batch_builder import BatchMaker, batch_error
from .batch_queue import START_LIMIT_S, BatchQueue, QueuedBatch
from .batch_source import BatchKey
from .batch_worker import START_METHODS, Failed, NeedsRoom, WorkerProcess
from .local_source import THREAD_NAME
from .shared_value import SharedValue
from .staged_part import PartShelf, StagedPart

START_ATTEMPTS = 3
MOST_ENDS = 5  # workers that may end over one batch


class WorkerCrew:
    """Threads that each lead one worker process: a thread asks, waits for the answer, and starts a new worker.

    They are no part of `ProcessSource`, so that one that is forgotten can be collected, and ends them.

    Args:
        stage: part id to `StagedPart`.
        maker: a `BatchMaker`.
        parts_open: parts that are in memory at a time.
        num_workers, queue_bytes, start_method, timeout_s: see `ProcessSource`.

    Attributes:
        queue: what is requested.
    """

    def __init__(
        self,
        stage: Callable[[int], StagedPart],
        maker: SharedValue,
        parts_open: int,
        num_workers: int,
        queue_bytes: int,
        start_method: str,
        timeout_s: float,
    ):
        self.queue, self._timeout_s = BatchQueue(queue_bytes, timeout_s), timeout_s
        self._maker, self._start_method, self._owner = maker, start_method, os.getpid()
        self._shelf = PartShelf(lambda part: SharedValue(stage(part), f"part {part}"), parts_open)
        self._stager = ThreadPoolExecutor(1, thread_name_prefix=f"{THREAD_NAME}-part")
        self._workers: set[WorkerProcess] = set()
        self._num_workers = self._able = num_workers
        self._threads: list[threading.Thread] = []
        self._begin()

    def request(self, key: BatchKey) -> None:
        """See `BatchSource`, as for `expect_part`."""
        if self.queue.broken is not None:
            self.queue.broken, self._able = None, self._num_workers
            self._begin()
        self.queue.add(key, self._shelf.request(key.part, self._stager))

    def expect_part(self, part: int) -> None:
        self._shelf.request(part, self._stager)

    def take(self) -> tuple[BatchKey, MiniBatch]:
        """Return the next batch; `BatchSource.ready`."""
        job, memory = self.queue.take(helpers=self._able > 1)
        return job.key, job.made.open(memory)

    def pids(self) -> list[int]:
        """Return the process ids of the workers that run."""
        with self.queue.changed:
            return [worker.pid for worker in self._workers]

    def stop(self) -> None:
        """End workers and threads, and wait for them; a thread of theirs that runs this does not wait."""
        if os.getpid() != self._owner:
            return
        self.queue.forget()
        with self.queue.changed:
            self.queue.closing = True
            for worker in self._workers:
                worker.kill()
            self.queue.changed.notify_all()
        inside = threading.current_thread().name.startswith(THREAD_NAME)
        self._stager.shutdown(wait=not inside, cancel_futures=True)
        for thread in self._threads:
            if not inside:
                thread.join()
        self._shelf.clear()
        self._maker.close()
        self.queue.pool.close()

    def _begin(self) -> None:
        self._threads = [
            threading.Thread(target=self._lead, name=f"{THREAD_NAME}-process-{number}", daemon=True)
            for number in range(self._num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def _lead(self) -> None:
        """Have one worker after the other prepare batches, until the crew is stopped."""
        worker, fresh = None, False
        while (coming := self.queue.next()) is not None:
            job, staged = coming
            try:
                part = staged.result()
            except Exception as error:
                self.queue.finish(job, error=batch_error(job.key, f"{type(error).__name__}: {error}"))
                continue
            if worker is not None and not worker.is_alive:
                self._dismiss(worker)
                worker = None
            if worker is None:
                worker = self._hire()
                fresh = worker is not None and self._count_fresh(True)
            if worker is None:
                self.queue.put_back(job)
                break
            self.queue.begin(job)
            try:
                self._prepare(worker, job, part)
            except (EOFError, OSError):
                self._bereave(job, worker)
                worker = None
            if fresh:
                fresh = self._count_fresh(False)
            del coming, job, staged, part  # a part goes when its last batch is made
        if worker is not None:
            worker.kill()
            self._dismiss(worker)

    def _count_fresh(self, fresh: bool) -> bool:
        with self.queue.changed:
            self.queue.fresh += 1 if fresh else -1
        return fresh

    def _prepare(self, worker: WorkerProcess, job: QueuedBatch, part: SharedValue) -> None:
        """Have a worker prepare a job; EOFError and OSError: it ended."""
        answer = worker.ask((job.key, part.ticket, job.segment and job.segment.ticket))
        self.queue.heard()
        if isinstance(answer, NeedsRoom):
            error = segment = None
            try:
                segment = self.queue.find_room(job, answer.num_bytes)
            except GNNScaleError as found:
                error = GNNScaleError(str(found))  # without the frames of this thread
            answer = worker.ask(segment and segment.ticket)
            if segment is None:
                self.queue.finish(job, error=error)
                return
        if isinstance(answer, Failed):
            self.queue.finish(job, error=GNNScaleError(answer.message))
        else:
            self.queue.finish(job, made=answer)

    def _hire(self) -> WorkerProcess | None:
        """Return a worker that has started, None where there is none to be had."""
        with self.queue.changed:
            self.queue.starting += 1
        try:
            return self._start()
        finally:
            with self.queue.changed:
                self.queue.starting -= 1
                self.queue.heard()

    def _start(self) -> WorkerProcess | None:
        for _ in range(START_ATTEMPTS):
            worker = None
            try:
                worker = WorkerProcess(self._maker.ticket, self._start_method)
                with self.queue.changed:
                    self._workers.add(worker)
                    if self.queue.closing:
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
            if final or self.queue.closing:
                break
        self._give_up(reason)
        return None

    def _give_up(self, reason: str) -> None:
        """Go on with one worker less; with none left, say so to whoever waits."""
        with self.queue.changed:
            if self.queue.closing:
                return
            self._able -= 1
            if self._able == 0:
                self.queue.broken = (
                    f"none of {self._num_workers} worker processes could be started ({shorten(reason, 200)}): prepare "
                    "batches by threads, or guard the script by if __name__ == '__main__'"
                )
            self.queue.changed.notify_all()
        record("worker_missing", reason=reason, left=self._able)

    def _bereave(self, job: QueuedBatch, worker: WorkerProcess) -> None:
        """Put back the job of a worker that ended."""
        pid, ended = worker.pid, self._dismiss(worker)
        job.ends += 1
        if not self.queue.closing:
            record("worker_ended", worker=pid, how=ended, part=job.key.part, batch=job.key.batch)
        if job.ends < MOST_ENDS or self.queue.closing:
            self.queue.put_back(job)
            return
        what = f"{job.ends} worker processes ended while they prepared it, the last with {ended}"
        message = f"{what}: memory may be short, lower num_workers or batch_size"
        self.queue.finish(job, error=batch_error(job.key, message))

    def _dismiss(self, worker: WorkerProcess) -> str:
        """Let go of a worker that ends, and return how it ended."""
        with self.queue.changed:
            self._workers.discard(worker)
        return worker.join()


QUEUE_BYTES = 1 << 30
TIMEOUT_S = 300.0


class ProcessSource:
    """A `BatchSource` of worker processes, started at the first request and kept until `close`.

    No process has a copy of the graph: each worker maps what lies in files. A thread of this process loads a part once,
    into memory that all workers map; at most `maker.parts_open` parts are there at a time. A batch is written once,
    into shared memory without a name, and its tensors lie there. A process that is killed, this one included, leaves
    nothing behind. If a worker ends, another one prepares its batch, and a new worker is started in its place. A batch
    that takes several times as long as any before is given to a second worker as well; the first to finish counts.

    Args:
        stage: Maps a part id to its `StagedPart`, which must be picklable.
        maker: Makes the batches; must be picklable.
        num_workers: Number of worker processes, >= 1.
        queue_bytes: Upper bound on the bytes of batches that are prepared and not yet taken, > 0. Preparation stops
            when it is reached; a later batch makes room for an earlier one. In addition each worker holds what it draws
            of one batch, and keeps up to four segments mapped, some of which may have been released already.
        start_method: "forkserver" or "spawn".
        timeout_s: How long all workers may stay silent while one is waited for, seconds, > 0. The time that this
            process takes to load a part does not count.

    Raises:
        ValueError: an argument is out of range.

    Cost: a start of a worker takes tens of milliseconds after the first one, and loads its compiled kernels; a batch,
        two messages and a copy of all but its dense features, which are gathered where they are to lie.
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
            raise ValueError(f"start_method must be one of {', '.join(START_METHODS)}, got {start_method!r}")
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
            self._crew = WorkerCrew(self._stage, maker, self._maker.parts_open, *self._options)
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
            self._crew.queue.forget()

    def close(self) -> None:
        """End the workers; batches that were taken stay as they are. A request starts anew."""
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
