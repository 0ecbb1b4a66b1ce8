"""Rows of one graph on several machines: a holder on each has those of its parts, and is asked for them by the others.

A holder is an actor of Ray's, one on a machine for each store. It reads the CSC rows and the feature rows of the parts
assigned to its machine once, into memory that all processes of the machine map (workers and trainers), and it answers
other machines. `HeldGraph` is what a process sees: it reads rows of its own machine in place, and asks for others
before it reads its own. Where a holder is lost, the store's files give the same rows.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import GNNScaleError, check_seconds
from ..events import record
from ..graph import CSC
from ..loader.batch_maker import BatchMaker
from ..loader.part_walk import rank_of_parts
from ..loader.staged_part import PartStager
from ..memory import parse_bytes
from ..partition_store import PartitionStore
from ..partition_store.features import Column, SparseRows, as_stored
from ..partition_store.part_graph import load_whole_graph
from ..placement.shared_rows import RowHandle, SharedRows, gather_objects
from ..sampler.protocol import BatchSampler
from .cluster import NAMESPACE, import_ray, join_ray, last_line, leave_ray, one_line
from .held_rows import (
    DistributedFeatures,
    HeldFeatures,
    HeldNodes,
    HeldRows,
    HopRequest,
    Neighbors,
    PartOwners,
    most_linked,
    owned_columns,
    part_of,
)
from .messages import ShardMap
from .sampling_owners import OwnedGraph, sampler_of_owners, why_not_owned

ANSWER_LIMIT_S = 30.0
START_LIMIT_S = 120.0  # for a holder that reads its parts
SILENT_S = 10.0  # a machine that did not answer is not asked for so long
THREADS = 16  # requests that a holder serves at a time


def assign_shards(
    store: PartitionStore,
    places: Sequence[tuple[str, int | None]],
    replicate_bytes: int,
    with_features: bool,
    targets: Iterable[np.ndarray],
    columns: tuple[str, ...] = (),
) -> ShardMap:
    """Assign a store's parts to the workers' machines, targets in proportion to workers; see `deal_in_order`.

    Args:
        store: The store.
        places: Ray's id of the machine of each worker, and the upper bound on what the worker holds, bytes.
        replicate_bytes, with_features: See `ShardMap`.
        targets: Store ids of all targets, in arrays.
        columns: See `ShardMap`.
    """
    nodes = [node for node, _ in places]
    machines = tuple(dict.fromkeys(nodes))
    counts = np.zeros(store.num_parts, np.int64)
    for some in targets:
        counts += np.bincount(part_of(some, store.part_offsets), minlength=store.num_parts)
    of_workers, sizes = [machines.index(node) for node in nodes], np.diff(store.part_offsets)
    owners = tuple(deal_in_order(counts, sizes, of_workers, store.num_machines).tolist())
    caps = None
    if all(cap is not None for _, cap in places):
        caps = tuple(sum(cap for node, cap in places if node == machine) for machine in machines)
    roots = (str(store.root),) * len(machines)
    return shard_map_of(store, roots, owners, machines, replicate_bytes, caps, with_features, columns=columns)


def deal_in_order(
    num_targets: Sequence[int], num_nodes: Sequence[int], machine_of_worker: Sequence[int], num_machines: int = 1
) -> np.ndarray:
    """Return (num_parts,) int64: the machine that holds each part, as many targets for each of its workers.

    Parts follow each other on a machine: a partitioner that cuts again and again numbers those that share most edges
    one after the other.

    Args:
        num_targets, num_nodes: Counts of each part, in the order of the parts.
        machine_of_worker: Number of the machine of each worker, in any order.
        num_machines: Machines that the parts were made for. Where there are so many, each takes the parts of one.
    """
    machines = np.sort(np.asarray(machine_of_worker))
    if num_machines > 1 and len(np.unique(machines)) == num_machines:
        return np.repeat(np.unique(machines), len(num_targets) // num_machines)
    return machines[rank_of_parts(num_targets, num_nodes, len(machines))]


def homes_of(shard_map: ShardMap, part_offsets: np.ndarray, targets: Mapping[int, np.ndarray]) -> dict[int, str]:
    """Return the machine to make the batches of each part: it owns at least twice as many of its targets as any other.

    Args:
        shard_map: Which machine holds which part of the store.
        part_offsets: The store's.
        targets: Part to store ids of its targets; where batches mix all parts, a part is a rank.

    Returns:
        Part to Ray's id of the machine; parts whose targets are everywhere are left out: any machine makes theirs.
    """
    owners, homes = np.asarray(shard_map.owners), {}
    for part, nodes in targets.items():
        held = np.bincount(owners[part_of(nodes, part_offsets)], minlength=len(shard_map.nodes))
        home = int(held.argmax())
        if held[home] >= 2 * np.delete(held, home).max(initial=1):
            homes[int(part)] = shard_map.nodes[home]
    return homes


def shard_map_of(
    store: PartitionStore, roots: tuple[str, ...], owners: tuple[int, ...], *rest, columns: tuple[str, ...]
) -> ShardMap:
    """Return the `ShardMap` of an open store; rest: from `nodes` to `with_features`."""
    fetching = None if store.fetched is None else json.dumps(store.fetched.settings, sort_keys=True)
    return ShardMap(roots, store.layout_fingerprint, owners, *rest, fetching=fetching, columns=columns)


def check_asks_owners(sampler: Any, crosses_parts: bool) -> None:
    """Refuse batches that cannot be sampled from rows of several owners.

    Raises:
        GNNScaleError: the message names the remedy.
    """
    if not crosses_parts:
        raise GNNScaleError(
            "rows=owners is for batches that cross parts, but these stay in theirs: use scope=graph and "
            "weights=GradientAveraging(), or rows=auto"
        )
    why = why_not_owned(sampler)
    if why is not None:
        raise GNNScaleError(why)


class HeldMemory:
    """Named arrays that the processes of a machine map; freed with the last of them."""

    def __init__(self):
        self._rows: dict[str, tuple[SharedRows, tuple[int, ...]]] = {}

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return memory for an array."""
        rows = SharedRows.create(shape[0], int(np.prod(shape[1:], dtype=np.int64)), dtype)
        self._rows[name] = rows, shape
        return rows.array.reshape(shape)

    @property
    def handles(self) -> dict[str, tuple[RowHandle, tuple[int, ...]]]:
        """What `attach` of another process of the machine needs; valid while this process lives."""
        return {name: (rows.handle, shape) for name, (rows, shape) in self._rows.items()}

    @staticmethod
    def attach(handles: dict[str, tuple[RowHandle, tuple[int, ...]]]) -> dict[str, np.ndarray]:
        """Map the arrays of another process.

        Raises:
            PlacementError: that process has ended.
        """
        # Writable: compiled kernels would be compiled once more for arrays that are not.
        return {name: SharedRows.attach(one, write=True).array.reshape(shape) for name, (one, shape) in handles.items()}


def fitting_parts(
    store: PartitionStore, parts: list[int], row_bytes: int, memory_bytes: int | None, columns: tuple[str, ...] = ()
) -> list[int]:
    """Return the parts whose rows, with some columns of their edges, fit a machine's memory, in the order of ids."""
    if memory_bytes is None:
        return parts
    first, last = store.part_offsets[:-1], store.part_offsets[1:]
    csc = store.csc_of_parts(())
    edges = np.asarray(csc.indptr[last]) - np.asarray(csc.indptr[first])
    needed = edges * edge_bytes(store, columns) + (last - first) * (8 + row_bytes)
    total = np.cumsum(needed[parts])
    return parts[: int(np.searchsorted(total, memory_bytes, "right"))]


def edge_bytes(store: PartitionStore, columns: tuple[str, ...]) -> int:
    """Return the bytes of an edge in the memory of its owner."""
    return store.csc_of_parts(()).indices.itemsize + sum(column_bytes(store, columns).values())


def column_bytes(store: PartitionStore, columns: tuple[str, ...]) -> dict[str, int]:
    """Return the bytes that an edge has in each column of the edges."""
    held = {name: store.edge_column(name, whole=False) for name in columns if name != "node_time"}
    return {name: column.itemsize * math.prod(column.shape[1:]) for name, column in held.items()}


def held_columns(store: PartitionStore, columns: tuple[str, ...], whole: bool = False) -> dict[str, np.ndarray]:
    """Return columns as `HeldRows` takes them; whole: whether all of those of edges may be read."""
    return {name: store.node_time if name == "node_time" else store.edge_column(name, whole) for name in columns}


class StoreHolder:
    """What a machine holds of a store; an actor of Ray's, or a plain object in tests. Many threads may ask at a time.

    Args:
        shard_map: Which machine holds what.
        machine: Number of this machine.

    Raises:
        PartitionStoreError: the store of this machine is another one.
    """

    def __init__(self, shard_map: ShardMap, machine: int):
        store = shard_map.open_store(machine)
        table = stored_table(store) if shard_map.with_features else None
        csc, nodes = owned_rows(shard_map, store, table, machine)
        self._memory = HeldMemory()
        columns = held_columns(store, shard_map.columns)
        self._rows = HeldRows.read(csc, nodes, self._memory.allocate, columns)
        self._features = table and HeldFeatures.read(table, nodes, self._memory.allocate)
        self._files, self._table = HeldRows.of_files(csc, columns), table
        self._answers = {"requests": 0, "rows": 0}

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def held(self) -> tuple[HeldNodes, dict]:
        """Return the held nodes, and handles for their rows."""
        return self._rows.nodes, self._memory.handles

    def sample_rows(self, requests: Sequence[HopRequest]) -> list[Neighbors]:
        """Return neighbours of nodes that this machine owns, for another one."""
        self._answers["requests"] += 1
        return [self._sample(request) for request in requests]

    def _sample(self, request: HopRequest) -> Neighbors:
        request = request.at(np.arange(len(request.nodes)))  # a copy: what Ray shares is read-only
        numbers = self._numbers(request.nodes)
        return self._files.sample(request) if numbers is None else self._rows.sample(request, numbers)

    def gather_rows(self, nodes: np.ndarray) -> np.ndarray | SparseRows:
        """Return feature rows of nodes that this machine owns, for another one."""
        nodes = np.array(nodes)
        self._answers["requests"] += 1
        numbers = self._numbers(nodes)
        return self._table.read(nodes) if numbers is None else self._features.answer(nodes, numbers)

    def report(self) -> dict[str, int]:
        """Return held bytes, and requests and rows that were answered."""
        held = self._rows.num_bytes + (0 if self._features is None else self._features.num_bytes)
        return self._answers | {"held_bytes": held}

    def _numbers(self, nodes: np.ndarray) -> np.ndarray | None:
        """Return the places of nodes; None: some are not held."""
        self._answers["rows"] += len(nodes)
        numbers = self._rows.nodes.find(nodes)
        return None if len(numbers) and numbers.min() < 0 else numbers


def owned_rows(shard_map: ShardMap, store: PartitionStore, table: Column | None, machine: int) -> tuple[CSC, HeldNodes]:
    """Return a CSC that has the rows of a machine's parts, fetched if need be, and the nodes that its memory holds.

    Args:
        table: The features as they are stored; None: they are not held.
    """
    row_bytes, offsets = row_bytes_of(table), store.csc_of_parts(())
    replicated = most_linked(offsets.indptr, shard_map.replicate_bytes, edge_bytes(store, shard_map.columns), row_bytes)
    parts = [part for part, owner in enumerate(shard_map.owners) if owner == machine]
    csc = store.csc_of_parts(parts, replicated, table is not None, shard_map.columns)  # of those beyond the memory too
    budget = None if shard_map.memory_bytes is None else shard_map.memory_bytes[machine]
    budget = budget and max(0, budget - shard_map.replicate_bytes)
    fitting = fitting_parts(store, parts, row_bytes, budget, shard_map.columns)
    return csc, HeldNodes(store.part_offsets, fitting, replicated)


def stored_table(store: PartitionStore) -> Column | None:
    """Return a store's features as they are stored: codes travel and lie as codes."""
    return None if store.features is None else as_stored(store.features)[0]


def row_bytes_of(table: Column | None) -> int:
    """Return the bytes of a feature row; of sparse ones, and of those of several node types, their mean."""
    if table is None:
        return 0
    if table.by_node_type:
        return int(table.nbytes / max(1, table.num_rows))
    if table.is_sparse:
        return int((table.nbytes - table.indptr.nbytes) / max(1, table.num_rows)) + 8
    return table.dim * np.dtype(table.dtype).itemsize


def holder_handle(shard_map: ShardMap, machine: int) -> Any:
    """Return the actor of a machine, started there by the first who asks."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = import_ray()
    there = NodeAffinitySchedulingStrategy(shard_map.nodes[machine], soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=THREADS, scheduling_strategy=there)(StoreHolder)
    options = {"name": shard_map.name(machine), "namespace": NAMESPACE, "get_if_exists": True}
    return actor.options(**options).remote(shard_map, machine)


@dataclass(frozen=True)
class Unanswered:
    """An answer on its way from another machine; where that machine has ended, the files give it.

    Args:
        ref: Ray's.
        timeout_s: How long it may take, seconds.
        instead: Makes the answer.
        note: Called with the other machine's answer, None where the files gave it, and the seconds it was waited for.
    """

    ref: Any
    timeout_s: float
    instead: Callable[[Exception], Any]
    note: Callable[[Any | None, float], None]

    def result(self) -> Any:
        """Return the answer; waits for it.

        Raises:
            GNNScaleError: the other machine failed at it.
        """
        ray, begun = import_ray(), time.perf_counter()
        try:
            answer = came = ray.get(self.ref, timeout=self.timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise GNNScaleError(f"another machine could not give its rows: {one_line(error)}") from error
        except ray.exceptions.RayError as error:
            answer, came = self.instead(error), None
        self.note(came, time.perf_counter() - begun)
        return answer


@dataclass
class FetchCounts:
    """What a process asked of other machines.

    Attributes:
        asked, unanswered: Requests, and those that the files answered.
        rows, rows_away: Feature rows of batches, and those that came from other machines.
        bytes_away: Bytes that came from other machines, neighbours included.
        waited_s: Seconds that threads waited for answers.
    """

    asked: int = 0
    unanswered: int = 0
    rows: int = 0
    rows_away: int = 0
    bytes_away: int = 0
    waited_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: float) -> None:
        """Add to counts; by any thread."""
        with self.lock:
            for name, value in counts.items():
                setattr(self, name, getattr(self, name) + value)

    def told(self) -> dict[str, float]:
        """Return the counts by name."""
        with self.lock:
            return {name: value for name, value in vars(self).items() if name != "lock"}


@dataclass(frozen=True)
class OwnerReads:
    """Batches read the graph where it is owned: each machine holds the parts that its ranks train on.

    Give it to `PartitionDataModule(rows=)`. Neighbours and features of nodes of other machines are asked for while
    a batch is prepared, ahead of its use, through a Ray cluster that has a node on every machine. Batches are bit for
    bit those that read the store. On one machine the store is read, and no Ray is needed.

    Args:
        address: "host:port" of the cluster; "auto": the one that runs on this machine (`ray start`).
        replicate_bytes: Rows of highest in-degree that each machine holds besides its own, bytes, >= 0.
        memory_bytes: Upper bound on what a machine holds, bytes or a text such as "20GiB"; rows beyond it are read from
            the files of their machine. None: no bound.
        timeout_s: How long Ray, or another machine with its rows, may take to answer before files are read, seconds.

    Raises:
        ValueError: an argument outside its range.

    Source: Zheng et al., DistDGL, sections 5.3 and 5.4. Differs: rows are read ahead of the step that uses them, and a
        machine that is lost is replaced by files.
    """

    address: str = "auto"
    replicate_bytes: int | str = 0
    memory_bytes: int | str | None = None
    timeout_s: float = 30.0

    def __post_init__(self):
        check_seconds("timeout_s", self.timeout_s)
        for name in ("replicate_bytes", "memory_bytes"):
            parse_bytes(getattr(self, name), name)

    def check(self, sampler: Any, can_ask: bool) -> None:
        """Refuse batches that cannot be read this way; can_ask: what prepares them can ask other machines.

        Raises:
            ValueError: the message names the remedy.
        """
        if not can_ask:
            raise ValueError(
                "rows=owners asks from the training process or from Ray's workers: use source=threads, task_graphs or "
                "ray"
            )
        why = why_not_owned(sampler)
        if why is not None:
            raise ValueError(why)

    def open(
        self,
        store: PartitionStore,
        features: Column | None,
        rank_of_part: Sequence[int],
        sampler: BatchSampler,
        edge_features: bool = True,
    ) -> "HeldGraph":
        """Return the graph as this rank sees it; every rank of the run calls this at once.

        Args:
            store: The store as this rank has it: a folder of its machine, or what it fetches from a URL.
            features: Table of the whole graph's rows; None: batches have none.
            rank_of_part: (num_parts,) rank that trains each part, the same on every rank.
            sampler: Samples the batches: what it reads of edges is held.
            edge_features: Whether batches have the features of their edges.

        Raises:
            GNNScaleError: Ray, a holder or the store of a machine cannot be used; every rank raises it.
        """
        if store.fetched is not None and store.fetched.cap_bytes is not None:
            raise GNNScaleError(
                "rows=owners keeps the rows of a machine on its disk: leave out store_cache_bytes, and bound the "
                "memory with memory_bytes="
            )

        joined: list[str] = []

        def join() -> tuple[str, str]:
            joined.append(join_ray(self.address, self.timeout_s, 0))
            return import_ray().get_runtime_context().get_node_id(), str(store.root)

        try:
            columns = owned_columns(sampler, store, edge_features)
            return self._opened(store, features, rank_of_part, _agreed(join), columns)
        except BaseException:
            if joined:
                leave_ray()
            raise

    def _opened(
        self, store, features, rank_of_part: Sequence[int], places: list[tuple[str, str]], columns: tuple[str, ...]
    ) -> "HeldGraph":
        """Return what `open` does; places: Ray's id of the machine of each rank, and the store's folder there."""
        root_of = dict(places)
        nodes = tuple(root_of)
        owners = tuple(nodes.index(places[rank][0]) for rank in rank_of_part)
        most = parse_bytes(self.memory_bytes, "memory_bytes")
        caps = None if most is None else (most,) * len(nodes)
        replicate = parse_bytes(self.replicate_bytes, "replicate_bytes")
        held = owners, nodes, replicate, caps, features is not None
        shard_map = shard_map_of(store, tuple(root_of.values()), *held, columns=columns)
        graphs: list[HeldGraph] = []
        _agreed(lambda: graphs.append(HeldGraph(shard_map, store, features, self.timeout_s)))
        return graphs[0]


def _agreed(make: Callable[[], Any]) -> list:
    """Return what each rank makes, on all of them; a collective.

    Raises:
        GNNScaleError: one of them failed, on every rank.
    """
    try:
        own = make(), None
    except GNNScaleError as error:
        own = None, str(error)
    made = gather_objects(own)
    for rank, (_, error) in enumerate(made):
        if error is not None:
            raise GNNScaleError(f"rank {rank}: {error}")
    return [value for value, _ in made]


class HeldGraph:
    """A graph that machines hold together, as one process sees it.

    Args:
        shard_map: Which machine holds what.
        store: The store as it is on this machine.
        features: Table of the whole graph's rows, in the form in which batches take them; None: batches have none.
        timeout_s: How long another machine may take to answer before the files are read instead, seconds.

    Attributes:
        counts: What was asked of other machines.

    Raises:
        GNNScaleError: this machine's holder does not start.
    """

    def __init__(
        self,
        shard_map: ShardMap,
        store: PartitionStore,
        features: Column | None,
        timeout_s: float = ANSWER_LIMIT_S,
    ):
        ray, self._timeout_s = import_ray(), timeout_s
        self._shares, self._store, self._table = shard_map, store, features
        self.counts, self._handles, self._silent = FetchCounts(), {}, {}
        here = ray.get_runtime_context().get_node_id()
        self._machine = shard_map.nodes.index(here) if here in shard_map.nodes else -1
        self._owners = PartOwners(store.part_offsets, shard_map.owners)
        self._columns = held_columns(store, shard_map.columns)
        nodes, arrays = self._attached()
        if nodes is None:
            nodes = HeldNodes(store.part_offsets, ())
            self.rows = HeldRows.read(store.csc_of_parts(()), nodes, columns=self._columns)
            self._held = None if features is None else HeldFeatures.read(as_stored(features)[0], nodes)
        else:
            columns = {name: arrays.get(name, values) for name, values in self._columns.items()}
            self.rows = HeldRows(nodes, arrays["indptr"], arrays["indices"], columns)
            self._held = None if features is None else HeldFeatures(nodes, arrays, as_stored(features)[0])

    @property
    def name(self) -> str:
        """Name of this machine's holder."""
        return self._shares.name(self._machine)

    @property
    def held_bytes(self) -> int:
        """Bytes of rows and features that this machine holds, once for all its processes."""
        return self.rows.num_bytes + (0 if self._held is None else self._held.num_bytes)

    @property
    def features(self) -> "DistributedFeatures | None":
        """The table of the whole graph, rows of other machines asked for."""
        if self._held is None:
            return None
        return DistributedFeatures.of(self._table, self._held, self._owners, self._ask_features, note=self._count)

    def sampler(self, sampler: BatchSampler) -> BatchSampler:
        """Return a sampler that samples the same from the rows of all machines."""
        return sampler_of_owners(sampler, OwnedGraph(self.rows, self._owners, self._ask_rows, self._shares.columns))

    def tools(self, stage: PartStager, maker: BatchMaker) -> tuple[PartStager, BatchMaker]:
        """Return a stage and a maker that sample and gather from the memories of all machines."""
        sampler, features = self.sampler(stage.sampler), maker.features if self._held is None else self.features
        load = partial(load_whole_graph, self._store, edges=False)
        return replace(stage, sampler=sampler, load_part=load), replace(maker, sampler=sampler, features=features)

    @cached_property
    def _own(self) -> HeldRows:
        """The rows of this machine as they are in its files."""
        if self._store.edge_storage is not None:  # they are decoded together
            return HeldRows.of_files(self._store.whole_csc, self._columns)
        parts = [part for part, owner in enumerate(self._shares.owners) if owner == self._machine]
        csc = self._store.csc_of_parts(parts, columns=self._shares.columns)
        return HeldRows.of_files(csc, self._columns)

    @cached_property
    def _files(self) -> HeldRows:
        """All rows as they are in files, fetched where they are not here."""
        return HeldRows.of_files(self._store.whole_csc, held_columns(self._store, self._shares.columns, whole=True))

    def close(self, waiting_share: float) -> None:
        """Leave the cluster, which `OwnerReads.open` joined, and record what was asked there.

        Args:
            waiting_share: Share of the training time that passed in waiting for batches.
        """
        record("owner_reads", waiting_share=waiting_share, **self.counts.told())
        leave_ray()

    def _attached(self) -> tuple[HeldNodes | None, dict[str, np.ndarray]]:
        """Return what this machine's holder holds; None: this machine holds nothing."""
        if self._machine < 0:
            return None, {}
        ray = import_ray()
        if self._store.fetched is not None:  # here, where the credentials are: the holder finds the rows on the disk
            owned_rows(self._shares, self._store, self._table and as_stored(self._table)[0], self._machine)
        try:
            nodes, handles = ray.get(self._handle(self._machine).held.remote(), timeout=START_LIMIT_S)
        except ray.exceptions.RayError as error:
            raise GNNScaleError(
                f"the holder of {self._shares.roots[self._machine]} did not start here ({last_line(error)}): "
                "if memory is short, set a cap on what a machine holds"
            ) from None
        return nodes, HeldMemory.attach(handles)

    def _count(self, num_rows: int) -> None:
        self.counts.add(rows=num_rows)

    def _handle(self, machine: int) -> Any:
        if machine not in self._handles:
            self._handles[machine] = holder_handle(self._shares, machine)
        return self._handles[machine]

    def _ask_rows(self, owner: int, requests: Sequence[HopRequest]) -> Any:
        if owner == self._machine:  # beyond what its memory holds
            return Answered([self._own.sample(request) for request in requests])
        return self._ask(owner, "sample_rows", requests, lambda: list(map(self._files.sample, requests)), 0)

    def _ask_features(self, owner: int, nodes: np.ndarray) -> Any:
        table = as_stored(self._table)[0]
        if owner == self._machine:
            return Answered(table.read(nodes))
        return self._ask(owner, "gather_rows", nodes, lambda: table.read(nodes), len(nodes))

    def _ask(self, owner: int, method: str, request: Any, files: Callable[[], Any], num_rows: int) -> Any:
        self.counts.add(asked=1)
        if time.monotonic() < self._silent.get(owner, 0.0):
            self.counts.add(unanswered=1)
            return Answered(files())

        def instead(error: Exception) -> Any:
            self.counts.add(unanswered=1)
            if isinstance(error, import_ray().exceptions.ActorDiedError):  # for good: the next who asks starts another
                self._handles.pop(owner, None)
            self._silent[owner] = time.monotonic() + SILENT_S
            record("owner_silent", machine=owner, how=one_line(error))
            return files()

        def note(came, seconds):
            self.counts.add(waited_s=seconds)
            if came is not None:
                self.counts.add(rows_away=num_rows, bytes_away=num_bytes(came))

        return Unanswered(getattr(self._handle(owner), method).remote(request), self._timeout_s, instead, note)


class Answered(NamedTuple):
    """An answer that is there."""

    answer: Any

    def result(self) -> Any:
        """Return it."""
        return self.answer


def num_bytes(rows: np.ndarray | SparseRows | list[Neighbors]) -> int:
    """Return the bytes of neighbours or feature rows."""
    if isinstance(rows, list):
        return sum(one.nbytes for one in rows)
    return rows.nbytes if hasattr(rows, "nbytes") else rows.indptr.nbytes + rows.indices.nbytes + rows.data.nbytes


def store_of(stage: PartStager) -> PartitionStore | None:
    """Return the store that a stage reads, None where it reads none."""
    found = [one for one in getattr(stage.load_part, "args", ()) if hasattr(one, "part_offsets")]
    return found[0] if found else None
