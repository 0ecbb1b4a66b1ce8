"""Rows of own memory, peers and pinned host memory read by one kernel, rows on disk through pinned blocks.

On a CPU device, which tests use, the kernel runs in Triton's interpreter.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ..errors import PlacementError
from ..memory import free_memory_bytes
from ..partition_store.features import as_stored
from ..partition_store.typed_features import NodeTypes
from ..triton_kernels.gather_rows import RowCode, RowTables
from ..triton_kernels.gather_rows.op import gather_tiers_with_triton
from .cpu_tiers import as_ids, checked_nodes, private_copy, shared_copy
from .feature_cache import FeatureCache
from .link_cost import gpu_uuid, gpus_seen
from .placement import HOST_TABLE, OUTSIDE, LaidRows, RowLayout, check_host_space, first_place, group_of
from .shared_rows import SharedRows, make_on_all

_BLOCK_BYTES = 64 << 20
_PORTABLE_AND_MAPPED = 3  # flags of cudaHostRegister


def device_of(on: str, device: int) -> torch.device:
    """Return the torch device of a device of the placement: `on` itself, or the GPU of that number for "cuda"."""
    return torch.device("cuda", device) if on == "cuda" else torch.device(on)


def lay_here(layout: RowLayout, devices: list[int], on: str) -> LaidRows:
    """Make the rows that some devices read, all by this process."""
    placement = layout.placement
    rows: list[Tensor | None] = [None] * placement.num_devices
    for peer in {peer for device in devices for peer in group_of(placement, device)}:
        rows[peer] = fill_device(layout, peer, device_of(on, peer))
    for device in devices:
        open_peers(device_of(on, device), [rows[peer] for peer in group_of(placement, device)])
    host_ids = layout.host_ids(devices)
    check_host_space(len(host_ids), layout.row_bytes, free_memory_bytes())
    host = pinned(private_copy(layout, host_ids), device_of(on, devices[0]))
    return [None, host, *rows], host_ids


def lay_jointly(
    layout: RowLayout,
    device: int,
    here: list[int],
    exchange: Callable[[object], list],
    folder: str | Path | None,
    on: str,
) -> LaidRows:
    """Make the rows of one GPU, and of the host if it is the first device here; map those of the other processes.

    Arguments are those of `cpu_tiers.lay_jointly`. A process may number the GPUs in another way: they are told by their
    own ids, and one that a process does not see is refused.
    """
    placement, own_device = layout.placement, device_of(on, device)
    host_ids = layout.host_ids(here)

    def make():
        if device == here[0]:
            check_host_space(len(host_ids), layout.row_bytes, free_memory_bytes())
        own = fill_device(layout, device, own_device)
        host = shared_copy(layout, host_ids, folder) if device == here[0] else None
        # What is handed over is kept until a peer has released it: without a peer, for ever.
        handed = handed_over(own) if len(group_of(placement, device)) > 1 else None
        return (own, host), (handed, host and host.handle)

    (own, own_host), handles = make_on_all(exchange, device, make)

    def map_others():
        rows: list[Tensor | None] = [None] * placement.num_devices
        for peer in group_of(placement, device):
            if peer == device:
                rows[peer] = own
            else:
                rows[peer] = taken_over(*handles[peer][0])
        open_peers(own_device, [rows[peer] for peer in group_of(placement, device)])
        host = own_host or SharedRows.attach(handles[here[0]][1], write=True)
        return ([None, pinned(host.array, own_device), *rows], host_ids), None

    laid, _ = make_on_all(exchange, device, map_others)
    if own_host is not None:
        own_host.release()
    return laid


_DEVICE = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")


def handed_over(rows: Tensor) -> tuple[str, Callable, tuple]:
    """Return what another process needs to read rows: the id of their GPU, and how they are made there."""
    return (gpu_uuid(rows.device) if rows.is_cuda else "", *reduce_tensor(rows))


def taken_over(uuid: str, rebuild: Callable, arguments: tuple) -> Tensor:
    """Return the rows of another process, on their GPU as this process numbers it; PlacementError if it sees none."""
    if rebuild is rebuild_cuda_tensor:
        (device,) = gpus_seen([uuid])
        if device is None:
            raise PlacementError(
                f"a peer's rows are on the GPU {uuid}, which this process does not see: let each process see all GPUs "
                "of its group (CUDA_VISIBLE_DEVICES; srun without --gpus-per-task), or give groups= of one device each"
            )
        arguments = (*arguments[:_DEVICE], device.index, *arguments[_DEVICE + 1 :])
    return rebuild(*arguments)


def fill_device(layout: RowLayout, number: int, device: torch.device) -> Tensor:
    """Return the rows of one device in its memory; PlacementError if it has no space for them."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    ids = layout.device_rows(number, free)
    rows = torch.empty((len(ids), layout.row_bytes), dtype=torch.uint8, device=device)
    step = max(1, _BLOCK_BYTES // max(1, layout.row_bytes))
    for first in range(0, len(ids), step):
        block = layout.features.read(ids[first : first + step])
        rows[first : first + step].copy_(as_bytes(block))
    return rows


def free_device_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes that are free on a GPU, and the most that were held at once beyond what is held now.

    The latter are torch's to hand out again: they do not count as free.
    """
    held = torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0], torch.cuda.max_memory_allocated(device) - held


def open_peers(device: torch.device, rows: Iterable[Tensor]) -> None:
    """Let kernels of a device read the memory of others; PlacementError if they do not reach each other."""
    for other in rows:
        if other.device == device or len(other) == 0:
            continue
        if not torch.cuda.can_device_access_peer(device, other.device):
            raise PlacementError(
                f"{device} cannot read the memory of {other.device}: give groups= of devices that reach each other"
            )
        # A copy opens the way from where it reads to where it writes: here the reader's to the rows.
        torch.empty(1, dtype=torch.uint8, device=device).to(other.device)


def pinned(rows: np.ndarray, device: torch.device) -> Tensor:
    """Return rows of host memory that kernels read in place, pinned as long as the tensor lives."""
    table = as_bytes(rows)
    if device.type == "cuda" and table.numel():
        with torch.cuda.device(device):
            error = torch.cuda.cudart().cudaHostRegister(table.data_ptr(), table.numel(), _PORTABLE_AND_MAPPED)
        if int(error) != 0:
            raise PlacementError(
                f"{table.numel()} bytes of host rows cannot be pinned (CUDA error {int(error)}): "
                f"give host_rows= below {len(table)} to place(), or raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(table, _unpin, table.data_ptr(), rows).atexit = False
    return table


def _unpin(address: int, rows: np.ndarray) -> None:
    """Unpin memory; `rows` is held until here."""
    torch.cuda.cudart().cudaHostUnregister(address)


def as_bytes(rows: np.ndarray) -> Tensor:
    """Return a (num_rows, row_bytes) uint8 tensor over the same memory."""
    if rows.size == 0:
        return torch.empty((len(rows), rows.dtype.itemsize * rows.shape[1]), dtype=torch.uint8)
    return torch.from_numpy(rows.reshape(len(rows), -1).view(np.uint8))


_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class CUDATiers:
    """Gather rows on a device; may be called from several threads at once, on any streams.

    Args:
        places: (num_nodes,) int64, as from `row_places`.
        tables: (num_rows, row_bytes) uint8 tensors; None for a table that this device does not read, and for the disk.
        features: The table of all rows, from which rows on disk are read; quantised rows are decoded when gathered.
        cache: Cache of rows that are on no device, or None.
        device: The device that reads.
        ring_rows, ring_blocks: Rows of a block, and number of blocks, of the ring of pinned memory that rows on disk
            pass through.
    """

    def __init__(
        self,
        places: np.ndarray,
        tables: list,
        features,
        cache: FeatureCache | None,
        device: torch.device,
        ring_rows: int = 8192,
        ring_blocks: int = 4,
    ):
        self.device, self.cache, self.dim = device, cache, features.dim
        self.dtype = torch_dtype(np.dtype(features.dtype))
        self.features, self.code = as_stored(features)
        self._row_bytes = self.features.dim * np.dtype(self.features.dtype).itemsize
        self._cached_rows = None
        if cache is not None:
            self._cached_rows = torch.empty((cache.capacity, self._row_bytes), dtype=torch.uint8, device=device)
        self.cache_bytes = 0 if cache is None else self._cached_rows.numel()
        self._cache_place, self._cache_used = first_place(len(tables)), None
        self._tables = RowTables([None, *tables[1:], self._cached_rows], self._row_bytes)
        self._num_nodes, self._places = len(places), torch.from_numpy(places).to(device)
        on_disk = bool((places < first_place(HOST_TABLE)).any())
        # Which rows are on disk, or cached, is found on the host; without such rows nothing waits for the device.
        self._host_places = places if on_disk or cache is not None else None
        self._ring_rows, self._ring = ring_rows, SimpleQueue()
        for _ in range(ring_blocks if on_disk else 0):
            self._ring.put(_Block(ring_rows, self.features, device))
        self._reads = torch.zeros(len(tables) + 1, dtype=torch.int64, device=device)
        # The lowest id, negated, and the highest of those whose range the host did not check.
        self._ends, self._both = torch.zeros(2, dtype=torch.int64, device=device), torch.arange(2, device=device)
        self._disk_reads, self._lock = 0, threading.Lock()

    @property
    def asks_host(self) -> bool:
        """Whether the host needs the ids of what is read."""
        return self._host_places is not None

    def reads(self) -> np.ndarray:
        """Return (num_tables,) int64, the rows read from each table so far; waits for the device.

        Raises:
            ValueError: since the last call an id was out of range that was on the device alone.
        """
        low, high = self._ends.tolist()
        if -low < 0 or high >= self._num_nodes > 0:
            self._ends.zero_()
            raise ValueError(f"nodes must be in [0, {self._num_nodes}), got {-low} to {high}: rows of others were read")
        counts = self._reads.cpu().numpy().copy()
        with self._lock:
            counts[0] += self._disk_reads
        return counts

    def gather(self, nodes, out: Tensor | None, on_host: np.ndarray | None = None) -> Tensor:
        """Copy rows; see `FeatureBuffer.read`."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if on_host is None and not (isinstance(nodes, Tensor) and nodes.device == self.device):
                on_host = nodes.numpy() if isinstance(nodes, Tensor) else nodes
            if on_host is None and self._host_places is not None:
                on_host = nodes.cpu().numpy()
            if on_host is not None:
                on_host = checked_nodes(on_host, self._num_nodes)
            if self._host_places is None:
                nodes = self._on_device(nodes, on_host)
                out = self._checked_out(out, len(nodes))
                self._launch(self._places, nodes, out, self.code)
                return out
            out = self._checked_out(out, len(on_host))
            stored = out
            if self.code is not None:
                stored = torch.empty((len(on_host), self._row_bytes), dtype=torch.uint8, device=self.device)
            if self.cache is None:
                self._launch(self._places, self._on_device(nodes, on_host), stored)
                self._stage(self._host_places[on_host], on_host, stored)
            else:
                self._gather_cached(on_host, stored)
            if self.code is not None and out.numel():
                places = torch.arange(len(on_host), device=self.device)
                gather_tiers_with_triton(places, None, RowTables([stored]), out, None, self.code)
            return out

    def close(self) -> None:
        """Wait for the device and release the rows."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._tables = self._cached_rows = None

    def _gather_cached(self, nodes: np.ndarray, out: Tensor) -> None:
        with self.cache.lock:  # a slot may be reused as soon as the lock is free: later writes wait for this read
            resolved = self.cache.resolve(nodes, self._host_places, OUTSIDE, self._cache_place)
            self._wait_for_cache()
            self._launch(sent(resolved.places, self.device), None, out)
            self._mark_cache()
        self._stage(resolved.places, nodes, out)
        with self.cache.lock:
            slots, positions = self.cache.confirm(nodes, resolved)
            if len(slots) and self._row_bytes:
                self._wait_for_cache()
                rows = self._items(out).index_select(0, sent(positions, self.device))
                self._cached_rows.view(rows.dtype).index_copy_(0, sent(slots, self.device), rows)
                self._mark_cache()

    def _launch(self, places: Tensor, nodes: Tensor | None, out: Tensor, code: RowCode | None = None) -> None:
        if out.numel():
            gather_tiers_with_triton(places, nodes, self._tables, out, self._reads, code)

    def _stage(self, places: np.ndarray, nodes: np.ndarray, out: Tensor) -> None:
        """Bring the rows on disk through the ring: a block is read while others are on their way."""
        on_disk = np.flatnonzero(places < first_place(HOST_TABLE))
        with self._lock:
            self._disk_reads += len(on_disk)
        if len(on_disk) == 0 or not out.numel():
            return
        rows = self._items(out)
        for first in range(0, len(on_disk), self._ring_rows):
            positions = on_disk[first : first + self._ring_rows]
            block = self._ring.get()
            try:
                staged = block.fill(self.features, nodes[positions]).view(rows.dtype)
                rows.index_copy_(0, sent(positions, self.device), staged.to(self.device, non_blocking=True))
                block.mark_used()
            finally:
                self._ring.put(block)

    def _items(self, out: Tensor) -> Tensor:
        """View rows as the widest integers that divide them."""
        unit = next(unit for unit in _UNITS if (self._row_bytes | out.data_ptr()) % unit == 0)
        return out.view(torch.uint8).view(_UNITS[unit])

    def _wait_for_cache(self) -> None:
        if self._cache_used is not None:
            torch.cuda.current_stream().wait_event(self._cache_used)

    def _mark_cache(self) -> None:
        if self.device.type == "cuda":
            self._cache_used = torch.cuda.current_stream().record_event()

    def _on_device(self, nodes, on_host: np.ndarray | None) -> Tensor:
        """Return ids on the device, all of them in range; on_host: the same, checked, or None."""
        if not isinstance(nodes, Tensor) or nodes.device != self.device:
            return sent(on_host, self.device)
        if nodes.dim() != 1 or nodes.is_floating_point() or nodes.dtype == torch.bool:
            raise ValueError(f"nodes must be one-dimensional integers, got {nodes.dtype} of shape {tuple(nodes.shape)}")
        if on_host is None and len(nodes):
            # The host does not wait: `reads` says later that an id was out of range, and memory is safe until then.
            low, high = torch.aminmax(nodes.long())
            self._ends.scatter_reduce_(0, self._both, torch.stack([-low, high]), "amax")
            nodes = nodes.clamp(0, max(0, self._num_nodes - 1))
        return nodes.contiguous()

    def _checked_out(self, out: Tensor | None, num: int) -> Tensor:
        shape = (num, self.dim)
        if out is None:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        fits = isinstance(out, Tensor) and out.is_contiguous() and out.device == self.device
        dtypes = (self.dtype,) if self.code is None else (torch.float32, torch.float16, torch.bfloat16)
        if not fits or tuple(out.shape) != shape or out.dtype not in dtypes:
            kind = f"{out.dtype} of shape {tuple(out.shape)}" + (f" on {out.device}" if isinstance(out, Tensor) else "")
            raise ValueError(
                f"out must be a contiguous {self.dtype} tensor of shape {shape} on {self.device}, got {kind}"
            )
        return out


class TypesOnDevice:
    """The node type of a node, and its row among those of that type, found on a device; see `NodeTypes`.

    Args:
        node_types: Where the nodes of each node type are.
        device: The device that looks them up.

    Cost: 16 bytes of the device for each node type in each part; a lookup is a binary search among these.
    """

    def __init__(self, node_types: NodeTypes, device: torch.device):
        self.device, self._num_types = device, node_types.num_node_types
        self._starts, self._rows = (torch.from_numpy(np.array(own)).to(device) for own in node_types[:2])

    def locate(self, nodes: Tensor, type_on_host: np.ndarray | None) -> tuple[Tensor, list[Tensor]]:
        """Return (num,) int64 node types, and by node type the rows of its nodes in the order in which they come.

        Args:
            nodes: (num,) ids on the device; ValueError if one is out of range.
            type_on_host: The node types where the host knows them: it then waits for nothing, and the ids are in range.
        """
        nodes, starts = nodes.long(), self._starts
        run = torch.bucketize(nodes, starts, right=True).sub_(1).clamp_(0, len(starts) - 2)
        node_type = run % self._num_types
        if type_on_host is None:
            ends = torch.stack(torch.aminmax(nodes)) if len(nodes) else nodes.new_zeros(2)
            told = torch.cat([torch.bincount(node_type, minlength=self._num_types), ends, starts[-1:]]).tolist()
            counts, (low, high, num_nodes) = told[:-3], told[-3:]
            if len(nodes) and not 0 <= low <= high < num_nodes:
                raise ValueError(f"node ids must be in [0, {num_nodes}), got {low} to {high}")
        else:
            counts = np.bincount(type_on_host, minlength=self._num_types).tolist()
        row = self._rows[run] + nodes - starts[run]
        order = torch.argsort(node_type, stable=True)
        return node_type, list(row[order].split(counts))


def sent(ids: np.ndarray, device: torch.device) -> Tensor:
    """Return an array of the host on a device, through pinned memory that torch reuses once it is copied."""
    tensor = torch.from_numpy(np.ascontiguousarray(ids))
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class _Block:
    """One block of the ring, in pinned memory."""

    def __init__(self, num_rows: int, features, device: torch.device):
        dtype = np.dtype(features.dtype)
        row_bytes = features.dim * dtype.itemsize
        self.rows = torch.empty((num_rows, row_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._typed = self.rows.numpy().view(dtype).reshape(num_rows, features.dim) if row_bytes else None
        self._used = torch.cuda.Event() if device.type == "cuda" else None

    def fill(self, features, ids: np.ndarray) -> Tensor:
        """Read rows into the block, once the device is done with what it held; return them."""
        if self._used is not None:
            self._used.synchronize()
        features.read(as_ids(ids), out=self._typed[: len(ids)])
        return self.rows[: len(ids)]

    def mark_used(self) -> None:
        """Note that the device reads the block until what was launched so far is done."""
        if self._used is not None:
            self._used.record()


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """Return torch's name of a dtype; PlacementError if it has none."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError:
        if isinstance(getattr(torch, dtype.name, None), torch.dtype):
            return getattr(torch, dtype.name)  # bfloat16 and the like, from packages that add them to numpy
        raise PlacementError(
            f"features of dtype {dtype} cannot be on a GPU: store them as float32 or float16"
        ) from None
