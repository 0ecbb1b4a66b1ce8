"""Rows of simulated devices, host and disk, read by the CPU: all of them are addresses of this process."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ..triton_kernels.gather_rows import RowCode, RowTables, gather_rows, gather_tiers
from ..triton_kernels.gather_rows.cpu import first_outside
from .feature_cache import FeatureCache, write_rows
from .placement import OUTSIDE, LaidRows, RowLayout, first_place, group_of
from .shared_rows import SharedRows, make_on_all, own_rows


def lay_here(layout: RowLayout, devices: list[int]) -> LaidRows:
    """Make the rows that some devices read, in memory of this process."""
    placement, features = layout.placement, layout.features
    rows = [None] * placement.num_devices
    for peer in {peer for device in devices for peer in group_of(placement, device)}:
        rows[peer] = private_copy(layout, layout.device_rows(peer))
    host_ids = layout.host_ids(devices)
    host = features.array if host_ids is None else private_copy(layout, host_ids)
    return [features.array, host, *rows], host_ids


def lay_jointly(
    layout: RowLayout, device: int, here: list[int], exchange: Callable[[object], list], folder: str | Path | None
) -> LaidRows:
    """Make the rows of one device, and those of the host if it is the first device here; map the rows of the others.

    `here` are the devices on this host; rows are kept in `folder`, None: memory. See `FeatureBuffer.join`.
    """
    placement, host_ids = layout.placement, layout.host_ids(here)

    def make():
        own = shared_copy(layout, layout.device_rows(device), folder)
        host = shared_copy(layout, host_ids, folder) if layout.copies_host and device == here[0] else None
        return (own, host), (own.handle, host and host.handle)

    (own, own_host), handles = make_on_all(exchange, device, make)

    def map_others():
        rows = [None] * placement.num_devices
        for peer in group_of(placement, device):
            rows[peer] = own.array if peer == device else SharedRows.attach(handles[peer][0]).array
        host = layout.features.array
        if layout.copies_host:
            host = (own_host or SharedRows.attach(handles[here[0]][1])).array
        return ([layout.features.array, host, *rows], host_ids), None

    laid, _ = make_on_all(exchange, device, map_others)
    own.release()
    if own_host is not None:
        own_host.release()
    return laid


def private_copy(layout: RowLayout, ids: np.ndarray) -> np.ndarray:
    """Return a copy of rows in memory of this process."""
    features = layout.features
    return features.read(ids, out=own_rows(len(ids), features.dim, features.dtype))


def shared_copy(layout: RowLayout, ids: np.ndarray, folder: str | Path | None = None) -> SharedRows:
    """Return a copy of rows that the processes of this host can map."""
    features = layout.features
    rows = SharedRows.create(len(ids), features.dim, features.dtype, folder)
    features.read(ids, out=rows.array)
    return rows


class CPUTiers:
    """Gather rows out of arrays; may be called from several threads at once.

    Args:
        places: (num_nodes,) int64, as from `row_places`.
        tables: One array per table, without the cache's; None for a table that this device does not read.
        dim, dtype: Length and dtype of a row as it is stored.
        cache: Cache of rows that are on no device, or None.
        code: Format of quantised rows, which are decoded when gathered. None: rows are returned as
            stored.
    """

    def __init__(
        self,
        places: np.ndarray,
        tables: list,
        dim: int,
        dtype: np.dtype,
        cache: FeatureCache | None,
        code: RowCode | None = None,
    ):
        row_bytes = dim * dtype.itemsize
        self.places, self.cache, self.dim, self.dtype, self.code = places, cache, dim, dtype, code
        self._reads, self._lock = np.zeros(len(tables) + 1, np.int64), threading.Lock()
        self._tables = RowTables([*tables, None], row_bytes)
        self._cached_rows = None
        if cache is not None:
            self._cached_rows = own_rows(cache.capacity, dim, dtype)
            self._cached = RowTables([None] * len(tables) + [self._cached_rows], row_bytes)
            self._cache_place = first_place(len(tables))

    @property
    def cache_bytes(self) -> int:
        return 0 if self.cache is None else self._cached_rows.nbytes

    def reads(self) -> np.ndarray:
        """Return (num_tables,) int64, the rows read from each table so far."""
        with self._lock:
            return self._reads.copy()

    def gather(self, nodes, out: np.ndarray | None, on_host: np.ndarray | None = None) -> np.ndarray:
        """Copy rows; see `FeatureBuffer.read`."""
        nodes = nodes if on_host is None else on_host
        nodes = as_ids(nodes) if self.cache is None else checked_nodes(nodes, len(self.places))
        shape, dtypes = (len(nodes), self.dim), (self.dtype,)
        if self.code is not None:
            shape, dtypes = (len(nodes), self.code.dim), (np.dtype(np.float32), np.dtype(np.float16), torch.bfloat16)
        if out is None:
            out = np.empty(shape, dtypes[0])
        elif tuple(out.shape) != shape or out.dtype not in dtypes or not _is_contiguous(out):
            raise ValueError(
                f"out must be C-contiguous {dtypes[0]} of shape {shape}, got {out.dtype} of shape {out.shape}"
            )
        reads = np.zeros(len(self._tables), np.int64)
        if self.cache is None:
            gather_tiers(self.places, nodes, self._tables, out, reads, self.code)
        elif self.code is None:
            self._gather_cached(nodes, out, reads)
        else:
            stored = np.empty((len(nodes), self.dim), self.dtype)
            self._gather_cached(nodes, stored, reads)
            gather_rows(stored, np.arange(len(nodes)), out, self.code)
        with self._lock:
            self._reads += reads
        return out

    def _gather_cached(self, nodes: np.ndarray, out: np.ndarray, reads: np.ndarray) -> None:
        with self.cache.lock:  # a slot may be reused as soon as the lock is free
            resolved = self.cache.resolve(nodes, self.places, OUTSIDE, self._cache_place)
            gather_tiers(resolved.places, None, self._cached, out, reads)
        gather_tiers(resolved.places, None, self._tables, out, reads)
        with self.cache.lock:
            slots, positions = self.cache.confirm(nodes, resolved)
            if len(slots) and out.size:
                write_rows(_bytes(self._cached_rows), slots, _bytes(out), positions, self._tables.row_bytes)

    def close(self) -> None:
        """Release the rows."""
        self._tables = self._cached = self._cached_rows = None


def _is_contiguous(out: np.ndarray | torch.Tensor) -> bool:
    return out.is_contiguous() if isinstance(out, torch.Tensor) else out.flags.c_contiguous


def _bytes(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(-1).view(np.uint8)


def checked_nodes(nodes, num_rows: int) -> np.ndarray:
    """Return ids as contiguous int32 or int64; ValueError unless all are in [0, num_rows)."""
    nodes = as_ids(nodes)
    outside = first_outside(nodes, num_rows)
    if outside >= 0:
        raise ValueError(f"nodes[{outside}] must be in [0, {num_rows}), got {nodes[outside]}")
    return nodes


def as_ids(nodes) -> np.ndarray:
    """Return ids as contiguous int32 or int64; ValueError unless they are one-dimensional integers."""
    nodes = np.ascontiguousarray(nodes)
    if nodes.ndim != 1 or (nodes.dtype.kind not in "iu" and len(nodes)):
        raise ValueError(f"nodes must be one-dimensional integers, got {nodes.dtype} of shape {nodes.shape}")
    return nodes if nodes.dtype in (np.int32, np.int64) else nodes.astype(np.int64)
