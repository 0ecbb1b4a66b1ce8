"""Feature rows in the memories of several workers: those of others are asked for first, own ones copied meanwhile."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import GNNScaleError
from ..partition_store.features import CSRFeatures, DenseFeatures, FeatureTable, SparseRows, merge_rows
from .held_nodes import HeldNodes, PartOwners


class Rows(Protocol):
    """Rows on their way; every `concurrent.futures.Future` is one."""

    def result(self) -> np.ndarray | SparseRows:
        """Return the rows of the nodes asked for, in their order; waits for them."""


class HeldFeatures:
    """Feature rows of some parts and of the nodes that every owner holds; may be read by several threads.

    Args:
        features: Feature table of the whole graph, by store id; only the rows of held nodes are read.
        part_offsets, parts, replicated: See `HeldNodes`.

    Attributes:
        nodes: The held nodes.
        num_bytes: Memory that the rows take, bytes.
    """

    def __init__(
        self,
        features: FeatureTable,
        part_offsets: np.ndarray,
        parts: Sequence[int],
        replicated: np.ndarray | Sequence[int] = (),
    ):
        self.nodes = HeldNodes(part_offsets, parts, replicated)
        rows = features.gather(self.nodes.ids())
        self._table = (
            CSRFeatures(rows.indptr, rows.indices, rows.data, rows.dim)
            if isinstance(rows, SparseRows)
            else DenseFeatures(rows)
        )

    @property
    def num_bytes(self) -> int:
        table = self._table
        arrays = (table.indptr, table.indices, table.data) if table.is_sparse else (table.array,)
        return self.nodes.num_bytes + sum(array.nbytes for array in arrays)

    def gather(self, nodes: np.ndarray, numbers: np.ndarray | None = None) -> np.ndarray | SparseRows:
        """Return the rows of nodes, bit for bit: what an owner answers with.

        Args:
            nodes: (num,) store ids.
            numbers: (num,) from `nodes.find`, where they are known.

        Raises:
            GNNScaleError: one is not held.
        """
        numbers = self.nodes.find(nodes) if numbers is None else numbers
        if len(numbers) and numbers.min() < 0:
            raise GNNScaleError(f"row {nodes[numbers.argmin()]} is asked of an owner that does not hold it")
        return self._table.gather(numbers)


@dataclass(frozen=True)
class DistributedFeatures:
    """The features of the whole graph, held by several workers: a `FeatureTable`.

    Args:
        held: The rows that this worker holds.
        owners: Which worker owns each part.
        ask: Maps (owner, store ids) to rows on their way; returns at once. The owner answers with `held.gather(nodes)`.
        num_rows, dim, dtype, is_sparse: Those of the whole feature table.
    """

    held: HeldFeatures
    owners: PartOwners
    ask: Callable[[Hashable, np.ndarray], Rows]
    num_rows: int
    dim: int
    dtype: np.dtype
    is_sparse: bool

    @classmethod
    def of(cls, features: FeatureTable, held: HeldFeatures, owners: PartOwners, ask: Any) -> "DistributedFeatures":
        """Return the view of a table whose rows the workers hold."""
        return cls(held, owners, ask, features.num_rows, features.dim, np.dtype(features.dtype), features.is_sparse)

    def gather(self, nodes: np.ndarray, out: np.ndarray | None = None) -> np.ndarray | SparseRows:
        """Return rows, bit for bit what is stored.

        Args:
            nodes: (num,) integers in [0, num_rows).
            out: (num, dim) of the stored dtype, filled in place where given; not for sparse rows.

        Raises:
            GNNScaleError: an owner answers with more or fewer rows than were asked for; and whatever `result()` raises.
        """
        nodes = np.asarray(nodes)
        numbers = self.held.nodes.find(nodes)
        foreign, own = np.flatnonzero(numbers < 0), np.flatnonzero(numbers >= 0)
        asked = [
            (owner, foreign[chosen], self.ask(owner, nodes[foreign[chosen]]))
            for owner, chosen in self.owners.group(nodes[foreign])
        ]
        pieces = [(own, self.held.gather(nodes[own], numbers[own]))]
        for owner, places, rows in asked:
            pieces.append((places, rows.result()))
            self._check(owner, *pieces[-1])
        if self.is_sparse:
            return merge_rows([rows for _, rows in pieces], [places for places, _ in pieces])
        out = np.empty((len(nodes), self.dim), self.dtype) if out is None else out
        for places, rows in pieces:
            out[places] = rows
        return out

    def _check(self, owner: Hashable, places: np.ndarray, rows: np.ndarray | SparseRows) -> None:
        num = rows.num_rows if isinstance(rows, SparseRows) else len(rows)
        if num != len(places):
            raise GNNScaleError(f"{owner} sent {num} rows, {len(places)} were asked for")
