"""What a worker knows of the row cache on a trainer's node, kept up by what comes along with requests."""

import threading
from typing import NamedTuple

import numpy as np

NOTHING = -1  # the version of a view that knows no contents


class Change(NamedTuple):
    """Changes of the contents from one version to the next.

    Attributes:
        version: Version that the change leads to.
        added, removed: Ids, int32 where they fit; no id is in both.
    """

    version: int
    added: np.ndarray
    removed: np.ndarray


class CacheUpdate(NamedTuple):
    """What a request tells a worker about the cache.

    Attributes:
        cache: Number of the cache; each cache has its own.
        request: Number of the request in its cache.
        version: Version of the contents once the update is applied.
        contents: Ids in the cache at that version; None where the changes lead there.
        changes: Changes since the version that the worker acknowledged, in order.
    """

    cache: int
    request: int
    version: int
    contents: np.ndarray | None
    changes: tuple[Change, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the ids."""
        whole = 0 if self.contents is None else self.contents.nbytes
        return whole + sum(change.added.nbytes + change.removed.nbytes for change in self.changes)


class Missing(NamedTuple):
    """What a worker answers with.

    Attributes:
        version: Version of the view.
        mask: (num_union,) bool, True for rows to be sent. `TrainerCache.complete` also takes `np.packbits(mask)`.
    """

    version: int
    mask: np.ndarray


class WorkerView:
    """What a worker knows of one trainer node's cache; a view for each cache. May be used by several threads.

    Args:
        num_nodes: ids are below it.

    Cost: a byte a node.
    """

    def __init__(self, num_nodes: int):
        self._cached = np.zeros(num_nodes, bool)
        self._cache: int | None = None
        self.version = NOTHING
        self._lock = threading.Lock()

    def apply(self, update: CacheUpdate) -> None:
        """Take in an update; one that is older than the view, or came before, changes nothing."""
        with self._lock:
            self._apply(update)

    def missing(self, update: CacheUpdate, union: np.ndarray) -> Missing:
        """Return which rows must travel in answer to the request of an update, which is applied first.

        Args:
            update: came with the request.
            union: (num_union,) ids.
        """
        with self._lock:
            self._apply(update)
            return Missing(self.version, ~self._cached[union])

    def _apply(self, update: CacheUpdate) -> None:
        if update.cache != self._cache:
            self._clear()
            self._cache = update.cache
        if update.contents is not None:
            if update.version > self.version:
                self._clear()
                self._cached[update.contents] = True
                self.version = update.version
            return
        if update.version > self.version and (not update.changes or update.changes[0].version > self.version + 1):
            self._clear()
            return
        for change in update.changes:
            if change.version > self.version:
                self._cached[change.removed] = False
                self._cached[change.added] = True
                self.version = change.version

    def _clear(self) -> None:
        self._cached[:] = False
        self.version = NOTHING
