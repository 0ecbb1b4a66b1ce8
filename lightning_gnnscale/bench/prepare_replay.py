"""Measured task times, replayed on machines with more cores: a prediction, and its error where it can be checked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from time import process_time, thread_time

from ..loader import RankPlace, TaskGraphs
from ..loader.replay import Replayed, replay
from ..loader.scheduling_policy import FixedPrefetchPolicy, TwoLevelPolicy
from ..loader.task_trace import TaskTrace
from ..partition_store import PartitionStore
from .prepare_cases import Shape, make_data
from .prepare_measure import epochs

MAX_DEPTH = 16  # of fixed prefetch


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
        return partial(self.settings.connect(place).func, **self.settings.connect(place).keywords, trace=self.trace,
                       task_clock=thread_time)  # fmt: skip


def record(store: PartitionStore, workload: str, shape: Shape, num_threads: int, pieces: int, path: Path) -> TaskTrace:
    """Return the task times of a workload, measured side by side on so many threads; those of the path if it is there.

    Times are CPU seconds of the thread, which leave out what else the machine does, but not what shared caches and
    memory cost.
    """
    if path.is_file():
        return TaskTrace.load(path)
    trace = TaskTrace()
    settings = TaskGraphs(num_threads, "fixed_prefetch", depth=num_threads, pieces=pieces)
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
    trace.train_s.clear()
    in_tasks = sum(sum(task.seconds for task in batch.tasks) + batch.launch_s for batch in trace.batches)
    trace.overhead_s = max(cpu_s - in_tasks, 0.0) / sum(len(batch.tasks) + 1 for batch in trace.batches)
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.save(path)
    return trace


def joined(trace: TaskTrace) -> TaskTrace:
    """Return the trace with each batch as one task, which costs the scheduling of all: what one thread does with it."""
    batches = []
    for batch in trace.batches:
        one = batch.tasks[0]._replace(kind="batch", dependencies=(), seconds=sum(t.seconds for t in batch.tasks))
        batches.append(replace(batch, tasks=[one]))
    return TaskTrace(batches, trace.train_s, len(trace.batches[0].tasks) * trace.overhead_s)


def best_fixed(trace: TaskTrace, cores: int, most: int, train_s: float, num_batches: int) -> tuple[Replayed, dict]:
    """Return the fastest fixed prefetch over all depths up to `most` and all sensible numbers of threads.

    Args:
        trace: Trace returned by `joined`.
    """
    found, options = [], {"train_s": train_s, "num_batches": num_batches, "overhead_s": trace.overhead_s}
    for depth in range(1, min(most, MAX_DEPTH) + 1):
        for threads in {min(2**power, depth, cores) for power in range(8)}:
            replayed = replay(trace, FixedPrefetchPolicy(threads, depth), cores, requests_ahead=depth, **options)
            found.append((replayed, {"num_threads": threads, "depth": depth}))
    return max(found, key=lambda pair: pair[0].seeds_per_s)


def two_level(
    traces: Mapping[int, TaskTrace],
    cores: int,
    queue_batches: int,
    sigmas: Sequence[float],
    train_s: float,
    num_batches: int,
) -> tuple[Replayed, dict]:
    """Return the fastest two-level scheduling of several sigmas and pieces of a hop.

    Args:
        traces: by pieces.
        queue_batches: memory, in the largest batches.
    """
    largest, found = max(batch.num_bytes for batch in traces[1].batches), []
    for (pieces, trace), sigma in product(traces.items(), sigmas):
        options = {"train_s": train_s, "num_batches": num_batches, "overhead_s": trace.overhead_s}
        policy = TwoLevelPolicy(cores, sigma, queue_batches * largest)
        policy.largest_bytes = largest
        ahead = TaskGraphs(cores).batches_ahead - 1  # one is the trainer's
        replayed = replay(trace, policy, cores, requests_ahead=ahead, **options)
        found.append((replayed, {"num_threads": cores, "pieces": pieces, "sigma": sigma}))
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
        traces: Traces of a workload, by number of cores and by pieces per hop; 1, whole hops, must be among the pieces.
        cores: Numbers of cores of the machines.
        queue_batches: Sizes of memory: upper bounds on the batches that are ready or under way in either scheduling.
        sigmas: Values of sigma over which two-level scheduling is tuned.
        train_s: Time of a training step, seconds; it runs on a device of its own.
        measured: Maps (source, cores, batches of memory) to the seeds per second that were measured without training,
            or None.

    Returns:
        Rows with `replayed_cores`, `queue_batches`, the seeds per second, settings and peak MiB of each scheduling, and
        `ratio`. If it was measured, also the `measured` seeds per second and the `error` of the prediction.
    """
    rows = []
    for number in cores:
        whole = joined(traces[number][1])
        num_batches = max(len(whole.batches), 4 * number)
        for batches in queue_batches:
            plain, plain_settings = best_fixed(whole, number, batches, train_s, num_batches)
            task, task_settings = two_level(traces[number], number, batches, sigmas, train_s, num_batches)
            row = {"replayed_cores": number, "queue_batches": batches}
            found = {"fixed_prefetch": (plain, plain_settings), "task_graphs": (task, task_settings)}
            for name, (replayed, settings) in found.items():
                row[f"{name}_seeds_per_s"] = round(replayed.seeds_per_s, 1)
                row[f"{name}_settings"] = " ".join(f"{key}={value}" for key, value in settings.items())
                row[f"{name}_peak_mib"] = round(replayed.peak_bytes / 2**20, 1)
                seen = measured(name, number, batches)
                row[f"{name}_measured"] = "" if seen is None else seen
                row[f"{name}_error"] = "" if seen is None else round(replayed.seeds_per_s / seen - 1, 4)
            row["ratio"] = round(task.seeds_per_s / plain.seeds_per_s, 3)
            rows.append(row)
    return rows
