"""What the outputs of a few nodes need, read from a store: their full neighbourhoods, or sampled ones."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..edge_stream import NodeIds
from ..errors import short
from ..loader.batch_columns import tensors
from ..loader.batch_maker import BatchMaker
from ..loader.staged_part import PartStager
from ..model.layer_source import NodeSet, RowBlock, select_rows
from ..partition_store import PartitionStore
from ..partition_store.known_ids import KnownIds
from ..partition_store.part_graph import load_whole_graph
from ..rng import batch_key
from ..sampler import NeighborSampler
from ..sampler.minibatch import MiniBatch
from .layer_source import EvaluationPass, StoreLayerSource

MOST_EDGES = 1 << 16  # of neighbourhoods that are one batch


class FewNodes:
    """The full neighbourhoods of some nodes, in memory, as a `LayerSource` of their own; nodes are numbered from 0.

    Numbers are in the order of store ids, so that sums have the order that they have over the whole graph. One process
    reads it by itself: nothing waits for another rank.

    Args:
        whole: The graph; rows, features and degrees are read from it.
        nodes: (num,) store ids.
        num_layers: Layers of the model, which are the hops that are read.

    Attributes:
        nodes: (num_nodes,) ascending store ids of what is read.

    Cost: the edges of all nodes within num_layers - 1 hops; the last hop is read for its features alone.
    """

    def __init__(self, whole: StoreLayerSource, nodes: np.ndarray, num_layers: int):
        self._whole, held = whole, np.unique(nodes).astype(np.int64)
        inner, frontier = held[:0], held
        for _ in range(num_layers):
            inner = held
            sources = np.unique(whole.rows(frontier).indices).astype(np.int64)
            frontier = np.setdiff1d(sources, held, assume_unique=True)
            held = np.union1d(held, frontier)
        self.nodes, self.num_nodes = held, len(held)
        self.row_bytes, self.has_weights = whole.row_bytes, whole.has_weights
        rows = whole.rows(inner)
        counts = np.zeros(len(held) + 1, np.int64)
        counts[np.searchsorted(held, inner) + 1] = np.diff(rows.indptr)  # those of the last hop are left out
        local = np.searchsorted(held, rows.indices)
        self._rows = rows._replace(rows=np.arange(len(held)), indptr=np.cumsum(counts), indices=local)

    def places(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (num,) numbers of some of the nodes by their store ids."""
        return np.searchsorted(self.nodes, nodes)

    def store_ids(self, nodes: np.ndarray) -> np.ndarray:
        return self.nodes[nodes]

    def blocks(self, needed: NodeSet | None = None) -> Iterator[RowBlock]:
        yield self._rows if needed is None else select_rows(self._rows, needed)

    def counts(self, needed: NodeSet | None = None) -> tuple[int, int]:
        (block,) = self.blocks(needed)
        return len(block.rows), len(block.indices)

    def spool(self) -> None:
        return None

    def gather(self, nodes: np.ndarray, table: np.ndarray | None = None) -> Any:
        return self._whole.gather(self.nodes[nodes]) if table is None else table[nodes]

    def expect(self, nodes: np.ndarray, table: np.ndarray | None = None) -> None:
        if table is None:
            self._whole.expect(self.nodes[nodes])

    def write(self, table: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
        table[rows] = values

    def union(self, bits: np.ndarray) -> None:
        pass

    def degree(self, nodes: np.ndarray) -> np.ndarray:
        return self._whole.degree(self.nodes[nodes])

    def self_weight(self, nodes: np.ndarray) -> np.ndarray | None:
        return self._whole.self_weight(self.nodes[nodes])

    def node_type(self, nodes: np.ndarray) -> np.ndarray | None:
        return self._whole.node_type(self.nodes[nodes])

    def table(self, name: str, dim: int, num_rows: int | None = None, dtype: type = np.float32) -> np.ndarray:
        return np.empty((self.num_nodes if num_rows is None else num_rows, dim), dtype)

    def barrier(self) -> None:
        pass


class StoreNodes:
    """A store as the prediction of a few of its nodes reads it: implements the model's `NodeReader`.

    What is opened is kept, so that further calls read only what they need.

    Args:
        store: Any version.

    Cost: at the first call of a store with ids of its own a table of them; of each fan-outs, and of exact outputs, a
        read of 8 bytes a node for degrees, 4 of which are kept.
    """

    def __init__(self, store: PartitionStore):
        self._store = store
        self._known: KnownIds | None = None
        self._sources: dict[bool, StoreLayerSource] = {}
        self._batches: dict[tuple[str, bool], tuple[BatchMaker, Any]] = {}  # by fan-outs, and with edge features or not

    @classmethod
    def of(cls, store: PartitionStore) -> "StoreNodes":
        """Return the reader of a store, which keeps it."""
        if "nodes" not in store.kept:
            store.kept["nodes"] = cls(store)
        return store.kept["nodes"]

    def store_ids(self, nodes: Any, by_store_id: bool) -> np.ndarray:
        """Return (num,) int64 store ids of some of the user's ids, or of store ids, in any order, repeated or not.

        Raises:
            ValueError: an id that the store does not have, or a graph of several node types, whose ids say no node.
        """
        store, nodes = self._store, np.asarray(nodes)
        if by_store_id:
            return _checked(store, nodes)
        if store.schema is not None and store.schema.num_node_types > 1:
            raise ValueError("nodes: an id counts within its node type here: give store ids, with by_store_id=True")
        if not nodes.size:
            return np.empty(0, np.int64)
        if nodes.ndim != 1 or nodes.dtype.kind not in "iuUO":
            raise ValueError(f"nodes must be a list of ids, integers or strings, got {short(nodes)}")
        if self._known is None:
            self._known = KnownIds(store, None)
        each, places = np.unique(nodes, return_inverse=True)
        numbers = self._known.index_of("nodes", NodeIds.of(each))
        return np.asarray(store.store_nid[numbers], np.int64)[places.reshape(-1)]

    def exact_pass(self, nodes: np.ndarray, num_layers: int, edge_features: bool) -> EvaluationPass:
        """Return the exact pass of one process over the full neighbourhoods of some nodes: its source is `FewNodes`."""
        if edge_features not in self._sources:
            parts = list(range(self._store.num_parts))
            self._sources[edge_features] = StoreLayerSource(self._store, parts, None, edge_features=edge_features)
        source = FewNodes(self._sources[edge_features], nodes, num_layers)
        wanted = NodeSet.of(source.places(nodes), source.num_nodes)
        return EvaluationPass(source, "few", None, {}, sample=wanted)

    def whole(self, nodes: np.ndarray, num_layers: int, edge_features: bool) -> MiniBatch | None:
        """Return a batch of some nodes with all neighbours; None: they have more than `MOST_EDGES`, types or times.

        It is made at once, in less time than a pass, which reads and computes larger neighbourhoods in pieces.
        """
        store = self._store
        typed = store.schema is not None and store.schema.num_node_types + store.schema.num_edge_types > 2
        if typed or store.has["edge_time"] or not _has_few_edges(store, nodes, num_layers):
            return None
        return self.sampled(nodes, [-1] * num_layers, 0, edge_features)

    def sampled(self, nodes: np.ndarray, fanouts: Sequence[int], seed: int, edge_features: bool) -> MiniBatch:
        """Return a batch of some nodes with sampled neighbours, which are a function of a node's id, fan-outs and seed.

        Args:
            nodes: (num,) store ids, each once.
            fanouts: As of `NeighborSampler`.
            edge_features: Whether edges have their features.
        """
        name, store = (repr(fanouts), edge_features), self._store
        if name not in self._batches:
            sampler = NeighborSampler(fanouts, device="cpu")
            edges = store.edge_columns(["edge_time"] if edge_features else ["edge_time", "edge_features"])
            stage = PartStager(lambda part: load_whole_graph(store, part), {0: np.arange(0)}, sampler, {}, 0, edges)
            self._batches[name] = BatchMaker(sampler, store.features), stage(0)
        maker, staged = self._batches[name]
        batch = maker.build(staged, nodes, batch_key(seed, 0, 0, 0))
        columns = store.node_columns.items()
        batch.columns = {column: tensors(values.read(batch.host_ids)) for column, values in columns}
        return batch


def _checked(store: PartitionStore, nodes: np.ndarray) -> np.ndarray:
    if nodes.ndim != 1 or (nodes.size and nodes.dtype.kind not in "iu"):
        raise ValueError(f"nodes must be a list of store ids, got {short(nodes)}")
    if nodes.size and not (nodes.min() >= 0 and nodes.max() < store.num_nodes):
        bad = nodes[(nodes < 0) | (nodes >= store.num_nodes)][0]
        raise ValueError(f"nodes: store ids must be in [0, {store.num_nodes}), got {bad}")
    return nodes.astype(np.int64)


def _has_few_edges(store: PartitionStore, nodes: np.ndarray, num_layers: int) -> bool:
    """Whether the neighbourhoods of some distinct nodes have at most `MOST_EDGES` edges, those of the last hop too."""
    indptr, indices = store.csc
    held, frontier, total = np.empty(0, np.int64), nodes, 0
    for hop in range(num_layers):
        begins = np.asarray(indptr[frontier])
        counts = np.asarray(indptr[frontier + 1]) - begins
        total += int(counts.sum())
        if total > MOST_EDGES:
            return False
        if hop < num_layers - 1:
            held = np.concatenate([held, frontier])
            places = np.repeat(begins - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
            sources = np.asarray(indices[places + np.arange(len(places))])
            frontier = np.setdiff1d(sources, held).astype(np.int64)
    return True
