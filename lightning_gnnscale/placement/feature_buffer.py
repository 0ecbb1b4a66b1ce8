"""`FeatureBuffer`: the feature rows that a device holds, and the tiers behind them; `TypedBuffers`: by node type."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ..errors import PlacementError, short
from ..foreign import is_csr
from ..memory import parse_bytes
from ..partition_store.features import Column, as_stored, checked_rows
from ..partition_store.typed_features import NodeTypes, TypedFeatures, TypedRows
from . import cpu_tiers
from .cpu_tiers import CPUTiers, checked_nodes
from .feature_cache import FeatureCache
from .placement import (
    FIRST_DEVICE,
    OUTSIDE,
    LaidRows,
    Placement,
    RowLayout,
    check_layout,
    group_of,
    row_places,
    tier_of_tables,
)
from .shared_rows import devices_here, digest_of, gather_objects, machine_id

TIERS = ("local", "peer", "host", "disk", "cache")


class FeatureBuffer(Column):
    """Feature rows at the places a placement chose, gathered as if they lay in one table.

    A row is read from the device itself, from a peer of its group, from host memory or from disk, or from a cache of
    rows that lie on no device. The class satisfies `Column`, so it can be used wherever a store's features can.

    On a CUDA device one kernel reads the device's own memory, that of peers, and pinned host memory in place; rows on
    disk pass through a ring of pinned blocks. On the CPU, devices are simulated: their rows are copies in memory.

    This constructor makes the rows of the device's whole group in this process; `in_one_process` makes the buffers of
    all devices, `join` that of one device a process.

    Args:
        placement: Placement of the rows.
        features: Dense features of the store, by store id; they stay open.
        device: The device of the placement that reads.
        on: "cpu", "cuda" (device d is the d-th GPU) or one GPU as "cuda:0".
        host: "map": rows in host memory are read through the store's memory map; "copy": they are copied to memory
            that the processes of this host share. On CUDA always "copy", pinned.
        cache: Cache for rows that are on no device, or None.
        fingerprint: Fingerprint of the store that the features belong to, compared with the placement's; "": not
            compared.
        memory_bytes: Capacity for rows on each device, bytes or "8GiB"; None: what is free on a GPU, no bound on the
        CPU.
        laid: Rows that `in_one_process` or `join` made before.

    Attributes:
        num_rows, dim, dtype: Those of the features. Quantised rows are kept as stored, and decoded when gathered.
        on: As given; "cpu" gathers arrays, all other values tensors.
        hits: Rows read so far from "local", "peer", "host", "disk" and "cache"; exact even if several threads gather at
            once. On CUDA, reading this attribute waits for the device.
        gather_s: Seconds that gathers took, of all threads together; on CUDA those of starting them.
        nbytes: Memory that the buffer takes on its device, bytes: own rows, places, cached rows.

    Raises:
        PlacementError: sparse features, a placement for another store, no space for the rows, peers out of reach.
        ValueError: another argument outside its range.

    Cost: 8 bytes a node for the places. On the CPU a gather of 512-byte rows takes about 1.1 of the time of
        `DenseFeatures.read` (one more random read a row), 1.2 where joined rows find no huge pages in shared memory.
    Source: Song and Jiang, ICS 2022, section 4.
    """

    is_sparse = False
    supports = frozenset({"expect"})

    def __init__(
        self,
        placement: Placement,
        features,
        device: int = 0,
        *,
        on: str = "cpu",
        host: str = "map",
        cache: FeatureCache | None = None,
        fingerprint: str = "",
        memory_bytes: int | str | None = None,
        laid: LaidRows | None = None,
    ):
        layout = _layout(placement, features, device, on, host, fingerprint, memory_bytes)
        self.placement, self.features, self.device, self.on, self.cache = placement, features, device, on, cache
        self.num_rows, self.dim, self.dtype = features.num_rows, features.dim, np.dtype(features.dtype)
        tables, host_ids = laid or _row_module(on).lay_here(layout, [device], **_where(on))
        group = {FIRST_DEVICE + peer for peer in group_of(placement, device)}
        tables = [table if i < FIRST_DEVICE or i in group else None for i, table in enumerate(tables)]
        self._places = row_places(placement, device, host_ids)
        if cache is not None:
            cache.bind(self.num_rows)
        if on == "cpu":
            stored, code = as_stored(features)
            self._tiers = CPUTiers(self._places, tables, stored.dim, np.dtype(stored.dtype), cache, code)
        else:
            from .cuda_tiers import CUDATiers, device_of

            self._tiers = CUDATiers(self._places, tables, features, cache, device_of(on, device))
        self.nbytes = len(placement.rows[device]) * layout.row_bytes + self._places.nbytes + self._tiers.cache_bytes
        self._before = self._last = np.zeros(len(tables) + 1, np.int64)
        self.gather_s, self._lock = 0.0, threading.Lock()

    @classmethod
    def in_one_process(
        cls,
        placement: Placement,
        features,
        *,
        on: str = "cpu",
        host: str = "map",
        caches: Sequence[FeatureCache] | None = None,
        fingerprint: str = "",
        memory_bytes: int | str | None = None,
    ) -> list["FeatureBuffer"]:
        """Return the buffers of all devices, which share the rows; caches: one a device; the rest: see the class."""
        layout = _layout(placement, features, 0, on, host, fingerprint, memory_bytes)
        devices = list(range(placement.num_devices))
        laid = _row_module(on).lay_here(layout, devices, **_where(on))
        options = {"on": on, "host": host, "fingerprint": fingerprint, "laid": laid}
        caches = caches or [None] * len(devices)
        pairs = zip(devices, caches, strict=True)
        return [cls(placement, features, device, cache=cache, **options) for device, cache in pairs]

    @classmethod
    def join(
        cls,
        placement: Placement,
        features,
        device: int,
        *,
        on: str = "cpu",
        host: str = "map",
        cache: FeatureCache | None = None,
        fingerprint: str = "",
        memory_bytes: int | str | None = None,
        exchange: Callable[[object], list] | None = None,
        folder: str | Path | None = None,
    ) -> "FeatureBuffer":
        """Return the buffer of this process (one per device); each reads its own rows once and maps its peers'.

        Nothing has a name: the rows are freed with the last process that maps them, however it ended. On CUDA a
        buffer is closed after those of its peers.

        Args:
            placement, features, device, on, host, cache, fingerprint, memory_bytes: See the class.
            exchange: Takes one object from every process and returns the objects of all. All processes call it alike.
                Default: like `torch.distributed.all_gather_object`.
            folder: Folder for the rows of simulated devices and of the host, on a local file system; None: memory.

        Raises:
            PlacementError: also where a group spans hosts, placements differ, or a process has ended or failed.
        """
        layout = _layout(placement, features, device, on, host, fingerprint, memory_bytes)
        exchange = exchange or gather_objects
        here = devices_here(placement, device, exchange((device, machine_id(), digest_of(placement))))
        laid = _row_module(on).lay_jointly(layout, device, here, exchange, folder, **_where(on))
        return cls(placement, features, device, on=on, host=host, cache=cache, fingerprint=fingerprint, laid=laid)

    def read(self, ids, out=None, on_host: np.ndarray | None = None):
        """Return a copy of rows, see `Column.read`; may be called from several threads at once.

        Args:
            ids: (num,) integers in [0, num_rows): an array; on CUDA also a tensor of the device or of the CPU.
            out: (num, dim) of `dtype`, for codes also float16 or a tensor of bfloat16; C-contiguous, filled in place
                where given: an array, on CUDA a tensor of the device.
            on_host: The same ids on the host, where `ids` are on the device: nothing is then waited for.

        Returns:
            (num, dim), bit for bit what the store's own table gives.

        Raises:
            ValueError: a node is out of range, or `out` does not fit. Of ids that are on the device alone, and all of
                whose rows are read there, `hits`, `reset_hits` and `close` say later that one was out of range.
            PlacementError: the buffer is closed.

        Cost: on CUDA, with rows on disk or a cache, ids that are on the device alone are waited for. With a cache, the
            rows found in it are copied by one thread at a time.
        """
        begun = time.perf_counter()
        if callable(out):
            out = out((len(ids), self.dim), self.dtype) if self.on == "cpu" else None
        rows = self._open().gather(ids, out, on_host)
        with self._lock:
            self.gather_s += time.perf_counter() - begun
        return rows

    @property
    def gathers_on(self) -> torch.device | None:
        """The GPU that gathers; None: the CPU does."""
        return None if self.on == "cpu" else self._open().device

    @property
    def asks_host(self) -> bool:
        """Whether the host needs the ids of what is read: rows are on disk, or cached."""
        return self.on == "cpu" or self._open().asks_host

    @property
    def foretold(self) -> bool:
        """Whether reads should be announced to `expect` before they come."""
        return self.cache is not None and self.cache.policy == "belady"

    def expect(self, batches: Iterable[np.ndarray]) -> None:
        """Announce the nodes of the coming batches, in order, to a "belady" cache; see `FeatureCache.expect`."""
        if self.cache is not None:
            nodes = (checked_nodes(batch, self.num_rows) for batch in batches)
            self.cache.expect([batch[self._places[batch] < OUTSIDE] for batch in nodes])

    def forget(self) -> None:
        """Drop announced reads that did not come, for example of an epoch that was broken off."""
        if self.cache is not None:
            self.cache.forget()

    @property
    def hits(self) -> dict[str, int]:
        """Rows read from each of `TIERS` since `reset_hits`, or since the buffer was made."""
        counts = (self._last if self._tiers is None else self._tiers.reads()) - self._before
        found = dict.fromkeys(TIERS, 0)
        for tier, count in zip(tier_of_tables(self.device, self.placement.num_devices), counts.tolist(), strict=True):
            found[tier] += count
        return found

    def reset_hits(self) -> None:
        """Count from 0 again."""
        self._before = self._open().reads()

    def close(self) -> None:
        """Release the rows; peers that mapped them keep them."""
        if self._tiers is not None:
            tiers, self._tiers = self._tiers, None
            try:
                self._last = tiers.reads()
            finally:
                tiers.close()

    def _open(self):
        if self._tiers is None:
            raise PlacementError("this FeatureBuffer is closed: make a new one")
        return self._tiers


class TypedBuffers(Column):
    """Placed features of a graph whose node types have tables of their own:

    The placement is one of all nodes, made with `place(row_bytes=features.row_bytes)`. Sparse rows are on no device:
    they are read from the store, and count as read from the host. A placement of nodes without dense features is
    ignored.

    Args:
        placement: Placement of the rows of all nodes, by store id.
        features: Features of the store, one table per node type; they stay open.
        device: The device of the placement that reads.
        caches: By node type, its cache for rows that are on no device, or None; empty: there are none.
        make: Makes the buffer of a node type: `FeatureBuffer`, or `FeatureBuffer.join` where each device has a process.
        options: Further arguments of `make`: `on`, `host`, `fingerprint`; for `FeatureBuffer.join` also `exchange` and
            `folder`.

    Attributes:
        buffers: By node type, its `FeatureBuffer`; None for a node type without dense features.
        num_rows, dim, dtype: As in the features.
        hits, gather_s, nbytes: As in `FeatureBuffer`, summed over the node types.

    Raises:
        PlacementError: no node type has dense features; also what `make` raises.
        ValueError: an argument outside its range.

    Cost: each node type's buffer, and a lookup of the type of each node that is gathered. On CUDA ids cross to the
        device once, if they are not there; sorting them by node type there takes a few more launches.
    """

    is_sparse, by_node_type = False, True
    supports = frozenset({"expect"})

    def __init__(
        self,
        placement: Placement,
        features: TypedFeatures,
        device: int = 0,
        *,
        on: str = "cpu",
        caches: Sequence[FeatureCache | None] = (),
        make: Callable[..., FeatureBuffer] = FeatureBuffer,
        fingerprint: str = "",
        **options,
    ):
        check_layout(placement, features, device, fingerprint)
        dense = [table is not None and not table.is_sparse and table.num_rows > 0 for table in features.tables]
        if not any(dense):
            raise PlacementError(
                "a placement needs dense features, but no node type has any: store dense rows, or go without placement"
            )
        if caches and len(caches) != len(dense):
            raise ValueError(f"caches must be one per node type, {len(dense)}, got {len(caches)}")
        self.placement, self.device, self.on = placement, device, on
        self.buffers: list[FeatureBuffer | None] = [None] * len(dense)
        options |= {"on": on, "fingerprint": fingerprint}
        try:
            for node_type in np.flatnonzero(dense):
                own, cache = (
                    placement_of_node_type(placement, features.node_types, node_type),
                    caches[node_type] if caches else None,
                )
                self.buffers[node_type] = make(own, features.tables[node_type], device, cache=cache, **options)
        except BaseException:
            self.close()
            raise
        tables = zip(self.buffers, features.tables, strict=True)
        self._rows = replace(features, tables=tuple(buffer or table for buffer, table in tables))
        self.num_rows, self.dim, self.dtype = features.num_rows, features.dim, features.dtype
        gpu = self._made[0].gathers_on
        self._device_types = None if gpu is None else _row_module(on).TypesOnDevice(features.node_types, gpu)
        self._sparse_reads, self.gather_s, self._lock = 0, 0.0, threading.Lock()

    def read(self, ids, out=None, on_host: np.ndarray | None = None) -> TypedRows:
        """Return a copy of rows, see `Column.read`; may be called from several threads at once.

        Args:
            ids: (num,) integers in [0, num_rows): an array or a tensor.
            out: A function that gives memory for dense rows; on CUDA it is not asked.
            on_host: The same ids on the host, where `ids` are on the device: nothing is then waited for.

        Returns:
            The rows, bit for bit what the store's own tables give; on CUDA dense rows and node types are tensors of
            the device.
        """
        begun = time.perf_counter()
        if self._device_types is None:
            ids = ids.numpy() if isinstance(ids, torch.Tensor) else ids
            rows = self._rows.read(ids if on_host is None else on_host, out)
        else:
            rows = self._read_on_device(ids, on_host)
        sparse = sum(table.num_rows for table in rows.tables if is_csr(table))
        with self._lock:
            self._sparse_reads += sparse
            self.gather_s += time.perf_counter() - begun
        return rows

    def _read_on_device(self, ids, on_host: np.ndarray | None) -> TypedRows:
        types = self._device_types
        if on_host is None and not (isinstance(ids, torch.Tensor) and ids.device == types.device):
            on_host = ids.numpy() if isinstance(ids, torch.Tensor) else ids
        located = None
        if on_host is not None:
            located = self._rows.node_types.locate(checked_rows(on_host, self.num_rows))
            if not (isinstance(ids, torch.Tensor) and ids.device == types.device):
                ids = _row_module(self.on).sent(on_host, types.device)
        node_type, by_type = types.locate(ids, None if located is None else located[0])
        tables: list = []
        for number, table in enumerate(self._rows.tables):
            own = None if located is None else located[1][located[0] == number]
            if isinstance(table, FeatureBuffer):
                tables.append(table.read(by_type[number], on_host=own))
            elif table is None:
                tables.append(None)
            else:
                tables.append(table.read(by_type[number].cpu().numpy() if own is None else own))
        return TypedRows(node_type, tables)

    @property
    def gathers_on(self) -> torch.device | None:
        """The GPU that gathers; None: the CPU does."""
        return None if self._device_types is None else self._device_types.device

    asks_host = True  # which counts the nodes of each type

    @property
    def foretold(self) -> bool:
        """Whether reads should be announced to `expect` before they come."""
        return any(buffer.foretold for buffer in self._made)

    def expect(self, batches: Iterable[np.ndarray]) -> None:
        """Announce the nodes of the coming batches, in order, to "belady" caches; see `FeatureCache.expect`."""
        located = [self._rows.node_types.locate(checked_rows(batch, self.num_rows)) for batch in batches]
        for number, buffer in enumerate(self.buffers):
            if buffer is not None and buffer.foretold:
                buffer.expect([row[node_type == number] for node_type, row in located])

    def forget(self) -> None:
        """Drop announced reads that did not come, for example of an epoch that was broken off."""
        for buffer in self._made:
            buffer.forget()

    @property
    def hits(self) -> dict[str, int]:
        """Rows read from each of `TIERS` since `reset_hits`, or since the buffers were made."""
        found = Counter({"host": self._sparse_reads})
        for buffer in self._made:
            found.update(buffer.hits)
        return {tier: found[tier] for tier in TIERS}

    def reset_hits(self) -> None:
        """Count from 0 again."""
        for buffer in self._made:
            buffer.reset_hits()
        with self._lock:
            self._sparse_reads = 0

    @property
    def nbytes(self) -> int:
        """Memory that the buffers take on their device, bytes."""
        return sum(buffer.nbytes for buffer in self._made)

    def close(self) -> None:
        """Release the rows; peers that mapped them keep them."""
        for buffer in self._made:
            buffer.close()

    @property
    def _made(self) -> list[FeatureBuffer]:
        return [buffer for buffer in self.buffers if buffer is not None]


def placement_of_node_type(placement: Placement, node_types: NodeTypes, node_type: int) -> Placement:
    """Return the placement of one node type's rows, numbered as in its table; shares and costs remain those of all."""
    rows = []
    for own in placement.rows:
        type_of, row = node_types.locate(np.asarray(own, np.int64))
        rows.append(row[type_of == node_type])
    ours = node_types.spread(np.arange(node_types.num_node_types) == node_type)
    on_disk = None if placement.on_disk is None else placement.on_disk[ours]
    return replace(placement, rows=tuple(rows), num_nodes=int(np.count_nonzero(ours)), on_disk=on_disk)


def _layout(placement, features, device, on, host, fingerprint, memory_bytes) -> RowLayout:
    if features is not None and features.by_node_type:
        raise PlacementError(
            "each node type has features of its own, and a FeatureBuffer has one table: use gs.TypedBuffers"
        )
    check_layout(placement, features, device, fingerprint)
    if host not in ("map", "copy"):
        raise ValueError(f'host must be "map" or "copy", got {short(host)}')
    if on != "cpu" and torch.device(on).type != "cuda":
        raise ValueError(f'on must be "cpu", "cuda" or one GPU like "cuda:0", got {short(on)}')
    return RowLayout(
        placement, as_stored(features)[0], host == "copy" or on != "cpu", parse_bytes(memory_bytes, "memory_bytes")
    )


def _row_module(on: str):
    """Return the module that makes rows: `cpu_tiers`, or `cuda_tiers`, which is imported when first needed."""
    if on == "cpu":
        return cpu_tiers
    from . import cuda_tiers

    return cuda_tiers


def _where(on: str) -> dict:
    return {} if on == "cpu" else {"on": on}
