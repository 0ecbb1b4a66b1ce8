"""Features whose halo rows are also stored packed, part by part: a part then reads two runs of the disk.

Within a part, rows of nodes in many halos come first. A process that keeps those in memory reads the rest in one run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import PartitionStoreError
from ..jit import kernel
from ..triton_kernels.gather_rows import RowCode, RowTables, gather_tiers, pack_places, unpack_places
from .features import Column, CSRFeatures, DenseFeatures, SparseRows, checked_rows, memory_of, merge_rows, stack_rows
from .planned_reads import read_slice

_PACKED = int(pack_places(np.int64(1), np.int64(0)))  # the place of the first packed row
_IN_ORDER = np.empty(0, np.int32)


@dataclass(frozen=True)
class PackedFeatures(Column):
    """A `Column` that knows where the halo rows of each part are packed.

    Attributes:
        owned: The row of every node, by store id.
        packed: The rows of all halo lists, part after part.
        part_offsets: (num_parts + 1,) int64; part p owns [part_offsets[p], part_offsets[p + 1]).
        halo_offsets: (num_parts + 1,) int64; the packed rows of part p's halo are [halo_offsets[p], halo_offsets[p +
            1]).
        halo_nodes: (num_packed,) store ids of the halos, ascending within a part.
        halo_places: (num_packed,) int32 position of each halo node's row among its part's packed rows; None: rows are
            in the order of `halo_nodes`.
        halo_count: (num_rows,) uint8 number of halos that a node is in, at most 255; None: unknown.
        part: Part whose packed rows are read; None: all rows come from their owners.
    """

    owned: DenseFeatures | CSRFeatures
    packed: DenseFeatures | CSRFeatures
    part_offsets: np.ndarray
    halo_offsets: np.ndarray
    halo_nodes: np.ndarray
    halo_places: np.ndarray | None = None
    halo_count: np.ndarray | None = None
    part: int | None = None
    is_packed = True

    @property
    def num_rows(self) -> int:
        """Number of rows, one a node; packed copies do not count."""
        return self.owned.num_rows

    @property
    def dim(self) -> int:
        """Features of a row, decoded."""
        return self.owned.dim

    @property
    def dtype(self) -> np.dtype:
        """What `read` gives: float32 for codes."""
        return self.owned.dtype

    @property
    def storage(self) -> RowCode | None:
        """The form of quantised rows; None where the rows are plain numbers."""
        return self.owned.storage

    @property
    def raw(self) -> "PackedFeatures":
        """The table of the rows as they are stored, see `DenseFeatures.raw`."""
        return self if self.storage is None else replace(self, owned=self.owned.raw, packed=self.packed.raw)

    @property
    def is_sparse(self) -> bool:
        """Whether rows come as `SparseRows`."""
        return self.owned.is_sparse

    @property
    def nbytes(self) -> int:
        """Bytes of every node's row once, as in `owned`; the packed copies are not counted."""
        return self.owned.nbytes

    @property
    def batch_row_bytes(self) -> float:
        """Bytes of one row in a batch, see `dense_batch_row_bytes`."""
        return self.owned.batch_row_bytes

    @property
    def indptr(self) -> np.ndarray:
        """(num_rows + 1,) int64 of sparse rows."""
        return self.owned.indptr

    def at_random(self) -> "PackedFeatures":
        """Return the tables over maps for reads at random."""
        return replace(self, owned=self.owned.at_random(), packed=self.packed.at_random())

    def read(self, ids: np.ndarray, out: Any = None) -> np.ndarray | SparseRows:
        """Return rows, see `Column.read`; those outside of core and halo come from where their owners' lie.

        Cost: beyond the copies a binary search in the halo list for each node that the part does not own.
        """
        if self.part is None:
            return self.owned.read(ids, out)
        places = self._places(checked_rows(ids, self.num_rows))
        if self.is_sparse:
            return self._read_sparse(places)
        out = memory_of(out, (len(places), self.dim), self.dtype)
        with (
            self.owned.reading(lambda: places[places < _PACKED]) as owned,
            self.packed.reading(lambda: places[places >= _PACKED] - _PACKED) as packed,
        ):
            return gather_tiers(places, None, RowTables([owned, packed]), out, code=self.storage)

    def load(self, nodes: np.ndarray) -> tuple[DenseFeatures | CSRFeatures, np.ndarray | None]:
        """Read the rows of (num,) ascending ids into a table in memory, each run of the disk in order.

        Returns:
            The table, and (num,) int32 the row of it that each node has.
        """
        if self.part is None:
            return self.owned.load(nodes)
        first, last = self.halo_offsets[self.part : self.part + 2]
        places = self._places(checked_rows(nodes, self.num_rows), read_slice)
        order, read = np.empty(len(places), np.int32), np.zeros(len(places), np.int64)
        num_owned = _in_order(places, first + _PACKED, np.zeros(last - first + 1, np.int32), order, read)
        if num_owned < 0:
            raise self._damaged()
        if self.is_sparse:
            pair = [self.owned.load(read[:num_owned])[0], self.packed.load(read[num_owned:])[0]]
            rows = stack_rows([SparseRows(one.indptr, one.indices, one.data, one.dim) for one in pair])
            return CSRFeatures(rows.indptr, rows.indices, rows.data, rows.dim), order
        array = np.empty((len(nodes), self.owned.raw.dim), self.owned.raw.dtype)
        self.owned.load(read[:num_owned], array[:num_owned])
        self.packed.load(read[num_owned:], array[num_owned:])
        return DenseFeatures(array, self.storage), order

    def of_part(self, part: int) -> "PackedFeatures":
        """Return the table as a part reads it."""
        return replace(self, part=part)

    def _places(self, nodes: np.ndarray, read: Callable[[np.ndarray], np.ndarray] = np.asarray) -> np.ndarray:
        """Return (num,) int64 places as of `pack_places`: table 0 is `owned`, table 1 `packed`."""
        begin, end = self.part_offsets[self.part : self.part + 2]
        first, last = self.halo_offsets[self.part : self.part + 2]
        places = np.empty(len(nodes), np.int64)
        order = _IN_ORDER if self.halo_places is None else read(self.halo_places[first:last])
        halo_nodes = read(self.halo_nodes[first:last])
        if not _find_places(nodes, begin, end, halo_nodes, order, first + _PACKED, places):
            raise self._damaged()
        return places

    def _damaged(self) -> PartitionStoreError:
        return PartitionStoreError(
            f"halo_places: part {self.part} has rows beyond its own, or one twice: the store is damaged; write it "
            "again with overwrite=True"
        )

    def _read_sparse(self, places: np.ndarray) -> SparseRows:
        table, rows = unpack_places(places)
        owned, packed = np.flatnonzero(table == 0), np.flatnonzero(table)
        return merge_rows([self.owned.read(rows[owned]), self.packed.read(rows[packed])], [owned, packed])


@kernel
def _find_places(nodes, begin, end, halo_nodes, order, first_packed, places):
    """Write the place of each node's row: its own id, or for a node of the halo the packed row.

    Returns:
        Whether each packed row is one of the part.
    """
    for i in range(len(nodes)):
        node = nodes[i]
        places[i] = node
        if len(halo_nodes) and (node < begin or node >= end):
            low, left = 0, len(halo_nodes)
            while left > 1:  # no branch hangs on a comparison: half of them would be mispredicted
                half = left >> 1
                low += half * (halo_nodes[low + half] <= node)
                left -= half
            if halo_nodes[low] == node:
                row = np.int64(order[low]) if len(order) else low
                if row < 0 or row >= len(halo_nodes):
                    return False
                places[i] = first_packed + row
    return True


@kernel
def _in_order(places, first_packed, rank, order, read):
    """Write the rows of ascending nodes in the order of the disk, owned ones first, and which row each node has.

    Args:
        rank: (num_packed of the part + 1,) zeros.

    Returns:
        The number of owned rows; -1 if two nodes have one row.
    """
    num_owned = 0
    for place in places:
        if place < first_packed:
            num_owned += 1
        elif rank[place - first_packed + 1]:
            return -1
        else:
            rank[place - first_packed + 1] = 1
    for i in range(1, len(rank)):
        rank[i] += rank[i - 1]
    owned = 0
    for i in range(len(places)):
        if places[i] < first_packed:
            order[i], read[owned] = owned, places[i]
            owned += 1
        else:
            order[i] = num_owned + rank[places[i] - first_packed]
            read[order[i]] = places[i] - _PACKED
    return num_owned


def features_of_part(features: Column, part: int) -> Column:
    """Return the table that batches of a part are gathered from: with packed halo rows where there are some."""
    return features.of_part(part) if features.is_packed else features
