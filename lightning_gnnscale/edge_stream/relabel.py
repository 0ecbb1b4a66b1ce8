"""Numbers for arbitrary ids: 64-bit integers or strings become 0, 1, 2, ... in order of first appearance."""

import hashlib
import os
import threading
from collections.abc import Iterable
from itertools import pairwise
from numbers import Integral
from pathlib import Path

import numpy as np

from ..errors import UNREADABLE, EdgeStreamError, why_no_array
from ..system import whole_file
from ..values import as_array
from .id_tables import IntegerTable, Strings, StringTable


class NodeIds:
    """The user's id of every node number; grows while a stream is read for the first time, or is listed beforehand.

    `np.asarray(node_ids)` gives (num_ids,) int64, uint64 (where an id is 2**63 or above) or str. Edges are read
    in their order, `src` before `dst`, so the numbers depend on nothing but the edges.

    Attributes:
        complete: True after a whole pass, and where the ids were listed.
        listed: a digest of the ids if they were listed by `of` or `load`, so that others are refused; else None.

    Cost: integers 24 to 48 bytes a node; strings 32 to 64 bytes a node plus once to twice their characters
        (`np.asarray` takes four bytes a node for each character of the longest; `strings` does not).
    """

    def __init__(self):
        self.complete = False
        self.listed: str | None = None
        self._lock = threading.Lock()
        self._table: IntegerTable | StringTable | None = None
        self._has_negative = self._has_large = False  # ids below 0, ids from 2**63 on: one of them at most

    def __len__(self) -> int:
        return 0 if self._table is None else len(self._table)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        if isinstance(self._table, StringTable):
            ids = np.array(self._table.ids(), dtype=np.str_)
        elif self._table is not None:
            ids = self._table.ids().view(np.uint64 if self._has_large else np.int64)
        else:
            ids = np.empty(0, np.int64)
        return ids if dtype is None else ids.astype(dtype)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def encode(self, src, dst) -> tuple[np.ndarray, np.ndarray]:
        """Number the ids, integers or `Strings`, of some consecutive edges, and remember the new ones.

        Raises:
            EdgeStreamError: integers after strings, or the reverse; integers that no 64-bit type holds together; an
                id that is not among the listed ones.
        """
        kind = StringTable if isinstance(src, Strings) else IntegerTable
        with self._lock:
            if self._table is None:
                self._table = kind()
            if not isinstance(self._table, kind):
                told = "node ids must all be integers or all be strings, got both"
                if self.listed is not None and self.are_strings:
                    told += ": the listed ones are strings; id_type='string' reads those of text files so too"
                elif self.listed is not None:
                    told += ": the listed ones are integers; list every node in nodes="
                raise EdgeStreamError(told)
            num_listed = len(self._table)
            if kind is IntegerTable:
                self._note_signs(src, dst)
                src, dst = _as_int64(src), _as_int64(dst)
            numbers = self._table.encode(src, dst)
            if self.listed is not None and len(self._table) > num_listed:
                stranger = self.plain(np.array([num_listed]))[0]
                raise EdgeStreamError(
                    f"node id {stranger!r} is not among the {num_listed} listed; list every node in nodes="
                )
            return numbers

    def _note_signs(self, *ends: np.ndarray) -> None:
        """Refuse negative ids beside ids that only uint64 holds: as 64 bits they could be the same."""
        for ids in ends:
            self._has_negative = self._has_negative or _any_negative(ids)
            self._has_large = self._has_large or _any_large(ids)
        if self._has_negative and self._has_large:
            raise EdgeStreamError(
                "node ids hold both negative numbers and numbers from 2**63 on, which no 64-bit type does: write them "
                "as strings"
            )

    def has(self, name: str) -> bool:
        """Whether a text is one of the ids, or the decimal digits of one."""
        try:
            return len(self.index_of([name if self.are_strings else int(name)])) > 0
        except (ValueError, OverflowError):
            return False

    @property
    def are_strings(self) -> bool:
        return isinstance(self._table, StringTable)

    def plain(self, numbers: np.ndarray) -> list:
        """Return the user's ids of (num,) node numbers as Python's int or str."""
        if not self.are_strings:
            return np.asarray(self)[numbers].tolist()
        offsets, data = self.strings(numbers)
        return [data[start:end].tobytes().decode() for start, end in pairwise(offsets)]

    def strings(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of (num,) numbers where `are_strings`: (num + 1,) int64 offsets, and UTF-8 bytes."""
        return self._table.take(np.ascontiguousarray(numbers, dtype=np.int64))

    def index_of(self, ids) -> np.ndarray:
        """Return the (num,) int64 node numbers of the user's ids.

        Args:
            ids: (num,) integers or strings, as in the edges.

        Raises:
            ValueError: an id is not among the stream's, or not a whole number where those are.
        """
        found = self.find(Strings.of([str(name) for name in ids]) if self.are_strings else ids)
        if len(found) and found.min() < 0:
            raise ValueError(f"node id {ids[int(np.argmin(found))]!r} does not appear in the edges")
        return found

    def find(self, ids) -> np.ndarray:
        """Return the (num,) int64 node numbers of the user's ids, -1 of others.

        Args:
            ids: (num,) integers, or `Strings` where `are_strings`.

        Raises:
            ValueError: not whole numbers where those of the stream are.
        """
        if self.are_strings:
            return self._table.find(ids)
        if self._table is None:
            return np.full(len(ids), -1, np.int64)
        ids = _whole_numbers(ids)
        found = self._table.find(_as_int64(ids))
        if ids.dtype == np.uint64 and not self._has_large:
            found[ids >= _LARGE] = -1
        elif ids.dtype != np.uint64 and self._has_large:
            found[ids < 0] = -1
        return found

    def save(self, path: str | os.PathLike) -> Path:
        """Write `np.asarray(node_ids)` as .npy, whole or not at all, and return its path."""
        path = Path(path)
        with whole_file(path) as file:
            np.save(file, np.asarray(self))
        return path

    @classmethod
    def load(cls, path: str | os.PathLike) -> "NodeIds":
        """Read what `save` wrote, or any .npy of ids: see `of`.

        Raises:
            EdgeStreamError: the file is missing, holds no node ids, or repeats one.
        """
        try:
            ids = np.load(path, allow_pickle=False)
        except UNREADABLE as error:
            raise EdgeStreamError(f"{path}: cannot be read as node ids: {why_no_array(error)}") from error
        if not isinstance(ids, np.ndarray):
            ids.close()
            raise EdgeStreamError(f"{path}: cannot be read as node ids: it is an archive; save one array of it")
        try:
            return cls.of(ids)
        except ValueError as error:
            raise EdgeStreamError(f"{path}: cannot be read as node ids: {error}") from None

    @classmethod
    def of(cls, ids) -> "NodeIds":
        """List the ids of all nodes, integers or strings, each once: number i is ids[i], and others are refused."""
        ids = np.asarray(as_array("ids", ids))
        kind = ids.dtype.kind
        are_strings = kind == "U" or (kind in "OT" and all(isinstance(one, str) for one in ids.flat))
        if ids.ndim != 1 or not (are_strings or kind in "iu"):
            raise ValueError(f"{ids.dtype} of shape {ids.shape}")
        starts = range(0, len(ids), _LISTED_AT_ONCE)
        pieces = (ids[start : start + _LISTED_AT_ONCE] for start in starts)
        return cls.of_pieces((Strings.of(piece.tolist()) if are_strings else piece for piece in pieces), len(ids))

    @classmethod
    def of_pieces(cls, pieces: Iterable[np.ndarray | Strings], num_ids: int) -> "NodeIds":
        """List ids that come in chunks: see `of`."""
        node_ids, numbers, start = cls(), np.empty(num_ids, np.int64), 0
        for values in pieces:
            # Each id as src and also as dst: numbered by its position.
            found, _ = node_ids.encode(values, values)
            numbers[start : start + len(found)] = found
            start += len(found)
        if len(node_ids) < num_ids:
            again = int(np.argmax(numbers != np.arange(num_ids)))
            raise ValueError(f"id {node_ids.plain(numbers[[again]])[0]!r} is repeated in row {again}")
        node_ids.complete, node_ids.listed = True, node_ids._digest()
        return node_ids

    def _digest(self) -> str:
        arrays = self.strings(np.arange(len(self))) if self.are_strings else (np.asarray(self),)
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(array.dtype.str.encode())
            digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")))
        return digest.hexdigest()


_LARGE = np.uint64(2**63)
_LISTED_AT_ONCE = 1 << 16


def _any_negative(ids: np.ndarray) -> bool:
    return ids.dtype.kind == "i" and len(ids) > 0 and bool(ids.min() < 0)


def _any_large(ids: np.ndarray) -> bool:
    return ids.dtype == np.uint64 and len(ids) > 0 and bool(ids.max() >= _LARGE)


def _whole_numbers(ids) -> np.ndarray:
    """Return (num,) integers as an array of them; of a list on both sides of 2**63 numpy itself would make floats."""
    if isinstance(ids, list | tuple) and all(isinstance(one, Integral) for one in ids) and max(ids, default=0) >= 2**63:
        try:
            ids = np.array(ids, np.uint64)
        except OverflowError:
            raise ValueError(f"node ids must fit 64 bits of one sign, got {min(ids)} and {max(ids)}") from None
    ids = np.asarray(ids)
    if ids.size == 0:
        ids = ids.astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"node ids must be a list of whole numbers, got {ids.dtype} of shape {ids.shape}")
    return ids


def _as_int64(ids: np.ndarray) -> np.ndarray:
    # A fresh array where the given one is read-only: compiled loops then see one array type.
    return np.ascontiguousarray(ids, np.int64) if ids.flags.writeable else np.array(ids, np.int64, order="C")
