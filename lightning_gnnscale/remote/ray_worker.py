"""A worker of the preparation layer: maps parts, makes groups of batches, sends the rows that are asked for."""

import os
import time
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ..errors import GNNScaleError
from ..loader.batch_maker import BatchMaker
from ..loader.batch_source import BatchKey
from ..partition_store.typed_features import TypedRows
from .batch_group import narrowest, pack_group
from .cluster import NAMESPACE, WORKER_GROUP, import_ray, worker_handle
from .held_parts import HeldPart, Member, WorkerParts, gather_union, holder_of_parts
from .holder import HeldGraph, num_bytes, store_of
from .messages import GroupHeader, GroupPayload, GroupRequest, Setup, Unit, WorkerSettings
from .versioned_cache import WorkerView

SETUPS_KEPT = 16
_RETRY_S = 0.2
_LABEL_SHARE = 0.001  # of a machine's resource that labels it: any number of workers fits


class PreparationWorker:
    """Make the batches of keys; an actor of Ray's, or a plain object in tests.

    Args:
        number: Number of this worker.
        memory_bytes: What it adds to the cap on the bytes of parts that its machine holds; None: no cap.
        group: Name of the workers that share the parts of a machine; None: it holds its own.
    """

    def __init__(self, number: int = 0, memory_bytes: int | None = None, group: str | None = None):
        torch.set_num_threads(1)
        self.number, self._memory_bytes = number, memory_bytes
        mine = self.let_go if group is None else import_ray().get_runtime_context().current_actor
        self.parts = WorkerParts(Member(os.getpid(), memory_bytes, mine), group)
        self._makers: dict[str, tuple] = {}
        self._graphs: dict[str, HeldGraph] = {}
        self._views: dict[tuple[str, str], WorkerView] = {}  # of the caches of coordinators, by coordinator and table

    def ping(self) -> int:
        """Return the process id."""
        return os.getpid()

    def let_go(self, name: tuple[str, int]) -> bool:
        """Unmap a part unless it is in use; return whether it is unmapped."""
        return self.parts.let_go(name)

    def make(self, request: GroupRequest) -> tuple[GroupHeader, GroupPayload | None]:
        """Return the batches of some keys; what fails is reported in the header."""
        begun, asked = time.perf_counter(), request.keys
        header = GroupHeader([-1] * len(asked), [None] * len(asked), pid=os.getpid())
        batches: list = []
        parts: dict[Unit, HeldPart] = {}
        try:
            stage, maker = self._opened(request.setup)
        except Exception as error:
            header.errors = [f"{type(error).__name__}: {error}"] * len(asked)
            return header, None
        reads = self.parts.reads.total()
        graph = self._graphs.get(request.setup.name)
        before = graph and graph.counts.told()
        try:
            for place, key in enumerate(asked):
                try:
                    part = partial(self._part, request, stage, maker, key, parts)
                    batches.append(maker.make(key, part, fill=False))
                    header.numbers[place] = len(batches) - 1
                except GNNScaleError as error:
                    header.errors[place] = str(error)
            payload = self._pack(request, header, batches, list(parts.values())) if batches else None
        finally:
            self.parts.release()
        header.reads, header.busy_s = self.parts.reads.total() - reads, time.perf_counter() - begun
        if graph is not None:
            told = graph.counts.told()
            asked_rows = (told[name] - before[name] for name in ("rows", "rows_away", "bytes_away"))
            header.rows_gathered, header.rows_away, header.bytes_away = asked_rows
        return header, payload

    def expect(self, setup: Setup, part: Unit) -> None:
        """Have a part read that is wanted soon, where it drives out none."""
        self.parts.expect(part, setup)

    def place(self) -> tuple[str, int | None]:
        """Return Ray's id of the machine, and what this worker adds to the cap on the bytes that it holds."""
        return import_ray().get_runtime_context().get_node_id(), self._memory_bytes

    def asked(self) -> dict[str, int]:
        """Return how often this worker asked other machines for rows, and how often none answered."""
        counts = [graph.counts for graph in list(self._graphs.values())]
        return {name: sum(getattr(one, name) for one in counts) for name in ("asked", "unanswered")}

    def reads(self) -> dict[Unit, int]:
        """Return how often each part was read for this worker, whatever the setup."""
        return dict(self.parts.reads)

    def held(self) -> dict:
        """Return what the holder of this machine's parts reports; `rows_bytes`: what it holds of whole graphs."""
        graphs = {graph.name: graph.held_bytes for graph in list(self._graphs.values())}
        return self.parts.report() | {"rows_bytes": sum(graphs.values())}

    def leave(self, coordinator: str, setups: list[str]) -> None:
        """Forget a coordinator, and setups that no other coordinator has."""
        self._views = {name: view for name, view in self._views.items() if name[0] != coordinator}
        for name in setups:
            self._forget(name)
        self.parts.leave(coordinator, setups)

    def _pack(self, request: GroupRequest, header: GroupHeader, batches: list, parts: list[HeldPart]) -> GroupPayload:
        group, missing = pack_group(batches), None
        wanted = group.union
        header.num_union, header.group_bytes = len(wanted), group.num_bytes
        if request.update is not None:
            name = (request.coordinator, request.setup.table.name)
            view = self._views.setdefault(name, WorkerView(request.setup.table.num_rows))
            header.version, missing = view.missing(request.update, wanted)
            wanted = wanted[missing]
        rows = gather_union(wanted, parts)
        if isinstance(rows, TypedRows):
            rows = rows._replace(node_type=rows.node_type.astype(narrowest(0, len(rows.tables))))
            header.num_union -= len(wanted) - rows.num_featured  # others have no row
        if rows is not None:
            header.rows_sent, header.row_bytes = getattr(rows, "num_featured", len(wanted)), num_bytes(rows)
        return GroupPayload(group, missing, rows)

    def _part(self, request: GroupRequest, stage, maker: BatchMaker, key: BatchKey, parts: dict[Unit, HeldPart]):
        unit = maker.order.unit(key)
        if unit not in parts:
            parts[unit] = self.parts.get(unit, request, stage, maker.table)
        return parts[unit].staged

    def _opened(self, setup: Setup) -> tuple:
        """Return stage and maker; the latest ones stay. Called by one thread at a time."""
        found = self._makers.pop(setup.name, None)
        while len(self._makers) >= SETUPS_KEPT:
            self._forget(next(iter(self._makers)))
        if found is None:
            found = setup.open()
            if setup.shard_map is not None:
                stage, maker = found
                graph = HeldGraph(setup.shard_map, store_of(stage), maker.table)
                found, self._graphs[setup.name] = graph.tools(*found), graph
        self._makers[setup.name] = found
        return found

    def _forget(self, setup: str) -> None:
        self._makers.pop(setup, None)
        self._graphs.pop(setup, None)


def start_workers(names: list[str], settings: WorkerSettings) -> list:
    """Start the workers that are not running yet, and what holds their parts on this machine.

    Ray starts them again when they end.

    Args:
        names: Names of the workers' actors.
        settings: How they are started.

    Returns:
        The actors, which live as long as this process: the workers, then the holder unless a label says who prepares.
    """
    actor = import_ray().remote(
        num_cpus=settings.num_cpus,
        resources={} if settings.label is None else {settings.label: _LABEL_SHARE},
        max_restarts=-1,
        max_task_retries=0,
        concurrency_groups={WORKER_GROUP: 2},
        scheduling_strategy="SPREAD",
    )(PreparationWorker)
    workers = [
        actor.options(name=name, namespace=NAMESPACE, get_if_exists=True).remote(
            number, settings.memory_bytes, settings.group
        )
        for number, name in enumerate(names)
    ]
    return [*workers, holder_of_parts(settings.group)] if settings.label is None else workers


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
