"""The user's ids of a store's nodes and of those that an update adds: which node an edge or a row of a change names."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..edge_stream import NodeIds
from ..edge_stream.id_tables import Strings
from ..errors import EdgeStreamError, short
from .reader import PartitionStore

_AT_ONCE = 1 << 16
_REMEDY = "list a new node in nodes, with its rows"


class KnownIds:
    """Numbers for the nodes of a store by their original ids, and for new ones behind them; replaces `NodeIds`.

    Args:
        store: The store before the update.
        given: Ids of the nodes that the update has rows of; None: there are none.

    Attributes:
        num_old: Nodes of the store.
        given: (num_given,) int64 number of each node that the update has rows of; new are those from `num_old` on.
        are_strings: Whether ids are strings.
        listed: True, as of `NodeIds` whose ids are listed.

    Raises:
        ValueError: the given ids are strings, and those of the store are not, or the other way round.

    Cost: nothing a node where ids are numbers of rows and new ones continue them; else a table of all ids, as in
        `NodeIds`.
    """

    complete = listed = True

    def __init__(self, store: PartitionStore, given: NodeIds | None):
        self.num_old = store.num_nodes
        self._ids = _ids_of(store)
        self.has_names = self._ids is not None
        self.are_strings = self.has_names and self._ids.are_strings
        count = 0 if given is None else len(given)
        if count and given.are_strings != self.are_strings:
            kinds = ("strings", "integers") if given.are_strings else ("integers", "strings")
            raise ValueError(
                f"nodes: the ids are {kinds[0]}, and those of the store are {kinds[1]}: name nodes as it does"
            )
        self.given = np.arange(0) if given is None else self._number(given)
        self._num_new = int((self.given >= self.num_old).sum())

    def __len__(self) -> int:
        return self.num_old + self._num_new

    @property
    def num_new(self) -> int:
        """Nodes that the store lacks."""
        return self._num_new

    def encode(self, src, dst) -> tuple[np.ndarray, np.ndarray]:
        """Return the (num_edges,) int64 numbers of both ends.

        Args:
            src, dst: (num_edges,) integers, or `Strings`.

        Raises:
            EdgeStreamError: an end that neither the store nor the update has.
        """
        return self._of_edges(src), self._of_edges(dst)

    def renamed(self, ids: NodeIds) -> Callable[[np.ndarray], np.ndarray]:
        """Return what numbers the nodes of another numbering; raises as `encode` does.

        Args:
            ids: The user's ids of that numbering.
        """
        if len(ids) and ids.are_strings != self.are_strings:
            raise EdgeStreamError(self._of_another_kind())
        numbers = self._find(_values(ids)) if len(ids) else np.empty(0, np.int64)

        def number(nodes: np.ndarray) -> np.ndarray:
            found = numbers[nodes]
            if len(found) and found.min() < 0:
                raise EdgeStreamError(_strange(ids.plain(np.asarray(nodes[[int(np.argmin(found))]]))[0]))
            return found

        return number

    def index_of(self, what: str, ids: NodeIds) -> np.ndarray:
        """Return the (num,) int64 numbers of ids of nodes of the store.

        Raises:
            ValueError: one that the store does not have; names it.
        """
        if len(ids) and ids.are_strings != self.are_strings:
            raise ValueError(f"{what}: no node {short(ids.plain(np.arange(1))[0])} is in the store")
        found = self._find(_values(ids))
        strange = np.flatnonzero((found < 0) | (found >= self.num_old))
        if len(strange):
            raise ValueError(
                f"{what}: no node {short(ids.plain(strange[:1])[0])} is in the store: name nodes that it has"
            )
        return found

    def names(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return the user's ids of (num,) numbers as a store's files hold them."""
        if not self.are_strings:
            return {"user_ids": numbers if self._ids is None else np.asarray(self._ids)[numbers]}
        return dict(zip(("user_id_offsets", "user_id_bytes"), self._ids.strings(numbers), strict=True))

    def in_order_of(self, numbers: np.ndarray) -> NodeIds:
        """Return the user's ids of (num,) numbers, each once, as a numbering of their own."""
        if not self.are_strings:
            return NodeIds.of(np.asarray(numbers, np.int64) if self._ids is None else np.asarray(self._ids)[numbers])
        starts = range(0, len(numbers), _AT_ONCE)
        taken = (self._ids.strings(np.asarray(numbers[start : start + _AT_ONCE])) for start in starts)
        texts = (Strings.read_only(data, offsets.astype(np.int32)) for offsets, data in taken)
        return NodeIds.of_pieces(texts, len(numbers))

    def plain(self, number: int) -> Any:
        """Return the user's id of a number."""
        return number if self._ids is None else self._ids.plain(np.array([number]))[0]

    def _of_edges(self, values) -> np.ndarray:
        if isinstance(values, Strings) != self.are_strings and _count(values):
            raise EdgeStreamError(self._of_another_kind())
        found = self._find(values)
        if len(found) and found.min() < 0:
            raise EdgeStreamError(_strange(_plain(values, int(np.argmin(found)))))
        return found

    def _of_another_kind(self) -> str:
        kinds = ("integers", "strings") if self.are_strings else ("strings", "integers")
        hint = "; id_type='string' reads those of text files so" if self.are_strings else ""
        return f"node ids are {kinds[0]}, and those of the store are {kinds[1]}: name nodes as it does{hint}"

    def _find(self, values) -> np.ndarray:
        if self._ids is not None:
            return self._ids.find(values)
        values = np.asarray(values)
        inside = (values >= 0) & (values < len(self))
        return np.where(inside, values, -1).astype(np.int64)

    def _number(self, given: NodeIds) -> np.ndarray:
        """Return the numbers of the given nodes; new ones come behind the store's, or continue its row numbers."""
        self._num_new = 0
        found = self._find(_values(given))
        new = np.flatnonzero(found < 0)
        if not len(new):
            return found
        if self._ids is None:
            values = np.asarray(given)[new]
            if values.min() >= self.num_old and values.max() < self.num_old + len(new):  # each once: they continue
                found[new] = values
                return found
            self._ids = NodeIds.of(np.arange(self.num_old))
            self.has_names = True
        values = given.strings(new) if self.are_strings else np.asarray(given)[new]
        if self.are_strings:
            values = Strings.read_only(values[1], values[0].astype(np.int32))
        self._ids.listed = None  # these are no strangers
        found[new], _ = self._ids.encode(values, values)
        return found


def _ids_of(store: PartitionStore) -> NodeIds | None:
    """Return the user's ids in original order; None where they are the numbers of rows."""
    ids, offsets, data = store.stored_user_ids
    if ids is None and offsets is None:
        return None
    numbers = (store.store_nid[start : start + _AT_ONCE] for start in range(0, store.num_nodes, _AT_ONCE))
    if offsets is None:
        return NodeIds.of_pieces((np.asarray(ids[some]) for some in numbers), store.num_nodes)
    return NodeIds.of_pieces((_texts(np.asarray(some), offsets, data) for some in numbers), store.num_nodes)


def _texts(nodes: np.ndarray, offsets: np.ndarray, data: np.ndarray) -> Strings:
    begin, end = offsets[nodes], offsets[nodes + 1]
    ends = np.cumsum(end - begin)
    # The place of each byte: it counts on from where its text begins.
    places = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(begin - (ends - (end - begin)), end - begin)
    return Strings.read_only(np.asarray(data[places]), np.concatenate([[0], ends]).astype(np.int32))


def _strange(name: Any) -> str:
    return f"node {short(name)} is neither in the store nor among the new nodes: {_REMEDY}"


def _values(ids: NodeIds):
    """Return all of some ids as `NodeIds.find` takes them."""
    if not ids.are_strings:
        return np.asarray(ids)
    offsets, data = ids.strings(np.arange(len(ids)))
    return Strings.read_only(data, offsets.astype(np.int32))


def _count(values) -> int:
    return len(values.offsets) - 1 if isinstance(values, Strings) else len(values)


def _plain(values, place: int) -> Any:
    if isinstance(values, Strings):
        return values.data[values.offsets[place] : values.offsets[place + 1]].tobytes().decode()
    return int(values[place])
