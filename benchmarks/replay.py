"""What a scheduler would have done on other machines: measured task times, replayed in simulated time.

A replay is a prediction; where the same was measured, its error is reported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from itertools import product
from pathlib import Path
from time import process_time, thread_time

from lightning_gnnscale.loader import RankPlace, TaskGraphs
from lightning_gnnscale.loader.batch_graph import BatchGraph, Task
from lightning_gnnscale.loader.scheduling_policy import Policy, Run, TwoLevelPolicy, Wait
from lightning_gnnscale.partition_store import PartitionStore

from .fixed_prefetch import FixedPrefetch, FixedPrefetchPolicy
from .prepare_cases import Shape, epochs, make_data
from .task_trace import BatchTimes, TaskTrace, TracedSource

MAX_DEPTH = 16  # of fixed prefetch
_ENDED_S = 1e-12  # rest of a chunk of work that rounding left over


@dataclass(frozen=True)
class Replayed:
    """What a replay predicts; it is a prediction, not a measurement.

    Attributes:
        seconds: Time from the first request to the end of the last training step.
        num_seeds: Seeds that were trained on.
        waited_s: Time that the trainer waited for batches, seconds.
        busy_share: Share of the threads' time that they spent preparing, in [0, 1].
        peak_bytes: Largest number of bytes of finished batches that waited at a time.
        delivered_s: When the trainer got each batch, seconds.
        ran: (time, thread, dag_id, task number) of each task when it began, in order; task number -1: making a task
            graph.
    """

    seconds: float
    num_seeds: int
    waited_s: float
    busy_share: float
    peak_bytes: int
    delivered_s: list[float]
    ran: list[tuple[float, int, int, int]]

    @property
    def seeds_per_s(self) -> float:
        return self.num_seeds / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time that the trainer waited, in [0, 1]."""
        return self.waited_s / self.seconds if self.seconds else 0.0


def replay(
    trace: TaskTrace,
    policy: Policy,
    cores: int,
    *,
    train_s: float | None = None,
    train_cores: float = 0.0,
    overhead_s: float = 0.0,
    requests_ahead: int | None = None,
    num_batches: int | None = None,
) -> Replayed:
    """Run a trace through a policy's decisions in simulated time; deterministic.

    All work under way shares the cores: when there is more work than cores, all of it slows down alike. Work in the
    interpreter is done by one thread at a time. Task times are taken as measured, so contention for memory bandwidth
    and caches is not modelled.

    Args:
        trace: Trace of at least one batch; its batches are used in turn, again and again.
        policy: A fresh policy; its threads are simulated.
        cores: Number of cores of the simulated machine, >= 1.
        train_s: Time of a training step, seconds; None: the times of the trace in turn (0 if it has none).
        train_cores: Cores that training uses while it runs, >= 0; 0: it has a device of its own.
        overhead_s: Cost of scheduling itself, seconds in the interpreter before every task and for every task graph.
        requests_ahead: Batches that are requested and not yet taken at a time, >= 1; None: all of them.
        num_batches: Number of batches to train on; None: as many as the trace has.

    Returns:
        Replayed.

    Raises:
        ValueError: an argument is out of range, or the trace is empty.

    Cost: O(events * threads), in plain Python.
    """
    if not trace.batches:
        raise ValueError("the trace must have at least one batch, got none: record it with trace=TaskTrace()")
    for name, value, least in (("cores", cores, 1), ("train_cores", train_cores, 0), ("overhead_s", overhead_s, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if requests_ahead is not None and requests_ahead < 1:
        raise ValueError(f"requests_ahead must be at least 1, or None for all, got {requests_ahead}")
    steps = [train_s] if train_s is not None else trace.train_s or [0.0]
    machine = _Machine(trace, policy, cores, steps, train_cores, overhead_s)
    return machine.run(len(trace.batches) if num_batches is None else num_batches, requests_ahead)


@dataclass
class _Work:
    """What a thread or the trainer is doing."""

    left_s: float  # at full speed
    then: Callable[[], None]
    locked_s: float = 0.0  # of left_s, the first ones, in the interpreter


class _Machine:
    """Simulated threads and a simulated trainer on shared cores."""

    def __init__(self, trace, policy: Policy, cores: int, steps: list[float], train_cores: float, overhead_s: float):
        self.trace, self.policy, self.cores, self.steps = trace, policy, cores, steps
        self.train_cores, self.overhead_s = train_cores, overhead_s
        self.now = self.busy_s = self.waited_s = 0.0
        self.working: dict[int, _Work] = {}
        self.training: _Work | None = None
        self.wake_s: dict[int, float] = {}  # threads that ask again at a time of their own
        self.finished: set[int] = set()
        self.delivered_s: list[float] = []
        self.ran: list[tuple[float, int, int, int]] = []
        self.num_seeds = 0
        self.graphs: dict[int, BatchGraph] = {}

    def run(self, num_batches: int, requests_ahead: int | None) -> Replayed:
        requested, asked = 0, 0.0
        while len(self.delivered_s) < num_batches or self.training:
            taken = len(self.delivered_s)
            ahead = num_batches if requests_ahead is None else requests_ahead
            while requested < min(num_batches, taken + ahead):
                self.policy.request(requested)
                requested += 1
            if self.training is None and taken in self.finished:
                self._deliver(taken, asked)
                continue  # the trainer asks for more before anyone acts
            self._step_threads()
            if self._advance():
                asked = self.now
        threads = self.policy.num_threads
        share = self.busy_s / (threads * self.now) if self.now else 0.0
        return Replayed(
            self.now, self.num_seeds, self.waited_s, share, self.policy.peak_bytes, self.delivered_s, self.ran
        )

    def _deliver(self, dag_id: int, asked: float) -> None:
        """Hand the next batch to the trainer, which begins its step."""
        self.finished.discard(dag_id)
        self.policy.taken(dag_id, self.now)
        self.waited_s += self.now - asked
        self.delivered_s.append(self.now)
        self.num_seeds += self._times(dag_id).num_seeds
        begun, step = self.now, self.steps[dag_id % len(self.steps)]
        self.training = _Work(step, lambda: self.policy.trained(self.now - begun))

    def _step_threads(self) -> None:
        """Let every free thread ask for work, lowest number first."""
        for thread in range(self.policy.num_threads):
            if thread not in self.working:
                self.wake_s.pop(thread, None)
                self._step(thread)

    def _step(self, thread: int) -> None:
        action = self.policy.step(thread, self.now)
        if isinstance(action, Wait):
            if action.seconds is not None:
                self.wake_s[thread] = self.now + action.seconds
        elif isinstance(action, Run):
            seconds = self._times(action.dag_id).tasks[action.task.number].seconds
            self._work(thread, action.dag_id, action.task.number, seconds, self._done)
        elif seconds := self._times(action.dag_id).launch_s:
            self._work(thread, action.dag_id, -1, seconds, self._made)
        else:
            self.ran.append((self.now, thread, action.dag_id, -1))
            self._made(thread, action.dag_id, -1)
            self._step(thread)

    def _work(self, thread: int, dag_id: int, number: int, seconds: float, then: Callable) -> None:
        self.ran.append((self.now, thread, dag_id, number))
        done = partial(then, thread, dag_id, number)
        self.working[thread] = _Work(seconds + self.overhead_s, done, self.overhead_s)

    def _made(self, thread: int, dag_id: int, number: int) -> None:
        self.graphs[dag_id] = _graph(dag_id, self._times(dag_id))
        self.policy.launched(thread, dag_id, self.graphs[dag_id])

    def _done(self, thread: int, dag_id: int, number: int) -> None:
        task = self.graphs[dag_id].tasks[number]
        if self.policy.done(thread, dag_id, task, self.now) is None:
            self.finished.add(dag_id)
            del self.graphs[dag_id]

    def _times(self, dag_id: int) -> BatchTimes:
        return self.trace.batches[dag_id % len(self.trace.batches)]

    def _advance(self) -> bool:
        """Go to the next instant at which something ends, and end it; return whether the trainer's step did."""
        # The first to ask gets the interpreter; the others wait for it and need no core.
        locked = [thread for thread, work in self.working.items() if work.locked_s > _ENDED_S]
        waiting = set(locked[1:])
        demand = len(self.working) - len(waiting) + (self.train_cores if self.training else 0)
        speed = min(1.0, self.cores / demand) if demand else 1.0
        train_speed = speed if self.train_cores else 1.0
        running = [work for thread, work in self.working.items() if thread not in waiting]
        coming = [(work.locked_s if work.locked_s > _ENDED_S else work.left_s) / speed for work in running]
        coming += [until - self.now for until in self.wake_s.values()]
        coming += [self.training.left_s / train_speed] if self.training else []
        passed = max(min(coming), 0.0)
        self.now += passed
        self.busy_s += passed * len(running)
        trained = False
        if self.training:
            self.training.left_s -= passed * train_speed
            if self.training.left_s <= _ENDED_S:
                self.training.then()
                self.training, trained = None, True
        for work in running:
            work.left_s -= passed * speed
            work.locked_s = max(work.locked_s - passed * speed, 0.0)
        for thread in sorted(thread for thread, work in self.working.items() if work.left_s <= _ENDED_S):
            self.working.pop(thread).then()
        return trained


def _graph(dag_id: int, times: BatchTimes) -> BatchGraph:
    """Return a task graph whose tasks take no time of their own: the machine counts it."""
    tasks = [
        Task(dag_id, number, task.kind, task.dependencies, _nothing, lambda cost=task.cost: cost, task.kind == "ask")
        for number, task in enumerate(times.tasks)
    ]
    return BatchGraph(tasks, _nothing, lambda: times.num_bytes)


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class _Traced:
    """Task graphs whose times are recorded."""

    settings: TaskGraphs
    trace: TaskTrace
    in_process = True

    @property
    def batches_ahead(self) -> int:
        return self.settings.batches_ahead

    def connect(self, place: RankPlace):
        made = self.settings.connect(place)
        return partial(TracedSource, **made.keywords, trace=self.trace, task_clock=thread_time)


def record(store: PartitionStore, workload: str, shape: Shape, num_threads: int, chunks: int, path: Path) -> TaskTrace:
    """Return the task times of a workload, measured side by side on so many threads; those of the path if it is there.

    Times are CPU seconds of the thread, which leave out what else the machine does, but not what shared caches and
    memory cost.
    """
    if path.is_file():
        return TaskTrace.load(path)
    trace = TaskTrace()
    settings = FixedPrefetch(num_threads, chunks=chunks)
    data = make_data(store, workload, shape, _Traced(settings, trace))
    loader = data.train_dataloader()
    warm_up = settings.batches_ahead + 4
    for _ in epochs(loader, warm_up):
        pass
    trace.batches.clear()
    cpu_s = process_time()
    for _ in epochs(loader, shape.num_batches):
        pass
    cpu_s = process_time() - cpu_s
    data.teardown("fit")
    in_tasks = sum(sum(task.seconds for task in batch.tasks) + batch.launch_s for batch in trace.batches)
    trace.overhead_s = max(cpu_s - in_tasks, 0.0) / sum(len(batch.tasks) + 1 for batch in trace.batches)
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.save(path)
    return trace


def _joined(trace: TaskTrace) -> TaskTrace:
    """Return the trace with each batch as one task, which costs the scheduling of all: what one thread does with it."""
    batches = []
    for batch in trace.batches:
        one = batch.tasks[0]._replace(kind="batch", dependencies=(), seconds=sum(t.seconds for t in batch.tasks))
        batches.append(changed(batch, tasks=[one]))
    return TaskTrace(batches, trace.train_s, len(trace.batches[0].tasks) * trace.overhead_s)


def _best_fixed(trace: TaskTrace, cores: int, most: int, **options) -> tuple[Replayed, dict]:
    """Return the fastest fixed prefetch over all depths up to `most` and all sensible numbers of threads."""
    found, options = [], {"overhead_s": trace.overhead_s, **options}
    for depth in range(1, min(most, MAX_DEPTH) + 1):
        for threads in {min(2**power, depth, cores) for power in range(8)}:
            replayed = replay(trace, FixedPrefetchPolicy(threads, depth), cores, requests_ahead=depth, **options)
            found.append((replayed, {"num_threads": threads, "depth": depth}))
    return max(found, key=lambda pair: pair[0].seeds_per_s)


def _best_two_level(traces, cores: int, queue_batches: int, sigmas, **options) -> tuple[Replayed, dict]:
    """Return the fastest two-level scheduling of several sigmas and chunks of a hop, in memory for so many batches."""
    largest, found = max(batch.num_bytes for batch in traces[1].batches), []
    ahead = TaskGraphs(cores).batches_ahead - 1  # one is the trainer's
    for (chunks, trace), sigma in product(traces.items(), sigmas):
        policy = TwoLevelPolicy(cores, sigma, queue_batches * largest)
        policy.largest_bytes = largest
        replayed = replay(trace, policy, cores, requests_ahead=ahead, overhead_s=trace.overhead_s, **options)
        found.append((replayed, {"num_threads": cores, "chunks": chunks, "sigma": sigma}))
    return max(found, key=lambda pair: pair[0].seeds_per_s)


def replay_rows(
    traces: Mapping[int, Mapping[int, TaskTrace]],
    cores: Sequence[int],
    queue_batches: Sequence[int],
    sigmas: Sequence[float],
    train_s: float = 0.0,
    measured: Callable[[str, int, int], float | None] = lambda source, cores, queue_batches: None,
) -> list[dict]:
    """Return a row for each number of cores and cap on memory: both schedulings, each tuned, and their ratio.

    Args:
        traces: Traces of a workload, by number of cores and by chunks per hop; 1, whole hops, must be among the chunks.
        cores, sigmas: Numbers of cores of the machines; values over which two-level scheduling is tuned.
        queue_batches: Sizes of memory: upper bounds on the batches that are ready or under way in either scheduling.
        train_s: Time of a training step, seconds; it runs on a device of its own.
        measured: Maps (source, cores, batches of memory) to the seeds per second that were measured without training,
            or None.

    Returns:
        Rows with `replayed_cores`, `queue_batches`, the seeds per second, settings and peak MiB of each scheduling, and
        `ratio`; "" for the `measured` seeds per second and the `error` of the prediction where nothing was measured.
    """
    rows = []
    for number in cores:
        whole = _joined(traces[number][1])
        options = {"train_s": train_s, "num_batches": max(len(whole.batches), 4 * number)}
        for batches in queue_batches:
            found = {
                "fixed_prefetch": _best_fixed(whole, number, batches, **options),
                "task_graphs": _best_two_level(traces[number], number, batches, sigmas, **options),
            }
            row = {"replayed_cores": number, "queue_batches": batches}
            for name, (replayed, settings) in found.items():
                seen = measured(name, number, batches)
                row[f"{name}_seeds_per_s"] = round(replayed.seeds_per_s, 1)
                row[f"{name}_settings"] = " ".join(f"{key}={value}" for key, value in settings.items())
                row[f"{name}_peak_mib"] = round(replayed.peak_bytes / 2**20, 1)
                row[f"{name}_measured"] = "" if seen is None else seen
                row[f"{name}_error"] = "" if seen is None else round(replayed.seeds_per_s / seen - 1, 4)
            plain, task = (replayed.seeds_per_s for replayed, _ in found.values())
            rows.append(row | {"ratio": round(task / plain, 3)})
    return rows
