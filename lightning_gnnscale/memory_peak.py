"""The peak of memory while a block runs, watched at a bounded share of the run's CPU time, however much is resident.

A sample reads counters that the kernel keeps for each process, whatever its size. What processes share can only be
found by walking their page tables, which costs in proportion to resident memory and holds the process up: that is done
as seldom as its own cost asks for. The mark that the kernel keeps of the highest resident size (VmHWM) shows peaks
between two samples. The peak of a cgroup would not do: it counts the page cache.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .memory import Counters, counters, descendants, shared_out_bytes

_SAMPLING_SHARE = 1e-3  # of the CPU time of what is watched, for each watcher
_MOST_IDLE = 20.0  # times the pause of a busy process: what takes next to no time is watched nonetheless
_SHARES_FOR_S = 1.0  # of CPU time: what a forked process shares with its parent is unknown before
_FIRST_S = 0.06  # of work that no time has earned yet


class _Budget:
    """Work of one kind, of all watchers of this process, within a share of the seconds of `run_s`, which they raise.

    unit_s: seconds that a unit of the work takes, as long as none was measured.
    """

    def __init__(self, share: float, unit_s: float):
        self.share, self.unit_s = share, unit_s
        self.spent_s = self.run_s = 0.0

    def affords(self, units: int = 1) -> bool:
        """Return whether this much work may be done now."""
        return self.spent_s + units * self.unit_s <= _FIRST_S + self.share * self.run_s

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
_settling = _Budget(2e-3, 1e-2 / 2**30)  # a unit is a resident byte


class MemoryPeak:
    """Watch memory in a thread while the block runs: the bytes that `memory.resident_bytes` or `process_bytes` tells.

    Where the kernel's mark of a process has risen between two samples, the mark counts too, less the file-backed pages
    that the process held at the sample with more of them.

    Args:
        interval_s: seconds between samples, > 0; more where they would take over a thousandth of the CPU time.
        alone: watch this process alone, and not those that it has started.

    Attributes:
        start_bytes: what stood at entry.
        peak_bytes: the most so far.

    Cost: 0.35% of the CPU time of what is watched at most, beside the samples at the ends. Until it is affordable to
        measure what processes share, a forked one counts for what it has grown by.
    """

    def __init__(self, interval_s: float = 0.05, alone: bool = False):
        self.interval_s, self.alone = interval_s, alone
        self.start_bytes = self.peak_bytes = 0
        self._root = os.getpid()
        self._seen: dict[int, Counters] = {}  # the latest of each process
        self._shared: dict[int, float] = {}  # bytes of a started process that count as another one's
        self._settle_from_s = 0.0  # of the run
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "MemoryPeak":
        self._root, self.peak_bytes = os.getpid(), 0
        self._seen, self._shared = {}, {}
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
        pause, begin, since = self.interval_s, time.thread_time(), time.monotonic()
        while not self._stop.wait(pause):
            with self._lock:
                worked_s, now = self._sample(), time.monotonic()
                idle = min(max((now - since) / max(worked_s, 1e-3), 1.0), _MOST_IDLE)
                pause = max(self.interval_s, idle * (time.thread_time() - begin) / _SAMPLING_SHARE)
                self._find_processes()
                if _settling.run_s >= self._settle_from_s:
                    self._settle()
            begin, since = time.thread_time(), now

    def _find_processes(self) -> None:
        """Add the processes that were started since the last time."""
        if self._seen and (self.alone or not _listing.affords()):
            return
        with _listing.spending():
            for pid in (self._root, *(() if self.alone else descendants(self._root))):
                new = None if pid in self._seen else counters(pid)
                if new is None:
                    continue
                # One that was forked, and has executed nothing since, has its stack where its parent has it.
                parents = [one.held for one in self._seen.values() if one.stack_start == new.stack_start > 0]
                self._shared[pid], self._seen[pid] = min(new.held, max(parents, default=0)), new
                self._settle_from_s = _settling.run_s + _SHARES_FOR_S

    def _settle(self) -> None:
        """Measure what the processes share, where that is affordable; it counts for the first of them."""
        resident = sum(one.resident for one in self._seen.values())
        if len(self._seen) < 2 or not _settling.affords(resident):
            return
        with _settling.spending(resident):
            twice = {}
            for pid in self._seen:
                now, own = counters(pid), shared_out_bytes(pid)
                twice[pid] = max(now.held - own, 0) if now and own else 0
        later = {pid: count for pid, count in twice.items() if pid != self._root}
        scale = sum(twice.values()) / max(sum(later.values()), 1)
        self._shared = {pid: scale * count for pid, count in later.items()}

    def _sample(self) -> float:
        """Read the counters of the processes that are known, raise the peak, and return their seconds since."""
        held = between = 0
        worked_s = 0.0
        for pid, before in list(self._seen.items()):
            now = counters(pid)
            if now is None:  # it has ended
                del self._seen[pid]
                self._shared.pop(pid, None)
                continue
            self._seen[pid] = now
            worked_s += now.cpu_s - before.cpu_s
            held += max(0, now.held - int(self._shared.get(pid, 0)))
            if now.highest > before.highest:
                between = max(between, now.highest - max(now.file_backed, before.file_backed) - now.held)
        self.peak_bytes = max(self.peak_bytes, held + between)
        if not self.alone:
            for budget in (_listing, _settling):
                budget.run_s += worked_s
        return worked_s
