"""Numbers for arbitrary ids: 64-bit integers or strings become 0, 1, 2, ... in order of first appearance."""

import os
import threading
from pathlib import Path

import numpy as np

from ..errors import EdgeStreamError
from ..jit import kernel
from ..rng import mix64

_FIRST_SLOTS = 1 << 10


class NodeIds:
    """The user's id of every node number; grows while a stream is read for the first time.

    `np.asarray(node_ids)` gives (num_ids,) int64, uint64 or str. Edges are looked at in their order, `src` before
    `dst`, so the numbers depend on nothing but the edges.

    Attributes:
        complete: True after a whole pass.

    Cost: integers 24 to 48 bytes a node; strings about 100 bytes a node plus their characters.
    """

    def __init__(self):
        self.complete = False
        self._lock = threading.Lock()
        self._strings: dict[str, int] | None = None
        self._integers: _IntegerTable | None = None
        self._dtype: np.dtype | None = None

    def __len__(self) -> int:
        table = self._strings if self._strings is not None else self._integers
        return 0 if table is None else len(table)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        if self._strings is not None:
            ids = np.array(list(self._strings), dtype=np.str_)
        elif self._integers is not None:
            ids = self._integers.ids().view(self._dtype)
        else:
            ids = np.empty(0, np.int64)
        return ids if dtype is None else ids.astype(dtype)

    def encode(self, src, dst) -> tuple[np.ndarray, np.ndarray]:
        """Number the ids of some consecutive edges, and remember the new ones.

        Args:
            src, dst: (num_edges,) integers, or pyarrow string arrays.

        Returns:
            Two (num_edges,) int64 arrays.

        Raises:
            EdgeStreamError: integers after strings, or the reverse.
        """
        is_integer = isinstance(src, np.ndarray)
        with self._lock:
            if self._dtype is None:
                self._dtype = src.dtype if is_integer and src.dtype == np.uint64 else np.dtype(np.int64)
            if (self._strings if is_integer else self._integers) is not None:
                raise EdgeStreamError("node ids must all be integers or all be strings, got both")
            if not is_integer:
                return self._encode_strings(src, dst)
            if self._integers is None:
                self._integers = _IntegerTable()
            as_int64 = [np.ascontiguousarray(ids).astype(np.int64, copy=False) for ids in (src, dst)]
            return self._integers.encode(*as_int64)

    def index_of(self, ids) -> np.ndarray:
        """Return the (num,) int64 node numbers of the user's ids.

        Raises:
            ValueError: an id is not among the stream's.
        """
        if self._strings is not None:
            found = np.array([self._strings.get(str(i), -1) for i in ids], dtype=np.int64)
        elif self._integers is not None:
            found = self._integers.find(np.ascontiguousarray(ids).astype(np.int64, copy=False))
        else:
            found = np.full(len(ids), -1, np.int64)
        if len(found) and found.min() < 0:
            raise ValueError(f"node id {ids[int(np.argmin(found))]!r} does not appear in the edges")
        return found

    def save(self, path: str | os.PathLike) -> Path:
        """Write `np.asarray(node_ids)` as .npy, whole or not at all, and return its path."""
        path = Path(path)
        temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
        try:
            with open(temporary, "wb") as file:
                np.save(file, np.asarray(self))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike) -> "NodeIds":
        """Read what `save` wrote."""
        try:
            ids = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise EdgeStreamError(f"{path}: cannot be read as node ids: {error}") from error
        node_ids = cls()
        node_ids.complete = True
        if ids.dtype.kind == "U":
            node_ids._strings = {name: number for number, name in enumerate(ids.tolist())}
        else:
            node_ids.encode(ids, ids)
        return node_ids

    def _encode_strings(self, src, dst) -> tuple[np.ndarray, np.ndarray]:
        import pyarrow as pa

        if self._strings is None:
            self._strings = {}
        num_edges = len(src)
        # Interleaved, so that the dictionary's order is the order of first appearance, src before dst.
        both = pa.concat_arrays([src, dst])
        order = np.arange(2 * num_edges, dtype=np.int64).reshape(2, num_edges).T.ravel()
        encoded = both.take(pa.array(order)).dictionary_encode()
        table = self._strings
        numbers = np.array([table.setdefault(name, len(table)) for name in encoded.dictionary.to_pylist()], np.int64)
        ends = numbers[encoded.indices.to_numpy()]
        return np.ascontiguousarray(ends[0::2]), np.ascontiguousarray(ends[1::2])


class _IntegerTable:
    """Open addressing over int64 ids; grows by doubling, at most half full."""

    def __init__(self):
        self._slots = np.full(_FIRST_SLOTS, -1, np.int64)
        self._ids = np.empty(_FIRST_SLOTS // 2, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def ids(self) -> np.ndarray:
        return self._ids[: self._count].copy()

    def encode(self, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out_src, out_dst = np.empty(len(src), np.int64), np.empty(len(dst), np.int64)
        done = 0
        while True:
            done, self._count = _number(src, dst, out_src, out_dst, done, self._slots, self._ids, self._count)
            if done == len(src):
                return out_src, out_dst
            grown = np.empty(2 * len(self._ids), np.int64)
            grown[: self._count] = self._ids[: self._count]
            self._ids = grown
            self._slots = np.full(2 * len(self._slots), -1, np.int64)
            _reinsert(self._slots, self._ids, self._count)

    def find(self, ids: np.ndarray) -> np.ndarray:
        return _find(ids, self._slots, self._ids)


@kernel
def _slot_of(value, slots, ids):
    """Return the slot that holds a value, or the empty one where it belongs."""
    mask = np.uint64(len(slots) - 1)
    slot = mix64(np.uint64(value)) & mask
    while slots[slot] >= 0 and ids[slots[slot]] != value:
        slot = (slot + np.uint64(1)) & mask
    return slot


@kernel
def _number(src, dst, out_src, out_dst, start, slots, ids, count):
    """Number edges from `start` on until the table is too full for one more; return (edges done, ids known)."""
    for i in range(start, len(src)):
        if count + 2 > len(ids):
            return i, count
        for end in range(2):
            value = src[i] if end == 0 else dst[i]
            slot = _slot_of(value, slots, ids)
            number = slots[slot]
            if number < 0:
                number = count
                slots[slot] = number
                ids[number] = value
                count += 1
            if end == 0:
                out_src[i] = number
            else:
                out_dst[i] = number
    return len(src), count


@kernel
def _reinsert(slots, ids, count):
    for number in range(count):
        slots[_slot_of(ids[number], slots, ids)] = number


@kernel
def _find(values, slots, ids):
    found = np.empty(len(values), np.int64)
    for i in range(len(values)):
        found[i] = slots[_slot_of(values[i], slots, ids)]
    return found
