"""The rows of one process of full-graph training: a contiguous range of store ids, and what it exchanges with whom."""

from dataclasses import dataclass

import numpy as np

from ..errors import StrategyError
from ..graph import CSC
from ..jit import kernel
from .reader import PartitionStore

_BLOCK_ARCS = 1 << 20


@dataclass(frozen=True)
class BlockRows:
    """The block of a rank: the complete rows of the nodes it owns, and the lists of rows that cross its border.

    Local ids number the own rows, [0, num_local), then the halo rows in ascending store id. So halo rows are grouped by
    the rank that owns them: those of rank r are the rows in rank r's `send_rows` list for this rank, in the same order.

    Attributes:
        rank: Rank that owns this block.
        world_size: Number of blocks.
        offsets: (world_size + 1,) int64; rank r owns the store ids in [offsets[r], offsets[r + 1]).
        halo_nodes: (num_halo,) int64 store ids, ascending: rows of other blocks that arcs of this block read.
        send_rows: world_size arrays (num,) int64, one for each rank: ascending local ids of the own rows that it reads.
            This rank's own entry is empty.
        csc: indptr (num_local + 1,) int64 over the own rows; indices int32 local ids. A row keeps the store's order
            (ascending store id), so sums add up in the same order for any number of ranks.
        degree: (num_local + num_halo,) int64 in-degree in the full graph; where the store has edge weights, float32
            sums of the weights instead.
        edge_weight: (num_arcs,) float32, or None.
        symmetric: Whether every arc of the graph has its reverse.
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
    """Load the block of a rank: a contiguous run of parts, as even in their number as can be.

    What to send comes from the own rows, or from those of the other ranks where some arc goes one way alone; nothing
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

    Cost: sequential reads of the block's arcs, of all arcs where some go one way alone, and a binary search in the
        halo for each arc that crosses. Memory: what is returned, a byte for each own row and rank, two bits a node of
        the whole graph, and 30 MiB; with edge weights 4 bytes a node of the whole graph and one read of all weights
        besides.
    Source: the block rows of CAGNET's 1-D algorithm (Tripathy et al., SC 2020). Differs: only rows that arcs read
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
        csc=CSC(indptr, _local_ids(store.csc.indices, first, last, begin, end, halo_nodes)),
        degree=_degree(store, begin, end, halo_nodes),
        edge_weight=None if store.edge_weight is None else np.array(store.edge_weight[first:last], np.float32),
        symmetric=store.symmetric,
    )


def part_runs(num_parts: int, world_size: int) -> list[range]:
    """Return the parts of each rank: contiguous runs, as even in their number as can be.

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
    if store.symmetric:  # who reads a row is whom the row reads
        read = np.zeros((len(offsets) - 1, end - begin), np.bool_)
        _mark_owners(*store.csc, begin, offsets, read)
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
    for start in range(first, last, _BLOCK_ARCS):
        nodes = np.asarray(sources[start : min(start + _BLOCK_ARCS, last)])
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
def _mark_owners(indptr, indices, begin, offsets, read):
    """Mark for each row from `begin` on the ranges of ids in which it has a source; sources ascend within a row."""
    for row in range(read.shape[1]):
        owner = 0
        for i in range(indptr[begin + row], indptr[begin + row + 1]):
            while owner < len(read) - 1 and indices[i] >= offsets[owner + 1]:
                owner += 1
            read[owner, row] = True
