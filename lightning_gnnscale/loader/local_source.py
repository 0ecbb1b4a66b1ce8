"""Batches prepared by threads of this process."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ..sampler.minibatch import MiniBatch
from .batch_builder import BatchMaker
from .batch_graph import batch_bytes
from .batch_source import BatchKey
from .staged_part import PartShelf, StagedPart

THREAD_NAME = "gnnscale-batch"


class LocalSource:
    """A `BatchSource` of threads, each of which prepares a whole batch; one more thread loads parts.

    Compiled kernels release the interpreter lock. Threads run from the first request to `forget`. At most
    `maker.parts_open` parts are in memory.

    Args:
        stage: Maps a part id to its `StagedPart`.
        maker: Makes the batches.
        num_threads: Number of threads that prepare batches; 0: each batch is prepared in `ready`.
    """

    def __init__(self, stage: Callable[[int], StagedPart], maker: BatchMaker, num_threads: int = 1):
        self.maker, self.num_threads = maker, num_threads
        self._shelf = PartShelf(stage, maker.parts_open)
        self._pending: deque[tuple[BatchKey, Future | None]] = deque()
        self._workers = self._stager = None

    def begin(self) -> None:
        """Do nothing: the first request starts the threads."""

    def request(self, key: BatchKey) -> None:
        """Let the next free thread prepare a batch."""
        future = None
        if self.num_threads:
            self._start()
            staged = self._shelf.request(key.part, self._stager)
            future = self._workers.submit(self.maker.make, key, staged.result)
        self._pending.append((key, future))

    def ready(self) -> tuple[BatchKey, MiniBatch]:
        """Return the next batch; see `BatchSource`."""
        if not self._pending:
            raise ValueError("no batch is requested: call request(key) before ready()")
        key, future = self._pending.popleft()
        if future is None:
            return key, self.maker.make(key, self._shelf.request(key.part, None).result)
        return key, future.result()

    def expect_part(self, part: int) -> None:
        """Load a part in the thread that does so, unless it is there."""
        if self._stager is not None:
            self._shelf.request(part, self._stager)

    @property
    def queue_bytes(self) -> int:
        """Bytes of batches that are ready now."""
        made = [future for _, future in self._pending if future is not None and future.done()]
        return sum(batch_bytes(future.result()) for future in made if future.exception() is None)

    def forget(self) -> None:
        """End the threads; parts stay."""
        self._pending.clear()
        workers, stager, self._workers, self._stager = self._workers, self._stager, None, None
        if workers is not None:
            stop(workers, stager)

    def close(self) -> None:
        """End the threads and let go of the parts."""
        self.forget()
        self._shelf.clear()

    def _start(self) -> None:
        if self._workers is None:
            self._workers = ThreadPoolExecutor(self.num_threads, thread_name_prefix=THREAD_NAME)
            self._stager = ThreadPoolExecutor(1, thread_name_prefix=f"{THREAD_NAME}-part")


def stop(*executors: ThreadPoolExecutor) -> None:
    """End the threads and wait for them; a thread of theirs that runs this (garbage collection) does not."""
    inside = threading.current_thread().name.startswith(THREAD_NAME)
    for executor in executors:
        executor.shutdown(wait=not inside, cancel_futures=True)
