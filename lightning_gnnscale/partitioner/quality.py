"""The quality of a partition: cut, replication and balances, in k passes over the stream for k halo hops."""

import os
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ..errors import check_number
from ..graph import id_dtype
from ..jit import kernel
from ..triton_kernels.intrinsics import prefetch
from ..values import as_array, exact_integers
from .graph_access.scratch import AUTO
from .graph_access.simple_graph import SimpleGraph, open_simple_graph

_PARTS_AHEAD, _ENDS_AHEAD = 24, 12  # edges; what is marked or joined is asked for once the parts of its ends are there


@dataclass(frozen=True)
class PartitionQuality:
    """Figures on the undirected simple graph. A balance is the largest part's share over the mean share, >= 1.

    Attributes:
        edge_cut_ratio: Edges between parts over all edges; 0 without edges.
        replication_factor: Sum over parts of core and halo nodes, over the number of nodes; >= 1.
        node_balance: Balance of core nodes.
        edge_balance: Balance of the edges that a part holds, that is, of edges with at least one end in it.
        volume_balance: Balance of the sums of core nodes' degrees.
        train_balance: Balance of training nodes; None without a training mask or without training nodes.
        num_edges, cut_edges: Number of undirected edges, and of those between parts.
        halo_hops: Distance up to which a part reads nodes of other parts.
        nodes_per_part, halo_per_part, edges_per_part, volume_per_part, train_per_part: (num_parts,) lists of counts.
        mask_balance, mask_per_part: The same as for training nodes, keyed by the name of the mask.
        components_per_part: (num_parts,) list: connected components of the subgraph that a part's core nodes induce.
        feature_bytes: Bytes of a feature row, as counted in `bytes_per_part`.
        bytes_per_part: (num_parts,) list: bytes that a part loads from a store of the undirected graph. These are its
            feature rows, core and halo, and its CSC as `PartitionStore.load_part(part, halo_hops)` lays it out: 8 bytes
            per local node and 8 for the end, 4 per directed edge. A part holds both directions of every edge that has
            an end nearer than halo_hops to its core. With 0 hops only the edges inside the core are counted, because
            the store's seed decides which cut edges a part gets.
    """

    edge_cut_ratio: float
    replication_factor: float
    node_balance: float
    edge_balance: float
    volume_balance: float
    train_balance: float | None
    num_edges: int
    cut_edges: int
    halo_hops: int
    nodes_per_part: list[int]
    halo_per_part: list[int]
    edges_per_part: list[int]
    volume_per_part: list[int]
    train_per_part: list[int] | None
    mask_balance: dict[str, float | None] = field(default_factory=dict)
    mask_per_part: dict[str, list[int]] = field(default_factory=dict)
    components_per_part: list[int] = field(default_factory=list)
    feature_bytes: float = 0
    bytes_per_part: list[int] = field(default_factory=list)

    def with_feature_bytes(self, feature_bytes: float) -> "PartitionQuality":
        """Return the same figures with feature rows of this many bytes (a mean where rows are sparse, >= 0)."""
        check_number("feature_bytes", feature_bytes, at_least=0)
        if not self.bytes_per_part:  # not counted
            return replace(self, feature_bytes=feature_bytes)
        needed = np.add(self.nodes_per_part, self.halo_per_part)
        added = np.ceil(needed * feature_bytes) - np.ceil(needed * self.feature_bytes)
        with_rows = (np.asarray(self.bytes_per_part) + added).astype(np.int64).tolist()
        return replace(self, feature_bytes=feature_bytes, bytes_per_part=with_rows)


class _Counts(NamedTuple):
    """Counts by part, (num_parts,) int64 each.

    Attributes:
        inside, cut: edges with both ends, and with one end, in the core.
        near: edges with an end nearer than halo_hops to the core; filled by the last of several passes.
    """

    inside: np.ndarray
    cut: np.ndarray
    near: np.ndarray

    @classmethod
    def zeros(cls, num_parts: int) -> "_Counts":
        return cls(*np.zeros((3, num_parts), np.int64))

    @property
    def held(self) -> np.ndarray:
        """Edges with at least one end in the core."""
        return self.inside + self.cut

    @property
    def volume(self) -> np.ndarray:
        """Sums of core nodes' degrees."""
        return 2 * self.inside + self.cut


def evaluate_partitioning(
    stream,
    part_id: np.ndarray,
    num_parts: int,
    halo_hops: int = 1,
    masks: dict | None = None,
    deduplicate: bool | None = None,
    scratch: str | os.PathLike | None = AUTO,
    progress=None,
    graph: SimpleGraph | None = None,
    feature_bytes: float = 0,
) -> PartitionQuality:
    """Measure a partition on the undirected simple graph behind a stream.

    Args:
        stream: an EdgeStream.
        part_id: (num_nodes,) integers in [0, num_parts).
        num_parts: number of parts, >= 1.
        halo_hops: distance, in hops, up to which a part reads foreign nodes, >= 0.
        masks: {"train": (num_nodes,) bool, ...}; of integers, how much each node counts. The balance of each is
            reported.
        deduplicate, scratch: see `open_simple_graph`.
        progress: called as progress(what, done, total) once a chunk.
        graph: what `open_simple_graph` returned for this stream; saves the pass that finds the layout.
        feature_bytes: bytes of a feature row (a mean where rows are sparse), >= 0, for `bytes_per_part`.

    Returns:
        The figures. Nodes without an edge count once in the replication factor.

    Raises:
        ValueError: shapes or values that do not fit.

    Cost: max(halo_hops, 1) passes, and one more where the layout is not known; a node takes ceil(num_parts / 8) bytes,
        twice as many for several hops, and one id.
    """
    if graph is None:
        graph = open_simple_graph(stream, None, deduplicate, scratch, progress)[0]
    part_id = np.asarray(as_array("part_id", part_id))
    check_parts(graph.num_nodes, part_id, num_parts)
    part_id = part_id.astype(part_id.dtype.newbyteorder("="), copy=False)
    if halo_hops < 0:
        raise ValueError(f"halo_hops must be >= 0, got {halo_hops}")
    check_number("feature_bytes", feature_bytes, at_least=0)
    masked = _count_masks(masks, part_id, num_parts)
    counts = _Counts.zeros(num_parts)
    reach = np.zeros((graph.num_nodes, (num_parts + 7) // 8), np.uint8)
    core = np.zeros(num_parts, np.int64)
    _reach_own(part_id, reach, core)
    components = _first_pass(graph, part_id, reach, counts, halo_hops, progress)
    _further_passes(graph, reach, counts, halo_hops, progress)
    needed = np.zeros(num_parts, np.int64)
    _count_reached(reach, needed)
    return _figures(counts, halo_hops, core, needed, components, masked, feature_bytes)


def quality_of_counts(
    inside, cut, components, part_offsets: np.ndarray, halo_per_part: np.ndarray, part_id: np.ndarray, masks=None
) -> PartitionQuality:
    """Return the figures of a partition from what its store counted, for one-hop halos.

    Args:
        inside, cut, components: (num_parts,) edges with both ends, and with one, in the core, and components of it.
        part_offsets: (num_parts + 1,) sums of the parts' nodes.
        halo_per_part: (num_parts,) halo nodes.
        part_id, masks: see `evaluate_partitioning`.

    Cost: one pass over the masks.
    """
    counts = _Counts(*(np.asarray(count, np.int64) for count in (inside, cut)), np.zeros(len(inside), np.int64))
    core = np.diff(part_offsets)
    masked = _count_masks(masks, part_id, len(core))
    return _figures(counts, 1, core, core + halo_per_part, np.asarray(components), masked)


def _figures(
    counts: _Counts, halo_hops: int, core: np.ndarray, needed: np.ndarray, components: np.ndarray,
    masked: dict[str, np.ndarray], feature_bytes: float = 0,
) -> PartitionQuality:  # fmt: skip
    """Return the figures from counts by part; `needed`: nodes of core and halo."""
    edges = 2 * (counts.inside, counts.held, counts.near)[min(halo_hops, 2)]
    cut_edges, num_nodes = int(counts.cut.sum()) // 2, int(core.sum())
    num_edges = int(counts.inside.sum()) + cut_edges
    balances = {name: balance(count) if count.any() else None for name, count in masked.items()}
    per_part = {name: count.tolist() for name, count in masked.items()}
    return PartitionQuality(
        edge_cut_ratio=cut_edges / num_edges if num_edges else 0.0,
        replication_factor=int(needed.sum()) / num_nodes if num_nodes else 1.0,
        node_balance=balance(core),
        edge_balance=balance(counts.held),
        volume_balance=balance(counts.volume),
        train_balance=balances.get("train"),
        num_edges=num_edges,
        cut_edges=cut_edges,
        halo_hops=halo_hops,
        nodes_per_part=core.tolist(),
        halo_per_part=(needed - core).tolist(),
        edges_per_part=counts.held.tolist(),
        volume_per_part=counts.volume.tolist(),
        train_per_part=per_part.get("train"),
        mask_balance=balances,
        mask_per_part=per_part,
        components_per_part=components.tolist(),
        feature_bytes=feature_bytes,
        bytes_per_part=np.ceil(needed * feature_bytes + 8 * (needed + 1) + 4 * edges).astype(np.int64).tolist(),
    )


def _first_pass(graph, part_id, reach, counts: _Counts, halo_hops: int, progress) -> np.ndarray:
    """Count edges, let each part reach its neighbours, and return the (num_parts,) connected components."""
    parent = np.arange(graph.num_nodes, dtype=id_dtype(graph.num_nodes))
    for src, dst in graph.one_pass("quality", progress):
        _count_edges(src, dst, part_id, halo_hops > 0, reach, counts.inside, counts.cut, parent)
    components = np.zeros_like(counts.inside)
    _count_roots(parent, part_id, components)
    return components


def _further_passes(graph, reach, counts: _Counts, halo_hops: int, progress) -> None:
    """Extend what each part reads from one hop to all; a pass a hop."""
    before = reach.copy() if halo_hops > 1 else reach[:0]
    for hop in range(2, halo_hops + 1):
        before[:] = reach
        for src, dst in graph.one_pass(f"quality, hop {hop}", progress):
            _reach_further(src, dst, before, reach)
            if hop == halo_hops:
                _count_near(src, dst, before, counts.near)


def balance(loads: np.ndarray) -> float:
    """Return the largest of (num_parts,) loads over their mean; 1 where all are zero."""
    total = int(loads.sum())
    return int(loads.max()) * len(loads) / total if total else 1.0


def check_parts(num_nodes: int, part_id: np.ndarray, num_parts: int) -> None:
    """Raise ValueError unless every node has a part in [0, num_parts)."""
    if part_id.shape != (num_nodes,) or part_id.dtype.kind not in "iu":
        raise ValueError(f"part_id must be ({num_nodes},) integers, got {part_id.shape} {part_id.dtype}")
    if num_parts < 1:
        raise ValueError(f"num_parts must be >= 1, got {num_parts}")
    if num_nodes and not 0 <= int(part_id.min()) <= int(part_id.max()) < num_parts:
        raise ValueError(f"part_id must lie in [0, {num_parts}), got {part_id.min()} to {part_id.max()}")


def check_masks(num_nodes: int, masks: dict | None) -> dict[str, np.ndarray]:
    """Return the masks that are there as arrays of bool or counts; ValueError unless each is (num_nodes,) of them."""
    given = {name: as_array(f"masks[{name!r}]", mask) for name, mask in (masks or {}).items() if mask is not None}
    for name, mask in given.items():
        if mask.shape != (num_nodes,) or mask.dtype.kind not in "biu":
            raise ValueError(f"masks[{name!r}] must be ({num_nodes},) bool or counts, got {mask.shape} {mask.dtype}")
        if mask.dtype != bool:
            given[name] = exact_integers(f"masks[{name!r}]", mask, 0, 2**31 - 1)
    return given


def _count_masks(masks: dict | None, part_id: np.ndarray, num_parts: int) -> dict[str, np.ndarray]:
    """Return (num_parts,) counts of the nodes of each mask, or sums of what its nodes count."""
    counts = {}
    for name, mask in check_masks(len(part_id), masks).items():
        counts[name] = np.zeros(num_parts, np.int64)
        _count_masked(mask, part_id, counts[name])
    return counts


@kernel
def _reach_own(part_id, reach, core):
    for v in range(len(part_id)):
        reach[v, part_id[v] >> 3] = 1 << (part_id[v] & 7)
        core[part_id[v]] += 1


@kernel
def _count_masked(mask, part_id, count):
    for v in range(len(mask)):
        count[part_id[v]] += mask[v]


@kernel
def _count_edges(src, dst, part_id, reaches, reach, inside, cut, parent):
    """Count the edges of one block by part, join the ends of those inside a part, and mark what parts read of others.

    Args:
        reaches: mark each end of a cut edge in `reach` as read by the other end's part.
    """
    length, width, marks = len(src), reach.shape[1], reach.reshape(-1)
    for i in range(length):
        if i + _PARTS_AHEAD < length:
            prefetch(part_id, np.int64(src[i + _PARTS_AHEAD]))
            prefetch(part_id, np.int64(dst[i + _PARTS_AHEAD]))
            u, v = np.int64(src[i + _ENDS_AHEAD]), np.int64(dst[i + _ENDS_AHEAD])
            p, q = np.int64(part_id[u]), np.int64(part_id[v])
            if p == q:
                prefetch(parent, u)
                prefetch(parent, v)
            elif reaches:
                prefetch(marks, width * u + (q >> 3))
                prefetch(marks, width * v + (p >> 3))
        u, v = np.int64(src[i]), np.int64(dst[i])
        p, q = np.int64(part_id[u]), np.int64(part_id[v])
        if p == q:
            inside[p] += 1
            _join(parent, u, v)
        else:
            cut[p] += 1
            cut[q] += 1
            if reaches:
                marks[width * u + (q >> 3)] |= 1 << (q & 7)
                marks[width * v + (p >> 3)] |= 1 << (p & 7)


@kernel
def _join(parent, u, v):
    """Put two nodes into one tree; the lower root stays one. Paths are halved on the way."""
    while parent[u] != u:
        parent[u] = parent[parent[u]]
        u = parent[u]
    while parent[v] != v:
        parent[v] = parent[parent[v]]
        v = parent[v]
    if u < v:
        parent[v] = u
    elif v < u:
        parent[u] = v


@kernel
def _count_roots(parent, part_id, components):
    for v in range(len(parent)):
        components[part_id[v]] += parent[v] == v


@kernel
def _reach_further(src, dst, before, reach):
    """Mark each end as read by all parts that read the other end one hop earlier."""
    for i in range(len(src)):
        u, v = src[i], dst[i]
        for byte in range(reach.shape[1]):
            reach[u, byte] |= before[v, byte]
            reach[v, byte] |= before[u, byte]


@kernel
def _count_near(src, dst, before, near):
    """Count each edge for the parts that read one of its ends one hop earlier."""
    for i in range(len(src)):
        u, v = src[i], dst[i]
        for byte in range(before.shape[1]):
            bits, part = before[u, byte] | before[v, byte], 8 * byte
            while bits:
                near[part] += bits & 1
                bits >>= 1
                part += 1


@kernel
def _count_reached(reach, needed):
    """Count the nodes that each part reads, its own among them."""
    for v in range(reach.shape[0]):
        for p in range(len(needed)):
            needed[p] += (reach[v, p >> 3] >> (p & 7)) & 1
