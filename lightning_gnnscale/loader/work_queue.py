"""Batches that are prepared ahead: which are wanted, which worker makes them, which are slow, lost or hopeless.

Every source of batches (`BatchSource`) works alike. A loader asks for batches in the order in which it trains on them.
Each becomes a `Job` at the end of its consumer's `Line`. Workers (threads, processes, Ray actors) start the jobs that
are pending, those wanted soonest first, and finish them in any order. The consumer takes the head of its line once
that is done. What can happen to a job:

    pending --start--> running --finish--> done --take--> gone
       ^                  |                  |
       |   put_back, lose |             redo |      forget: gone from anywhere
       +------------------+------------------+

- A worker's try at one job, or at several in one go, is an `Attempt`. An executor may keep with it what the batch lies
  in (`space`); it is given back once the worker is through and all the batches are taken, or nobody wants them.
- A worker that ends loses its attempt (`lose`): its jobs are pending again. A job over which `MOST_ENDS` workers have
  ended is done, with an error as its result.
- An attempt that takes much longer than any before is `late`. `double` makes its jobs pending once more, while it goes
  on: the first result counts. At most two workers try a job at a time.
- A batch is a function of its key, so it does not matter which worker makes it, when, or how often.

The queue decides and counts; it has no threads, sends nothing, and waits for nothing. Its executors do:

    executor                        workers               one attempt      consumers        what bounds it
    `local_source`                  threads               a batch          this process     requests
    `process_source`                processes             a batch          this process     bytes of shared memory
    `task_source` (with a policy)   threads               tasks of many    this process     bytes, or batches
    `remote.ray_coordinator`        actors, by `Assignment`  a group          a node's ranks   credits

The caller ensures that one thread at a time is in here.
"""

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

SLOW_S = 10.0  # an attempt is slow after so many seconds at least,
SLOW_TIMES = 4.0  # after so many times the longest one so far,
FIRST_TIMES = 6.0  # and after so many times SLOW_S while there is none: the first ones load kernels and parts
MOST_ENDS = 5  # workers that may end over one batch
START_LIMIT_S = 60.0  # a worker may take at least so long to start: importing torch is slow


@dataclass(eq=False)
class Job:
    """One batch that a consumer wants.

    Attributes:
        key: Key of the batch.
        line: Its consumer's line.
        place: Index among the batches requested of the line since it was last forgotten.
        context: What the executor needs to make or report it: a future of its part, one that a rank waits on.
        is_pending: Whether a worker is to start it.
        is_done: Whether it has a result.
        result: The batch, or what leads to it; an exception: the reason why there is none.
        attempts: Attempts under way; once it is done, the one that made it.
        ends: Number of workers that ended over it.
    """

    key: Any
    line: "Line"
    place: int
    context: Any = None
    is_pending: bool = True
    is_done: bool = False
    result: Any = None
    attempts: list["Attempt"] = field(default_factory=list)
    ends: int = 0

    @property
    def is_wanted_next(self) -> bool:
        return bool(self.line.order) and self.line.order[0] is self

    def outcome(self) -> Any:
        """Return the result of a job that was taken, once; raises it where it is an exception."""
        result, self.result, self.context = self.result, None, None
        try:
            if isinstance(result, Exception):
                raise result
            return result
        finally:
            del result  # an error holds this frame, and would hold itself


@dataclass(eq=False, kw_only=True)
class Line:
    """The jobs that one consumer has not taken yet.

    Attributes:
        order: Its jobs in the order in which it wants them.
        next_place: Place of the next job.
    """

    order: deque[Job] = field(default_factory=deque)
    next_place: int = 0

    @property
    def head(self) -> Job:
        """The job that is taken next; ValueError: there is none."""
        if not self.order:
            raise ValueError("no batch is requested: call request(key) before ready()")
        return self.order[0]

    @property
    def num_ahead(self) -> int:
        """Number of jobs that are under way or done."""
        return sum(job.is_done or bool(job.attempts) for job in self.order)

    def find(self, place: int) -> Job | None:
        """Return the job at a place, None where it was taken."""
        return next((job for job in self.order if job.place == place), None)


@dataclass(eq=False)
class Attempt:
    """One worker's try at jobs that it was given in one go.

    Attributes:
        worker: Whose it is; the queue only compares it.
        jobs: What the worker was given, in that order.
        needed: The jobs that need this attempt: it makes them, or has made them but they are not taken.
        begun_s: When the worker began it; None: it has not.
        is_over: Whether the worker has answered, or ended.
        is_doubled: Whether it was so slow that its jobs were given to others too.
        space: What the executor lent it.
    """

    worker: Any
    jobs: list[Job]
    needed: set[Job]
    begun_s: float | None = None
    is_over: bool = False
    is_doubled: bool = False
    space: Any = None


class WorkQueue:
    """Jobs of all lines, and the attempts at them; see the docstring of this module.

    Args:
        slow_s: Least time after which an attempt is late, seconds; None: `SLOW_S`.
        most_slow_s: Time after which it is late in any case, seconds.
        give_back: Called with each attempt that no longer needs its `space`.
        clock: Gives seconds.

    Attributes:
        pending: Jobs that wait for a worker, lowest place first.
        attempts: Attempts whose worker has not answered, or whose batches are needed.
    """

    def __init__(
        self,
        slow_s: float | None = None,
        most_slow_s: float = math.inf,
        give_back: Callable[[Attempt], None] = lambda attempt: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._slow_s = SLOW_S if slow_s is None else slow_s
        self._most_slow_s, self._give_back, self.clock = most_slow_s, give_back, clock
        self.pending: list[Job] = []
        self.attempts: list[Attempt] = []
        self._longest_s: float | None = None

    def add(self, line: Line, key: Any, context: Any = None, place: int | None = None) -> Job:
        """Append a job to a line; with a place, in any order of calls."""
        job = Job(key, line, line.next_place if place is None else place, context)
        in_order = job.place >= line.next_place
        line.order.append(job)
        if not in_order:
            line.order = deque(sorted(line.order, key=_place))
        line.next_place = max(line.next_place, job.place + 1)
        insort(self.pending, job, key=_place)
        return job

    def start(self, jobs: Sequence[Job], worker: Any = None) -> Attempt:
        """Give pending jobs to a worker."""
        attempt = Attempt(worker, list(jobs), set(jobs))
        for job in jobs:
            self._set_pending(job, False)
            job.attempts.append(attempt)
        self.attempts.append(attempt)
        return attempt

    def begin(self, attempt: Attempt) -> None:
        """Note that the worker turns to an attempt now."""
        attempt.begun_s = self.clock()

    def finish(self, attempt: Attempt, *results: Any) -> list[Job]:
        """Note a worker's answer: a result for each job. Return the jobs that it is the first result of."""
        made = [(job, result) for job, result in zip(attempt.jobs, results, strict=True) if job in attempt.needed]
        if attempt.begun_s is not None and not attempt.is_doubled:  # slow attempts do not define what is slow
            self._longest_s = max(self._longest_s or 0.0, self.clock() - attempt.begun_s)
        for job, result in made:
            self._conclude(job, result)
            for other in [other for other in job.attempts if other is not attempt]:
                self._leave(other, job)
        self._end(attempt)
        return [job for job, _ in made]

    def put_back(self, attempt: Attempt) -> list[Job]:
        """Let others make the jobs of an attempt that will have no answer; return them."""
        lost = [job for job in attempt.jobs if job in attempt.needed]
        for job in lost:
            self._leave(attempt, job)
            if not job.attempts:
                self._set_pending(job, True)
        self._end(attempt)
        return lost

    def lose(self, attempt: Attempt, why: Callable[[Job], Any]) -> list[Job]:
        """Put back the jobs of a worker that ended; return them. A hopeless one is done: its result is why(job)."""
        lost = self.put_back(attempt)
        for job in lost:
            job.ends += 1
            if job.ends >= MOST_ENDS and not job.attempts:
                self._conclude(job, why(job))
        return lost

    def redo(self, job: Job) -> None:
        """Have a job that is done made once more: its batch was lost on its way, or its space is needed."""
        job.is_done, job.result = False, None
        self._leave_all(job)
        self._set_pending(job, True)

    def take(self, line: Line) -> Job:
        """Return the head of a line, and forget it."""
        job = line.order.popleft()
        self._drop(job)
        return job

    def forget(self, line: Line) -> list[Job]:
        """Empty a line, and return what was in it; results of workers at its jobs are discarded."""
        dropped = list(line.order)
        line.order.clear()
        line.next_place = 0
        for job in dropped:
            self._drop(job)
        return dropped

    @property
    def patience_s(self) -> float:
        """Seconds after which an attempt is late."""
        known = FIRST_TIMES * self._slow_s if self._longest_s is None else SLOW_TIMES * self._longest_s
        return min(max(self._slow_s, known), self._most_slow_s)

    def late(self) -> list[Attempt]:
        """Return the attempts that have taken too long by now."""
        since = self.clock() - self.patience_s
        return [one for one in self.attempts if one.begun_s is not None and not one.is_over and one.begun_s < since]

    def double(self, attempt: Attempt) -> list[Job]:
        """Let others make the unfinished jobs of a slow attempt too, unless somebody does; return the jobs."""
        alone = [job for job in attempt.jobs if job.attempts == [attempt] and not (job.is_done or job.is_pending)]
        attempt.is_doubled |= bool(alone)
        for job in alone:
            self._set_pending(job, True)
        return alone

    def under_way(self, worker: Any = None) -> list[Attempt]:
        """Return the attempts that a worker (None: of those without one) has not answered, first come first."""
        return [attempt for attempt in self.attempts if attempt.worker == worker and not attempt.is_over]

    @property
    def num_needed(self) -> int:
        """Number of attempts that somebody needs; slow ones are left out, whose jobs are others'."""
        return sum(bool(attempt.needed) and not attempt.is_doubled for attempt in self.attempts)

    def _conclude(self, job: Job, result: Any) -> None:
        job.is_done, job.result = True, result
        self._set_pending(job, False)

    def _drop(self, job: Job) -> None:
        self._set_pending(job, False)
        self._leave_all(job)

    def _leave_all(self, job: Job) -> None:
        for attempt in list(job.attempts):
            self._leave(attempt, job)

    def _leave(self, attempt: Attempt, job: Job) -> None:
        attempt.needed.discard(job)
        job.attempts.remove(attempt)
        self._let_go(attempt)

    def _end(self, attempt: Attempt) -> None:
        attempt.is_over = True
        self._let_go(attempt)

    def _let_go(self, attempt: Attempt) -> None:
        if attempt.is_over and not attempt.needed and attempt in self.attempts:
            self.attempts.remove(attempt)
            self._give_back(attempt)

    def _set_pending(self, job: Job, pending: bool) -> None:
        if pending and not job.is_pending:
            insort(self.pending, job, key=_place)
        elif job.is_pending and not pending:
            self.pending.remove(job)
        job.is_pending = pending


def _place(job: Job) -> int:
    return job.place
