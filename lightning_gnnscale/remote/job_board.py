"""What the ranks of a trainer node want, in what order, and which worker is to make what next; no Ray in here."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any

from ..loader.batch_source import BatchKey
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


class Stage(Enum):
    """Of a job."""

    PENDING, RUNNING, DONE = range(3)


@dataclass(eq=False)
class Job:
    """One batch that a rank asked for.

    Attributes:
        place: Index among the batches that its rank wants, from 0 in each iteration.
        answer: Object that the rank waits on; made by the board's `new_answer`.
        worker: Worker that is to make the batch, or makes it.
        group: Group that the batch is in.
        ends: Number of workers that ended while they made it.
    """

    key: BatchKey
    rank: "Rank"
    place: int
    answer: Any
    worker: int = -1
    group: "Group | None" = None
    stage: Stage = Stage.PENDING
    ends: int = 0

    @property
    def is_wanted_next(self) -> bool:
        return bool(self.rank.order) and self.rank.order[0] is self


@dataclass(eq=False)
class Rank:
    """A rank of the node.

    Attributes:
        order: Its jobs that it has not taken yet, in the order in which it wants them.
        iteration: The iteration that it is in.
        told: First index of each run of batches that it asked for in this iteration.
    """

    setup: Setup
    order: deque[Job] = field(default_factory=deque)
    iteration: int = 0
    told: set[int] = field(default_factory=set)

    @property
    def num_ahead(self) -> int:
        """Jobs that are under way or done."""
        return sum(job.stage is not Stage.PENDING for job in self.order)


@dataclass(eq=False)
class Group:
    """Batches that one worker is asked for in one request.

    Attributes:
        untaken: its jobs that hold the group's credit.
        begun_s: when its worker turned to it.
        slow: the group that this one makes once more. doubled: there is one that makes this group's jobs once more.
    """

    number: int
    worker: int
    setup: Setup
    jobs: list[Job]
    untaken: int = 0
    begun_s: float = 0.0
    slow: "Group | None" = None
    doubled: bool = False


class JobBoard:
    """Jobs of all ranks of a node, dealt to workers by their parts, handed out as groups while credits last.

    A group has up to `batches_per_group` jobs of one worker and one setup. A smaller one is handed out only where a
    rank of it has fewer than that many batches under way or ready. A group holds a credit until all its batches are
    taken. A batch that a rank waits for is handed out whatever the group's size and the credits.

    Args:
        num_workers: workers, all of them able at first.
        batches_per_group: >= 1.
        credits: groups under way or ready, >= 1.
        new_answer: makes what a rank waits on.
    """

    def __init__(self, num_workers: int, batches_per_group: int, credits: int, new_answer: Callable[[], Any]):
        self.num_workers, self.batches_per_group, self.credits = num_workers, batches_per_group, credits
        self.ranks: dict[str, Rank] = {}
        self.able = set(range(num_workers))
        self.held = 0  # credits
        self._pending: list[Job] = []
        self._new_answer, self._numbers = new_answer, count()
        self._deals: dict[tuple, dict[int, int]] = {}
        self._load = [0] * num_workers  # jobs of each worker that are not done

    def add(self, rank: Rank, first: int, keys: list[BatchKey]) -> None:
        """Take in batches that a rank wants, unless it told them before; messages may come in any order.

        Args:
            first: place of the first one.
            keys: one behind the other.
        """
        if first in rank.told:
            return
        rank.told.add(first)
        jobs = [Job(key, rank, first + number, self._new_answer()) for number, key in enumerate(keys)]
        rank.order = deque(sorted([*rank.order, *jobs], key=lambda job: job.place))
        for job in jobs:
            self._wait(job)

    def find(self, rank: Rank, place: int) -> Job | None:
        """Return the job at a place, None where it was taken."""
        return next((job for job in rank.order if job.place == place), None)

    def take(self, rank: Rank, num_taken: int) -> None:
        """Note how many jobs a rank has taken in all."""
        while rank.order and rank.order[0].place < num_taken:
            self._leave_group(rank.order.popleft())

    def forget(self, rank: Rank) -> list[Job]:
        """Drop all jobs of a rank, and return them; another iteration begins."""
        dropped = list(rank.order)
        rank.order.clear()
        rank.told.clear()
        rank.iteration += 1
        for job in dropped:
            if job.stage is Stage.PENDING:
                self._pending.remove(job)
            if job.stage is not Stage.DONE:
                self._count(job, -1)
            self._leave_group(job)
        return dropped

    def give_up(self, job: Job) -> None:
        """Let no worker make a pending job any more."""
        self._pending.remove(job)
        self._count(job, -1)
        job.stage = Stage.DONE

    def owned(self, setup: Setup, key: BatchKey, worker: int) -> tuple[int, ...]:
        """Return the parts that a worker is dealt in the epoch of a key."""
        return tuple(part for part, owner in self._deal(setup, key).items() if owner == worker)

    def owner(self, setup: Setup, part: int, key: BatchKey) -> int:
        """Return the worker that a part is dealt to in the epoch of a key."""
        return self._deal(setup, key)[part]

    def set_able(self, worker: int, able: bool) -> None:
        """Let a worker take jobs, or none; pending ones are dealt anew. With nobody able they stay where they are."""
        (self.able.add if able else self.able.discard)(worker)
        if self.able:
            for job in self._pending:
                self._place(job)

    def next_group(self, worker: int) -> Group | None:
        """Hand out the next group of a worker, None where there is none now."""
        mine = sorted((job for job in self._pending if job.worker == worker), key=lambda job: not job.is_wanted_next)
        if not mine or worker not in self.able:
            return None
        setup = mine[0].rank.setup
        jobs = [job for job in mine if job.rank.setup.name == setup.name][: self.batches_per_group]
        short = len(jobs) < self.batches_per_group
        if not any(job.is_wanted_next for job in jobs):  # nobody waits: there is time, and a cap
            if short and not any(job.rank.num_ahead < self.batches_per_group for job in jobs):
                return None
            if self.held >= self.credits:
                return None
        group = Group(next(self._numbers), worker, setup, jobs, len(jobs))
        self.held += 1
        for job in jobs:
            self._pending.remove(job)
            job.stage, job.group = Stage.RUNNING, group
        return group

    def twin(self, group: Group, worker: int) -> Group:
        """Return what lets a second worker make the unfinished jobs of a group too; it holds no credit."""
        jobs = [job for job in group.jobs if job.stage is Stage.RUNNING and job.group is group]
        group.doubled = True
        return Group(next(self._numbers), worker, group.setup, jobs, slow=group)

    def finish(self, job: Job) -> bool:
        """Note that a job is made or has failed; whether it was not already, and somebody wants it."""
        if job.stage is not Stage.RUNNING:
            return False
        job.stage = Stage.DONE
        if job.group is None:
            return False
        self._count(job, -1)
        return True

    def put_back(self, group: Group) -> list[Job]:
        """Let others make the unfinished jobs of a group whose worker ended; return them."""
        lost = [job for job in group.jobs if job.stage is Stage.RUNNING and job.group is group]
        for job in lost:
            self._count(job, -1)
            self._leave_group(job)
            job.ends += 1
            self._wait(job)
        return lost

    def again(self, job: Job) -> None:
        """Have a job made once more whose batch was lost on its way."""
        self._leave_group(job)
        job.answer = self._new_answer()
        self._wait(job)

    def _wait(self, job: Job) -> None:
        job.stage, job.worker = Stage.PENDING, -1
        self._pending.append(job)
        if self.able:
            self._place(job)

    def _place(self, job: Job) -> None:
        self._count(job, -1)
        setup = job.rank.setup
        if len(setup.parts) > 1:
            job.worker = self.owner(setup, job.key.part, job.key)
        else:  # the whole graph is at every worker
            job.worker = min(sorted(self.able), key=lambda worker: self._load[worker])
        self._count(job, 1)

    def _count(self, job: Job, change: int) -> None:
        if job.worker >= 0:
            self._load[job.worker] += change

    def _deal(self, setup: Setup, key: BatchKey) -> dict[int, int]:
        epoch = key.epoch // setup.passes
        name = (setup.name, key.seed, epoch, frozenset(self.able))
        if name not in self._deals:
            while len(self._deals) >= 8:
                del self._deals[next(iter(self._deals))]
            able = self.able or set(range(self.num_workers))
            self._deals[name] = assign_parts(setup.parts, self.num_workers, able, key.seed, epoch)
        return self._deals[name]

    def _leave_group(self, job: Job) -> None:
        group, job.group = job.group, None
        if group is not None:
            group.untaken -= 1
            self.held -= group.untaken == 0
