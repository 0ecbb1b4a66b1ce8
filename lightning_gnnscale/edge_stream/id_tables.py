"""Growing hash tables from ids to their numbers, in order of first appearance; a table is at most half full."""

from typing import NamedTuple

import numpy as np

from ..jit import kernel
from ..rng import mix64

_FIRST_IDS = 1 << 9
_FIRST_BYTES = 1 << 13
_HASH_START, _HASH_FACTOR = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)


class Strings(NamedTuple):
    """Some strings: (num_bytes,) uint8 UTF-8, string i from offsets[i] to offsets[i + 1], int32.

    Both are read-only, so that compiled loops see one array type.
    """

    data: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, texts: list[str]) -> "Strings":
        """Pack Python strings, at most 2 GiB of them."""
        encoded = [text.encode() for text in texts]
        lengths = np.array([0, *map(len, encoded)], np.int64)
        return cls.read_only(np.frombuffer(b"".join(encoded), np.uint8), lengths.cumsum().astype(np.int32))

    @classmethod
    def from_arrow(cls, column) -> "Strings":
        """Take a `pyarrow.StringArray` without nulls, sharing Arrow's buffers."""
        _, offsets, data = column.buffers()
        offsets = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
        return cls.read_only(np.frombuffer(data or b"", np.uint8), offsets)

    @classmethod
    def read_only(cls, data: np.ndarray, offsets: np.ndarray) -> "Strings":
        """Take the arrays as they are, and forbid writing to them."""
        data.flags.writeable = offsets.flags.writeable = False
        return cls(data, offsets)


class IntegerTable:
    """Numbers for int64 ids; 24 to 48 bytes an id."""

    def __init__(self):
        self._slots = np.full(2 * _FIRST_IDS, -1, np.int64)
        self._ids = np.empty(_FIRST_IDS, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def ids(self) -> np.ndarray:
        """Return the (num_ids,) int64 ids by their number."""
        return self._ids[: self._count].copy()

    def encode(self, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the (num_edges,) int64 numbers of both ends, new ids numbered edge by edge, src before dst."""
        out = np.empty((2, len(src)), np.int64)
        done = 0
        while True:
            done, self._count = _number_integers(src, dst, out, done, self._slots, self._ids, self._count)
            if done == len(src):
                return out[0], out[1]
            self._ids = _doubled(self._ids)
            self._slots = np.full(2 * len(self._ids), -1, np.int64)
            _reinsert_integers(self._slots, self._ids, self._count)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the (len(ids),) int64 numbers of int64 ids, -1 for unknown ones."""
        return _find_integers(ids, self._slots, self._ids)


class StringTable:
    """Numbers for strings; 32 to 64 bytes an id, beside once to twice its characters."""

    def __init__(self):
        self._slots = np.full(2 * _FIRST_IDS, -1, np.int64)
        self._hashes = np.empty(_FIRST_IDS, np.uint64)
        self._ends = np.empty(_FIRST_IDS, np.int64)
        self._bytes = np.empty(_FIRST_BYTES, np.uint8)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def ids(self) -> list[str]:
        """Return the ids by their number."""
        ends = self._ends[: self._count].tolist()
        return [self._bytes[start:end].tobytes().decode() for start, end in zip([0, *ends], ends, strict=False)]

    def encode(self, src: Strings, dst: Strings) -> tuple[np.ndarray, np.ndarray]:
        """Return the (num_edges,) int64 numbers of both ends, new ids numbered edge by edge, src before dst."""
        num_edges = len(src.offsets) - 1
        out = np.empty((2, num_edges), np.int64)
        done = 0
        while True:
            state = (self._slots, self._hashes, self._ends, self._bytes)
            done, self._count = _number_strings(*src, *dst, out, done, *state, self._count)
            if done == num_edges:
                return out[0], out[1]
            if self._count + 2 > len(self._hashes):
                self._hashes, self._ends = _doubled(self._hashes), _doubled(self._ends)
                self._slots = np.full(2 * len(self._hashes), -1, np.int64)
                _reinsert_strings(self._slots, self._hashes, self._count)
            else:
                self._bytes = _doubled(self._bytes)

    def take(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of (num,) int64 numbers: (num + 1,) int64 offsets, and UTF-8 bytes from offset to offset."""
        offsets = np.zeros(len(numbers) + 1, np.int64)
        _add_lengths(numbers, self._ends, offsets)
        data = np.empty(offsets[-1], np.uint8)
        _take_strings(numbers, self._ends, self._bytes, offsets, data)
        return offsets, data

    def find(self, texts: Strings) -> np.ndarray:
        """Return the (num_strings,) int64 numbers, -1 for unknown ones."""
        return _find_strings(*texts, self._slots, self._hashes, self._ends, self._bytes)


def _doubled(array: np.ndarray) -> np.ndarray:
    grown = np.empty(2 * len(array), array.dtype)
    grown[: len(array)] = array
    return grown


@kernel
def _integer_slot(value, slots, ids):
    """Return the slot that holds a value, or the empty one where it belongs."""
    mask = np.uint64(len(slots) - 1)
    slot = mix64(np.uint64(value)) & mask
    while slots[slot] >= 0 and ids[slots[slot]] != value:
        slot = (slot + np.uint64(1)) & mask
    return slot


@kernel
def _number_integers(src, dst, out, start, slots, ids, count):
    """Number edges from `start` on until the table is too full for one more; return (edges done, ids known)."""
    for i in range(start, len(src)):
        if count + 2 > len(ids):
            return i, count
        for end in range(2):
            value = src[i] if end == 0 else dst[i]
            slot = _integer_slot(value, slots, ids)
            if slots[slot] < 0:
                slots[slot] = count
                ids[count] = value
                count += 1
            out[end, i] = slots[slot]
    return len(src), count


@kernel
def _reinsert_integers(slots, ids, count):
    for number in range(count):
        slots[_integer_slot(ids[number], slots, ids)] = number


@kernel
def _find_integers(values, slots, ids):
    found = np.empty(len(values), np.int64)
    for i in range(len(values)):
        found[i] = slots[_integer_slot(values[i], slots, ids)]
    return found


@kernel
def _string_hash(data, start, end):
    """Return Fowler, Noll and Vo's FNV-1a hash, mixed once more."""
    value = _HASH_START
    for i in range(start, end):
        value = (value ^ np.uint64(data[i])) * _HASH_FACTOR
    return mix64(value)


@kernel
def _string_slot(data, start, end, hashed, slots, hashes, ends, stored):
    """Return the slot that holds a string, or the empty one where it belongs."""
    mask = np.uint64(len(slots) - 1)
    slot = hashed & mask
    while slots[slot] >= 0:
        number = slots[slot]
        if hashes[number] == hashed:
            first = ends[number - 1] if number > 0 else 0
            same = ends[number] - first == end - start
            i = 0
            while same and i < end - start:
                same = stored[first + i] == data[start + i]
                i += 1
            if same:
                return slot
        slot = (slot + np.uint64(1)) & mask
    return slot


@kernel
def _number_strings(src, src_offsets, dst, dst_offsets, out, begin, slots, hashes, ends, stored, count):
    """Number edges from `begin` on until one more might not fit; return (edges done, ids known)."""
    num_edges = out.shape[1]
    used = ends[count - 1] if count > 0 else 0
    for i in range(begin, num_edges):
        need = src_offsets[i + 1] - src_offsets[i] + dst_offsets[i + 1] - dst_offsets[i]
        if count + 2 > len(hashes) or used + need > len(stored):
            return i, count
        for side in range(2):
            data, offsets = (src, src_offsets) if side == 0 else (dst, dst_offsets)
            start, end = offsets[i], offsets[i + 1]
            hashed = _string_hash(data, start, end)
            slot = _string_slot(data, start, end, hashed, slots, hashes, ends, stored)
            if slots[slot] < 0:
                slots[slot] = count
                hashes[count] = hashed
                for j in range(start, end):
                    stored[used] = data[j]
                    used += 1
                ends[count] = used
                count += 1
            out[side, i] = slots[slot]
    return num_edges, count


@kernel
def _reinsert_strings(slots, hashes, count):
    """Put strings, all different, into empty slots by their hashes."""
    mask = np.uint64(len(slots) - 1)
    for number in range(count):
        slot = hashes[number] & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = number


@kernel
def _find_strings(data, offsets, slots, hashes, ends, stored):
    found = np.empty(len(offsets) - 1, np.int64)
    for i in range(len(found)):
        start, end = offsets[i], offsets[i + 1]
        hashed = _string_hash(data, start, end)
        found[i] = slots[_string_slot(data, start, end, hashed, slots, hashes, ends, stored)]
    return found


@kernel
def _add_lengths(numbers, ends, offsets):
    for i in range(len(numbers)):
        number = numbers[i]
        start = ends[number - 1] if number > 0 else 0
        offsets[i + 1] = offsets[i] + ends[number] - start


@kernel
def _take_strings(numbers, ends, stored, offsets, out):
    for i in range(len(numbers)):
        number = numbers[i]
        start = ends[number - 1] if number > 0 else 0
        for j in range(offsets[i + 1] - offsets[i]):
            out[offsets[i] + j] = stored[start + j]
