"""A stream of a GPU beside the one that trains, and what was made on it: who uses it waits for its event."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


class CopyStream:
    """A stream of a CUDA device that copies and makes batches, and the memory that it copies from and to.

    Args:
        device: A CUDA device; on a CPU, which tests use, all is done when it is begun.
    """

    def __init__(self, device: torch.device):
        self.device, self._on_cuda = device, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None

    def pinned(self, num_bytes: int) -> Tensor:
        """Return (num_bytes,) uint8 of page-locked host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_cuda)

    def running(self) -> AbstractContextManager:
        """Return a context in which this thread's copies and kernels run on the stream."""
        return torch.cuda.stream(self._stream)

    def send(self, block: Tensor) -> Tensor:
        """Begin to copy a block to the device; call it within `running`."""
        return block.to(self.device, non_blocking=True)

    def fetch(self, values: Tensor) -> Tensor:
        """Begin to copy a tensor of the device to the host; call it within `running`, and wait for an event then."""
        pinned = self.pinned(values.nbytes).view(values.dtype).view(values.shape)
        return pinned.copy_(values, non_blocking=True)

    def mark(self) -> Any:
        """Return an event that passes when all that was begun so far on the stream is done."""
        return self._stream.record_event() if self._on_cuda else _Passed()

    def hand_over(self, event: Any, tensors: list[Tensor]) -> None:
        """Let the caller's current stream wait for an event, and use tensors of the stream; the host does not wait."""
        if not self._on_cuda:
            return
        user = torch.cuda.current_stream(self.device)
        user.wait_event(event)
        for tensor in tensors:
            if tensor.is_cuda:  # else the allocator hands its memory out again before the user's kernels end
                tensor.record_stream(user)


class _Passed:
    """An event that has passed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True, eq=False)
class MadeOnDevice:
    """What a stream has made of a batch, and its ids on the host: one copy, waited for where the host reads them.

    Attributes:
        read: Returns the ids on the host; waits for their copy, not for the rest of the batch.
        stream: The stream; None: that of the thread which has the batch.
        event: Passes when all of the batch is there.
    """

    read: Callable[[], list[np.ndarray]]
    stream: CopyStream | None = None
    event: Any = None

    @classmethod
    def begin(cls, stream: CopyStream, ids: Sequence[Tensor]) -> "MadeOnDevice":
        """Begin to copy ids to the host, (num,) int64 each, while the stream runs and makes the rest."""
        copy, sizes = stream.fetch(ids[0] if len(ids) == 1 else torch.cat(list(ids))), [len(one) for one in ids]
        copied = stream.mark()

        def read() -> list[np.ndarray]:
            copied.synchronize()
            return [part.numpy() for part in copy.split(sizes)]

        return cls(read, stream, copied)

    def end(self) -> "MadeOnDevice":
        """Return this for a batch all of which is begun by now."""
        return replace(self, event=self.stream.mark())

    def join(self, tensors: list[Tensor]) -> None:
        """Let the caller's current stream wait for the batch, and use its tensors; the host does not wait."""
        if self.stream is not None:
            self.stream.hand_over(self.event, tensors)
