"""Which nodes have learned rows where only some kinds of nodes do, and which row each of them has."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..graph import GraphSchema
from ..partition_store import PartitionStore
from ..partition_store.kind_features import NodeKinds
from ..sampler.minibatch import RowsByKind


class KindsWithRows(NamedTuple):
    """The kinds of nodes that have rows; rows are counted in the order of the nodes' ids, so those of a part are a run.

    Attributes:
        nodes: Where the nodes of each kind are; its row of a node is the node's row here.
        node_types: Names of all kinds.
        has_rows: (num_kinds,) bool.
        part_offsets: (num_parts + 1,) int64 rows of the parts: part p has [part_offsets[p], part_offsets[p + 1]).

    Cost: 16 bytes for each kind in each part; a row is found by a binary search among these.
    """

    nodes: NodeKinds
    node_types: tuple[str, ...]
    has_rows: np.ndarray
    part_offsets: np.ndarray

    @classmethod
    def of(cls, store: PartitionStore, kinds: Sequence[str] | None) -> "KindsWithRows | None":
        """Return what `kinds` of a store say; None where all nodes have rows.

        Raises:
            ValueError: the store has no kinds, one of that name is not there, or none of them has a node.
        """
        if kinds is None:
            return None
        has_rows = chosen_kinds(kinds, store.schema)
        if has_rows.all():
            return None
        starts, num_kinds = np.array(store.node_kinds.starts, np.int64), len(has_rows)
        lengths = np.diff(starts) * np.resize(has_rows, len(starts) - 1)
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        if not first[-1]:
            raise ValueError(f"kinds={list(kinds)} have no nodes in the store: leave them out, and name others")
        nodes = NodeKinds(starts, first[:-1].copy(), num_kinds)
        return cls(nodes, store.schema.node_types, has_rows, first[::num_kinds].copy())

    @property
    def names(self) -> list[str]:
        """Names of the kinds that have rows."""
        return [name for name, has in zip(self.node_types, self.has_rows, strict=True) if has]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, also of kinds without rows."""
        return int(self.nodes.starts[-1])

    @property
    def num_rows(self) -> int:
        """Number of rows, one a node of these kinds."""
        return int(self.part_offsets[-1])

    def row_ids(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (num,) int64 rows of some nodes.

        Args:
            nodes: (num,) int64 in [0, num_nodes).

        Raises:
            ValueError: a node is of a kind without rows.
        """
        kind, row = self.nodes.locate(nodes)
        known = self.has_rows[kind]
        if not known.all():
            name = self.node_types[kind[np.argmin(known)]]
            named = [one for one in self.node_types if one in (*self.names, name)]
            raise ValueError(
                f"nodes of kind {name!r} have no learned rows, those of kind {', '.join(self.names)} do: make the "
                f"embedding with {said_kinds(named)}"
            )
        return row

    def runs(self, rows: slice) -> Iterator[tuple[slice, slice]]:
        """Yield (ids of nodes, their rows) of each run of nodes among some rows, in ascending order."""
        starts, first = self.nodes.starts, self.nodes.rows
        begins, ends = np.maximum(first, rows.start), np.minimum(np.append(first[1:], self.num_rows), rows.stop)
        for run in np.flatnonzero(begins < ends).tolist():
            start, stop, shift = int(begins[run]), int(ends[run]), int(starts[run] - first[run])
            yield slice(start + shift, stop + shift), slice(start, stop)

    def without_features(self, nodes: np.ndarray) -> RowsByKind:
        """Return the features of (num,) int64 nodes of a graph whose kinds have none."""
        return RowsByKind(torch.from_numpy(self.nodes.kind_of(nodes)), [None] * len(self.node_types))

    def fits(self, store: PartitionStore) -> bool:
        """Whether a store has these kinds of nodes at these ids."""
        if store.schema is None or store.schema.node_types != self.node_types:
            return False
        return np.array_equal(store.node_kinds.starts, self.nodes.starts)


def chosen_kinds(kinds: Sequence[str], schema: GraphSchema | None) -> np.ndarray:
    """Return (num_kinds,) bool: which kinds of nodes are named.

    Raises:
        ValueError: there are no kinds, or these are not the names of some.
    """
    if schema is None:
        raise ValueError(f"kinds={kinds!r}: the graph has nodes of one kind, which all have rows: leave it out")
    known = ", ".join(schema.node_types)
    if isinstance(kinds, str) or not isinstance(kinds, Sequence) or not kinds:
        raise ValueError(f"kinds must be a list of some of {known}, got {kinds!r}")
    wrong = next((name for name in kinds if name not in schema.node_types), None)
    if wrong is not None:
        raise ValueError(f"kinds must be some of {known}, got {wrong!r}")
    return np.isin(schema.node_types, list(kinds))


def said_kinds(names: Sequence[str]) -> str:
    """Return the argument that names kinds, as Python and the command line say it."""
    return f"kinds={list(names)} (on the command line ++model.inputs.kinds=[{','.join(names)}])"
