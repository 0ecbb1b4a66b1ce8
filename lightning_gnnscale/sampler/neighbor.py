"""Fan-out sampling of neighbours, hop by hop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..graph import CSC
from ..rng import permutation
from ..triton_kernels.sample_neighbors import Workspace, check_fanouts, sample_neighbors
from .subgraph import Allocate, Subgraph, num_slices, slices

DIRECTIONS = ("in", "both")


def check_direction(direction: str) -> None:
    """Raise ValueError unless the direction is a known one."""
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, got {direction!r}")


class NeighborState(NamedTuple):
    """A part as `NeighborSampler` reads it."""

    csc: CSC
    targets: np.ndarray


@dataclass(frozen=True)
class NeighborSampler:
    """Draw up to `fanouts[h]` neighbours of each node found at hop h - 1, uniformly.

    Args:
        fanouts: neighbours a node for each hop, >= 1, or -1 for all; one entry a layer of the model.
        replace: draw with replacement.
        direction: "in" follows arcs to their sources; "both" also backwards (the part is made symmetric once).

    Raises:
        ValueError: a fan-out is 0 or below -1, none is given, or the direction is unknown.

    Source: Hamilton et al., GraphSAGE, NeurIPS 2017.
    """

    fanouts: Sequence[int]
    replace: bool = False
    direction: str = "in"

    def __post_init__(self):
        object.__setattr__(self, "fanouts", check_fanouts(self.fanouts))
        check_direction(self.direction)

    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        return num_slices(num_targets, batch_size, drop_last)

    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> NeighborState:
        return NeighborState(part.csc, targets)

    def items(self, state: NeighborState, batch_size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
        targets = state.targets
        if order_key is not None:
            targets = targets[permutation(len(targets), order_key)]
        return slices(targets, batch_size, drop_last)

    def draw(
        self,
        state: NeighborState,
        items: np.ndarray,
        key: int,
        workspace: Workspace,
        allocate: Allocate,
        return_e_id: bool,
    ) -> Subgraph:
        drawn = sample_neighbors(
            state.csc,
            items,
            self.fanouts,
            key,
            replace=self.replace,
            return_e_id=return_e_id,
            workspace=workspace,
            allocate=allocate,
        )
        return Subgraph(
            drawn.n_id,
            drawn.edge_index,
            drawn.indptr,
            len(items),
            drawn.e_id,
            drawn.num_sampled_nodes,
            drawn.num_sampled_edges,
            row_scale=_row_scale(state.csc, drawn) if return_e_id else None,
        )


def _row_scale(csc: CSC, drawn) -> np.ndarray:
    """Return (num_targets,) float32: length of the row over arcs drawn from it, 1 for empty rows."""
    targets = drawn.n_id[: len(drawn.indptr) - 1]
    degree = np.asarray(csc.indptr[targets + 1] - csc.indptr[targets])
    return (np.maximum(degree, 1) / np.maximum(np.diff(drawn.indptr), 1)).astype(np.float32)
