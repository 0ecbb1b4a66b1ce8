"""Edges onto disk, bucketed by destination: the first half of an external sort by row."""

from dataclasses import dataclass

import numpy as np

from ..graph import id_dtype
from ..jit import kernel
from .array_file import map_rows
from .disk import RUN_FILES, WriteBudget
from .inputs import StoreInputs
from .journal import Journal, file_states
from .node_tables import Progress

_MOST_BUCKETS = 4096
_MOST_SHIFT = 31  # a row within its bucket is an int32
STEP = "edges"
INDEX_FILE = "run_index.npy"


@dataclass(frozen=True)
class BucketLayout:
    """How rows fall into buckets: bucket b holds the rows [b << shift, (b + 1) << shift).

    Buckets are ranges of rows whatever the parts are, so that one bucket fits the sort buffer for few large parts
    and for many small ones.
    """

    shift: int
    num_buckets: int

    @property
    def groups(self) -> list[range]:
        """The buckets that share a file, which goes once they are sorted; see `RUN_FILES`."""
        groups = np.array_split(np.arange(self.num_buckets), min(RUN_FILES, self.num_buckets))
        return [range(int(group[0]), int(group[-1]) + 1) for group in groups]

    @classmethod
    def plan(cls, num_nodes: int, num_edges: int, sort_edges: int) -> "BucketLayout":
        """Choose buckets that hold half a sort buffer of edges on average."""
        wanted = min(_MOST_BUCKETS, max(1, -(-2 * num_edges // sort_edges)))
        rows = max(1, -(-num_nodes // wanted))
        shift = min((rows - 1).bit_length(), _MOST_SHIFT)
        return cls(shift, max(1, (num_nodes + (1 << shift) - 1) >> shift))


@dataclass
class Runs:
    """The bucketed edges on disk, group of buckets by group: columns in which each spill is sorted by bucket.

    Attributes:
        journal: knows the files.
        groups: see `BucketLayout`.
        index: (num_spills, num_buckets + 1) int64, where each bucket begins among the edges of its spill.
        columns: (row within the bucket, source as store id, edge id or none) of each group.
    """

    journal: Journal
    groups: list[range]
    index: np.ndarray
    columns: list[tuple[np.ndarray, np.ndarray, np.ndarray]]

    def segments(self, bucket: int):
        """Yield (row, src, edge) of a bucket, spill by spill."""
        number = next(number for number, group in enumerate(self.groups) if bucket in group)
        group, ahead = self.groups[number], 0
        for first, begin, end, last in self.index[:, [group.start, bucket, bucket + 1, group.stop]].tolist():
            if end > begin:
                place = slice(ahead + begin - first, ahead + end - first)
                yield tuple(column[place] for column in self.columns[number])
            ahead += last - first

    def drop_sorted(self, num_sorted: int) -> None:
        """Delete the files of groups whose buckets are all below `num_sorted`, of which the journal has a line.

        The journal forgets them first.
        """
        for number, group in enumerate(self.groups):
            if group.stop <= num_sorted:
                empty = tuple(column[:0].copy() for column in self.columns[number])
                self.columns[number] = empty  # a file that is mapped would keep its place on the disk
        left = [number for number, group in enumerate(self.groups) if group.stop > num_sorted]
        names = {name for number in left for name in _run_names(number)}
        state = self.journal.state(STEP)
        kept = {name: entry for name, entry in state["files"].items() if name in names or name == INDEX_FILE}
        self.journal.write(STEP, **{**state, "files": kept})
        for name in state["files"].keys() - kept.keys():
            (self.journal.folder / name).unlink()


class _Spill:
    """A buffer of relabelled edges, and the columns that it is written to."""

    def __init__(self, journal: Journal, inputs: StoreInputs, layout: BucketLayout, budget: WriteBudget):
        ids = id_dtype(inputs.num_nodes)
        dtypes = _column_dtypes(inputs)
        self.journal, self.layout, self.groups = journal, layout, layout.groups
        self.files = [
            [journal.open_file(STEP, *file) for file in zip(_run_names(number), dtypes, strict=False)]
            for number in range(len(self.groups))
        ]
        self.index = journal.open_file(STEP, INDEX_FILE, np.int64, (layout.num_buckets + 1,))
        self.both = bool(inputs.stream.to_undirected)
        self.drop_loops = bool(inputs.stream.remove_self_loops)
        self.relations = inputs.relations
        self.src, self.dst = (np.empty(budget.spill_edges, ids) for _ in range(2))
        capacity = budget.spill_edges * (2 if self.both else 1)
        self.out = [np.empty(capacity, dtype) for dtype in dtypes]
        if not inputs.carries_edge_ids:
            self.out.append(np.empty(0, np.int64))
        self.num_edges = 0
        self.first_edge = journal.state(STEP).get("edges", 0)

    def add(self, src: np.ndarray, dst: np.ndarray, store_nid: np.ndarray) -> None:
        """Take edges in source order; write out whenever the buffer is full."""
        taken = 0
        while taken < len(src):
            count = min(len(src) - taken, len(self.src) - self.num_edges)
            target = slice(self.num_edges, self.num_edges + count)
            _translate(src[taken : taken + count], store_nid, self.src[target])
            _translate(dst[taken : taken + count], store_nid, self.dst[target])
            self.num_edges += count
            taken += count
            if self.num_edges == len(self.src):
                self.flush()

    def flush(self) -> None:
        """Write the buffered edges, sorted by bucket, and note it in the journal when a line is due."""
        if self.num_edges == 0:
            return
        src, dst, layout = self.src[: self.num_edges], self.dst[: self.num_edges], self.layout
        apart = self._reverse_apart(src == dst)
        flags = self.both, self.drop_loops, apart
        offsets = _count(src, dst, layout.shift, layout.num_buckets, *flags)
        _place(src, dst, layout.shift, *flags, self.first_edge, offsets.copy(), *self.out)
        for group, files in zip(self.groups, self.files, strict=True):
            for file, column in zip(files, self.out, strict=False):
                file.append(column[offsets[group.start] : offsets[group.stop]])
        self.index.append(offsets[None, :])
        self.first_edge += self.num_edges
        self.num_edges = 0
        if self.journal.due(int(offsets[-1]) * sum(column.itemsize for column in self.out)):
            self.note()

    def _reverse_apart(self, loops: np.ndarray) -> np.ndarray:
        """Return (num_edges,) bool: self-loops whose reverse is of another edge type; (0,) where there are none."""
        apart = np.zeros(0, bool)
        if self.relations is not None and self.both and not self.drop_loops and loops.any():
            found = np.flatnonzero(loops) + self.first_edge
            apart = loops.copy()
            apart[loops] = self.relations.edge_type_of(found) != self.relations.edge_type_of(~found)
        return apart

    def note(self, done: bool = False) -> None:
        """Write a journal line."""
        files = file_states(*self._open)
        self.journal.write(STEP, edges=self.first_edge, files=files, done=done)

    def release(self) -> None:
        """Close the files."""
        for file in self._open:
            file.release()

    @property
    def _open(self) -> list:
        return [*(file for files in self.files for file in files), self.index]


def bucket_edges(
    journal: Journal,
    inputs: StoreInputs,
    store_nid: np.ndarray,
    layout: BucketLayout,
    budget: WriteBudget,
    progress: Progress,
) -> None:
    """Stream the edges once, relabel them, and write them bucketed by destination row.

    With `stream.to_undirected` each edge is followed by its reverse; a self-loop stays one edge, unless its reverse is
    of another edge type. With `stream.remove_self_loops` self-loops go. Edges carry their edge id only where edge
    types, weights or features need it.

    Cost: one pass; `budget.spill_edges` edges in memory; 8 to 24 bytes of scratch disk an edge.
    """
    if journal.is_done(STEP):
        return
    stream = inputs.stream
    spill = _Spill(journal, inputs, layout, budget)
    try:
        for src, dst in _edges_from(stream, spill.first_edge):
            spill.add(src, dst, store_nid)
            progress("bucketing edges", spill.first_edge + spill.num_edges, stream.num_edges)
        spill.flush()
        spill.note(done=True)
    finally:
        spill.release()


def bucket_layout(inputs: StoreInputs, budget: WriteBudget) -> BucketLayout:
    """Return the buckets of these inputs."""
    num_edges = inputs.stream.num_edges * (2 if inputs.stream.to_undirected else 1)
    return BucketLayout.plan(inputs.num_nodes, num_edges, budget.sort_edges)


def open_runs(journal: Journal, inputs: StoreInputs, layout: BucketLayout) -> Runs:
    """Map the bucketed edges."""
    num_rows = {name: entry[1] for name, entry in journal.state(STEP)["files"].items()}
    index = map_rows(journal.folder / INDEX_FILE, np.int64, (num_rows[INDEX_FILE], layout.num_buckets + 1))
    dtypes = [np.dtype(np.int32), id_dtype(inputs.num_nodes), np.dtype(np.int64)]
    columns = [
        tuple(
            map_rows(journal.folder / name, dtype, (num_rows.get(name, 0),))  # those that are sorted are gone
            for name, dtype in zip(_run_names(number), dtypes, strict=True)
        )
        for number in range(len(layout.groups))
    ]
    return Runs(journal, layout.groups, np.array(index), columns)


def drop_runs(journal: Journal) -> None:
    """Delete what is left of the bucketed edges; the journal forgets it first."""
    journal.write(STEP, done=True)
    for path in journal.folder.glob("run_*.npy"):
        path.unlink()


def _run_names(group: int) -> list[str]:
    return [f"run_{column}_{group}.npy" for column in ("row", "src", "edge")]


def _column_dtypes(inputs: StoreInputs) -> list[np.dtype]:
    """Return the dtypes of the columns that are written: row, source, and edge id where it is needed."""
    return [np.dtype(np.int32), id_dtype(inputs.num_nodes), np.dtype(np.int64)][: 3 if inputs.carries_edge_ids else 2]


def _edges_from(stream, first_edge: int):
    """Yield (src, dst) from an edge position on; whole chunks before it are left out."""
    for chunk in stream.chunks(first_edge // stream.chunk_edges):
        skip = max(0, first_edge - chunk.first_edge)
        if skip < len(chunk.src):
            yield chunk.src[skip:], chunk.dst[skip:]


@kernel
def _translate(nodes, store_nid, out):
    for i in range(len(nodes)):
        out[i] = store_nid[nodes[i]]


@kernel
def _count(src, dst, shift, num_buckets, both, drop_loops, apart):
    """Return the (num_buckets + 1,) offsets of the edges by bucket; apart: see `_Spill._reverse_apart`."""
    offsets = np.zeros(num_buckets + 1, np.int64)
    for i in range(len(src)):
        loop = src[i] == dst[i]
        if loop and drop_loops:
            continue
        offsets[(dst[i] >> shift) + 1] += 1
        if both and (not loop or (len(apart) > 0 and apart[i])):
            offsets[(src[i] >> shift) + 1] += 1
    for bucket in range(num_buckets):
        offsets[bucket + 1] += offsets[bucket]
    return offsets


@kernel
def _place(src, dst, shift, both, drop_loops, apart, first_edge, cursor, out_row, out_src, out_edge):
    """Write each edge, and its reverse behind it, to the next free place of its bucket.

    The edge id of an added reverse is stored as its complement, below 0: `drop_repeats` prefers a listed edge to it.
    """
    mask = (1 << shift) - 1
    with_edge = len(out_edge) > 0
    for i in range(len(src)):
        loop = src[i] == dst[i]
        if loop and drop_loops:
            continue
        bucket = dst[i] >> shift
        place = cursor[bucket]
        cursor[bucket] += 1
        out_row[place] = dst[i] & mask
        out_src[place] = src[i]
        if with_edge:
            out_edge[place] = first_edge + i
        if both and (not loop or (len(apart) > 0 and apart[i])):
            bucket = src[i] >> shift
            place = cursor[bucket]
            cursor[bucket] += 1
            out_row[place] = src[i] & mask
            out_src[place] = dst[i]
            if with_edge:
                out_edge[place] = ~(first_edge + i)
