"""Reading one item ahead in a thread, and the buffers of the items."""

import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator

import numpy as np

_END = object()
_PATIENCE_S = 0.05
_POLL_S = 0.0002
_POOLED_BYTES = 1 << 20


def read_ahead(produce: Callable[[threading.Event], Generator]) -> Iterator:
    """Yield a generator's items, while a thread already makes the next one.

    The thread starts at the first `next`, and ends with the returned generator: exhausted, closed, or
    collected. An exception of the producer is raised in the consumer.

    Args:
        produce: called once, in the thread, with an event that is set when the consumer has stopped; the
            generator that it returns should check the event where it works long without yielding.
    """
    handed: queue.SimpleQueue = queue.SimpleQueue()
    permit = threading.Semaphore(1)
    stop = threading.Event()
    thread = threading.Thread(target=_read, args=(produce, handed, permit, stop), name="gnnscale-edges", daemon=True)
    thread.start()
    try:
        while True:
            item, error = handed.get()
            permit.release()
            if error is not None:
                raise error
            if item is _END:
                return
            # Nothing here may hold the item while the consumer has it, or its buffer would not become free.
            box = [item]
            del item
            yield box.pop()
    finally:
        stop.set()
        permit.release()
        thread.join()


def _read(produce: Callable, handed: queue.SimpleQueue, permit: threading.Semaphore, stop: threading.Event) -> None:
    try:
        items = produce(stop)
        try:
            while True:
                permit.acquire()
                if stop.is_set():
                    return
                item = next(items, _END)
                handed.put((item, None))
                if item is _END:
                    return
                del item
        finally:
            items.close()
    except BaseException as error:
        handed.put((_END, error))


class ChunkPool:
    """Hands out (2, chunk_edges) arrays, and reuses them once nobody holds a view of them.

    A consumer that drops each chunk before it asks for the one after the next is served from two buffers; one
    that keeps chunks gets fresh ones, so that what is held is never overwritten. Fresh pages are slow on small
    virtual machines, hence the reuse.

    Args:
        chunk_edges: columns of a buffer.
        dtype: int32 or int64.
    """

    def __init__(self, chunk_edges: int, dtype: np.dtype):
        self._shape = (2, chunk_edges)
        self._dtype = np.dtype(dtype)
        self._pooled = 2 * chunk_edges * self._dtype.itemsize >= _POOLED_BYTES
        self._buffers: list[np.ndarray] = []
        self._idle_count = 0

    def take(self) -> np.ndarray:
        """Return a (2, chunk_edges) array that nobody else holds; its content is arbitrary."""
        if not self._pooled:
            return np.empty(self._shape, self._dtype)
        if len(self._buffers) < 2:
            return self._add()
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            for i in range(len(self._buffers)):
                if sys.getrefcount(self._buffers[i]) <= self._idle_count:
                    return self._buffers[i]
            if time.monotonic() > deadline:
                # The consumer keeps its chunks: the oldest buffer is now its own.
                del self._buffers[0]
                return self._add()
            time.sleep(_POLL_S)

    def _add(self) -> np.ndarray:
        self._buffers.append(np.empty(self._shape, self._dtype))
        self._idle_count = sys.getrefcount(self._buffers[-1])
        return self._buffers[-1]
