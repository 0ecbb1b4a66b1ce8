"""Which nodes lie with which worker: parts, which are ranges of ids, and nodes that every worker holds."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ..graph import id_dtype
from ..jit import kernel


@dataclass(frozen=True)
class PartOwners:
    """Who holds the rows of which part.

    Args:
        part_offsets: (num_parts + 1,) first store id of each part, then num_nodes.
        owner_of: the owner of each part, by any name that `ask` knows.

    Raises:
        ValueError: they are not as many as parts.
    """

    part_offsets: np.ndarray
    owner_of: Sequence[Hashable]

    def __post_init__(self):
        if len(self.owner_of) != len(self.part_offsets) - 1:
            raise ValueError(f"owner_of must name {len(self.part_offsets) - 1} owners, got {len(self.owner_of)}")

    def group(self, nodes: np.ndarray) -> list[tuple[Hashable, np.ndarray]]:
        """Return (owner, positions in nodes) for each owner of any of the nodes, positions ascending."""
        parts = part_of(nodes, self.part_offsets)
        present = np.unique(parts)
        parts_of: dict[Hashable, list[int]] = {}
        for part in present.tolist():
            parts_of.setdefault(self.owner_of[part], []).append(part)
        numbers = np.empty(len(self.owner_of), np.int64)
        for number, owned in enumerate(parts_of.values()):
            numbers[owned] = number
        owner = numbers[parts]
        order = np.argsort(owner, kind="stable")
        cuts = np.searchsorted(owner[order], np.arange(1, len(parts_of)))
        return list(zip(parts_of, np.split(order, cuts), strict=True)) if parts_of else []


class HeldNodes:
    """Nodes of some parts and replicated ones, numbered as one worker holds them: part after part, then the others.

    Args:
        part_offsets: (num_parts + 1,) first store id of each part, then num_nodes.
        parts: held ones.
        replicated: ids held beside them, for example `most_linked`'s.

    Attributes:
        ranges: (first, end) store ids of each held part, ascending.
        beside: (num_beside,) int32 or int64 replicated ids that no held part has, ascending.

    Raises:
        ValueError: there is no such part or node.
    """

    def __init__(self, part_offsets: np.ndarray, parts: Sequence[int], replicated: np.ndarray | Sequence[int] = ()):
        self._part_offsets = np.asarray(part_offsets, np.int64)
        num_parts, num_nodes = len(self._part_offsets) - 1, int(self._part_offsets[-1])
        parts = sorted({int(part) for part in parts})
        if parts and not 0 <= parts[0] <= parts[-1] < num_parts:
            raise ValueError(f"parts must be in [0, {num_parts}), got {parts[0]} to {parts[-1]}")
        self.ranges = [tuple(self._part_offsets[part : part + 2].tolist()) for part in parts]
        self._first = np.full(num_parts, -1, np.int64)
        self._first[parts] = np.cumsum([0, *(end - first for first, end in self.ranges)])[:-1]
        beside = np.unique(np.asarray(replicated, np.int64))
        if len(beside) and not 0 <= beside[0] <= beside[-1] < num_nodes:
            raise ValueError(f"replicated must be ids in [0, {num_nodes}), got {beside[0]} to {beside[-1]}")
        beside = beside[self._first[part_of(beside, self._part_offsets)] < 0]
        self.beside = beside.astype(id_dtype(num_nodes))

    def __len__(self) -> int:
        return sum(end - first for first, end in self.ranges) + len(self.beside)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        return self._part_offsets.nbytes + self._first.nbytes + self.beside.nbytes

    def ids(self) -> np.ndarray:
        """Return (num_held,) int64 store ids in order of their numbers."""
        return np.concatenate([*(np.arange(first, end) for first, end in self.ranges), self.beside.astype(np.int64)])

    def find(self, nodes: np.ndarray) -> np.ndarray:
        """Return (num,) int64: the number of each node, or -1 for one that is not held."""
        numbers = np.empty(len(nodes), np.int64)
        first_replicated = len(self) - len(self.beside)
        _find(nodes, self._part_offsets, self._first, self.beside, first_replicated, numbers)
        return numbers


def part_of(nodes: np.ndarray, part_offsets: np.ndarray) -> np.ndarray:
    """Return (num,) int64 part ids of store ids."""
    return np.searchsorted(part_offsets, nodes, "right") - 1


def most_linked(indptr: np.ndarray, max_bytes: int, id_bytes: int = 4, row_bytes: int = 0) -> np.ndarray:
    """Return the nodes of highest in-degree whose rows fit a budget: these are worth holding on every worker.

    Args:
        indptr: (num_nodes + 1,) row offsets of the CSC.
        max_bytes: Upper bound on the bytes of all their rows, on each worker, >= 0.
        id_bytes: Size of an id in the CSC, bytes.
        row_bytes: Bytes held with each node in addition, for example its features.

    Returns:
        Ids, ascending. Of nodes with equal degree, the smaller id is taken first. Nodes without neighbours are left
        out.

    Raises:
        ValueError: max_bytes is negative.
    """
    if max_bytes < 0:
        raise ValueError(f"replicate_bytes must be >= 0, got {max_bytes}")
    degree = np.diff(indptr)
    order = np.argsort(-degree, kind="stable")[: np.count_nonzero(degree)]
    total = np.cumsum(degree[order] * id_bytes + (8 + id_bytes + row_bytes))
    return np.sort(order[: np.searchsorted(total, max_bytes, "right")])


@kernel
def _find(nodes, part_offsets, first_row, replicated, first_replicated, rows):
    for i in range(len(nodes)):
        node, low, high = nodes[i], 0, len(first_row)
        while high - low > 1:
            middle = (low + high) >> 1
            if part_offsets[middle] <= node:
                low = middle
            else:
                high = middle
        rows[i] = -1
        if node < 0 or node >= part_offsets[-1]:
            continue
        if first_row[low] >= 0:
            rows[i] = first_row[low] + node - part_offsets[low]
            continue
        low, high = 0, len(replicated)
        while low < high:
            middle = (low + high) >> 1
            if replicated[middle] < node:
                low = middle + 1
            else:
                high = middle
        if low < len(replicated) and replicated[low] == node:
            rows[i] = first_replicated + low
