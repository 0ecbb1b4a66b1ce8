"""The user's ids of a store's nodes and of those that an update adds: which node an edge or a row of a change names."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..edge_stream import NodeIds
from ..edge_stream.id_tables import Strings
from ..edge_stream.relations import IdsByNodeType
from ..errors import EdgeStreamError, short
from ..graph import GraphSchema
from .reader import PartitionStore

_AT_ONCE = 1 << 16
_REMEDY = "list a new node in nodes, with its rows"


class KnownIds:
    """Numbers for the nodes of a store by their original ids, and for new ones behind them; replaces `NodeIds`.

    Args:
        store: The store before the update.
        given: Ids of the nodes that the update has rows of; None: there are none.
        schema: Of the updated graph, where `node_type` is given.
        node_type: Number of the node type whose nodes are meant, which are numbered as a graph of their own; None: all.

    Attributes:
        num_old: Nodes of the store.
        given: (num_given,) int64 number of each node that the update has rows of; new are those from `num_old` on.
        are_strings: Whether ids are strings.
        ids: `NodeIds` of all nodes by number; None: they are the numbers of rows.
        has_names: Whether ids are other than the numbers of rows.
        listed: True, as of `NodeIds` whose ids are listed.

    Raises:
        ValueError: the given ids are strings, and those of the store are not, or the other way round.

    Cost: nothing a node where ids are numbers of rows and new ones continue them; else a table of all ids, as in
        `NodeIds`.
    """

    complete = listed = True

    def __init__(
        self,
        store: PartitionStore,
        given: NodeIds | None,
        schema: GraphSchema | None = None,
        node_type: int | None = None,
    ):
        first, last = 0, store.num_nodes
        self._of = ""
        if node_type is not None:
            first, last = _rows_of(store, node_type)
            self._of = f" of node type {schema.node_types[node_type]}"
        self.num_old, self.ids, self._digits = last - first, _ids_of(store, first, last), False
        if node_type is not None and store.stored_user_ids[1] is not None:  # texts, also of types with other ids
            given = self._as_digits(given)
        self.has_names = self.ids is not None
        count = 0 if given is None else len(given)
        named_by_given = self.has_names and not self.num_old and count and store.stored_user_ids[1] is not None
        self.are_strings = self.has_names and (given if named_by_given else self.ids).are_strings
        if count and given.are_strings != self.are_strings:
            kinds = ("strings", "integers") if given.are_strings else ("integers", "strings")
            raise ValueError(
                f"nodes: the ids{self._of} are {kinds[0]}, and those of the store are {kinds[1]}: name nodes as it does"
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
        first = self._of_edges(src)
        return first, first if dst is src else self._of_edges(dst)

    def renamed(self, ids: NodeIds | None) -> Callable[[np.ndarray], np.ndarray]:
        """Return what numbers the nodes of another numbering; raises as `encode` does.

        Args:
            ids: The user's ids of that numbering; None: it is the user's.
        """
        if ids is None:
            return self._of_edges
        numbers = self.find_listed(ids, len(ids))

        def number(nodes: np.ndarray) -> np.ndarray:
            found = numbers[nodes]
            if len(found) and found.min() < 0:
                raise EdgeStreamError(self._strange(ids.plain(np.asarray(nodes[[int(np.argmin(found))]]))[0]))
            return found

        return number

    def find_listed(self, ids: NodeIds | None, count: int) -> np.ndarray:
        """Return the (num,) int64 numbers of listed ids, -1 of unknown ones.

        Args:
            ids: The user's ids; None: those of the numbers of rows.
            count: How many.

        Raises:
            EdgeStreamError: they are strings and those of the store are not, or the other way round.
        """
        if not count:
            return np.empty(0, np.int64)
        if not self._takes(ids is not None and ids.are_strings):
            raise EdgeStreamError(self._of_another_kind())
        return self._find(np.arange(count) if ids is None else _values(ids))

    def index_of(self, what: str, ids: NodeIds) -> np.ndarray:
        """Return the (num,) int64 numbers of ids of nodes of the store.

        Raises:
            ValueError: one that the store does not have; names it.
        """
        if len(ids) and not self._takes(ids.are_strings):
            raise ValueError(f"{what}: no node {short(ids.plain(np.arange(1))[0])}{self._of} is in the store")
        found = self._find(_values(ids))
        strange = np.flatnonzero((found < 0) | (found >= self.num_old))
        if len(strange):
            raise ValueError(
                f"{what}: no node {short(ids.plain(strange[:1])[0])}{self._of} is in the store: name nodes that it has"
            )
        return found

    def names(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return the user's ids of (num,) numbers as a store's files hold them."""
        if not self.are_strings:
            return {"user_ids": numbers if self.ids is None else np.asarray(self.ids)[numbers]}
        return dict(zip(("user_id_offsets", "user_id_bytes"), self.ids.strings(numbers), strict=True))

    def in_order_of(self, numbers: np.ndarray) -> NodeIds:
        """Return the user's ids of (num,) numbers, each once, as a numbering of their own."""
        if not self.are_strings:
            return NodeIds.of(np.asarray(numbers, np.int64) if self.ids is None else np.asarray(self.ids)[numbers])
        starts = range(0, len(numbers), _AT_ONCE)
        taken = (self.ids.strings(np.asarray(numbers[start : start + _AT_ONCE])) for start in starts)
        texts = (Strings.read_only(data, offsets.astype(np.int32)) for offsets, data in taken)
        return NodeIds.of_pieces(texts, len(numbers))

    def said(self, number: int) -> str:
        """Return the user's id of a number, for messages."""
        return f"{short(number if self.ids is None else self.ids.plain(np.array([number]))[0])}{self._of}"

    def _of_edges(self, values) -> np.ndarray:
        if _count(values) and not self._takes(isinstance(values, Strings)):
            raise EdgeStreamError(self._of_another_kind())
        found = self._find(values)
        if len(found) and found.min() < 0:
            raise EdgeStreamError(self._strange(_plain(values, int(np.argmin(found)))))
        return found

    def _takes(self, strings: bool) -> bool:
        return strings == self.are_strings or (strings and self._digits)

    def _as_digits(self, given: NodeIds | None) -> NodeIds | None:
        """Take texts that are all decimal numbers for these; return the given ids as the same.

        In a store whose ids are texts so are those of node types that count their rows.
        """
        if not self.num_old:  # as its first nodes are named
            self.ids = NodeIds() if given is not None and given.are_strings else None
            return given
        numbers, fit = _digits(_values(self.ids))
        if given is not None and given.are_strings:
            own, own_fit = _digits(_values(given))
            if fit.all() and own_fit.all():
                given = NodeIds.of(own)
        if fit.all() and not (given is not None and given.are_strings):
            self._digits = True
            self.ids = None if np.array_equal(numbers, np.arange(len(numbers))) else NodeIds.of(numbers)
        return given

    def _strange(self, name: Any) -> str:
        return f"node {short(name)}{self._of} is neither in the store nor among the new nodes: {_REMEDY}"

    def _of_another_kind(self) -> str:
        kinds = ("integers", "strings") if self.are_strings else ("strings", "integers")
        hint = "; id_type='string' reads those of text files so" if self.are_strings else ""
        return f"node ids{self._of} are {kinds[0]}, and those of the store are {kinds[1]}: name nodes as it does{hint}"

    def _find(self, values) -> np.ndarray:
        if isinstance(values, Strings) and not self.are_strings:
            numbers, fit = _digits(values)
            return np.where(fit, self._find(numbers), -1)
        if self.ids is not None:
            return self.ids.find(values) if len(self.ids) else np.full(_count(values), -1, np.int64)
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
        if self.ids is None:
            values = np.asarray(given)[new]
            if values.min() >= self.num_old and values.max() < self.num_old + len(new):  # each once: they continue
                found[new] = values
                return found
            self.ids = NodeIds.of(np.arange(self.num_old))
            self.has_names = True
        values = given.strings(new) if self.are_strings else np.asarray(given)[new]
        if self.are_strings:
            values = Strings.read_only(values[1], values[0].astype(np.int32))
        self.ids.listed = None  # these are no strangers
        found[new], _ = self.ids.encode(values, values)
        return found


class KnownIdsByType:
    """Numbers for the nodes of a store with node types: original ids, and new nodes behind, node type by node type.

    Args:
        store: The store before the update.
        schema: Of the updated graph; node types that the store lacks come last.
        given: By number of node type, the ids of the nodes that the update has rows of.

    Attributes:
        by_type: `KnownIds` of each node type.
        node_types: Names of the node types.
        num_old, num_new: Nodes of the store, and those that it lacks.
        given: (num_given,) int64 numbers of the nodes that the update has rows of, node type by node type.
        node_type: (num_known,) uint16 node type of each number.
    """

    def __init__(self, store: PartitionStore, schema: GraphSchema, given: Mapping[int, NodeIds]):
        self.by_type, self._texts, self.node_types = [], store.stored_user_ids[1] is not None, schema.node_types
        for number, name in enumerate(schema.node_types):
            try:
                self.by_type.append(KnownIds(store, given.get(number), schema, number))
            except ValueError as error:
                raise ValueError(f"nodes[{name!r}]: {str(error).removeprefix('nodes: ')}") from None
        old, new = np.array([(own.num_old, own.num_new) for own in self.by_type]).T
        self.num_old, self.num_new = store.num_nodes, int(new.sum())
        self._first_old, self._first_new = np.cumsum(old) - old, self.num_old + np.cumsum(new) - new
        self._sizes = old + new
        types = np.arange(len(old), dtype=np.uint16)
        self.node_type = np.concatenate([np.repeat(types, old), np.repeat(types, new)])
        numbers = [self.numbers_of(number, own.given) for number, own in enumerate(self.by_type)]
        self.given = np.concatenate(numbers)

    def __len__(self) -> int:
        return len(self.node_type)

    @property
    def has_names(self) -> bool:
        """Whether ids of a node type are other than the numbers of its rows."""
        return self._texts or any(own.has_names for own in self.by_type)

    @property
    def sizes(self) -> list[int]:
        """Nodes of each node type, new ones too."""
        return self._sizes.tolist()

    def numbers_of(self, node_type: int, rows: np.ndarray) -> np.ndarray:
        """Return the (num,) int64 numbers of nodes of a node type by their numbers in its `KnownIds`."""
        num_old = self.by_type[node_type].num_old
        behind = self._first_new[node_type] - num_old
        return np.where(rows < num_old, self._first_old[node_type] + rows, behind + rows).astype(np.int64)

    def numbers_by_type(self) -> np.ndarray:
        """Return the (num_known,) int64 numbers of all nodes, node type by node type."""
        return np.concatenate([self.numbers_of(number, np.arange(size)) for number, size in enumerate(self.sizes)])

    def _rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the node types of numbers, and the numbers in the `KnownIds` of these."""
        node_type = self.node_type[numbers].astype(np.int64)
        num_old = np.array([own.num_old for own in self.by_type])
        behind = numbers - self._first_new[node_type] + num_old[node_type]
        return node_type, np.where(numbers < self.num_old, numbers - self._first_old[node_type], behind)

    def names(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return the user's ids of (num,) numbers as a store's files hold them."""
        ids = IdsByNodeType([own.ids for own in self.by_type], self.sizes)
        node_type, rows = self._rows(np.asarray(numbers))
        rows += ids.offsets[node_type]
        if self._texts:
            return dict(zip(("user_id_offsets", "user_id_bytes"), ids.strings(rows), strict=True))
        return {"user_ids": np.asarray(ids)[rows]}

    def said(self, number: int) -> str:
        """Return the user's id of a number and its node type, for messages."""
        node_type, row = self._rows(np.array([number]))
        return self.by_type[int(node_type[0])].said(int(row[0]))


def _rows_of(store: PartitionStore, node_type: int) -> tuple[int, int]:
    """Return the original ids [first, last) of a node type of a store; none of one that it lacks."""
    ends = [0, *np.cumsum(store.manifest["schema"]["kind_sizes"]).tolist()]
    return (ends[node_type], ends[node_type + 1]) if node_type + 1 < len(ends) else (ends[-1], ends[-1])


def _ids_of(store: PartitionStore, first: int, last: int) -> NodeIds | None:
    """Return the user's ids of original ids [first, last); None where they are the numbers of rows."""
    ids, offsets, data = store.stored_user_ids
    if ids is None and offsets is None:
        return None
    numbers = (store.store_nid[start : min(start + _AT_ONCE, last)] for start in range(first, last, _AT_ONCE))
    if offsets is None:
        return NodeIds.of_pieces((np.asarray(ids[some]) for some in numbers), last - first)
    return NodeIds.of_pieces((_texts(np.asarray(some), offsets, data) for some in numbers), last - first)


def _digits(texts: Strings) -> tuple[np.ndarray, np.ndarray]:
    """Return the (num,) int64 numbers that texts write as Python does, 0 for others; and (num,) bool: which do."""
    import pyarrow as pa
    import pyarrow.compute as pc

    buffers = [None, pa.py_buffer(np.ascontiguousarray(texts.offsets)), pa.py_buffer(np.ascontiguousarray(texts.data))]
    column = pa.StringArray.from_buffers(len(texts.offsets) - 1, *buffers[1:])
    fit = pc.match_substring_regex(column, r"^(0|-?[1-9][0-9]{0,17})$")
    numbers = pc.if_else(fit, column, "0").cast(pa.int64())
    return numbers.to_numpy(zero_copy_only=False), fit.to_numpy(zero_copy_only=False)


def _texts(nodes: np.ndarray, offsets: np.ndarray, data: np.ndarray) -> Strings:
    begin, end = offsets[nodes], offsets[nodes + 1]
    ends = np.cumsum(end - begin)
    # The place of each byte: it counts on from where its text begins.
    places = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(begin - (ends - (end - begin)), end - begin)
    return Strings.read_only(np.asarray(data[places]), np.concatenate([[0], ends]).astype(np.int32))


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
