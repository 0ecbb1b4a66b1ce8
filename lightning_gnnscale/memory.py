"""Peak memory of a process tree, read from the kernel's own counters."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import psutil


def resident_bytes(pid: int | None = None) -> int:
    """Return the anonymous plus shared resident bytes of a process and its descendants.

    File-backed pages are left out: the page cache gives them back when memory is short. Where the kernel does
    not tell them apart, the whole resident size is returned.
    """
    root = psutil.Process(pid or os.getpid())
    total = 0
    for process in [root, *_children(root)]:
        total += _own_bytes(process)
    return total


def process_bytes() -> int:
    """Return the anonymous plus shared resident bytes of this process alone."""
    return _own_bytes(psutil.Process())


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _own_bytes(process: psutil.Process) -> int:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        try:
            return process.memory_info().rss
        except psutil.Error:
            return 0
    kibibytes = 0
    for line in status.splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            kibibytes += int(line.split()[1])
    return kibibytes * 1024


class MemoryPeak:
    """Sample memory in a thread while the block runs.

    Args:
        interval_s: seconds between samples, > 0.
        measure: what is sampled, bytes: `resident_bytes` of the process tree, or `process_bytes` of this one alone.

    Attributes:
        start_bytes: what stood at entry.
        peak_bytes: the largest sample so far.
    """

    def __init__(self, interval_s: float = 0.05, measure: Callable[[], int] = resident_bytes):
        self.interval_s, self.measure = interval_s, measure
        self.start_bytes = self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "MemoryPeak":
        self.start_bytes = self.peak_bytes = self.measure()
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="gnnscale-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.update()
        self._stop.set()
        self._thread.join()

    def update(self) -> int:
        """Take one sample now and return the peak so far, bytes."""
        self.peak_bytes = max(self.peak_bytes, self.measure())
        return self.peak_bytes

    def _watch(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.update()
