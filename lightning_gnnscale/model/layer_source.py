"""What layer-wise inference asks of whoever holds the graph: protocols that `datamodule/` implements."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np


class RowBlock(NamedTuple):
    """Complete rows of the full graph, in store ids.

    Attributes:
        rows: (num_rows,) int64, the nodes, each in one block of one rank.
        indptr: (num_rows + 1,) int64, from 0.
        indices: (num_arcs,) int32 or int64, in-neighbours.
        edge_weight: (num_arcs,) floating or None.
    """

    rows: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    edge_weight: np.ndarray | None = None


class LayerSource(Protocol):
    """The graph as one rank sees it: its own rows, and any node's features, degree and current representation."""

    num_nodes: int

    def blocks(self) -> Iterator[RowBlock]:
        """Yield this rank's rows; over all ranks each node comes once. Called several times, same order each time.

        Arcs may be mapped files: they are read where they are used, and passes over the rows alone read none.
        """

    def gather(self, nodes: np.ndarray) -> Any:
        """Return the features of (num,) int64 nodes: (num, dim) tensor or array, or sparse rows."""

    def degree(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (num,) in-degrees of nodes in the full graph."""

    def table(self, name: str, dim: int) -> np.ndarray:
        """Return a writable (num_nodes, dim) float32 array that all ranks of the host share.

        All ranks ask alike, and all rows are written before any is read. Asking for a name again starts a new table
        in the place of the old one, which no rank reads any more.
        """

    def barrier(self) -> None:
        """Wait until every rank is here: what each wrote to a table can then be read by all."""


class LinkSource(Protocol):
    """One rank's share of the links that are evaluated.

    Attributes:
        num_negatives: false ends of each link.
    """

    num_negatives: int

    def chunks(self, num_links: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (pairs (2, num), negatives (num, num_negatives)) in store ids, num <= num_links; -1 for no negative."""


class EvaluationPass(Protocol):
    """One rank's share of an exact evaluation: what the Lightning modules take in place of a mini-batch.

    Attributes:
        source: the graph; its blocks are the rows that this rank answers for.
        split: "val", "test", or None: predict.
        labels: (num_nodes,) or (num_nodes, num_labels) integers in store order, -1 = unknown; None: predict only.
        masks: name ("train", "val", "test") to (num_nodes,) bool, in store order.
        links: what `LinkPredictor` ranks, or None.
    """

    source: LayerSource
    split: str | None
    labels: np.ndarray | None
    masks: Mapping[str, np.ndarray]
    links: LinkSource | None
