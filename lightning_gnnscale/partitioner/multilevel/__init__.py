"""Multilevel partitioning: of a graph in memory, and the steps that also run block by block."""

from .cycle import Effort, partition_in_memory
from .weighted_graph import WeightedGraph

__all__ = ["Effort", "WeightedGraph", "partition_in_memory"]
