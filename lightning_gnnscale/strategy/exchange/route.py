"""Which rows leave a process in an exchange, and where those that arrive belong."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Blocks(Protocol):
    """What a DataModule says of this process's block of rows; see `BlockRows`."""

    rank: int
    world_size: int
    offsets: np.ndarray
    halo_nodes: np.ndarray
    send_rows: tuple[np.ndarray, ...]
    symmetric: bool
    edge_weight: np.ndarray | None
    num_local: int
    num_halo: int


@dataclass(frozen=True)
class Route:
    """The rows that leave a process, and the places of the rows that arrive.

    Attributes:
        rank: Rank of this process.
        boundary: (num_boundary,) int64 local rows that are sent to other processes, ascending.
        boundary_ids: (num_boundary,) int64 store ids of these rows.
        leaving: One (num,) int64 tensor per process: positions in the boundary of the rows that it is sent; empty for
            this process.
        arriving: One count per process: number of rows that come from it.
        pick: (num_halo,) int64 positions of the halo rows among the arriving rows; None: they are all arriving rows, in
            order.
        whole: Whether every process is sent all rows, so that one message serves all.
    """

    rank: int
    boundary: Tensor
    boundary_ids: Tensor
    leaving: tuple[Tensor, ...]
    arriving: tuple[int, ...]
    pick: Tensor | None
    whole: bool = False

    @property
    def num_arriving(self) -> int:
        return sum(self.arriving)

    @cached_property
    def returning(self) -> tuple[Tensor, ...]:
        """One (num,) int64 tensor a process: positions, among the rows that arrived, of those that came from it."""
        device = self.boundary.device
        return tuple(torch.arange(self.num_arriving, device=device).split(list(self.arriving)))

    @cached_property
    def readers(self) -> tuple[Tensor, ...]:
        """One (num,) int64 tensor a message: positions in the boundary of the rows in it."""
        everything = torch.arange(len(self.boundary), device=self.boundary.device)
        return (everything,) if self.whole else self.leaving

    @cached_property
    def returned(self) -> tuple[int, ...]:
        """One count a process: rows that it was sent, whose gradients it returns."""
        return tuple(len(positions) for positions in self.leaving)

    @cached_property
    def returned_rows(self) -> Tensor:
        """(num_returned,) int64: the local row that each returned gradient belongs to."""
        return self.boundary[torch.cat(self.leaving)]

    @cached_property
    def arriving_ids(self) -> Tensor:
        """(num_arriving,) int64: any numbers that distinguish the arriving rows."""
        return torch.arange(self.num_arriving, device=self.boundary.device)


def halo_route(blocks: Blocks, device: torch.device) -> Route:
    """Return the route on which each process is sent the rows that it reads.

    Args:
        blocks: Block of this process.
        device: Device of the rows.
    """
    boundary = np.unique(np.concatenate(blocks.send_rows)) if blocks.world_size > 1 else np.zeros(0, np.int64)
    owners = np.searchsorted(blocks.offsets, blocks.halo_nodes, side="right") - 1
    counts = np.bincount(owners, minlength=blocks.world_size)
    leaving = tuple(_tensor(np.searchsorted(boundary, rows), device) for rows in blocks.send_rows)
    return _route(blocks, boundary, leaving, counts, None, device)


def block_route(blocks: Blocks, device: torch.device) -> Route:
    """Return the route by which every process is sent all rows of every other."""
    boundary = np.arange(blocks.num_local)
    nothing, everything = _tensor(np.zeros(0, np.int64), device), _tensor(boundary, device)
    others = [rank for rank in range(blocks.world_size) if rank != blocks.rank]
    counts = np.diff(blocks.offsets)
    counts[blocks.rank] = 0
    # Arriving rows are those of the ranks before this one, then those after it.
    own_end, own = blocks.offsets[blocks.rank + 1], blocks.num_local
    pick = blocks.halo_nodes - np.where(blocks.halo_nodes >= own_end, own, 0)
    leaving = tuple(everything if rank in others else nothing for rank in range(blocks.world_size))
    return _route(blocks, boundary, leaving, counts, _tensor(pick, device), device, whole=True)


def _route(blocks, boundary, leaving, counts, pick, device, whole=False) -> Route:
    first = int(blocks.offsets[blocks.rank])
    return Route(
        rank=blocks.rank,
        boundary=_tensor(boundary, device),
        boundary_ids=_tensor(boundary + first, device),
        leaving=leaving,
        arriving=tuple(int(count) for count in counts),
        pick=pick,
        whole=whole,
    )


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device)
