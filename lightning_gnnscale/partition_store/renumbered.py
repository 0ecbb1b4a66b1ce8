"""The nodes of an updated store: who they were, where they are now, and in which part the new ones are."""

from typing import NamedTuple

import numpy as np

from ..graph import id_dtype
from ..jit import kernel
from .inputs import StoreIds, relabel, type_starts
from .place_nodes import Loads, place_nodes
from .reader import PartitionStore
from .store_change import StoreChange
from .typed_features import NodeTypes


class Renumbered(NamedTuple):
    """The ids of nodes before and after an update.

    Nodes that stay keep their part and their order in it; new ones come behind those of their node type. Original ids
    are numbers from 0 without gaps: those behind a removed node move up.

    Attributes:
        part_id: (num_nodes,) int32 part by original id of the updated store.
        ids: The two id spaces of the updated store.
        original: (num_known,) int64 original id of each number of `KnownIds`, -1 of a node that is removed.
        numbers: (num_nodes,) number in `KnownIds` of each original id.
        before: (num_nodes,) old store id of each new one, -1 of a new node.
        after: (num_old,) new store id of each old one, -1 of a node that is removed.
        sizes: By node type, number of nodes; [] in a graph of one node type and one edge type.
        old_types, new_types: Where the nodes of each node type are, by old and by new store ids; None of such a graph.
    """

    part_id: np.ndarray
    ids: StoreIds
    original: np.ndarray
    numbers: np.ndarray
    before: np.ndarray
    after: np.ndarray
    sizes: list[int]
    old_types: NodeTypes | None
    new_types: NodeTypes | None

    @property
    def known(self) -> np.ndarray:
        """(num_nodes,) number in `KnownIds` of each node by store id."""
        return self.numbers[self.ids.original_nid]

    def rows_before(self, node_type: int | None) -> np.ndarray:
        """Return the old row of each row of a per-node file, -1 of a new node's.

        Args:
            node_type: Number of the node type that the file is of; None: of all nodes.
        """
        if node_type is None:
            return self.before
        starts, step = self.new_types.starts, self.new_types.num_node_types
        runs = [self.before[starts[at] : starts[at + 1]] for at in range(node_type, len(starts) - 1, step)]
        before = np.concatenate(runs)
        stays = np.flatnonzero(before >= 0)
        before[stays] = self.old_types.locate(before[stays].astype(np.int64))[1]
        return before

    def rows_of(self, numbers: np.ndarray, node_type: int | None) -> np.ndarray:
        """Return the (num,) int64 rows in a per-node file of nodes by their numbers in `KnownIds`."""
        nodes = self.ids.store_nid[self.original[numbers]].astype(np.int64)
        return nodes if node_type is None else self.new_types.locate(nodes)[1]


def renumber(store: PartitionStore, change: StoreChange, slack: float) -> Renumbered:
    """Place the new nodes, and number all nodes of the updated store.

    Args:
        store: The store before.
        change: What changes.
        slack: See `Loads.of`.

    Cost: a few arrays of the number of nodes; the neighbours of new nodes are held, 16 bytes an edge of theirs.
    """
    parts = np.arange(store.num_parts, dtype=np.int32)
    part_of_old = np.repeat(parts, np.diff(store.part_offsets))[store.store_nid]
    indptr, neighbours = _neighbours(change)
    new = place_nodes(indptr, neighbours, part_of_old, _loads(store, change, part_of_old, np.diff(indptr), slack))
    stays = np.ones(len(change.known), bool)
    stays[change.removed] = False
    numbers, sizes = np.flatnonzero(stays), []
    if change.schema is not None:  # new nodes come behind those of their type
        node_type = change.known.node_type[numbers]
        numbers = numbers[np.argsort(node_type, kind="stable")]
        sizes = np.bincount(node_type, minlength=change.schema.num_node_types).tolist()
    original = np.full(len(stays), -1)
    original[numbers] = np.arange(len(numbers))
    part_id = np.concatenate([part_of_old, new])[numbers]
    ids = relabel(part_id, store.num_parts)
    now = original[: store.num_nodes][store.original_nid]
    dtype = id_dtype(max(len(part_id), store.num_nodes))
    after = np.full(store.num_nodes, -1, dtype)
    after[now >= 0] = ids.store_nid[now[now >= 0]]
    before = np.full(len(part_id), -1, dtype)
    before[after[after >= 0]] = np.flatnonzero(after >= 0)
    types = None
    if sizes:
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        types = NodeTypes.of_runs(type_starts(part_id, ends, store.num_parts), len(sizes))
    return Renumbered(part_id, ids, original, numbers, before, after, sizes, store.node_types, types)


def balances(part_offsets: np.ndarray) -> float:
    """Return the nodes of the largest part over the mean of all."""
    counts = np.diff(part_offsets)
    return float(counts.max() / max(1, counts.mean())) if counts.sum() else 1.0


def _neighbours(change: StoreChange) -> tuple[np.ndarray, np.ndarray]:
    """Return the CSR (indptr, neighbours) of the new nodes over edges in either direction."""
    first, num_new = change.known.num_old, change.known.num_new
    indptr = np.zeros(num_new + 1, np.int64)
    _count_near(change.near_new[0], change.near_new[1], first, indptr)
    neighbours = np.empty(indptr[-1], np.int64)
    _list_near(change.near_new[0], change.near_new[1], first, indptr[:-1].copy(), neighbours)
    return indptr, neighbours


def _loads(
    store: PartitionStore, change: StoreChange, part_of_old: np.ndarray, degree: np.ndarray, slack: float
) -> Loads:
    """Return what parts hold of nodes, edges, and nodes of each mask; degree: (num_new,) of the new nodes."""
    known, count = change.known, store.num_parts
    before = [np.diff(store.part_offsets), np.diff(store.csc.indptr[store.part_offsets])]
    left = [before[0] - np.bincount(part_of_old[change.removed], minlength=count), before[1]]
    weight = [np.ones(known.num_new), degree]
    tables = {table.name: table for table in change.tables}
    for name, mask in sorted(store.masks.items()):
        held = np.add.reduceat(np.append(mask, False).astype(np.int64), np.minimum(store.part_offsets[:-1], len(mask)))
        held[np.diff(store.part_offsets) == 0] = 0
        gone = store.store_nid[change.removed][np.asarray(mask[store.store_nid[change.removed]])]
        before.append(held)
        left.append(held - np.bincount(store.part_of(gone), minlength=count))
        of_new, given = np.zeros(known.num_new), tables[f"mask_{name}"]
        if given.rows is not None:
            is_new = given.nodes >= known.num_old
            of_new[given.nodes[is_new] - known.num_old] = given.rows[is_new]
        weight.append(of_new)
    return Loads.of(np.stack(before), np.stack(left), np.stack(weight, axis=1), slack)


@kernel
def _count_near(src, dst, first, indptr):
    for i in range(len(src)):
        if src[i] >= first:
            indptr[src[i] - first + 1] += 1
        if dst[i] >= first:
            indptr[dst[i] - first + 1] += 1
    for node in range(len(indptr) - 1):
        indptr[node + 1] += indptr[node]


@kernel
def _list_near(src, dst, first, cursor, neighbours):
    for i in range(len(src)):
        if src[i] >= first:
            neighbours[cursor[src[i] - first]] = dst[i]
            cursor[src[i] - first] += 1
        if dst[i] >= first:
            neighbours[cursor[dst[i] - first]] = src[i]
            cursor[dst[i] - first] += 1
