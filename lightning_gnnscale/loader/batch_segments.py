"""Shared memory of finished batches, capped in bytes, and reused when a batch is gone."""

import mmap
import os
import weakref
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import numpy as np

from ..system import MAP_POPULATE
from .buffer_pool import rounded_capacity
from .shared_value import space
from .work_queue import Attempt, Job, Line, WorkQueue

MAPS_KEPT = 4  # of a worker
_SHARED = mmap.MAP_SHARED | MAP_POPULATE  # maps all pages at once, not fault by fault


class SegmentHandle(NamedTuple):
    """What a worker needs to write to a segment."""

    pid: int
    fd: int
    capacity: int

    def open(self) -> int:
        """Return a descriptor of the segment.

        Raises:
            OSError: the process that it belongs to has ended.
        """
        return os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR)


class SegmentMaps:
    """The segments that a worker wrote to last stay mapped: to map one again takes as long as to gather its rows."""

    def __init__(self):
        self._maps: dict[int, mmap.mmap] = {}

    def memory(self, segment: SegmentHandle) -> mmap.mmap:
        """Return the memory of a segment.

        Raises:
            EOFError: the process that it belongs to has ended.
        """
        try:
            fd = segment.open()
        except OSError as error:
            raise EOFError("the asking process has ended") from error
        try:
            file = os.fstat(fd).st_ino  # another segment may have had this descriptor
            memory = self._maps.pop(file, None) or mmap.mmap(fd, segment.capacity, _SHARED)
        finally:
            os.close(fd)
        while len(self._maps) >= MAPS_KEPT:
            del self._maps[next(iter(self._maps))]
        self._maps[file] = memory
        return memory


class Segment:
    """Memory of one batch; unmapped when the last array in it is gone.

    Raises:
        OSError: there is no space.
    """

    def __init__(self, capacity: int):
        fd = space(capacity)
        weakref.finalize(self, os.close, fd).atexit = False
        self.capacity, self.memory = capacity, mmap.mmap(fd, capacity)
        self.handle = SegmentHandle(os.getpid(), fd, capacity)


class SegmentPool:
    """Segments of one process; all but `hand_out`'s finaliser run under the caller's lock.

    Args:
        max_bytes: Upper bound on the bytes of segments that are lent or waiting, > 0. Segments handed out with a batch
            do not count.

    Attributes:
        held_bytes: Bytes of segments that are lent or waiting.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes, self.held_bytes = max_bytes, 0
        self._waiting: list[Segment] = []
        # A finaliser may run at any allocation, even while this thread holds the lock: it only appends.
        self._returned: deque[Segment] = deque()

    def lend(self, num_bytes: int) -> Segment | None:
        """Return a segment of at least num_bytes, None where the cap leaves no space for one.

        Raises:
            OSError: the system has no space.
        """
        self._sort_returned()
        fitting = [segment for segment in self._waiting if segment.capacity >= num_bytes]
        if fitting:
            segment = min(fitting, key=lambda segment: segment.capacity)
            self._waiting.remove(segment)
            return segment
        capacity = min(rounded_capacity(num_bytes), self.max_bytes)
        while self._waiting and self.held_bytes + capacity > self.max_bytes:
            self.held_bytes -= self._waiting.pop(0).capacity
        if num_bytes > self.max_bytes or self.held_bytes + capacity > self.max_bytes:
            return None
        segment = Segment(capacity)
        self.held_bytes += capacity
        return segment

    def give_back(self, segment: Segment | None) -> None:
        """Take back a lent segment."""
        if segment is not None:
            self._waiting.append(segment)

    def hand_out(self, segment: Segment) -> memoryview:
        """Return the memory of a segment, which comes back when the last view of it is gone."""
        self.held_bytes -= segment.capacity
        array = np.frombuffer(segment.memory, np.uint8)
        weakref.finalize(array, self._returned.append, segment).atexit = False
        return memoryview(array)

    def close(self) -> None:
        """Release all waiting segments."""
        self._sort_returned()
        self.held_bytes -= sum(segment.capacity for segment in self._waiting)
        self._waiting.clear()

    def _sort_returned(self) -> None:
        while self._returned:
            segment = self._returned.popleft()
            if self.held_bytes + segment.capacity <= self.max_bytes:
                self.held_bytes += segment.capacity
                self._waiting.append(segment)


class SegmentQueue(WorkQueue):
    """A `WorkQueue` of one line. An attempt's space is the segment for its batch.

    Until the size of a batch is known, attempts start without a segment: they are lent one when the batch is made. The
    batch that is wanted next always finds space: the last finished ones give up theirs, and are made again later.

    Args:
        max_bytes: Upper bound on the bytes of segments that belong to batches which are not taken.
        most_slow_s: See `WorkQueue`.

    Attributes:
        line: The line.
        largest: Bytes of the largest batch so far.
        short: Attempts whose batches are made, and wait for a segment.
    """

    def __init__(self, max_bytes: int, most_slow_s: float):
        pool = self.pool = SegmentPool(max_bytes)
        super().__init__(most_slow_s=most_slow_s, give_back=lambda attempt: pool.give_back(attempt.space))
        self.line, self.largest, self.short = Line(), 0, set()

    def start_next(self) -> Attempt | None:
        """Start the first pending job, with a segment of the expected size; None: no job, or no space."""
        if not self.pending or any(attempt in self.short for attempt in self.line.head.attempts):
            return None
        job, segment = self.pending[0], None
        if self.largest:
            with suppress(OSError):
                segment = self.pool.lend(self.largest)
            if segment is None and not job.is_wanted_next:
                return None
        attempt = self.start([job])
        attempt.space = segment
        return attempt

    def lend(self, attempt: Attempt, num_bytes: int) -> bool:
        """Replace the segment of an attempt at one job; return whether there was space.

        Raises:
            OSError: the system has no space.
        """
        self.pool.give_back(attempt.space)
        attempt.space = self.pool.lend(num_bytes)
        while attempt.space is None and attempt.jobs[0].is_wanted_next and self._make_space():
            attempt.space = self.pool.lend(num_bytes)
        return attempt.space is not None

    def take_batch(self) -> tuple[Job, memoryview | None]:
        """Take the head of the line, which is done; return it, and the memory of its batch."""
        job, memory = self.line.head, None
        if not isinstance(job.result, Exception):
            (attempt,) = job.attempts
            memory, attempt.space = self.pool.hand_out(attempt.space), None
        return self.take(self.line), memory

    def _make_space(self) -> bool:
        for job in reversed(list(islice(self.line.order, 1, None))):
            if job.is_done and not isinstance(job.result, Exception):
                self.redo(job)
                return True
        return False
