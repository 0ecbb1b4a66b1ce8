"""The rows of a store with what an update adds and takes away: old rows and new edges, merged in one pass over both."""

from typing import NamedTuple

import numpy as np

from ..errors import PartitionStoreError
from ..graph import CSC, id_dtype
from ..jit import kernel
from .buckets import BucketLayout, Runs
from .coded_neighbors import read_runs
from .csc_writer import RowWriter, SortBuffer, count_rows, read_range
from .disk import WriteBudget
from .inputs import StoreIds, StoreInputs
from .journal import Journal
from .manifest import REMEDY
from .node_tables import Progress

CHANGES = "node_changes.npy"
NEW, FEATURES, LABELS, IN_EDGES = 1, 2, 4, 8  # bits of a node's byte there


class DroppedEdges(NamedTuple):
    """Edges of a store that go, ascending.

    Attributes:
        row, src: (num_dropped,) store ids of their ends.
        edge_type: (num_dropped,) their types; (0,) in a graph of one node type and edge type.
    """

    row: np.ndarray
    src: np.ndarray
    edge_type: np.ndarray


class OldRows(NamedTuple):
    """The rows of the store before the update, and what of them stays.

    Attributes:
        csc: The rows.
        edge_type: (num_edges,) type of each edge; (0,) in a graph of one node type and edge type.
        before: (num_nodes,) old store id of each new one, -1 of a new node; ascending but for these.
        after: (num_old,) new store id of each old one, -1 of a node that is removed.
        dropped: Edges that go, in old store ids.
    """

    csc: CSC
    edge_type: np.ndarray
    before: np.ndarray
    after: np.ndarray
    dropped: DroppedEdges


class JoinedValues:
    """Values of old edges and, behind them, of new ones, by edge id: what `RowWriter` reads of an array.

    Args:
        old: (num_old_edges, ...) in the order of the old rows.
        new: (num_new_edges, ...) of the same width.
    """

    def __init__(self, old: np.ndarray, new: np.ndarray):
        self._old, self._new = old, new
        self.dtype, self.shape = old.dtype, (len(old) + len(new), *old.shape[1:])
        self.nbytes = old.nbytes + new.size * old.itemsize

    def __getitem__(self, edges) -> np.ndarray:
        if isinstance(edges, slice):
            edges = np.arange(*edges.indices(self.shape[0]))
        is_new = edges >= len(self._old)
        if not is_new.any():
            return self._old[edges]
        out = np.empty((len(edges), *self.shape[1:]), self.dtype)
        out[~is_new] = self._old[edges[~is_new]]
        out[is_new] = self._new[edges[is_new] - len(self._old)]
        return out


class _MergedWriter(RowWriter):
    """Writes rows as `RowWriter` does, and beside them what changed of each node."""

    def __init__(self, journal: Journal, inputs: StoreInputs, ids: StoreIds, old: OldRows):
        self.changes = journal.open_file("rows", CHANGES, np.uint8)
        self._old = old
        super().__init__(journal, inputs, ids)

    def edge_types(self, edge: np.ndarray) -> np.ndarray:
        """Return the types of old edges, and of new ones behind them."""
        num_old, old = self._old.csc.num_edges, np.maximum(edge, ~edge)
        out = np.empty(len(edge), self.inputs.relations.edge_type_dtype)
        is_new = old >= num_old
        out[~is_new] = self._old.edge_type[old[~is_new]]
        added = edge[is_new]
        out[is_new] = self.inputs.relations.edge_type_of(np.where(added < 0, ~(~added - num_old), added - num_old))
        return out

    @property
    def files(self) -> list:
        return [*super().files, self.changes]


class _Block:
    """Memory for the rows that are merged at once; it grows when a longer row comes."""

    def __init__(self, dtype: np.dtype, with_edge: bool):
        self._dtype, self._with_edge = dtype, with_edge
        self._src, self._edge = np.empty(0, dtype), np.empty(0, np.int64)

    def columns(self, num_edges: int) -> tuple[np.ndarray, np.ndarray]:
        if num_edges > len(self._src):
            self._src = np.empty(num_edges, self._dtype)
            self._edge = np.empty(num_edges if self._with_edge else 0, np.int64)
        return self._src, self._edge


def merge_rows(
    journal: Journal,
    inputs: StoreInputs,
    ids: StoreIds,
    old: OldRows,
    changed: np.ndarray,
    layout: BucketLayout,
    runs: Runs,
    budget: WriteBudget,
    progress: Progress,
) -> None:
    """Write the rows of the updated store, in the order of its nodes.

    The numbers of old nodes rise in their order, so old rows stay sorted; of equal sources old edges come first, as if
    new edges were listed behind all old ones.

    Args:
        changed: (num_nodes,) uint8, what is known of each node's changes so far, by store id; that of its in-edges is
            added in what is written.

    Cost: one sequential read of the old rows and of the new edges; `budget.sort_edges` edges of memory.
    """
    if journal.is_done("rows"):
        return
    writer = _MergedWriter(journal, inputs, ids, old)
    buffer = SortBuffer(max(1, budget.sort_edges // 4), id_dtype(inputs.num_nodes), inputs.carries_edge_ids)
    block, ends = _Block(id_dtype(inputs.num_nodes), inputs.carries_edge_ids), {group.stop for group in runs.groups}
    keeps_repeats = not inputs.stream.to_undirected or inputs.edge_time is not None
    try:
        for bucket in range(writer.bucket, layout.num_buckets):
            written, begin = 0, bucket << layout.shift
            num_rows = max(0, min(1 << layout.shift, inputs.num_nodes - begin))
            for first, last, num_new in _row_ranges(old, runs, bucket, begin, num_rows, budget.sort_edges):
                read_range(runs, bucket, first, last, buffer.columns(num_new))
                new = buffer.sort(num_new, last - first, inputs.num_nodes)
                rows = slice(begin + first, begin + last)
                flags = np.array(changed[rows])
                types = None if keeps_repeats or inputs.relations is None else inputs.relations.edge_type_of(new[2])
                merged = _merge_range(old, rows, (*new, types), keeps_repeats, flags, block)
                writer.changes.append(flags)
                written += writer.write(begin + first, *merged)
            if journal.due(written) or bucket + 1 in ends:
                writer.note(bucket + 1)
            if bucket + 1 in ends:
                runs.drop_sorted(bucket + 1)
            progress("merging rows", begin + num_rows, inputs.num_nodes)
        writer.finish()
    finally:
        writer.release()


def _merge_range(old: OldRows, rows: slice, new: tuple, keeps_repeats: bool, flags: np.ndarray, block: _Block) -> tuple:
    """Return (offsets, sources, edge ids) of some rows of the updated store; ids of new edges are behind all old."""
    before = old.before[rows]
    alive = before[before >= 0]
    begin, end = (int(alive[0]), int(alive[-1]) + 1) if len(alive) else (0, 0)
    indptr = np.array(old.csc.indptr[begin : end + 1])
    first, last = int(indptr[0]), int(indptr[-1])
    dropped = slice(*np.searchsorted(old.dropped.row, [begin, end]).tolist())
    offsets = np.zeros(len(before) + 1, np.int64)
    *sorted_edges, new_type = new
    src, edge = block.columns(last - first + len(new[1]))
    count = _merge(
        before, begin, indptr, old.csc.indices[first:last], np.array(old.edge_type[first:last]), old.after,
        *(column[dropped] for column in old.dropped), *sorted_edges,
        np.empty(0, np.uint16) if new_type is None else new_type.astype(np.uint16),
        old.csc.num_edges, keeps_repeats, offsets, src, edge, flags,
    )  # fmt: skip
    if count < 0:
        raise PartitionStoreError(f"csc_indices names a node that does not exist; {REMEDY}")
    return offsets, src[:count], edge[:count]


def _row_ranges(old: OldRows, runs: Runs, bucket: int, begin: int, num_rows: int, most: int):
    """Cut a bucket into ranges of rows with at most `most` old and new edges each; yield (first, last, new edges)."""
    new = np.zeros(num_rows, np.int64)
    for row, _, _ in runs.segments(bucket):
        count_rows(row, new)
    before = old.before[begin : begin + num_rows]
    degree = np.where(before >= 0, old.csc.indptr[before + 1] - old.csc.indptr[before], 0)
    sums, new_sums = (np.concatenate([[0], np.cumsum(counts)]) for counts in (degree + new, new))
    first = 0
    while first < num_rows:
        last = int(np.searchsorted(sums, sums[first] + most, side="right")) - 1
        last = min(max(last, first + 1), num_rows)
        yield first, last, int(new_sums[last] - new_sums[first])
        first = last


def count_cut(csc: CSC, part_offsets: np.ndarray) -> tuple[int, int]:
    """Return how many edges there are without self-loops, and how many of them join two parts.

    Cost: one read of the rows.
    """
    edges = cut = 0
    for part in range(len(part_offsets) - 1):
        begin, end = part_offsets[part : part + 2].tolist()
        indptr = np.array(csc.indptr[begin : end + 1])
        found = _count_cut(begin, end, indptr, csc.indices[int(indptr[0]) : int(indptr[-1])])
        edges, cut = edges + int(found[0]), cut + int(found[1])
    return edges, cut


def first_missing(csc: CSC, edges: DroppedEdges, edge_type: np.ndarray | None) -> int:
    """Return the position of the first of some edges that is not there; -1: all are."""
    own, row_of = np.unique(edges.row, return_inverse=True)
    begins, ends = np.asarray(csc.indptr[own]), np.asarray(csc.indptr[own + 1])
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - begins)])
    types = np.empty(0, np.uint8) if edge_type is None else read_runs(edge_type, begins, ends)
    sources = read_runs(csc.indices, begins, ends)
    return int(_first_missing(indptr, sources, types, row_of.astype(np.int64), edges.src, edges.edge_type))


@kernel
def _merge(
    before, begin, indptr, indices, types, after, drop_row, drop_src, drop_type, new_offsets, new_src, new_edge,
    new_type, num_old_edges, keeps_repeats, offsets, src, edge, flags,
):  # fmt: skip
    """Merge rows; return the edges written, or -1 where an old source does not exist.

    Old edges of equal ends are ascending by type; new ones behind them are not, and have `new_type` where repeats go.
    """
    count, drop, with_edge, with_type = 0, 0, len(edge) > 0, len(drop_type) > 0
    for row in range(len(before)):
        new, new_end, start, changed = new_offsets[row], new_offsets[row + 1], count, False
        first = last = indptr[0]
        if before[row] >= 0:
            first, last = indptr[before[row] - begin], indptr[before[row] - begin + 1]
        while drop < len(drop_row) and drop_row[drop] < before[row]:
            drop += 1
        for place in range(first, last + 1):
            mapped = np.int64(-1)
            if place < last:
                source = np.int64(indices[place - indptr[0]])
                if source < 0 or source >= len(after):
                    return -1
                while (
                    drop < len(drop_row)
                    and drop_row[drop] == before[row]
                    and (
                        drop_src[drop] < source
                        or (with_type and drop_src[drop] == source and drop_type[drop] < types[place - indptr[0]])
                    )
                ):
                    drop += 1
                gone = drop < len(drop_row) and drop_row[drop] == before[row] and drop_src[drop] == source
                gone = gone and (not with_type or drop_type[drop] == types[place - indptr[0]])
                mapped = np.int64(after[source])
                if gone or mapped < 0:
                    changed = True
                    continue
            while new < new_end and (place == last or new_src[new] < mapped):
                is_repeat = not keeps_repeats and count > start and src[count - 1] == new_src[new]
                if is_repeat and len(new_type) > 0:
                    is_repeat, back = False, count - 1
                    while back >= start and src[back] == new_src[new] and not is_repeat:
                        at = edge[back]  # an old place, or a new edge that was merged before this one
                        is_old = 0 <= at < num_old_edges
                        of_back = types[at - indptr[0]] if is_old else new_type[new - (count - back)]
                        is_repeat = of_back == new_type[new]
                        back -= 1
                changed = changed or not is_repeat
                src[count] = new_src[new]
                if with_edge:
                    name = new_edge[new]
                    edge[count] = num_old_edges + name if name >= 0 else ~(num_old_edges + ~name)
                count += 1
                new += 1
            if place < last:
                src[count] = mapped
                if with_edge:
                    edge[count] = place
                count += 1
        offsets[row + 1] = count
        if changed:
            flags[row] |= IN_EDGES
    return count


@kernel
def _count_cut(begin, end, indptr, indices):
    edges = cut = 0
    for row in range(len(indptr) - 1):
        for i in range(indptr[row] - indptr[0], indptr[row + 1] - indptr[0]):
            source = np.int64(indices[i])
            if source != begin + row:
                edges += 1
                cut += source < begin or source >= end
    return edges, cut


@kernel
def _first_missing(indptr, indices, types, rows, sources, wanted):
    for i in range(len(rows)):
        low, end = indptr[rows[i]], indptr[rows[i] + 1]
        high = end
        while low < high:
            middle = (low + high) // 2
            less = indices[middle] < sources[i]
            if len(wanted) > 0 and indices[middle] == sources[i]:
                less = types[middle] < wanted[i]
            if less:
                low = middle + 1
            else:
                high = middle
        if low == end or indices[low] != sources[i] or (len(wanted) > 0 and types[low] != wanted[i]):
            return i
    return -1
