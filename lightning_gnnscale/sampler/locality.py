"""Which neighbours are close: the nodes whose rows lie on a group of devices, and the nodes that lead to them."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import PlacementError, short
from ..graph import CSC
from ..jit import kernel
from ..placement.placement import Placement


@dataclass(frozen=True)
class LocalityScale:
    """The scale s of `LocalityBias` and what Algorithm 2 remembers; `after_epoch` gives the next value.

    Args:
        lower, upper: shares of an epoch's time spent on loading, 0 <= lower <= upper <= 1; between them s is kept.
        max_scale: largest s, finite and >= 1.
        scale: s, in [1, max_scale].
        previous: s before the last doubling.
        fixed: s stays for good.

    Raises:
        ValueError: a value out of range.

    Source: Song and Jiang, Rethinking graph data placement for GNN training on multiple GPUs, ICS 2022, Algorithm 2.
    Differs: a doubling ends at max_scale where that is no power of two.
    """

    lower: float = 0.15
    upper: float = 0.20
    max_scale: float = 8.0
    scale: float = 1.0
    previous: float = 1.0
    fixed: bool = False

    def __post_init__(self):
        if not 0 <= self.lower <= self.upper <= 1:
            raise ValueError(
                f"lower and upper must be shares of time with 0 <= lower <= upper <= 1, got {self.lower} and "
                f"{self.upper}: the defaults are 0.15 and 0.2"
            )
        if not (math.isfinite(self.max_scale) and self.max_scale >= 1):
            raise ValueError(f"max_scale must be a finite number >= 1, got {self.max_scale}: the default is 8")
        for name in ("scale", "previous"):
            if not 1 <= getattr(self, name) <= self.max_scale:
                raise ValueError(
                    f"{name} must be in [1, max_scale {self.max_scale}], got {getattr(self, name)}: start at 1"
                )

    def after_epoch(self, loading_share: float) -> "LocalityScale":
        """Return the value for the next epoch.

        Args:
            loading_share: loading time over epoch time, in [0, 1].

        Raises:
            ValueError: loading_share is outside [0, 1], or NaN.
        """
        if not 0 <= loading_share <= 1:
            raise ValueError(f"loading_share must be in [0, 1], got {loading_share}: loading time over epoch time")
        if self.fixed:
            return self
        if self.scale >= self.max_scale:
            return replace(self, fixed=True)
        if loading_share > self.upper:
            return replace(self, previous=self.scale, scale=min(2 * self.scale, self.max_scale))
        if loading_share < self.lower and self.scale != 1:
            return replace(self, scale=(self.scale + self.previous) / 2)
        return replace(self, fixed=True)


@dataclass(frozen=True)
class LocalityBias:
    """Prefer neighbours whose feature rows a device reads without going through the host.

    The last hop of a sampler, which finds the input rows, prefers the nodes of Q_1: all rows on the devices of the
    reading device's group. The hop before it prefers Q_2, the nodes that lead to them, and so on (`neighbor_sets`). A
    sampler multiplies the probability of a preferred neighbour by `scale` and weighs edges by one over their
    probability, so that aggregation stays unbiased.

    Args:
        placement: Placement of the feature rows.
        scale: The factor s, >= 1, finite; 1 samples the same as without a bias.
        neighbor_set_size: Nodes kept in Q_2 and in each later set, >= 1.
        device: The reading device, in [0, num_devices).
        folder: Folder that keeps the index files of the whole graph's rows; None: `locality` under the store's root.
            The index of a graph that is in no store stays in memory unless a folder is given.

    Raises:
        ValueError: an argument outside its range.

    Source: Song and Jiang, ICS 2022, section 5, equation (8).
    """

    placement: Placement
    scale: float = 1.0
    neighbor_set_size: int = 8192
    device: int = 0
    folder: str | None = None

    def __post_init__(self):
        if not (math.isfinite(self.scale) and self.scale >= 1):
            raise ValueError(f"scale must be >= 1 and finite, got {self.scale}")
        _check_size(self.neighbor_set_size, "neighbor_set_size")
        if not 0 <= self.device < self.placement.num_devices:
            raise ValueError(f"device must be in [0, {self.placement.num_devices}), got {self.device}")

    # A placement is compared by identity: its arrays have no equality of their own.
    def __eq__(self, other) -> bool:
        return isinstance(other, LocalityBias) and self._value() == other._value()

    def __hash__(self) -> int:
        return hash(self._value())

    def _value(self) -> tuple:
        return id(self.placement), self.scale, self.neighbor_set_size, self.device, self.folder

    @property
    def rows(self) -> np.ndarray:
        """(num_rows,) int64 store ids, ascending: the rows on the devices of the reading device's group."""
        group = next(group for group in self.placement.groups if self.device in group)
        return np.unique(np.concatenate([self.placement.rows[device] for device in group])).astype(np.int64)

    def check_store(self, num_nodes: int, fingerprint: str = "") -> None:
        """Refuse a placement that was made for another store.

        Args:
            num_nodes: Number of nodes in the store.
            fingerprint: Fingerprint of the store, "" if it has none.

        Raises:
            PlacementError: the sizes or the fingerprints differ.
        """
        placed = self.placement
        if placed.num_nodes != num_nodes:
            raise PlacementError(
                f"the placement of locality is for {placed.num_nodes} nodes, the graph has {num_nodes}: place its rows "
                "again"
            )
        if placed.fingerprint and fingerprint and placed.fingerprint != fingerprint:
            raise PlacementError(
                f"the placement of locality was made for the store {placed.fingerprint[:12]}, this one is "
                f"{fingerprint[:12]}: place its rows again"
            )

    def neighbor_sets(self, graph: Any, num_hops: int) -> list[np.ndarray]:
        """Return the preferred nodes of each hop of a sampler, first hop first.

        Args:
            graph: a `PartGraph` (paths are counted inside the part) or a `WholeGraph`.
            num_hops: hops of the sampler.

        Returns:
            num_hops arrays of ids of the graph, ascending: Q_num_hops, ..., Q_2, Q_1.

        Raises:
            PlacementError: the graph is a whole one, and the placement was made for another.
        """
        if hasattr(graph, "fingerprint"):
            self.check_store(graph.csc.num_rows, graph.fingerprint)
        rows = local_ids(graph, self.rows)
        return neighbor_sets(graph.csc, rows, num_hops, self.neighbor_set_size)[::-1]


def local_ids(graph: Any, nodes: np.ndarray) -> np.ndarray:
    """Return the local ids, ascending, of those of the given nodes that a graph holds.

    Args:
        graph: a `PartGraph` or `WholeGraph`.
        nodes: (num,) store ids, distinct, ascending.
    """
    inside = nodes[(nodes >= graph.core_start) & (nodes < graph.core_start + graph.num_core)] - graph.core_start
    _, halo, _ = np.intersect1d(graph.halo_nodes, nodes, assume_unique=True, return_indices=True)
    return np.concatenate([inside, graph.num_core + halo])


def neighbor_sets(csc: CSC, rows: np.ndarray, num_sets: int, size: int) -> list[np.ndarray]:
    """Return Q_1, Q_2, ...: the rows themselves, then the nodes with the most paths to them.

    With v_1 = 1 on the rows and 0 elsewhere, v_(l+1) = v_l A, where A has the edges of the graph and one self-loop a
    node (a node that is found is an input too): v_(l+1)(u) adds up v_l over u and its in-neighbours. Q_(l+1) holds
    the `size` nodes of the largest v_(l+1) > 0, ties to the lowest id; v itself is not truncated.

    Args:
        csc: the graph; arrays or memory maps.
        rows: (num_rows,) distinct ids in [0, num_nodes).
        num_sets: sets to return, >= 1.
        size: nodes kept in Q_2 and later, >= 1.

    Returns:
        num_sets arrays of int64 ids, ascending.

    Raises:
        ValueError: num_sets or size below 1, a row out of range.

    Cost: one pass over the edges for each set after the first; 16 bytes a node.
    Source: Song and Jiang, ICS 2022, section 5.
    """
    _check_size(num_sets, "num_sets")
    _check_size(size, "size")
    rows = np.sort(np.asarray(rows, np.int64))
    if len(rows) and not (rows[0] >= 0 and rows[-1] < csc.num_rows):
        raise ValueError(f"rows must be in [0, {csc.num_rows}), got {rows[0]} to {rows[-1]}")
    sets, paths = [rows], np.zeros(csc.num_rows)
    paths[rows] = 1
    indptr, indices = np.asarray(csc.indptr), np.asarray(csc.indices)
    for _ in range(num_sets - 1):
        paths = _longer_paths(indptr, indices, paths)
        sets.append(_best(paths, size))
    return sets


def _best(paths: np.ndarray, size: int) -> np.ndarray:
    """Return the ids, ascending, of the `size` largest positive values; ties to the lowest id."""
    positive = np.flatnonzero(paths)
    if len(positive) <= size:
        return positive
    least = np.partition(paths[positive], len(positive) - size)[len(positive) - size]
    above = paths > least
    above[np.flatnonzero(paths == least)[: size - np.count_nonzero(above)]] = True
    return np.flatnonzero(above)


def _check_size(value: int, name: str) -> None:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {short(value)}")


@kernel
def _longer_paths(indptr, indices, paths):
    """Return v A for v = paths; a self-loop that the graph has already counts once."""
    longer = paths.copy()
    for node in range(len(paths)):
        total = 0.0
        for edge in range(indptr[node], indptr[node + 1]):
            if indices[edge] != node:
                total += paths[indices[edge]]
        longer[node] += total
    return longer
