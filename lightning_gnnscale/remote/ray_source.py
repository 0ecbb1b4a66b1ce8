"""`source=ray`: batches prepared by workers on other machines, as plain settings."""

import itertools
import os
import tempfile
import time
import uuid
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import GNNScaleError, check_count, check_integer, check_seconds, is_integer, short
from ..events import record
from ..loader.batch_maker import BatchMaker, batch_error
from ..loader.batch_source import BatchKey
from ..loader.local_source import THREAD_NAME, stop
from ..loader.source_settings import RankPlace
from ..loader.staged_part import StagedPart
from ..loader.work_queue import SLOW_S
from ..memory import read_sizes
from ..partition_store.features import as_stored
from ..sampler.minibatch import MiniBatch
from .batch_group import unpack_one
from .cluster import (
    Meeting,
    ask_for_token,
    import_ray,
    join_ray,
    leave_ray,
    num_machines,
    one_line,
    workers_named,
)
from .coordinator_link import Link, setup_of
from .held_parts import machine_caps
from .holder import OwnerReads
from .messages import GROUPS_AT_WORKER, Answer, CoordinatorSettings, GroupPayload, Growth, WorkerSettings
from .ray_worker import worker_places

_sources = itertools.count()
_PACE_S = 1.0
_READS_TOO_MANY = 1.5  # of each part in an epoch: workers that end have theirs read again


class RaySource:
    """A `BatchSource` of Ray actors: workers make batches, a trainer node's coordinator requests them for its ranks.

    The graph is not in this process. In an epoch each part belongs to one worker, assigned at random, and is read
    once. A batch arrives without its features, together with those rows of its group that are not cached. A thread of
    this process assembles it in memory of the maker's pool. Batches equal those of other sources bit for bit. If a
    worker ends, other workers make the batches it had under way, and Ray restarts it. If a trainer takes no batches,
    preparation stops once the credits are used up.

    Args:
        stage: Maps a part id to its `StagedPart`. Stage and maker must be picklable; the workers unpickle them.
        maker: Makes the batches.
        settings, meeting, place: See `RayWorkers.connect`.

    Attributes:
        bytes_received, row_bytes, num_batches, num_groups: What this rank has received so far: bytes in all, bytes of
            feature rows, batches and groups. A group counts for the rank that took its first batch.

    Cost: starting the source starts processes that import torch, which takes some seconds on a few cores. A batch costs
        two small messages and one copy of its arrays.
    """

    def __init__(
        self,
        stage: Callable[[int], StagedPart],
        maker: BatchMaker,
        settings: "RayWorkers",
        meeting: Meeting | None = None,
        place: RankPlace | None = None,
    ):
        self._settings, self._place = settings, place or RankPlace()
        meeting = meeting or Meeting(f"{os.getpid()}-{next(_sources)}")
        self._stage, self._maker, self._code = stage, maker, None
        if maker.gathers:  # quantised rows are sent as stored, and decoded where the batch is put together
            features, self._code = (None, None) if maker.features is None else as_stored(maker.features)
            self._maker = replace(maker, features=features)
        self._link = Link(self._settings, meeting, self._place)
        self._end: Callable[[], None] | None = None
        self._unsent: list[BatchKey] = []
        self._pending: deque[tuple[BatchKey, Future | None]] = deque()
        self._unpacker: ThreadPoolExecutor | None = None
        self._taken = self._told = self._iteration = 0
        self._last: tuple[Any, Any] = (None, None)
        self._expected: int | None = None  # part that was announced to the coordinator last
        self.bytes_received = self.row_bytes = self.num_batches = self.num_groups = 0
        self.rows_asked = self.rows_received = 0
        self._reads, self._warned = 0, False  # of parts, by the workers of this machine's coordinator
        self._begun_s: float | None = None  # of the iteration
        self._ran_s = self._waited_s = self._paced_s = 0.0

    def begin(self) -> None:
        """Connect to the coordinator of this node, and start what is missing.

        Raises:
            GNNScaleError: Ray or the workers cannot be started.
        """
        if self._end is not None:
            return
        end = weakref.finalize(self, self._link.close)
        self._iteration = 0
        try:
            self._link.open(setup_of(self._stage, self._maker, self._settings))
        except BaseException:
            end()
            raise
        self._end = end

    def request(self, key: BatchKey) -> None:
        """Note a batch that is wanted; `ready` sends it to the coordinator.

        Raises:
            GNNScaleError: see `begin`.
        """
        self.begin()
        self._unsent.append(key)

    def ready(self) -> tuple[BatchKey, MiniBatch]:
        """Return the next batch; see `BatchSource`."""
        self._begun_s = self._begun_s or time.perf_counter()
        self._send()
        self._tell_pace()
        if not self._pending:
            raise ValueError("no batch is requested: call request(key) before ready()")
        key, future = self._pending.popleft()
        if self._told < self._taken and not future.done():
            self._told = self._taken
            self._link.tell("took", self._iteration, self._taken)
        self._taken += 1
        begun = time.perf_counter()
        batch = future.result()
        self._waited_s += time.perf_counter() - begun
        if batch is None:
            raise batch_error(key, "the coordinator of this node no longer knows it: resume from the last checkpoint")
        self.num_batches += 1
        return key, batch

    def expect_part(self, part: int) -> None:
        """Have the part's machine read it, where there is space."""
        if part != self._expected and self._pending and self._end is not None:
            self._expected = part
            self._link.tell("expect", part, self._pending[-1][0])

    def forget(self) -> None:
        """Drop what was requested and not taken; the workers stay."""
        self._unsent.clear()
        if self._begun_s is not None:
            self._ran_s, self._begun_s = self._ran_s + time.perf_counter() - self._begun_s, None
        unpacker, self._unpacker = self._unpacker, None
        if unpacker is not None:
            self._link.ask("forget")
            self._iteration += 1
            stop(unpacker)
            self._report()
        self._pending.clear()
        self._taken = self._told = 0
        self._last, self._expected = (None, None), None

    def close(self) -> None:
        """Forget, and end what this rank started; a request starts again."""
        self.forget()
        if self._end is not None:
            self._end()
            self._end = None

    @property
    def batches_ahead(self) -> int:
        """Batches that this rank asks for ahead: more than its settings say where prepared workers are more."""
        settings = self._settings
        if settings.prefetch_batches is not None:
            return settings.prefetch_batches
        share = -(-self.num_workers // self._place.num_local)  # of the workers, which other ranks keep busy too
        return max(settings.batches_ahead, settings.batches_per_group * GROUPS_AT_WORKER * share)

    @property
    def parts_further(self) -> int:
        """Parts that may be open besides those that the walk needs: each machine but one makes batches of another."""
        return self._link.num_machines - 1

    @property
    def num_workers(self) -> int:
        """Workers that the coordinator has, whether they answer or not."""
        return self._link.num_workers

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that answer now."""
        return self.report().get("pids", [])

    def report(self) -> dict:
        """Return what the coordinator counts: rows and bytes sent, reads of parts by each worker, credits held."""
        return (self._link.ask("report", named=False) or {}) if self._end is not None else {}

    def _tell_pace(self) -> None:
        now = time.perf_counter()
        if now > self._paced_s + _PACE_S:
            self._paced_s = now
            self._link.tell("pace", self.num_batches, self._ran_s + now - self._begun_s - self._waited_s)

    def _send(self) -> None:
        if not self._unsent:
            return
        if self._unpacker is None:
            self._unpacker = ThreadPoolExecutor(1, thread_name_prefix=f"{THREAD_NAME}-ray")
        first, taken = self._taken + len(self._pending), self._taken
        self._told = taken
        for place, key in enumerate(self._unsent, first):
            answer = self._link.tell("take", self._iteration, place, first, self._unsent, taken)
            self._pending.append((key, self._unpacker.submit(self._unpack, key, self._iteration, place, answer)))
        self._unsent = []

    def _unpack(self, key: BatchKey, iteration: int, place: int, answer) -> MiniBatch | None:
        """Return the batch of an answer, in memory of this process."""
        ray = import_ray()
        for _ in range(3):
            found: Answer | None = self._link.wait(answer)
            if found is None:
                return None
            for notice in found.notices:
                record(**notice)
            if found.error is not None:
                raise GNNScaleError(found.error)
            try:
                payload = self._payload(found.payload[0])
            except (ray.exceptions.ObjectLostError, ray.exceptions.RayActorError):
                answer = self._link.tell("again", iteration, place)
                continue
            except ray.exceptions.GetTimeoutError:
                raise batch_error(
                    key, f"it did not arrive from its worker within timeout_s={self._settings.timeout_s:g} s: is its "
                    "machine reachable? Raise source.timeout_s where it is slow, or resume from the last checkpoint"
                ) from None  # fmt: skip
            except ray.exceptions.RayError as error:
                raise batch_error(
                    key, f"{one_line(error)}: source.store_bytes={self._settings.store_bytes} caps waiting batches"
                ) from None
            self._count(found.header)
            self._link.num_workers, self._link.num_machines = found.num_workers, found.num_machines
            return unpack_one(payload.group, found.number, payload.rows, self._maker.pool.take, self._code)
        raise batch_error(key, "it was lost three times on its way from the worker: is a machine of the cluster full?")

    def _payload(self, ref) -> GroupPayload:
        if isinstance(ref, GroupPayload):
            return ref
        if self._last[0] != ref:
            self._last = (ref, import_ray().get(ref, timeout=self._settings.timeout_s))
        return self._last[1]

    def _count(self, header) -> None:
        if header is not None:
            self.num_groups += 1
            self.bytes_received += header.row_bytes + header.group_bytes
            self.row_bytes += header.row_bytes
            self.rows_asked += header.num_union
            self.rows_received += header.rows_sent

    def _report(self) -> None:
        names = ("num_batches", "num_groups", "bytes_received", "row_bytes", "rows_asked", "rows_received")
        counts = {name: getattr(self, name) for name in names}
        if self._place.local_rank == 0:  # for all ranks of the machine
            told = self._link.ask("counts", named=False) or {}
            self._check_reads(told.pop("parts", 0), told.get("parts_read", 0))
            counts |= told
        times = {"seconds": self._ran_s, "waited_s": self._waited_s}
        record("preparation", rank=self._place.rank, node=self._place.node, **counts, **times)

    def _check_reads(self, parts: int, reads: int) -> None:
        """Warn once where an epoch read parts more often than there are: they do not fit where they are prepared."""
        found, self._reads = reads - self._reads, reads
        if found > _READS_TOO_MANY * parts > 0 and not self._warned:
            self._warned = True
            warnings.warn(
                f"an epoch of {parts} parts read parts {found} times: raise source.worker_memory_bytes="
                f"{self._settings.worker_memory_bytes}, so that a part fits for each worker, or take smaller parts",
                stacklevel=2,
            )


CACHE_POLICIES = ("lru", "sieve")


@dataclass(frozen=True)
class RayWorkers:
    """Workers that are Ray actors, on this machine or on a cluster; see `RaySource`.

    Workers open the store by its path. On a cluster it must be at the same path on every machine.

    Args:
        address: "host:port" of a Ray cluster, or "auto" for the cluster that this machine belongs to. If
            `gnnscale prepare` has started workers there, they are used. None: Ray is started on this machine and ends
            with the training.
        num_workers: Number of workers to start where none are running, >= 1. "auto": as many as keep the trainers busy,
            measured while training by the time that batches take to prepare and to train; within `worker_bounds`.
        worker_bounds: Fewest and most workers of "auto".
        label: Resource of Ray that a machine must have to prepare batches, for example "prepare" where the machine was
            started with `ray start --resources='{"prepare": 1}'`. None: any machine of the cluster.
        worker_memory_bytes: What each worker adds to the cap on the bytes of parts that its machine holds for all its
            workers. Parts beyond it are swapped out, and a batch mixes no more of them than it holds. Where workers
            ask owners, nothing is swapped: a machine holds the rows of the first of its parts, as many as fit, and
            reads those of the others from the files each time. None: a machine holds every part that it is assigned.
        batches_per_group: Batches of a trainer node that are made in one request and share their rows, >= 1.
        cache_rows: Feature rows, of any node type and width, that each trainer node keeps, so that they are not sent
            again; 0: none.
        cache_policy: Which cached rows are dropped first.
        credits: Requests of a trainer node that may be under way or ready at a time, >= 1; None: two per worker, times
            the chunks of a batch where each is made by the machine that holds its seeds.
        store_bytes: Shared memory for batches of a Ray that is started here. This and the other sizes: bytes, or a
            text such as "1GiB".
        timeout_s: How long an address, the coordinator, all workers together, or a batch on its way may stay silent,
            seconds. A worker that is silent for as long loses its batches to the others.
        slow_s: Least time before a slow group is given to a second worker as well, seconds. A group is slow once it
            takes four times as long as any before; until the first group is done, six times slow_s.
        prefetch_batches: Batches of a rank that are kept ready or under way, >= 1; None: two groups for each worker,
            one that it makes and one that it goes on with.

    Attributes:
        owners: Whom the workers ask for rows, see `asking`; None: a worker samples from the parts that it holds.

    Raises:
        ValueError: an argument is out of range.
    """

    address: str | None = None
    num_workers: int | str = 2
    worker_bounds: Sequence[int] = (1, 16)
    label: str | None = None
    worker_memory_bytes: int | str | None = None
    batches_per_group: int = 1
    cache_rows: int = 0
    cache_policy: str = "lru"
    credits: int | None = None
    store_bytes: int | str = 1 << 30
    timeout_s: float = 60.0
    slow_s: float = SLOW_S
    prefetch_batches: int | None = None
    owners: OwnerReads | None = field(default=None, init=False)
    in_process = False

    def __post_init__(self):
        read_sizes(self, "worker_memory_bytes", "store_bytes")
        if self.num_workers != "auto":
            check_count("num_workers", self.num_workers)
        bounds = list(self.worker_bounds) if isinstance(self.worker_bounds, Sequence) else []
        if len(bounds) != 2 or not all(map(is_integer, bounds)) or not 1 <= bounds[0] <= bounds[1]:
            told = short(self.worker_bounds)
            raise ValueError(f"worker_bounds must be two integers, 1 <= fewest <= most, got {told}")
        for name in ("batches_per_group", "store_bytes"):
            check_count(name, getattr(self, name))
        for name in ("worker_memory_bytes", "credits", "prefetch_batches"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_integer("cache_rows", self.cache_rows)
        if self.cache_policy not in CACHE_POLICIES:
            raise ValueError(f"cache_policy must be one of {', '.join(CACHE_POLICIES)}, got {short(self.cache_policy)}")
        for name in ("timeout_s", "slow_s"):
            check_seconds(name, getattr(self, name))

    def asking(self, owners: OwnerReads) -> "RayWorkers":
        """Return settings whose workers ask the owners of rows: each machine holds some rows for all its workers.

        Args:
            owners: How many rows machines hold in addition; what it says of a cluster and of caps is said here.

        Raises:
            ValueError: it says more than replicate_bytes.
        """
        if owners != OwnerReads(replicate_bytes=owners.replicate_bytes):
            raise ValueError(
                f"rows={owners}: with source=ray owners take replicate_bytes alone; give source.address, "
                "source.timeout_s and source.worker_memory_bytes"
            )
        made = replace(self)
        object.__setattr__(made, "owners", owners)
        return made

    @property
    def batches_ahead(self) -> int:
        """Batches that are kept ready or under way."""
        return self.prefetch_batches or self.batches_per_group * GROUPS_AT_WORKER * self.least_workers

    @property
    def least_workers(self) -> int:
        """Workers that are started at first."""
        return self.worker_bounds[0] if self.num_workers == "auto" else self.num_workers

    def growth(self, workers: WorkerSettings, place: RankPlace) -> Growth | None:
        """Return how many workers a rank's coordinator keeps; None: another coordinator does, or none."""
        if self.num_workers != "auto" or place.node:
            return None
        return Growth(workers, *self.worker_bounds, place.world_size / place.num_local)

    def for_coordinator(self, shared: bool, prefix: str, growth: Growth | None) -> CoordinatorSettings:
        """Return the settings of a coordinator."""
        return CoordinatorSettings(
            self.batches_per_group,
            self.credits,
            self.timeout_s,
            self.cache_rows,
            self.cache_policy,
            self.slow_s,
            shared,
            prefix,
            growth,
        )

    def connect(self, place) -> Any:
        """Return a function that makes this rank's source; every rank calls it.

        Args:
            place: a `RankPlace`.

        Raises:
            GNNScaleError: Ray is not installed, or the address does not answer.
        """
        if self.address is None:
            ask_for_token()
        import_ray()
        meeting: Any = None
        if place.rank == 0:
            try:
                meeting = self._meet(place)
            except GNNScaleError as error:  # the others must not wait for it
                meeting = str(error)
        meeting = place.share(meeting)
        if isinstance(meeting, str):
            raise GNNScaleError(meeting)
        return RayConnection(self, meeting, place._replace(share=None))

    def _meet(self, place) -> Meeting:
        run = uuid.uuid4().hex[:12]
        if self.address is None:
            if place.world_size > place.num_local:
                raise GNNScaleError(
                    "source=ray without an address starts Ray on one machine, but the ranks are on several: start a "
                    "cluster with `ray start`, and give source.address="
                )
            folder = tempfile.mkdtemp(prefix="gnnscale-ray-") if place.world_size > 1 else None
            return Meeting(run, folder, machine_bytes=self._machine_bytes(1))
        join_ray(self.address, self.timeout_s, self.store_bytes)
        try:
            prepared = workers_named()
            if prepared:
                caps = machine_caps(worker_places(prepared, self.timeout_s))
                return Meeting(run, machine_bytes=None if None in caps.values() else min(caps.values()))
            return Meeting(run, machine_bytes=self._machine_bytes(num_machines(self.label)))
        finally:
            leave_ray()

    def _machine_bytes(self, num_machines: int) -> int | None:
        """Return the cap of the machine that has the fewest of the workers that are started."""
        if self.worker_memory_bytes is None:
            return None
        return max(1, self.least_workers // num_machines) * self.worker_memory_bytes


@dataclass(frozen=True)
class RayConnection:
    """Makes a rank's `RaySource`; attributes are its arguments."""

    settings: RayWorkers
    meeting: Meeting
    place: RankPlace

    @property
    def machine_bytes(self) -> int | None:
        """Cap on the bytes of parts that each machine holds, the least of all; None: there is none."""
        return self.meeting.machine_bytes

    def __call__(self, stage: Callable[[int], StagedPart], maker: BatchMaker) -> RaySource:
        """Return the source."""
        return RaySource(stage, maker, self.settings, self.meeting, self.place)
