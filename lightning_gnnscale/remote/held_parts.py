"""Parts of a store in the memory of a machine: read once, mapped by all its workers, swapped under one cap.

A holder is an actor of Ray's, one on a machine for the workers that were started together. It reads a part into memory
that has no name, which a worker maps for as long as it needs the part. `WorkerParts` is what a worker sees. No worker
reports when it is done with a part: where the cap asks for space, the holder asks workers that map one to release it.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Any, NamedTuple

import numpy as np

from ..errors import GNNScaleError
from ..loader.shared_value import Handle, SharedValue, pack
from ..loader.staged_part import PartStager, StagedPart
from ..loader.work_queue import START_LIMIT_S
from ..memory import return_freed_memory
from ..partition_store import CSRFeatures, DenseFeatures, SparseRows, WholeGraph, features_of_part
from ..partition_store.features import Column, as_stored, merge_rows
from ..partition_store.typed_features import TypedFeatures, TypedRows, merge_node_types
from .cluster import NAMESPACE, WORKER_GROUP, import_ray, one_line
from .messages import GroupRequest, Setup, Unit

_THREADS = 64  # workers of a machine that may ask at a time
_RETRY_S = 0.05
_LET_GO_S = 2.0  # a worker that is silent for longer has the part in use
_SPACE_LIMIT_S = 120.0
_START_RETRY_S = 0.3

PartName = tuple[str, Unit]  # a setup's name, and a part or a union of parts


@dataclass(frozen=True)
class HeldPart:
    """A part in memory.

    Attributes:
        staged: The part that batches are sampled from.
        rows: Feature table of its nodes by local id; for a whole graph, the store's own table by store id; None: no
            features.
    """

    staged: StagedPart
    rows: Any

    def locate(self, nodes: np.ndarray) -> np.ndarray:
        """Return (num,) int64: where in `rows` each store id is, -1 for a node that this part does not see."""
        graph = self.staged.graph
        if isinstance(graph, WholeGraph):
            return nodes.astype(np.int64, copy=False)
        places = nodes.astype(np.int64) - graph.core_start
        beyond = np.flatnonzero((places < 0) | (places >= graph.num_core))
        if len(beyond):
            at = np.searchsorted(graph.halo_nodes, nodes[beyond])
            found = at < graph.num_halo
            found[found] = graph.halo_nodes[at[found]] == nodes[beyond][found]
            places[beyond] = np.where(found, graph.num_core + at, -1)
        return places


def hold_part(staged: StagedPart, features: Column | None) -> HeldPart:
    """Return a part with the feature rows of its nodes in memory, core and halo, in the stored dtype."""
    if features is None or isinstance(staged.graph, WholeGraph):
        return HeldPart(staged, features)
    graph = staged.graph
    rows = features_of_part(features, graph.part).read(graph.nodes)
    if isinstance(features, TypedFeatures):
        core = np.arange(graph.core_start, graph.core_start + graph.num_core)
        return HeldPart(staged, features.holding(rows, features.node_types.among(core, graph.halo_nodes)))
    if isinstance(rows, SparseRows):
        return HeldPart(staged, CSRFeatures(rows.indptr, rows.indices, rows.data, rows.dim))
    return HeldPart(staged, DenseFeatures(rows))


def part_bytes(stage: PartStager, parts: Collection[int], features: Column | None) -> int:
    """Return the bytes that a machine holds of the largest of some parts. Cost: reads them, one after the other."""
    table = None if features is None else as_stored(features)[0]
    return max(pack(hold_part(stage(part), table)).num_bytes for part in parts)


def machine_caps(places: Collection[tuple[str, int | None]]) -> dict[str, int | None]:
    """Return each machine's cap on the bytes of parts: what its workers add; None: one of them adds no cap.

    Args:
        places: Ray's id of the machine of each worker, and what it adds.
    """
    caps: dict[str, int | None] = {}
    for machine, added in places:
        cap = caps.get(machine, 0)
        caps[machine] = None if None in (cap, added) else cap + added
    return caps


def gather_union(nodes: np.ndarray, parts: list[HeldPart]) -> np.ndarray | SparseRows | TypedRows | None:
    """Return the feature rows of nodes that are in any of some parts, in order; None without features.

    Args:
        nodes: (num,) store ids.
        parts: at least one; each node is in one of them.

    Returns:
        (num, dim) rows, sparse rows, or rows by node type, bit for bit what is stored.
    """
    table = parts[0].rows
    if table is None:
        return None
    if len(parts) == 1 or isinstance(parts[0].staged.graph, WholeGraph):
        return table.read(parts[0].locate(nodes))
    if isinstance(table, TypedFeatures):
        return merge_node_types(*_gather_blocks(nodes, parts))
    if table.is_sparse:
        return merge_rows(*_gather_blocks(nodes, parts))
    out = np.empty((len(nodes), table.dim), table.dtype)
    left = np.arange(len(nodes))
    for part in parts:
        places = part.locate(nodes[left])
        found = places >= 0
        out[left[found]] = part.rows.read(places[found])
        left = left[~found]
    return out


def _gather_blocks(nodes: np.ndarray, parts: list[HeldPart]) -> tuple[list, list[np.ndarray]]:
    """Return the rows that each part has, and where they are among the nodes."""
    blocks, order, left = [], [], np.arange(len(nodes))
    for part in parts:
        places = part.locate(nodes[left])
        found = places >= 0
        blocks.append(part.rows.read(places[found]))
        order.append(left[found])
        left = left[~found]
    return blocks, order


class Member(NamedTuple):
    """A worker as its machine's holder knows it.

    Attributes:
        pid: Its process id.
        memory_bytes: What it adds to the cap of its machine, bytes; None: the machine has no cap.
        let_go: Maps a part's name to whether the worker has released it; or the worker's actor, which has this method.
    """

    pid: int
    memory_bytes: int | None
    let_go: Any


class Opened(NamedTuple):
    """A part that a holder has in memory.

    Attributes:
        handle: Maps the part, as long as the worker that asked does not release it.
        is_new: Whether it was read since another worker asked for it.
    """

    handle: Handle
    is_new: bool


@dataclass(eq=False)
class _CachedPart:
    """A part on its way into memory, or there: the `SharedValue` of a `HeldPart`, and the workers that may map it."""

    value: Future = field(default_factory=Future)
    members: dict[int, Member] = field(default_factory=dict)
    is_new: bool = True

    @property
    def is_opened(self) -> bool:
        """Whether it was read, and not only ahead of its use."""
        return self.value.done() and not self.is_new


class _Wanted(NamedTuple):
    """What a coordinator wanted of a setup at its latest request: see `GroupRequest`."""

    number: int
    now: tuple[PartName, ...]
    coming: set[PartName]


class PartHolder:
    """The parts that a machine holds for its workers; an actor of Ray's, or a plain object. Many threads may ask.

    A part is read by the first who asks, the others wait for it. While it is read, a second copy of it is in memory.
    Where the workers have a cap, parts that no batch is wanted of make space before others, the least recently opened
    first. Without a cap the parts stay that belong to the machine in an epoch, and those that batches are wanted of.
    """

    def __init__(self):
        self._changed = Condition()
        self._parts: dict[PartName, _CachedPart] = {}
        self._setups: dict[str, tuple[PartStager, Column | None]] = {}
        self._users: dict[str, set[str]] = {}  # coordinators by setup
        self._wanted: dict[tuple[str, str], _Wanted] = {}  # by coordinator and setup
        self._members: dict[int, Member] = {}
        self._sizes: dict[PartName, int] = {}
        self._held = 0  # bytes, those included that are about to be read
        self._most_held = 0
        self._reads: Counter[int] = Counter()

    def open(self, member: Member, part: Unit, request: GroupRequest) -> Opened:
        """Return a part for a worker, read now unless it is held.

        Args:
            member: The worker. From now on it counts as holding the part.
            part: Part id.
            request: What the worker needs the part for.

        Raises:
            GNNScaleError: it does not fit under the cap.
            Exception: what reading it raises.
        """
        name = (request.setup.name, part)
        with self._changed:
            self._members[member.pid] = member
            self._users.setdefault(request.setup.name, set()).add(request.coordinator)
            self._note_wanted(request)
            self._drop_foreign(request.setup.name, {*request.owned, part})
            cached = self._parts.pop(name, None)
            reads = cached is None
            cached = self._parts[name] = cached or _CachedPart()  # last: the least recently opened one goes first
            cached.members[member.pid] = member
        if reads:
            self._read(name, cached, request.setup)
        value = cached.value.result()
        with self._changed:
            is_new, cached.is_new = cached.is_new, False
        return Opened(value.handle, is_new)

    def expect(self, part: Unit, setup: Setup) -> None:
        """Read a part that is wanted soon, where it drives out none: under a cap, one whose size is known."""
        name = (setup.name, part)
        with self._changed:
            size, cap = self._sizes.get(name, math.inf), self._cap
            if name in self._parts or setup.name not in self._users or (cap is not None and self._held + size > cap):
                return
            cached = self._parts[name] = _CachedPart()
        with suppress(Exception):  # a worker that needs it reads it again, and gets the error
            self._read(name, cached, setup)

    def leave(self, coordinator: str, setups: Collection[str]) -> None:
        """Forget setups that a coordinator is done with, where no other has them."""
        with self._changed:
            for setup in setups:
                self._wanted.pop((coordinator, setup), None)
                self._users.get(setup, set()).discard(coordinator)
                if not self._users.get(setup):
                    self._users.pop(setup, None)
                    self._setups.pop(setup, None)
                    self._drop_foreign(setup, ())

    def report(self) -> dict:
        """Return the process id, held bytes, the most that they have been, and how often each part was read."""
        with self._changed:
            held = {"held_bytes": self._held, "most_held_bytes": self._most_held}
            return {"pid": os.getpid(), **held, "reads": dict(self._reads)}

    @property
    def _cap(self) -> int | None:
        caps = [member.memory_bytes for member in self._members.values()]
        return None if None in caps or not caps else sum(caps)

    def _read(self, name: PartName, cached: _CachedPart, setup: Setup) -> None:
        reserved = 0
        try:
            with self._changed:
                expected = self._sizes.get(name, max(self._sizes.values(), default=0))
                self._make_space(name, expected)
                reserved = expected
                self._hold(reserved)
            stage, features = self._opened(setup)
            held = hold_part(stage.loaded(name[1]) if stage.is_whole else stage(name[1]), features)
            value = SharedValue(held, f"part {name[1]}")
            del held
            return_freed_memory()
            with self._changed:
                size = self._sizes[name] = value.handle.num_bytes
                self._hold(-reserved)
                reserved = 0
                self._make_space(name, size)
                self._hold(size)
                self._reads[name[1]] += 1
                cached.value.set_result(value)
        except BaseException as error:
            with self._changed:
                self._hold(-reserved)
                if self._parts.get(name) is cached:
                    del self._parts[name]
            cached.value.set_exception(error)
        cached.value.result()

    def _hold(self, num_bytes: int) -> None:
        self._held += num_bytes
        self._most_held = max(self._most_held, self._held)

    def _make_space(self, name: PartName, num_bytes: int) -> None:
        """Free parts until a part fits under the cap; waits for those in use. Holds the lock except while it waits.

        Raises:
            GNNScaleError: it is larger than the cap, or nothing is released.
        """
        deadline = time.monotonic() + _SPACE_LIMIT_S
        while (cap := self._cap) is not None and self._held + num_bytes > cap:
            if num_bytes > cap:
                count = len(self._members)
                raise GNNScaleError(
                    f"part {name[1]} needs {num_bytes} bytes, worker_memory_bytes={cap // count} caps this machine at "
                    f"{cap}: set worker_memory_bytes={-(-num_bytes // count)} or more, or cut the graph into more parts"
                )
            others = [other for other in self._parts if other != name and self._parts[other].is_opened]
            coming = {other for wanted in self._wanted.values() for other in wanted.coming}
            turns = {other: turn for wanted in self._wanted.values() for turn, other in enumerate(wanted.now)}
            done = [other for other in others if other not in coming]
            idle = [other for other in done if other not in turns]
            # Of parts that are needed for a few batches more, the one that is done first is waited for, a while.
            hurries = time.monotonic() > deadline - _SPACE_LIMIT_S / 2
            first = sorted(done, key=lambda other: turns.get(other, -1))[:1]
            spared = (not hurries and (idle or first)) or [other for other in self._parts if other != name]
            if any(self._let_go(other) for other in spared):
                continue
            if time.monotonic() > deadline:
                raise GNNScaleError(
                    f"part {name[1]} finds no space under {cap} bytes within {_SPACE_LIMIT_S:g} s: workers of this "
                    "machine have all other parts in use; raise worker_memory_bytes"
                )
            self._changed.wait(_RETRY_S)

    def _note_wanted(self, request: GroupRequest) -> None:
        """Keep what the latest request says; one that arrives after it tells of an earlier time."""
        setup = request.setup.name
        known = self._wanted.get((request.coordinator, setup))
        if known is None or known.number <= request.number:
            now, coming = (tuple((setup, part) for part in parts) for parts in (request.wanted, request.coming))
            self._wanted[request.coordinator, setup] = _Wanted(request.number, now, {*coming})

    def _drop_foreign(self, setup: str, owned: Collection[int]) -> None:
        """Free the parts of a setup that belong to other machines now, where they can be spared."""
        wanted = {name for one in self._wanted.values() for name in one.now}
        for name in [name for name in self._parts if name[0] == setup and name[1] not in owned and name not in wanted]:
            self._let_go(name)

    def _let_go(self, name: PartName) -> bool:
        """Free a part unless a worker uses it; return whether it is gone."""
        cached = self._parts[name]
        if not cached.value.done():
            return False
        for pid, member in list(cached.members.items()):
            if not self._asks_to_let_go(member, name):
                return False
            del cached.members[pid]
        del self._parts[name]
        value = cached.value.result()
        self._hold(-value.handle.num_bytes)
        value.close()
        return True

    def _asks_to_let_go(self, member: Member, name: PartName) -> bool:
        if callable(member.let_go):
            return member.let_go(name)
        ray = import_ray()
        try:
            asked = member.let_go.let_go.options(concurrency_group=WORKER_GROUP).remote(name)
            return ray.get(asked, timeout=_LET_GO_S)
        except ray.exceptions.GetTimeoutError:
            return False
        except ray.exceptions.RayError:  # it has ended; Ray starts another instead
            self._members.pop(member.pid, None)
            return True

    def _opened(self, setup: Setup) -> tuple[PartStager, Column | None]:
        if setup.name not in self._setups:
            stage, maker = setup.open()
            self._setups[setup.name] = stage, maker.table
        return self._setups[setup.name]


def holder_of_parts(group: str) -> Any:
    """Return the actor that holds parts for a group of workers on this machine, started by the first who asks."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = import_ray()
    node = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=_THREADS, scheduling_strategy=here)(PartHolder)
    return actor.options(name=f"parts-{group}-{node}", namespace=NAMESPACE, get_if_exists=True).remote()


class WorkerParts:
    """The parts that a worker has mapped from the holder of its machine; one thread gets them, others may release them.

    Args:
        member: The worker, as the holder knows it.
        group: Name of the workers that share a holder; None: the holder is an object of this process.

    Attributes:
        reads: How often each part was read for this worker.
    """

    def __init__(self, member: Member, group: str | None = None):
        self._member, self._group = member, group
        self._holder: Any = PartHolder() if group is None else None
        self._mapped: dict[PartName, HeldPart] = {}
        self._in_use: set[PartName] = set()
        self._holder_pid: int | None = None
        self._lock = Lock()
        self.reads: Counter[int] = Counter()

    def get(self, part: Unit, request: GroupRequest, stage: PartStager, features: Column | None) -> HeldPart:
        """Return a part; it stays until `release`.

        Args:
            part: Part id.
            request: What it is needed for.
            stage: Makes a part of the whole graph ready, which is held once for all of them.
            features: The whole graph's.

        Raises:
            GNNScaleError: no holder has it within a few tries, or it does not fit under the cap.
            Exception: what reading it raised.
        """
        setup = request.setup
        name = (setup.name, part)
        with self._lock:
            self._in_use.add(name)
            if name in self._mapped:
                return self._mapped[name]
        if setup.is_whole:
            loaded = self._open(setup.parts[0], request).staged
            held = HeldPart(stage.prepared(loaded, part), features)
        else:
            held = self._open(part, request)
        with self._lock:
            self._mapped[name] = held
        return held

    def release(self) -> None:
        """Note that no part is in use any more."""
        with self._lock:
            self._in_use.clear()

    def let_go(self, name: PartName) -> bool:
        """Unmap a part; return whether this worker has released it."""
        with self._lock:
            if name in self._in_use:
                return False
            self._mapped.pop(name, None)
            return True

    def expect(self, part: Unit, setup: Setup) -> None:
        """Have a part read ahead; returns at once."""
        if not setup.is_whole and self._group is not None:
            self._handle().expect.remote(part, setup)

    def leave(self, coordinator: str, setups: Collection[str]) -> None:
        """Forget setups that a coordinator is done with."""
        with self._lock:
            self._mapped = {name: held for name, held in self._mapped.items() if name[0] not in setups}
        if self._group is None:
            self._holder.leave(coordinator, setups)
        elif self._holder is not None:
            self._holder.leave.remote(coordinator, setups)

    def report(self) -> dict:
        """Return what the holder reports; empty where it was not asked for a part yet, or is being started again."""
        if self._group is None:
            return self._holder.report()
        ray, holder = import_ray(), self._holder
        with suppress(ray.exceptions.RayError):
            return ray.get(holder.report.remote(), timeout=_LET_GO_S) if holder is not None else {}
        return {}

    def _handle(self) -> Any:
        if self._holder is None:
            self._holder = holder_of_parts(self._group)
        return self._holder

    def _open(self, part: Unit, request: GroupRequest) -> HeldPart:
        """Map a part; asks again where the holder ended meanwhile."""
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            opened = None
            try:
                opened = self._asked(part, request)
                held = opened.handle.open()
            except Exception as error:
                if not (self._has_ended(error) if opened is None else isinstance(error, OSError)):
                    raise
                if time.monotonic() > deadline:
                    raise GNNScaleError(
                        f"the process that holds this machine's parts does not stay ({one_line(error)}): memory may be "
                        "short, set worker_memory_bytes"
                    ) from None
                self._holder = self._holder if self._group is None else None
                time.sleep(_START_RETRY_S)
                continue
            with self._lock:
                if self._holder_pid not in (None, opened.handle.pid):
                    # What the one before held is in no count.
                    self._mapped = {name: one for name, one in self._mapped.items() if name in self._in_use}
                self._holder_pid = opened.handle.pid
            self.reads[part] += opened.is_new
            return held

    def _has_ended(self, error: Exception) -> bool:
        return self._group is not None and isinstance(error, import_ray().exceptions.RayActorError)

    def _asked(self, part: Unit, request: GroupRequest) -> Opened:
        if self._group is None:
            return self._holder.open(self._member, part, request)
        ray = import_ray()
        try:
            return ray.get(self._handle().open.remote(self._member, part, request))
        except ray.exceptions.RayTaskError as error:
            raise (error.cause or error) from None
