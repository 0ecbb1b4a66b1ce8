"""Seconds that a device takes, by events on its stream: the host runs ahead of a GPU, and waits for nothing here."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def cuda_event() -> Any:
    """Return an event that is recorded on this thread's current stream now."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def on_gpu(device: Any) -> bool:
    """Whether a device, or None, is one whose time is taken by events."""
    return device is not None and device.type == "cuda"


class DeviceTimer:
    """Adds up the seconds of blocks of work: of the device's stream on a GPU, else of the host.

    `mark` returns an event that is recorded now.
    """

    def __init__(self, device: Any = None, mark: Callable[[], Any] = cuda_event):
        self._mark = mark if on_gpu(device) else None
        self._open: deque[tuple[Any, Any]] = deque()
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time of the block; what it launches may still run when it ends."""
        if self._mark is None:
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun
            return
        begin = self._mark()
        yield
        self._open.append((begin, self._mark()))
        while self._open and self._open[0][1].query():
            self._close()

    def take(self) -> float:
        """Return the seconds since the last call; waits for the last block."""
        if self._open:
            self._open[-1][1].synchronize()
        while self._open:
            self._close()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _close(self) -> None:
        begin, end = self._open.popleft()
        self._seconds += begin.elapsed_time(end) / 1e3


class StreamSpans:
    """The spans of a stream between marks, told in order once they have passed: `add(name, begin, end)`.

    The first begins at `begin`, seconds of `time.perf_counter`; `mark` returns an event that is recorded now.
    """

    def __init__(self, begin: float, add: Callable[[str, float, float], None], mark: Callable[[], Any] = cuda_event):
        self._add, self._mark, self._now = add, mark, begin
        self._last, self._open = mark(), deque()

    def end_span(self, name: str) -> None:
        """End the span that began with the mark before; its work may still run."""
        self._open.append((name, self._mark()))
        while self._open and self._open[0][1].query():
            self._tell()

    def finish(self) -> None:
        """Wait for the last mark, and tell the rest."""
        if self._open:
            self._open[-1][1].synchronize()
        while self._open:
            self._tell()

    def _tell(self) -> None:
        name, event = self._open.popleft()
        end = self._now + self._last.elapsed_time(event) / 1e3
        self._add(name, self._now, end)
        self._now, self._last = end, event
