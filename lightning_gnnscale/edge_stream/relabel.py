"""Numbers for arbitrary ids: 64-bit integers or strings become 0, 1, 2, ... in order of first appearance."""

import os
import threading
from pathlib import Path

import numpy as np

from ..errors import EdgeStreamError
from .id_tables import IntegerTable, Strings, StringTable


class NodeIds:
    """The user's id of every node number; grows while a stream is read for the first time.

    `np.asarray(node_ids)` gives (num_ids,) int64, uint64 or str. Edges are looked at in their order, `src` before
    `dst`, so the numbers depend on nothing but the edges.

    Attributes:
        complete: True after a whole pass.

    Cost: integers 24 to 48 bytes a node; strings 32 to 64 bytes a node plus once to twice their characters.
    """

    def __init__(self):
        self.complete = False
        self._lock = threading.Lock()
        self._table: IntegerTable | StringTable | None = None
        self._dtype = np.dtype(np.int64)

    def __len__(self) -> int:
        return 0 if self._table is None else len(self._table)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        if isinstance(self._table, StringTable):
            ids = np.array(self._table.ids(), dtype=np.str_)
        elif self._table is not None:
            ids = self._table.ids().view(self._dtype)
        else:
            ids = np.empty(0, self._dtype)
        return ids if dtype is None else ids.astype(dtype)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def encode(self, src, dst) -> tuple[np.ndarray, np.ndarray]:
        """Number the ids of some consecutive edges, and remember the new ones.

        Args:
            src, dst: (num_edges,) integers, or `Strings`.

        Returns:
            Two (num_edges,) int64 arrays.

        Raises:
            EdgeStreamError: integers after strings, or the reverse.
        """
        kind = StringTable if isinstance(src, Strings) else IntegerTable
        with self._lock:
            if self._table is None:
                self._table = kind()
                if kind is IntegerTable and src.dtype == np.uint64:
                    self._dtype = src.dtype
            if not isinstance(self._table, kind):
                raise EdgeStreamError("node ids must all be integers or all be strings, got both")
            if kind is StringTable:
                return self._table.encode(src, dst)
            return self._table.encode(_as_int64(src), _as_int64(dst))

    def index_of(self, ids) -> np.ndarray:
        """Return the (num,) int64 node numbers of the user's ids.

        Raises:
            ValueError: an id is not among the stream's.
        """
        if isinstance(self._table, StringTable):
            found = self._table.find(Strings.of([str(name) for name in ids]))
        elif self._table is not None:
            found = self._table.find(_as_int64(np.asarray(ids)))
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
        """Read what `save` wrote.

        Raises:
            EdgeStreamError: the file is missing or holds no node ids.
        """
        try:
            ids = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise EdgeStreamError(f"{path}: cannot be read as node ids: {error}") from error
        if ids.ndim != 1 or ids.dtype.kind not in "iuU":
            raise EdgeStreamError(f"{path}: cannot be read as node ids: {ids.dtype} of shape {ids.shape}")
        node_ids = cls()
        # Each id at once as src and as dst: numbered by its place.
        values = Strings.of(ids.tolist()) if ids.dtype.kind == "U" else ids
        node_ids.encode(values, values)
        node_ids.complete = True
        return node_ids


def _as_int64(ids: np.ndarray) -> np.ndarray:
    # A fresh array where the given one is read-only: compiled loops then see one kind.
    return np.array(ids, dtype=np.int64, copy=None if ids.flags.writeable else True, order="C")
