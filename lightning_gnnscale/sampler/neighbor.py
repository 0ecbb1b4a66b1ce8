"""Fan-out sampling of neighbours, hop by hop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..graph import CSC
from ..triton_kernels.sample_neighbors import HopSampling, Workspace, check_fanouts
from .locality import LocalityBias
from .locality_index import PreferredRows
from .protocol import Allocate, Subgraph, num_slices, row_scale, seed_slices

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
        """Return the batches of one pass: `batch_size` target nodes each."""
        return num_slices(num_targets, batch_size, drop_last)

    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> NeighborState:
        """Return the part's arcs; with `locality` rows that have the preferred neighbours first."""
        if self.locality is None:
            return NeighborState(part.csc, targets)
        preferred = PreferredRows(part, self.locality, len(self.fanouts))
        if self.locality.scale > 1:
            preferred.split(with_position=getattr(part, "arc_id", None) is not None)
        return NeighborState(part.csc, targets, preferred)

    def items(self, state: NeighborState, batch_size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
        """Return the seeds of each batch, target nodes in the order of the key."""
        return seed_slices(state.targets, batch_size, drop_last, order_key)

    def draw(
        self,
        state: NeighborState,
        items: np.ndarray,
        key: int,
        workspace: Workspace,
        allocate: Allocate,
        return_e_id: bool,
        with_row_scale: bool = True,
    ) -> Subgraph:
        """Return a batch; arguments as `BatchSampler` has them.

        Args:
            with_row_scale: False leaves out `row_scale`, which only stored edge weights ask for.
        """
        hops = self.begin(state, items, key, workspace, return_e_id)
        for _ in self.fanouts:
            hops.sample()
        return self.finish(state, hops, allocate, with_row_scale)

    def begin(
        self, state: NeighborState, seeds: np.ndarray, key: int, workspace: Workspace, return_e_id: bool
    ) -> HopSampling:
        """Return a batch to be sampled one hop at a time; arguments as for `draw`."""
        scale = 1.0 if self.locality is None else self.locality.scale
        split = state.preferred.split(return_e_id) if scale > 1 else None
        return HopSampling(
            state.csc,
            seeds,
            self.fanouts,
            key,
            workspace=workspace,
            replace=self.replace,
            return_e_id=return_e_id,
            split=split,
            scale=scale,
        )

    def finish(
        self, state: NeighborState, hops: HopSampling, allocate: Allocate, with_row_scale: bool = True
    ) -> Subgraph:
        """Return what the hops of `begin` drew, all of which are sampled."""
        drawn = hops.collect(allocate)
        return Subgraph(
            drawn.n_id,
            drawn.edge_index,
            drawn.indptr,
            drawn.num_sampled_nodes[0],
            drawn.e_id,
            drawn.num_sampled_nodes,
            drawn.num_sampled_edges,
            edge_weight=drawn.edge_weight,
            row_scale=row_scale(state.csc, drawn) if with_row_scale and drawn.e_id is not None else None,
            averaging_weights=drawn.edge_weight is not None,
        )
