"""Batches prepared by worker processes of this host, handed over in shared memory."""

import weakref
from collections.abc import Callable

from ..errors import check_seconds
from ..sampler.minibatch import MiniBatch
from .batch_builder import BatchMaker
from .batch_source import BatchKey
from .batch_worker import START_METHODS
from .shared_value import SharedValue
from .staged_part import StagedPart
from .worker_crew import WorkerCrew

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
