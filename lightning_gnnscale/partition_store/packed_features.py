"""Features whose halo rows also stand packed, part by part: what a part reads then lies in two runs of the disk."""

from dataclasses import dataclass, replace

import numpy as np

from ..jit import kernel
from ..triton_kernels.gather_rows import RowCode, RowTables, gather_tiers, pack_places, unpack_places
from .features import CSRFeatures, DenseFeatures, FeatureTable, SparseRows, checked_rows, merge_rows

_PACKED = int(pack_places(np.int64(1), np.int64(0)))  # the place of the first packed row


@dataclass(frozen=True)
class PackedFeatures:
    """A `FeatureTable` that knows where the halo rows of each part are packed.

    Attributes:
        owned: every node's row, by store id.
        packed: the rows of all halo lists, one part's behind the other's.
        part_offsets: (num_parts + 1,) int64, part p owns [part_offsets[p], part_offsets[p + 1]).
        halo_offsets: (num_parts + 1,) int64, part p's halo has the packed rows [halo_offsets[p], halo_offsets[p + 1]).
        halo_nodes: (num_packed,) store id of each packed row, ascending within a part.
        part: whose packed rows are read; None: all rows come from their owners.
    """

    owned: DenseFeatures | CSRFeatures
    packed: DenseFeatures | CSRFeatures
    part_offsets: np.ndarray
    halo_offsets: np.ndarray
    halo_nodes: np.ndarray
    part: int | None = None

    @property
    def num_rows(self) -> int:
        return self.owned.num_rows

    @property
    def dim(self) -> int:
        return self.owned.dim

    @property
    def dtype(self) -> np.dtype:
        return self.owned.dtype

    @property
    def storage(self) -> RowCode | None:
        """The form of codes; None where the rows are plain numbers."""
        return getattr(self.owned, "storage", None)

    @property
    def raw(self) -> "PackedFeatures":
        """The table of the rows as they are stored, see `DenseFeatures.raw`."""
        return self if self.storage is None else replace(self, owned=self.owned.raw, packed=self.packed.raw)

    @property
    def is_sparse(self) -> bool:
        return self.owned.is_sparse

    @property
    def nbytes(self) -> int:
        """Bytes of every node's row once, as of `owned`; the packed copies come beside them."""
        return self.owned.nbytes

    @property
    def indptr(self) -> np.ndarray:
        """(num_rows + 1,) int64 of sparse rows."""
        return self.owned.indptr

    def gather(self, nodes: np.ndarray, out: np.ndarray | None = None) -> np.ndarray | SparseRows:
        """Copy rows, bit for bit what is stored; codes are decoded.

        Args:
            nodes: (num,) integers in [0, num_rows); those outside of core and halo are read from their owners.
            out: (num, dim) of `dtype`, for codes also float16; filled in place where given; not for sparse rows.

        Cost: beyond the copies a binary search in the halo list for each node that the part does not own.
        """
        if self.part is None:
            return self.owned.gather(nodes) if self.is_sparse else self.owned.gather(nodes, out)
        places = self._places(checked_rows(nodes, self.num_rows))
        if self.is_sparse:
            return self._gather_sparse(places)
        out = np.empty((len(places), self.dim), self.dtype) if out is None else out
        return gather_tiers(places, None, RowTables([self.owned.array, self.packed.array]), out, code=self.storage)

    def load(self, nodes: np.ndarray) -> DenseFeatures | CSRFeatures:
        """Read the rows of (num,) ascending ids into a table in memory: of a part, two runs of the disk."""
        if self.part is None:
            return self.owned.load(nodes)
        table, rows = unpack_places(self._places(checked_rows(nodes, self.num_rows)))
        places = [np.flatnonzero(table == 0), np.flatnonzero(table)]
        owned, packed = (of.load(rows[at]) for of, at in zip((self.owned, self.packed), places, strict=True))
        if self.is_sparse:
            merged = merge_rows(
                [SparseRows(one.indptr, one.indices, one.data, one.dim) for one in (owned, packed)], places
            )
            return replace(self.owned, indptr=merged.indptr, indices=merged.indices, data=merged.data)
        array = np.empty((len(nodes), *owned.array.shape[1:]), owned.array.dtype)
        array[places[0]], array[places[1]] = owned.array, packed.array
        return replace(self.owned, array=array)

    def of_part(self, part: int) -> "PackedFeatures":
        """Return the table as a part reads it."""
        return replace(self, part=part)

    def _places(self, nodes: np.ndarray) -> np.ndarray:
        """Return (num,) int64 places as of `pack_places`: table 0 is `owned`, table 1 `packed`."""
        begin, end = self.part_offsets[self.part : self.part + 2]
        first, last = self.halo_offsets[self.part : self.part + 2]
        places = np.empty(len(nodes), np.int64)
        _find_places(nodes, begin, end, self.halo_nodes[first:last], first + _PACKED, places)
        return places

    def _gather_sparse(self, places: np.ndarray) -> SparseRows:
        table, rows = unpack_places(places)
        owned, packed = np.flatnonzero(table == 0), np.flatnonzero(table)
        return merge_rows([self.owned.gather(rows[owned]), self.packed.gather(rows[packed])], [owned, packed])


@kernel
def _find_places(nodes, begin, end, halo_nodes, first_packed, places):
    """Write the place of each node's row: its own id, or for a node of the halo the packed row."""
    for i in range(len(nodes)):
        node = nodes[i]
        places[i] = node
        if len(halo_nodes) and (node < begin or node >= end):
            low, left = 0, len(halo_nodes)
            while left > 1:  # no branch hangs on a comparison: half of them would be foretold wrong
                half = left >> 1
                low += half * (halo_nodes[low + half] <= node)
                left -= half
            if halo_nodes[low] == node:
                places[i] = first_packed + low


def features_of_part(features: FeatureTable, part: int) -> FeatureTable:
    """Return the table that batches of a part are gathered from: with packed halo rows where there are some."""
    return features.of_part(part) if isinstance(features, PackedFeatures) else features
