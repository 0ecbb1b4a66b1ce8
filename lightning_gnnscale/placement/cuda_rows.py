"""The rows of GPUs and the pinned rows of the host, made in one process or by the processes of a host together.

Tables are (num_rows, row_bytes) uint8 tensors: their addresses are what the kernel needs. Given "cpu" for a GPU, which
tests do, nothing is pinned and no peer access is opened.
"""

import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from ..errors import PlacementError
from .cpu_rows import private_copy, shared_copy
from .joining import make_on_all
from .row_layout import LaidRows, RowLayout, group_of
from .shared_rows import SharedRows

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
    host = pinned(private_copy(layout, host_ids), device_of(on, devices[0]))
    return LaidRows([None, host, *rows], host_ids)


def lay_jointly(
    layout: RowLayout,
    device: int,
    here: list[int],
    exchange: Callable[[object], list],
    folder: str | Path | None,
    on: str,
) -> LaidRows:
    """Make the rows of one GPU, and of the host if it is the first device here; map those of the other processes.

    Args: see `cpu_rows.lay_jointly`; all processes see the same GPUs under the same numbers.
    """
    placement, own_device = layout.placement, device_of(on, device)
    host_ids = layout.host_ids(here)

    def make():
        own = fill_device(layout, device, own_device)
        host = shared_copy(layout, host_ids, folder) if device == here[0] else None
        # What is handed over is kept until a peer has let go of it: without a peer, for ever.
        handed = reduce_tensor(own) if len(group_of(placement, device)) > 1 else None
        return (own, host), (handed, host and host.ticket)

    (own, own_host), tickets = make_on_all(exchange, device, make)

    def map_others():
        rows: list[Tensor | None] = [None] * placement.num_devices
        for peer in group_of(placement, device):
            if peer == device:
                rows[peer] = own
            else:
                rebuild, arguments = tickets[peer][0]
                rows[peer] = rebuild(*arguments)
        open_peers(own_device, [rows[peer] for peer in group_of(placement, device)])
        host = own_host or SharedRows.attach(tickets[here[0]][1], write=True)
        return LaidRows([None, pinned(host.array, own_device), *rows], host_ids), None

    laid, _ = make_on_all(exchange, device, map_others)
    if own_host is not None:
        own_host.release()
    return laid


def fill_device(layout: RowLayout, number: int, device: torch.device) -> Tensor:
    """Return the rows of one device in its memory.

    Raises:
        PlacementError: it has no room for them.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    ids = layout.device_rows(number, free)
    rows = torch.empty((len(ids), layout.row_bytes), dtype=torch.uint8, device=device)
    step = max(1, _BLOCK_BYTES // max(1, layout.row_bytes))
    for first in range(0, len(ids), step):
        block = layout.features.gather(ids[first : first + step])
        rows[first : first + step].copy_(as_bytes(block))
    return rows


def open_peers(device: torch.device, rows: Iterable[Tensor]) -> None:
    """Let kernels of a device read the memory of others.

    Raises:
        PlacementError: the devices do not reach each other.
    """
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
    """Return rows of host memory that kernels read in place; they are pinned as long as the tensor lives.

    Raises:
        PlacementError: they cannot be pinned.
    """
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
    """Give pinned memory back; `rows` is held until here."""
    torch.cuda.cudart().cudaHostUnregister(address)


def as_bytes(rows: np.ndarray) -> Tensor:
    """Return a (num_rows, row_bytes) uint8 tensor over the same memory."""
    if rows.size == 0:
        return torch.empty((len(rows), rows.dtype.itemsize * rows.shape[1]), dtype=torch.uint8)
    return torch.from_numpy(rows.reshape(len(rows), -1).view(np.uint8))
