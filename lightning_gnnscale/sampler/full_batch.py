"""A whole part as one batch."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..graph import CSC
from ..triton_kernels.sample_neighbors import Workspace
from .neighbor import check_direction
from .protocol import Allocate, Subgraph


class WholePart(NamedTuple):
    """A part as `FullBatchSampler` reads it."""

    csc: CSC
    num_core: int


@dataclass(frozen=True)
class FullBatchSampler:
    """Take a part as one batch: core nodes first, then the halo; every node is a target of arcs.

    The loss goes over the core nodes in the train mask: `batch_size` is the number of core nodes.

    Args:
        direction: "in" follows arcs to their sources; "both" also backwards.
    """

    direction: str = "in"

    def __post_init__(self):
        check_direction(self.direction)

    def num_batches(self, num_targets: int, batch_size: int, drop_last: bool) -> int:
        return int(num_targets > 0)

    def prepare(self, part: Any, targets: np.ndarray, seed: int) -> WholePart:
        return WholePart(part.csc, part.num_core)

    def items(self, state: WholePart, batch_size: int, drop_last: bool, order_key: int | None) -> list[np.ndarray]:
        return [np.arange(state.num_core)]

    def draw(
        self, state: WholePart, items: np.ndarray, key: int, workspace: Workspace, allocate: Allocate, return_e_id: bool
    ) -> Subgraph:
        csc = state.csc
        n_id = np.arange(csc.num_rows, dtype=np.int64)
        indptr = np.array(csc.indptr, np.int64)
        edge_index = allocate((2, csc.num_arcs), np.int64)
        edge_index[0] = csc.indices
        edge_index[1] = np.repeat(n_id, np.diff(indptr))
        e_id = np.arange(csc.num_arcs, dtype=np.int64) if return_e_id else None
        return Subgraph(n_id, edge_index, indptr, state.num_core, e_id)
