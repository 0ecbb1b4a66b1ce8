"""A dynamic cache for rows that are on no device: LRU, SIEVE, or Belady where the coming reads are known.

A slot holds one row. LRU and SIEVE keep slots in a list from the newest (head) to the oldest (tail); Belady keeps them
in a heap, the one that is needed last on top.
"""

import threading
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..errors import short
from ..jit import kernel
from ..triton_kernels.intrinsics import LINE_BYTES, copy_bytes, prefetch

AHEAD_NODES, AHEAD_ROWS = 32, 8  # between a prefetch and its use
LRU, SIEVE, BELADY = range(3)
POLICIES = {"lru": LRU, "sieve": SIEVE, "belady": BELADY}
NEVER = np.iinfo(np.int64).max  # the time of a read that never comes
# Rows of `links`: the list, or the heap and what it is ordered by.
OLDER, NEWER, VISITED = 0, 1, 2
HEAP, STANDING, NEXT_READ = 0, 1, 2
# Entries of `ends`.
HEAD, TAIL, HAND, SIZE = 0, 1, 2, 3


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
        """Make the cache empty, for the nodes of one buffer; ValueError if it serves another."""
        if self.num_nodes is not None:
            raise ValueError("cache serves another buffer: give each FeatureBuffer a FeatureCache of its own")
        self.num_nodes = num_nodes
        slots, known = self.capacity, num_nodes if self.policy == "belady" else 0
        self._slot_of, self._node_of = np.full(num_nodes, -1, np.int32), np.full(slots, -1, np.int64)
        self._ready, self._links = np.zeros(slots, bool), np.zeros((3, slots), np.int64)
        self._ends = np.array([-1, -1, -1, 0])
        self._next_read, self._last_read = np.full(known, NEVER), np.zeros(known, np.int64)
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
            oldest = int(self._next_read.min(initial=NEVER))
            first = self._time if oldest == NEVER else oldest
            num = sum(len(batch) for batch in batches)
            following = np.empty(self._time - first + num, np.int64)
            following[: self._time - first] = self._following[first - self._first[0] : self._time - self._first[0]]
            self._following, self._first = following, np.array([first])
            for batch in batches:
                append_reads(batch, self._time, self._next_read, self._last_read, following, first)
                self._time += len(batch)
            reorder(self._node_of, self._next_read, self._links, self._ends)

    def forget(self) -> None:
        """Drop announced reads that did not come, for example of an epoch that was broken off."""
        with self.lock:
            self._next_read[:] = NEVER
            if self.policy == "belady":
                reorder(self._node_of, self._next_read, self._links, self._ends)

    def resolve(self, nodes: np.ndarray, places: np.ndarray, limit: int, cache_place: int) -> ResolvedReads:
        """Pass reads through the cache, one after the other; hold `lock` until the rows found in it are copied.

        Rows whose place, as from `pack_places`, is below `limit` go through the cache; slot 0 is at `cache_place`. A
        row that is on its way into the cache is read from its old place.
        """
        found, slots, positions = (np.empty(len(nodes), np.int64) for _ in range(3))
        state = (self._slot_of, self._node_of, self._ready, self._links, self._ends)
        coming = (self._next_read, self._following, self._first)
        num = resolve(POLICIES[self.policy], nodes, places, limit, cache_place, state, coming, found, slots, positions)
        return ResolvedReads(found, slots[:num], positions[:num])

    def confirm(self, nodes: np.ndarray, reads: ResolvedReads) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots to write now, and where their rows are among the reads; hold `lock` until they are written.

        Rows that had to leave again in the meantime are left out.
        """
        num = confirm(nodes, self._node_of, self._ready, reads.slots, reads.positions)
        return reads.slots[:num], reads.positions[:num]


@kernel
def resolve(policy, nodes, places, limit, cache_place, state, coming, found, slots, positions):
    """Pass reads through the cache, one after the other.

    Args:
        policy: LRU, SIEVE or BELADY.
        nodes: (num,) ids.
        places: (num_nodes,) int64 places of all nodes; those below `limit` go through the cache.
        cache_place: the place of slot 0.
        state: (slot_of, node_of, ready, links, ends); updated in place.
            slot_of: (num_nodes,) int32, -1 for none. node_of: (capacity,) int64. ready: (capacity,) bool, whether the
            row is in its slot already. links: (3, capacity) int64. ends: (4,) int64.
        coming: (next_read, following, first): see `consume`; empty arrays unless BELADY.
        found: (num,) int64, filled with the place to read each row from.
        slots, positions: (num,) int64, filled with the slots that rows are to be written to, and where in nodes.

    Returns:
        How many of slots and positions are filled.
    """
    slot_of, node_of, ready, links, ends = state
    num_new = 0
    for i in range(len(nodes)):
        if i + AHEAD_NODES < len(nodes):
            prefetch(places, nodes[i + AHEAD_NODES])
            prefetch(slot_of, nodes[i + AHEAD_NODES])
        node = nodes[i]
        found[i] = places[node]
        if found[i] >= limit:
            continue
        time = consume(node, coming) if policy == BELADY else 0
        slot = np.int64(slot_of[node])
        if slot >= 0:
            if policy == LRU:
                unlink(links, ends, slot)
                push(links, ends, slot)
            elif policy == SIEVE:
                links[VISITED, slot] = 1
            else:
                links[NEXT_READ, slot] = time
                sift_up(links, sift_down(links, ends, links[STANDING, slot]))
            if ready[slot]:
                found[i] = cache_place + slot
            continue
        slot = admit(policy, links, ends, time)
        if slot < 0:
            continue
        if node_of[slot] >= 0:
            slot_of[node_of[slot]] = -1
        node_of[slot], slot_of[node], ready[slot] = node, slot, False
        slots[num_new], positions[num_new] = slot, i
        num_new += 1
    return num_new


@kernel
def consume(node, coming):
    """Take a node's first read off the list of coming reads, and return the time of the one after it."""
    next_read, following, first = coming
    time = next_read[node]
    if time != NEVER:
        next_read[node] = following[time - first[0]]
    return next_read[node]


@kernel
def admit(policy, links, ends, time):
    """Return a slot for a new row, emptied if it must be, or -1 where the row is better left out."""
    capacity = links.shape[1]
    if policy == BELADY:
        if time == NEVER:
            return -1
        if ends[SIZE] < capacity:
            slot = ends[SIZE]
            ends[SIZE] += 1
            links[HEAP, slot], links[STANDING, slot], links[NEXT_READ, slot] = slot, slot, time
            sift_up(links, slot)
            return slot
        slot = links[HEAP, 0]
        if links[NEXT_READ, slot] <= time:
            return -1
        links[NEXT_READ, slot] = time
        sift_down(links, ends, 0)
        return slot
    if ends[SIZE] < capacity:
        slot = ends[SIZE]
        ends[SIZE] += 1
    elif policy == LRU:
        slot = ends[TAIL]
        unlink(links, ends, slot)
    else:
        slot = ends[HAND] if ends[HAND] >= 0 else ends[TAIL]
        while links[VISITED, slot]:
            links[VISITED, slot] = 0
            slot = links[NEWER, slot] if links[NEWER, slot] >= 0 else ends[TAIL]
        ends[HAND] = links[NEWER, slot]
        unlink(links, ends, slot)
    push(links, ends, slot)
    links[VISITED, slot] = 0
    return slot


@kernel
def push(links, ends, slot):
    """Put a slot at the head of the list."""
    links[OLDER, slot], links[NEWER, slot] = ends[HEAD], -1
    if ends[HEAD] >= 0:
        links[NEWER, ends[HEAD]] = slot
    else:
        ends[TAIL] = slot
    ends[HEAD] = slot


@kernel
def unlink(links, ends, slot):
    """Take a slot out of the list."""
    older, newer = links[OLDER, slot], links[NEWER, slot]
    if newer >= 0:
        links[OLDER, newer] = older
    else:
        ends[HEAD] = older
    if older >= 0:
        links[NEWER, older] = newer
    else:
        ends[TAIL] = newer


@kernel
def swap(links, one, two):
    """Exchange two positions of the heap."""
    a, b = links[HEAP, one], links[HEAP, two]
    links[HEAP, one], links[HEAP, two] = b, a
    links[STANDING, b], links[STANDING, a] = one, two


@kernel
def sift_up(links, at):
    """Move an entry of the heap towards the top."""
    while at > 0:
        parent = (at - 1) // 2
        if links[NEXT_READ, links[HEAP, parent]] >= links[NEXT_READ, links[HEAP, at]]:
            return
        swap(links, at, parent)
        at = parent


@kernel
def sift_down(links, ends, at):
    """Move an entry of the heap away from the top, and return its position."""
    while True:
        child = 2 * at + 1
        if child >= ends[SIZE]:
            return at
        other = child + 1
        if other < ends[SIZE] and links[NEXT_READ, links[HEAP, other]] > links[NEXT_READ, links[HEAP, child]]:
            child = other
        if links[NEXT_READ, links[HEAP, at]] >= links[NEXT_READ, links[HEAP, child]]:
            return at
        swap(links, at, child)
        at = child


@kernel
def append_reads(nodes, time, next_read, last_read, following, first):
    """Add coming reads, at times from `time` on, behind those that are known."""
    for i in range(len(nodes)):
        node = nodes[i]
        if next_read[node] == NEVER:
            next_read[node] = time + i
        else:
            following[last_read[node] - first] = time + i
        last_read[node] = time + i
        following[time + i - first] = NEVER


@kernel
def reorder(node_of, next_read, links, ends):
    """Rebuild the heap after reads were added."""
    for slot in range(ends[SIZE]):
        links[NEXT_READ, slot] = next_read[node_of[slot]]
    for at in range(ends[SIZE] // 2 - 1, -1, -1):
        sift_down(links, ends, at)


@kernel
def confirm(nodes, node_of, ready, slots, positions):
    """Mark slots ready whose row is still the one that was to be written, those moved to the front; return how many."""
    num = 0
    for k in range(len(slots)):
        if node_of[slots[k]] == nodes[positions[k]]:
            ready[slots[k]] = True
            slots[num], positions[num] = slots[k], positions[k]
            num += 1
    return num


@kernel
def write_rows(rows, slots, out, positions, row_bytes):
    """Copy rows of out to slots; rows, out: one-dimensional uint8 views."""
    for k in range(len(slots)):
        if k + AHEAD_ROWS < len(slots):
            coming = positions[k + AHEAD_ROWS] * row_bytes
            for at in range(0, row_bytes, LINE_BYTES):
                prefetch(out, coming + at)
        copy_bytes(rows, slots[k] * row_bytes, out, positions[k] * row_bytes, row_bytes)
