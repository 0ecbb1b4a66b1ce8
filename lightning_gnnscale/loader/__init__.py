"""How to iterate: target order, the walk over parts, preparation ahead of training."""

from .buffer_pool import BufferPool
from .neighbor_loader import NeighborLoader
from .part_loader import PartLoader
from .part_walk import PartWalk, WholeGraph, parts_of_rank
from .seed_order import core_targets, longest_rank, split_targets

__all__ = [
    "BufferPool",
    "NeighborLoader",
    "PartLoader",
    "PartWalk",
    "WholeGraph",
    "core_targets",
    "longest_rank",
    "parts_of_rank",
    "split_targets",
]
