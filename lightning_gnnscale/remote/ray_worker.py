"""A worker of the preparation layer: holds parts, makes groups of batches, sends the rows that are asked for."""

import os
import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
import torch

from ..errors import GNNScaleError
from ..loader.batch_builder import BatchMaker
from ..loader.batch_source import BatchKey
from ..loader.shared_value import pack
from ..loader.staged_part import StagedPart
from ..partition_store import CSRFeatures, DenseFeatures, SparseRows, WholeGraph, features_of_part
from ..partition_store.features import merge_rows
from .batch_group import pack_group
from .cluster import NAMESPACE, WORKER_GROUP, import_ray, worker_handle
from .holder import HeldGraph, store_of
from .messages import GroupHeader, GroupPayload, GroupRequest, Setup
from .versioned_cache import WorkerView


@dataclass(frozen=True)
class HeldPart:
    """A part in the memory of a worker.

    Attributes:
        staged: The part that batches are drawn from.
        rows: Feature table of its nodes by local id; for a whole graph, the store's own table by store id; None: no
            features.
        num_bytes: Memory that the part takes, bytes; arrays mapped from files do not count.
    """

    staged: StagedPart
    rows: Any
    num_bytes: int

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


class WorkerParts:
    """Parts by setup and id; the least recently used one makes room, those that belong to other workers before it.

    May be used by several threads: a part is read by the one that asks first, the others wait for it.

    Args:
        max_bytes: most bytes held, or None: as many parts as the worker is assigned.

    Attributes:
        reads: (setup, part) to how often it was read.
        held_bytes: now.
    """

    def __init__(self, max_bytes: int | None = None):
        self.max_bytes, self.held_bytes = max_bytes, 0
        self.reads: Counter[tuple[str, int]] = Counter()
        self._parts: dict[tuple[str, int], Future] = {}
        self._largest, self._lock = 0, Lock()

    def get(
        self, setup: str, part: int, stage: Callable[[int], StagedPart], features, owned: Collection[int]
    ) -> HeldPart:
        """Return a part, read now unless it is held.

        Args:
            setup: what names `stage` and `features`.
            part: its id.
            stage: reads a part.
            features: table by store id, or None.
            owned: parts of this setup that the worker is assigned.

        Raises:
            GNNScaleError: it does not fit under `max_bytes` alone.
        """
        name = (setup, part)
        with self._lock:
            future = self._parts.pop(name, None)
            reads = future is None
            if reads:
                future = Future()
                self._make_room(setup, {*owned, part}, self._largest)
            self._parts[name] = future  # last: the least recently asked one goes first
        if reads:
            self._read(name, future, stage, features, owned)
        return future.result()

    @property
    def reads_ahead(self) -> bool:
        """Whether a part may be read before it is asked for: under a cap it could drive out one that is in use."""
        return self.max_bytes is None

    def holds(self, setup: str, part: int) -> bool:
        """Whether a part is there, or being read."""
        return (setup, part) in self._parts

    def drop(self, setup: str) -> None:
        """Let go of the parts of a setup."""
        with self._lock:
            for name in [name for name in self._parts if name[0] == setup]:
                self._let_go(name)

    def _read(self, name: tuple[str, int], future: Future, stage, features, owned: Collection[int]) -> None:
        setup, part = name
        try:
            held = hold_part(stage(part), features)
            if self.max_bytes is not None and held.num_bytes > self.max_bytes:
                raise GNNScaleError(
                    f"part {part} needs {held.num_bytes} bytes, worker_memory_bytes caps a worker at {self.max_bytes}: "
                    f"set worker_memory_bytes={held.num_bytes} or more, or cut the graph into more parts"
                )
        except BaseException as error:
            with self._lock:
                self._parts.pop(name, None)
            future.set_exception(error)
            return
        with self._lock:
            self.reads[name] += 1
            self._largest = max(self._largest, held.num_bytes)
            self._make_room(setup, {*owned, part}, held.num_bytes, keep=name)
            self.held_bytes += held.num_bytes
            future.set_result(held)

    def _make_room(self, setup: str, owned: set[int], num_bytes: int, keep: tuple[str, int] | None = None) -> None:
        for name in [name for name in self._parts if name[0] == setup and name[1] not in owned]:
            self._let_go(name)
        for name in list(self._parts):
            if self.max_bytes is None or self.held_bytes + num_bytes <= self.max_bytes:
                return
            if name != keep:
                self._let_go(name)

    def _let_go(self, name: tuple[str, int]) -> None:
        future = self._parts[name]
        if future.done():  # one that is being read stays until it is asked for
            del self._parts[name]
            self.held_bytes -= future.result().num_bytes


def hold_part(staged: StagedPart, features) -> HeldPart:
    """Return a part with the feature rows of its nodes in memory, core and halo, in the stored dtype."""
    if features is None or isinstance(staged.graph, WholeGraph):
        return HeldPart(staged, features, pack(staged).num_bytes)
    rows = features_of_part(features, staged.graph.part).gather(staged.graph.nodes)
    if isinstance(rows, SparseRows):
        num_bytes = rows.indptr.nbytes + rows.indices.nbytes + rows.data.nbytes
        table = CSRFeatures(rows.indptr, rows.indices, rows.data, rows.dim)
    else:
        num_bytes, table = rows.nbytes, DenseFeatures(rows)
    return HeldPart(staged, table, pack(staged).num_bytes + num_bytes)


def gather_union(nodes: np.ndarray, parts: list[HeldPart]) -> np.ndarray | SparseRows | None:
    """Return the feature rows of nodes that lie in any of some parts, in order; None without features.

    Args:
        nodes: (num,) store ids.
        parts: at least one; each node is in one of them.

    Returns:
        (num, dim) rows, or sparse rows, bit for bit what is stored.
    """
    table = parts[0].rows
    if table is None:
        return None
    if len(parts) == 1:
        return table.gather(parts[0].locate(nodes))
    if table.is_sparse:
        return _gather_sparse(nodes, parts)
    out = np.empty((len(nodes), table.dim), table.dtype)
    left = np.arange(len(nodes))
    for part in parts:
        places = part.locate(nodes[left])
        found = places >= 0
        out[left[found]] = part.rows.gather(places[found])
        left = left[~found]
    return out


def _gather_sparse(nodes: np.ndarray, parts: list[HeldPart]) -> SparseRows:
    blocks, order, left = [], [], np.arange(len(nodes))
    for part in parts:
        places = part.locate(nodes[left])
        found = places >= 0
        blocks.append(part.rows.gather(places[found]))
        order.append(left[found])
        left = left[~found]
    return merge_rows(blocks, order)


SETUPS_KEPT = 16
_FETCH_LIMIT_S = 60.0
_RETRY_S = 0.2


class PreparationWorker:
    """Make the batches of keys; an actor of Ray's, or a plain object in tests.

    Args:
        number: Number of this worker.
        memory_bytes: Upper bound on the bytes of parts that it holds; None: no bound.
    """

    def __init__(self, number: int = 0, memory_bytes: int | None = None):
        torch.set_num_threads(1)
        self.number, self.parts = number, WorkerParts(memory_bytes)
        self._makers: dict[str, tuple] = {}
        self._graphs: dict[str, HeldGraph] = {}
        self._views: dict[tuple[str, str], WorkerView] = {}  # of the caches of hubs, by hub and table

    def ping(self) -> int:
        """Return the process id."""
        return os.getpid()

    def make(self, request: GroupRequest) -> tuple[GroupHeader, GroupPayload | None]:
        """Return the batches of some keys; what fails is told in the header."""
        begun, asked = time.perf_counter(), request.keys
        header = GroupHeader([-1] * len(asked), [None] * len(asked), pid=os.getpid())
        batches: list = []
        parts: dict[int, HeldPart] = {}
        try:
            stage, maker = self._opened(request.setup)
        except Exception as error:
            header.errors = [f"{type(error).__name__}: {error}"] * len(asked)
            return header, None
        drawer = replace(maker, gathers=False)
        for place, key in enumerate(asked):
            try:
                batches.append(drawer.make(key, lambda key=key: self._part(request, stage, maker, key, parts)))
                header.numbers[place] = len(batches) - 1
            except GNNScaleError as error:
                header.errors[place] = str(error)
        payload = self._pack(request, header, batches, list(parts.values())) if batches else None
        header.reads, header.busy_s = sum(self.parts.reads.values()), time.perf_counter() - begun
        return header, payload

    def expect(self, setup: str, part: int, owned: tuple[int, ...]) -> None:
        """Read a part that is wanted soon, where its setup is known and no cap stands."""
        stage, maker = self._makers.get(setup, (None, None))
        if stage is not None and not self.parts.holds(setup, part) and self.parts.reads_ahead:
            self.parts.get(setup, part, stage, _features(maker), owned)

    def place(self) -> tuple[str, int | None]:
        """Return Ray's id of the machine, and the upper bound on the bytes that this worker holds."""
        return import_ray().get_runtime_context().get_node_id(), self.parts.max_bytes

    def asked(self) -> dict[str, int]:
        """Return how often this worker asked other machines for rows, and how often none answered."""
        counts = [graph.counts for graph in list(self._graphs.values())]
        return {name: sum(getattr(one, name) for one in counts) for name in ("asked", "unanswered")}

    def reads(self) -> dict[int, int]:
        """Return how often each part was read, whatever the setup."""
        counts: dict[int, int] = {}
        for (_, part), count in self.parts.reads.items():
            counts[part] = counts.get(part, 0) + count
        return counts

    def leave(self, hub: str, setups: list[str]) -> None:
        """Forget a hub, and setups that nobody else has."""
        self._views = {name: view for name, view in self._views.items() if name[0] != hub}
        for name in setups:
            self._forget(name)

    def _pack(self, request: GroupRequest, header: GroupHeader, batches: list, parts: list[HeldPart]) -> GroupPayload:
        group, missing = pack_group(batches), None
        wanted = group.union
        header.num_union, header.group_bytes = len(wanted), group.num_bytes
        if request.update is not None:
            name = (request.hub, request.setup.table.name)
            view = self._views.setdefault(name, WorkerView(request.setup.table.num_rows))
            header.version, missing = view.missing(request.update, wanted)
            wanted = wanted[missing]
        rows = gather_union(wanted, parts)
        if rows is not None:
            header.rows_sent, header.row_bytes = len(wanted), _nbytes(rows)
        return GroupPayload(group, missing, rows)

    def _part(self, request: GroupRequest, stage, maker: BatchMaker, key: BatchKey, parts: dict):
        setup = request.setup.name
        parts[key.part] = self.parts.get(setup, key.part, stage, _features(maker), request.owned)
        return parts[key.part].staged

    def _opened(self, setup: Setup) -> tuple:
        """Return stage and maker; the latest ones stay. Called by one thread at a time."""
        found = self._makers.pop(setup.name, None)
        while len(self._makers) >= SETUPS_KEPT:
            self._forget(next(iter(self._makers)))
        if found is None:
            sys.path.extend(path for path in setup.import_paths if path not in sys.path)
            meta, buffers = _fetched(setup.contents[0])
            # Copies: what Ray shares is read-only, for which compiled kernels would be compiled once more.
            found = pickle.loads(meta, buffers=[bytearray(buffer) for buffer in buffers])
            if setup.shares is not None:
                stage, maker = found
                graph = HeldGraph(setup.shares, store_of(stage), maker.builder.features if maker.gathers else None)
                found, self._graphs[setup.name] = graph.tools(*found), graph
        self._makers[setup.name] = found
        return found

    def _forget(self, setup: str) -> None:
        self._makers.pop(setup, None)
        self._graphs.pop(setup, None)
        self.parts.drop(setup)


def _features(maker: BatchMaker):
    return maker.builder.features if maker.gathers else None


def _fetched(contents):
    if isinstance(contents, tuple):
        return contents
    import ray

    return ray.get(contents, timeout=_FETCH_LIMIT_S)


def _nbytes(rows) -> int:
    return rows.nbytes if hasattr(rows, "nbytes") else rows.indptr.nbytes + rows.indices.nbytes + rows.data.nbytes


def start_workers(names: list[str], num_cpus: float, memory_bytes: int | None, *arguments) -> list:
    """Start the workers that are not running yet. Ray starts them again when they end.

    Args:
        names: Names of the workers' actors.
        num_cpus: CPUs of the cluster that each worker takes.
        memory_bytes: Upper bound on the bytes of parts that each worker holds; None: no bound.
        arguments: Further arguments of `PreparationWorker`.

    Returns:
        The workers' actors, which live as long as this process.
    """
    actor = import_ray().remote(
        num_cpus=num_cpus,
        max_restarts=-1,
        max_task_retries=0,
        concurrency_groups={WORKER_GROUP: 2},
        scheduling_strategy="SPREAD",
    )(PreparationWorker)
    return [
        actor.options(name=name, namespace=NAMESPACE, get_if_exists=True).remote(number, memory_bytes, *arguments)
        for number, name in enumerate(names)
    ]


def worker_places(names: list[str], limit_s: float) -> list[tuple[str, int | None]]:
    """Return what `PreparationWorker.place` says of each worker that answers within a limit.

    Raises:
        GNNScaleError: none does.
    """
    ray, deadline = import_ray(), time.monotonic() + limit_s
    asked: dict[str, Any] = {}
    while len(asked) < len(names) and time.monotonic() < deadline:
        for name in names:
            with suppress(ValueError):  # rank 0 is about to start it
                if name not in asked:
                    asked[name] = worker_handle(name)
        if len(asked) < len(names):
            time.sleep(_RETRY_S)
    places = [worker.place.options(concurrency_group=WORKER_GROUP).remote() for worker in asked.values()]
    answered, _ = ray.wait(places, num_returns=len(places), timeout=max(0.0, deadline - time.monotonic()))
    found = []
    for place in places:
        with suppress(ray.exceptions.RayError):
            found += [ray.get(place)] if place in answered else []
    if not found:
        raise GNNScaleError(
            f"none of {len(names)} preparation workers answers within {limit_s:g} s: were they stopped?"
        )
    return found
