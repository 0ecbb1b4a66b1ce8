"""Making items ahead of their use in a thread, and the buffers of the items."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

import numpy as np

_END = object()
_PATIENCE_S = 0.05
_POLL_S = 0.0002
_POOLED_BYTES = 1 << 20


def read_ahead(
    produce: Callable[[threading.Event], Generator],
    size: Callable[[Any], int] = lambda item: 1,
    most: int = 0,
    name: str = "gnnscale-edges",
) -> Iterator:
    """Yield a generator's items, while a thread already makes the next ones.

    The thread starts at the first `next`, and ends with the returned generator: exhausted, closed, or
    collected. An exception of the producer is raised in the consumer.

    Args:
        produce: called once, in the thread, with an event that is set when the consumer has stopped; the
            generator that it returns should check the event where it works long without yielding, and is closed there.
        size: Returns the size of an item, in any unit.
        most: No further item is made while those that wait to be taken have more, all together.
        name: The thread's name.
    """
    handed: deque[tuple[Any, int, BaseException | None]] = deque()
    changed, stop = threading.Condition(), threading.Event()

    def hand(item: Any, error: BaseException | None = None) -> None:
        with changed:
            handed.append((item, 0 if item is _END else size(item), error))
            changed.notify_all()

    def run() -> None:
        error = None
        try:
            with closing(produce(stop)) as items:
                for item in items:
                    hand(item)
                    del item  # it is the consumer's: its buffer would not become free
                    with changed:
                        changed.wait_for(lambda: stop.is_set() or sum(one[1] for one in handed) <= most)
                    if stop.is_set():
                        return
        except BaseException as raised:
            error = raised
        hand(_END, error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        while True:
            with changed:
                changed.wait_for(lambda: handed)
                item, _, error = handed.popleft()
                changed.notify_all()
            if error is not None:
                raise error
            if item is _END:
                return
            box = [item]
            del item
            yield box.pop()
    finally:
        with changed:
            stop.set()
            changed.notify_all()
        thread.join()


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
