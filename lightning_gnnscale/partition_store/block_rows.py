"""The rows of one process of full-graph training: a contiguous range of store ids, and what it exchanges with whom."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import StrategyError
from ..graph import CSC
from ..jit import kernel
from .reader import PartitionStore

_BLOCK_EDGES = 1 << 20


@dataclass(frozen=True)
class BlockRows:
    """The block of a rank: the complete rows of the nodes it owns, and the lists of rows that cross its border.

    Local ids number the own rows, [0, num_local), then the halo rows in ascending store id. So halo rows are grouped by
    the rank that owns them: those of rank r are the rows in rank r's `send_rows` list for this rank, in the same order.

    Attributes:
        rank: Rank that owns this block.
        world_size: Number of blocks.
        offsets: (world_size + 1,) int64; rank r owns the store ids in [offsets[r], offsets[r + 1]).
        halo_nodes: (num_halo,) int64 store ids, ascending: rows of other blocks that edges of this block read.
        send_rows: world_size arrays (num,) int64, one for each rank: ascending local ids of the own rows that it reads.
            This rank's own entry is empty.
        csc: indptr (num_local + 1,) int64 over the own rows; indices int32 local ids. A row keeps the store's order
            (ascending store id), so sums add up in the same order for any number of ranks.
        degree: (num_local + num_halo,) int64 in-degree in the full graph; where the store has edge weights, float32
            sums of the weights instead.
        edge_weight: (num_edges,) float32, or None.
        symmetric: Whether every edge of the graph has its reverse.
        self_weight: (num_local + num_halo,) float32, the weight of the self-loop that GCN adds to each node; None: 1.
    """

    rank: int
    world_size: int
    offsets: np.ndarray
    halo_nodes: np.ndarray
    send_rows: tuple[np.ndarray, ...]
    csc: CSC
    degree: np.ndarray
    edge_weight: np.ndarray | None
    symmetric: bool
    self_weight: np.ndarray | None = None

    @property
    def num_local(self) -> int:
        return self.csc.num_rows

    @property
    def num_halo(self) -> int:
        return len(self.halo_nodes)

    @property
    def nodes(self) -> np.ndarray:
        """(num_local + num_halo,) int64 store ids of the local ids."""
        own = np.arange(self.offsets[self.rank], self.offsets[self.rank + 1], dtype=np.int64)
        return np.concatenate([own, self.halo_nodes])


def load_block_rows(store: PartitionStore, rank: int, world_size: int) -> BlockRows:
    """Load the block of a rank: a contiguous run of parts; the ranks' numbers of parts are as even as possible.

    What to send follows from the own rows, or from those of the other ranks where some edge has no reverse; nothing
    is communicated.

    Args:
        store: the partition store; a part may be empty.
        rank: in [0, world_size).
        world_size: number of blocks, at most the number of parts.

    Returns:
        BlockRows with arrays of its own.

    Raises:
        ValueError: rank is outside [0, world_size).
        StrategyError: there are more ranks than parts.

    Cost: sequential reads of the block's edges, of all edges where some have no reverse, and a binary search in the
        halo for each edge that crosses. Memory: what is returned, a byte for each own row and rank, two bits a node of
        the whole graph, and 30 MiB; with edge weights 4 bytes a node of the whole graph and one read of all weights
        besides.
    Source: the block rows of CAGNET's 1-D algorithm (Tripathy et al., SC 2020). Differs: only rows that edges read
        are exchanged.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    runs = part_runs(store.num_parts, world_size)
    offsets = store.part_offsets[[run.start for run in runs] + [store.num_parts]]
    begin, end = int(offsets[rank]), int(offsets[rank + 1])
    halo_nodes = store.read_beyond(begin, end).astype(np.int64)
    first, last = int(store.csc.indptr[begin]), int(store.csc.indptr[end])
    indptr = np.array(store.csc.indptr[begin : end + 1], np.int64) - first
    return BlockRows(
        rank=rank,
        world_size=world_size,
        offsets=offsets,
        halo_nodes=halo_nodes,
        send_rows=_send_rows(store, offsets, rank),
        csc=CSC(indptr, _local_ids(store.whole_csc.indices, first, last, begin, end, halo_nodes)),
        degree=_degree(store, begin, end, halo_nodes),
        edge_weight=None if store.edge_weight is None else np.array(store.edge_weight[first:last], np.float32),
        symmetric=store.symmetric,
        self_weight=store.self_weight(np.concatenate([np.arange(begin, end), halo_nodes])),
    )


class HaloInEdges(NamedTuple):
    """The in-edges of a block's halo, as far as degrees need them.

    Attributes:
        loops: (num_loops,) int64, the position in the halo of each self-loop there.
        loop_weight: (num_loops,) float32, or None.
        counts: (num_halo,) int64, in-edges that are not self-loops.
        weights: (num_halo,) float64, the sums of their weights, or None.
        max_degree: The largest number of in-edges of any node of the graph.
    """

    loops: np.ndarray
    loop_weight: np.ndarray | None
    counts: np.ndarray
    weights: np.ndarray | None
    max_degree: int


def halo_in_edges(store: PartitionStore, blocks: BlockRows) -> HaloInEdges:
    """Return the in-edges that the halo of a block has in the whole graph.

    Args:
        store: The partition store.
        blocks: A block of it.

    Cost: reads the row offsets of all nodes once, and a binary search in the row of each halo node; with edge weights,
        all weights of these rows.
    """
    indptr, nodes = store.csc.indptr, blocks.halo_nodes
    bounds = np.empty((len(nodes), 2), np.int64)
    _find_loops(indptr, store.whole_csc.indices, nodes, bounds)
    num_loops = bounds[:, 1] - bounds[:, 0]
    loops = np.repeat(np.arange(len(nodes)), num_loops)
    counts = (indptr[nodes + 1] - indptr[nodes]).astype(np.int64) - num_loops
    max_degree = 0
    for start in range(0, store.num_nodes, _BLOCK_EDGES):
        max_degree = max(max_degree, int(np.diff(indptr[start : start + _BLOCK_EDGES + 1]).max(initial=0)))
    if store.edge_weight is None:
        return HaloInEdges(loops, None, counts, None, max_degree)
    weights = np.zeros(len(nodes))
    _sum_weights(indptr, store.edge_weight, nodes, bounds, weights)
    places = np.concatenate([np.arange(*pair) for pair in bounds.tolist()] or [np.empty(0, np.int64)]).astype(np.int64)
    return HaloInEdges(loops, np.asarray(store.edge_weight[places], np.float32), counts, weights, max_degree)


def edge_feature_rows(store: PartitionStore, blocks: BlockRows, most: int | None = None) -> np.ndarray:
    """Return the (num_edges, dim) edge features of a block's edges, of the stored dtype.

    Args:
        store: A store with edge features.
        blocks: A block of it.
        most: Number of edges, from the first on, that are enough; None: all.
    """
    first = int(store.csc.indptr[blocks.offsets[blocks.rank]])
    num_edges = blocks.csc.num_edges if most is None else min(most, blocks.csc.num_edges)
    return np.array(store.edge_features[first : first + num_edges])


def part_runs(num_parts: int, world_size: int) -> list[range]:
    """Return the parts of each rank: contiguous runs whose numbers of parts are as even as possible.

    Raises:
        StrategyError: there are more ranks than parts.
    """
    if world_size > num_parts:
        raise StrategyError(
            f"{world_size} processes share {num_parts} parts, so that rank {num_parts} has none: "
            f"use devices={num_parts} or fewer, or more parts"
        )
    runs = np.array_split(np.arange(num_parts), world_size)
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs]


def _send_rows(store: PartitionStore, offsets: np.ndarray, rank: int) -> tuple[np.ndarray, ...]:
    """Return for each rank the (num,) int64 positions of this rank's rows that it reads, ascending; none for itself."""
    begin, end = offsets[rank : rank + 2].tolist()
    if store.symmetric:  # a row is read by those that it reads
        read = np.zeros((len(offsets) - 1, end - begin), np.bool_)
        _mark_owners(*store.whole_csc, begin, offsets, read)
        lists = [np.flatnonzero(rows) for rows in read]
    else:
        lists = []
        for low, high in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            nodes = store.read_beyond(low, high)
            lists.append(nodes[(nodes >= begin) & (nodes < end)].astype(np.int64) - begin)
    lists[rank] = np.empty(0, np.int64)
    return tuple(lists)


def _local_ids(sources: np.ndarray, first: int, last: int, begin: int, end: int, halo: np.ndarray) -> np.ndarray:
    """Return sources[first:last], store ids, as (last - first,) int32 local ids in the same order."""
    local = np.empty(last - first, np.int32)
    for start in range(first, last, _BLOCK_EDGES):
        nodes = np.asarray(sources[start : min(start + _BLOCK_EDGES, last)])
        ids = local[start - first : start - first + len(nodes)]
        crosses = (nodes < begin) | (nodes >= end)
        ids[:] = nodes - begin
        ids[crosses] = (end - begin) + np.searchsorted(halo, nodes[crosses])
    return local


def _degree(store: PartitionStore, begin: int, end: int, halo: np.ndarray) -> np.ndarray:
    if store.edge_weight is not None:
        return np.concatenate([store.weighted_degree[begin:end], store.weighted_degree[halo]])
    indptr = store.csc.indptr
    return np.concatenate([np.diff(indptr[begin : end + 1]), indptr[halo + 1] - indptr[halo]]).astype(np.int64)


@kernel
def _find_loops(indptr, indices, nodes, bounds):
    """Write for each node the [first, end) of the edges from itself; sources ascend within a row."""
    for i in range(len(nodes)):
        for side in range(2):
            low, high = indptr[nodes[i]], indptr[nodes[i] + 1]
            while low < high:
                middle = (low + high) // 2
                if indices[middle] < nodes[i] + side:
                    low = middle + 1
                else:
                    high = middle
            bounds[i, side] = low


@kernel
def _sum_weights(indptr, weight, nodes, bounds, out):
    """Add up for each node the weights of its in-edges, except those in its bounds."""
    for i in range(len(nodes)):
        for edge in range(indptr[nodes[i]], bounds[i, 0]):
            out[i] += weight[edge]
        for edge in range(bounds[i, 1], indptr[nodes[i] + 1]):
            out[i] += weight[edge]


@kernel
def _mark_owners(indptr, indices, begin, offsets, read):
    """Mark for each row from `begin` on the ranges of ids in which it has a source; sources ascend within a row."""
    for row in range(read.shape[1]):
        owner = 0
        for i in range(indptr[begin + row], indptr[begin + row + 1]):
            while owner < len(read) - 1 and indices[i] >= offsets[owner + 1]:
                owner += 1
            read[owner, row] = True
