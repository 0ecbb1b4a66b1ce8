"""What each version of the row cache holds: which slot has which row, and until when a dropped row's slot is kept."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..jit import kernel
from ..partition_store.features import SparseRows, as_bits
from ..partition_store.typed_features import TypedRows
from ..placement import feature_cache
from ..placement.feature_cache import AHEAD_NODES, write_rows
from ..sampler.protocol import Allocate
from ..triton_kernels.gather_rows import RowTables, gather_tiers
from ..triton_kernels.intrinsics import prefetch

SENT = (
    1 << 48
)  # a place from here on is a row that was sent, one below is a slot: table 1 and table 0 of `gather_tiers`


class RowSlots(Protocol):
    """Slots for rows of one feature table."""

    def assemble(self, places: np.ndarray, rows, allocate: Allocate):
        """Return rows in order.

        Args:
            places: (num,) int64, a slot, or SENT + position in `rows`.
            rows: The rows that were sent.
            allocate: Allocates the result.

        Raises:
            ValueError: rows have another form than those of the slots.
        """

    def store(self, slots: np.ndarray, positions: np.ndarray, assembled) -> None:
        """Copy rows of an assembled result, at the given positions, to slots."""

    def num_bytes(self, rows) -> int:
        """Return the bytes of rows that are sent or assembled."""

    def kept(self, assembled) -> np.ndarray | None:
        """Return the positions of rows that slots may hold, ascending; None: all."""


class DenseSlots:
    """Slots for dense rows.

    Args:
        num_slots: Number of slots.
        dim, dtype: Length and dtype of a row.
    """

    def __init__(self, num_slots: int, dim: int, dtype: np.dtype | type):
        self._table = np.empty((num_slots, dim), dtype)

    def assemble(self, places: np.ndarray, rows: np.ndarray, allocate: Allocate) -> np.ndarray:
        table = self._table
        if not isinstance(rows, np.ndarray) or rows.dtype != table.dtype or rows.shape[1:] != table.shape[1:]:
            given = f"{rows.dtype} of shape {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
            raise ValueError(f"rows must be {table.dtype} of shape (num, {table.shape[1]}), got {given}")
        out = allocate((len(places), table.shape[1]), table.dtype)
        return gather_tiers(places, None, RowTables([table, np.ascontiguousarray(rows)]), out)

    def store(self, slots: np.ndarray, positions: np.ndarray, assembled: np.ndarray) -> None:
        row_bytes = self._table.shape[1] * self._table.itemsize
        write_rows(_bytes_of(self._table), slots, _bytes_of(assembled), positions, row_bytes)

    def num_bytes(self, rows: np.ndarray) -> int:
        return rows.nbytes

    def kept(self, assembled: np.ndarray) -> None:
        return None


class SparseSlots:
    """Slots for sparse rows, each as wide as the widest row of the feature table.

    Args:
        num_slots: Number of slots.
        dim, dtype: Length and dtype of a row.
        width: Largest number of stored values in a row.
    """

    def __init__(self, num_slots: int, dim: int, dtype: np.dtype | type, width: int):
        self.dim, self.width, self._data_dtype = dim, width, np.dtype(dtype)
        self._lengths = np.zeros(num_slots, np.int32)
        self._indices = np.empty((num_slots, width), np.int32)
        self._bits = as_bits(np.empty((num_slots, width), dtype))

    def assemble(self, places: np.ndarray, rows: SparseRows, allocate: Allocate) -> SparseRows:
        if not isinstance(rows, SparseRows) or rows.data.dtype != self._data_dtype or rows.dim != self.dim:
            raise ValueError(f"rows must be sparse, {self._data_dtype} of dim {self.dim}, got {type(rows).__name__}")
        indptr = allocate((len(places) + 1,), np.int64)
        _count_values(places, self._lengths, rows.indptr, indptr)
        indices = allocate((int(indptr[-1]),), np.int32)
        data = allocate((int(indptr[-1]),), self._data_dtype)
        _copy_values(
            places, self._indices, self._bits, rows.indptr, rows.indices, as_bits(rows.data), indptr, indices,
            as_bits(data),
        )  # fmt: skip
        return SparseRows(indptr, indices, data, self.dim)

    def store(self, slots: np.ndarray, positions: np.ndarray, assembled: SparseRows) -> None:
        widest = int(np.diff(assembled.indptr)[positions].max(initial=0))
        if widest > self.width:
            raise ValueError(f"a row has {widest} values, the widest was to have {self.width}: give the table's widest")
        _store_values(
            slots, positions, assembled.indptr, assembled.indices, as_bits(assembled.data), self._lengths,
            self._indices, self._bits,
        )  # fmt: skip

    def num_bytes(self, rows: SparseRows) -> int:
        return rows.nbytes

    def kept(self, assembled: SparseRows) -> None:
        return None


class NodeTypeSlots:
    """Slots for rows of several node types: each type has its own cells, as many as slots hold a row of it at a time.

    Args:
        num_slots: Number of slots.
        cells: By node type, its cells, as many as slots; None for a node type without features.
    """

    def __init__(self, num_slots: int, cells: "list[RowSlots | None]"):
        self._cells = cells
        self._node_type, self._cell = np.full(num_slots, -1, np.int32), np.empty(num_slots, np.int64)
        self._free = [np.empty(num_slots, np.int64) for _ in cells]  # cells that were freed, on a stack
        self._num_free, self._num_used = np.zeros((2, len(cells)), np.int64)

    def assemble(self, places: np.ndarray, rows: TypedRows, allocate: Allocate) -> TypedRows:
        if not isinstance(rows, TypedRows) or len(rows.tables) != len(self._cells):
            raise ValueError(f"rows must be those of {len(self._cells)} node types, got {type(rows).__name__}")
        held, sent = np.flatnonzero(places < SENT), np.flatnonzero(places >= SENT)
        node_type, cell = np.empty(len(places), rows.node_type.dtype), np.empty(len(places), np.int64)
        node_type[held], cell[held] = self._node_type[places[held]], self._cell[places[held]]
        node_type[sent], cell[sent] = rows.node_type[places[sent] - SENT], SENT + rows.rank()[places[sent] - SENT]
        tables = [
            None if cells is None else cells.assemble(cell[node_type == number], own, allocate)
            for number, (cells, own) in enumerate(zip(self._cells, rows.tables, strict=True))
        ]
        return TypedRows(node_type, tables)

    def store(self, slots: np.ndarray, positions: np.ndarray, assembled: TypedRows) -> None:
        before, node_type, rank = self._node_type[slots], assembled.node_type[positions], assembled.rank()[positions]
        for number in range(len(self._cells)):
            self._give_back(number, self._cell[slots[before == number]])
        for number, cells in enumerate(self._cells):
            if cells is None:
                continue
            own = slots[node_type == number]
            self._node_type[own], self._cell[own] = number, self._take(number, len(own))
            cells.store(self._cell[own], rank[node_type == number], assembled.tables[number])

    def num_bytes(self, rows: TypedRows) -> int:
        return rows.nbytes

    def kept(self, assembled: TypedRows) -> np.ndarray:
        has_row = np.array([cells is not None for cells in self._cells])
        return np.flatnonzero(has_row[assembled.node_type])

    def _give_back(self, node_type: int, cells: np.ndarray) -> None:
        first = self._num_free[node_type]
        self._free[node_type][first : first + len(cells)] = cells
        self._num_free[node_type] += len(cells)

    def _take(self, node_type: int, num: int) -> np.ndarray:
        """Return cells that no slot has: first those that were freed, then new ones."""
        again = min(num, self._num_free[node_type])
        last, fresh = self._num_free[node_type], self._num_used[node_type] + np.arange(num - again)
        self._num_free[node_type] -= again
        self._num_used[node_type] += num - again
        return np.concatenate([self._free[node_type][last - again : last], fresh])


def slots_of(
    num_slots: int, dim: int, dtype: np.dtype | type, sparse_width: int | None, node_types: Sequence = ()
) -> RowSlots:
    """Return slots for the rows of a table; arguments as for `TrainerCache`."""
    if node_types:
        of_node_type = [
            node_type and slots_of(num_slots, node_type.dim, node_type.dtype, node_type.sparse_width)
            for node_type in node_types
        ]
        return NodeTypeSlots(num_slots, of_node_type)
    if sparse_width is None:
        return DenseSlots(num_slots, dim, dtype)
    return SparseSlots(num_slots, dim, dtype, sparse_width)


def _bytes_of(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(-1).view(np.uint8)


@kernel
def _count_values(places, lengths, sent_indptr, indptr):
    indptr[0] = 0
    for i in range(len(places)):
        if places[i] < SENT:
            length = np.int64(lengths[places[i]])
        else:
            sent = places[i] - SENT
            length = sent_indptr[sent + 1] - sent_indptr[sent]
        indptr[i + 1] = indptr[i] + length


@kernel
def _copy_values(places, slot_indices, slot_bits, sent_indptr, sent_indices, sent_bits, indptr, indices, bits):
    for i in range(len(places)):
        first = indptr[i]
        if places[i] < SENT:
            slot = places[i]
            for k in range(indptr[i + 1] - first):
                indices[first + k] = slot_indices[slot, k]
                bits[first + k] = slot_bits[slot, k]
        else:
            start = sent_indptr[places[i] - SENT]
            for k in range(indptr[i + 1] - first):
                indices[first + k] = sent_indices[start + k]
                bits[first + k] = sent_bits[start + k]


@kernel
def _store_values(slots, positions, indptr, indices, bits, lengths, slot_indices, slot_bits):
    for i in range(len(slots)):
        first = indptr[positions[i]]
        length = indptr[positions[i] + 1] - first
        lengths[slots[i]] = length
        for k in range(length):
            slot_indices[slots[i], k] = indices[first + k]
            slot_bits[slots[i], k] = bits[first + k]


_STEP_SHIFT = 20  # of a float32's bits
_NUM_STEPS = 1 << (32 - _STEP_SHIFT)
POLICIES = {"lru": feature_cache.LRU, "sieve": feature_cache.SIEVE}


class CacheContents:
    """Rows of the newest version, and rows that older versions still count on; ids alone, not their memory.

    The policy says which rows are wanted. A wanted row is taken in once there is space. A row that is no longer wanted
    is dropped once its place is needed, unless more than `spare` rows would then hold slots that cannot be reused yet.

    Args:
        num_nodes: ids are below it.
        capacity: most rows of a version.
        spare: most slots of dropped rows.
        policy: one of POLICIES.

    Attributes:
        num_live: rows of the newest version.
    """

    def __init__(self, num_nodes: int, capacity: int, spare: int, policy: str):
        self.num_live = 0
        self._capacity, self._spare, self._policy = capacity, spare, POLICIES[policy]
        num_slots = capacity + spare
        self._slot_of = np.full(num_nodes, -1, np.int32)
        self._node_of = np.full(num_slots, -1, np.int64)
        self._live = np.zeros(num_slots, bool)
        self._dropped_at = np.zeros(num_slots, np.int64)
        self._free = np.arange(num_slots - 1, -1, -1)  # a stack, of which the first `_num_free` are free
        self._num_free = num_slots
        self._hand = 0  # where the search for rows to drop goes on
        self._dropped: deque[tuple[int, np.ndarray]] = deque()  # versions, and the slots that they no longer use
        # The policy has slots of its own: slot of each node, node of each slot, rows in place, list, ends of the list.
        self._wanted = np.full(num_nodes, -1, np.int32)
        self._policy_state = (
            self._wanted, np.full(capacity, -1, np.int64), np.zeros(capacity, bool), np.zeros((3, capacity), np.int64),
            np.array([-1, -1, -1, 0]),
        )  # fmt: skip
        self._all = np.broadcast_to(np.zeros(1, np.int64), num_nodes)  # every row goes through the cache
        none = np.empty(0, np.int64)
        self._no_coming = (none, none, none)

    @property
    def num_retained(self) -> int:
        """Slots of dropped rows, at most `spare`."""
        return len(self._node_of) - self._num_free - self.num_live

    def ids(self) -> np.ndarray:
        """Return the (num_live,) int64 ids of the newest version."""
        return self._node_of[self._live]

    def locate(self, union: np.ndarray, missing: np.ndarray, sent: int, places: np.ndarray) -> int:
        """Look rows up that are in memory, dropped or not.

        Args:
            union: (num,) ids.
            missing: (num,) bool, rows that are not looked up.
            sent: what the places of missing rows count up from.
            places: (num,) int64, filled with slots, or sent, sent + 1, ... for missing rows.

        Returns:
            The first position whose row is not in memory, where it stopped, or -1.
        """
        return _locate(union, missing, self._slot_of, sent, places)

    def plan(
        self, union: np.ndarray, version: int, oldest: int | None, weight: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Let the policy read a union, and change the contents to what it wants, as far as there is space.

        Args:
            union: (num,) distinct ids, all of whose rows are available.
            version: Version that the contents get if they change.
            oldest: Oldest version that a request may still count on; None: there is none.
            weight: (num,) numbers >= 0. The heaviest row is read last; among equals, the first. None: all are equal.

        Returns:
            Ids added, ids removed, slots to fill, and the positions in the union of the rows that go there.
        """
        # Of a union larger than the cache, LRU keeps what it reads last: the rest need not be read.
        most = min(len(union), self._capacity) if self._policy == feature_cache.LRU else len(union)
        order = None if weight is None else heaviest_first(weight, most)
        heads = union[:most] if order is None else union[order]
        self._read(np.ascontiguousarray(heads[::-1], np.int64))
        self.release(oldest)
        wishes = _count_wishes(heads, self._wanted, self._slot_of, self._live)
        removed = self._drop(wishes - (self._capacity - self.num_live), version, oldest)
        space = min(wishes, self._capacity - self.num_live)
        added, slots, positions = (np.empty(space, np.int64) for _ in range(3))
        state = (self._slot_of, self._node_of, self._live, self._free)
        num, num_new = _admit(heads, self._wanted, state, self._num_free, added, slots, positions)
        self._num_free -= num_new
        self.num_live += num
        positions = positions[:num_new] if order is None else order[positions[:num_new]]
        return added[:num], removed, slots[:num_new], positions

    def release(self, oldest: int | None) -> None:
        """Free the slots of dropped rows that versions from `oldest` on do not use; None: all."""
        while self._dropped and (oldest is None or self._dropped[0][0] <= oldest):
            version, slots = self._dropped.popleft()
            state = (self._slot_of, self._node_of, self._live, self._dropped_at, self._free)
            self._num_free = _free_slots(version, slots, state, self._num_free)

    def _read(self, nodes: np.ndarray) -> None:
        found, slots, positions = (np.empty(len(nodes), np.int64) for _ in range(3))
        feature_cache.resolve(
            self._policy, nodes, self._all, 1, 1, self._policy_state, self._no_coming, found, slots, positions
        )

    def _drop(self, most: int, version: int, oldest: int | None) -> np.ndarray:
        """Drop up to `most` rows that are not wanted, and return their ids."""
        if oldest is not None:
            most = min(most, self._spare - self.num_retained)
        slots = np.empty(max(0, min(most, self.num_live)), np.int64)
        state = (self._node_of, self._live, self._dropped_at)
        num, self._hand = _drop_unwanted(version, self._wanted, state, self._hand, slots)
        slots = slots[:num]
        self.num_live -= num
        removed = self._node_of[slots]
        if num:
            self._dropped.append((version, slots))
        if oldest is None:
            self.release(None)
        return removed


def heaviest_first(weight: np.ndarray, most: int) -> np.ndarray:
    """Return the (most,) int64 positions of the heaviest, those of about one weight in order: eight steps an octave.

    Args:
        weight: (num,) numbers >= 0.
        most: at most num.

    Cost: two passes, no sort.
    """
    steps = weight.astype(np.float32).view(np.uint32) >> _STEP_SHIFT  # exponent and three bits of the fraction
    order = np.empty(most, np.int64)
    _order_by_step(steps, order)
    return order


@kernel
def _order_by_step(steps, order):
    """Fill order with the positions of the highest steps, ascending within a step."""
    first = np.zeros(_NUM_STEPS + 1, np.int64)
    for step in steps:
        first[step] += 1
    total = 0
    for step in range(_NUM_STEPS, -1, -1):
        total, first[step] = total + first[step], total
    for i in range(len(steps)):
        at = first[steps[i]]
        if at < len(order):
            order[at] = i
            first[steps[i]] = at + 1


@kernel
def _locate(union, missing, slot_of, sent, places):
    num, num_sent = len(union), 0
    for i in range(num):
        if i + AHEAD_NODES < num:
            prefetch(slot_of, np.int64(union[i + AHEAD_NODES]))
        if missing[i]:
            places[i] = sent + num_sent
            num_sent += 1
        else:
            places[i] = slot_of[union[i]]
            if places[i] < 0:
                return i
    return -1


@kernel
def _count_wishes(union, wanted, slot_of, live):
    """Return how many rows are wanted that the newest version does not have."""
    num, wishes = len(union), 0
    for i in range(num):
        if i + AHEAD_NODES < num:
            prefetch(wanted, np.int64(union[i + AHEAD_NODES]))
            prefetch(slot_of, np.int64(union[i + AHEAD_NODES]))
        if wanted[union[i]] >= 0:
            slot = slot_of[union[i]]
            wishes += slot < 0 or not live[slot]
    return wishes


@kernel
def _drop_unwanted(version, wanted, state, hand, slots):
    """Fill slots with those dropped, going around once from `hand`; return how many they are, and where to go on."""
    node_of, live, dropped_at = state
    num, num_slots = 0, len(node_of)
    for _ in range(num_slots):
        if num == len(slots):
            break
        if live[hand] and wanted[node_of[hand]] < 0:
            live[hand] = False
            dropped_at[hand] = version
            slots[num] = hand
            num += 1
        hand = hand + 1 if hand + 1 < num_slots else 0
    return num, hand


@kernel
def _admit(union, wanted, state, num_free, added, slots, positions):
    """Take wanted rows in, in order; return how many, and how many of them need their row written."""
    slot_of, node_of, live, free = state
    num, num_new = 0, 0
    for i in range(len(union)):
        if num == len(added):
            break
        node = np.int64(union[i])
        slot = np.int64(slot_of[node])
        if wanted[node] < 0 or (slot >= 0 and live[slot]):
            continue
        if slot < 0:
            if num_new == num_free:
                continue  # a row that was dropped and is still there needs no slot: one may follow
            slot = free[num_free - 1 - num_new]
            slot_of[node], node_of[slot] = slot, node
            slots[num_new], positions[num_new] = slot, i
            num_new += 1
        live[slot] = True
        added[num] = node
        num += 1
    return num, num_new


@kernel
def _free_slots(version, slots, state, num_free):
    """Free slots that were dropped for a version and are not in use again; return how many slots are free."""
    slot_of, node_of, live, dropped_at, free = state
    for slot in slots:
        if not live[slot] and dropped_at[slot] == version:
            slot_of[node_of[slot]] = -1
            node_of[slot] = -1
            free[num_free] = slot
            num_free += 1
    return num_free
