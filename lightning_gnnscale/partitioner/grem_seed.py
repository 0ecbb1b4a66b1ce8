"""How GREM's first chunk is partitioned: in memory, before any edge streams."""

import numpy as np

from ..edge_stream import open_edge_stream
from ..jit import kernel
from . import phases
from .graph_access.edge_shuffle import EdgeFile
from .graph_access.scratch import AUTO
from .grem_placement import ChunkRows, SeedParts
from .multilevel import Effort, partition_in_memory
from .multilevel.weighted_graph import ONE, WeightedGraph
from .registry import available_partitioners, complete_options, get_partitioner

MULTILEVEL = "multilevel"

# On a chunk of 2 million entries full effort takes three times as long or more, and later chunks cut no fewer edges.
_SMALL_ENTRIES = 1 << 18
_LITTLE_EFFORT = Effort(tries=2, passes=2, patience=3, max_rounds=6)


def check_seed_method(name: str) -> None:
    """Raise ValueError unless the name is "multilevel" or a registered partitioner other than GREM."""
    allowed = [MULTILEVEL, *(known for known in available_partitioners() if known not in ("grem", MULTILEVEL))]
    if name not in allowed:
        raise ValueError(f"partitioner.seed_method must be one of {', '.join(allowed)}, got {name!r}")


def seed_partitioner(
    method: str, share: tuple[int, ...], caps: np.ndarray, epsilon: float, seed: int, scratch=AUTO
) -> SeedParts:
    """Return a function that partitions a first chunk.

    Args:
        method: "multilevel", or the name of a registered partitioner. The latter makes sum(share) parts of equal size,
            which are then joined, unless all shares are equal.
        share: (num_parts,) relative sizes of the parts, whole numbers >= 1.
        caps: (num_parts,) int64 largest sizes of the parts over all nodes.
        epsilon: Slack of the balance over the chunk's nodes, as far as the caps allow it. Used by "multilevel" only;
            other methods have their own balance.
        seed: Seed that is passed on to the method.
        scratch: Scratch folder for registered partitioners that take one.

    Returns:
        A `SeedParts`. If a chunk has fewer nodes than there are parts, each node gets a part of its own.
    """
    even = len(set(share)) == 1
    num_parts = len(share) if even or method == MULTILEVEL else sum(share)

    def seed_parts(rows: ChunkRows, edges: EdgeFile, num_edges: int) -> np.ndarray:
        rank = np.empty(len(rows.ends), rows.neighbors.dtype)
        num_nodes = _rank_nodes(rows.ends, rank)
        if num_nodes < num_parts:
            found = np.arange(num_nodes)
        elif method == MULTILEVEL:
            return _multilevel(rows, rank, num_nodes, np.array(share), caps, epsilon, seed)
        else:
            found = _registered(method, rank, num_nodes, num_parts, edges, num_edges, seed, scratch)
        if num_parts > len(share):
            found = np.searchsorted(np.cumsum(share), found, side="right")
        return found.astype(np.int32)

    return seed_parts


def _multilevel(rows, rank, num_nodes, share, caps, epsilon, seed) -> np.ndarray:
    indptr, indices = np.zeros(num_nodes + 1, np.int64), np.empty(len(rows.neighbors), rank.dtype)
    _compact_rows(rows.ends, rows.neighbors, rank, indptr, indices)
    graph = WeightedGraph(indptr, indices, ONE, np.ones((1, 1), np.int32))
    cap = np.minimum(caps, np.floor(-(-num_nodes * share // share.sum()) * (1 + epsilon)).astype(np.int64))
    effort = Effort() if len(indices) <= _SMALL_ENTRIES else _LITTLE_EFFORT
    return partition_in_memory(graph, cap[:, None], seed, share / share.sum(), effort)


def _registered(method, rank, num_nodes, num_parts, edges, num_edges, seed, scratch) -> np.ndarray:
    pairs = np.empty((num_edges, 2), edges.dtype)
    edges.read(0, pairs)
    _rename(pairs, rank)
    stream = open_edge_stream((pairs[:, 0], pairs[:, 1]), num_nodes=num_nodes, layout="once")
    options = {"scratch": scratch} if "scratch" in complete_options(method, {}) else {}
    with phases.recording():  # its graph and its phases are not those of the whole
        return np.asarray(get_partitioner(method)(stream, num_parts, seed=seed, **options))


@kernel
def _rank_nodes(ends, rank):
    """Number the nodes that have an edge; return how many there are."""
    num_nodes, start = 0, 0
    for v in range(len(ends)):
        if ends[v] > start:
            rank[v] = num_nodes
            num_nodes += 1
        start = ends[v]
    return num_nodes


@kernel
def _compact_rows(ends, neighbors, rank, indptr, indices):
    row, start = 0, 0
    for v in range(len(ends)):
        if ends[v] > start:
            row += 1
            indptr[row] = ends[v]
        start = ends[v]
    for e in range(len(neighbors)):
        indices[e] = rank[neighbors[e]]


@kernel
def _rename(pairs, rank):
    """Put the ranks in, the smaller first: no edge then looks like the reverse of another."""
    for i in range(len(pairs)):
        u, v = rank[pairs[i, 0]], rank[pairs[i, 1]]
        pairs[i, 0], pairs[i, 1] = min(u, v), max(u, v)
