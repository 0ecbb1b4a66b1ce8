"""Batches prepared task by task by threads of this process."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ..rng import batch_key
from ..sampler.minibatch import MiniBatch
from .batch_builder import BatchMaker
from .batch_graph import BatchGraph
from .batch_source import BatchKey
from .local_source import THREAD_NAME, stop
from .scheduler import Scheduler
from .scheduling_policy import Policy
from .staged_part import PartShelf, StagedPart
from .task_graph import Operators, Workflow, operators_of
from .task_trace import TaskTrace


class TaskSource:
    """A `BatchSource` of threads that share the tasks of batches, in the order that a policy decides.

    Neighbour samplers, and link samplers around them, are drawn hop by hop while rows of earlier hops are gathered;
    other samplers draw a batch in one task. One more thread loads parts; a batch whose part is still being loaded
    blocks no thread. Threads run from the first request to `forget`.

    Args:
        stage: Maps a part id to its `StagedPart`.
        maker: Makes the batches.
        policy: Makes the policy, which this source alone uses.
        operators: A user's own operators; None: those that draw what the maker's sampler draws.
        pieces: Number of tasks that share a large hop, >= 1; see `Workflow`.
        trace, task_clock: See `Scheduler`.

    Attributes:
        scheduler: Decides and runs the tasks; knows the bytes held and how long `ready` waited.
    """

    def __init__(
        self,
        stage: Callable[[int], StagedPart],
        maker: BatchMaker,
        policy: Callable[[], Policy],
        operators: Operators | None = None,
        pieces: int = 1,
        trace: TaskTrace | None = None,
        task_clock: Callable[[], float] | None = None,
    ):
        self.maker = maker
        own = operators_of(maker.builder.sampler) if operators is None else operators
        self.workflow = Workflow(maker.builder, own, maker.gathers, pieces)
        decides = policy()
        decides.launchable = lambda key: self._parts[key].done()
        self.scheduler = Scheduler(self._graph, decides, time.perf_counter, trace, task_clock)
        self._shelf = PartShelf(stage, maker.parts_open)
        self._parts: dict[BatchKey, Future] = {}
        self._stager: ThreadPoolExecutor | None = None

    def begin(self) -> None:
        """Do nothing: the first request starts the threads."""

    def request(self, key: BatchKey) -> None:
        """Ask for a batch, and for its part where it is not there."""
        if self._stager is None:
            self._stager = ThreadPoolExecutor(1, thread_name_prefix=f"{THREAD_NAME}-part")
        part = self._parts[key] = self._shelf.request(key.part, self._stager)
        self.scheduler.request(key)
        if not part.done():
            part.add_done_callback(lambda _: self.scheduler.wake())

    def ready(self) -> tuple[BatchKey, MiniBatch]:
        """Return the next batch; see `BatchSource`."""
        return self.scheduler.ready()

    def expect_part(self, part: int) -> None:
        """Load a part in the thread that does so, unless it is there."""
        if self._stager is not None:
            self._shelf.request(part, self._stager)

    @property
    def queue_bytes(self) -> int:
        """Bytes of batches that are ready now."""
        return self.scheduler.policy.held_bytes

    def forget(self) -> None:
        """End the threads; parts stay."""
        self.scheduler.forget()
        self._parts.clear()
        stager, self._stager = self._stager, None
        if stager is not None:
            stop(stager)

    def close(self) -> None:
        """End the threads and let go of the parts."""
        self.forget()
        self._shelf.clear()

    def _graph(self, dag_id: int, key: BatchKey) -> BatchGraph:
        part = self._parts.pop(key).result()
        return self.workflow.instance(dag_id, batch_key(*key), part, self.maker.items(key, part))
