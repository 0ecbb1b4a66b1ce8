"""One part as a training process sees it: core rows, halo rows, local ids; and a whole graph in the same form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..graph import CSC, GraphSchema
from ..jit import kernel
from ..triton_kernels.gather_rows import gather_rows
from .array_file import mapped_at_random
from .planned_reads import read_rows, read_slice
from .typed_features import NodeTypes

_BLOCK = 1 << 16  # ids whose rows are taken at a time: what is made of them stays in the cache


def local_rows(values: np.ndarray, graph) -> np.ndarray:
    """Return the rows of a column of the nodes by local id; a slice of it where there is no halo."""
    core = values[graph.core_start : graph.core_start + graph.num_core]
    if not len(graph.halo_nodes):
        return np.asarray(core)
    out = np.empty((graph.num_local, *values.shape[1:]), values.dtype)
    out[: graph.num_core] = core
    take_items(values, graph.halo_nodes, out[graph.num_core :])
    return out


def take_items(values: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    """Fill (num, ...) with the rows of a column for (num,) ids, of a dtype that holds them; without large copies."""
    in_bytes = values.ndim == values.itemsize == 1 and values.flags.c_contiguous
    for at in range(0, len(ids), _BLOCK):
        some = ids[at : at + _BLOCK].astype(np.int64, copy=False)
        out[at : at + _BLOCK] = gather_rows(values, some) if in_bytes else values[some]


def _weights_at(graph, positions: np.ndarray) -> np.ndarray | None:
    if graph.edge_weight is None:
        return None
    return np.asarray(graph.edge_weight[positions if graph.edge_id is None else graph.edge_id[positions]], np.float32)


def _has(graph) -> dict[str, bool]:
    times = {name: name in graph.columns for name in ("node_time", "edge_time")}
    return {"edge_types": graph.schema is not None, **times, "edge_weight": graph.edge_weight is not None}


def edge_values(graph, values: np.ndarray | None) -> np.ndarray | None:
    """Return a store's column of the edges for the edges of a graph, in memory of a part, mapped of a `WholeGraph`.

    A part's edges of its core rows are one run of the column; the others are read in order.
    """
    if values is None or graph.edge_id is None:
        return values
    out = np.empty((len(graph.edge_id), *values.shape[1:]), values.dtype)
    num_core_edges = int(graph.csc.indptr[graph.num_core])
    own, others = graph.edge_id[:num_core_edges], graph.edge_id[num_core_edges:]
    if len(own):
        low = int(own.min())
        out[:num_core_edges] = read_slice(values[low : int(own.max()) + 1])[own - low]
    order = np.argsort(others)
    out[num_core_edges:][order] = read_rows(values, others[order])
    return out


@dataclass(frozen=True)
class PartGraph:
    """The subgraph of a part: its core nodes, and the halo nodes that it only reads.

    Local ids are the core nodes in store order, [0, num_core), then the halo nodes in store order.

    Attributes:
        part: part id.
        core_start: store id of the first core node; the core is [core_start, core_start + num_core).
        num_core: number of core nodes.
        halo_nodes: (num_halo,) store ids, ascending.
        csc: rows and indices are local ids; indices int32, ascending within a row.
        degree: (num_local,) int32 or int64, in-degree of each local node in the FULL graph.
        edge_id: (num_edges,) int64 position of each edge in the store's edge arrays; None in a store without them.
        hops: how far the halo reaches.
        symmetric: whether every edge is there in both directions.
        schema, node_types: Node types and edge types, and where the nodes of each node type are among the store's ids;
            None in a graph of one node type and one edge type.
        columns: What samplers read, where the store has it: "edge_type" and int64 "edge_time", (num_edges,) in the
            order of `csc`, and int64 "node_time", (num_local,).
        edge_weight: The store's weights, by `edge_id`; None in a store without them.
        self_weight: (num_local,) float32, the weight of the self-loop that GCN adds to each node; None: 1 for all.
        seen: How often its edges are there, where it is `parts_alone`; None: there is nothing to correct.
    """

    part: int
    core_start: int
    num_core: int
    halo_nodes: np.ndarray
    csc: CSC
    degree: np.ndarray
    edge_id: np.ndarray | None
    hops: int = 1
    symmetric: bool = False
    schema: GraphSchema | None = None
    node_types: NodeTypes | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    edge_weight: np.ndarray | None = None
    self_weight: np.ndarray | None = None
    seen: "SeenEdges | None" = None

    @property
    def has(self) -> dict[str, bool]:
        """Which columns there are, see `graph.check_requires`."""
        return _has(self)

    def weights_at(self, positions: np.ndarray) -> np.ndarray | None:
        """Return the (num,) float32 weights of edges by (num,) positions in `csc`; None in a store without weights."""
        return _weights_at(self, positions)

    @property
    def num_halo(self) -> int:
        """Number of nodes that the part reads and does not own."""
        return len(self.halo_nodes)

    @property
    def num_local(self) -> int:
        """Number of core and halo nodes, which have the local ids 0 to num_local - 1, core first."""
        return self.num_core + self.num_halo

    @property
    def nodes(self) -> np.ndarray:
        """(num_local,) store ids of the local nodes."""
        core = np.arange(self.core_start, self.core_start + self.num_core, dtype=self.halo_nodes.dtype)
        return np.concatenate([core, self.halo_nodes])

    def symmetrised(self) -> "PartGraph":
        """Return the part with both directions of every edge it holds, repeats dropped.

        An edge that was there keeps its `edge_id`; an added one has the id of the edge it reverses. `degree`
        stays the full graph's in-degree where the new row is not longer; sums of weights stay as they are. A part that
        is symmetric already is returned as it is.

        Cost: O(num_local + num_edges) time; three copies of the edges while it runs.
        """
        if self.symmetric:
            return self
        if self.schema is not None or self.columns:
            raise ValueError(
                'direction="both" gives reverses the edge type of the edge itself: use direction="in", or write the '
                "store with to_undirected=True, whose reverses have edge types of their own"
            )
        indptr, indices = self.csc
        carry = self.edge_id is not None
        edge_id = self.edge_id if carry else np.zeros(0, np.int64)
        out_indptr, out_indices, out_edge = _transpose(indptr, indices, edge_id, carry)
        both = _merge(indptr, indices, edge_id, out_indptr, out_indices, out_edge, carry)
        degree = self.degree
        if degree.dtype.kind != "f":  # a row longer than its degree would be taken for a part of a shorter one
            degree = np.maximum(degree, np.diff(both[0])).astype(degree.dtype)
        csc, edge_id = CSC(both[0], both[1]), both[2] if carry else None
        return replace(self, csc=csc, degree=degree, edge_id=edge_id, symmetric=True)


def union_of_parts(graphs: Sequence[PartGraph]) -> PartGraph:
    """Return several parts as one graph, whose edges between these parts are complete.

    Nodes that one of the parts owns have all of their in-edges, nodes that are in halos alone those that the parts see.
    Local ids are the nodes in store order, and all count as halo: `core_start` and `num_core` are 0.

    Args:
        graphs: Parts of one store with a halo of one hop, at least one, in the order of their cores.

    Cost: O(nodes log nodes + edges) time; a copy of the edges, and while it runs 8 bytes an edge more where edges have
        ids or columns.
    """
    nodes = np.unique(np.concatenate([graph.nodes for graph in graphs]))
    places = [np.searchsorted(nodes, graph.nodes).astype(np.int32) for graph in graphs]
    is_core = np.zeros(len(nodes), np.bool_)
    for graph, place in zip(graphs, places, strict=True):
        is_core[place[: graph.num_core]] = True
    indptr = np.zeros(len(nodes) + 1, np.int64)
    for graph, place in zip(graphs, places, strict=True):
        _count_rows(graph.csc.indptr, graph.num_core, place, is_core, indptr)
    np.cumsum(indptr, out=indptr)
    first, carry = graphs[0], graphs[0].edge_id is not None
    indices, origin = np.empty(indptr[-1], np.int32), np.empty(indptr[-1] if carry else 0, np.int64)
    cursor, before = indptr[:-1].copy(), 0
    for graph, place in zip(graphs, places, strict=True):
        _fill_rows(*graph.csc, graph.num_core, place, is_core, cursor, indices, origin, before)
        before += len(graph.csc.indices)

    def of_edges(values: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(values)[origin]

    def of_nodes(values: list[np.ndarray]) -> np.ndarray:
        out = np.empty(len(nodes), values[0].dtype)
        for place, own in zip(places, values, strict=True):
            out[place] = own
        return out

    columns = {}
    for name in first.columns:
        joined = of_nodes if name == "node_time" else of_edges
        columns[name] = joined([graph.columns[name] for graph in graphs])
    return replace(
        first,
        core_start=0,
        num_core=0,
        halo_nodes=nodes,
        csc=CSC(indptr, indices),
        degree=of_nodes([graph.degree for graph in graphs]),
        edge_id=of_edges([graph.edge_id for graph in graphs]) if carry else None,
        columns=columns,
        self_weight=None if first.self_weight is None else of_nodes([graph.self_weight for graph in graphs]),
    )


class SeenEdges(NamedTuple):
    """How often the edges between the parts of a graph are there, where parts change: what their weights correct.

    Attributes:
        part_of: (num_local,) int32, the part that owns each node.
        sort: (num_parts,) int8, 0 or 1.
        probability: (2, 2) that edges between two parts are there, by the sorts of both; within a part they always are.
    """

    part_of: np.ndarray
    sort: np.ndarray
    probability: np.ndarray


def parts_alone(graphs: Sequence[PartGraph], part_offsets: np.ndarray, seen: Callable[..., SeenEdges]) -> PartGraph:
    """Return several parts as one graph that has no other nodes: edges that lead to it from others are left out.

    Local ids are the nodes in store order, and all count as halo, as in `union_of_parts`; `degree` stays the full
    graph's.

    Args:
        graphs: Parts of one store with a halo of one hop, in the order of their cores.
        part_offsets: (num_parts + 1,) of the store.
        seen: Gives `SeenEdges` of (num_local,) parts of the nodes.

    Cost: as of `union_of_parts`, and another copy of the edges.
    """
    union = union_of_parts(graphs)
    parts = (np.searchsorted(part_offsets, union.halo_nodes, side="right") - 1).astype(np.int32)
    own = np.isin(parts, [graph.part for graph in graphs])
    place = (np.cumsum(own) - 1).astype(np.int32)
    kept = own[union.csc.indices] & np.repeat(own, np.diff(union.csc.indptr))
    indptr = np.concatenate([[0], np.cumsum(kept)])[union.csc.indptr]
    rows = np.append(np.flatnonzero(own), len(own))
    columns = {name: values[own if name == "node_time" else kept] for name, values in union.columns.items()}
    return replace(
        union,
        halo_nodes=union.halo_nodes[own],
        csc=CSC(indptr[rows], place[union.csc.indices[kept]]),
        degree=union.degree[own],
        edge_id=None if union.edge_id is None else union.edge_id[kept],
        columns=columns,
        self_weight=None if union.self_weight is None else union.self_weight[own],
        seen=seen(parts[own]),
    )


@dataclass(frozen=True)
class WholeGraph:
    """The full graph in the form of a part: what sampling across parts reads.

    Attributes:
        part: Number used for the part in keys: the rank.
        csc: CSC of the store; positions in it are edge positions.
        degree: (num_nodes,) in-degree.
        symmetric: Whether every edge has its reverse.
        root, fingerprint: Folder and fingerprint of the store that holds the graph; None and "" if no store holds it.
        schema, node_types, columns, edge_weight, self_weight: As for `PartGraph`.
    """

    part: int
    csc: CSC
    degree: np.ndarray
    core_start: int = 0
    symmetric: bool = False
    root: Path | None = None
    fingerprint: str = ""
    schema: GraphSchema | None = None
    node_types: NodeTypes | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    edge_weight: np.ndarray | None = None
    self_weight: np.ndarray | None = None
    edge_id = None  # positions in its CSC are those of the store
    seen = None

    def weights_at(self, positions: np.ndarray) -> np.ndarray | None:
        """As `PartGraph.weights_at`."""
        return _weights_at(self, positions)

    @classmethod
    def of(
        cls, csc: CSC, part: int, symmetric: bool = False, root: Path | None = None, fingerprint: str = ""
    ) -> "WholeGraph":
        """Return the view of a CSC for one rank; reads `indptr` once for the degrees."""
        degree = np.diff(csc.indptr).astype(np.int32)
        return cls(part, csc, degree, symmetric=symmetric, root=root, fingerprint=fingerprint)

    @classmethod
    def of_store(cls, store, part: int, edges: bool = True) -> "WholeGraph":
        """Return the view of a `PartitionStore` for one rank; without `edges` only offsets may be read of its CSC."""
        csc = store.whole_csc if edges else store.csc_of_parts(())
        if isinstance(csc.indices, np.ndarray):
            csc = csc._replace(indices=mapped_at_random(csc.indices))
        return cls.of(csc, part, store.symmetric, store.root, store.layout_fingerprint)

    @property
    def has(self) -> dict[str, bool]:
        """Which columns there are, see `graph.check_requires`."""
        return _has(self)

    @property
    def num_core(self) -> int:
        """Number of nodes: all are core."""
        return self.csc.num_rows

    @property
    def num_local(self) -> int:
        """Number of nodes; local ids are store ids."""
        return self.csc.num_rows

    @property
    def halo_nodes(self) -> np.ndarray:
        """(0,) int64: the whole graph has no halo."""
        return np.empty(0, np.int64)

    def symmetrised(self) -> "WholeGraph":
        """Return the graph where it has both directions already.

        Raises:
            ValueError: it has not; both directions of a whole graph belong into its store.
        """
        if self.symmetric:
            return self
        raise ValueError('direction="both" needs scope="part", or a store written with to_undirected=True')


@kernel
def _transpose(indptr, indices, edge_id, carry):
    """Rows by source instead of destination; ascending within a row."""
    num_rows = len(indptr) - 1
    out_indptr = np.zeros(num_rows + 1, np.int64)
    for i in range(len(indices)):
        out_indptr[indices[i] + 1] += 1
    for row in range(num_rows):
        out_indptr[row + 1] += out_indptr[row]
    cursor = out_indptr[:-1].copy()
    out_indices = np.empty_like(indices)
    out_edge = np.empty(len(edge_id), np.int64)
    for row in range(num_rows):
        for i in range(indptr[row], indptr[row + 1]):
            position = cursor[indices[i]]
            cursor[indices[i]] += 1
            out_indices[position] = row
            if carry:
                out_edge[position] = edge_id[i]
    return out_indptr, out_indices, out_edge


@kernel
def _merge(indptr_a, indices_a, edge_a, indptr_b, indices_b, edge_b, carry):
    """Merge two sorted CSCs row by row; of equal entries the first of `a` stays, else the first of `b`."""
    num_rows = len(indptr_a) - 1
    indptr = np.zeros(num_rows + 1, np.int64)
    indices = np.empty(len(indices_a) + len(indices_b), indices_a.dtype)
    edge = np.empty(len(edge_a) + len(edge_b), np.int64)
    count = 0
    for row in range(num_rows):
        a, end_a = indptr_a[row], indptr_a[row + 1]
        b, end_b = indptr_b[row], indptr_b[row + 1]
        while a < end_a or b < end_b:
            from_a = b == end_b or (a < end_a and indices_a[a] <= indices_b[b])
            value = indices_a[a] if from_a else indices_b[b]
            if count == indptr[row] or indices[count - 1] != value:
                indices[count] = value
                if carry:
                    edge[count] = edge_a[a] if from_a else edge_b[b]
                count += 1
            if from_a:
                a += 1
            else:
                b += 1
        indptr[row + 1] = count
    return indptr, indices[:count].copy(), edge[: count if carry else 0].copy()


@kernel
def _count_rows(indptr, num_core, place, is_core, counts):
    """Add the edges that rows of a part have in the union: all of the core's, others' unless another part owns them."""
    for row in range(len(place)):
        if row < num_core or not is_core[place[row]]:
            counts[place[row] + 1] += indptr[row + 1] - indptr[row]


@kernel
def _fill_rows(indptr, sources, num_core, place, is_core, cursor, indices, origin, before):
    """Append the rows that `_count_rows` counts, in the order of the union's ids: halo before the core, core, halo."""
    carry = len(origin) > 0
    for row in range(len(place)):
        if row >= num_core and is_core[place[row]]:
            continue
        begin, end = indptr[row], indptr[row + 1]
        halo = begin
        while halo < end and sources[halo] < num_core:
            halo += 1
        after = halo
        while num_core > 0 and after < end and place[sources[after]] < place[0]:
            after += 1
        out = cursor[place[row]]
        for low, high in ((halo, after), (begin, halo), (after, end)):
            for at in range(low, high):
                indices[out] = place[sources[at]]
                if carry:
                    origin[out] = before + at
                out += 1
        cursor[place[row]] = out


def load_part_graph(
    store, halo_hops: int, part: int, rows: bool = False, allocate: Callable[..., np.ndarray] = np.empty
) -> PartGraph:
    """Return a part's graph; of a store behind a URL the part is fetched first, with `rows` its features as well.

    allocate: See `PartitionStore.load_part`.
    """
    store.fetch_part(part, rows)
    graph = store.load_part(part, halo_hops, allocate)
    return _with_columns(store, graph, None if store.mapped("self_loop_nodes") is None else graph.nodes)


def load_whole_graph(store, part: int, edges: bool = True) -> WholeGraph:
    """Return the whole graph as one part sees it; see `WholeGraph.of_store`."""
    return _with_columns(store, WholeGraph.of_store(store, part, edges), edges=edges)


def _with_columns(store, graph, nodes: np.ndarray | None = None, edges: bool = True):
    """Return a graph with its types, times and weights; degrees are sums of weights then, what GCN normalises by.

    Args:
        nodes: (num_local,) store ids of its nodes, where the store has self-loops; None: all.
        edges: Whether the columns of the edges may be read.
    """
    columns = {name: edge_values(graph, store.edge_column(name, edges)) for name in ("edge_type", "edge_time")}
    columns["node_time"] = None if store.node_time is None else local_rows(store.node_time, graph)
    weights = {}
    if store.has["edge_weight"]:
        weight = store.edge_column("edge_weight", edges)
        weights = {"degree": local_rows(store.weighted_degree, graph), "edge_weight": weight}
    return replace(
        graph,
        schema=store.schema,
        node_types=store.node_types,
        columns={name: values for name, values in columns.items() if values is not None},
        self_weight=store.self_weight(nodes),
        **weights,
    )
