"""Rows in memory that the processes of one host share, without a name that could be left behind."""

import hashlib
import mmap
import os
import platform
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from ..errors import PlacementError, clear_error
from ..system import MADV_HUGEPAGE
from .placement import Placement

Made = TypeVar("Made")


def gather_objects(own: object) -> list:
    """Return the objects of all ranks; PlacementError without a process group."""
    if not torch.distributed.is_initialized():
        raise PlacementError("FeatureBuffer.join needs torch.distributed, or exchange=: use in_one_process without it")
    objects = [None] * torch.distributed.get_world_size()
    with clear_error("agreeing with the other processes"):
        torch.distributed.all_gather_object(objects, own)
    return objects


def digest_of(placement: Placement) -> str:
    """Return what distinguishes placements of different rows."""
    digest = hashlib.sha256(repr((placement.num_nodes, placement.groups)).encode())
    for rows in placement.rows:
        digest.update(len(rows).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(rows, np.int64))
    if placement.on_disk is not None:
        digest.update(np.packbits(placement.on_disk))
    return digest.hexdigest()[:16]


def devices_here(placement: Placement, device: int, processes: list[tuple[int, str, str]]) -> list[int]:
    """Return the devices on this host, ascending; processes: (device, machine, digest of the placement) of each.

    Raises:
        PlacementError: the processes are not one a device, a group spans hosts, or those of a host placed other rows.
    """
    where = {number: machine for number, machine, _ in processes}
    named = sorted(number for number, _, _ in processes)
    if named != list(range(placement.num_devices)):
        raise PlacementError(
            f"the placement has {placement.num_devices} devices, the processes are for {named}: place for as many "
            f"devices as there are processes"
        )
    for group in placement.groups:
        if len({where[number] for number in group}) > 1:
            raise PlacementError(f"the devices {group} of one group are on different hosts: give groups= by host")
    for host in set(where.values()):
        if len({digest for _, machine, digest in processes if machine == host}) > 1:
            raise PlacementError(
                "the processes of a host have placements that differ: place with the same arguments on each, a number "
                "for alpha= among them, or make the placement on one and send it to the others"
            )
    return [number for number in named if where[number] == where[device]]


def make_on_all(
    exchange: Callable[[object], list], device: int, make: Callable[[], tuple[Made, object]]
) -> tuple[Made, dict[int, object]]:
    """Make something, and exchange the handles for it. If one process cannot make its own, all raise.

    A process that raised before it exchanged would leave the others waiting. `make` returns what it made, and a handle
    for it; returned are what this process made, and the handles by device.
    """
    made = handle = failure = None
    try:
        made, handle = make()
    except Exception as error:
        failure = error
    answers = exchange((device, handle, failure and (str(failure) or type(failure).__name__)))
    if failure is not None:
        raise failure
    for other, _, reason in answers:
        if reason is not None:
            raise PlacementError(f"device {other} could not share its rows: {reason}")
    return made, {other: handle for other, handle, _ in answers}


class RowHandle(NamedTuple):
    """What another process of the host needs to map the rows, while the process that made them holds its file open."""

    pid: int
    fd: int
    shape: tuple[int, int]
    dtype: str


class SharedRows:
    """A (num_rows, dim) array that others of this host can map.

    It is a file without a name (in memory, or in a given folder): it is freed with the last process that
    maps it, however that ends.

    Attributes:
        array: (num_rows, dim), page-aligned; writable by the process that made it.
        handle: for `SharedRows.attach` of other processes, until `release`, or until this object is gone.
    """

    def __init__(self, array: np.ndarray, fd: int = -1):
        self.array, self._fd = array, fd

    @classmethod
    def create(cls, num_rows: int, dim: int, dtype: np.dtype, folder: str | Path | None = None) -> "SharedRows":
        """Make rows with undefined contents, in a folder on a file system that keeps unnamed files; None: in memory.

        Raises:
            PlacementError: there is no space, or the folder does not take unnamed files.
        """
        try:
            fd = _unnamed_file(folder)
        except (OSError, AttributeError) as error:
            raise PlacementError(
                f"no shared memory in {folder or 'this system'}: {error}: give folder= of a local Linux file system"
            ) from None
        try:
            return cls(_allocate(fd, (num_rows, dim), np.dtype(dtype), folder), fd)
        except PlacementError:
            os.close(fd)
            raise

    def extend(self, num_rows: int) -> None:
        """Have more rows, the first of which are those of before; others map them again, by the new shape.

        Raises:
            PlacementError: there is no space.
        """
        self.array = _allocate(self._fd, (num_rows, self.array.shape[1]), self.array.dtype)

    @classmethod
    def attach(cls, handle: RowHandle, write: bool = False) -> "SharedRows":
        """Map the rows of another process of this host, for writing too where they will be pinned.

        Raises:
            PlacementError: that process has ended, or may not be read.
        """
        try:
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR if write else os.O_RDONLY)
        except OSError as error:
            raise PlacementError(
                f"the rows of process {handle.pid} cannot be mapped ({error.strerror}): "
                f"ranks that share rows must run on one host as one user, and all be alive"
            ) from None
        try:
            return cls(_map(fd, handle.shape, np.dtype(handle.dtype), write))
        finally:
            os.close(fd)

    @property
    def handle(self) -> RowHandle:
        if self._fd < 0:
            raise PlacementError("these rows can no longer be shared: their file was closed")
        return RowHandle(os.getpid(), self._fd, self.array.shape, self.array.dtype.str)

    def release(self) -> None:
        """Close the file, once all have mapped it; the rows stay as long as a process maps them."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self):
        self.release()  # rows that found no space, or no peers, are not held for good


def own_rows(num_rows: int, dim: int, dtype: np.dtype) -> np.ndarray:
    """Return (num_rows, dim) rows of this process, page-aligned: a row of whole cache lines then touches no others."""
    dtype = np.dtype(dtype)
    if num_rows * dim * dtype.itemsize == 0:
        return np.empty((num_rows, dim), dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory seldom comes in huge pages: 15% slower to gather from
    return _as_rows(mmap.mmap(-1, num_rows * dim * dtype.itemsize, flags), (num_rows, dim), dtype)


def machine_id() -> str:
    """Return what identifies this running system."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else platform.node()}"


def _unnamed_file(folder: str | Path | None) -> int:
    if folder is None:
        return os.memfd_create("gnnscale-rows")
    return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)


def _allocate(fd: int, shape: tuple[int, int], dtype: np.dtype, folder: str | Path | None = None) -> np.ndarray:
    """Give a file space for rows, and map them."""
    num_rows, row_bytes = shape[0], shape[1] * dtype.itemsize
    try:
        if num_rows * row_bytes:
            os.posix_fallocate(fd, 0, num_rows * row_bytes)
        return _map(fd, shape, dtype, write=True)
    except OSError as error:
        raise PlacementError(
            f"no space for {num_rows} rows of {row_bytes} bytes in {folder or 'shared memory'}: {error}: place fewer "
            "rows (buffer_rows=, host_rows=) or give another folder="
        ) from None


def _map(fd: int, shape: tuple[int, int], dtype: np.dtype, write: bool) -> np.ndarray:
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if num_bytes == 0:
        return np.empty(shape, dtype)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    return _as_rows(mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, access), shape, dtype)


def _as_rows(memory: mmap.mmap, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    if MADV_HUGEPAGE is not None:
        with suppress(OSError):  # a kernel without them
            memory.madvise(MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
