"""The interface between layer-wise inference and the graph: protocols for `datamodule/`, and sets of nodes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..jit import kernel

MOST_OF_THE_GRAPH = 0.9  # share of needed nodes above which a layer is computed for all
_STEP = 16  # bytes of a bitmap between two counts
_OF_EDGES = slice(2, None)  # fields of a `RowBlock` that have a row an edge
_BITS_SET = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)  # in a byte


class NodeSet:
    """Some nodes of a graph: a bitmap, and counts by which a member's position is found.

    Args:
        bits: (ceil(num_nodes / 8),) uint8, the lowest bit first; kept, not copied.

    Cost: 1.5 bits a node of the graph.
    """

    def __init__(self, bits: np.ndarray):
        self.bits = bits
        counts = np.zeros(-(-len(bits) // _STEP) * _STEP, np.uint8)
        counts[: len(bits)] = _BITS_SET[bits]
        sums = counts.reshape(-1, _STEP).sum(axis=1, dtype=np.int64)
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(sums)])

    @classmethod
    def of(cls, nodes: np.ndarray, num_nodes: int) -> "NodeSet":
        """Return the set of (num,) ids in [0, num_nodes), in any order and repeated or not."""
        bits = np.zeros(-(-num_nodes // 8), np.uint8)
        _mark(bits, np.ascontiguousarray(nodes).reshape(-1))
        return cls(bits)

    @classmethod
    def of_mask(cls, mask: np.ndarray) -> "NodeSet":
        """Return the set of the nodes where a (num_nodes,) bool mask is true."""
        return cls(np.packbits(np.asarray(mask, bool), bitorder="little"))

    def __len__(self) -> int:
        return int(self._before[-1])

    def within(self, start: int, stop: int) -> np.ndarray:
        """Return the (num,) int64 members in [start, stop), ascending."""
        first = start // 8
        chosen = np.unpackbits(self.bits[first : -(-stop // 8)], bitorder="little")
        return np.flatnonzero(chosen[start - 8 * first : stop - 8 * first]) + start

    def contains(self, nodes: np.ndarray) -> np.ndarray:
        """Return (num,) bool: which of some nodes are members."""
        return (self.bits[nodes >> 3] >> (nodes & 7).astype(np.uint8)) & 1 != 0

    def positions(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (num,) int64 position of each of some members among all of them, in ascending order."""
        return _positions(self.bits, self._before, _BITS_SET, np.asarray(nodes))


class RowBlock(NamedTuple):
    """Complete rows of the full graph, in store ids.

    Attributes:
        rows: (num_rows,) int64, the nodes, each in one block of one rank.
        indptr: (num_rows + 1,) int64, from 0.
        indices: (num_edges,) int32 or int64, in-neighbours.
        edge_weight: (num_edges,) floating or None.
        edge_attr: (num_edges, edge_dim) features of the edges, or None.
        edge_type: (num_edges,) integers, the edge type of each edge, or None.
    """

    rows: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    edge_weight: np.ndarray | None = None
    edge_attr: np.ndarray | None = None
    edge_type: np.ndarray | None = None


class Spool(Protocol):
    """A file of one process for a time."""

    def append(self, values: np.ndarray) -> int:
        """Write an array behind what is there, and return the byte where it begins."""

    def read(self, position: int, out: np.ndarray) -> None:
        """Fill a (num,) array from a byte on."""

    def clear(self) -> None:
        """Forget what was written: the next array lies at the beginning again."""

    def close(self) -> None:
        """Remove the file."""


class LayerSource(Protocol):
    """The graph as one rank sees it: its own rows, and any node's features, degree and current representation.

    Attributes:
        num_nodes: nodes of the graph.
        row_bytes: bytes of a node's features where they lie; 0 without.
        has_weights: whether edges have weights.
    """

    num_nodes: int
    row_bytes: float
    has_weights: bool

    def blocks(self, needed: NodeSet | None = None) -> Iterator[RowBlock]:
        """Yield this rank's rows, or those of them that are needed; over all ranks each node appears once.

        Called several times, same order each time. Edges of all rows may be mapped files: they are read where they are
        used, and passes over the rows alone read none.
        """

    def counts(self, needed: NodeSet | None = None) -> tuple[int, int]:
        """Return how many of this rank's rows are needed, and how many edges they have; no edge is read."""

    def spool(self) -> Spool | None:
        """Return a file of this rank that it writes edges to for a time; None: there is no disk for it."""

    def gather(self, nodes: np.ndarray, table: np.ndarray | None = None) -> Any:
        """Return the features of (num,) int64 nodes: (num, dim) tensor or array, sparse rows, or `RowsByNodeType`.

        Several threads call it at a time.

        Args:
            nodes: ascending ones are read in the order of the file.
            table: what `table` returned; its rows, numbered as `nodes` says, are returned instead of features.
        """

    def expect(self, nodes: np.ndarray, table: np.ndarray | None = None) -> None:
        """Read rows of (num,) ascending nodes at once, for this thread's next calls of `gather`.

        Each of them asks for some of these nodes, those that follow on the ones before; arguments as there.
        """

    def write(self, table: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
        """Write (num, dim) values of the table's dtype to (num,) ascending rows of a table."""

    def union(self, bits: np.ndarray) -> None:
        """Set the bits of a bitmap (NodeSet.bits) that are set on any rank, in place; every rank must call it."""

    def store_ids(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (num,) int64 store ids of nodes, which a source of few nodes numbers in its own way."""

    def degree(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (num,) in-degrees of nodes in the full graph."""

    def self_weight(self, nodes: np.ndarray) -> np.ndarray | None:
        """Return the (num,) weights of the self-loops that GCN adds to nodes, see `Block`; None: 1 for all."""

    def node_type(self, nodes: np.ndarray) -> np.ndarray | None:
        """Return the (num,) int64 node types; None in a graph of one node type and one edge type."""

    def table(self, name: str, dim: int, num_rows: int | None = None, dtype: type = np.float32) -> np.ndarray:
        """Return a writable (num_rows, dim) array that all ranks share; num_rows None: one a node.

        All ranks make the same calls, and all rows are written before any is read. A call with a used name makes a
        new table that replaces the old one, which no rank reads any more.
        """

    def barrier(self) -> None:
        """Wait until every rank is here: all can then read what each wrote to a table."""


class LinkSource(Protocol):
    """One rank's share of the links that are evaluated.

    Attributes:
        num_negatives: negatives of each link.
        edge_type: (num_links,) int64 edge type of each link, or None.
        among_all: Whether links are ranked among all nodes, by `queries` instead of `chunks`.
        label: (num_links,) classes of the links, for `EdgeClassifier`, or None.
    """

    num_negatives: int
    edge_type: np.ndarray | None
    among_all: bool
    label: np.ndarray | None

    def chunks(self, num_links: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (pairs (2, num), negatives (num, num_negatives)) in store ids, num <= num_links; -1 for no negative."""

    def queries(self, num_links: int) -> Iterator[Any]:
        """Yield `LinkQueries` of at most num_links links: for their other ends, of triples for their first ends too."""


class LayerTables(Protocol):
    """Outputs of hidden layers that last longer than a pass: those of before it, and those that it leaves.

    Attributes:
        has_earlier: Whether there are outputs of before, of all nodes that no layer's `needed` has.
    """

    has_earlier: bool

    def read(self, layer: int, nodes: np.ndarray) -> Any:
        """Return the rows of before that layer `layer` >= 1 reads of (num,) nodes, (num, width) as tables have them."""

    def keep(self, layer: int, width: int, dtype: np.dtype, read: Callable[[np.ndarray], np.ndarray]) -> None:
        """Keep the rows that layer `layer` >= 1 reads; every rank calls it.

        Args:
            width, dtype: Of a row, as tables have it.
            read: Returns the rows of (num,) ascending nodes.
        """


class EvaluationShare(Protocol):
    """One rank's share of an exact evaluation: the Lightning modules take it instead of a mini-batch.

    Attributes:
        source: the graph; its blocks are this rank's rows.
        split: "val", "test", or None: predict.
        labels: (num_nodes,) or (num_nodes, num_labels) integers in store order, -1 = unknown; None: predict only.
        masks: name ("train", "val", "test") to (num_nodes,) bool, in store order.
        links: what `LinkPredictor` ranks, or None.
        table_dtype: "float32", or "bfloat16" for the tables of hidden layers.
        layers: Outputs of hidden layers that last longer than the pass, or None.
    """

    source: LayerSource
    split: str | None
    labels: np.ndarray | None
    masks: Mapping[str, np.ndarray]
    links: LinkSource | None
    table_dtype: str
    layers: LayerTables | None

    def needed(self, num_layers: int) -> Sequence[NodeSet | None] | None:
        """Return which rows each layer must have, see `closure`; None: all of them."""


class NodeReader(Protocol):
    """A store as the prediction of a few of its nodes reads it, without a DataModule."""

    def store_ids(self, nodes: Any, by_store_id: bool) -> np.ndarray:
        """Return the (num,) int64 store ids of a user's ids, or of store ids, which are checked."""

    def sampled(self, nodes: np.ndarray, fanouts: Sequence[int], seed: int, edge_features: bool) -> Any:
        """Return a batch of (num,) distinct store ids with sampled neighbours."""

    def whole(self, nodes: np.ndarray, num_layers: int, edge_features: bool) -> Any | None:
        """Return a batch of (num,) distinct store ids with all neighbours; None: `exact_pass` is to be used.

        Its outputs are those of the layers over the full graph.
        """

    def exact_pass(self, nodes: np.ndarray, num_layers: int, edge_features: bool) -> EvaluationShare:
        """Return an exact pass over the full neighbourhoods of some store ids, whose `source.nodes` are ascending."""


def closure(
    source: LayerSource, wanted: NodeSet, num_layers: int, most: float = MOST_OF_THE_GRAPH
) -> list[NodeSet | None]:
    """Return the rows that each layer must have so that the last one has some nodes' outputs; every rank calls it.

    Args:
        source: the graph; each rank looks at its own rows, and the bitmaps are joined after each layer.
        wanted: the nodes, this rank's or all ranks' alike.
        most: share of the nodes in (0, 1] above which all rows are taken.

    Returns:
        num_layers + 1 sets, that of layer l's inputs at l and that of the outputs last; None: all nodes.

    Cost: 1.5 bits a node for each set; the edges of the needed rows are read once a layer, up to where all rows are.
    """
    source.union(wanted.bits)
    found: list[NodeSet | None] = [None] * (num_layers + 1)
    current = NodeSet(wanted.bits)
    for layer in range(num_layers, -1, -1):
        if len(current) > most * source.num_nodes:
            break
        found[layer] = current
        if layer:
            current = with_sources(source, current, most)
            source.union(current.bits)
            current = NodeSet(current.bits)
    return found


def with_sources(source: LayerSource, rows: NodeSet, most: float = 1.0) -> NodeSet:
    """Return nodes and their in-neighbours in this rank's rows; beyond a share `most` no more edges are read."""
    bits, count = rows.bits.copy(), len(rows)
    for block in source.blocks(rows):
        count += _mark(bits, np.ascontiguousarray(block.indices))
        if count > most * source.num_nodes:
            break
    return NodeSet(bits)


def select_rows(block: RowBlock, needed: NodeSet) -> RowBlock:
    """Return those rows of a block of consecutive nodes that are needed, with their edges."""
    first, offset = int(block.rows[0]) if len(block.rows) else 0, np.asarray(block.indptr, np.int64)
    chosen = needed.within(first, first + len(block.rows)) - first
    lengths = offset[chosen + 1] - offset[chosen]
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    edges = np.repeat(offset[chosen] - indptr[:-1], lengths) + np.arange(indptr[-1])
    columns = (None if values is None else np.asarray(values)[edges] for values in block[_OF_EDGES])
    return RowBlock(chosen + first, indptr, *columns)


def split_block(block: RowBlock, block_edges: int) -> Iterator[RowBlock]:
    """Split rows into chunks of at most block_edges edges and as many rows; a row with more edges is its own chunk."""
    start, num_rows, offset = 0, len(block.rows), np.asarray(block.indptr, np.int64)
    while start < num_rows:
        stop = int(np.searchsorted(offset, offset[start] + block_edges, side="right")) - 1
        stop = min(max(stop, start + 1), start + block_edges, num_rows)
        edges = slice(int(offset[start]), int(offset[stop]))
        columns = (None if values is None else values[edges] for values in block[_OF_EDGES])
        yield RowBlock(np.asarray(block.rows[start:stop]), offset[start : stop + 1] - offset[start], *columns)
        start = stop


def join_blocks(blocks: Sequence[RowBlock]) -> RowBlock:
    """Return the rows of several blocks as one, in memory of its own, without features of edges."""
    counts = np.concatenate([np.zeros(1, np.int64), *(np.diff(block.indptr) for block in blocks)])
    indices = np.empty(sum(len(block.indices) for block in blocks), blocks[0].indices.dtype)
    np.concatenate([block.indices for block in blocks], out=indices)
    columns = {
        name: None if getattr(blocks[0], name) is None else np.concatenate([getattr(block, name) for block in blocks])
        for name in ("edge_weight", "edge_type")
    }
    rows = np.concatenate([np.asarray(block.rows, np.int64) for block in blocks])
    return RowBlock(rows, np.cumsum(counts), indices, **columns)


@kernel
def _mark(bits, nodes):
    """Set the bits of some nodes and return how many were not set before."""
    count = 0
    for i in range(len(nodes)):
        byte, bit = nodes[i] >> 3, np.uint8(1 << (nodes[i] & 7))
        if not bits[byte] & bit:
            bits[byte] |= bit
            count += 1
    return count


@kernel
def _positions(bits, before, bits_set, nodes):
    out = np.empty(len(nodes), np.int64)
    for i in range(len(nodes)):
        byte = nodes[i] >> 3
        step = byte // 16
        count = before[step] + bits_set[bits[byte] & np.uint8((1 << (nodes[i] & 7)) - 1)]
        for b in range(step * 16, byte):
            count += bits_set[bits[b]]
        out[i] = count
    return out
