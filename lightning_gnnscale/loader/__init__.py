"""Iteration: target order, the walk over parts, preparation ahead of training."""

from .batch_source import BatchKey, BatchSource
from .buffer_pool import BufferPool
from .local_source import LocalSource
from .neighbor_loader import LinkNeighborLoader, NeighborLoader
from .part_loader import LoaderOptions, PartData, PartLoader
from .part_walk import (
    Interleave,
    InterleavedWalk,
    PartShares,
    PartWalk,
    assign_targets,
    core_targets,
    longest_rank,
    parts_of_rank,
    rank_of_parts,
    split_targets,
)
from .process_source import ProcessSource
from .row_reads import HOWS, RowReads, choose_row_reads, fits_in_memory
from .shared_sweep import MachineSweeps
from .source_settings import Processes, RankPlace, SourceFactory, SourceSettings, TaskGraphs, Threads
from .sweep_choice import choose_swept
from .task_graph import Operators
from .task_source import TaskSource

__all__ = [
    "HOWS",
    "BatchKey",
    "BatchSource",
    "BufferPool",
    "Interleave",
    "InterleavedWalk",
    "LinkNeighborLoader",
    "LoaderOptions",
    "LocalSource",
    "MachineSweeps",
    "NeighborLoader",
    "Operators",
    "PartData",
    "PartLoader",
    "PartShares",
    "PartWalk",
    "ProcessSource",
    "Processes",
    "RankPlace",
    "RowReads",
    "SourceFactory",
    "SourceSettings",
    "TaskGraphs",
    "TaskSource",
    "Threads",
    "assign_targets",
    "choose_row_reads",
    "choose_swept",
    "core_targets",
    "fits_in_memory",
    "longest_rank",
    "parts_of_rank",
    "rank_of_parts",
    "split_targets",
]
