"""How good a partition is: cut, replication and balances, from k passes over the stream for k halo hops."""

import os
from dataclasses import dataclass

import numpy as np

from ..jit import kernel
from .scratch import AUTO
from .simple_graph import SimpleGraph, open_simple_graph


@dataclass(frozen=True)
class PartitionQuality:
    """Figures on the undirected simple graph. A balance is the largest part's share over the mean share, >= 1.

    Attributes:
        edge_cut_ratio: edges between parts over all edges; 0 without edges.
        replication_factor: sum over parts of core and halo nodes, over the number of nodes; >= 1.
        node_balance: of core nodes.
        edge_balance: of the edges that a part holds: those with at least one end in it.
        volume_balance: of the sums of core nodes' degrees.
        train_balance: of training nodes; None without a training mask or without training nodes.
        num_edges, cut_edges: undirected edges, and those between parts.
        halo_hops: the distance up to which a part reads foreign nodes.
        nodes_per_part, halo_per_part, edges_per_part, volume_per_part, train_per_part: (num_parts,) lists of counts.
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
) -> PartitionQuality:
    """Measure a partition on the undirected simple graph behind a stream.

    Args:
        stream: an EdgeStream.
        part_id: (num_nodes,) integers in [0, num_parts).
        num_parts: number of parts, >= 1.
        halo_hops: distance, in hops, up to which a part reads foreign nodes, >= 0.
        masks: {"train": (num_nodes,) bool, ...}; only "train" is used.
        deduplicate, scratch: see `open_simple_graph`.
        progress: called as progress(what, done, total) once a chunk.
        graph: what `open_simple_graph` returned for this stream; saves the pass that finds the layout.

    Returns:
        The figures. Nodes without an edge count once in the replication factor.

    Raises:
        ValueError: shapes or values that do not fit.

    Cost: max(halo_hops, 1) passes, and one more where the layout is not known; 2 ceil(num_parts / 8) bytes a node.
    """
    if graph is None:
        graph, _ = open_simple_graph(stream, None, deduplicate, scratch, progress)
    _check(graph.num_nodes, part_id, num_parts, halo_hops)
    reach = np.zeros((graph.num_nodes, (num_parts + 7) // 8), np.uint8)
    _reach_own(part_id, reach)
    before = reach.copy() if halo_hops > 1 else reach[:0]
    volume, held, cut = np.zeros(num_parts, np.int64), np.zeros(num_parts, np.int64), np.zeros(1, np.int64)
    for src, dst in graph.one_pass("quality", progress):
        _count_edges(src, dst, part_id, volume, held, cut)
        if halo_hops > 0:
            _reach_neighbors(src, dst, part_id, reach)
    for hop in range(2, halo_hops + 1):
        before[:] = reach
        for src, dst in graph.one_pass(f"quality, hop {hop}", progress):
            _reach_further(src, dst, before, reach)
    core = np.bincount(part_id, minlength=num_parts)
    needed = np.zeros(num_parts, np.int64)
    _count_reached(reach, needed)
    train = _train_counts(masks, part_id, num_parts)
    return PartitionQuality(
        edge_cut_ratio=int(cut[0]) / graph.num_edges if graph.num_edges else 0.0,
        replication_factor=int(needed.sum()) / graph.num_nodes if graph.num_nodes else 1.0,
        node_balance=balance(core),
        edge_balance=balance(held),
        volume_balance=balance(volume),
        train_balance=None if train is None or not train.any() else balance(train),
        num_edges=graph.num_edges,
        cut_edges=int(cut[0]),
        halo_hops=halo_hops,
        nodes_per_part=core.tolist(),
        halo_per_part=(needed - core).tolist(),
        edges_per_part=held.tolist(),
        volume_per_part=volume.tolist(),
        train_per_part=None if train is None else train.tolist(),
    )


def balance(loads: np.ndarray) -> float:
    """Return the largest of (num_parts,) loads over their mean; 1 where all are zero."""
    total = int(loads.sum())
    return int(loads.max()) * len(loads) / total if total else 1.0


def _check(num_nodes: int, part_id: np.ndarray, num_parts: int, halo_hops: int) -> None:
    if part_id.shape != (num_nodes,) or part_id.dtype.kind not in "iu":
        raise ValueError(f"part_id must be ({num_nodes},) integers, got {part_id.shape} {part_id.dtype}")
    if num_parts < 1:
        raise ValueError(f"num_parts must be >= 1, got {num_parts}")
    if num_nodes and not 0 <= int(part_id.min()) <= int(part_id.max()) < num_parts:
        raise ValueError(f"part_id must lie in [0, {num_parts}), got {part_id.min()} to {part_id.max()}")
    if halo_hops < 0:
        raise ValueError(f"halo_hops must be >= 0, got {halo_hops}")


def _train_counts(masks: dict | None, part_id: np.ndarray, num_parts: int) -> np.ndarray | None:
    if not masks or masks.get("train") is None:
        return None
    mask = np.asarray(masks["train"])
    if mask.shape != part_id.shape or mask.dtype != bool:
        raise ValueError(f"masks['train'] must be {part_id.shape} bool, got {mask.shape} {mask.dtype}")
    return np.bincount(part_id[mask], minlength=num_parts)


@kernel
def _reach_own(part_id, reach):
    for v in range(len(part_id)):
        reach[v, part_id[v] >> 3] = 1 << (part_id[v] & 7)


@kernel
def _count_edges(src, dst, part_id, volume, held, cut):
    """Count the edges of one block by part."""
    for i in range(len(src)):
        p, q = part_id[src[i]], part_id[dst[i]]
        volume[p] += 1
        volume[q] += 1
        held[p] += 1
        if p != q:
            held[q] += 1
            cut[0] += 1


@kernel
def _reach_neighbors(src, dst, part_id, reach):
    """Mark each end as read by the other end's part."""
    for i in range(len(src)):
        u, v = src[i], dst[i]
        p, q = part_id[u], part_id[v]
        if p != q:
            reach[u, q >> 3] |= 1 << (q & 7)
            reach[v, p >> 3] |= 1 << (p & 7)


@kernel
def _reach_further(src, dst, before, reach):
    """Mark each end as read by all parts that read the other end one hop earlier."""
    for i in range(len(src)):
        u, v = src[i], dst[i]
        for byte in range(reach.shape[1]):
            reach[u, byte] |= before[v, byte]
            reach[v, byte] |= before[u, byte]


@kernel
def _count_reached(reach, needed):
    """Count the nodes that each part reads, its own among them."""
    for v in range(reach.shape[0]):
        for p in range(len(needed)):
            needed[p] += (reach[v, p >> 3] >> (p & 7)) & 1
