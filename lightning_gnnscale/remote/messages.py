"""Messages between trainers, coordinators and workers: plain values that Ray carries."""

import hashlib
import json
import pickle
import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..loader.batch_source import BatchKey
from ..loader.part_walk import PartUnions
from ..loader.work_queue import SLOW_S
from ..partition_store import PartitionStore
from .batch_group import BatchGroup

GROUPS_AT_WORKER = 2  # one that is made, one that waits for it
_FETCH_LIMIT_S = 60.0
Unit = int | tuple[int, ...]  # a part, or the parts of a union


class WorkerSettings(NamedTuple):
    """How workers are started; see `start_workers`.

    Attributes:
        group: Name of the workers that share the parts of a machine.
        num_cpus: CPUs of the cluster that each worker takes.
        memory_bytes: What each adds to the cap on the bytes of parts that its machine holds; None: no cap.
        label: Resource of Ray that a machine must have to prepare batches; None: any machine does.
    """

    group: str
    num_cpus: float = 0
    memory_bytes: int | None = None
    label: str | None = None


class Growth(NamedTuple):
    """How many workers a coordinator keeps.

    Attributes:
        workers: How they are started.
        least, most: Bounds on their number.
        share: Trainers of the run over those of this coordinator, which measures only its own.
    """

    workers: WorkerSettings
    least: int
    most: int
    share: float = 1.0


class CoordinatorSettings(NamedTuple):
    """The settings of a coordinator; see `RayWorkers`.

    Attributes:
        shared: It is an actor, whose ranks are other processes.
        prefix: Workers whose names begin so join while it runs; None: no others join.
        growth: How many workers it keeps; None: those that are there.
    """

    batches_per_group: int = 1
    credits: int | None = None
    timeout_s: float = 60.0
    cache_rows: int = 0
    cache_policy: str = "lru"
    slow_s: float = SLOW_S
    shared: bool = False
    prefix: str | None = None
    growth: Growth | None = None


class Table(NamedTuple):
    """The feature table that batches take their rows from.

    Attributes:
        name: Digest of where the table is.
        num_rows, dim, dtype: Number of rows, length of a row, and dtype of the table.
        sparse_width: Largest number of stored values in a row; None where rows are dense.
        node_types: By node type its table, None for a node type without features; empty where all nodes have one table.
    """

    name: str
    num_rows: int
    dim: int
    dtype: str
    sparse_width: int | None = None
    node_types: tuple["Table | None", ...] = ()


class ShardMap(NamedTuple):
    """Which machine holds which rows of a store.

    Attributes:
        roots: Folder of the store on each machine.
        fingerprint: The store's; a machine that finds another store there refuses.
        owners: (num_parts,) number of the machine that holds each part.
        nodes: Ray's id of each machine.
        replicate_bytes: Bytes of rows of high degree that each machine holds besides its own.
        memory_bytes: Upper bound on the bytes of rows that each machine holds; rows beyond it are read from the files
            of their machine when they are asked for. None: no bound.
        with_features: Whether feature rows are held too.
        fetching: What a machine without the folder fetches the store by, as JSON; None: the folder must be there.
        columns: Columns held with the rows, of their edges above all; see `owned_columns`.
    """

    roots: tuple[str, ...]
    fingerprint: str
    owners: tuple[int, ...]
    nodes: tuple[str, ...]
    replicate_bytes: int = 0
    memory_bytes: tuple[int, ...] | None = None
    with_features: bool = True
    fetching: str | None = None
    columns: tuple[str, ...] = ()

    def open_store(self, machine: int) -> PartitionStore:
        """Open the store that is on a machine; to be called there.

        Raises:
            PartitionStoreError: it is another one, or there is none.
        """
        settings = self.fetching and json.loads(self.fetching)
        return PartitionStore.reopen(self.roots[machine], settings, self.fingerprint)

    def name(self, machine: int) -> str:
        """Return the name of the actor that holds a machine's rows."""
        told = hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()
        return f"holder-{self.fingerprint[:12]}-{told}-{machine}"


class Setup(NamedTuple):
    """How a rank's batches are made, as sent to workers. Ranks that make theirs alike share one setup.

    Attributes:
        name: Digest of the contents.
        contents: A Ray object that holds (pickled meta, arrays) of (stage, maker). It is wrapped in a list, so that a
            call sends only its reference.
        parts: Ids of all parts that have batches.
        passes: Key epochs per epoch.
        table: Feature table that the rows come from; None: batches have no features.
        import_paths: Paths on which the trainer finds modules.
        shard_map: Which machine holds which rows of the graph; None: each machine reads the parts that it needs.
        is_whole: Whether every part is the whole graph; parts then differ in their targets alone.
        homes: Of the whole graph, part to Ray's id of the machine that holds most of its targets, see
            `homes_of`; None: any machine makes its batches.
        chunks: Chunks of which a batch is mixed, where each is made at its home, so that one machine may be ahead of
            another; else 1.
        open_parts: Parts that batches come from in turn: a part is done once another has its turn.
        unions: Which parts are sampled as one graph; a machine reads, holds and swaps such a union as it does a part.
        made_for: Machines that the store's parts were made for, and the number of its parts.
    """

    name: str
    contents: list
    parts: tuple[int, ...]
    passes: int = 1
    table: Table | None = None
    import_paths: tuple[str, ...] = ()
    shard_map: ShardMap | None = None
    is_whole: bool = False
    homes: Mapping[int, Hashable] | None = None
    chunks: int = 1
    open_parts: int = 1
    unions: PartUnions | None = None
    made_for: tuple[int, int] = (1, 0)

    def unit(self, key: BatchKey) -> Unit:
        """Return what a batch is sampled from, see `BatchOrder.unit`."""
        return key.part if self.unions is None else self.unions.of(key.part, key.epoch)

    @property
    def num_units(self) -> int:
        """Parts, or unions of parts, that an epoch reads; 0 where machines hold the whole graph."""
        if self.is_whole:
            return 0
        return len(self.parts if self.unions is None else self.unions.in_order(0))

    def open(self) -> tuple[Any, Any]:
        """Return stage and maker, unpickled; to be called where the batches are made."""
        sys.path.extend(path for path in self.import_paths if path not in sys.path)
        contents = self.contents[0]
        if not isinstance(contents, tuple):
            import ray

            contents = ray.get(contents, timeout=_FETCH_LIMIT_S)
        meta, buffers = contents
        # Copies: what Ray shares is read-only, for which compiled kernels would be compiled once more.
        return pickle.loads(meta, buffers=[bytearray(buffer) for buffer in buffers])


class GroupRequest(NamedTuple):
    """What a coordinator asks a worker for.

    Attributes:
        coordinator: Name of the coordinator; the worker keeps its view of the coordinator's cache under this name.
        setup: Setup that all the keys share.
        keys: Keys of the batches.
        owned: Parts of the setup, or unions of parts, that are assigned to the worker's machine in this epoch.
        wanted: Parts of the setup that batches are to be made of now, assigned to the worker's machine; the one that
            is done first is the first.
        coming: Parts that the next batches of a rank come from, wherever they are made.
        update: Update of the worker's view of the coordinator's cache; None: all rows are sent.
        number: Of the requests of a coordinator, in their order: those to several workers may arrive in another.
    """

    coordinator: str
    setup: Setup
    keys: list[BatchKey]
    owned: tuple[Unit, ...]
    wanted: tuple[Unit, ...] = ()
    coming: tuple[Unit, ...] = ()
    update: Any = None
    number: int = 0


@dataclass
class GroupHeader:
    """What a worker answers in addition to the payload.

    Attributes:
        numbers: Index in the group of each key's batch, -1 for a key without a batch.
        errors: Error message of each key; None for a key that did not fail.
        num_union: Number of distinct nodes in the group; where node types have features of their own, of those that
        have.
        rows_sent: How many of their rows are in the payload.
        row_bytes, group_bytes: Bytes of the rows, and of everything else that is sent.
        version: Version of the cache that holds the rows left out of the payload, or None.
        pid: Process id of the worker.
        reads: Parts that were read for it.
        busy_s: Time that the worker took for this request, seconds.
        rows_gathered, rows_away: Feature rows that the worker gathered, and those that came from other machines.
        bytes_away: Bytes that came from other machines, neighbours included.
    """

    numbers: list[int]
    errors: list[str | None]
    num_union: int = 0
    rows_sent: int = 0
    row_bytes: int = 0
    group_bytes: int = 0
    version: int | None = None
    pid: int = 0
    reads: int = 0
    busy_s: float = 0.0
    rows_gathered: int = 0
    rows_away: int = 0
    bytes_away: int = 0


class GroupPayload(NamedTuple):
    """The batches of a group and their rows.

    Attributes:
        group: without rows.
        missing: (num_union,) bool, nodes whose rows are in `rows`; None: all.
        rows: (num_rows, dim), sparse rows, `TypedRows`, or None without features.
    """

    group: BatchGroup
    missing: np.ndarray | None
    rows: Any


class Answer(NamedTuple):
    """A coordinator's answer to a rank that waits for a batch.

    Attributes:
        error: Why there is no batch; None if there is one.
        payload: A `GroupPayload` with all rows, or a Ray object that holds one, wrapped in a tuple.
        number: Index of the batch in the group.
        header: Header of the group, given with the first of its batches that is taken, so that bytes are counted once.
        notices: Events that the coordinator wants logged.
        num_workers, num_machines: Workers that can make batches now, and their machines.
    """

    error: str | None = None
    payload: tuple = ()
    number: int = -1
    header: GroupHeader | None = None
    notices: tuple[dict, ...] = ()
    num_workers: int = 0
    num_machines: int = 1
