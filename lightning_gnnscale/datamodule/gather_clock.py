"""How long gathering features takes on the device that runs it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class GatherClock:
    """Seconds that gathers take on their device, which runs them later than they are called.

    Args:
        device: "cpu" or a CUDA device.
    """

    def __init__(self, device: str):
        self._on_cuda = torch.device(device).type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time of what is called inside."""
        if self._on_cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            stop.record()
            self._events.append((start, stop))
        else:
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun

    def take(self) -> float:
        """Return the seconds since the last call; waits for the last gather."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(start.elapsed_time(stop) for start, stop in self._events) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds
