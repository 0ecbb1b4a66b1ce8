"""Batches prepared by threads of this process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..sampler.minibatch import MiniBatch
from ..system import yield_cores
from .batch_graph import batch_bytes
from .batch_maker import BatchMaker
from .batch_source import BatchKey
from .staged_part import PartCache, StagedPart
from .work_queue import Line, WorkQueue

THREAD_NAME = "gnnscale-batch"


class LocalSource:
    """A `BatchSource` of threads, each of which prepares a whole batch; another thread loads parts.

    Compiled kernels release the interpreter lock. Threads run from the first request to `forget`. At most
    `maker.order.parts_open` parts are in memory.

    Args:
        stage: Maps a part id to its `StagedPart`.
        maker: Makes the batches.
        num_threads: Number of threads that prepare batches; 0: each batch is prepared in `ready`.
    """

    def __init__(self, stage: Callable[[int], StagedPart], maker: BatchMaker, num_threads: int = 1):
        self.maker, self.num_threads = maker, num_threads
        self._cache = PartCache(stage, maker.order.parts_open)
        self._queue, self._line, self._changed = WorkQueue(), Line(), threading.Condition()
        self._workers = self._stager = None

    def begin(self) -> None:
        """Do nothing: the first request starts the threads."""

    def request(self, key: BatchKey) -> None:
        """Let the next free thread prepare a batch."""
        staged = None
        if self.num_threads:
            self._start()
            staged = self._cache.request(self.maker.order.unit(key), self._stager)
        with self._changed:
            self._queue.add(self._line, key, staged)
        if self.num_threads:
            self._workers.submit(self._prepare)

    def ready(self) -> tuple[BatchKey, MiniBatch]:
        """Return the next batch; see `BatchSource`."""
        job = self._line.head
        if not self.num_threads:
            self._prepare()
        with self._changed:
            self._changed.wait_for(lambda: job.is_done)
            self._queue.take(self._line)
        return job.key, job.outcome()

    def expect_part(self, part: int) -> None:
        """Load a part in the loading thread, unless it is loaded."""
        if self._stager is not None:
            self._cache.request(part, self._stager)

    @property
    def queue_bytes(self) -> int:
        """Bytes of batches that are ready now."""
        with self._changed:
            made = [job.result for job in self._line.order if job.is_done]
        return sum(batch_bytes(batch) for batch in made if not isinstance(batch, Exception))

    def forget(self) -> None:
        """End the threads; parts stay."""
        with self._changed:
            self._queue.forget(self._line)
        workers, stager, self._workers, self._stager = self._workers, self._stager, None, None
        if workers is not None:
            stop(workers, stager)

    def close(self) -> None:
        """End the threads and release the parts."""
        self.forget()
        self._cache.clear()

    def _start(self) -> None:
        if self._workers is None:
            self._workers = ThreadPoolExecutor(self.num_threads, THREAD_NAME, yield_cores)
            self._stager = ThreadPoolExecutor(1, f"{THREAD_NAME}-part", yield_cores)

    def _prepare(self) -> None:
        """Make the pending batch that is wanted first."""
        with self._changed:
            if not self._queue.pending:  # it was forgotten meanwhile
                return
            attempt = self._queue.start(self._queue.pending[:1])
        job = attempt.jobs[0]
        try:
            staged = job.context or self._cache.request(self.maker.order.unit(job.key), None)
            result = self.maker.make(job.key, staged.result)
        except Exception as error:
            result = error
        with self._changed:
            self._queue.finish(attempt, result)
            self._changed.notify_all()
        del result  # an error holds this frame, so it would hold itself


def stop(*executors: ThreadPoolExecutor) -> None:
    """End the threads and wait for them; one of them that runs this (garbage collection) does not wait."""
    inside = threading.current_thread().name.startswith(THREAD_NAME)
    for executor in executors:
        executor.shutdown(wait=not inside, cancel_futures=True)
