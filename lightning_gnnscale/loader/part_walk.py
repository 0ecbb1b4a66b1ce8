"""The walk of one rank over its parts: which batch comes at which position of an epoch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from ..graph import CSC


class Position(NamedTuple):
    """One batch of the walk.

    Attributes:
        visit: number of the visit in the epoch; a pass over a part is a visit of its own here.
        part: part id.
        epoch: the key's epoch: Lightning's epoch times passes, plus the pass.
        batch: number of the batch in the visit.
        following: part to be loaded by the time that this batch trains, or None.
    """

    visit: int
    part: int
    epoch: int
    batch: int
    following: int | None = None


@dataclass(frozen=True)
class PartWalk:
    """All batches of a rank's epoch, part after part, `passes` times each.

    Args:
        parts: the rank's parts in the order of their visits; parts without batches are passed over.
        num_batches: batches of one pass over each part.
        passes: passes over a part before the next one, >= 1.
    """

    parts: Sequence[int]
    num_batches: Mapping[int, int]
    passes: int = 1
    parts_open: ClassVar[int] = 2  # the one that trains and the next one

    def __len__(self) -> int:
        return self.passes * sum(self.num_batches[part] for part in self.parts)

    def most_held(self, sizes: np.ndarray, parts_held: int) -> int:
        """Return the largest sum over parts that are in memory together.

        Args:
            sizes: (num_parts,) of each part, in the order of `parts`.
            parts_held: how many follow each other in memory.
        """
        held = min(parts_held, len(sizes))
        return int(np.convolve(sizes, np.ones(held, np.int64), "valid").max()) if held else 0

    def positions(self, epoch: int, start: int = 0) -> Iterator[Position]:
        """Yield the batches of an epoch from position `start` on, without touching those before it."""
        visit = 0
        coming = [part for part in self.parts if self.num_batches[part]]
        following = dict(pairwise(coming))
        for part in coming:
            for number in range(self.passes):
                size = self.num_batches[part]
                for batch in range(min(start, size), size):
                    yield Position(visit, part, epoch * self.passes + number, batch, following.get(part))
                start = max(start - size, 0)
                visit += 1


def parts_of_rank(num_parts: int, rank: int, world_size: int) -> list[int]:
    """Return the parts of a rank: rank, rank + world_size, ..."""
    return list(range(rank, num_parts, world_size))


@dataclass(frozen=True)
class WholeGraph:
    """The full graph in the form of a part: what sampling across parts reads.

    Attributes:
        part: Number that stands for the part in keys: the rank.
        csc: CSC of the store; positions in it are arc positions.
        degree: (num_nodes,) in-degree.
        symmetric: Whether every arc has its reverse.
        root, fingerprint: Folder and fingerprint of the store that holds the graph; None and "" if no store holds it.
    """

    part: int
    csc: CSC
    degree: np.ndarray
    core_start: int = 0
    symmetric: bool = False
    root: Path | None = None
    fingerprint: str = ""

    @classmethod
    def of(
        cls, csc: CSC, part: int, symmetric: bool = False, root: Path | None = None, fingerprint: str = ""
    ) -> "WholeGraph":
        """Return the view of a CSC for one rank; reads `indptr` once for the degrees."""
        degree = np.diff(csc.indptr).astype(np.int32)
        return cls(part, csc, degree, symmetric=symmetric, root=root, fingerprint=fingerprint)

    @classmethod
    def of_store(cls, store, part: int) -> "WholeGraph":
        """Return the view of a `PartitionStore` for one rank."""
        return cls.of(store.csc, part, store.symmetric, store.root, store.layout_fingerprint)

    @property
    def num_core(self) -> int:
        return self.csc.num_rows

    @property
    def num_local(self) -> int:
        return self.csc.num_rows

    @property
    def halo_nodes(self) -> np.ndarray:
        return np.empty(0, np.int64)

    def symmetrised(self) -> "WholeGraph":
        """Return the graph where it has both directions already.

        Raises:
            ValueError: it has not; both directions of a whole graph belong into its store.
        """
        if self.symmetric:
            return self
        raise ValueError('direction="both" needs scope="part", or a store written with to_undirected=True')
