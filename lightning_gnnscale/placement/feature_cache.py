"""A dynamic cache for rows that are on no device: LRU, SIEVE, or Belady where the coming reads are known."""

import threading
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..errors import short
from . import cache_policies as steps

POLICIES = {"lru": steps.LRU, "sieve": steps.SIEVE, "belady": steps.BELADY}


class ResolvedReads(NamedTuple):
    """Where rows are read from, and which of them the cache is to take.

    Attributes:
        places: (num,) int64, of each row.
        slots, positions: (num_new,) int64, the slot that a row is to be written to, and where it is among the reads.
    """

    places: np.ndarray
    slots: np.ndarray
    positions: np.ndarray


class FeatureCache:
    """Which of the rows outside of a placement are kept near, decided read by read; for `FeatureBuffer(cache=...)`.

    The decisions are made here; the rows are kept by the buffer, one cache a buffer.

    Args:
        capacity: rows, >= 1.
        policy: "lru" evicts the row that was not read for longest; "sieve" the oldest that was not read since the
            hand last passed it; "belady" the row that is read again last among the reads given to `expect`, and a new
            row that is read later than all of them, or not again, is not taken at all. No policy has more hits than
            "belady" where reads come in the announced order.

    Raises:
        ValueError: an argument outside its range.

    Cost: 33 bytes a slot and 4 a node; "belady" 16 more a node and 8 a coming read; O(1) a read, "belady" O(log rows).
    Source: Zhang et al., SIEVE, NSDI 2024; Belady, IBM Systems Journal 5 (2), 1966, with the choice to take no row.
    """

    def __init__(self, capacity: int, policy: str = "lru"):
        if isinstance(capacity, bool) or int(capacity) != capacity or not 1 <= capacity < 1 << 31:
            raise ValueError(f"capacity must be an integer in [1, 2**31), got {short(capacity)}")
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {short(policy)}")
        self.capacity, self.policy = int(capacity), policy
        self.lock = threading.RLock()
        self.num_nodes: int | None = None

    def bind(self, num_nodes: int) -> None:
        """Make the cache empty, for the nodes of one buffer.

        Raises:
            ValueError: it serves another buffer.
        """
        if self.num_nodes is not None:
            raise ValueError("cache serves another buffer: give each FeatureBuffer a FeatureCache of its own")
        self.num_nodes = num_nodes
        slots, known = self.capacity, num_nodes if self.policy == "belady" else 0
        self._slot_of, self._node_of = np.full(num_nodes, -1, np.int32), np.full(slots, -1, np.int64)
        self._ready, self._links = np.zeros(slots, bool), np.zeros((3, slots), np.int64)
        self._ends = np.array([-1, -1, -1, 0])
        self._next_read, self._last_read = np.full(known, steps.NEVER), np.zeros(known, np.int64)
        self._following, self._first, self._time = np.empty(0, np.int64), np.zeros(1, np.int64), 0

    @property
    def nbytes(self) -> int:
        """Bytes of the decisions; the rows are the buffer's."""
        arrays = (self._slot_of, self._node_of, self._ready, self._links, self._next_read, self._last_read)
        return sum(array.nbytes for array in (*arrays, self._following))

    def expect(self, batches: Iterable[np.ndarray]) -> None:
        """Announce to "belady" the reads that come after those announced before; other policies ignore them.

        A read takes the first of its node's announced reads off the list, so that batches sampled side by side may
        come in another order.

        Args:
            batches: node ids in [0, num_nodes), in the order in which they are read.
        """
        if self.policy != "belady":
            return
        batches = [np.asarray(batch, np.int64) for batch in batches]
        with self.lock:
            oldest = int(self._next_read.min(initial=steps.NEVER))
            first = self._time if oldest == steps.NEVER else oldest
            num = sum(len(batch) for batch in batches)
            following = np.empty(self._time - first + num, np.int64)
            following[: self._time - first] = self._following[first - self._first[0] : self._time - self._first[0]]
            self._following, self._first = following, np.array([first])
            for batch in batches:
                steps.append_reads(batch, self._time, self._next_read, self._last_read, following, first)
                self._time += len(batch)
            steps.reorder(self._node_of, self._next_read, self._links, self._ends)

    def forget(self) -> None:
        """Drop announced reads that did not come, for example of an epoch that was broken off."""
        with self.lock:
            self._next_read[:] = steps.NEVER
            if self.policy == "belady":
                steps.reorder(self._node_of, self._next_read, self._links, self._ends)

    def resolve(self, nodes: np.ndarray, places: np.ndarray, limit: int, cache_place: int) -> ResolvedReads:
        """Pass reads through the cache, one after the other; hold `lock` until the rows found in it are copied.

        Args:
            nodes: (num,) integers in [0, num_nodes).
            places: (num_nodes,) int64, as from `pack_places`; those below `limit` go through the cache.
            cache_place: the place of slot 0.

        Returns:
            ResolvedReads. A row that is on its way into the cache is read from its old place.
        """
        found, slots, positions = (np.empty(len(nodes), np.int64) for _ in range(3))
        state = (self._slot_of, self._node_of, self._ready, self._links, self._ends)
        coming = (self._next_read, self._following, self._first)
        num = steps.resolve(
            POLICIES[self.policy], nodes, places, limit, cache_place, state, coming, found, slots, positions
        )
        return ResolvedReads(found, slots[:num], positions[:num])

    def confirm(self, nodes: np.ndarray, reads: ResolvedReads) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots to write now, and where their rows are among the reads; hold `lock` until they are written.

        Rows that had to leave again in the meantime are left out.
        """
        num = steps.confirm(nodes, self._node_of, self._ready, reads.slots, reads.positions)
        return reads.slots[:num], reads.positions[:num]
