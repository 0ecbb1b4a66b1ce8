"""A stored graph as a data set, to partition it again: its nodes, in the order of the store, by the user's ids."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..dataset import CSRArrays, GraphDataset
from ..dataset.columns import EDGE_COLUMNS
from ..edge_stream import EdgeStream
from ..edge_stream.options import StreamOptions
from ..edge_stream.stream import FilteredStream
from .features import Column
from .known_ids import KnownIds
from .reader import PartitionStore

_SLICE_EDGES = 1 << 20


class StoreStream(EdgeStream):
    """The edges of a store, row by row; nodes are store ids, named by the user's ids.

    Args:
        store: A store of one node type and one edge type.
        chunk_edges: See `open_edge_stream`.
    """

    seekable = True

    def __init__(self, store: PartitionStore, chunk_edges: int = 1 << 22):
        manifest = store.manifest
        rules = {name: manifest[name] for name in ("to_undirected", "remove_self_loops")}  # those of later updates too
        options = StreamOptions(store.num_nodes, chunk_edges, "both_ways" if store.symmetric else "directed", **rules)
        super().__init__(str(store.root), np.dtype(np.int64), options, store.num_edges)
        self.node_ids, self._store = KnownIds(store, None).in_order_of(store.original_nid), store

    def source_files(self) -> list[Path]:
        """Return the files of the rows."""
        return [self._store.root / f"{name}.npy" for name in ("csc_indptr", self._store.edge_file)]

    def _identity(self) -> dict:
        return {"store": self._store.manifest_digest}

    def _numbered_blocks(self, first_edge: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        indptr, indices = self._store.csc
        for begin in range(first_edge, self.num_edges, _SLICE_EDGES):
            end = min(begin + _SLICE_EDGES, self.num_edges)
            first = int(np.searchsorted(indptr, begin, side="right")) - 1
            last = int(np.searchsorted(indptr, end, side="left"))
            bounds = np.clip(np.asarray(indptr[first : last + 1]), begin, end)
            rows = np.repeat(np.arange(first, last), np.diff(bounds))
            yield np.asarray(indices[begin:end], np.int64), rows


def load_store(store, name: str | None = None) -> GraphDataset:
    """Return the graph of a store as a data set, without the data set that it was written from.

    Edges are listed as they are stored, added reverses too. Ids stay those of the user. Features stored in 8 or 4 bits
    are decoded, and `feature_storage` names their form.

    Args:
        store: A store, or its folder.
        name: Short name; None: the folder's.

    Raises:
        ValueError: the graph has several node types or edge types.
        PartitionStoreError: the store is missing or damaged.

    Cost: that of opening the store; features in 8 or 4 bits are decoded in memory. Where reverses were added to edges
        with times, a pass over the edges, and half of their values in memory.
    """
    store = store if isinstance(store, PartitionStore) else PartitionStore.open(os.path.expanduser(store))
    if store.schema is not None:
        raise ValueError(
            f"{store.root}: a graph of several node types or edge types cannot be partitioned again from its store: "
            "write its store again, from all of it"
        )
    stream, edge_columns = StoreStream(store), {column: store.edge_column(column) for column in EDGE_COLUMNS}
    if (
        stream.to_undirected and store.edge_time is not None
    ):  # where every edge is an event, and so would be its reverse
        kept = np.concatenate([np.empty(0, bool), *(chunk.src <= chunk.dst for chunk in stream.chunks())])
        edge_columns = {name: rows if rows is None else rows[kept] for name, rows in edge_columns.items()}
        stream = FilteredStream(stream, lambda src, dst, _: src <= dst, {"keep": "src <= dst"})
    return GraphDataset(
        name or store.root.name,
        stream,
        features=_rows(store.features),
        labels=store.labels,
        masks={mask: np.array(rows) for mask, rows in store.masks.items()},
        feature_storage=store.feature_storage,
        edge_storage=store.edge_storage,
        node_time=store.node_time,
        regression=store.regression,
        node_columns={column: _rows(rows) for column, rows in store.node_columns.items()},
        source={"store": store.manifest_digest},
        **edge_columns,
    )


def _rows(column: Column | None):
    """Return the rows of a column as a data set holds them."""
    if column is None:
        return None
    if column.is_sparse:
        return CSRArrays(column.indptr, column.indices, column.data, (column.num_rows, column.dim))
    return column.array if column.storage is None else column.read(np.arange(column.num_rows))
