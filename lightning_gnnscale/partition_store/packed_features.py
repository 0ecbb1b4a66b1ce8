"""Features whose halo rows also stand packed, part by part: what a part reads then lies in two runs of the disk."""

from dataclasses import dataclass, replace

import numpy as np

from .features import CSRFeatures, DenseFeatures, FeatureTable, SparseRows, checked_rows, merge_rows


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
    def is_sparse(self) -> bool:
        return self.owned.is_sparse

    @property
    def indptr(self) -> np.ndarray:
        """(num_rows + 1,) int64 of sparse rows."""
        return self.owned.indptr

    def gather(self, nodes: np.ndarray, out: np.ndarray | None = None) -> np.ndarray | SparseRows:
        """Copy rows, bit for bit what is stored.

        Args:
            nodes: (num,) integers in [0, num_rows); those outside of core and halo are read from their owners.
            out: (num, dim) of the stored dtype, filled in place where given; not for sparse rows.

        Cost: beyond the copies a binary search in the halo list for each node that the part does not own.
        """
        nodes = checked_rows(nodes, self.num_rows)
        places, rows = self._packed_rows(nodes)
        if self.is_sparse:
            return self._gather_sparse(nodes, places, rows)
        if not len(places):
            return self.owned.gather(nodes, out)
        out = np.empty((len(nodes), self.dim), self.dtype) if out is None else out
        others = np.ones(len(nodes), bool)
        others[places] = False
        out[others] = self.owned.gather(nodes[others])
        out[places] = self.packed.gather(rows)
        return out

    def of_part(self, part: int) -> "PackedFeatures":
        """Return the table as a part reads it."""
        return replace(self, part=part)

    def _packed_rows(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of the part's halo nodes among the given ones, and the packed row of each."""
        none = np.empty(0, np.int64)
        if self.part is None:
            return none, none
        begin, end = self.part_offsets[self.part : self.part + 2]
        first, last = self.halo_offsets[self.part : self.part + 2]
        halo = self.halo_nodes[first:last]
        outside = np.flatnonzero((nodes < begin) | (nodes >= end))
        if not len(outside) or not len(halo):
            return none, none
        wanted = nodes[outside].astype(halo.dtype)
        found = np.searchsorted(halo, wanted)
        listed = halo[np.minimum(found, len(halo) - 1)] == wanted
        return outside[listed], found[listed] + first

    def _gather_sparse(self, nodes: np.ndarray, places: np.ndarray, rows: np.ndarray) -> SparseRows:
        others = np.delete(np.arange(len(nodes)), places)
        return merge_rows([self.owned.gather(nodes[others]), self.packed.gather(rows)], [others, places])


def features_of_part(features: FeatureTable, part: int) -> FeatureTable:
    """Return the table that batches of a part are gathered from: with packed halo rows where there are some."""
    return features.of_part(part) if isinstance(features, PackedFeatures) else features
