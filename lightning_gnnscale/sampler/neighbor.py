"""Fan-out sampling of neighbours, hop by hop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..graph import CSC
from ..triton_kernels.sample_neighbors import Workspace, check_fanouts, sample_neighbors
from .locality import LocalityBias
from .locality_index import PreferredRows
from .subgraph import Allocate, Subgraph, num_slices, row_scale, seed_slices

DIRECTIONS = ("in", "both")


def check_direction(direction: str) -> None:
    """Raise ValueError unless the direction is a known one."""
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, got {direction!r}")


class NeighborState(NamedTuple):
    """A part as `NeighborSampler` reads it.

    Attributes:
        preferred: its rows with the preferred neighbours first, None without locality.
    """

    csc: CSC
    targets: np.ndarray
    preferred: PreferredRows | None = None


@dataclass(frozen=True)
class NeighborSampler:
    """Draw up to `fanouts[h]` neighbours of each node found at hop h - 1, uniformly or near rows rather than far ones.

    With `locality` of a scale above 1, arcs carry averaging weights 1 / (length of the row * chance of the arc): sums
    weighted by them stay unbiased means. Fixed draws a row, exact chances: see `sample_neighbors`.

    Args:
        fanouts: neighbours a node for each hop, >= 1, or -1 for all; one entry a layer of the model.
        replace: draw with replacement.
        direction: "in" follows arcs to their sources; "both" also backwards (the part is made symmetric once).
        locality: prefer near rows; not together with `replace`.

    Raises:
        ValueError: a fan-out is 0 or below -1, none is given, the direction is unknown, or locality with replacement.

    Cost: with locality 4 bytes an arc and hop, in memory for a part, in files beside the store for the whole graph.
    Source: Hamilton et al., GraphSAGE, NeurIPS 2017; locality: Song and Jiang, ICS 2022, equation (8).
    """

    fanouts: Sequence[int]
    replace: bool = False
    direction: str = "in"
    locality: LocalityBias | None = None

    def __post_init__(self):
        object.__setattr__(self, "fanouts", check_fanouts(self.fanouts))
        check_direction(self.direction)
        if self.replace and self.locality is not None:
            raise ValueError("replace must be False with locality, got True: rows are drawn without replacement")

    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        return num_slices(num_targets, batch_size, drop_last)

    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> NeighborState:
        if self.locality is None:
            return NeighborState(part.csc, targets)
        preferred = PreferredRows(part, self.locality, len(self.fanouts))
        if self.locality.scale > 1:
            preferred.split(with_position=getattr(part, "arc_id", None) is not None)
        return NeighborState(part.csc, targets, preferred)

    def items(self, state: NeighborState, batch_size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
        return seed_slices(state.targets, batch_size, drop_last, order_key)

    def draw(
        self,
        state: NeighborState,
        items: np.ndarray,
        key: int,
        workspace: Workspace,
        allocate: Allocate,
        return_e_id: bool,
    ) -> Subgraph:
        scale = 1.0 if self.locality is None else self.locality.scale
        drawn = sample_neighbors(
            state.csc,
            items,
            self.fanouts,
            key,
            replace=self.replace,
            return_e_id=return_e_id,
            workspace=workspace,
            allocate=allocate,
            split=state.preferred.split(return_e_id) if scale > 1 else None,
            scale=scale,
        )
        return Subgraph(
            drawn.n_id,
            drawn.edge_index,
            drawn.indptr,
            len(items),
            drawn.e_id,
            drawn.num_sampled_nodes,
            drawn.num_sampled_edges,
            edge_weight=drawn.edge_weight,
            row_scale=row_scale(state.csc, drawn) if return_e_id else None,
            averaging_weights=drawn.edge_weight is not None,
        )
