"""The threads that lead the worker processes of a `ProcessSource`: who asks, who is started, who has ended."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from textwrap import shorten

from ..errors import GNNScaleError
from ..events import record
from ..sampler.minibatch import MiniBatch
from .batch_builder import batch_error
from .batch_queue import START_LIMIT_S, BatchQueue, QueuedBatch
from .batch_source import BatchKey
from .batch_worker import Failed, NeedsRoom, WorkerProcess
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
