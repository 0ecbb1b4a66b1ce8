"""Values for other processes of this host: arrays in memory are shared, arrays on files are mapped again."""

import io
import itertools
import mmap
import os
import pickle
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import GNNScaleError
from ..partition_store.array_file import file_place

LINE_BYTES = 64
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # views of dtypes that numpy lacks
_numbers = itertools.count()


class PackedValue(NamedTuple):
    """A value split into its arrays and the rest.

    Attributes:
        meta: Everything but the arrays, pickled.
        views: Bytes of the arrays.
        spans: (start, stop) of each array's bytes once they are written; each start is a multiple of a cache line.
        num_bytes: Bytes of all spans together.
    """

    meta: bytes
    views: list[memoryview]
    spans: list[tuple[int, int]]
    num_bytes: int

    def write(self, fd: int) -> None:
        """Write the arrays into a file that has space for them."""
        for view, (start, _) in zip(self.views, self.spans, strict=True):
            while len(view):
                written = os.pwrite(fd, view, start)
                start, view = start + written, view[written:]

    def copy_to(self, memory: Any) -> None:
        """Write the arrays into memory that has space for them."""
        for view, (start, stop) in zip(self.views, self.spans, strict=True):
            memory[start:stop] = view


def pack(value: Any) -> PackedValue:
    """Split a value: contiguous arrays and CPU tensors stay in place, all else is pickled.

    An array in a mapped file is named by its place there, and is not part of the spans.

    Raises:
        Exception: what pickling raises.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, 5, buffer_callback=buffers.append).dump(value)
    views, spans, stop = [buffer.raw() for buffer in buffers], [], 0
    for view in views:
        start = -(-stop // LINE_BYTES) * LINE_BYTES
        stop = start + len(view)
        spans.append((start, stop))
    return PackedValue(stream.getvalue(), views, spans, stop)


def unpack(meta: bytes, spans: list[tuple[int, int]], memory: memoryview) -> Any:
    """Return a value whose arrays lie in `memory`, which lives as long as they do."""
    return pickle.loads(meta, buffers=[memory[start:stop] for start, stop in spans])


class Handle(NamedTuple):
    """What another process of the host needs to open a value, as long as the process that shares it holds it.

    Attributes:
        number: Number of the value in the process that shares it.
    """

    number: int
    pid: int
    fd: int
    meta: bytes
    spans: list[tuple[int, int]]
    num_bytes: int

    def open(self) -> Any:
        """Return the value; its arrays are mapped; writes of this process stay private.

        Raises:
            OSError: the process that shares it has ended.
        """
        if self.num_bytes == 0:
            return unpack(self.meta, self.spans, memoryview(b""))
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDONLY)
        try:
            memory = mmap.mmap(fd, self.num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        return unpack(self.meta, self.spans, memoryview(memory))


class SharedValue:
    """A value whose arrays were copied once into unnamed memory, which is freed with its last map.

    Args:
        value: see `pack`.
        what: names it in errors.

    Attributes:
        handle: for other processes, as long as this object lives and is not closed.

    Raises:
        GNNScaleError: there is no space for it, or it cannot be pickled.
    """

    def __init__(self, value: Any, what: str = "a value"):
        try:
            packed = pack(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise GNNScaleError(
                f"{what} cannot be sent to worker processes: {error}: use threads, or classes and functions of modules"
            ) from error
        try:
            fd = space(packed.num_bytes)
        except OSError as error:
            raise GNNScaleError(
                f"{what} needs {packed.num_bytes} bytes of shared memory, but there is no space: {error}"
            ) from None
        self.close = weakref.finalize(self, os.close, fd)  # processes that opened it keep it
        self.close.atexit = False
        packed.write(fd)
        self.handle = Handle(next(_numbers), os.getpid(), fd, packed.meta, packed.spans, packed.num_bytes)


def space(num_bytes: int) -> int:
    """Return the descriptor of an unnamed file in memory with its pages allocated.

    Raises:
        OSError: there is no space.
        GNNScaleError: the system is not Linux.
    """
    if not hasattr(os, "memfd_create"):
        raise GNNScaleError("worker processes share memory in a way that only Linux has: use source=threads")
    fd = os.memfd_create("gnnscale")
    try:
        if num_bytes:
            os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any):
        if isinstance(value, np.ndarray):
            place = _mapped_place(value)
            return NotImplemented if place is None else (_map_again, place)
        return _reduce_tensor(value) if _is_plain(value) else NotImplemented


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor that numpy can hold, its dtype aside."""
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
        return False
    return not (value.requires_grad or value.is_conj() or value.is_neg())


def _reduce_tensor(value: torch.Tensor) -> tuple:
    try:
        return _tensor, (value.numpy(), None)
    except TypeError:  # bfloat16 and the like
        return _tensor, (value.contiguous().view(_RAW[value.element_size()]).numpy(), value.dtype)


def _tensor(array: np.ndarray, dtype: torch.dtype | None) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(dtype)


def _mapped_place(array: np.ndarray) -> tuple | None:
    """Return file, offset, dtype and shape of a contiguous read-only array on a file, None of any other."""
    place = None if array.flags.writeable or array.dtype.hasobject else file_place(array)
    return None if place is None else (str(place[0]), place[1], array.dtype, array.shape)


def _map_again(path: str, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape))
