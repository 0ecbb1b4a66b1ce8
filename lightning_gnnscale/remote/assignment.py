"""Which worker makes which batches of a trainer node: parts are assigned, batches go in groups; without Ray."""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ..loader.batch_source import BatchKey
from ..loader.part_walk import shuffled_parts
from ..loader.work_queue import Attempt, Job, Line, WorkQueue
from ..rng import fold
from .messages import GROUPS_AT_WORKER, Setup, Unit

_ASSIGN = 0x6465616C


def assign_parts(
    parts: Sequence[int],
    machines: Sequence[Hashable],
    able: Collection[Hashable],
    seed: int,
    epoch: int,
    made_for: tuple[int, int] = (1, 0),
) -> dict[int, Hashable]:
    """Assign parts to machines, to each as many as it has workers.

    Where the parts were made for as many machines as there are, each takes those of one, in every epoch. Else they are
    assigned in turn, in the order in which an `InterleavedWalk` of that seed visits them in the epoch: parts
    that are open at a time are on as many machines as possible.

    Args:
        parts: Distinct part ids.
        machines: Machine of each worker, in any order.
        able: Machines that can take a part. The parts of the others are assigned to these; no other part moves.
        seed, epoch: Seed and epoch that the order is sampled from.
        made_for: Machines that the parts were made for, and the number of all parts.

    Returns:
        Part to machine. It depends on the arguments alone, not on the order of the parts or of the workers.

    Raises:
        ValueError: no machine is able.

    Source: Armada's coordinator. Differs: it is a function, not a process, so no process has to be asked; and parts
        are assigned to machines, whose workers share them.
    """
    names, homes = sorted(set(machines), key=str), {}
    if made_for[0] > 1 and made_for[0] == len(names):
        homes = {part: names[part // (made_for[1] // made_for[0])] for part in parts}
    order = shuffled_parts(sorted(parts), seed, epoch)
    return assign_in_turn(order, machines, able, fold(seed, epoch, _ASSIGN), homes)


def assign_in_turn(
    units: Sequence[Unit],
    machines: Sequence[Hashable],
    able: Collection[Hashable],
    key: int,
    homes: Mapping[Unit, Hashable] | None = None,
) -> dict[Unit, Hashable]:
    """Assign parts, or unions of parts, that are opened one after another: see `assign_parts`.

    Args:
        units: In the order in which they are opened.
        machines, able: As of `assign_parts`.
        key: Random number.
        homes: Machines that some of them belong to whatever the order.
    """
    if not set(able) & set(machines):
        raise ValueError(f"able must be machines of workers, at least one, got {sorted(map(str, able))}")
    workers = {machine: list(machines).count(machine) for machine in sorted(set(machines), key=str)}
    # Each worker is at an even step of its machine's: machines with equally many workers take turns.
    turns = [((number + 0.5) / count, machine) for machine, count in workers.items() for number in range(count)]
    turns = [machine for _, machine in sorted(turns, key=lambda turn: (turn[0], str(turn[1])))]
    first = key % len(turns)  # who gets one more is random too
    owner = {unit: turns[(first + number) % len(turns)] for number, unit in enumerate(units)}
    owner |= homes or {}
    takers = [machine for machine in turns if machine in able]
    orphans = [unit for unit in units if owner[unit] not in able]
    return owner | {unit: takers[(first + number) % len(takers)] for number, unit in enumerate(orphans)}


@dataclass(eq=False)
class Rank(Line):
    """A rank of the node in the queue.

    Attributes:
        setup: How its batches are made.
        iteration: The iteration that it is in.
        told: First place of each run of batches that it asked for in this iteration.
        latest: Places and parts, or unions of parts, of the last `Setup.open_parts` of them, ascending.
    """

    setup: Setup
    iteration: int = 0
    told: set[int] = field(default_factory=set)
    latest: list[tuple[int, Unit]] = field(default_factory=list)

    def note(self, first: int, keys: Sequence[BatchKey]) -> None:
        """Note a run of batches that it asks for, from a place on. Runs may come in any order."""
        self.told.add(first)
        parts = [(place, self.setup.unit(key)) for place, key in enumerate(keys, first)]
        self.latest = sorted(self.latest + parts)[-self.setup.open_parts :]

    def start_again(self) -> None:
        """Forget what it asked for in this iteration."""
        self.told.clear()
        self.latest.clear()


class Assignment:
    """Assign the jobs of a queue to workers by their parts, and start them as groups while credits last.

    A part belongs to one machine in an epoch, and any worker of it makes its batches. The whole graph is at every
    worker: where machines hold its rows together, the one that holds most of a batch's targets makes it
    (`Setup.homes`). It leaves to the others what is beyond the next two groups of each of its workers, times
    `Setup.chunks`, and a worker that has no batch of its own takes some of these.

    A group has up to `batches_per_group` jobs of one setup; with a worker whose machine has a cap on the bytes of
    parts, they are of one part, which the worker keeps while no rank waits for another. A smaller one is started
    only where a rank of it has fewer than that many batches under way or ready. A group holds a credit until all its
    batches are taken. A batch that a rank waits for is started whatever the group's size and the credits.

    Args:
        queue: Jobs of all ranks, whose entries are each a `Rank`.
        batches_per_group: >= 1.
        credits: Groups under way or ready at a time, >= 1; None: two for each worker, times `Setup.chunks`.

    Attributes:
        machines: Machine of each worker that is known.
        able: Workers that can take a group. With none able on a machine, its parts are assigned to others.
        capped: Workers whose machine has a cap on the bytes of parts.
    """

    def __init__(self, queue: WorkQueue, batches_per_group: int, credits: int | None = None):
        self.queue, self.batches_per_group, self._credits = queue, batches_per_group, credits
        self.machines: dict[int, Hashable] = {}
        self.able: set[int] = set()
        self.capped: set[int] = set()
        self._last_part: dict[int, Unit] = {}
        self._assigns: dict[tuple, dict[Unit, Hashable]] = {}

    def credits_of(self, setup: Setup) -> int:
        """Return how many groups may be under way or ready at a time when one of a setup is started."""
        return self._credits or GROUPS_AT_WORKER * max(1, len(self.machines)) * setup.chunks

    def add(self, worker: int, machine: Hashable, is_capped: bool = False) -> None:
        """Add a worker, or one that came back, maybe on another machine."""
        self.machines[worker] = machine
        (self.capped.add if is_capped else self.capped.discard)(worker)
        self.resume(worker)

    def remove(self, worker: int) -> None:
        """Forget a worker that has left."""
        self.machines.pop(worker, None)
        self.suspend(worker)

    def resume(self, worker: int) -> None:
        """Give groups to a worker."""
        self.able.add(worker)
        self._assigns.clear()

    def suspend(self, worker: int) -> None:
        """Give no more groups to a worker."""
        self.able.discard(worker)
        self._assigns.clear()

    def owned(self, setup: Setup, key: BatchKey, worker: int) -> tuple[Unit, ...]:
        """Return the parts, or unions of parts, that a worker's machine is assigned in the epoch of a key."""
        mine = self.machines[worker]
        return tuple(part for part, machine in self._assign(setup, key).items() if machine == mine)

    def wanted(self, setup: Setup, worker: int) -> tuple[Unit, ...]:
        """Return the parts of a setup on a worker's machine that have batches to be made, or under way.

        The part whose last batch comes first is the first.
        """
        jobs = [job for job in self.queue.pending if job.line.setup.name == setup.name and self._is_of(job, worker)]
        mine = self.machines[worker]
        for attempt in self.queue.attempts:
            if not attempt.is_over and self.machines.get(attempt.worker) == mine:
                jobs += [job for job in attempt.jobs if job.line.setup.name == setup.name]
        last: dict[Unit, int] = {}
        for job in jobs:
            unit = setup.unit(job.key)
            last[unit] = max(job.place, last.get(unit, 0))
        return tuple(sorted(last, key=lambda part: (last[part], part)))

    def worker_of(self, setup: Setup, key: BatchKey, part: Unit) -> int | None:
        """Return a worker of the machine that a part is assigned to; None: it belongs to none, or no worker is able."""
        if setup.is_whole or not self.able:
            return None
        owner = self._assign(setup, key)[part]
        return min((worker for worker in self.able if self.machines[worker] == owner), default=None)

    def next_group(self, worker: int) -> Attempt | None:
        """Start the next group of a worker, None where there is none now."""
        if worker not in self.able:
            return None
        mine = [job for job in self.queue.pending if self._is_of(job, worker)]
        one_part, last = worker in self.capped, self._last_part.get(worker)

        def turn(job: Job) -> tuple:
            stays = not one_part or job.line.setup.unit(job.key) == last
            return not (one_part and job.is_wanted_next), not stays, job.place - job.line.head.place

        mine = mine or self._beyond(worker)
        mine.sort(key=turn)
        if mine:
            setup = mine[0].line.setup
            part = setup.unit(mine[0].key)
            one_part = one_part and not setup.is_whole
            mine = [job for job in mine if job.line.setup.name == setup.name]
            mine = [job for job in mine if not one_part or setup.unit(job.key) == part]
        jobs = mine[: self.batches_per_group]
        if not any(job.is_wanted_next for job in jobs):  # no rank waits: there is time, and a cap
            short = len(jobs) < self.batches_per_group
            if short and not any(job.line.num_ahead < self.batches_per_group for job in jobs):
                return None
            if self.queue.num_needed >= self.credits_of(jobs[0].line.setup):
                return None
        self._last_part[worker] = jobs[0].line.setup.unit(jobs[0].key)
        return self.queue.start(jobs, worker)

    def _is_of(self, job: Job, worker: int) -> bool:
        """Whether a worker is to make a pending job, and does not do so already."""
        if any(attempt.worker == worker for attempt in job.attempts):
            return False
        setup, mine = job.line.setup, self.machines[worker]
        if setup.is_whole:
            return self._home(job) in (None, mine)
        return self._assign(setup, job.key)[setup.unit(job.key)] == mine

    def _home(self, job: Job) -> Hashable | None:
        """Return the machine that is to make a batch of the whole graph; None: any, or no worker is able there."""
        home = (job.line.setup.homes or {}).get(job.key.part)
        return home if any(self.machines[worker] == home for worker in self.able) else None

    def _beyond(self, worker: int) -> list[Job]:
        """Return pending jobs by which other machines are further behind than the credits of their workers."""
        workers = Counter(self.machines[other] for other in self.able)
        waiting: Counter[Hashable] = Counter()
        found = []
        for job in self.queue.pending:
            setup = job.line.setup
            home = self._home(job) if setup.is_whole else None
            if home is None:
                continue
            waiting[home] += 1
            most = GROUPS_AT_WORKER * setup.chunks * self.batches_per_group * workers[home]
            if waiting[home] > most and all(attempt.worker != worker for attempt in job.attempts):
                found.append(job)
        return found

    def _assign(self, setup: Setup, key: BatchKey) -> dict[Unit, Hashable]:
        epoch = key.epoch // setup.passes
        name = (setup.name, key.seed, epoch)
        if name not in self._assigns:
            while len(self._assigns) >= 8:
                del self._assigns[next(iter(self._assigns))]
            machines = list(self.machines.values())
            able = {self.machines[worker] for worker in self.able} or machines
            if setup.unions is None:
                self._assigns[name] = assign_parts(setup.parts, machines, able, key.seed, epoch, setup.made_for)
            else:
                units = setup.unions.in_order(key.epoch)
                self._assigns[name] = assign_in_turn(units, machines, able, fold(key.seed, epoch, _ASSIGN))
        return self._assigns[name]
