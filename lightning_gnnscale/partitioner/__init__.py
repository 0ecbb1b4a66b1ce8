"""Assign nodes to parts from a stream of edges."""

from . import (  # noqa: F401 (imported to be registered)
    baselines,
    grem,
    hdrf,
    ldg,
    metis,
    neighborhood_block,
    spring,
    streaming_multilevel,
    two_phase,
)
from .partition import Partitioning, partition
from .quality import PartitionQuality, evaluate_partitioning
from .registry import available_partitioners, register_partitioner

__all__ = [
    "PartitionQuality",
    "Partitioning",
    "available_partitioners",
    "evaluate_partitioning",
    "partition",
    "register_partitioner",
]
