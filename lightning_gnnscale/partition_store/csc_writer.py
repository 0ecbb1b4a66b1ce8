"""Buckets of edges to CSC rows: the second half of the external sort, and the list of edges that leave their part."""

import warnings

import numpy as np

from ..dataset.columns import EDGE_COLUMNS, check_whole
from ..graph import id_dtype
from ..jit import kernel
from ..rng import combine
from .array_file import ArrayFile, map_rows
from .buckets import BucketLayout, Runs
from .disk import WriteBudget
from .inputs import StoreIds, StoreInputs
from .journal import Journal, file_states
from .node_tables import Progress
from .self_loops import self_weights

_DIGIT_BITS = 11


class SortBuffer:
    """Two sets of columns between which a radix sort moves edges back and forth. They grow when a longer row comes.

    Args:
        capacity: Number of edges that there is space for at first.
        id_dtype: Dtype of the source ids.
        with_edge: Whether edge ids are sorted along.
    """

    def __init__(self, capacity: int, id_dtype: np.dtype, with_edge: bool):
        self._id_dtype, self._with_edge = id_dtype, with_edge
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        edges = capacity if self._with_edge else 0
        self.capacity = capacity
        self.sides = [
            (np.empty(capacity, np.int32), np.empty(capacity, self._id_dtype), np.empty(edges, np.int64))
            for _ in range(2)
        ]

    def columns(self, num_edges: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (row, src, edge) to fill with num_edges edges."""
        if num_edges > self.capacity:
            self._allocate(num_edges)
        return self._cut(0, num_edges)

    def sort(self, num_edges: int, num_rows: int, num_nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sort what is in `columns`, stably by (row, src).

        Returns:
            (num_rows + 1,) int64 offsets, (num_edges,) sources, (num_edges,) edge ids (or none).
        """
        bits = max(1, (num_nodes - 1).bit_length())
        passes = -(-bits // _DIGIT_BITS)
        here, there = self._cut(0, num_edges), self._cut(1, num_edges)
        digit_bits = -(-bits // passes)
        for digit in range(passes):
            _sort_digit(*here, *there, digit * digit_bits, digit_bits)
            here, there = there, here
        return _sort_rows(*here, there[1], there[2], num_rows), there[1], there[2]

    def _cut(self, side: int, num_edges: int):
        row, src, edge = self.sides[side]
        return row[:num_edges], src[:num_edges], edge[:num_edges]


@kernel
def select_rows(row, src, edge, first_row, last_row, out_row, out_src, out_edge, position):
    """Append the edges whose row is in [first_row, last_row) from `position` on; return the position behind them."""
    with_edge = len(edge) > 0
    for i in range(len(row)):
        if first_row <= row[i] < last_row:
            out_row[position] = row[i] - first_row
            out_src[position] = src[i]
            if with_edge:
                out_edge[position] = edge[i]
            position += 1
    return position


@kernel
def count_rows(row, counts):
    """Add the number of edges of each row to counts."""
    for i in range(len(row)):
        counts[row[i]] += 1


@kernel
def _sort_digit(row, src, edge, out_row, out_src, out_edge, shift, bits):
    mask = (1 << bits) - 1
    cursor = np.zeros((1 << bits) + 1, np.int64)
    with_edge = len(edge) > 0
    for i in range(len(src)):
        cursor[((src[i] >> shift) & mask) + 1] += 1
    for digit in range(1 << bits):
        cursor[digit + 1] += cursor[digit]
    for i in range(len(src)):
        digit = (src[i] >> shift) & mask
        place = cursor[digit]
        cursor[digit] += 1
        out_row[place] = row[i]
        out_src[place] = src[i]
        if with_edge:
            out_edge[place] = edge[i]


@kernel
def _sort_rows(row, src, edge, out_src, out_edge, num_rows):
    offsets = np.zeros(num_rows + 1, np.int64)
    with_edge = len(edge) > 0
    for i in range(len(row)):
        offsets[row[i] + 1] += 1
    for r in range(num_rows):
        offsets[r + 1] += offsets[r]
    cursor = offsets[:-1].copy()
    for i in range(len(row)):
        place = cursor[row[i]]
        cursor[row[i]] += 1
        out_src[place] = src[i]
        if with_edge:
            out_edge[place] = edge[i]
    return offsets


@kernel
def order_edge_types(offsets, src, edge, relation):
    """Sort edges of equal sources within each row by edge type, stably, in place."""
    for row in range(len(offsets) - 1):
        for i in range(offsets[row] + 1, offsets[row + 1]):
            edge_type, name, place = relation[i], edge[i], i
            while place > offsets[row] and src[place - 1] == src[i] and relation[place - 1] > edge_type:
                relation[place], edge[place] = relation[place - 1], edge[place - 1]
                place -= 1
            relation[place], edge[place] = edge_type, name


@kernel
def drop_repeats(offsets, src, edge, relation):
    """Keep one of equal sources in each row, in place: the first that is listed, else the first added reverse.

    `offsets` are moved along, and edge ids stored as complements (see `buckets`) come out plain. Return the edges left.
    Where edge types are given, edges of different ones are different.
    """
    with_edge, with_edge_type = len(edge) > 0, len(relation) > 0
    count = 0
    begin = offsets[0]
    for row in range(len(offsets) - 1):
        end = offsets[row + 1]
        for i in range(begin, end):
            fresh = i == begin or src[i] != src[count - 1]
            if fresh or (with_edge_type and relation[i] != relation[count - 1]):
                src[count] = src[i]
                if with_edge:
                    edge[count] = edge[i]
                if with_edge_type:
                    relation[count] = relation[i]
                count += 1
            elif with_edge and edge[count - 1] < 0 <= edge[i]:
                edge[count - 1] = edge[i]
        begin = end
        offsets[row + 1] = count
    if with_edge:
        for i in range(count):
            edge[i] = max(edge[i], ~edge[i])
    return count


@kernel
def count_listed_repeats(offsets, src, edge, relation):
    """Return how many listed edges have an earlier one with the same ends; edge ids as `drop_repeats` takes them."""
    count, with_edge_type = 0, len(relation) > 0
    for row in range(len(offsets) - 1):
        listed = False
        for i in range(offsets[row], offsets[row + 1]):
            if i == offsets[row] or src[i] != src[i - 1] or (with_edge_type and relation[i] != relation[i - 1]):
                listed = False
            if edge[i] >= 0:
                count += listed
                listed = True
    return count


@kernel
def list_repeats(offsets, src, edge, relation, kept, again):
    """Fill kept and again with the edge ids of each listed edge that has an earlier one: the first's, and its own."""
    count, with_edge_type = 0, len(relation) > 0
    for row in range(len(offsets) - 1):
        first = np.int64(-1)
        for i in range(offsets[row], offsets[row + 1]):
            if i == offsets[row] or src[i] != src[i - 1] or (with_edge_type and relation[i] != relation[i - 1]):
                first = np.int64(-1)
            if edge[i] >= 0:
                if first >= 0:
                    kept[count], again[count] = first, edge[i]
                    count += 1
                else:
                    first = edge[i]


@kernel
def direction_sums(first_row, offsets, src):
    """Return the sums, modulo 2**64, of hash(u, v) and of hash(v, u) over the edges u -> v, u != v, repeats included.

    The sums over a whole graph are equal if every edge is there as often as its reverse, and otherwise only with a
    probability of 2**-64.
    """
    forward, backward = np.uint64(0), np.uint64(0)
    for row in range(len(offsets) - 1):
        v = first_row + row
        for i in range(offsets[row], offsets[row + 1]):
            if src[i] != v:
                forward += combine(combine(np.uint64(0), src[i]), v)
                backward += combine(combine(np.uint64(0), v), src[i])
    return forward, backward


STEP = "rows"
MOST_DEGREE = 255  # in a file of bytes: 255 means 255 edges or more
_EDGE_BLOCK_BYTES = 1 << 25
_SLOT_BITS = 12
_CROSS_NODE = "cross_node.npy"
_CROSS = {_CROSS_NODE: np.dtype(np.int64), "cross_core.npy": np.dtype(np.int32), "cross_arc.npy": np.dtype(np.int64)}


class RowWriter:
    """Writes the CSC, the edge arrays and the cross edges, a range of rows at a time.

    Cross edges, u -> v with u and v in different parts, are kept by the part of u, as (v, local id of u, position), as
    far as the halo's rows need them: they come out sorted by (v, u), which is the order of that part's halo rows.
    """

    def __init__(self, journal: Journal, inputs: StoreInputs, ids: StoreIds):
        self.journal, self.inputs = journal, inputs
        nodes = id_dtype(inputs.num_nodes)
        state = journal.state(STEP)
        self.bucket = state.get("bucket", 0)
        self.sums = [np.uint64(value) for value in state.get("sums", (0, 0))]
        self.lost = state.get("lost", 0)  # edges listed again with other values, which are not kept
        self.indptr = journal.open_file(STEP, "csc_indptr.npy", np.int64)
        self.indices = journal.open_file(STEP, "csc_indices.npy", nodes)
        self.degree = journal.open_file(STEP, "in_degree.npy", np.uint8)
        self.edge_files: list[tuple[ArrayFile, np.ndarray]] = []
        for name, source in inputs.edge_values.items():
            dtype = EDGE_COLUMNS[name].dtype or source.dtype
            self.edge_files.append((journal.open_file(STEP, f"{name}.npy", dtype, source.shape[1:]), source))
        self.edge_type = None
        if inputs.relations is not None:
            self.edge_type = journal.open_file(STEP, "edge_type.npy", inputs.relations.edge_type_dtype)
        self.weighted_degree = None
        if inputs.edge_weight is not None:
            self.weighted_degree = journal.open_file(STEP, "weighted_degree.npy", np.float32)
        self.loops = [
            journal.open_file(STEP, f"{name}.npy", dtype)
            for name, dtype in (("self_loop_nodes", nodes), ("self_loop_weight", np.float32))
        ]
        self.cross = {name: journal.open_file(STEP, name, dtype) for name, dtype in _cross_columns(inputs).items()}
        self.cross_index = journal.open_file(STEP, "cross_index.npy", np.int64, (inputs.num_parts + 1,))
        if self.indptr.num_rows == 0:
            self.indptr.append(np.zeros(1, np.int64))
        self.parts = part_slots(ids.part_offsets)

    def write(self, first_row: int, offsets: np.ndarray, src: np.ndarray, edge: np.ndarray) -> int:
        """Append sorted rows; offsets: (num_rows + 1,) from 0, changed in place. Return the bytes written."""
        relation = np.empty(0, np.uint8)
        if self.edge_type is not None:
            relation = self.edge_types(edge)
            order_edge_types(offsets, src, edge, relation)
        if self.inputs.stream.to_undirected and self.inputs.edge_time is not None:
            edge = np.maximum(edge, ~edge)  # each is an event of its own, none is a repeat
        elif self.inputs.stream.to_undirected:
            if self.edge_files:
                self.lost += self._count_lost(offsets, src, edge, relation)
            num_edges = drop_repeats(offsets, src, edge, relation)
            src, edge, relation = src[:num_edges], edge[:num_edges], relation[:num_edges]
        else:
            for i, value in enumerate(direction_sums(first_row, offsets, src)):
                self.sums[i] = np.uint64((int(self.sums[i]) + int(value)) & 0xFFFFFFFFFFFFFFFF)
        base = self.indices.num_rows
        if self.cross:
            self._write_cross(first_row, offsets, src, base)
        self.indptr.append(offsets[1:] + base)
        self.degree.append(np.minimum(np.diff(offsets), MOST_DEGREE).astype(np.uint8))
        self.indices.append(src)
        if self.edge_type is not None:
            self.edge_type.append(relation)
        weight_sums = np.zeros(len(offsets) - 1)
        for file, source in self.edge_files:
            step = max(1, _EDGE_BLOCK_BYTES // max(1, file.row_bytes))
            for begin in range(0, len(edge), step):
                check_whole(source)
                # np.take would copy the whole of a source that is not in C order.
                values = source[edge[begin : begin + step]].astype(file.dtype, copy=False)
                file.append(values)
                if source is self.inputs.edge_weight:
                    _add_edges(offsets, begin, values, weight_sums)
        if self.weighted_degree is not None:
            self.weighted_degree.append(weight_sums.astype(np.float32))
        given = self.inputs.edge_weight
        weights_of = None if given is None else lambda places: given[edge[places]].astype(np.float32, copy=False)
        for file, values in zip(self.loops, self_weights(first_row, offsets, src, weights_of), strict=True):
            file.append(values)
        return src.nbytes + sum(len(src) * file.row_bytes for file, _ in self.edge_files)

    def edge_types(self, edge: np.ndarray) -> np.ndarray:
        """Return the types of some edges by edge id, that of a reverse where it is a complement."""
        return self.inputs.relations.edge_type_of(edge)

    def _count_lost(self, offsets: np.ndarray, src: np.ndarray, edge: np.ndarray, relation: np.ndarray) -> int:
        """Return how many edges are listed after another of the same two nodes, with other values than the first."""
        kept, again = np.empty((2, count_listed_repeats(offsets, src, edge, relation)), np.int64)
        list_repeats(offsets, src, edge, relation, kept, again)
        lost = np.zeros(len(kept), bool)
        for _, source in self.edge_files:
            rows = max(1, _EDGE_BLOCK_BYTES // max(1, source[:1].nbytes))
            for begin in range(0, len(kept), rows):
                chunk = slice(begin, begin + rows)
                differs = source[kept[chunk]] != source[again[chunk]]
                lost[chunk] |= differs if differs.ndim == 1 else differs.any(axis=1)
        return int(lost.sum())

    def _write_cross(self, first_row: int, offsets: np.ndarray, src: np.ndarray, base: int) -> None:
        place = _count_cross(first_row, offsets, src, *self.parts)
        out = [
            np.empty(place[-1], self.cross[name].dtype) if name in self.cross else np.empty(0, dtype)
            for name, dtype in _CROSS.items()
        ]
        _place_cross(first_row, offsets, src, base, *self.parts, place.copy(), *out)
        self.cross_index.append((place + self.cross[_CROSS_NODE].num_rows)[None, :])
        for name, column in zip(_CROSS, out, strict=True):
            if name in self.cross:
                self.cross[name].append(column)

    @property
    def files(self) -> list[ArrayFile]:
        """What stays in the store; nothing of self-loops where there are none."""
        more = [file for file in (self.edge_type, self.weighted_degree) if file is not None]
        more += self.loops if self.loops[0].num_rows else []
        return [self.indptr, self.indices, self.degree, *(file for file, _ in self.edge_files), *more]

    @property
    def scratch(self) -> list[ArrayFile]:
        """What the halo is made from."""
        return [*self.cross.values(), self.cross_index]

    def note(self, next_bucket: int) -> None:
        """Write a journal line."""
        states = file_states(*self.files, *self.scratch)
        sums = [int(value) for value in self.sums]
        self.journal.write(STEP, bucket=next_bucket, sums=sums, lost=self.lost, files=states)

    def finish(self) -> None:
        """Close what stays, and write that the rows are done; the cross edges stay as they are, for the halo."""
        undirected = bool(self.inputs.stream.to_undirected)
        symmetric = undirected or self.sums[0] == self.sums[1]
        for file in self.files:
            file.close()
        if self.lost:
            named = list(self.inputs.edge_values)
            warnings.warn(
                f"{self.inputs.stream.name}: {self.lost} edges are listed after another one of the same two nodes, "
                f"with other {' and '.join(named)}, and only the first of a pair is kept: give to_undirected=False to "
                "keep all of them, or join their values in one edge a pair",
                stacklevel=2,
            )
        self.journal.write(
            STEP,
            done=True,
            num_arcs=self.indices.num_rows,
            symmetric=bool(symmetric),
            files=file_states(*self.files, *self.scratch),
        )
        self.release()

    def release(self) -> None:
        """Close the files as they are."""
        for file in [*self.files, *self.loops, *self.scratch]:
            file.release()


def write_rows(
    journal: Journal,
    inputs: StoreInputs,
    ids: StoreIds,
    layout: BucketLayout,
    runs: Runs,
    budget: WriteBudget,
    progress: Progress,
) -> None:
    """Sort bucket after bucket into CSC rows; repeats go where the stream is made undirected.

    Bucketed edges are deleted, group of buckets by group, as they are sorted.

    Cost: one read of the bucketed edges (of a bucket above `budget.sort_edges`, one for each share of its rows).
    """
    if journal.is_done(STEP):
        return
    writer = RowWriter(journal, inputs, ids)
    buffer = SortBuffer(budget.sort_edges, id_dtype(inputs.num_nodes), inputs.carries_edge_ids)
    ends = {group.stop for group in runs.groups}
    try:
        for bucket in range(writer.bucket, layout.num_buckets):
            written = 0
            begin = bucket << layout.shift
            num_rows = min(1 << layout.shift, inputs.num_nodes - begin)
            for first, last, num_edges in _row_ranges(runs, bucket, num_rows, budget.sort_edges):
                read_range(runs, bucket, first, last, buffer.columns(num_edges))
                sorted_rows = buffer.sort(num_edges, last - first, inputs.num_nodes)
                written += writer.write(begin + first, *sorted_rows)
            if journal.due(written) or bucket + 1 in ends:
                writer.note(bucket + 1)
            if bucket + 1 in ends:
                runs.drop_sorted(bucket + 1)
            progress("sorting rows", begin + num_rows, inputs.num_nodes)
        writer.finish()
    finally:
        writer.release()


def map_cross(journal: Journal, inputs: StoreInputs) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the index and the columns (node, core, edge) of the cross edges, empty where they were not needed."""
    num_rows = {name: entry[1] for name, entry in journal.state(STEP)["files"].items()}
    names = _cross_columns(inputs)
    shape = (num_rows["cross_index.npy"], inputs.num_parts + 1)
    index = np.array(map_rows(journal.folder / "cross_index.npy", np.int64, shape))
    columns = [
        map_rows(journal.folder / name, names.get(name, dtype), (num_rows.get(name, 0),))
        for name, dtype in _CROSS.items()
    ]
    return index, columns


def drop_cross(journal: Journal) -> None:
    """Delete the cross edges; the journal forgets them first."""
    state = journal.state(STEP)
    kept = {name: entry for name, entry in state["files"].items() if not name.startswith("cross_")}
    journal.write(STEP, **{**state, "files": kept})
    for path in journal.folder.glob("cross_*.npy"):
        path.unlink()


def _cross_columns(inputs: StoreInputs) -> dict[str, np.dtype]:
    """Return the files of the cross edges that are needed, and their dtypes.

    Where reverses are added, a halo's rows are the transpose of the core's: at most the places of edges are needed.
    """
    both, places = bool(inputs.stream.to_undirected), inputs.carries_edge_ids
    needed = {_CROSS_NODE: places or not both, "cross_core.npy": not both, "cross_arc.npy": places}
    dtypes = {**_CROSS, _CROSS_NODE: id_dtype(inputs.num_nodes)}
    return {name: dtypes[name] for name in _CROSS if needed[name]}


def _row_ranges(runs: Runs, bucket: int, num_rows: int, sort_edges: int):
    """Cut a bucket into ranges of rows with at most sort_edges edges each (a longer row is a range of its own)."""
    if num_rows <= 0:
        return []
    total = sum(len(row) for row, _, _ in runs.segments(bucket))
    if total <= sort_edges:
        return [(0, num_rows, total)]
    counts = np.zeros(num_rows, np.int64)
    for row, _, _ in runs.segments(bucket):
        count_rows(row, counts)
    sums = np.concatenate([[0], np.cumsum(counts)])
    ranges, first = [], 0
    while first < num_rows:
        last = int(np.searchsorted(sums, sums[first] + sort_edges, side="right")) - 1
        last = min(max(last, first + 1), num_rows)
        ranges.append((first, last, int(sums[last] - sums[first])))
        first = last
    return ranges


def read_range(runs: Runs, bucket: int, first: int, last: int, out: tuple) -> None:
    position = 0
    for columns in runs.segments(bucket):
        position = select_rows(*columns, first, last, *out, position)


def part_slots(part_offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the offsets, the part of every (1 << shift)-th node, and shift: a table that fits the first cache."""
    num_nodes = int(part_offsets[-1])
    shift = max(0, num_nodes.bit_length() - _SLOT_BITS)
    slots = np.searchsorted(part_offsets, np.arange(0, num_nodes + 1, 1 << shift), side="right") - 1
    return part_offsets, slots, shift


@kernel
def _add_edges(offsets, begin, values, sums):
    """Add the values of the edges from `begin` on to the sums (num_rows,) float64 of their rows."""
    end, row = begin + len(values), np.searchsorted(offsets, begin, side="right") - 1
    while row < len(sums) and offsets[row] < end:
        for i in range(max(begin, offsets[row]), min(end, offsets[row + 1])):
            sums[row] += values[i - begin]
        row += 1


@kernel
def _part_of(node, part_offsets, slots, shift):
    part = slots[node >> shift]
    while part_offsets[part + 1] <= node:
        part += 1
    return part


@kernel
def _count_cross(first_row, offsets, src, part_offsets, slots, shift):
    place = np.zeros(len(part_offsets), np.int64)
    for row in range(len(offsets) - 1):
        own = _part_of(first_row + row, part_offsets, slots, shift)
        begin, end = part_offsets[own], part_offsets[own + 1]
        for i in range(offsets[row], offsets[row + 1]):
            if src[i] < begin or src[i] >= end:
                place[_part_of(src[i], part_offsets, slots, shift) + 1] += 1
    for part in range(len(part_offsets) - 1):
        place[part + 1] += place[part]
    return place


@kernel
def _place_cross(first_row, offsets, src, base, part_offsets, slots, shift, cursor, out_node, out_core, out_edge):
    with_core, with_edge = len(out_core) > 0, len(out_edge) > 0
    for row in range(len(offsets) - 1):
        own = _part_of(first_row + row, part_offsets, slots, shift)
        begin, end = part_offsets[own], part_offsets[own + 1]
        for i in range(offsets[row], offsets[row + 1]):
            if src[i] < begin or src[i] >= end:
                source_part = _part_of(src[i], part_offsets, slots, shift)
                place = cursor[source_part]
                cursor[source_part] += 1
                out_node[place] = first_row + row
                if with_core:
                    out_core[place] = src[i] - part_offsets[source_part]
                if with_edge:
                    out_edge[place] = base + i
