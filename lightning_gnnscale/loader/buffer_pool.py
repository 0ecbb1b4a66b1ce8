"""Memory for batches, reused when the last tensor that views it is gone."""

import math
import threading
import weakref
from collections import deque

import numpy as np

LINE_BYTES = 64
_SMALLEST = 4096  # below, the C library hands warm memory out again, more cheaply than a pool does


class BufferPool:
    """A pool of 64-byte aligned buffers behind numpy arrays and the tensors made of them.

    Fresh pages cost several times what filling them does, so buffers are reused: an array that `take` returned owns
    its buffer until the array, and every view and tensor derived from it, is gone. A user may keep batches for as
    long as they like: what exceeds `max_bytes` is fresh memory, and is freed instead of coming back; so are arrays of
    at most 4096 bytes, which are not counted. A buffer serves arrays of half its size and more: batches differ.

    Args:
        max_bytes: most bytes that the pool keeps, handed out or waiting, >= 0.
    """

    def __init__(self, max_bytes: int = 4 << 30):
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be >= 0, got {max_bytes}")
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._waiting: dict[int, deque[tuple[int, np.ndarray]]] = {}  # by size, each with when it came back
        self._num_returned = 0
        # A finaliser may run at any allocation, even while this thread holds the lock: it only appends.
        self._returned: deque[np.ndarray] = deque()
        self._lock = threading.Lock()

    def __reduce__(self):
        return BufferPool, (self.max_bytes,)  # each process takes memory of its own

    def take(self, shape: tuple[int, ...] | int, dtype: np.dtype | type) -> np.ndarray:
        """Return an array with undefined contents, 64-byte aligned; usable as `allocate` of the operations.

        Args:
            shape: Shape of the array.
            dtype: Any dtype without Python objects.
        """
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes <= _SMALLEST:
            return _aligned(num_bytes or 1)[:num_bytes].view(dtype).reshape(shape)
        capacity = rounded_capacity(num_bytes)
        buffer, pooled = self._find(capacity)
        # The base of this array is a memoryview, not an array: numpy then makes the array itself, not the buffer,
        # the base of views of it, so that any view keeps it alive.
        array = np.frombuffer(memoryview(buffer), dtype=np.uint8, count=num_bytes)
        if pooled:
            weakref.finalize(array, self._returned.append, buffer).atexit = False
        return array.view(dtype).reshape(shape)

    def clear(self) -> None:
        """Free waiting buffers; those handed out stay with their users, and come back."""
        with self._lock:
            self._sort_returned()
            self.held_bytes -= sum(size * len(buffers) for size, buffers in self._waiting.items())
            self._waiting.clear()

    def _find(self, capacity: int) -> tuple[np.ndarray, bool]:
        with self._lock:
            self._sort_returned()
            if waiting := self._waiting.get(capacity) or self._waiting_for(capacity):
                return waiting.pop()[1], True
            self._make_space(capacity)
            pooled = self.held_bytes + capacity <= self.max_bytes
            if pooled:
                self.held_bytes += capacity
        return _aligned(capacity), pooled

    def _waiting_for(self, capacity: int) -> deque[tuple[int, np.ndarray]]:
        """Return the smallest buffers that serve a size, and are no more than twice as large."""
        sizes = [size for size, waiting in self._waiting.items() if waiting and capacity <= size <= 2 * capacity]
        return self._waiting[min(sizes)] if sizes else deque()

    def _sort_returned(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._waiting.setdefault(len(buffer), deque()).append((self._num_returned, buffer))
            self._num_returned += 1

    def _make_space(self, capacity: int) -> None:
        """Free the buffers that have waited longest, where with them a new one would exceed the cap."""
        waiting_bytes = sum(size * len(waiting) for size, waiting in self._waiting.items())
        if self.held_bytes - waiting_bytes + capacity > self.max_bytes:
            return
        while self.held_bytes + capacity > self.max_bytes:
            _, size = min((waiting[0][0], size) for size, waiting in self._waiting.items() if waiting)
            self._waiting[size].popleft()
            self.held_bytes -= size


def rounded_capacity(num_bytes: int) -> int:
    """Round up to one of eight sizes an octave, so that batches of about one size share buffers."""
    size = max(num_bytes, _SMALLEST)
    step = 1 << max(size.bit_length() - 4, 6)
    return -(-size // step) * step


def _aligned(capacity: int) -> np.ndarray:
    raw = np.empty(capacity + LINE_BYTES, np.uint8)
    offset = -raw.ctypes.data % LINE_BYTES
    return raw[offset : offset + capacity]
