"""A worker of the preparation layer: holds parts, makes groups of batches, sends the rows that are asked for."""

import os
import pickle
import sys
import time
from dataclasses import replace

import numpy as np
import torch

from ..errors import GNNScaleError
from ..loader.batch_builder import BatchMaker
from ..loader.batch_source import BatchKey
from .batch_group import pack_group
from .cluster import NAMESPACE, WORKER_GROUP, import_ray
from .held_rows import HopRequest
from .messages import GroupHeader, GroupPayload, GroupRequest, Setup
from .spread_graph import SpreadGraph
from .worker_parts import HeldPart, WorkerParts, gather_union
from .worker_view import WorkerView

SETUPS_KEPT = 16
_FETCH_LIMIT_S = 60.0
_OPEN_LIMIT_S = 20.0


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
        self._graphs: dict[str, SpreadGraph] = {}
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

    def open(self, setup: Setup) -> None:
        """Take in a setup ahead of its batches: others may ask for rows of it."""
        self._opened(setup)

    def draw_rows(self, setup: str, request: HopRequest) -> np.ndarray | None:
        """Return neighbours from rows that this worker holds, for another one; None: it has no such graph."""
        graph = self._graph(setup)
        return graph and graph.rows.draw(request)

    def gather_rows(self, setup: str, nodes: np.ndarray):
        """Return feature rows that this worker holds, for another one; None: it has no such graph."""
        graph = self._graph(setup)
        return graph and graph.features.gather(nodes)

    def asked(self) -> dict[str, int]:
        """Return how often this worker asked others for rows, and how often none answered."""
        graphs = list(self._graphs.values())
        return {name: sum(getattr(graph, name) for graph in graphs) for name in ("asked", "unanswered")}

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

    def _graph(self, setup: str) -> SpreadGraph | None:
        """Return the share of a graph, as soon as this worker has been asked for a batch of it; None: it is not."""
        deadline = time.monotonic() + _OPEN_LIMIT_S
        while setup not in self._graphs and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._graphs.get(setup)

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
            if setup.spread is not None:
                graph = SpreadGraph(setup.name, setup.spread, self.number, *found)
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
