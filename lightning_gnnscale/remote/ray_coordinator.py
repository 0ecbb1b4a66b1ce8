"""The coordinator of a trainer node, asynchronous, in a thread or an actor: requests of all ranks, credits, faults."""

import asyncio
import itertools
import math
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any

from ..loader.batch_maker import batch_error
from ..loader.work_queue import Attempt, Job, WorkQueue
from .assignment import Assignment, Rank
from .cluster import NAMESPACE, import_ray, one_line, worker_handle, workers_named
from .coordinator_workers import CoordinatorWorkers
from .messages import (
    GROUPS_AT_WORKER,
    Answer,
    CoordinatorSettings,
    GroupHeader,
    GroupPayload,
    GroupRequest,
    Setup,
    Table,
    Unit,
)
from .ray_worker import start_workers
from .versioned_cache import CacheUpdate, TrainerCache


class CoordinatorCaches:
    """One `TrainerCache` for each feature table that batches of a coordinator are made of.

    Args:
        num_rows: Number of rows that each cache keeps; 0: no cache.
        policy: See `TrainerCache`.
    """

    def __init__(self, num_rows: int, policy: str):
        self._num_rows, self._policy = num_rows, policy
        self._caches: dict[str, TrainerCache] = {}

    def begin(self, table: Table | None, worker: int) -> CacheUpdate | None:
        """Return what goes along with a request to a worker, None where all rows are sent."""
        if not self._num_rows or table is None:
            return None
        cache = self._caches.get(table.name)
        if cache is None:
            kept = min(self._num_rows, table.num_rows)
            cache = self._caches[table.name] = TrainerCache(
                table.num_rows,
                kept,
                table.dim,
                table.dtype,
                self._policy,
                sparse_width=table.sparse_width,
                node_types=table.node_types,
            )
        return cache.begin(worker)

    async def complete(
        self, table: Table, update: CacheUpdate, header: GroupHeader, payload: GroupPayload
    ) -> GroupPayload | None:
        """Return an answer with the rows that were not sent; None where nobody waits for it."""
        cache, group = self._caches[table.name], payload.group
        answer = (update.request, header.version, group.union, payload.missing, payload.rows)
        complete = partial(cache.complete, *answer, weight=group.weight)
        rows: Any = await asyncio.get_running_loop().run_in_executor(None, complete)
        return None if rows is None else GroupPayload(group, None, rows)

    def cancel(self, table: Table, update: CacheUpdate) -> None:
        """Wait for a request no longer."""
        self._caches[table.name].cancel(update.request)

    def forget(self, worker: int) -> None:
        """Forget a worker that ended."""
        for cache in self._caches.values():
            cache.forget(worker)

    def counts(self) -> dict[str, int]:
        """Return bytes of ids that were sent to workers."""
        return {"update_bytes": sum(cache.counts.update_bytes for cache in self._caches.values())}


_AWAY = ("rows_gathered", "rows_away", "bytes_away")
_CREW_S = 2.0  # between looks at who has come, and at how many are needed
_MADE, _ENOUGH = ("batches", "busy_s"), 8  # batches by which the need is measured
_SLACK = 0.1  # of a worker, for which no other is started
_SHRINK_AFTER = 3
_GATHER_S = 5.0  # for workers that start: parts that were assigned without them would be read twice
_WATCH_S = 0.25
_PROBE_S = 5.0  # a worker that makes one group for longer is asked whether it is there


class Coordinator:
    """Collect the requests of a node's ranks, have workers make the batches, and tell the ranks where they are.

    A `WorkQueue` says what is wanted, an attempt being a group of batches; an `Assignment` says which worker makes it.
    Ray restarts a worker that ended; meanwhile its jobs go to the others. So do those of a worker whose group is late,
    and it gets no further group until it answers.

    Args:
        name: Name of this coordinator.
        worker_names: Names of the workers' actors.
        settings: Settings of this coordinator.
    """

    def __init__(self, name: str, worker_names: list[str], settings: CoordinatorSettings):
        self._ray, self.name, self._settings = import_ray(), name, settings
        self._workers = CoordinatorWorkers(
            worker_names, settings.timeout_s, self._came, self._left, lambda event: self._notices.append(event)
        )
        self._queue, self._ranks = WorkQueue(settings.slow_s), dict[str, Rank]()
        self._assign = Assignment(self._queue, settings.batches_per_group, settings.credits)
        self._gathered_s = math.inf  # from then on parts are assigned, though workers are missing
        self._slow: set[int] = set()
        self._lost: dict[int, asyncio.Future] = {}  # of workers with groups under way, done when they are silent
        self._heard_s: dict[int, float] = {}
        self._probed: set[int] = set()
        self._notices: list[dict] = []
        self._tasks: set[asyncio.Task] = set()
        self._numbers = itertools.count(time.time_ns())  # of requests; also after a restart they only rise
        self._totals: dict[str, float] = {}
        self._paces: dict[str, deque[tuple[int, float]]] = {}
        self._grown: list[int] = []  # workers that were started here
        self._prepared = (0, 0.0)  # batches made and seconds taken when the need was last measured
        self._leaving: set[int] = set()  # of them, those that get no more groups
        self._too_many = 0  # how often in a row there were more workers than needed
        self._caches = CoordinatorCaches(settings.cache_rows, settings.cache_policy)

    async def ping(self) -> None:
        """Answer."""

    async def join(self, rank: str, setup: Setup) -> int:
        """Add a rank; return the number of workers."""
        if await self._workers.connect():
            self._gathered_s = time.monotonic() + _GATHER_S
            for worker in self._workers.names:
                self._spawn(self._workers.revive(worker))
            self._spawn(self._watch())
        self._ranks[rank] = Rank(setup)
        return len(self._workers)

    async def pace(self, rank: str, num_taken: int, seconds: float) -> None:
        """Note how many batches a rank has taken so far, and how long it took for them, without waiting."""
        self._paces.setdefault(rank, deque(maxlen=2)).append((num_taken, seconds))

    async def take(self, rank: str, iteration: int, place: int, first: int, keys: list, taken: int) -> Answer | None:
        """Return a batch once it is made; None where it was forgotten. Calls may come in any order.

        Args:
            rank: Name of the rank that wants the batch.
            iteration: Iteration in which it is wanted, see `forget`.
            place: Index among the batches of the iteration.
            first, keys: Index and keys of further batches that are wanted, from this index on.
            taken: Number of batches that the rank has taken in this iteration.
        """
        state = self._ranks.get(rank)
        if state is None or state.iteration != iteration:
            return None
        if self._workers.broken is not None:
            return Answer(self._workers.broken)
        self._take(state, taken)
        if first not in state.told:
            state.note(first, keys)
            for number, key in enumerate(keys, first):
                self._queue.add(state, key, _new_answer(), number)
        job = state.find(place)
        self._hand_out()
        return None if job is None else await job.context

    async def took(self, rank: str, iteration: int, taken: int) -> None:
        """Note how many batches a rank has taken, where it wants no more and waits."""
        state = self._ranks.get(rank)
        if state is not None and state.iteration == iteration:
            self._take(state, taken)
            self._hand_out()

    async def again(self, rank: str, iteration: int, place: int) -> Answer | None:
        """Return a batch that was lost on its way to the rank, made once more."""
        state = self._ranks.get(rank)
        job = None if state is None or state.iteration != iteration else state.find(place)
        if job is None:
            return None
        if job.is_done:
            self._queue.redo(job)
            job.context = _new_answer()
            self._hand_out()
        return await job.context

    async def expect(self, rank: str, part: Unit, key) -> None:
        """Have a part read ahead by the worker that it is assigned to."""
        setup = self._ranks[rank].setup
        worker = self._assign.worker_of(setup, key, part)
        if worker is not None:
            self._workers.tell(worker, "expect", setup, part)

    async def forget(self, rank: str) -> None:
        """Drop what a rank wants, and wait for its next iteration."""
        if rank in self._ranks:
            self._ranks[rank].iteration += 1
            for job in self._drop(self._ranks[rank]):
                _answer(job, None)
        self._hand_out()

    async def leave(self, rank: str) -> int:
        """Remove a rank; return how many are left. Workers that stay forget what the last one had."""
        await self.forget(rank)
        left = self._ranks.pop(rank, None)
        self._paces.pop(rank, None)
        still = {state.setup.name for state in self._ranks.values()}
        if left is not None and left.setup.name not in still:
            for worker in self._assign.able:
                self._workers.tell(worker, "leave", self.name, [left.setup.name])
        return len(self._ranks)

    async def counts(self) -> dict[str, float]:
        """Return seconds that workers took, parts, reads of parts, and the number of workers; asks no worker.

        Where workers ask each other for rows, also how many they gathered, and how many came from other machines.
        """
        setups = {state.setup.name: state.setup for state in self._ranks.values()}
        asks = any(setup.shard_map is not None for setup in setups.values())
        return {
            "parts": sum(setup.num_units for setup in setups.values()),
            "busy_s": self._totals.get("busy_s", 0.0),
            "parts_read": self._totals.get("reads", 0),
            "num_workers": len(self._workers),
            **({name: self._totals.get(name, 0) for name in _AWAY} if asks else {}),
        }

    async def report(self) -> dict:
        """Return counts, process ids of the workers that answer, and their reads of parts, with all reads of parts."""
        able = sorted(self._workers.started - self._workers.gone)
        pids = [await self._workers.reply(worker, "ping") for worker in able]
        reads = [await self._workers.reply(worker, "reads") for worker in able]
        asked = [await self._workers.reply(worker, "asked") for worker in able]
        held = {self._assign.machines.get(worker): await self._workers.reply(worker, "held") for worker in able}
        counts = {name: sum(one[name] for one in asked) for name in ("asked", "unanswered")}
        return (
            self._totals
            | counts
            | self._caches.counts()
            | {"pids": pids, "reads": reads, "machines": list(held), "held": list(held.values())}
            | {"credits_held": self._queue.num_needed, "parts_read": self._totals.get("reads", 0)}
        )

    async def stop(self) -> None:
        """End the tasks that run beside the calls."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in {*self._grown, *self._leaving}:
            self._ray.kill(self._workers.remove(worker))

    def _spawn(self, coroutine) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the loop holds it weakly
        task.add_done_callback(self._tasks.discard)

    def _take(self, rank: Rank, num_taken: int) -> None:
        while rank.order and rank.head.place < num_taken:
            self._queue.take(rank)

    def _drop(self, rank: Rank) -> list[Job]:
        rank.start_again()
        return self._queue.forget(rank)

    def _hand_out(self) -> None:
        """Ask workers for what they can be asked for now: a group of each, then one more of each."""
        if self._workers.broken is not None:
            self._fail_all()
            return
        if len(self._assign.machines) < len(self._workers) and time.monotonic() < self._gathered_s:
            return
        for most in range(1, GROUPS_AT_WORKER + 1):
            for worker in sorted(self._assign.able):
                while len(self._queue.under_way(worker)) < most:
                    group = self._assign.next_group(worker)
                    if group is None:
                        break
                    self._turn(worker)
                    self._spawn(self._make(group))

    def _turn(self, worker: int) -> None:
        """Note which group a worker is at: the first of those that it was asked for."""
        groups = self._queue.under_way(worker)
        if groups and groups[0].begun_s is None:
            self._queue.begin(groups[0])

    async def _make(self, group: Attempt) -> None:
        """Have a worker make a group, and answer those who wait for it."""
        worker, first = group.worker, group.jobs[0]
        setup = first.line.setup
        table = setup.table
        update = self._caches.begin(table, worker)
        try:
            owned, wanted = self._assign.owned(setup, first.key, worker), self._assign.wanted(setup, worker)
            keys = [job.key for job in group.jobs]
            coming = {part for rank in self._ranks.values() if rank.setup.name == setup.name for _, part in rank.latest}
            request = GroupRequest(self.name, setup, keys, owned, wanted, (*coming,), update, next(self._numbers))
            header, payload = await self._unless_lost(worker, self._answered(worker, request))
            self._heard_s[worker] = time.monotonic()
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError) as error:
            self._bereave(group, error)
            return
        except Exception as error:  # a fault of the worker's own
            header, payload = GroupHeader([-1] * len(group.jobs), [one_line(error)] * len(group.jobs)), None
        finally:
            if update is not None:
                self._caches.cancel(table, update)  # unless it was completed
        self._slow.discard(worker)
        if worker not in self._workers.gone | self._leaving and worker in self._assign.machines:
            self._assign.resume(worker)
        self._deliver(group, header, payload)
        self._turn(worker)
        self._hand_out()

    async def _unless_lost(self, worker: int, answer) -> Any:
        """Return what a worker answers; ActorUnavailableError: it has been silent for too long."""
        lost = self._lost.setdefault(worker, asyncio.get_running_loop().create_future())
        answered = asyncio.ensure_future(answer)
        try:
            await asyncio.wait({answered, lost}, return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                return answered.result()
            raise self._ray.exceptions.ActorUnavailableError(lost.result(), None)
        finally:
            answered.cancel()

    async def _answered(self, worker: int, request: GroupRequest) -> tuple[GroupHeader, Any]:
        """Return a worker's header, and its payload with all rows, or where it is."""
        made, payload = self._workers.ask(worker, "make", request)
        header = await made
        if request.update is None or max(header.numbers) < 0:
            return header, payload
        whole = await self._caches.complete(request.setup.table, request.update, header, await payload)
        if whole is None:
            raise self._ray.exceptions.ActorUnavailableError("the worker ended meanwhile", None)
        return header, self._ray.put(whole) if self._settings.shared else whole

    def _deliver(self, group: Attempt, header: GroupHeader, payload) -> None:
        for name in ("num_union", "rows_sent", "row_bytes", "group_bytes", "reads", "busy_s", *_AWAY):
            self._totals[name] = self._totals.get(name, 0) + getattr(header, name)
        self._totals["batches"] = self._totals.get("batches", 0) + sum(number >= 0 for number in header.numbers)
        told = header
        for job in self._queue.finish(group, *zip(header.numbers, header.errors, strict=True)):
            number, error = job.result
            if error is not None:
                _answer(job, Answer(error, notices=self._taken_notices()))
                continue
            crew = (len(self._assign.machines), len(set(self._assign.machines.values())))
            _answer(job, Answer(None, (payload,), number, told, self._taken_notices(), *crew))
            told = None

    def _bereave(self, group: Attempt, error: Exception) -> None:
        """Give the jobs of a worker that ended to the others."""
        worker, lost = group.worker, self._queue.lose(group, _hopeless)
        self._caches.forget(worker)
        self._assign.suspend(worker)
        self._slow.discard(worker)
        if worker in self._workers.started:
            self._workers.started.discard(worker)
            self._notices.append({"name": "worker_ended", "worker": worker, "how": one_line(error), "lost": len(lost)})
            self._spawn(self._workers.revive(worker))
        for job in lost:
            if job.is_done:
                _answer(job, Answer(job.result))
        self._turn(worker)
        self._hand_out()

    def _came(self, worker: int, place: tuple[str, int | None]) -> None:
        """Give jobs to a worker that answers."""
        machine, memory_bytes = place
        self._assign.add(worker, machine, memory_bytes is not None)
        self._hand_out()

    def _left(self, worker: int) -> None:
        """Give no more jobs to a worker that does not answer, and those that it has to others."""
        self._assign.suspend(worker)
        lost = self._lost.pop(worker, None)
        if lost is not None and not lost.done():
            lost.set_result("it does not answer")
        self._hand_out()

    def _fail_all(self) -> None:
        for rank in self._ranks.values():  # each begins its next iteration once it has read that this one ended
            for job in self._drop(rank):
                _answer(job, Answer(self._workers.broken, notices=self._taken_notices()))

    async def _watch(self) -> None:
        """Have the groups of a slow worker made by others too; find out about those that are silent, or new."""
        counted_s = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            self._probe()
            if time.monotonic() > counted_s + _CREW_S:
                await self._greet()
                await self._grow()
                counted_s = time.monotonic()
            self._hand_out()
            for worker in [group.worker for group in self._queue.late()]:
                if worker not in self._workers.started or not self._assign.able - {worker} - self._slow:
                    continue
                if worker not in self._slow:
                    self._slow.add(worker)
                    self._assign.suspend(worker)
                    self._notices.append({"name": "worker_slow", "worker": worker, "seconds": self._queue.patience_s})
                for group in self._queue.under_way(worker):
                    self._queue.double(group)
                self._hand_out()

    async def _greet(self) -> None:
        """Add workers that have come, and forget those that have left for good."""
        prefix = self._settings.prefix
        if prefix is None or self._workers.broken is not None:
            return
        with suppress(self._ray.exceptions.RayError, ValueError, ConnectionError, RuntimeError):  # asked again soon
            found = await asyncio.to_thread(workers_named, prefix)
            known = {name for worker, name in self._workers.names.items() if worker not in self._workers.gone}
            for name in set(found) - known:
                self._meet(name, await asyncio.to_thread(worker_handle, name))
            for worker in [one for one in self._workers.gone if self._workers.names[one] not in found]:
                if self._assign.able:
                    self._dismiss(worker)

    def _meet(self, name: str, actor: Any) -> int:
        worker = self._workers.add(name, actor)
        self._notices.append({"name": "worker_joined", "worker": worker})
        self._spawn(self._workers.revive(worker))
        return worker

    def _dismiss(self, worker: int) -> Any:
        """Forget a worker; return its actor."""
        self._notices.append({"name": "worker_left", "worker": worker})
        self._assign.remove(worker)
        self._caches.forget(worker)
        self._slow.discard(worker)
        return self._workers.remove(worker)

    def _needed(self) -> int | None:
        """Return how many workers keep the trainers busy; None: too little was made since it was last asked."""
        pairs = [pair for pair in self._paces.values() if len(pair) == 2 and pair[1][1] > pair[0][1]]
        made, busy_s = (self._totals.get(name, 0.0) - old for name, old in zip(_MADE, self._prepared, strict=True))
        if not pairs or made < _ENOUGH:
            return None
        self._prepared = tuple(self._totals[name] for name in _MADE)
        wanted_per_s = sum((last[0] - first[0]) / (last[1] - first[1]) for first, last in pairs)
        return math.ceil(self._settings.growth.share * wanted_per_s * busy_s / made - _SLACK)

    async def _grow(self) -> None:
        """Start workers where trainers could take more, and end one where there have been too many for a while."""
        for worker in [one for one in self._leaving if not self._queue.under_way(one)]:
            self._leaving.discard(worker)
            self._ray.kill(self._dismiss(worker))
        growth = self._settings.growth
        needed = None if growth is None or self._workers.broken is not None else self._needed()
        if needed is None:
            return
        needed, there = min(max(needed, growth.least), growth.most), len(self._workers) - len(self._leaving)
        self._too_many = self._too_many + 1 if needed < there else 0
        if needed > there and len(self._assign.able) >= there:  # those on their way are not counted yet
            if growth.workers.num_cpus:
                free = (await asyncio.to_thread(self._ray.available_resources)).get("CPU", 0)
                needed = min(needed, there + int(free / growth.workers.num_cpus))
            first = max(self._workers.names) + 1
            for number in range(first, first + needed - there):
                name = f"{self._settings.prefix}{number}"
                actor, *_ = await asyncio.to_thread(start_workers, [name], growth.workers)
                self._grown.append(self._meet(name, actor))
        elif self._too_many >= _SHRINK_AFTER and self._grown:
            self._leaving.add(self._grown[-1])
            self._assign.suspend(self._grown.pop())
            self._too_many = 0

    def _probe(self) -> None:
        patience_s = min(_PROBE_S, self._settings.timeout_s / 4)
        for worker in self._workers.started - self._probed:
            groups = self._queue.under_way(worker)
            heard_s = max(self._heard_s.get(worker, 0.0), groups[0].begun_s) if groups else time.monotonic()
            if time.monotonic() - heard_s > patience_s:
                self._probed.add(worker)
                self._spawn(self._ask_whether_there(worker, heard_s + self._settings.timeout_s - time.monotonic()))

    async def _ask_whether_there(self, worker: int, left_s: float) -> None:
        try:
            if await self._workers.answers(worker, left_s):
                self._heard_s[worker] = time.monotonic()
        finally:
            self._probed.discard(worker)

    def _taken_notices(self) -> tuple[dict, ...]:
        notices, self._notices = tuple(self._notices), []
        return notices


def _new_answer() -> asyncio.Future:
    """Return what a rank waits on: the context of a job."""
    return asyncio.get_running_loop().create_future()


def _answer(job: Job, value: Answer | None) -> None:
    if not job.context.done():
        job.context.set_result(value)


def _hopeless(job: Job) -> str:
    what = f"{job.ends} workers ended while they prepared it"
    return str(batch_error(job.key, f"{what}: memory may be short, lower worker_memory_bytes or batch_size"))


def start_coordinator(name: str, *arguments) -> Any:
    """Return the coordinator of this machine, started by the first of its ranks that asks."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = import_ray()
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=here)(Coordinator)
    return actor.options(name=name, namespace=NAMESPACE, get_if_exists=True).remote(name, *arguments)
