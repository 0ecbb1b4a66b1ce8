"""Which worker makes which batches of a trainer node: parts are dealt out, batches go in groups; no Ray in here."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..loader.batch_source import BatchKey
from ..loader.work_queue import Attempt, Job, Line, WorkQueue
from ..rng import fold, permutation
from .messages import Setup

_DEAL, _ORPHANS = 0x6465616C, 0x6F727068  # two draws of one epoch


def assign_parts(
    parts: Sequence[int], num_workers: int, alive: Collection[int], seed: int, epoch: int
) -> dict[int, int]:
    """Deal parts to workers at random. Each part goes to one worker; the workers' counts differ by one at most.

    Args:
        parts: Distinct part ids.
        num_workers: Number of workers that the parts are dealt to, >= 1.
        alive: Numbers of the workers that can take a part, in [0, num_workers). The parts of the others are dealt to
            these; no other part moves.
        seed, epoch: Seed and epoch that the random deal is drawn from.

    Returns:
        Part id to worker number. It depends on the arguments alone, not on the order of the parts.

    Raises:
        ValueError: no worker is alive.

    Source: Armada's coordinator. Differs: it is a function, not a process, so that nothing has to be asked.
    """
    able = sorted(set(alive))
    if not able or not 0 <= able[0] <= able[-1] < num_workers:
        raise ValueError(f"alive must be workers in [0, {num_workers}), at least one, got {able}")
    dealt = _shuffled(parts, fold(seed, epoch, _DEAL))
    first = fold(seed, epoch, num_workers) % num_workers  # who gets one more is drawn too
    owner = {part: (first + number) % num_workers for number, part in enumerate(dealt)}
    orphans = [part for part in dealt if owner[part] not in able]
    for number, part in enumerate(_shuffled(orphans, fold(seed, epoch, _ORPHANS))):
        owner[part] = able[number % len(able)]
    return owner


def _shuffled(parts: Sequence[int], key: int) -> list[int]:
    ordered = sorted(parts)
    return [ordered[place] for place in permutation(len(ordered), key)]


@dataclass(eq=False)
class Rank(Line):
    """The line of a rank of the node.

    Attributes:
        setup: How its batches are made.
        iteration: The iteration that it is in.
        told: First place of each run of batches that it asked for in this iteration.
    """

    setup: Setup
    iteration: int = 0
    told: set[int] = field(default_factory=set)


class Dealing:
    """Deal the jobs of a queue to workers by their parts, and start them as groups while credits last.

    A part belongs to one worker in an epoch; where there is one part alone, the whole graph, it is at every worker. A
    group has up to `batches_per_group` jobs of one worker and one setup. A smaller one is started only where a rank of
    it has fewer than that many batches under way or ready. A group holds a credit until all its batches are taken. A
    batch that a rank waits for is started whatever the group's size and the credits.

    Args:
        queue: Jobs of all ranks, whose lines are each a `Rank`.
        num_workers: Number of workers, all of them able at first.
        batches_per_group: >= 1.
        credits: Groups under way or ready, >= 1.

    Attributes:
        able: Workers that can take a group. Parts of the others are dealt to these; with nobody able they stay.
    """

    def __init__(self, queue: WorkQueue, num_workers: int, batches_per_group: int, credits: int):
        self.queue, self.num_workers = queue, num_workers
        self.batches_per_group, self.credits = batches_per_group, credits
        self.able = set(range(num_workers))
        self._deals: dict[tuple, dict[int, int]] = {}

    def owned(self, setup: Setup, key: BatchKey, worker: int) -> tuple[int, ...]:
        """Return the parts that a worker is dealt in the epoch of a key."""
        return tuple(part for part, owner in self._deal(setup, key).items() if owner == worker)

    def owner(self, setup: Setup, key: BatchKey, part: int) -> int | None:
        """Return the worker that a part is dealt to in the epoch of a key; None: any."""
        return self._deal(setup, key)[part] if len(setup.parts) > 1 else None

    def next_group(self, worker: int) -> Attempt | None:
        """Start the next group of a worker, None where there is none now."""
        if worker not in self.able:
            return None
        mine = [job for job in self.queue.pending if self._is_of(job, worker)]
        mine.sort(key=lambda job: job.place - job.line.head.place)
        jobs = [job for job in mine if job.line.setup.name == mine[0].line.setup.name][: self.batches_per_group]
        if not any(job.is_wanted_next for job in jobs):  # nobody waits: there is time, and a cap
            short = len(jobs) < self.batches_per_group
            if short and not any(job.line.num_ahead < self.batches_per_group for job in jobs):
                return None
            if self.queue.num_needed >= self.credits:
                return None
        return self.queue.start(jobs, worker)

    def _is_of(self, job: Job, worker: int) -> bool:
        """Whether a worker is to make a pending job, and does not do so already."""
        owner = self.owner(job.line.setup, job.key, job.key.part)
        return owner in (None, worker) and all(attempt.worker != worker for attempt in job.attempts)

    def _deal(self, setup: Setup, key: BatchKey) -> dict[int, int]:
        epoch = key.epoch // setup.passes
        name = (setup.name, key.seed, epoch, frozenset(self.able))
        if name not in self._deals:
            while len(self._deals) >= 8:
                del self._deals[next(iter(self._deals))]
            able = self.able or set(range(self.num_workers))
            self._deals[name] = assign_parts(setup.parts, self.num_workers, able, key.seed, epoch)
        return self._deals[name]
