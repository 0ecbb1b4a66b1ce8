"""What a training step on the CPU frees is kept for the next step, as far as memory allows."""

import os
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from ..memory import counters, free_memory_bytes, keep_freed_memory, return_freed_memory, trim_heap

_AMPLE_BYTES = 4 << 30  # free a process: what lies unused between arrays is little of it, and nobody looks again
_MEASURED_STEPS = 4
_ROOM = 3  # times what a step takes at its peak: kept memory has grown to so much, in the case measured
_LOOK_S = 0.05  # between two looks at free memory, which take 0.4 ms


class FreedMemory:
    """Keeps what steps free, or has it returned to the system where memory is short; one for a run that trains.

    New memory is zeroed page by page. Where each step takes it again, that is half of the time of a step of GraphSAGE.
    Kept memory has gaps that no array fits, so it grows beyond a step's peak. Where little is free, the first steps are
    measured, then what is freed is kept while so much memory is free, and given back once less is free than another
    step may take.

    Args:
        num_processes: processes of this machine that train; each may take its share of what is free.

    Attributes:
        step_bytes: what a step takes at its peak beyond what stands before it, the median of some; 0: unknown yet.
        keeps: whether what is freed now is kept.
    """

    def __init__(self, num_processes: int = 1):
        self._num_processes, self._looked_s, self._before = num_processes, 0.0, None
        self._measured: list[int] = []
        self.step_bytes = 0
        self._ample = self._free() >= _AMPLE_BYTES
        self.keeps = self._ample
        self._has_kept = self.keeps
        (keep_freed_memory if self.keeps else trim_heap)()

    def begin_step(self) -> None:
        """Begin to measure a step, as long as that is needed."""
        if not self._ample and not self.step_bytes and _forget_peak():
            self._before = counters(os.getpid())

    def end_step(self) -> None:
        """Look at what is free, and keep or return what the next steps free."""
        if self._ample:
            return
        if self._before is not None:  # others, such as a first sweep, take memory meanwhile: not the most of all
            self._measured.append(counters(os.getpid()).highest - self._before.resident)
            self._before = None
            if len(self._measured) == _MEASURED_STEPS:
                self.step_bytes = max(int(median(self._measured)), 1)
        now = time.monotonic()
        if not self.step_bytes or now - self._looked_s < _LOOK_S:
            return
        self._looked_s, free = now, self._free()
        if self.keeps and free < self.step_bytes:
            trim_heap()
            free = self._free()
            if free < _ROOM * self.step_bytes:
                self.keeps = False
                return_freed_memory()
        elif not self.keeps and free >= _ROOM * self.step_bytes:
            self.keeps = self._has_kept = True
            keep_freed_memory()

    def pause(self) -> None:
        """Give back what is kept: a pass of evaluation plans with what is free."""
        if self.keeps:
            trim_heap()

    def resume(self) -> None:
        """Go on after such a pass, which may have had freed memory returned."""
        if self.keeps:
            keep_freed_memory()

    def close(self) -> None:
        """Give back everything that was kept, at the end of training."""
        if self._has_kept:
            return_freed_memory()
            trim_heap()

    def _free(self) -> int:
        return free_memory_bytes() // self._num_processes


def _forget_peak() -> bool:
    """Let the kernel's mark of the highest resident size begin again; False where it cannot."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False
