"""Batches on a GPU ahead of their use: packed into one pinned block each, and copied on a stream of their own."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..edge_stream.read_ahead import read_ahead
from ..errors import GNNScaleError, short
from ..events import clock
from ..memory import format_bytes
from ..sampler.device_stream import CopyStream
from ..sampler.minibatch import MiniBatch
from .buffer_pool import rounded_capacity
from .type_counts import counted

_ALIGN = 256  # of each array in a block: what kernels with vector loads need, and torch's own allocations have


class DeviceBatches:
    """Copy batches to a device while earlier ones train.

    A thread takes batches from their loader, packs the arrays of each into one block of pinned memory, and begins one
    copy of it on a stream of its own; there it has the rows gathered that are on the device. The stream that trains
    waits for the copy's event, the host for nothing. A block is filled again once its copy is done.

    Args:
        device: Where batches go.
        ahead: Batches on the device, or on their way, before they are asked for, >= 1.
        fill: Called with a batch on the device and its (num_nodes,) ids on the host, on the copy stream: gives it the
            rows that are there. The ids are the batch's own where the device made it. None: batches come with theirs.
        stream: Copies, in place of a `CopyStream`.
        foretell: Called with the batches of an epoch, a generator; returns one of the same batches that looks ahead, so
            that what `fill` reads is known before. None: nothing needs to be.

    Cost: `ahead` batches of device memory, and up to `ahead` + 1 blocks of pinned memory; one copy of each batch on the
        host.
    """

    def __init__(
        self,
        device: torch.device,
        ahead: int = 2,
        fill: Callable[[Any, Any], None] | None = None,
        stream: CopyStream | None = None,
        foretell: Callable[[Iterator], Iterator] | None = None,
    ):
        self.device, self.ahead, self._fill, self._foretell = device, ahead, fill, foretell
        self._stream = CopyStream(device) if stream is None else stream
        self._free: list[Tensor] = []
        self._copying: deque[tuple[Any, Tensor]] = deque()

    @property
    def looks_ahead(self) -> bool:
        """Whether batches wait on the host until later ones are known."""
        return self._foretell is not None

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory that are held."""
        return sum(len(block) for block in [*self._free, *(block for _, block in self._copying)])

    def moved(self, batches: Iterator) -> Iterator:
        """Yield batches on the device, in order.

        Args:
            batches: A generator of `MiniBatch`; it runs, and is closed, in a thread that ends with it.

        Raises:
            GNNScaleError: there is no memory for a batch, here or on the device.
            Exception: what `batches` raises.
        """
        batches = batches if self._foretell is None else self._foretell(batches)
        # By its name the thread is none of a source's: it waits for those to end.
        coming = read_ahead(lambda stop: self._all_sent(batches), most=self.ahead - 1, name="gnnscale-device-batch")
        with closing(coming):
            for batch, event in coming:
                self._stream.hand_over(event, tensors_of(batch))
                box = [batch]
                del batch
                yield box.pop()

    def close(self) -> None:
        """Wait for copies that are under way, and free the pinned memory."""
        for event, _ in self._copying:
            event.synchronize()
        self._copying.clear()
        self._free.clear()

    def _all_sent(self, batches: Iterator) -> Iterator[tuple[Any, Any]]:
        with closing(batches):
            while coming := self._next(batches):
                yield self._sent(coming.pop())

    def _next(self, batches: Iterator) -> list:
        with self._stream.running():  # batches that a device made are joined there
            return [*islice(batches, 1)]

    def _sent(self, batch: Any) -> tuple[Any, Any]:
        """Begin to move a batch; return it as it will be on the device, and the event of its arrival."""
        batch = counted(batch) if isinstance(batch, MiniBatch) else batch
        with clock.doing("transfer"):
            arrays = [tensor for tensor in tensors_of(batch) if self._is_packed(tensor)]
            offsets, size = _offsets(arrays)
            block = self._block(size) if arrays else None  # of a batch that a device made all may be there
            for array, offset in zip(arrays, offsets, strict=True):
                _view(block, array, offset).copy_(array)
            try:
                with self._stream.running():
                    if isinstance(batch, MiniBatch) and batch.made is not None:
                        batch.made.join(tensors_of(batch))
                    if block is not None:
                        there = self._stream.send(block[:size])
                        self._copying.append((self._stream.mark(), block))
                    places = iter(zip(arrays, offsets, strict=True))

                    def place(value: Any) -> Any:
                        if self._is_packed(value):
                            return _view(there, *next(places))
                        # Sparse ones, and those with a gradient, go by themselves; those that were made there stay.
                        elsewhere = isinstance(value, Tensor) and value.device != self.device
                        return value.to(self.device) if elsewhere else value

                    moved = batch.apply(place)
                    if self._fill is not None:
                        self._fill(moved, batch.n_id)
                    return moved, self._stream.mark()
            except torch.OutOfMemoryError:
                size = sum(tensor.nbytes for tensor in tensors_of(batch))
                raise GNNScaleError(
                    f"{self.device} has no memory for {self.ahead} batches of {format_bytes(size)} ahead: say "
                    "device_batches=1 or 0 to the DataModule, or a smaller batch_size"
                ) from None

    def _is_packed(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.device == self.device:
            return False
        return value.layout == torch.strided and not value.requires_grad

    def _block(self, size: int) -> Tensor:
        """Return a pinned block of at least so many bytes whose last copy is done."""
        while self._copying and (self._copying[0][0].query() or len(self._copying) > self.ahead):
            event, block = self._copying.popleft()
            event.synchronize()
            self._free.append(block)
        fitting = [number for number, block in enumerate(self._free) if len(block) >= size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda number: len(self._free[number])))
        self._free.clear()  # smaller ones, that no batch of this size fits into
        try:
            return self._stream.pinned(rounded_capacity(size))
        except RuntimeError as error:
            raise GNNScaleError(
                f"{format_bytes(size)} of a batch cannot be pinned ({str(error).splitlines()[0]}): raise the limit of "
                "locked memory (ulimit -l), or say device_batches=0 to the DataModule"
            ) from None


def gpu_of(device: Any) -> torch.device | None:
    """Return a GPU by its number, or None for the CPU.

    Raises:
        ValueError: it is no device, or none that is there.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f'device must be "cpu", "cuda" or one GPU like "cuda:0", got {short(device)}') from None
    if found.type == "cpu":
        return None
    count = torch.cuda.device_count()
    if found.type != "cuda" or (found.index or 0) >= count:
        raise ValueError(f"device must be one of this machine's {count} GPUs, or cpu, got {short(str(device))}")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch in the order of its `apply`; PyG's applies to other values, too."""
    found: list[Tensor] = []

    def note(value: Any) -> Any:
        if isinstance(value, Tensor):
            found.append(value)
        return value

    batch.apply(note)
    return found


def _offsets(arrays: list[Tensor]) -> tuple[list[int], int]:
    """Return where each array begins in a block, and the bytes of the block."""
    offsets, size = [], 0
    for array in arrays:
        offsets.append(size)
        size += -(-array.nbytes // _ALIGN) * _ALIGN
    return offsets, size


def _view(block: Tensor, like: Tensor, offset: int) -> Tensor:
    """Return the bytes of an array in a block, of the array's dtype and shape."""
    return block[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
