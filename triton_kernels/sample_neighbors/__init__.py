"""Fan-out neighbour sampling over a CSC, uniform or with a preference for a set of nodes."""

from .hops import SplitRows, split_range, split_rows
from .op import HopSampling, SampledNeighbors, Workspace, check_fanouts, sample_neighbors

__all__ = [
    "HopSampling",
    "SampledNeighbors",
    "SplitRows",
    "Workspace",
    "check_fanouts",
    "sample_neighbors",
    "split_range",
    "split_rows",
]
