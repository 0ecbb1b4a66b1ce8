"""The peak of memory while a block runs, watched at a bounded share of the time, however much is resident.

A sample reads counters that the kernel keeps for each process, whatever its size. What processes share can only be
told by walking their page tables, which costs in proportion to resident memory and holds the process up: that is done
as seldom as its own cost asks for. The mark that the kernel keeps of the highest resident size (VmHWM) tells of peaks
between two samples. The peak of a cgroup would not do: it counts the page cache.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .memory import MemoryCounters, descendants, memory_counters, shared_out_bytes, stack_start

_SAMPLING_SHARE = 1e-3  # of one core's time, for each watcher
_FIRST_S = 0.02  # of work that no time has earned yet


class _Budget:
    """Work of one kind, of all watchers of this process, within a share of the time.

    Args:
        share: of one core's time since this was made.
        unit_s: seconds that a unit of the work takes, as long as none was measured.
    """

    def __init__(self, share: float, unit_s: float):
        self.share, self.unit_s = share, unit_s
        self.spent_s, self.began = 0.0, time.monotonic()

    def affords(self, units: int = 1) -> bool:
        """Return whether this much work may be done now."""
        return self.spent_s + units * self.unit_s <= _FIRST_S + self.share * (time.monotonic() - self.began)

    @contextmanager
    def spending(self, units: int = 1) -> Iterator[None]:
        """Measure the block, which does this much work."""
        begin = time.thread_time()
        try:
            yield
        finally:
            took = time.thread_time() - begin
            self.spent_s, self.unit_s = self.spent_s + took, took / max(units, 1)


_listing = _Budget(5e-4, 0.0)
_settling = _Budget(1e-3, 3e-2 / 2**30)  # a unit is a resident byte


class MemoryPeak:
    """Watch memory in a thread while the block runs: the bytes that `memory.resident_bytes` or `process_bytes` tells.

    Where the kernel's mark of a process has risen between two samples, the mark counts too, less the file-backed pages
    that the process held at the sample with more of them.

    Args:
        interval_s: seconds between samples, > 0; more where samples would take over a thousandth of the time.
        alone: watch this process alone, and not those that it has started.

    Attributes:
        start_bytes: what stood at entry.
        peak_bytes: the most so far.

    Cost: 0.3% of a core at most, of which listing processes and settling what they share is bounded for all watchers
        together. As long as the latter is not affordable, a forked process counts for what it has grown by.
    """

    def __init__(self, interval_s: float = 0.05, alone: bool = False):
        self.interval_s, self.alone = interval_s, alone
        self.start_bytes = self.peak_bytes = 0
        self._root = os.getpid()
        self._seen: dict[int, MemoryCounters] = {}  # the latest of each process
        self._stacks: dict[int, int] = {}
        self._shared: dict[int, float] = {}  # bytes of a started process that count as another one's
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "MemoryPeak":
        self._root, self.peak_bytes = os.getpid(), 0
        self._seen, self._stacks, self._shared = {}, {}, {}
        self.start_bytes = self.update()
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
        with self._lock:
            self._find_processes()
            self._settle()
            self._sample()
            return self.peak_bytes

    def _watch(self) -> None:
        pause = self.interval_s
        while not self._stop.wait(pause):
            with self._lock:
                self._find_processes()
                self._settle()
                begin = time.thread_time()
                self._sample()
                pause = max(self.interval_s, (time.thread_time() - begin) / _SAMPLING_SHARE)

    def _find_processes(self) -> None:
        """Add the processes that were started since the last time."""
        if self._seen and (self.alone or not _listing.affords()):
            return
        with _listing.spending():
            for pid in (self._root, *(() if self.alone else descendants(self._root))):
                counters = None if pid in self._seen else memory_counters(pid)
                if counters is None:
                    continue
                stack = stack_start(pid)
                # One that was forked, and has executed nothing since, has its stack where its parent has it.
                parents = [self._seen[one].held for one in self._seen if stack and self._stacks.get(one) == stack]
                self._shared[pid] = min(counters.held, max(parents, default=0))
                self._seen[pid], self._stacks[pid] = counters, stack

    def _settle(self) -> None:
        """Measure what the processes share, where that is affordable; it counts for the first of them."""
        if len(self._seen) < 2 or not _settling.affords(sum(one.resident for one in self._seen.values())):
            return
        with _settling.spending(sum(one.resident for one in self._seen.values())):
            twice = {}
            for pid in self._seen:
                counters, own = memory_counters(pid), shared_out_bytes(pid)
                twice[pid] = max(counters.held - own, 0) if counters and own else 0
        later = {pid: count for pid, count in twice.items() if pid != self._root}
        scale = sum(twice.values()) / max(sum(later.values()), 1)
        self._shared = {pid: scale * count for pid, count in later.items()}

    def _sample(self) -> None:
        """Read the counters of the processes that are known, and raise the peak."""
        held = between = 0
        for pid, before in list(self._seen.items()):
            now = memory_counters(pid)
            if now is None:  # it has ended
                del self._seen[pid], self._stacks[pid]
                self._shared.pop(pid, None)
                continue
            self._seen[pid] = now
            held += max(0, now.held - int(self._shared.get(pid, 0)))
            if now.highest > before.highest:
                between = max(between, now.highest - max(now.file_backed, before.file_backed) - now.held)
        self.peak_bytes = max(self.peak_bytes, held + between)
