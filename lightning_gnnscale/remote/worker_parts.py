"""The parts that a worker holds in its memory: graph, labels and feature rows, swapped one by one under a cap."""

from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from ..errors import GNNScaleError
from ..loader.part_walk import WholeGraph
from ..loader.shared_value import pack
from ..loader.staged_part import StagedPart
from ..partition_store import CSRFeatures, DenseFeatures, SparseRows, features_of_part
from ..partition_store.features import merge_rows


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
