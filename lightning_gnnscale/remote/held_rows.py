"""Rows of a graph in one owner's memory, and samples from them that do not depend on which owner holds what."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import GNNScaleError
from ..graph import CSC, id_dtype
from ..jit import kernel
from ..partition_store.features import Column, CSRFeatures, DenseFeatures, SparseRows, memory_of, merge_rows
from ..partition_store.typed_features import TypedFeatures, TypedRows, merge_node_types
from ..sampler.protocol import BatchSampler
from ..triton_kernels.gather_rows import RowCode, gather_rows
from ..triton_kernels.sample_neighbors import Relation, SampleOptions, Workspace
from ..triton_kernels.sample_neighbors.rows import SampledRows

ANSWERS = ThreadPoolExecutor(32, thread_name_prefix="gnnscale-answers")  # threads that wait, and start when they must


@dataclass(frozen=True)
class PartOwners:
    """Who holds the rows of which part.

    Args:
        part_offsets: (num_parts + 1,) first store id of each part, then num_nodes.
        owner_of: the owner of each part, by any name that `ask` knows.

    Raises:
        ValueError: there are not as many owners as parts.
    """

    part_offsets: np.ndarray
    owner_of: Sequence[Hashable]

    def __post_init__(self):
        if len(self.owner_of) != len(self.part_offsets) - 1:
            raise ValueError(f"owner_of must name {len(self.part_offsets) - 1} owners, got {len(self.owner_of)}")

    def group(self, nodes: np.ndarray) -> list[tuple[Hashable, np.ndarray]]:
        """Return (owner, positions in nodes) for each owner of any of the nodes, positions ascending."""
        parts = part_of(nodes, self.part_offsets)
        present = np.unique(parts)
        parts_of: dict[Hashable, list[int]] = {}
        for part in present.tolist():
            parts_of.setdefault(self.owner_of[part], []).append(part)
        numbers = np.empty(len(self.owner_of), np.int64)
        for number, owned in enumerate(parts_of.values()):
            numbers[owned] = number
        owner = numbers[parts]
        order = np.argsort(owner, kind="stable")
        cuts = np.searchsorted(owner[order], np.arange(1, len(parts_of)))
        return list(zip(parts_of, np.split(order, cuts), strict=True)) if parts_of else []


class AllocateByName(Protocol):
    """Allocates memory for an array with a name."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray: ...


def own_memory(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return memory of this process."""
    return np.empty(shape, dtype)


class HeldNodes:
    """Nodes of some parts and replicated ones, numbered as one holder has them: part after part, then the others.

    Args:
        part_offsets: (num_parts + 1,) first store id of each part, then num_nodes.
        parts: held ones.
        replicated: ids held besides them, for example `most_linked`'s.

    Attributes:
        ranges: (first, end) store ids of each held part, ascending.
        beside: (num_beside,) int32 or int64 replicated ids that no held part has, ascending.

    Raises:
        ValueError: there is no such part or node.
    """

    def __init__(self, part_offsets: np.ndarray, parts: Sequence[int], replicated: np.ndarray | Sequence[int] = ()):
        self._part_offsets = np.asarray(part_offsets, np.int64)
        num_parts, num_nodes = len(self._part_offsets) - 1, int(self._part_offsets[-1])
        parts = sorted({int(part) for part in parts})
        if parts and not 0 <= parts[0] <= parts[-1] < num_parts:
            raise ValueError(f"parts must be in [0, {num_parts}), got {parts[0]} to {parts[-1]}")
        self.ranges = [tuple(self._part_offsets[part : part + 2].tolist()) for part in parts]
        self._first = np.full(num_parts, -1, np.int64)
        self._first[parts] = np.cumsum([0, *(end - first for first, end in self.ranges)])[:-1]
        beside = np.unique(np.asarray(replicated, np.int64))
        if len(beside) and not 0 <= beside[0] <= beside[-1] < num_nodes:
            raise ValueError(f"replicated must be ids in [0, {num_nodes}), got {beside[0]} to {beside[-1]}")
        beside = beside[self._first[part_of(beside, self._part_offsets)] < 0]
        self.beside = beside.astype(id_dtype(num_nodes))

    def __len__(self) -> int:
        return sum(end - first for first, end in self.ranges) + len(self.beside)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        return self._part_offsets.nbytes + self._first.nbytes + self.beside.nbytes

    def ids(self) -> np.ndarray:
        """Return (num_held,) int64 store ids in order of their numbers."""
        return np.concatenate([*(np.arange(first, end) for first, end in self.ranges), self.beside.astype(np.int64)])

    def find(self, nodes: np.ndarray) -> np.ndarray:
        """Return (num,) int64: the number of each node, or -1 for one that is not held."""
        numbers = np.empty(len(nodes), np.int64)
        first_replicated = len(self) - len(self.beside)
        _find(nodes, self._part_offsets, self._first, self.beside, first_replicated, numbers)
        return numbers


def part_of(nodes: np.ndarray, part_offsets: np.ndarray) -> np.ndarray:
    """Return (num,) int64 part ids of store ids."""
    return np.searchsorted(part_offsets, nodes, "right") - 1


def most_linked(indptr: np.ndarray, max_bytes: int, id_bytes: int = 4, row_bytes: int = 0) -> np.ndarray:
    """Return the nodes of highest in-degree whose rows fit a budget: they are worth holding on every worker.

    Args:
        indptr: (num_nodes + 1,) row offsets of the CSC.
        max_bytes: Upper bound on the bytes of all their rows, on each worker, >= 0.
        id_bytes: Size of an id in the CSC, bytes.
        row_bytes: Bytes held with each node in addition, for example its features.

    Returns:
        Ids, ascending. Of nodes with equal degree, the smaller id is taken first. Nodes without neighbours are left
        out.

    Raises:
        ValueError: max_bytes is negative.
    """
    if max_bytes < 0:
        raise ValueError(f"replicate_bytes must be >= 0, got {max_bytes}")
    degree = np.diff(indptr)
    order = np.argsort(-degree, kind="stable")[: np.count_nonzero(degree)]
    total = np.cumsum(degree[order] * id_bytes + (8 + id_bytes + row_bytes))
    return np.sort(order[: np.searchsorted(total, max_bytes, "right")])


@kernel
def _find(nodes, part_offsets, first_row, replicated, first_replicated, rows):
    for i in range(len(nodes)):
        node, low, high = nodes[i], 0, len(first_row)
        while high - low > 1:
            middle = (low + high) >> 1
            if part_offsets[middle] <= node:
                low = middle
            else:
                high = middle
        rows[i] = -1
        if node < 0 or node >= part_offsets[-1]:
            continue
        if first_row[low] >= 0:
            rows[i] = first_row[low] + node - part_offsets[low]
            continue
        low, high = 0, len(replicated)
        while low < high:
            middle = (low + high) >> 1
            if replicated[middle] < node:
                low = middle + 1
            else:
                high = middle
        if low < len(replicated) and replicated[low] == node:
            rows[i] = first_replicated + low


class Rows(Protocol):
    """Rows on their way; every `concurrent.futures.Future` is one."""

    def result(self) -> np.ndarray | SparseRows:
        """Return the rows of the nodes asked for, in their order; waits for them."""


class HeldFeatures:
    """Feature rows of some nodes; may be read by several threads.

    Args:
        nodes: The held nodes.
        arrays: Their rows, in the order of `nodes`: "x" (num_held, dim), or "x_indptr", "x_indices" and "x_data" of
            sparse rows; where node types have tables of their own, "x0", "x1_indptr", ... by node type.
        features: The table that they were copied out of.
    """

    def __init__(self, nodes: HeldNodes, arrays: Mapping[str, np.ndarray], features: Column):
        self.nodes = nodes
        self._table = _held_table(arrays, features, nodes)
        self._num_bytes = sum(array.nbytes for name, array in arrays.items() if name.startswith("x"))

    @classmethod
    def read(cls, features: Column, nodes: HeldNodes, allocate: AllocateByName = own_memory) -> "HeldFeatures":
        """Copy the rows of held nodes out of a table by store id; no other row is read."""
        arrays: dict[str, np.ndarray] = {}
        if isinstance(features, TypedFeatures):
            node_type, row = features.node_types.locate(nodes.ids())
            for number, table in enumerate(features.tables):
                if table is not None:
                    arrays |= _copied(table, row[node_type == number], allocate, f"x{number}")
        else:
            arrays = _copied(features, nodes.ids(), allocate, "x")
        return cls(nodes, arrays, features)

    @property
    def num_bytes(self) -> int:
        """Memory that the rows take, bytes."""
        return self.nodes.num_bytes + self._num_bytes

    def answer(self, nodes: np.ndarray, numbers: np.ndarray | None = None) -> np.ndarray | SparseRows | TypedRows:
        """Return the rows of nodes, bit for bit: what an owner answers with.

        Args:
            nodes: (num,) store ids.
            numbers: (num,) from `nodes.find`, where they are known.

        Raises:
            GNNScaleError: one is not held.
        """
        numbers = self.nodes.find(nodes) if numbers is None else numbers
        if len(numbers) and numbers.min() < 0:
            raise GNNScaleError(f"row {nodes[numbers.argmin()]} is asked of an owner that does not hold it")
        return self._table.read(numbers)


def _copied(table: Column, rows: np.ndarray, allocate: AllocateByName, name: str) -> dict[str, np.ndarray]:
    """Return copies of rows as the arrays of `HeldFeatures`."""
    if not table.is_sparse:
        return {name: table.read(rows, partial(allocate, name))}
    found, arrays = table.read(rows), {}
    for part in ("indptr", "indices", "data"):
        values = getattr(found, part)
        arrays[f"{name}_{part}"] = allocate(f"{name}_{part}", values.shape, values.dtype)
        arrays[f"{name}_{part}"][...] = values
    return arrays


def _held_table(arrays: Mapping[str, np.ndarray], features: Column, nodes: HeldNodes, name: str = "x") -> Any:
    if isinstance(features, TypedFeatures):
        tables = [
            None if table is None else _held_table(arrays, table, nodes, f"{name}{number}")
            for number, table in enumerate(features.tables)
        ]
        ids, num = nodes.ids(), len(nodes) - len(nodes.beside)
        return TypedFeatures(tuple(tables), features.node_types.among(ids[:num], ids[num:]))
    if name in arrays:
        return DenseFeatures(arrays[name])
    return CSRFeatures(*(arrays[f"{name}_{part}"] for part in ("indptr", "indices", "data")), features.dim)


@dataclass(frozen=True)
class DistributedFeatures(Column):
    """The features of the whole graph, held by several owners: a `Column`.

    Args:
        held: The rows that are held here, as they are stored.
        owners: Which owner has each part.
        ask: Maps (owner, store ids) to rows on their way; returns at once. The owner answers with `held.answer(nodes)`.
        num_rows, dim, dtype, is_sparse: Those of the whole feature table.
        code: Form of the rows as they are held and sent; None: plain numbers. Where node types have tables of their
            own, one per node type.
        note: Called with the number of rows of each gather.
        by_node_type: Whether rows come as `TypedRows`.
    """

    held: HeldFeatures
    owners: PartOwners
    ask: Callable[[Hashable, np.ndarray], Rows]
    num_rows: int
    dim: int
    dtype: np.dtype
    is_sparse: bool
    code: RowCode | Sequence[RowCode | None] | None = None
    note: Callable[[int], None] = lambda num_rows: None
    by_node_type: bool = False
    supports = frozenset({"async"})

    @classmethod
    def of(cls, features: Column, held: HeldFeatures, owners: PartOwners, ask: Any, **options) -> "DistributedFeatures":
        """Return the view of a table whose rows the owners hold."""
        shape = (features.num_rows, features.dim, np.dtype(features.dtype), features.is_sparse)
        by_node_type = isinstance(features, TypedFeatures)
        return cls(held, owners, ask, *shape, features.storage, by_node_type=by_node_type, **options)

    def read(self, ids: np.ndarray, out: Any = None) -> np.ndarray | SparseRows | TypedRows:
        """Return rows, see `Column.read`; by node type `out` gives memory for those that are decoded alone.

        Raises:
            GNNScaleError: an owner answers with more or fewer rows than were asked for; and whatever `result()` raises.
        """
        return self._begin(np.asarray(ids))[1](out)

    def read_async(self, ids: np.ndarray, out: Any = None) -> Future:
        """Ask other owners for rows, and copy those that are here; the future is done when the others have come."""
        asked, finish = self._begin(np.asarray(ids))
        if asked:
            return ANSWERS.submit(finish, out)
        done: Future = Future()
        done.set_result(finish(out))
        return done

    def _begin(self, nodes: np.ndarray) -> tuple[bool, Callable[[np.ndarray | None], np.ndarray | SparseRows]]:
        """Ask for rows and gather own ones; return whether any were asked for, and a function that joins them all."""
        self.note(len(nodes))
        numbers = self.held.nodes.find(nodes)
        foreign, own = np.flatnonzero(numbers < 0), np.flatnonzero(numbers >= 0)
        asked = [
            (owner, foreign[chosen], self.ask(owner, nodes[foreign[chosen]]))
            for owner, chosen in self.owners.group(nodes[foreign])
        ]
        chunks = [(own, self.held.answer(nodes[own], numbers[own]))]

        def finish(out: np.ndarray | None) -> np.ndarray | SparseRows:
            for owner, places, rows in asked:
                chunks.append((places, rows.result()))
                self._check(owner, *chunks[-1], like=chunks[0][1])
            return self._together(len(nodes), chunks, out)

        return bool(asked), finish

    def _together(self, num_rows: int, chunks: list[tuple], out: Any) -> np.ndarray | SparseRows | TypedRows:
        if self.by_node_type:
            rows = merge_node_types([rows for _, rows in chunks], [places for places, _ in chunks])
            tables = [
                stored if code is None else gather_rows(stored, np.arange(len(stored)), _space(stored, code, out), code)
                for stored, code in zip(rows.tables, self.code or [None] * len(rows.tables), strict=True)
            ]
            return TypedRows(rows.node_type, tables)
        if self.is_sparse:
            return merge_rows([rows for _, rows in chunks], [places for places, _ in chunks])
        out = memory_of(out, (num_rows, self.dim), self.dtype)
        if self.code is None:
            for places, rows in chunks:
                out[places] = rows
            return out
        stored = np.empty((num_rows, self.code.row_bytes), np.uint8)
        for places, rows in chunks:
            stored[places] = rows
        return gather_rows(stored, np.arange(num_rows), out, self.code)

    def _check(self, owner: Hashable, places: np.ndarray, rows: Any, like: Any) -> None:
        """Refuse rows of another number or form than were asked for; like: those of this machine."""
        given, wanted = (_form_of(one) for one in (rows, like))
        num = rows.num_rows if isinstance(rows, SparseRows | TypedRows) else len(rows)
        if num != len(places) or given != wanted:
            raise GNNScaleError(
                f"machine {owner} was asked for {len(places)} feature rows as {wanted}, and sent {num} as {given}: do "
                "all machines read the same store, with the same release?"
            )


def _form_of(rows: Any) -> str:
    """Return what rows are, as a message says it."""
    if isinstance(rows, TypedRows):
        return f"rows of {len(rows.tables)} node types"
    if isinstance(rows, SparseRows):
        return f"sparse {rows.data.dtype} of width {rows.dim}"
    return f"{rows.dtype} of shape {rows.shape[1:]}"


def _space(stored: np.ndarray, code: RowCode, take: Callable | None) -> np.ndarray:
    """Return memory for decoded rows."""
    return (np.empty if take is None else take)((len(stored), code.dim), np.dtype(np.float32))


class HopRequest(NamedTuple):
    """Nodes whose neighbours are to be sampled: all that an owner must know.

    Attributes:
        nodes: (num,) int32 or int64 store ids.
        hop_key: uint64 as a Python int, of batch, edge type and hop: `fold_hop(key, hop)`.
        fanout: samples a node, -1 for all neighbours.
        replace: sample with replacement.
        names: (num,) int64 that choices are hashed from; None: the nodes.
        until: (num,) int64: edges that are later are not sampled; None: times do not count.
        number: the edge type that is sampled; None: all.
        weighted: sample by weight.
        latest, strict, with_weight: as `SampleOptions` has them.
        with_place: answer with the place of each edge in its row, too.
        places: (num,) int64: read this entry of each row, instead of a sample; None: sample.
        columns: Names of the columns of the edges to answer with, as the store has them.
    """

    nodes: np.ndarray
    hop_key: int
    fanout: int
    replace: bool = False
    names: np.ndarray | None = None
    until: np.ndarray | None = None
    number: int | None = None
    weighted: bool = False
    latest: bool = False
    strict: bool = False
    with_weight: bool = False
    with_place: bool = False
    places: np.ndarray | None = None
    columns: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the degrees alone say how many neighbours are sampled, and the key which."""
        return self.until is None and self.number is None and not self.weighted

    def at(self, chosen: np.ndarray) -> "HopRequest":
        """Return the request of some of its nodes, in memory of its own."""
        by_node = {name: getattr(self, name) for name in ("nodes", "names", "until", "places")}
        return self._replace(**{name: values[chosen] for name, values in by_node.items() if values is not None})


class Neighbors(NamedTuple):
    """An answer to a `HopRequest`.

    Attributes:
        neighbor: (num_sampled,) store ids, those of the first node first.
        count: (num,) int32, how many each node has; None where its degree says so.
        place: (num_sampled,) int32, the place of each in its row; None where it was not asked for, or the key says so.
        weight: (num_sampled,) float32 averaging weights, None where they were not asked for.
        columns: By name the (num_sampled, ...) values of the edges that lead from each, of the stored dtypes.
    """

    neighbor: np.ndarray
    count: np.ndarray | None = None
    place: np.ndarray | None = None
    weight: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        given = (self.neighbor, self.count, self.place, self.weight, *(self.columns or {}).values())
        return sum(array.nbytes for array in given if array is not None)


def owned_columns(sampler: BatchSampler, store: Any, edge_features: bool = True) -> tuple[str, ...]:
    """Return which columns of a store its owners hold: what decides which edges are sampled, and what batches have.

    Args:
        sampler: Samples the batches.
        store: The store.
        edge_features: Whether batches have the features of their edges.
    """
    inner = sampler.sampler or sampler
    wanted = {
        "edge_type": store.has["edge_types"],
        "edge_time": True,
        "edge_weight": True,
        "edge_features": edge_features,
        "edge_label": "edge_label" in sampler.requires,
        "node_time": inner.by_edge_type and inner.temporal_strategy is not None and not store.has["edge_time"],
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted and store.has.get(name, True))


def batch_columns(columns: Sequence[str], has_edge_types: bool = False) -> tuple[str, ...]:
    """Return those of `owned_columns` that the edges of a batch have.

    Args:
        columns: What owners hold.
        has_edge_types: Whether the sampler knows the edge types itself.
    """
    given = {"node_time", "edge_label", "edge_type"} if has_edge_types else {"node_time", "edge_label"}
    return tuple(name for name in columns if name not in given)


class HeldRows:
    """CSC rows of some nodes; may be read by several threads.

    Args:
        nodes: The held nodes.
        indptr: (num_held + 1,) int64 row offsets, in the order of `nodes`.
        indices: (num_held_edges,) store ids of their neighbours.
        columns: See `owned_columns`: those of edges, (num_held_edges, ...), and "node_time", (num_nodes,) by store id.
    """

    def __init__(
        self, nodes: HeldNodes, indptr: np.ndarray, indices: np.ndarray, columns: Mapping[str, np.ndarray] | None = None
    ):
        self.nodes, self._indptr, self._indices, self._columns = nodes, indptr, indices, dict(columns or {})
        self._spaces: SimpleQueue[Workspace] = SimpleQueue()

    @classmethod
    def read(
        cls,
        csc: CSC,
        nodes: HeldNodes,
        allocate: AllocateByName = own_memory,
        columns: Mapping[str, np.ndarray] | None = None,
    ) -> "HeldRows":
        """Copy the rows of held nodes out of the CSC of the whole graph, possibly mapped from files.

        Args:
            columns: See `owned_columns`; those of edges are copied likewise, and times of nodes stay as they are.

        Cost: 8 bytes a row, and its edges. Parts are read in ascending order, sequentially; no other row is read.
        """
        bounds = [np.asarray(csc.indptr[first : end + 1]) for first, end in nodes.ranges]
        bounds += [csc.indptr[node : node + 2] for node in nodes.beside]
        indptr = allocate("indptr", (len(nodes) + 1,), np.dtype(np.int64))
        indptr[0] = 0
        np.concatenate([np.diff(own) for own in bounds] or [np.empty(0, np.int64)], out=indptr[1:])
        np.cumsum(indptr, out=indptr)
        runs = [(int(own[0]), int(own[-1])) for own in bounds]
        held = {}
        for name, values in (columns or {}).items():
            held[name] = values if name == "node_time" else _copied_runs(values, runs, partial(allocate, name))
        return cls(nodes, indptr, _copied_runs(csc.indices, runs, partial(allocate, "indices")), held)

    @classmethod
    def of_files(cls, csc: CSC, columns: Mapping[str, np.ndarray] | None = None) -> "HeldRows":
        """Return all rows as they are in their files, copying none: used where an owner is lost."""
        nodes = HeldNodes(np.array([0, csc.num_rows]), [0])
        return cls(nodes, np.asarray(csc.indptr), np.asarray(csc.indices), columns)

    def __reduce__(self):
        raise TypeError("rows are held by one process: send what they are made of")

    @property
    def id_dtype(self) -> np.dtype:
        """The dtype of ids in the rows."""
        return self._indices.dtype

    @property
    def num_bytes(self) -> int:
        columns = sum(column.nbytes for name, column in self._columns.items() if name != "node_time")
        return self.nodes.num_bytes + self._indptr.nbytes + self._indices.nbytes + columns

    def sample(self, request: HopRequest, rows: np.ndarray | None = None) -> Neighbors:
        """Sample the same neighbours that sampling from the whole graph would sample.

        Args:
            request: Request for neighbours of nodes that this worker holds.
            rows: (num,) row numbers from `nodes.find`, if they are known already.

        Returns:
            Neighbours with the dtype of `csc.indices`, in newly allocated memory.

        Raises:
            GNNScaleError: a node is not held.
            ValueError: a weight below 0.
        """
        nodes, num = request.nodes, len(request.nodes)
        rows = self.nodes.find(nodes) if rows is None else rows
        if num and rows.min() < 0:
            raise GNNScaleError(f"node {nodes[rows.argmin()]} was asked of an owner that does not hold its row")
        if request.places is not None:
            edge = self._indptr[rows] + request.places
            return Neighbors(self._indices[edge], columns=self._columns_at(request, edge))
        try:
            space = self._spaces.get_nowait()
        except Empty:
            space = Workspace(0, self._indices.dtype)
        try:
            return self._sample(request, rows, space)
        finally:
            self._spaces.put(space)

    def _sample(self, request: HopRequest, rows: np.ndarray, space: Workspace) -> Neighbors:
        num = len(rows)
        hop = _RequestedRows(self._relation(request), request, rows, space)
        hop.look_up(0, 0, num, None)
        neighbors = np.empty(hop.last, self._indices.dtype)
        hop.sample(0, num, neighbors, space.taken)
        columns = self._columns_at(request, space.edge[: hop.last])
        if request.is_plain:
            return Neighbors(neighbors, columns=columns)
        count = np.diff(space.indptr[: num + 1])
        place = None
        if request.with_place:
            place = (space.edge[: hop.last] - np.repeat(self._indptr[rows], count)).astype(np.int32)
        weight = space.weight[: hop.last].copy() if request.with_weight else None
        return Neighbors(neighbors, count.astype(np.int32), place, weight, columns)

    def _columns_at(self, request: HopRequest, edge: np.ndarray) -> dict[str, np.ndarray]:
        return {name: gather_rows(self._columns[name], edge) for name in request.columns}

    def _relation(self, request: HopRequest) -> Relation:
        """Return the rows as the whole graph's are sampled, see `NeighborSampler.prepare`."""
        columns, timed = self._columns, request.until is not None
        edge_type, number = (columns.get("edge_type"), request.number) if request.number is not None else (None, 0)
        if timed and edge_type is None:  # rows are read whole, and put in order of time
            edge_type = np.broadcast_to(np.uint8(0), len(self._indices))
        by_edge = "edge_time" in columns
        time = columns["edge_time" if by_edge else "node_time"] if timed else None
        weight = columns["edge_weight"] if request.weighted else None
        return Relation(0, 0, self._indptr, self._indices, time, weight, by_edge, edge_type, number)


def _copied_runs(values: np.ndarray, runs: list[tuple[int, int]], allocate: Callable) -> np.ndarray:
    """Return the entries of some runs of an array, one run after the other."""
    out, at = allocate((sum(last - first for first, last in runs), *values.shape[1:]), values.dtype), 0
    for first, last in runs:
        out[at : at + last - first] = values[first:last]
        at += last - first
    return out


class _RequestedRows(SampledRows):
    """Held rows of a request; what a batch chooses is hashed from, and asked by, what the request says."""

    def __init__(self, relation: Relation, request: HopRequest, rows: np.ndarray, space: Workspace):
        self._request = request
        options = SampleOptions(
            request.replace, latest=request.latest, strict=request.strict, with_weight=request.with_weight
        )
        targets = SimpleNamespace(node=rows, owner=np.arange(len(rows), dtype=np.int32))
        super().__init__(relation, (request.fanout,), request.hop_key, space, targets, options, request.until, None)

    @property
    def hop_key(self) -> np.uint64:
        return np.uint64(self._request.hop_key)

    def names(self, begin: int, end: int) -> np.ndarray:
        names = self._request.nodes if self._request.names is None else self._request.names
        return names[begin:end]
