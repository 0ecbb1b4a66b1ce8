"""A rank's connection to the coordinator of its node: in this process where the rank is alone there, else an actor."""

import asyncio
import hashlib
import itertools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from ..errors import GNNScaleError
from ..loader.batch_maker import BatchMaker
from ..loader.shared_value import pack
from ..loader.source_settings import RankPlace
from ..loader.staged_part import StagedPart
from ..loader.work_queue import START_LIMIT_S
from ..memory import parse_bytes
from .cluster import (
    PREPARED,
    LocalMeeting,
    Meeting,
    import_ray,
    join_ray,
    leave_ray,
    one_line,
    workers_named,
)
from .held_rows import owned_columns
from .holder import OwnerReads, assign_shards, check_asks_owners, homes_of, store_of
from .messages import CoordinatorSettings, Growth, Setup, Table, WorkerSettings
from .ray_coordinator import Coordinator, start_coordinator
from .ray_worker import start_workers, worker_places

_turns = itertools.count()
_CALL_LIMIT_S = 10.0
_PROBE_S = 2.0


class CoordinatorThread:
    """A coordinator in a thread of this process, for a rank that is alone on its node.

    Args:
        arguments: Arguments of `Coordinator`.
    """

    def __init__(self, *arguments):
        self._loop = asyncio.new_event_loop()
        self._coordinator = Coordinator(*arguments)
        self._thread = threading.Thread(target=self._loop.run_forever, name="gnnscale-hub", daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments) -> Future:
        """Call a method of the coordinator."""
        return asyncio.run_coroutine_threadsafe(getattr(self._coordinator, method)(*arguments), self._loop)

    def wait(self, answer: Future, limit_s: float | None) -> Any:
        """Return what a call returns; TimeoutError: it takes longer."""
        return answer.result(limit_s)

    def end(self) -> None:
        """End the thread."""
        asyncio.run_coroutine_threadsafe(self._coordinator.stop(), self._loop).result(_CALL_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class CoordinatorActor:
    """A coordinator that the ranks of a node share; arguments as for `Coordinator`."""

    def __init__(self, name: str, worker_names: list[str], settings: CoordinatorSettings):
        self._actor, self._timeout_s = start_coordinator(name, worker_names, settings), settings.timeout_s
        self._limit_s = max(START_LIMIT_S, self._timeout_s)  # until it has answered

    def call(self, method: str, *arguments) -> Any:
        return getattr(self._actor, method).remote(*arguments)

    def wait(self, answer: Any, limit_s: float | None) -> Any:
        ray = import_ray()
        while limit_s is None and not ray.wait([answer], timeout=_PROBE_S)[0]:
            ray.get(self._actor.ping.remote(), timeout=max(0.1, self._limit_s - _PROBE_S))
            self._limit_s = self._timeout_s
        found = ray.get(answer, timeout=self._limit_s if limit_s is None else limit_s)
        self._limit_s = self._timeout_s
        return found

    def end(self) -> None:
        import_ray().kill(self._actor)


class LinkSettings(Protocol):
    """The settings of workers that a rank's connection needs; see `RayWorkers`."""

    address: str | None
    label: str | None
    owners: OwnerReads | None
    worker_memory_bytes: int | None
    store_bytes: int
    timeout_s: float
    least_workers: int

    def growth(self, workers: WorkerSettings, place: RankPlace) -> Growth | None:
        """Return how many workers a rank's coordinator keeps; None: another coordinator does, or none."""

    def for_coordinator(self, shared: bool, prefix: str, growth: Growth | None) -> CoordinatorSettings:
        """Return the settings of a coordinator."""


class Link:
    """A rank's connection to its coordinator; separate from `RaySource`, so that a forgotten source is closed.

    Args:
        settings, meeting, place: see `RayWorkers.connect`.
    """

    def __init__(self, settings: LinkSettings, meeting: Meeting, place: RankPlace):
        self._settings, self._place, self._meeting = settings, place, meeting
        self._rank, self._owner = f"rank{place.rank}-{next(_turns)}", os.getpid()
        self._local: LocalMeeting | None = None
        self._coordinator: CoordinatorThread | CoordinatorActor | None = None
        self._setup: Setup | None = None
        self._workers: list = []
        self._open = self._silent = False
        self.num_workers, self.num_machines = 0, 1  # that the coordinator has

    def open(self, setup: Callable[[list[str]], Setup]) -> None:
        """Connect to Ray, start workers and the coordinator where they are missing, and introduce this rank.

        Raises:
            GNNScaleError: Ray does not answer, or the coordinator does not start.
        """
        settings, meeting = self._settings, self._meeting
        meeting.turn += 1
        if meeting.folder is None:
            join_ray(settings.address, settings.timeout_s, settings.store_bytes)
        else:
            self._local = LocalMeeting(meeting.folder, self._place.rank, meeting.turn)
            self._local.join(settings.timeout_s, settings.store_bytes)
        self._open = True
        names, prefix = workers_named() if settings.address is not None else [], PREPARED
        group = "prepared" if names else f"{meeting.run}-{meeting.turn}"
        cpus = 0 if settings.address is None else 1
        workers = WorkerSettings(group, cpus, settings.worker_memory_bytes, settings.label)
        if not names:
            prefix = f"{group}-worker-"
            names = [f"{prefix}{number}" for number in range(settings.least_workers)]
            if self._place.rank == 0:
                self._workers = start_workers(names, workers)
        shared = self._place.num_local > 1
        make_coordinator = CoordinatorActor if shared else CoordinatorThread
        name = f"{meeting.run}-{meeting.turn}-hub-{self._place.node}"
        self._silent = False
        growth = settings.growth(workers, self._place) if prefix != PREPARED else None
        self._coordinator, self.num_workers = (
            make_coordinator(name, names, settings.for_coordinator(shared, prefix, growth)),
            len(names),
        )
        self._setup = setup(names)
        self.ask("join", self._setup, limit_s=None)

    def tell(self, method: str, *arguments) -> Any:
        """Call a method of the coordinator for this rank; return what to wait on."""
        return self._coordinator.call(method, self._rank, *arguments)

    def ask(self, method: str, *arguments, named: bool = True, limit_s: float | None = _CALL_LIMIT_S) -> Any:
        """Call the coordinator and return its answer; None where it has ended, unless the call has no limit."""
        ray = import_ray()
        if self._silent:
            return None
        arguments = (self._rank, *arguments) if named else arguments
        try:
            return self._coordinator.wait(self._coordinator.call(method, *arguments), limit_s)
        except (ray.exceptions.RayError, TimeoutError, GNNScaleError) as error:
            if limit_s is None:
                raise GNNScaleError(
                    f"the coordinator of node {self._place.node} did not start: {one_line(error)}"
                ) from None
            return None

    def wait(self, answer: Any) -> Any:
        """Return what a call of the coordinator returns.

        Raises:
            GNNScaleError: the coordinator ended, or does not answer.
        """
        exceptions = import_ray().exceptions
        try:
            return self._coordinator.wait(answer, None)
        except exceptions.GetTimeoutError:
            self._silent = True
            raise GNNScaleError(
                f"the coordinator of node {self._place.node} has not answered for "
                f"timeout_s={self._settings.timeout_s:g} s: was it stopped? "
                "Raise source.timeout_s where the machine is slow, or resume from the last checkpoint"
            ) from None
        except exceptions.RayError as error:
            raise GNNScaleError(
                f"the coordinator of node {self._place.node} has ended ({one_line(error)}): memory may be short "
                "on this machine; resume from the last checkpoint"
            ) from None

    def close(self) -> None:
        """Leave the coordinator; a node's last rank ends it, and rank 0's machine ends the workers that it started."""
        if not self._open or os.getpid() != self._owner:
            return
        self._open = False
        try:
            if import_ray().is_initialized() and self._coordinator is not None:
                self._leave_coordinator()
        finally:
            self._coordinator, self._setup, self._workers = None, None, []
            leave_ray() if self._local is None else self._local.leave()

    def _leave_coordinator(self) -> None:
        left = self.ask("leave")
        if not left or self._place.num_local == 1:
            for worker in self._workers:
                import_ray().kill(worker)
        if not left:
            with suppress(TimeoutError):  # its thread is a daemon's
                self._coordinator.end()


def setup_of(stage: Callable[[int], StagedPart], maker: BatchMaker, settings: LinkSettings) -> Callable[..., Setup]:
    """Return a function that makes a rank's `Setup` from the names of the workers, once Ray is there.

    Raises:
        GNNScaleError: it cannot be sent to a worker.
    """
    try:
        packed = pack((stage, maker))
    except Exception as error:
        raise GNNScaleError(
            f"what prepares batches cannot be sent to workers: {error}: use classes and functions of modules"
        ) from error
    digest = hashlib.blake2b(packed.meta, digest_size=12)
    for view in packed.views:
        digest.update(view)
    parts, is_whole = tuple(sorted(int(part) for part in stage.targets)), stage.is_whole
    table, order = table_of(maker.table), maker.order

    def make(names: list[str]) -> Setup:
        store, shard_map, homes = store_of(stage), None, None
        if settings.owners is not None and store is not None:
            check_asks_owners(stage.sampler, crosses_parts=is_whole)
            places = worker_places(names, max(START_LIMIT_S, settings.timeout_s))
            replicate = parse_bytes(settings.owners.replicate_bytes, "replicate_bytes")
            columns = owned_columns(stage.sampler, store, "edge_attr" in stage.edges)
            shard_map = assign_shards(store, places, replicate, maker.gathers, stage.targets.values(), columns)
            homes = homes_of(shard_map, store.part_offsets, stage.targets)
        contents = import_ray().put((packed.meta, [np.frombuffer(view, np.uint8) for view in packed.views]))
        open_parts = 1 if order.num_ranks is None else order.parts_open - 1
        paths, chunks = tuple(filter(None, sys.path)), open_parts if homes else 1
        name, sent = digest.hexdigest(), [contents]
        made_for = (1, 0) if store is None else (store.num_machines, store.num_parts)
        told = (name, sent, parts, order.passes, table, paths, shard_map, is_whole, homes, chunks, open_parts)
        return Setup(*told, order.unions, made_for)

    return make


def table_of(features) -> Table | None:
    """Return what a coordinator must know of a feature table."""
    if features is None:
        return None
    name = hashlib.blake2b(pack(features).meta, digest_size=12).hexdigest()
    if features.by_node_type:
        return Table(name, features.num_rows, 0, "", node_types=tuple(table_of(table) for table in features.tables))
    width = int(np.diff(features.indptr).max(initial=0)) if features.is_sparse else None
    return Table(name, features.num_rows, features.dim, np.dtype(features.dtype).str, width)
