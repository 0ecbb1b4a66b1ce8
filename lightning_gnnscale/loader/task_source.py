"""Batches prepared task by task by threads of this process."""

import math
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil

from ..errors import GNNScaleError
from ..events import clock
from ..rng import batch_key
from ..sampler.minibatch import MiniBatch
from .batch_graph import BatchGraph
from .batch_maker import BatchMaker, batch_error
from .batch_source import BatchKey
from .local_source import THREAD_NAME, stop
from .scheduling_policy import Launch, Policy, Run, Wait
from .staged_part import PartCache, StagedPart
from .task_graph import Operators, Workflow, operators_of

_GAUGE_S, _FORGETS_S = 0.05, 0.25  # shortest time between readings, and the age at which one counts a third
MakeGraph = Callable[[int, Any], BatchGraph]


class Scheduler:
    """Prepare requested batches by threads, and give them out in the order of the requests; used by one thread.

    Compiled kernels release the interpreter lock. Threads run from the first request to `forget`.

    Args:
        make: (dag_id, key) to the batch's task graph; called by several threads at once.
        policy: decides what a free thread does; used by this scheduler alone.
        clock: gives seconds.

    Attributes:
        waited_s: seconds that `ready` waited, since the scheduler was made.
    """

    def __init__(
        self,
        make: MakeGraph,
        policy: Policy,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.policy, self.waited_s = policy, 0.0
        self.make, self._clock = make, clock
        self._lock = threading.Lock()
        self._work, self._batch = threading.Condition(self._lock), threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._clear()

    def request(self, key: Hashable) -> None:
        """Ask for a batch, in the order in which batches are wanted; never blocks."""
        with self._lock:
            self.policy.request(key)
            self._work.notify()
            if not self._threads:
                self._stop = threading.Event()
                self._start()

    def ready(self) -> tuple[Hashable, Any]:
        """Return the next requested batch with its key, in request order; waits for it.

        Raises:
            GNNScaleError: what preparing it raised, with its key.
            ValueError: nothing is requested.
        """
        job = self.policy.line.head
        with self._lock:
            asked = self._clock()
            if self._given_s is not None:
                self.policy.trained(asked - self._given_s)
            while not job.is_done:
                self._batch.wait()
            self._given_s = self._clock()
            self.policy.taken(job.place, self._given_s)
            self._work.notify_all()
            self.waited_s += self._given_s - asked
        try:
            return job.key, job.outcome()
        except Exception as error:
            raise _error(job.key, error) from error

    def wake(self) -> None:
        """Wake free threads: `policy.launchable` has changed."""
        with self._lock:
            self._work.notify_all()

    def forget(self) -> None:
        """Drop what was requested and not taken, and end the threads; a thread of them that runs this does not wait."""
        with self._lock:
            threads, self._threads = self._threads, []
            if threads:
                self._stop.set()
            self._work.notify_all()
        inside = threading.current_thread().name.startswith(THREAD_NAME)
        for thread in threads if not inside else ():
            thread.join()
        with self._lock:
            self.policy.clear()
            self._clear()

    close = forget

    def _clear(self) -> None:
        self._given_s: float | None = None

    def _start(self) -> None:
        for number in range(self.policy.num_threads):
            arguments, name = (number, self._stop), f"{THREAD_NAME}-{number}"
            self._threads.append(threading.Thread(target=self._run, args=arguments, name=name, daemon=True))
            self._threads[-1].start()

    def _run(self, number: int, stop: threading.Event) -> None:
        while True:
            with self._lock:
                action = self._next(number, stop)
            if action is None:
                return
            if isinstance(action, Launch):
                self._launch(number, action, stop)
            else:
                self._run_task(number, action, stop)

    def _next(self, number: int, stop: threading.Event) -> Run | Launch | None:
        while not stop.is_set():
            action = self.policy.step(number, self._clock())
            if not isinstance(action, Wait):
                return action
            self._work.wait(action.seconds)
        return None

    def _launch(self, number: int, launch: Launch, stop: threading.Event) -> None:
        try:
            graph = self.make(launch.dag_id, launch.key)
            with self._lock:
                if not stop.is_set():
                    self.policy.launched(number, launch.dag_id, graph)
                    self._work.notify_all()
        except Exception as error:
            self._fail(launch.dag_id, error, stop)

    def _run_task(self, number: int, run: Run, stop: threading.Event) -> None:
        task = run.task
        try:
            with clock.doing("read" if task.kind == "fetch" else "sample"):
                reply = task.run()
            if isinstance(reply, Future):
                if self.policy.overlaps_replies:
                    reply.add_done_callback(partial(self._replied, number, run, stop))
                    return
                reply.result()
            self._ran(number, run, stop)
        except Exception as error:
            self._fail(run.dag_id, error, stop)

    def _replied(self, number: int, run: Run, stop: threading.Event, reply: Future) -> None:
        """Take the reply to a remote task, in the thread that has it."""
        try:
            reply.result()
            self._ran(number, run, stop, one_is_mine=False)
        except (Exception, CancelledError) as error:
            self._fail(run.dag_id, error, stop)

    def _ran(self, number: int, run: Run, stop: threading.Event, one_is_mine: bool = True) -> None:
        with self._lock:
            if stop.is_set():
                return
            count = self.policy.done(number, run.dag_id, run.task, self._clock())
            if count is None:
                self._batch.notify()
                self._work.notify()
            elif count > one_is_mine:  # this thread takes one of the tasks that became ready
                self._work.notify(count - one_is_mine)

    def _fail(self, dag_id: int, error: Exception, stop: threading.Event) -> None:
        with self._lock:
            if not stop.is_set() and self.policy.failed(dag_id, error):
                self._batch.notify()
                self._work.notify_all()


def machine_utilisation(read: Callable[[], float] = psutil.cpu_percent, clock=time.perf_counter) -> Callable[[], float]:
    """Return a gauge of the machine's cores in percent, training and other programs included: ByteGNN's C_util.

    It is a mean that forgets what was more than about half a second ago.

    Args:
        read: Gives the use of the cores since it was last called.
        clock: Gives seconds.
    """
    read()
    state = [None, clock()]  # the mean, and when it was brought up to date

    def gauge() -> float:
        passed = clock() - state[1]
        if passed >= _GAUGE_S or state[0] is None:
            weight = 1.0 if state[0] is None else 1 - math.exp(-passed / _FORGETS_S)
            state[0] = (state[0] or 0.0) * (1 - weight) + weight * read()
            state[1] = clock()
        return state[0]

    return gauge


def _error(key: Hashable, error: Exception) -> GNNScaleError:
    what = f"{type(error).__name__}: {error}"
    return batch_error(key, what) if isinstance(key, BatchKey) else GNNScaleError(f"batch {key}: {what}")


class TaskSource:
    """A `BatchSource` of threads that share the tasks of batches, in the order that a policy decides.

    Neighbour samplers, and link samplers around them, are sampled hop by hop while rows of earlier hops are gathered;
    other samplers sample a batch in one task. One more thread loads parts; a batch whose part is still being loaded
    blocks no thread. Threads run from the first request to `forget`.

    Args:
        stage: Maps a part id to its `StagedPart`.
        maker: Makes the batches.
        policy: Makes the policy, which this source alone uses.
        operators: A user's own operators; None: those that sample what the maker's sampler samples.
        chunks: Number of tasks that share a large hop, >= 1; see `Workflow`.

    Attributes:
        scheduler: Decides and runs the tasks; knows the bytes held and how long `ready` waited.
    """

    def __init__(
        self,
        stage: Callable[[int], StagedPart],
        maker: BatchMaker,
        policy: Callable[[], Policy],
        operators: Operators | None = None,
        chunks: int = 1,
    ):
        self.maker = maker
        own = operators_of(maker.sampler) if operators is None else operators
        self.workflow = Workflow(maker, own, chunks)
        decides = policy()
        decides.launchable = lambda key: self._parts[key].done()
        self.scheduler = Scheduler(self._graph, decides)
        self._cache = PartCache(stage, maker.order.parts_open)
        self._parts: dict[BatchKey, Future] = {}
        self._stager: ThreadPoolExecutor | None = None

    def begin(self) -> None:
        """Do nothing: the first request starts the threads."""

    def request(self, key: BatchKey) -> None:
        """Request a batch, and its part where it is not loaded."""
        if self._stager is None:
            self._stager = ThreadPoolExecutor(1, thread_name_prefix=f"{THREAD_NAME}-part")
        part = self._parts[key] = self._cache.request(self.maker.order.unit(key), self._stager)
        self.scheduler.request(key)
        if not part.done():
            part.add_done_callback(lambda _: self.scheduler.wake())

    def ready(self) -> tuple[BatchKey, MiniBatch]:
        """Return the next batch; see `BatchSource`."""
        return self.scheduler.ready()

    def expect_part(self, part: int) -> None:
        """Load a part in the loading thread, unless it is loaded."""
        if self._stager is not None:
            self._cache.request(part, self._stager)

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
        """End the threads and release the parts."""
        self.forget()
        self._cache.clear()

    def _graph(self, dag_id: int, key: BatchKey) -> BatchGraph:
        part = self._parts.pop(key).result().of(key.part)
        return self.workflow.instance(dag_id, batch_key(*key), part, self.maker.items(key, part))
